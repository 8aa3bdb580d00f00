"""The loop: the same run from the same seed, and from any of its steps on."""

import itertools
import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from reference import reference_log_probs

from tim_jax import corrections, objectives, optimizers
from tim_jax.app.jobs import train
from tim_jax.app.run import folders
from tim_jax.common.errors import InputError, MismatchError, NonFiniteError
from tim_jax.common.types import Prompts
from tim_jax.model.execution import Sampling
from tim_jax.policy import scoring
from tim_jax.rl import drawing, learner, loop, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.learner import experience
from tim_jax.rl.loop import pass_at_k, scores
from tim_jax.rl.training import Training
from tim_jax.rl.types import Carried, Learning, TrainState
from tim_jax.tasks import base, builtin
from tim_jax.tasks.base import Example, Grade, Message
from tim_jax.tasks.text import character_tokenizer

TOKENIZER: Any = character_tokenizer(builtin.ALPHABET)
TEXT = Text(TOKENIZER, max_prompt_length=6)
# One layer: a loop does not know how many there are, and decode loops have each of them once more.
CONFIG = replace(tiny.CONFIG, vocab_size=len(TOKENIZER), num_layers=1)
EXECUTION = replace(
    tiny.EXECUTION, config=CONFIG, sampling=Sampling(8, stop_tokens=(TOKENIZER.eos_token_id, 9))
)
OBJECTIVE = objectives.grpo(drop_uninformative=True)
STEPS = 4


def by_length(examples, completions):
    """A reward with some variety, and faults now and then."""
    del examples
    return [Grade(len(c) / 8.0, base.TIMEOUT if len(c) == 1 else None) for c in completions]


def make_task(grade=by_length, **sizes):
    return replace(builtin.running_sums(**{"digits": (1, 3), "eval_size": 8, **sizes}), grade=grade)


@cache
def built():
    """Two mini-batches, two passes: four updates a step."""
    optimizer = optimizers.adamw(
        optimizers.Rate(1e-2), weight_decay=0.1, decay=optimizers.Decay(period=3)
    )
    learning = Learning(OBJECTIVE, tiny.GROUP, micro_batch=2)
    return programs.build(Training(EXECUTION, learning, optimizer, mini_batches=2, epochs=2))


def start_state():
    return built().init(jax.tree.map(jnp.array, tiny.params(CONFIG)))


def finished(state=None, task=None, *, seed=0, steps=STEPS, exact=True, text=TEXT, prompts=2):
    """Finished steps: (number, metrics, samples, copy of the state)."""
    reference = built().prepare(tiny.params(CONFIG))
    state = start_state() if state is None else state
    for step in loop.train(
        state,
        task or make_task(),
        text,
        programs=tiny.varied(built(), prompts_per_step=prompts, exact=exact),
        seed=seed,
        steps=steps,
        reference=reference,
    ):
        assert set(step.timing) >= {"seconds", "tokens_per_second"}
        yield step.number, step.metrics, step.samples, jax.tree.map(jnp.array, step.state)


@cache
def sampler(samples):
    return programs.sampling_program(EXECUTION, samples=samples)


@cache
def whole():
    return list(finished())


def told(steps):
    """What a run says and ends with; repr tells every bit of a float."""
    return [(n, repr(metrics), samples, tiny.bits(state)) for n, metrics, samples, state in steps]


def test_same_seed_same_metrics_samples_and_parameters():
    first, again = whole(), list(finished())
    assert [number for number, *_ in first] == [1, 2, 3, 4]
    assert told(first) == told(again)
    assert len({tiny.bits(state.params)[0] for *_, state in first}) == STEPS  # it moves


def test_another_seed_is_another_run():
    assert told([next(finished(seed=1))])[0][1:3] != told(whole())[0][1:3]


@pytest.mark.slow
def test_from_the_middle_on_it_is_the_run_that_was_not_interrupted():
    expected = whole()
    _, _, _, middle = expected[1]
    assert told(finished(jax.tree.map(jnp.array, middle))) == told(expected[2:])
    # As from a checkpoint: bound to a device. That is another program, once.
    bound = jax.device_put(jax.tree.map(jnp.array, middle), jax.devices()[0])
    with tiny.compilations() as counted:
        assert told(finished(bound)) == told(expected[2:])
    assert max(counted[name] for name in ("sample", "experience", "update", "prepare")) <= 1
    assert list(finished(jax.tree.map(jnp.array, expected[-1][3]))) == []


def test_a_longer_run_begins_with_the_shorter_one():
    assert told(finished(steps=2)) == told(whole()[:2])


