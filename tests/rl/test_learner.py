"""Rollouts to gradients: exactness on policy, and gradients against the float64 reference."""

import itertools
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from reference import reference_log_probs

from tim_jax import corrections, objectives, optimizers
from tim_jax.common.errors import InputError, MismatchError, NonFiniteError
from tim_jax.model.execution import Execution
from tim_jax.numerics import Numerics
from tim_jax.policy import scoring
from tim_jax.rl import learner, loop
from tim_jax.rl.types import Carried, Learning, TrainState, exactness, mini_batch

UNTIED = replace(tiny.EXECUTION, config=tiny.UNTIED)
BF16 = replace(tiny.EXECUTION, numerics=tiny.BF16)
ONE_LAYER = replace(tiny.CONFIG, num_layers=1)
GRPO = objectives.grpo()
OPTIMIZER = optimizers.adamw(optimizers.Rate(1e-2), weight_decay=0.1)


EXACTNESS = jax.jit(exactness)


def keep_gradient():
    """An optimiser that moves nothing and whose state is the last gradient."""

    def update(updates, state, params=None, **extra):
        del state, params, extra
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


@cache
def updater(execution=tiny.EXECUTION, learning=Learning(GRPO, tiny.GROUP), optimizer=None):  # noqa: B008
    """Jitted (params, optimizer state, experience) -> (state, weights, report)."""
    transform = optimizer or keep_gradient()

    @jax.jit
    def run(params, batch):
        state = TrainState(
            params,
            transform.init(params),
            learning.correction.init(params),
            jnp.int32(0),
            jnp.int32(0),
        )
        return learner.update(
            state,
            execution.prepare(params),
            batch,
            jnp.float32(5.0),
            policy=tiny.policy(execution, learning),
            learning=learning,
            optimizer=transform,
        )

    return run


def gradient(params, batch, execution=tiny.EXECUTION, learning=None):
    """(gradient with respect to the masters, report)."""
    learning = learning or Learning(GRPO, tiny.GROUP)
    state, _, report = updater(execution, learning)(params, batch)
    return state.optimizer, report


@cache
def preparer(execution):
    return jax.jit(execution.prepare)


@cache
def experiencer(execution, learning):
    score = tiny.policy(execution, learning).score
    return jax.jit(partial(learner.experience, score=score, learning=learning))


def experience(
    rollout,
    rewards,
    *,
    execution=tiny.EXECUTION,
    learning=None,
    params=None,
    reference=None,
    fix=None,
):
    """The experience at `params` (default: those that sampled) and what its forward compared."""
    learning = learning or Learning(GRPO, tiny.GROUP)
    if fix is not None:
        learning = replace(learning, correction=fix)
    prepare = preparer(execution)
    weights = prepare(tiny.params(execution.config) if params is None else params)
    reference = None if reference is None else prepare(reference)
    carried = Carried(learning.correction.init(weights))
    prepared = experiencer(execution, learning)(weights, reference, carried, rollout, rewards)
    return prepared.experience, prepared.exactness


def batch_of(execution=tiny.EXECUTION, learning=None, reference=None, rewards=None, fix=None):
    """Of the execution's own rollout; a reference policy, if there is one, is itself by default."""
    learning = learning or Learning(GRPO, tiny.GROUP)
    if learning.objective.kl_coefficient and reference is None:
        reference = tiny.params(execution.config)
    rewards = tiny.rewards() if rewards is None else rewards
    batch, _ = experience(
        tiny.rollout(execution),
        rewards,
        execution=execution,
        learning=learning,
        reference=reference,
        fix=fix,
    )
    return batch


# On policy


