"""The gradient of every accepted (mode, loss, correction, mini-batches) is the definition's.

A step of the learner runs on a tabular policy and a batch of all sequences, each weighted by its
chance under the sampler, so that its gradients are expectations. Every update of a step is compared
with the definitions of `tabular`, in float64, at that update's weights: of two mini-batches the
first is at the weights that sampled and the second where the first update has led.

`python tests/corrections/test_modes.py` writes the table of accepted combinations into
docs/corrections.md.
"""

import itertools
import pathlib
import re
from dataclasses import replace
from functools import cache
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tabular
from tabular import CORRECTIONS, LOSSES, REFERENCE, SAMPLER, TRAINER, Batch, keeping

from tim_jax import corrections
from tim_jax.common.errors import InputError
from tim_jax.objectives import Objective, losses
from tim_jax.rl import learner
from tim_jax.rl.learner import experience
from tim_jax.rl.types import Learning, TrainState, mini_batch

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "corrections.md"
BEGIN, END = "<!-- accepted: begin -->\n", "<!-- accepted: end -->"
MODES = ("bypass", "recompute")
STEP = 0.7  # of plain gradient descent: far enough that masks and clips set in at once
WORTH = np.random.default_rng(5).standard_normal(tabular.ROWS)


def accepted(mode: str, loss: str, name: str) -> bool:
    """Whether the rule of `corrections.stages` lets the combination through."""
    weights = "tis" in name or name in ("icepop", "vexact", "sequence_mis", "kpop", "ais")
    return not (mode == "bypass" and weights and loss != "reinforce")


def learning_of(mode, loss, name, **options) -> Learning:
    """Rewards are the advantages, so that each sequence's weight can be put into them."""
    settings = {"aggregation": "sequence_mean_token_sum", "max_length": tabular.LONGEST, **options}
    if loss in losses.SELECTIONS:
        settings["loss_options"] = {"share": 0.2} | ({"lower": -0.5} if loss == "clip_cov" else {})
    if loss == "cispo":
        settings["clip_high"] = 0.3
    objective = Objective(estimator="reinforce", loss=loss, **settings)
    correction = corrections.build(CORRECTIONS[name][0])
    return Learning(objective, 1, mode=mode, correction=correction)


def rewards() -> np.ndarray:
    """f64[B], a sequence's worth times its chance under the sampler, in units of one sequence."""
    sampled = tabular.chances(tabular.log_probs_of(SAMPLER))
    return (WORTH * sampled * tabular.ROWS).astype(np.float32).astype(np.float64)


def updates_of(learning: Learning, *, mini_batches=2, reference=None):
    """(weights, gradient, metrics) of every update of a step."""
    params = {"table": jnp.asarray(TRAINER)}
    optimizer = keeping(STEP)
    state = TrainState(
        params,
        optimizer.init(params),
        cast(tuple, learning.correction.init(params)),
        jnp.int32(0),
        jnp.int32(0),
    )
    known = None if reference is None else {"table": jnp.asarray(reference)}
    policy = tabular.policy(learning)
    rollout = tabular.rollout(SAMPLER)
    worth = jnp.asarray(rewards(), jnp.float32)
    ready = experience(
        params, known, state.carried, rollout, worth, score=policy.score, learning=learning
    )
    state = replace(state, **ready.carried._asdict())
    found = []
    for index in range(mini_batches):
        part = mini_batch(ready.experience, jnp.int32(index), count=mini_batches)
        before = np.asarray(state.params["table"])
        state, _, report = learner.update(
            state,
            state.params,
            part,
            jnp.float32(1.0),
            policy=policy,
            learning=learning,
            optimizer=optimizer,
        )
        metrics = {name: float(value) for name, value in report.metrics.items()}
        found.append((before, np.asarray(cast(Any, state.optimizer)["table"]), metrics))
    return found


def batch_at(logits, mode) -> Batch:
    rollout = np.asarray(tabular.rollout(SAMPLER).log_probs, np.float64)
    old = tabular.log_probs_of(TRAINER) if mode == "recompute" else rollout
    return Batch(tabular.mask(), tabular.log_probs_of(logits), old, rollout, rewards())


def corrected(name: str, mode: str, whole: Batch, part: Batch, rows):
    """(coefficients, kept) of an update's rows: by its own log-probs, or by the step's."""
    formula = CORRECTIONS[name][1]
    current = mode == "bypass" or name in ("dppo", "off_policy_sequence_mask")
    if current:
        return formula(part.now - part.rollout, part.now, part)
    coefficients, kept = formula(whole.old - whole.rollout, whole.old, whole)
    return coefficients[rows], kept[rows]