def test_samples_do_not_depend_on_what_is_drawn_beside_them():
    """The first prompt of step 1, alone in its step."""
    task = make_task()
    one = next(finished(task=task, prompts=2))[2][: tiny.GROUP]
    rollouts = []
    for count in (1, 2):
        indices = base.order(0, 0, 2, len(task.train))[:count].tolist()
        prompts = TEXT.prompts([task.train[i] for i in indices], indices)
        weights = built().prepare(tiny.params(CONFIG))
        rollout = sampler(tiny.GROUP)(weights, prompts, drawing.step_key(0, 1))
        rollouts.append(TEXT.completions(rollout)[: tiny.GROUP])
    assert rollouts[0] == rollouts[1] == [sample.completion for sample in one]
    assert len(set(rollouts[0])) > 1


def test_metrics_of_a_step():
    number, metrics, samples, state = whole()[0]
    assert number == int(state.step) == 1
    rewards = np.array([sample.reward for sample in samples])
    assert len(samples) == 2 * tiny.GROUP
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["reward_std"] == pytest.approx(rewards.std())
    assert metrics["exact_share"] == 1.0
    assert metrics["unequal_tokens"] == metrics["log_prob_difference_max"] == 0.0
    # Off policy after the first of the four updates, and only then.
    assert metrics["loss/ppo_ratio_mean"] != 1.0
    assert metrics["loss/ppo_ratio_min"] < 1.0 < metrics["loss/ppo_ratio_max"]
    assert 0.0 < metrics["effective_sample_size"] < 1.0
    assert metrics["update_skew"] != 0.0
    assert metrics["loss/reference_kl"] > 0.0
    # The first pass compares the first mini-batch: after it the weights have moved.
    assert 0 < metrics["compared_tokens"] < metrics["response_tokens"]
    # The mismatch is taken from the same log-probs; an exact run has none.
    assert metrics["mismatch/tokens"] == metrics["compared_tokens"]
    assert metrics["mismatch/kl_k3"] == metrics["mismatch/log_ratio_abs_max"] == 0.0
    assert metrics["mismatch/exact_share"] == metrics["mismatch/ess_sequence"] == 1.0
    assert not any(name.startswith(("correction/", "refill/")) for name in metrics)
    assert metrics["response_length"] == metrics["response_tokens"] / len(samples)
    assert metrics["response_length_max"] <= 8
    assert 0 <= metrics["cut_share"] < 1
    ones = sum(len(sample.completion) == 1 for sample in samples)
    assert (metrics["grader/timeout"], metrics["grader/error"]) == (ones, 0)
    # Four updates a step, decay every third of them.
    scales = [m["lr_scale"] for _, m, *_ in whole()]
    np.testing.assert_allclose(scales, [0.5, 0.25, 0.1, 0.1], rtol=1e-6)
    assert all(np.isfinite(list(m.values())).all() for _, m, *_ in whole())


@pytest.mark.slow
def test_corrections_and_length_buckets_leave_an_exact_step_where_it_was():
    """Coefficients of exactly one, and padding that changes no log-prob: the same update.

    Coefficients of a half halve it: they are not left out of it.
    """
    half = corrections.declared(corrections.chain(optax.scale(0.5)), effect="scale")
    fix = corrections.build([{"name": "vexact"}, {"name": "normalise"}])
    plainly = Learning(objectives.grpo(kl_coefficient=0.0), tiny.GROUP, mode="recompute")
    whole = tiny.rollout(EXECUTION)
    short = replace(whole, lengths=jnp.minimum(whole.lengths, 4))
    start, ends = tiny.params(CONFIG), []
    for correction, buckets in ((corrections.none(), 1), (corrections.chain(fix, half), 2)):
        learning = replace(plainly, correction=correction)
        built = programs.build(
            Training(EXECUTION, learning, optax.sgd(0.1), length_buckets=buckets)
        )
        state = built.init(jax.tree.map(jnp.array, start))
        weights = built.prepare(state.params)
        with tiny.compilations() as counted:
            ends.append(loop.learn(state, weights, short, tiny.rewards(), programs=built))
        assert counted["update"] == 1
    (plain, _, _, one), (changed, _, found, other) = ends
    assert loop.trimmed(short, 2).responses.shape[1] == 4 < short.responses.shape[1]
    assert int(found.compared) == int(short.mask.sum()) > 0 == int(found.unequal)
    for name in ("loss", "gradient_norm"):
        assert other[name] == pytest.approx(one[name] / 2, rel=1e-4, abs=1e-7)
    steps = [jax.tree.map(np.subtract, end.params, start) for end in (plain, changed)]
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(steps[0])) > 1e-4
    for step, halved in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_allclose(halved, step / 2, rtol=1e-3, atol=1e-6)


# What stands between the sampler's reward and the update

STEERED = objectives.grpo(
    kl_coefficient=0.0,
    reward_kl_coefficient=0.5,
    reward_kl_target=0.01,
    reward_kl_horizon=100,
    max_length=8,
    overlong_cache=4,
)


@cache
def everything():
    """One update a step, which every part of a step's preparation and report takes part in."""
    learning = Learning(
        STEERED,
        tiny.GROUP,
        mode="recompute",
        correction=corrections.build([{"name": "token_tis", "cap": 2.0}]),
        micro_batch=tiny.GROUP,
        noise_scale=True,
    )
    return programs.build(Training(EXECUTION, learning, optimizers.adamw(optimizers.Rate(1e-2))))