@pytest.mark.parametrize("mode", ["bypass", "recompute"])
def test_on_policy_every_ratio_is_one_and_every_token_exact(mode):
    learning = Learning(GRPO, tiny.GROUP, mode=mode)
    rollout, start = tiny.rollout(), tiny.params()
    batch, checked = experience(rollout, tiny.rewards(), learning=learning, reference=start)
    # The update knows no mode; this one is compiled once for all tests.
    _, report = gradient(start, batch)
    tokens = int(rollout.lengths.sum())
    assert 0 < tokens < rollout.log_probs.size
    assert len(set(rollout.lengths.tolist())) > 2
    for found in [report.exactness] + ([checked] if mode == "recompute" else []):
        assert (int(found.compared), int(found.unequal)) == (tokens, 0)
        assert float(found.max_difference) == float(found.mean_difference) == 0.0
    assert float(report.metrics["loss/ppo_ratio_mean"]) == 1.0
    assert float(report.metrics["loss/ppo_ratio_max"]) == 1.0
    assert float(report.metrics["loss/reference_kl"]) == 0.0
    assert float(report.metrics["loss/clipped_low_share"]) == 0.0
    assert float(report.metrics["loss/clipped_high_share"]) == 0.0
    assert float(report.metrics["tokens"]) == tokens
    assert checked is None or mode == "recompute"


def test_native_numerics_run_the_same_update_and_the_comparison_sees_them():
    native = Execution(ONE_LAYER, Numerics(family="native", kv_block=16), tiny.SAMPLING)
    batch = batch_of(native)
    _, report = gradient(tiny.params(ONE_LAYER), batch, execution=native)
    assert 0 < int(report.exactness.unequal) <= int(report.exactness.compared)
    assert 0 < float(report.exactness.max_difference) < 1e-4


@pytest.mark.slow
def test_micro_batches_of_an_untied_model_give_the_same_gradient():
    """Its embedding and head have sums of their own, which every micro-batch adds to."""
    params, batch = tiny.params(tiny.UNTIED), batch_of(UNTIED)
    whole, _ = gradient(params, batch, UNTIED)
    parts, _ = gradient(params, batch, UNTIED, Learning(GRPO, tiny.GROUP, micro_batch=3))
    for name in ("embed", "head"):
        tiny.check_near(parts[name], whole[name], 1e-5)


def test_micro_batches_give_the_same_log_probs_and_the_same_gradient():
    reference = tiny.moved(tiny.params())
    batch = batch_of(reference=reference)
    whole, report = gradient(tiny.params(), batch)
    learning = Learning(GRPO, tiny.GROUP, micro_batch=3)
    parts, parts_report = gradient(tiny.params(), batch, learning=learning)
    assert int(report.exactness.unequal) == int(parts_report.exactness.unequal) == 0
    tiny.check_near(parts, whole, 1e-5)
    for name, value in report.metrics.items():
        assert np.allclose(parts_report.metrics[name], value, rtol=1e-5, atol=1e-6), name


def test_forward_by_micro_batches_has_the_bits_of_the_whole():
    """The whole is the forward of the recompute mode, which has the sampler's bits, see above."""
    rollout = tiny.rollout()
    score = partial(scoring.score, execution=tiny.EXECUTION)
    run = jax.jit(partial(learner.score_rows, score, micro_batch=4))
    log_probs, _ = run(tiny.weights(), rollout)
    same = np.asarray(log_probs).view(np.int32) == np.asarray(rollout.log_probs).view(np.int32)
    assert same[np.asarray(rollout.mask)].all()


@pytest.mark.slow
def test_truncated_sampling_is_replayed_exactly():
    sampling = replace(tiny.SAMPLING, temperature=0.8, top_k=6, top_p=0.9)
    execution = replace(tiny.EXECUTION, sampling=sampling)
    batch = batch_of(execution)
    _, report = gradient(tiny.params(), batch, execution=execution)
    assert int(report.exactness.compared) == int(batch.rollout.lengths.sum())
    assert int(report.exactness.unequal) == 0
    # It was at work: the full distribution gives these tokens other log-probs.
    full = replace(execution, sampling=replace(sampling, top_k=0, top_p=1.0))
    score = jax.jit(partial(scoring.score, execution=full))
    other = score(jax.jit(execution.prepare)(tiny.params()), batch.rollout).log_probs
    assert (np.asarray(batch.rollout.log_probs) >= np.asarray(other))[batch.rollout.mask].all()
    assert np.abs(batch.rollout.log_probs - other)[batch.rollout.mask].max() > 0.05


# What `exactness` finds