def selection(loss: str, learning: Learning, logits, rows, kept):
    """The tokens that a covariance loss treats apart. Their choice has tests of its own.

    It reads the bits of log-probs, so it is given the learner's.
    """
    if loss not in losses.SELECTIONS:
        return None
    rollout = tabular.rollout(SAMPLER)

    def log_probs(table):
        return tabular.score({"table": jnp.asarray(table, jnp.float32)}, rollout).log_probs

    old = log_probs(TRAINER) if learning.mode == "recompute" else rollout.log_probs
    worth = jnp.asarray(rewards(), jnp.float32)
    return learning.objective.select(
        log_probs(logits)[rows], old[rows], worth[rows], mask=rollout.mask[rows] & kept
    )


def definition(logits, learning: Learning, loss, name, *, index, mini_batches, extra=None):
    """The gradient of an update in float64."""
    mode, size = learning.mode, tabular.ROWS // mini_batches
    rows = slice(index * size, (index + 1) * size)
    whole = batch_at(logits, mode)
    part = whole.rows(rows)
    coefficients, kept = corrected(name, mode, whole, part, rows)
    objective = learning.objective
    weights = tabular.token_weights(part, kept, objective.aggregation, objective.denominator)
    chosen = selection(loss, learning, logits, rows, kept)
    left = replace(part, mask=part.mask & kept)

    def surrogate(moved):
        tokens = coefficients * LOSSES[loss](tabular.log_probs_of(moved)[rows], left, chosen)
        terms = 0.0 if extra is None else np.where(kept, extra(moved)[rows], 0.0)
        return np.where(part.mask, weights * (tokens + terms), 0.0).sum()

    return tabular.derivative(surrogate, logits)


@cache
def known_updates(mode, loss, name, mini_batches=2, **options):
    """Of a step that several tests look at."""
    return updates_of(learning_of(mode, loss, name, **options), mini_batches=mini_batches)


def check(mode, loss, name, *, mini_batches=2, **options):
    learning = learning_of(mode, loss, name, **options)
    found = known_updates(mode, loss, name, mini_batches, **options)
    expected = [
        definition(logits, learning, loss, name, index=index, mini_batches=mini_batches)
        for index, (logits, *_) in enumerate(found)
    ]
    scale = max(np.abs(gradient).max() for gradient in expected)
    assert scale > 1e-3
    for (_, gradient, metrics), right in zip(found, expected, strict=True):
        assert metrics["skipped"] == 0.0
        np.testing.assert_allclose(gradient, right, rtol=0.0, atol=1e-6 * scale)
    return found


def combinations() -> list[tuple[str, str, str]]:
    every = itertools.product(MODES, LOSSES, CORRECTIONS)
    return [one for one in every if accepted(*one)]


def each_once() -> list[tuple[str, str, str]]:
    """Every correction with one loss, and every loss with one correction."""
    return [
        (mode, loss, name)
        for mode, loss, name in combinations()
        if loss == "reinforce" or name == "geometric_rejection"
    ]


@pytest.mark.parametrize(
    ("mode", "loss", "name"), quick.some(combinations(), *map(combinations().index, each_once()))
)
def test_the_gradient_of_every_update_is_the_definitions(mode, loss, name):
    check(mode, loss, name)


@pytest.mark.slow
@pytest.mark.parametrize("mini_batches", [1, 4])
@pytest.mark.parametrize(("mode", "loss", "name"), each_once())
def test_so_it_is_with_one_update_and_with_four(mode, loss, name, mini_batches):
    check(mode, loss, name, mini_batches=mini_batches)


@pytest.mark.slow
def test_micro_batches_and_a_measured_noise_change_no_gradient():
    for mode, loss, name in (
        ("bypass", "reinforce", "token_tis, normalise"),
        ("bypass", "kl_cov", "token_k3"),
        ("recompute", "gspo", "kpop"),
    ):
        whole = learning_of(mode, loss, name)
        for changes in ({"micro_batch": 2}, {"micro_batch": 4, "noise_scale": True}):
            parts = updates_of(replace(whole, **changes))
            for (_, ours, _), (_, theirs, _) in zip(parts, updates_of(whole), strict=True):
                scale = np.abs(theirs).max()
                np.testing.assert_allclose(ours, theirs, atol=1e-5 * scale)