def first_state(run):
    return run.init(jax.tree.map(jnp.array, tiny.params(CONFIG)))


def run_everything(run, state, *, exact=True, steps=3, seed=0):
    """(metrics, copy of the state) after each step, from where `state` stands.

    As many sequences a step as `tiny.rollout` has, so that its programs serve both.
    """
    reference = run.prepare(tiny.moved(tiny.params(CONFIG)))
    run = tiny.varied(run, prompts_per_step=tiny.PROMPTS, exact=exact)
    following = loop.train(
        state, make_task(), TEXT, programs=run, reference=reference, seed=seed, steps=steps
    )
    return [(step.metrics, jax.tree.map(jnp.array, step.state)) for step in following]


@pytest.mark.slow
def test_the_penalty_of_the_reward_is_steered_from_step_to_step():
    """The controller by hand (arXiv 1909.08593, 2.2), and a loop that begins at its second step."""
    found = run_everything(everything(), first_state(everything()))
    coefficient = 0.5
    for metrics, state in found:
        assert metrics["reward_kl_coefficient"] == pytest.approx(coefficient)
        error = np.clip(metrics["reward_kl"] / 0.01 - 1.0, -0.2, 0.2)
        coefficient *= 1.0 + error * tiny.ROWS / 100
        assert float(state.reward_kl) == pytest.approx(coefficient)
        assert -1.0 < metrics["overlong_penalty"] < 0.0
        assert metrics["correction/clipped_high_share"] == 0.0
        assert metrics["correction/coefficient_min"] == 1.0 == metrics["exact_share"]
        assert metrics["mismatch/kl_k3"] == metrics["update_skew_rollout"] == 0.0
        assert metrics["mismatch/tokens"] == metrics["response_tokens"] > 0
        assert np.isfinite(metrics["gradient_noise"])
    resumed = run_everything(everything(), jax.tree.map(jnp.array, found[0][1]))
    assert [repr(metrics) for metrics, _ in resumed] == [repr(metrics) for metrics, _ in found[1:]]
    assert tiny.bits(resumed[-1][1]) == tiny.bits(found[-1][1])


@pytest.mark.slow
def test_a_correction_of_what_the_sampler_misreports_is_reported():
    """Log-probs that are one nat too low: every ratio is e, above the cap of 2."""

    def sample(weights, prompts, key):
        rollout = everything().sample(weights, prompts, key)
        low = jnp.where(rollout.mask, rollout.log_probs - 1.0, 0.0)
        return replace(rollout, log_probs=low)

    run = replace(everything(), sample=sample)
    ((metrics, _),) = run_everything(run, first_state(run), exact=False, steps=1)
    assert metrics["correction/clipped_high_share"] == 1.0
    assert metrics["correction/coefficient_mean"] == 2.0
    assert metrics["mismatch/log_ratio_mean"] == pytest.approx(1.0, rel=1e-6)
    assert metrics["loss/ppo_ratio_mean"] == 1.0  # the loss's own ratio is to the trainer's
    assert metrics["update_skew_rollout"] != 0.0 == metrics["update_skew"]


@pytest.mark.slow
def test_the_noise_of_a_gradient_is_that_of_its_micro_batches():
    """McCandlish et al. (arXiv 1812.06162), appendix A.1, in float64 from each part's gradient.

    The estimate of the signal is unbiased, so with much noise it may be below 0.
    """
    run = everything()
    score = partial(scoring.score, execution=EXECUTION)

    @jax.jit
    def part(params, weights, rows):
        found, _ = learner.gradient_rows(score, weights, *rows, learning=run.training.learning)
        return jax.vjp(EXECUTION.prepare, params)[1](found)

    for seed in (0, 1):
        check_noise(run, part, tiny.rewards(seed))


def check_noise(run, part, rewards):
    """The noise that a step reports, with `part(params, weights, rows)`, a part's gradient."""
    state, rollout = first_state(run), tiny.rollout(EXECUTION)
    weights, reference = map(run.prepare, (state.params, tiny.moved(tiny.params(CONFIG))))
    batch = run.experience(weights, reference, state.carried, rollout, rewards, None).experience
    shares = STEERED.token_weights(batch.mask, batch.kept)
    whole = jax.device_get((batch, shares))  # where slicing compiles nothing
    size = tiny.GROUP
    count = tiny.ROWS // size
    gradients = []
    for index in range(count):
        rows = jax.tree.map(lambda x, at=size * index: x[at : at + size], whole)
        leaves = jax.tree.leaves(part(state.params, weights, rows))
        gradients.append(np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves]))
    small = np.mean([np.sum((count * g) ** 2) for g in gradients])
    big = np.sum(np.sum(gradients, axis=0) ** 2)
    signal = (tiny.ROWS * big - size * small) / (tiny.ROWS - size)
    noise = (small - big) / (1 / size - 1 / tiny.ROWS)
    *_, metrics = loop.learn(state, weights, rollout, rewards, programs=run, reference=reference)
    assert metrics["gradient_norm"] == pytest.approx(np.sqrt(big), rel=1e-5)
    assert metrics["gradient_signal"] == pytest.approx(signal, abs=1e-4 * big)
    assert metrics["gradient_noise"] == pytest.approx(noise, rel=1e-4)
    expected = noise / signal if signal > 0.0 else np.inf
    assert metrics["noise_scale"] == pytest.approx(expected, rel=1e-3)