def one_ulp(rollout, row, position):
    value = np.asarray(rollout.log_probs)[row, position]
    return replace(
        rollout,
        log_probs=rollout.log_probs.at[row, position].set(np.nextafter(value, np.float32(-1e9))),
    )


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_one_ulp_in_one_token_is_found_and_named(micro_batch):
    true = tiny.rollout()
    row, position = int(np.flatnonzero(np.asarray(true.lengths) > 2)[-1]), 2
    assert row > 6
    changed = one_ulp(true, row, position)
    batch, _ = experience(changed, tiny.rewards(), reference=tiny.moved(tiny.params()))
    learning = Learning(GRPO, tiny.GROUP, micro_batch=micro_batch)
    _, report = gradient(tiny.params(), batch, learning=learning)
    found = jax.device_get(report.exactness)
    assert (int(found.unequal), found.first.tolist()) == (1, [row, position])
    ours, theirs = true.log_probs[row, position], changed.log_probs[row, position]
    assert found.values.tolist() == [float(ours), float(theirs)]
    assert found.max_difference == abs(ours - theirs) > 0
    np.testing.assert_allclose(
        found.mean_difference * found.compared, abs(ours - theirs), rtol=1e-5
    )
    with pytest.raises(MismatchError) as caught:
        loop.check_exact(found, 12)
    message = str(caught.value)
    assert "\n" not in message
    compared = int(true.lengths.sum())
    for part in (
        "step 12",
        f"1 of {compared}",
        f"sequence {row}",
        f"position {position}",
        repr(float(ours)),
        repr(float(theirs)),
        float(theirs).hex(),
    ):
        assert part in message


def test_a_difference_beyond_the_response_is_none():
    rollout = tiny.rollout()
    row = int(np.argmin(rollout.lengths))
    place = int(rollout.lengths[row])
    assert place < rollout.log_probs.shape[1]
    log_probs = rollout.log_probs.at[row, place].set(jnp.nan)
    found = EXACTNESS(log_probs, rollout)
    assert int(found.unequal) == 0
    loop.check_exact(jax.device_get(found), 1)


def test_a_value_that_is_not_a_number_is_not_exact_though_its_bits_are_equal():
    rollout = tiny.rollout()
    both = rollout.log_probs.at[2, 0].set(jnp.nan)
    found = EXACTNESS(both, replace(rollout, log_probs=both))
    assert (int(found.unequal), found.first.tolist()) == (1, [2, 0])
    message = "step 7: 1 of .* response position 0, learner nan .*: neither is finite"
    with pytest.raises(NonFiniteError, match=message):
        loop.check_exact(jax.device_get(found), 7)
    with pytest.raises(MismatchError, match="sequence 2, response position 0, learner nan"):
        loop.check_exact(jax.device_get(EXACTNESS(both, rollout)), 7)


def test_zero_compared_tokens_are_a_failure():
    rollout = tiny.rollout()
    empty = replace(rollout, lengths=jnp.zeros_like(rollout.lengths))
    found = jax.device_get(EXACTNESS(rollout.log_probs, empty))
    assert (int(found.compared), int(found.unequal)) == (0, 0)
    with pytest.raises(MismatchError, match="no response token was compared"):
        loop.check_exact(found, 3)
    assert np.isnan(loop.exact_metrics(found)["exact_share"])


def test_merged_reports_the_comparison_that_found_something():
    rollout = tiny.rollout()
    clean = EXACTNESS(rollout.log_probs, rollout)
    short = replace(rollout, lengths=jnp.minimum(rollout.lengths, 2))
    found = EXACTNESS(rollout.log_probs, one_ulp(short, 4, 1))
    assert int(found.compared) < int(clean.compared)
    for order in ([clean, found], [found, clean]):
        assert int(loop.merged(order).unequal) == 1
    assert int(loop.merged([clean]).compared) == int(rollout.lengths.sum())


# Gradients against float64