def test_a_running_mean_is_that_of_the_updates_before():
    entries = [{"name": "token_tis", "cap": 1.5}, {"name": "normalise_by_running_mean", "decay": 0}]
    objective = Objective("reinforce", "reinforce", aggregation="sequence_mean_token_sum")
    learning = Learning(objective, 1, correction=corrections.build(entries))
    plain = learning_of("bypass", "reinforce", "token_tis")
    mean = 1.0
    for index, (logits, gradient, _) in enumerate(updates_of(learning)):
        options = {"index": index, "mini_batches": 2}
        expected = definition(logits, plain, "reinforce", "token_tis", **options) / mean
        np.testing.assert_allclose(gradient, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())
        part = batch_at(logits, "bypass").rows(slice(8 * index, 8 * index + 8))
        coefficients, _ = CORRECTIONS["token_tis"][1](part.now - part.rollout, part.now, part)
        mean = coefficients[part.mask].mean()


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"reinforce", "sapo", "kl_cov"}))
def test_the_losses_do_clip_in_these_steps(loss):
    found = [known_updates(mode, loss, "none") for mode in MODES]
    shares = [
        metrics[f"loss/clipped_{side}_share"]
        for *_, metrics in itertools.chain(*found)
        for side in ("low", "high")
    ]
    assert max(shares) > 0


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - {"none"}))
@pytest.mark.parametrize("mode", MODES)
def test_the_corrections_do_correct_in_these_steps(mode, name):
    found = known_updates(mode, "reinforce", name)
    assert any(
        metrics["correction/coefficient_std"] > 0 or metrics["correction/zero_share"] > 0
        for *_, metrics in found
    )


@pytest.mark.parametrize(
    ("denominator", "aggregation"),
    quick.pairs(
        ["response", "survivors", "verl"],
        ["token_mean", "sequence_mean_token_mean", "constant_length"],
    ),
)
@pytest.mark.parametrize("name", ["geometric_rejection", "token_k3"])
@pytest.mark.parametrize("mode", MODES)
def test_rejections_leave_the_denominator_of_their_own_mini_batch(
    mode, name, denominator, aggregation
):
    options = {"aggregation": aggregation, "denominator": denominator}
    found = check(mode, "clip", name, **options)
    assert any(metrics["correction/removed_share"] > 0 for *_, metrics in found)


@pytest.mark.parametrize("mode", MODES)
def test_kl_and_entropy_terms_leave_out_rejected_tokens(mode):
    name, options = "geometric_rejection", {"kl_coefficient": 0.3, "kl_estimator": "k2"}
    learning = learning_of(mode, "clip", name, entropy_coefficient=0.2, **options)
    reference = tabular.log_probs_of(REFERENCE)

    def extra(moved):
        kl = 0.5 * (tabular.log_probs_of(moved) - reference) ** 2
        return 0.3 * kl - 0.2 * tabular.entropies_of(moved)

    for index, (logits, gradient, _) in enumerate(updates_of(learning, reference=REFERENCE)):
        options = {"index": index, "mini_batches": 2, "extra": extra}
        expected = definition(logits, learning, "clip", name, **options)
        np.testing.assert_allclose(gradient, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("mode", "loss"), [("recompute", "clip"), ("recompute", "reinforce")])
def test_a_correction_of_the_mismatch_is_taken_once_a_step(mode, loss):
    """On the weights that sampled, in every update: it does not follow the policy."""
    first, second = known_updates(mode, loss, "token_tis")
    whole = batch_at(TRAINER, mode)
    shares = [
        (np.exp(whole.old - whole.rollout) > 1.5)[rows][whole.mask[rows]].mean()
        for rows in (slice(0, 8), slice(8, 16))
    ]
    for (*_, metrics), share in zip((first, second), shares, strict=True):
        assert metrics["correction/clipped_high_share"] == pytest.approx(share)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["dppo", "off_policy_sequence_mask"])
def test_what_is_defined_on_the_current_policy_follows_it(mode, name):
    _, (logits, _, metrics) = known_updates(mode, "clip", name)
    share = {}
    for what, at in (("current", logits), ("sampled", TRAINER)):
        part = batch_at(at, mode).rows(slice(8, 16))
        coefficients, _ = CORRECTIONS[name][1](part.now - part.rollout, part.now, part)
        share[what] = (coefficients[part.mask] == 0).mean()
    assert share["current"] != share["sampled"]
    assert metrics["correction/zero_share"] == pytest.approx(share["current"])