class Prepared(Exception):
    """Ends a loop before its update, which a test does not need."""


@pytest.mark.slow
def test_remax_compares_with_the_reward_of_the_greedy_response():
    """The greedy response is the likeliest token each time, and its reward is the baseline."""
    learning = Learning(objectives.rloo(estimator="remax"), tiny.GROUP)
    built = programs.build(Training(EXECUTION, learning, optimizers.adamw(optimizers.Rate(1e-2))))
    assert built.greedy is not None
    given = []

    def experience(*arguments):
        prepared = built.experience(*arguments)
        given.append((*arguments[3:], prepared.experience.advantages))
        raise Prepared

    run = tiny.varied(replace(built, experience=experience), prompts_per_step=2, exact=True)
    steps = loop.train(first_state(run), make_task(), TEXT, programs=run, seed=0, steps=1)
    with pytest.raises(Prepared):
        next(steps)
    ((rollout, rewards, greedy, advantages),) = given
    weights = built.prepare(tiny.params(CONFIG))
    prompts = Prompts(
        tokens=rollout.prompts[:: tiny.GROUP],
        lengths=rollout.prompt_lengths[:: tiny.GROUP],
        ids=jnp.arange(2),
    )
    best = built.greedy(weights, prompts, jax.random.key(9))  # no draw: any key will do
    lengths = [len(text) for text in TEXT.completions(best)]
    np.testing.assert_array_equal(greedy, np.asarray(lengths, np.float32) / 8)
    np.testing.assert_array_equal(advantages, rewards - jnp.repeat(greedy, tiny.GROUP))
    assert len({*greedy.tolist(), *rewards.tolist()}) > 2
    assert not np.asarray(best.log_probs).any()


def prepared(objective, rollout, rewards):
    """A step's preparation in bypass mode, which needs no model."""
    learning = Learning(objective, tiny.GROUP)
    how = {"score": tiny.policy(EXECUTION, learning).score, "learning": learning}
    return jax.jit(partial(experience, {}, None, Carried(()), **how))(rollout, rewards)


def ragged(lengths):
    """Responses of these lengths; those of 8 tokens were cut."""
    rollout = tiny.rollout(EXECUTION)
    lengths = jnp.asarray(lengths, jnp.int32)
    return replace(rollout, lengths=lengths, finished=lengths < 8)


LENGTHS = [1, 4, 5, 8, 8, 7, 6, 2, 8, 8, 8, 8]


@pytest.mark.slow
def test_a_long_response_loses_reward():
    """Eq. 13 of arXiv 2503.14476 with a longest length of 8 and a cache of 4, by hand."""
    objective = objectives.reinforce(max_length=8, overlong_cache=4)
    found = prepared(objective, ragged(LENGTHS), np.full(tiny.ROWS, 2.0, np.float32))
    penalty = [0, 0, -0.25, -1, -1, -0.75, -0.5, 0, -1, -1, -1, -1]
    np.testing.assert_allclose(found.experience.advantages, 2.0 + np.array(penalty))
    assert float(found.metrics["overlong_penalty"]) == pytest.approx(np.mean(penalty))


def test_cut_responses_are_in_no_mask_and_no_denominator():
    rewards = np.arange(tiny.ROWS, dtype=np.float32)
    rollout, kinds = ragged(LENGTHS), ("token_mean", "sequence_mean_token_mean")
    for aggregation in kinds:
        objective = objectives.reinforce(drop_cut=True, aggregation=aggregation)
        batch = prepared(objective, rollout, rewards).experience
        mask = np.asarray(rollout.mask) & (np.array(LENGTHS) < 8)[:, None]
        np.testing.assert_array_equal(batch.mask, mask)
        shares = objective.token_weights(batch.mask, batch.kept)
        left = [n for n in LENGTHS if n < 8]
        expected = 1 / sum(left) if aggregation == "token_mean" else 1 / (len(left) * left[0])
        assert float(shares[0, 0]) == pytest.approx(expected)
        assert float(jnp.sum(shares)) == pytest.approx(1.0)
        whole = replace(objective, drop_cut=False)
        assert bool(jnp.all(prepared(whole, rollout, rewards).experience.mask == rollout.mask))