def loss64(name, params, rollout, rewards, *, old, reference=None):
    """A preset's loss of a rollout by the definitions, from the float64 decoder.

    Off policy: `old` f64[B, R] are the denominators of the ratio. `reference` are parameters.
    """
    config = tiny.UNTIED if "head" in params else tiny.CONFIG
    groups = np.asarray(rewards, np.float64).reshape(-1, tiny.GROUP)
    advantage = groups - groups.mean(axis=1, keepdims=True)
    if name in ("grpo", "dapo", "gspo"):
        advantage /= groups.std(axis=1, ddof=1, keepdims=True) + 1e-6
    elif name == "rloo":
        advantage *= tiny.GROUP / (tiny.GROUP - 1)
    elif name == "reinforce":
        advantage = groups
    per_row, lengths = [], np.asarray(rollout.lengths)
    for row, (a, n) in enumerate(zip(advantage.reshape(-1), lengths, strict=True)):
        log_probs = row_log_probs(params, rollout, row, config)
        ratio = np.exp(log_probs - old[row, :n])
        low, high = {"dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}.get(name, (0.8, 1.2))
        if name == "gspo":
            ratio = np.full(n, np.exp((log_probs - old[row, :n]).mean()))
        loss = -np.minimum(ratio * a, np.clip(ratio, low, high) * a)
        if name in ("rloo", "reinforce"):
            loss = -a * log_probs
        if name == "grpo":
            d = log_probs - row_log_probs(reference, rollout, row, config)
            loss = loss + 0.04 * (np.exp(-d) - 1 + d)
        per_row.append(loss)
    sums = np.array([loss.sum() for loss in per_row])
    if name == "dapo":
        return sums.sum() / lengths.sum()
    if name in ("grpo", "gspo"):
        return (sums / lengths).mean()
    return sums.mean() / (tiny.SAMPLING.max_tokens if name == "dr_grpo" else 1)


def row_log_probs(params, rollout, row, config):
    """f64[length] of one response."""
    before, after = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
    prompt = np.asarray(rollout.prompts)[row, :before]
    tokens = np.concatenate([prompt, np.asarray(rollout.responses)[row, :after]])
    return reference_log_probs(params, tokens, config)[before - 1 :]


def norm_of(tree):
    leaves = jax.tree.leaves(jax.device_get(tree))
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))


def check_gradient(found, loss, params, *, step=1e-5, rtol=1e-4):
    """Central differences of a float64 loss: along the gradient, and at every leaf's largest."""
    found = jax.device_get(found)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    norm = norm_of(found)
    assert norm > 1e-4

    def slope(direction):
        def at(t):
            there = jax.tree.map(lambda p, d: np.asarray(p, np.float64) + t * d, params, direction)
            return loss(there)

        return (at(step) - at(-step)) / (2 * step)

    unit = jax.tree.map(lambda g: np.asarray(g, np.float64) / norm, found)
    assert abs(slope(unit) / norm - 1) < rtol
    leaves, structure = jax.tree.flatten(found)
    for number, leaf in enumerate(leaves):
        directions = [np.zeros(x.shape) for x in leaves]
        place = np.unravel_index(np.argmax(np.abs(leaf)), leaf.shape)
        directions[number][place] = 1.0
        expected = slope(jax.tree.unflatten(structure, directions))
        np.testing.assert_allclose(leaf[place], expected, rtol=10 * rtol, atol=1e-5 * norm)


QUICK = ("gspo",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in ("grpo", "dr_grpo", "rloo", "reinforce", "dapo", "gspo")
    ],
)
def test_gradient_of_every_objective_is_that_of_its_float64_loss(name):
    changes = {"max_length": tiny.SAMPLING.max_tokens} if name == "dr_grpo" else {}
    learning = Learning(objectives.PRESETS[name](**changes), tiny.GROUP)
    reference = tiny.moved(tiny.params(), seed=5) if name == "grpo" else None
    batch = batch_of(learning=learning, reference=reference)
    now = tiny.moved(tiny.params(), scale=0.05)
    found, report = gradient(now, batch, learning=learning)
    loss = partial(
        loss64,
        name,
        rollout=batch.rollout,
        rewards=tiny.rewards(),
        old=np.asarray(batch.old_log_probs, np.float64),
        reference=reference,
    )
    check_gradient(found, loss, now)
    np.testing.assert_allclose(report.metrics["loss"], loss(now), rtol=1e-4, atol=1e-5)
    clipped = sum(float(report.metrics[f"loss/clipped_{side}_share"]) for side in ("low", "high"))
    assert (0 < clipped < 1) == (name not in ("rloo", "reinforce"))