@pytest.mark.parametrize(("mode", "loss"), itertools.product(MODES, LOSSES))
def test_whole_sequence_weights_give_the_true_policy_gradient(mode, loss):
    """At the weights that sampled, where every loss's own ratio is 1 or (bypass) takes part."""
    if mode == "bypass" and loss != "reinforce":
        pytest.skip("the ratio would count twice: refused")
    if loss == "clip_cov":
        pytest.skip("a clip of chosen tokens is biased by definition")
    correction = corrections.scale_by_ratio("sequence")
    objective = Objective("reinforce", loss, aggregation="sequence_mean_token_sum")
    learning = Learning(objective, 1, mode=mode, correction=correction)
    ((_, gradient, _),) = updates_of(learning, mini_batches=1)

    def expected_worth(logits):
        return -(tabular.chances(tabular.log_probs_of(logits)) * WORTH).sum()

    expected = tabular.derivative(expected_worth, TRAINER) * tabular.ROWS / 15
    np.testing.assert_allclose(gradient, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


def effects_of(name: str) -> corrections.Correction:
    required = {
        "trust_region_masking": {"bound": 0.05},
        "scale_by_truncated_ratio": {"upper": 2.0},
        "mask_outside": {"upper": 2.0},
        "mask_probability_difference": {"upper": 0.2},
        "reject": {"statistic": "k3", "over": "mean", "upper": 0.1},
        "mix_in_adaptively": {"upper": 2.0},
    }
    return corrections.build([{"name": name, **required.get(name, {})}])


def cell(correction, mode, loss) -> str:
    """What happens to a correction in a mode with a loss."""
    try:
        Learning(Objective("reinforce", loss), 1, mode=mode, correction=correction)
    except InputError:
        return "refused"
    stages = corrections.stages(correction, mode)
    if not correction.blocks:
        return "-"
    return "pi / mu, every update" if stages.update.blocks else "pi_old / mu, once a step"


def accepted_table() -> str:
    """The table of docs/corrections.md: every correction by mode and loss, as the library acts."""
    kinds = {"clip": "losses with a ratio", "reinforce": "`reinforce`"}
    with_ratio = [loss for loss in LOSSES if losses.uses_ratio(loss)]
    lines = [
        f"Losses with a ratio: {', '.join(f'`{loss}`' for loss in with_ratio)}.",
        "",
        "| correction | what it does | recompute, any loss | bypass, losses with a ratio"
        " | bypass, `reinforce` |",
        "|---|---|---|---|---|",
    ]
    for name in (*corrections.RECIPES, *corrections.BLOCKS):
        correction = effects_of(name)
        effects = ", ".join(dict.fromkeys(block.effect for block in correction.blocks)) or "-"
        for mode in MODES:
            same = {cell(correction, mode, loss) for loss in with_ratio}
            assert len(same) == 1, (name, mode)
        anywhere = {cell(correction, "recompute", loss) for loss in kinds}
        assert len(anywhere) == 1, name
        row = (anywhere.pop(), *(cell(correction, "bypass", loss) for loss in kinds))
        lines.append(f"| `{name}` | {effects} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def documented() -> str:
    found = re.search(re.escape(BEGIN) + "(.*?)" + re.escape(END), DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_docs_have_the_table_of_accepted_combinations():
    assert documented() == accepted_table(), "run: python tests/corrections/test_modes.py"


def test_the_definitions_cover_every_loss_and_every_effect():
    assert set(LOSSES) == set(losses.LOSSES)
    effects = set()
    for entries, _ in CORRECTIONS.values():
        effects |= corrections.build(entries).effects
    assert effects == {"weight", "scale", "mask", "reject"}


@pytest.mark.parametrize(("mode", "loss"), itertools.product(MODES, LOSSES))
def test_what_would_count_the_ratio_twice_is_refused_and_nothing_else(mode, loss):
    for name in CORRECTIONS:
        if accepted(mode, loss, name):
            learning_of(mode, loss, name)
        else:
            with pytest.raises(InputError, match=r"twice.*recompute.*reinforce"):
                learning_of(mode, loss, name)


if __name__ == "__main__":
    before, rest = DOCS.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(before + BEGIN + accepted_table() + END + after)