def test_only_a_run_that_steers_its_penalty_keeps_the_coefficient():
    """Checkpoints of other runs have the structure that they always had."""
    for state, kept in ((first_state(built()), False), (first_state(everything()), True)):
        held = folders.saved(state, None)["rest"]
        assert ("reward_kl" in held) == kept == (state.reward_kl is not None)
        restored = TrainState(params=state.params, **held)
        assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_metrics_of_a_step_are_means_but_for_extremes_and_the_noise_scale():
    deviation = "correction/sequence_weight_max_deviation"
    first = {"loss": 1.0, "a_max": 3.0, "a_min": 1.0, "skipped": 0.0, "tokens": 4.0}
    second = {"loss": 2.0, "a_max": 2.0, "a_min": -1.0, "skipped": 1.0, "tokens": 6.0}
    assert loop.joined([first | {deviation: 0.1}, second | {deviation: 0.5}]) == {
        "loss": 1.5,
        deviation: 0.5,
        "a_max": 3.0,
        "a_min": -1.0,
        "skipped": 0.5,
        "tokens": 5.0,
    }
    noise = [
        {"gradient_noise": 4.0, "gradient_signal": 3.0, "noise_scale": 4 / 3, "tokens": 1.0},
        {"gradient_noise": 2.0, "gradient_signal": -1.0, "noise_scale": np.inf, "tokens": 1.0},
    ]
    assert loop.joined(noise)["noise_scale"] == 3.0
    assert loop.joined(noise[1:])["noise_scale"] == float("inf")


def test_exact_required_stops_at_the_first_unequal_token(monkeypatch):
    """Step 3's sampler is tampered with: the steps before it stand, and it names the token."""
    true, expected = built(), whole()[:2]

    def sample(weights, prompts, key):
        rollout = true.sample(weights, prompts, key)
        if (jax.random.key_data(key) == jax.random.key_data(drawing.step_key(0, 3))).all():
            return replace(rollout, log_probs=rollout.log_probs.at[1, 0].add(-1e-6))
        return rollout

    tampered = replace(true, sample=sample)
    monkeypatch.setattr(f"{__name__}.built", lambda: tampered)
    steps = []
    with pytest.raises(MismatchError, match=r"step 3: 1 of \d+ .*sequence 1, response position 0"):
        steps.extend(finished())
    assert told(steps) == told(expected)
    reported = list(finished(exact=False))
    assert [m["unequal_tokens"] for _, m, *_ in reported] == [0, 0, 1, 0]
    assert reported[2][1]["exact_share"] < 1 < reported[2][1]["compared_tokens"]


def test_a_prompt_that_comes_twice_in_a_step_gets_two_groups_of_samples():
    task = make_task()
    only = replace(task, train=(task.train[0],))
    _, _, samples, _ = next(finished(task=only))
    first, second = samples[: tiny.GROUP], samples[tiny.GROUP :]
    assert {sample.prompt for sample in samples} == {task.train[0].prompt}
    assert [s.completion for s in first] != [s.completion for s in second]


def test_prompt_names_are_their_rows_until_they_come_again():
    assert drawing.prompt_ids(np.array([4, 0, 2]), 5) == [4, 0, 2]
    assert drawing.prompt_ids(np.array([1, 0, 1, 0, 1]), 2) == [1, 0, 3, 2, 5]


def test_a_grader_that_fails_ends_the_loop_after_whole_steps():
    calls = []

    def grade(examples, completions):
        calls.append(len(completions))
        if len(calls) == 3:
            raise InputError("reward my:own raised ValueError: no")
        return by_length(examples, completions)

    steps = []
    with pytest.raises(InputError, match="my:own"):
        steps.extend(finished(task=make_task(grade)))
    assert told(steps) == told(whole()[:2])


# Text


def test_prompts_are_left_aligned_with_their_lengths_and_names():
    prompts = TEXT.prompts([Example("1+2=", "3"), Example("7=", "7")], [5, 3])
    assert prompts.tokens.shape == (2, 6)
    np.testing.assert_array_equal(prompts.lengths, [4, 2])
    np.testing.assert_array_equal(prompts.ids, [5, 3])
    assert TOKENIZER.decode(prompts.tokens[0, :4].tolist()) == "1+2="
    assert not np.asarray(prompts.tokens)[1, 2:].any()
    assert {x.dtype for x in jax.tree.leaves(prompts)} == {jnp.dtype("int32")}


def test_too_long_a_prompt_is_refused_by_name():
    with pytest.raises(InputError, match=r"prompt 8 has 8 tokens, at most 6 .*'1\+2\+3\+4='"):
        TEXT.prompts([Example("1=", "1"), Example("1+2+3+4=", "0")], [4, 8])
    placed = Example("1+2+3+4=", "0", where="a.jsonl, line 3")
    with pytest.raises(InputError, match=r"^prompt 8 \(a.jsonl, line 3\) has 8 tokens, at most 6"):
        TEXT.prompts([placed], [8])