@pytest.mark.slow
def test_gradient_of_an_untied_head_is_that_of_the_float64_loss():
    learning = Learning(objectives.rloo(), tiny.GROUP)
    batch = batch_of(UNTIED, learning)
    start = tiny.params(tiny.UNTIED)
    found, report = gradient(start, batch, execution=UNTIED, learning=learning)
    assert int(report.exactness.unequal) == 0
    old = np.zeros(batch.old_log_probs.shape)
    loss = partial(loss64, "rloo", rollout=batch.rollout, rewards=tiny.rewards(), old=old)
    check_gradient(found, loss, start)


def test_a_reference_policy_pulls_by_its_gradient_alone():
    """With equal rewards everywhere nothing is left but the KL term."""
    flat = jnp.ones(tiny.ROWS, jnp.float32)
    other = tiny.moved(tiny.params(), scale=0.1)
    found = {}
    for name, reference in (("itself", tiny.params()), ("other", other)):
        found[name], report = gradient(tiny.params(), batch_of(reference=reference, rewards=flat))
        assert (float(report.metrics["loss/reference_kl"]) == 0) == (name == "itself")
    # d/dx (exp(-x) - 1 + x) is exactly 0 at x = 0.
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(found["itself"]))
    assert norm_of(found["other"]) > 1e-4


# What enters the gradient


def test_coefficients_scale_it():
    learning = Learning(objectives.gspo(), tiny.GROUP)
    batch = batch_of(learning=learning)
    whole, _ = gradient(tiny.params(), batch, learning=learning)
    half = replace(batch, coefficients=0.5 * batch.coefficients)
    found, _ = gradient(tiny.params(), half, learning=learning)
    halved = jax.tree.map(lambda g: np.float32(0.5) * g, jax.device_get(whole))
    assert tiny.bits(found) == tiny.bits(halved)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["token_tis", "icepop", "kpop"])
def test_corrections_of_equal_policies_leave_the_update_alone_to_the_bit(weight):
    plainly = Learning(GRPO, tiny.GROUP, mode="recompute")
    names = (weight, "geometric_rejection", "normalise", "dppo")
    fixing = replace(plainly, correction=corrections.build([{"name": name} for name in names]))
    batches = [batch_of(learning=learning) for learning in (plainly, fixing)]
    assert tiny.bits(batches[0]) == tiny.bits(batches[1])
    results = []
    for learning, batch in zip((plainly, fixing), batches, strict=True):
        run = updater(learning=learning, optimizer=OPTIMIZER)
        state, weights, _ = run(tiny.params(), batch)
        results.append(tiny.bits((state.params, state.optimizer, weights)))
    assert results[0] == results[1]
    assert results[0] != tiny.bits(tiny.params())


def test_corrections_see_trainer_over_rollout():
    """Where the rollout recorded a log-prob too low by 0.5 the ratio is e^0.5, beyond the cap."""
    fix = corrections.build([{"name": "token_tis", "cap": 1.5}])
    rollout = tiny.rollout()
    off = np.zeros(rollout.log_probs.shape, np.float32)
    off[3, 0], off[5, 0], off[8, 2] = 0.5, 0.25, -0.5
    changed = replace(rollout, log_probs=np.asarray(rollout.log_probs) - off)
    learning = Learning(GRPO, tiny.GROUP, mode="recompute", correction=fix)
    batch, checked = experience(changed, tiny.rewards(), learning=learning, reference=tiny.params())
    expected = np.minimum(np.exp(off), 1.5) * np.asarray(rollout.mask)
    np.testing.assert_allclose(batch.coefficients, expected, rtol=1e-5)
    assert int(checked.unequal) == 3
    mask = np.asarray(rollout.mask)
    np.testing.assert_array_equal(batch.old_log_probs[mask], rollout.log_probs[mask])


IN_THE_LOSS = {
    "row by row": ("rloo", [{"name": "vexact", "bound": 0.5}], {}),
    "on all rows": ("rloo", [{"name": "token_tis"}, {"name": "normalise"}], {}),
    "current policy": ("dapo", [{"name": "dppo"}, {"name": "k3_rejection"}], {}),
    "denominator": ("dapo", [{"name": "k3_rejection"}], {"denominator": "survivors"}),
    "chosen tokens": ("dapo", [], {"loss": "kl_cov", "clip_high": None}),
}


def _cases():
    """Every case once, one after the other in bfloat16 and in float32."""
    for case, numerics in zip(IN_THE_LOSS, itertools.cycle([tiny.BF16, tiny.NUMERICS])):
        marks = () if case == "row by row" else (pytest.mark.slow,)
        yield pytest.param(case, numerics, marks=marks, id=f"{case}-{numerics.compute_dtype}")