def looked_at(task, *, training=True):
    """The rows of training and held-out prompts that are checked before a run."""
    read: dict[str, list[int]] = {"train": [], "evaluation": []}

    def noting(name):
        def make(row):
            read[name].append(row)
            return getattr(task, name)[row]

        return base.Generated(make, len(getattr(task, name)))

    train.check_prompts(replace(task, **{n: noting(n) for n in read}), TEXT, training=training)
    return read


def test_of_prompts_that_are_made_one_by_one_some_are_checked_from_everywhere():
    task = make_task()
    read = looked_at(replace(task, evaluation=task.train[:200]))
    assert len(read["train"]) in range(64, 128)
    assert read["train"][-1] > 0.9 * len(task.train)
    assert read["evaluation"] == list(range(0, 200, 3))


@pytest.mark.parametrize("part", ["train", "evaluation"])
def test_a_prompt_at_hand_is_checked_wherever_it_stands(part):
    good, bad = Example("1=", "1"), Example("1+2+3+4=", "0", where="a.jsonl, line 999")
    rows = (*[good] * 998, bad, good)
    task = replace(make_task(), **{part: rows})
    name = {"train": "prompt", "evaluation": "held-out prompt"}[part]
    with pytest.raises(InputError, match=rf"^{name} 998 \(a.jsonl, line 999\) has 8 tokens, at"):
        train.check_prompts(task, TEXT, training=True)


def test_an_evaluation_does_not_mind_what_is_trained_on():
    long = replace(make_task(), train=(Example("1+2+3+4=", "0"),))
    train.check_prompts(long, TEXT, training=False)
    train.check_prompts(replace(long, train=()), TEXT, training=False)
    with pytest.raises(InputError, match="has no prompts to train on"):
        train.check_prompts(replace(long, train=()), TEXT, training=True)
    with pytest.raises(InputError, match="held-out prompt 0 has 8 tokens"):
        train.check_prompts(replace(long, evaluation=long.train), TEXT, training=False)


def test_completions_end_where_the_response_does():
    rollout = tiny.rollout(EXECUTION)
    texts = TEXT.completions(rollout)
    for text, tokens, length in zip(
        texts, rollout.responses.tolist(), rollout.lengths.tolist(), strict=True
    ):
        special = TOKENIZER.all_special_ids
        assert len(text) == sum(token not in special for token in tokens[:length])


def test_chat_prompts_are_shown_as_text():
    chat = (Message("system", "Be brief."), Message("user", "1+1"))
    assert drawing.prompt_text(Example(chat, "2")) == "system: Be brief.\nuser: 1+1"
    assert drawing.prompt_text(Example("1+1", "2")) == "1+1"


# Evaluation


def evaluated(task, *, prompts=5, samples=2, batch=2, key=0, solved=1.0):
    weights = built().prepare(tiny.params(CONFIG))
    return loop.evaluate(
        weights,
        task,
        TEXT,
        sample=sampler(samples),
        key=jax.random.key(key),
        prompts=prompts,
        samples=samples,
        batch=batch,
        ks=(1, 2),
        solved=solved,
    )


def test_a_response_is_right_from_a_reward_on():
    task = make_task(lambda examples, completions: [Grade(0.9) for _ in completions])
    assert evaluated(task, prompts=2)[0]["pass@1"] == 0.0
    assert evaluated(task, prompts=2, solved=0.9)[0]["pass@1"] == 1.0


def test_evaluation_does_not_depend_on_its_batches():
    """Its two programs are those of the other tests of `evaluated`."""
    task = make_task()
    metrics, samples = evaluated(task)
    assert metrics["prompts"] == 5
    assert [s.prompt for s in samples] == [e.prompt for e in task.evaluation[:5] for _ in range(2)]
    lengths = [len(s.completion) for s in samples]
    assert metrics["reward"] == metrics["mean@2"] == pytest.approx(np.mean(lengths) / 8)
    assert evaluated(task, batch=5) == (metrics, samples)
    assert evaluated(task, key=1)[1] != samples
    assert evaluated(task, prompts=100)[0]["prompts"] == len(task.evaluation)


def test_pass_at_k_counts_solved_prompts():
    calls = iter([1, 0, 0, 0, 1, 1, 0, 0, 0, 0])
    task = make_task(lambda e, c: [Grade(float(next(calls))) for _ in c])
    metrics, _ = evaluated(task, batch=5)
    assert metrics["mean@2"] == metrics["pass@1"] == pytest.approx(0.3)
    assert metrics["pass@2"] == pytest.approx(0.4)


def test_nothing_held_out_is_nothing_to_evaluate():
    with pytest.raises(InputError, match="running_sums has no held-out problems"):
        evaluated(replace(make_task(), evaluation=()))


# Warm start


PAIRS = [("1+2=", "1 3#3"), ("4=", "4#4"), ("2+2=", "2 4#4")]


def demonstrations(size=8):
    return loop.demonstrations(PAIRS, TEXT, response_size=size)


def test_demonstrations_are_rollouts_that_end():
    rollout = demonstrations()
    np.testing.assert_array_equal(rollout.prompt_lengths, [4, 2, 4])
    np.testing.assert_array_equal(rollout.lengths, [6, 4, 6])
    for row, (_, completion) in enumerate(PAIRS):
        tokens = rollout.responses[row, : rollout.lengths[row]].tolist()
        assert tokens[-1] == TOKENIZER.eos_token_id
        assert TOKENIZER.decode(tokens[:-1]) == completion
    np.testing.assert_array_equal(
        rollout.prompts, TEXT.prompts([Example(p, "") for p, _ in PAIRS], range(3)).tokens
    )


def test_a_demonstration_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"6 tokens.*max_tokens = 5.*'1 3#3'"):
        demonstrations(size=5)


def test_warm_start_learns_its_pairs_and_leaves_its_input_whole():
    params = tiny.params(CONFIG)
    before = tiny.bits(params)
    batches = iter([demonstrations()] * 40)
    run = loop.warm_start(params, batches, execution=EXECUTION, learning_rate=1e-2, steps=40)
    losses, last = [], params
    for last, loss in run:  # noqa: B007
        losses.append(loss)
    assert len(losses) == 40
    assert losses[0] == pytest.approx(first_loss(params, demonstrations()), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    assert tiny.bits(params) == before
    moved = jax.tree.leaves(jax.tree.map(np.subtract, last, params))
    assert np.sqrt(sum(np.sum(leaf**2) for leaf in moved)) > 0.1


def test_warm_start_of_one_step(monkeypatch):
    """There is no room for a rise of the learning rate, whatever is learnt."""

    def score(weights, rollout, **_):
        return SimpleNamespace(log_probs=rollout.log_probs - jnp.sum(weights["final_norm"]))

    monkeypatch.setattr(scoring, "score", score)
    run = loop.warm_start(
        tiny.params(CONFIG),
        iter([demonstrations()]),
        execution=EXECUTION,
        learning_rate=1e-2,
        steps=1,
    )
    found = list(run)
    assert len(found) == 1


def first_loss(params, rollout):
    """The mean negative log-prob per token of the parameters, in float64."""
    params, rollout = jax.device_get((params, rollout))
    found = []
    for row, start in enumerate(rollout.prompt_lengths):
        response = rollout.responses[row, : rollout.lengths[row]]
        tokens = np.concatenate([rollout.prompts[row, :start], response])
        found.append(reference_log_probs(params, tokens, CONFIG)[start - 1 :])
    return -np.concatenate(found).mean()


def poisoned(steps):
    """The programs, with advantages that are not numbers in these calls (from 0)."""
    calls = iter(range(STEPS))

    def experience(*arguments):
        prepared = built().experience(*arguments)
        if next(calls) in steps:
            batch = prepared.experience
            wrong = jnp.full_like(batch.advantages, jnp.nan)
            every = batch.rollout.mask
            batch = replace(batch, advantages=wrong, mask=every, kept=every)
            prepared = prepared._replace(experience=batch)
        return prepared

    return replace(built(), experience=experience)


def steps_of(run, **options):
    settings: dict[str, Any] = {"seed": 0, "steps": STEPS}
    run = tiny.varied(run, prompts_per_step=2, exact=True)
    reference = built().prepare(tiny.params(CONFIG))
    return loop.train(
        start_state(), make_task(), TEXT, programs=run, reference=reference, **settings | options
    )


def test_an_update_that_is_not_finite_is_skipped_and_counted():
    """Four updates a step: all of step 2 are skipped, and step 3 starts where step 1 ended."""
    found = {}
    for step in steps_of(poisoned({1}), steps=3):
        state = step.state
        found[step.number] = (
            step.metrics["skipped"],
            int(state.skipped),
            tiny.bits((state.params, state.optimizer)),
        )
    assert [skipped for skipped, *_ in found.values()] == [0.0, 4.0, 0.0]
    assert [row for _, row, _ in found.values()] == [0, 4, 0]
    assert found[1][2] == found[2][2] != found[3][2]


def test_a_state_that_waits_on_the_host_changes_nothing_but_its_place():
    sizes = []

    def sample(*arguments):
        waiting = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
        sizes.append(sum(x.nbytes for x in waiting))
        return built().sample(*arguments)

    found, states = [], []
    for step in steps_of(tiny.varied(replace(built(), sample=sample), offload=True)):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states[-1:]))
        states.append(step.state)
        kept = jax.tree.map(jnp.array, step.state)
        found.append((step.number, step.metrics, step.samples, kept))
    assert told(found) == told(whole())
    assert sizes == [sum(leaf.nbytes for leaf in jax.tree.leaves(states[-1]))] * STEPS