@pytest.mark.parametrize(("case", "numerics"), _cases())
def test_what_an_update_evaluates_changes_no_bit_of_its_log_probs(case, numerics):
    preset, entries, changes = IN_THE_LOSS[case]
    execution = replace(tiny.EXECUTION, numerics=numerics)
    learning = Learning(
        objectives.PRESETS[preset](**changes),
        tiny.GROUP,
        correction=corrections.build(entries),
        micro_batch=4,
    )
    batch, checked = experience(
        tiny.rollout(execution), tiny.rewards(), execution=execution, learning=learning
    )
    assert checked is None
    state, report = gradient(tiny.params(), batch, execution, learning)
    assert int(report.exactness.compared) == int(batch.rollout.lengths.sum()) > 50
    assert int(report.exactness.unequal) == 0
    assert np.any(np.asarray(state["embed"]))
    if entries:  # on policy every coefficient is 1
        assert float(report.metrics["correction/coefficient_min"]) == 1.0
        assert float(report.metrics["correction/coefficient_max"]) == 1.0


def test_recompute_mode_takes_the_old_log_probs_from_the_learner():
    rollout = tiny.rollout()
    changed = replace(rollout, log_probs=rollout.log_probs - 0.5)
    learning = Learning(GRPO, tiny.GROUP, mode="recompute")
    batch, checked = experience(changed, tiny.rewards(), learning=learning, reference=tiny.params())
    mask = np.asarray(rollout.mask)
    assert (np.asarray(batch.old_log_probs) == np.asarray(rollout.log_probs))[mask].all()
    assert int(checked.unequal) == int(checked.compared) == mask.sum()


DROPPING = Learning(objectives.gspo(drop_uninformative=True), tiny.GROUP)


def test_groups_without_a_signal_are_left_out():
    rewards = tiny.rewards().at[: tiny.GROUP].set(0.25)
    batch = batch_of(learning=DROPPING, rewards=rewards)
    rollout = batch.rollout
    lengths = np.asarray(rollout.lengths)
    assert not np.asarray(batch.mask)[: tiny.GROUP].any()
    np.testing.assert_array_equal(np.asarray(batch.mask)[tiny.GROUP :].sum(axis=1), lengths[4:])
    found, report = gradient(tiny.params(), batch, learning=DROPPING)
    assert float(report.metrics["tokens"]) == lengths[4:].sum()
    # They still count as compared, and what they hold does not matter.
    assert int(report.exactness.compared) == lengths.sum()
    other = replace(rollout, responses=rollout.responses.at[: tiny.GROUP].set(0))
    again, _ = gradient(tiny.params(), replace(batch, rollout=other), learning=DROPPING)
    assert tiny.bits(again) == tiny.bits(found)
    kept = batch_of(learning=Learning(objectives.gspo(), tiny.GROUP), rewards=rewards)
    assert np.asarray(kept.mask).sum() == lengths.sum()


@pytest.mark.slow
def test_a_batch_without_any_signal_moves_nothing():
    for reward in (0.0, 1.0):
        flat = jnp.full(tiny.ROWS, reward, jnp.float32)
        batch = batch_of(learning=DROPPING, rewards=flat)
        run = updater(learning=DROPPING, optimizer=optimizers.adamw(optimizers.Rate(1e-2)))
        state, weights, report = run(tiny.params(), batch)
        assert tiny.bits(state.params) == tiny.bits(tiny.params())
        assert tiny.bits(weights) == tiny.bits(jax.jit(tiny.EXECUTION.prepare)(tiny.params()))
        assert all(np.isfinite(value) for value in report.metrics.values())
        assert float(report.metrics["loss"]) == float(report.metrics["gradient_norm"]) == 0.0
        assert int(report.exactness.unequal) == 0 < int(report.exactness.compared)


# Mini-batches, micro-batches and dtypes


def test_mini_batches_are_whole_and_cover_every_row_once():
    batch = batch_of()
    part = jax.jit(partial(mini_batch, count=3))
    parts = [part(batch, jnp.int32(i)) for i in range(3)]
    joined = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    assert tiny.bits(joined) == tiny.bits(batch)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: mini_batch(batch_of(), jnp.int32(0), count=5),
            "5 mini-batches must divide the 12",
        ),
        (
            lambda: gradient(
                tiny.params(), batch_of(), learning=Learning(GRPO, tiny.GROUP, micro_batch=5)
            ),
            "micro_batch.* 12 .*got 5",
        ),
        (lambda: Learning(GRPO, tiny.GROUP, micro_batch=0), "micro_batch must be positive, got 0"),
        (lambda: Learning(GRPO, 1), "samples = 1: must be 2 or more"),
    ],
    ids=["mini-batches", "micro-batches", "none", "group of one"],
)
def test_sizes_that_do_not_fit_are_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


def repeated(batch, row, count):
    """One row's experience, `count` times."""
    return jax.tree.map(lambda x: jnp.repeat(x[row : row + 1], count, axis=0), batch)


@pytest.mark.slow
def test_bfloat16_gradients_of_micro_batches_are_summed_in_float32():
    """64 equal micro-batches of weight 1/64: every partial sum of bfloat16 values has at most 14
    bits, so in float32 the whole is that of 2 of weight 1/2 to the bit; a sum in bfloat16 would
    stall. Two, not one: a loop of micro-batches and a program of one are two compilations."""
    learning = Learning(objectives.reinforce(), 1, micro_batch=1)
    batch, _ = experience(tiny.rollout(BF16), tiny.rewards(), execution=BF16, learning=learning)
    row = int(np.argmax(np.asarray(batch.rollout.lengths)))
    few, report = gradient(tiny.params(), repeated(batch, row, 2), BF16, learning)
    many, _ = gradient(tiny.params(), repeated(batch, row, 64), BF16, learning)
    assert int(report.exactness.unequal) == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(many)} == {jnp.dtype("float32")}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        ours, theirs = many["layers"][name], few["layers"][name]
        assert float(jnp.abs(theirs).max()) > 1e-4, name
        assert tiny.bits(ours) == tiny.bits(theirs), name
    for ours, theirs in zip(jax.tree.leaves(many), jax.tree.leaves(few), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_bfloat16_gradient_is_near_that_of_float32():
    """At small weights: with steep logits the rounding of the weights alone moves it by 15%."""
    learning = Learning(objectives.rloo(), tiny.GROUP)
    batch = batch_of(learning=learning)
    start = jax.tree.map(
        lambda p: (0.5 * p).astype(jnp.bfloat16).astype(jnp.float32), tiny.params()
    )
    exact, _ = gradient(start, batch, learning=learning)
    found, _ = gradient(start, batch, BF16, learning)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert 1e-4 < error < 0.05


@pytest.mark.slow
def test_bfloat16_gradient_of_a_frequent_token_is_summed_in_float32():
    """All tokens are one: its embedding's gradient has as many terms as there are tokens."""
    execution = replace(BF16, config=tiny.UNTIED)
    rollout = tiny.rollout(UNTIED)
    full = jnp.full_like(rollout.lengths, rollout.responses.shape[1])
    rollout = replace(rollout, responses=jnp.full_like(rollout.responses, 7), lengths=full)
    found = {}
    for micro_batch in (None, 1):
        learning = Learning(objectives.reinforce(), 1, micro_batch=micro_batch)
        batch, _ = experience(
            rollout, jnp.ones(tiny.ROWS, jnp.float32), execution=execution, learning=learning
        )
        moved, _ = gradient(tiny.params(tiny.UNTIED), batch, execution, learning)
        found[micro_batch] = np.asarray(moved["embed"])[7]
    error = np.abs(found[None] - found[1]).max() / np.abs(found[1]).max()
    assert error < 2**-7


@pytest.mark.slow
def test_the_weights_an_update_hands_on_are_those_of_its_parameters():
    for execution in (tiny.EXECUTION, BF16):
        learning = Learning(objectives.rloo(), tiny.GROUP)
        batch = batch_of(learning=learning)
        run = updater(execution, learning, OPTIMIZER)
        state, weights, _ = run(tiny.params(), batch)
        assert tiny.bits(state.params) != tiny.bits(tiny.params())
        assert tiny.bits(weights) == tiny.bits(jax.jit(execution.prepare)(state.params))