def test_a_step_has_one_length_for_the_detector_of_surges():
    given = []

    def update(*arguments):
        given.append(float(arguments[4]))
        return built().update(*arguments)

    (step,) = steps_of(replace(built(), update=update), steps=1)
    assert len(given) == 4
    assert np.isnan(given[:3]).all()
    assert given[3] == pytest.approx(step.metrics["response_length"])


@pytest.mark.parametrize(
    ("before", "skips", "most"),
    [(0, [0, 0], 0), (2, [1, 0, 0], 3), (2, [0, 1, 1, 0], 2), (0, [0, 1, 1, 1], 3), (1, [1], 2)],
)
def test_the_longest_run_of_skipped_updates(before, skips, most):
    assert loop.most_in_a_row(before, skips) == most


def test_too_many_updates_in_a_row_that_are_not_finite_end_the_run_with_their_batch():
    done = []
    run = steps_of(poisoned({1, 2}))
    with pytest.raises(NonFiniteError, match="step 3: the loss or gradient of 8 updates") as caught:
        done.extend(step.number for step in run)
    assert done == [1, 2]  # after the four of step 2 it goes on: the limit is five
    batch = caught.value.batch
    assert batch is not None
    assert np.isnan(batch["advantages"]).all()
    assert batch["rollout.responses"].shape == (2 * tiny.GROUP, 8)


def test_an_update_with_nothing_to_learn_from_is_left_out_of_means():
    """Its means and extremes are 0, as of no number; it would look like a collapse."""
    silent = {"tokens": 0.0, "entropy": 0.0, "correction/coefficient_min": 0.0}
    taught = {"tokens": 6.0, "entropy": 1.5, "correction/coefficient_min": 0.5}
    assert loop.joined([silent, taught, silent]) == {**taught, "tokens": 2.0}
    assert loop.joined([silent, silent]) == silent


def test_an_update_whose_tokens_are_all_rejected_is_left_out_of_what_is_of_the_others():
    kept = {"tokens": 6.0, "entropy": 1.0, "correction/removed_share": 0.5}
    kept |= {"loss/ppo_ratio_mean": 1.0, "loss/ppo_ratio_min": 1.0, "update_skew": 0.25}
    none = {"loss/ppo_ratio_mean": 0.0, "loss/ppo_ratio_min": 0.0, "update_skew": 0.0}
    lost = kept | none | {"entropy": 3.0, "correction/removed_share": 1.0}
    shared = {"entropy": 2.0, "correction/removed_share": 0.75}
    assert loop.joined([lost, kept]) == kept | shared
    assert loop.joined([lost, lost]) == lost


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_by_brute_force(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        solved = [i < correct for i in range(samples)]
        subsets = list(itertools.combinations(solved, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(np.array(correct), samples, k) == pytest.approx(expected, abs=1e-14)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_against_exact_binomials(samples, data):
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    # Integers divided at the end: exact up to the last rounding, however large they are.
    ways = math.comb(samples, k)
    expected = (ways - math.comb(samples - correct, k)) / ways
    assert pass_at_k(np.array([correct]), samples, k)[0] == pytest.approx(expected, abs=1e-12)


def test_scores():
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    found = scores(rewards, [1, 2, 4])
    assert found["mean@4"] == found["pass@1"] == found["reward"] == 7 / 16
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 0 + 1) / 4)
    assert found["pass@4"] == 3 / 4
    assert found["prompts"] == 4
    assert found["reward_error"] == pytest.approx(found["pass@1_error"])
    assert found["pass@4_error"] == pytest.approx(np.std([1, 1, 0, 1], ddof=1) / 2)
    alone = scores(rewards[:1], [1])
    assert alone["reward_error"] == alone["pass@1_error"] == 0.0


def test_partial_rewards_do_not_count_as_solved():
    rewards = np.array([[0.5, 0.5]])
    assert scores(rewards, [1])["pass@1"] == 0.0
    assert scores(rewards, [2], solved=0.5)["pass@2"] == 1.0
    assert scores(rewards, [1])["mean@2"] == 0.5


def test_the_interval_of_a_score_is_right_in_95_of_100_draws():
    rng = np.random.default_rng(0)
    chances = rng.uniform(size=(2000, 64, 1))  # a chance for each prompt; their mean is 1/2
    rewards = (rng.uniform(size=(2000, 64, 4)) < chances).astype(float)
    inside = [abs(x.mean() - 0.5) < 1.96 * scores(x, ())["reward_error"] for x in rewards]
    assert 0.93 < np.mean(inside) < 0.97


def test_refusals():
    with pytest.raises(InputError, match=r"k must be in 1..4 .*, got 5"):
        scores(np.zeros((2, 4)), [5])
    with pytest.raises(InputError, match="k must be"):
        pass_at_k(np.array([1]), 4, 0)
    with pytest.raises(InputError, match=r"counts must be in 0..4, got 1..5"):
        pass_at_k(np.array([1, 5]), 4, 2)
    with pytest.raises(InputError, match="prompt 1, sample 0 has nan"):
        scores(np.array([[1.0], [np.nan]]), [1])
