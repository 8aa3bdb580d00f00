"""A sampler that is steps ahead of its learner: drawn by older weights, exact, and replayable."""

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import quick
import tiny

from tim_jax import mismatch, objectives, optimizers
from tim_jax.app.config import toml
from tim_jax.common.errors import InputError
from tim_jax.corrections import Mode
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.placement import SINGLE, Placement, split
from tim_jax.rl import loop, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning
from tim_jax.tasks import builtin
from tim_jax.tasks.base import Grade
from tim_jax.tasks.text import character_tokenizer

TOKENIZER: Any = character_tokenizer(builtin.ALPHABET)
CONFIG = replace(tiny.CONFIG, vocab_size=len(TOKENIZER))
EXECUTION = Execution(CONFIG, tiny.NUMERICS, Sampling(8, stop_tokens=(TOKENIZER.eos_token_id, 9)))
OLD = {"name": "stale_weights", "updates": 2}
STALE = mismatch.build([OLD])
NOISE = mismatch.build([{"name": "log_prob_noise", "std": 0.1}])
STEPS = 5
# What is told of bits, which an entry of the dial compares with the newest weights.
BITS = ("exact_share", "compared_tokens", "unequal_tokens")
BITS += ("log_prob_difference_max", "log_prob_difference_mean")


def grade(examples, completions):
    return [Grade(len(completion) / 8.0) for completion in completions]


@cache
def built(
    ahead=0, mode: Mode = "bypass", *, dial=mismatch.EXACT, epochs=1, sampler=None, split=False
):
    """Programs; with `split`, the sampler has devices of its own."""
    return programs.build(
        Training(
            EXECUTION,
            Learning(objectives.rloo(), tiny.GROUP, mode=mode),
            optimizers.adamw(optimizers.Rate(1e-2)),
            prompts_per_step=2,
            epochs=epochs,
            sampler=Sampler(sampler, split, mismatch=dial, max_staleness=ahead),
        )
    )


def steps_of(run, state=None, history=(), *, steps=STEPS, exact=False):
    """Finished steps, each with copies of what the next one takes."""
    fresh = run.init(jax.tree.map(jnp.array, tiny.params(CONFIG)))
    following = loop.train(
        fresh if state is None else jax.tree.map(jnp.array, state),
        replace(builtin.running_sums(digits=(1, 3), eval_size=8), grade=grade),
        Text(TOKENIZER, max_prompt_length=6),
        programs=tiny.varied(run, exact=exact),
        seed=0,
        steps=steps,
        history=history,
    )
    return [step._replace(state=jax.tree.map(jnp.array, step.state)) for step in following]


@cache
def whole(ahead):
    return steps_of(built(ahead))


def told(steps, *, but=()):
    """What steps say and end with, to the bit."""
    return [
        (
            step.number,
            [(name, repr(value)) for name, value in step.metrics.items() if name not in but],
            step.samples,
            tiny.bits(step.state),
        )
        for step in steps
    ]


def test_two_steps_ahead_is_learning_from_weights_of_two_updates_ago():
    """The entry `stale_weights` of the dial draws late what this draws early."""
    early, late = whole(2), steps_of(built(dial=STALE))
    assert told(early, but=BITS) == told(late, but=BITS)
    assert told(early, but=BITS) != told(whole(1), but=BITS)


@pytest.mark.parametrize("mode", quick.some(["bypass", "recompute"], 1))
def test_what_was_drawn_ahead_is_exact_and_all_mismatch_is_staleness(mode):
    found = [step.metrics for step in steps_of(built(1, mode), exact=True)]
    for number, metrics in enumerate(found, 1):
        assert metrics["exact_share"] == 1.0
        assert metrics["compared_tokens"] == metrics["response_tokens"] > 0
        assert metrics["numerical/log_ratio_abs_max"] == 0.0
        drift = metrics["drift/log_ratio_abs_mean"]
        assert drift == metrics["mismatch/log_ratio_abs_mean"]
        assert (drift > 0.0) == (number > 1)  # the first step's weights are the first ones


@pytest.mark.slow
def test_a_mismatch_of_a_sampler_ahead_is_told_apart_from_its_staleness():
    found = [step.metrics for step in steps_of(built(1, dial=NOISE), steps=3)]
    for metrics in found:
        assert 0.05 < metrics["numerical/log_ratio_abs_mean"] < 0.12
        assert metrics["exact_share"] < 0.5
    assert 0.0 < found[2]["drift/log_ratio_abs_mean"] != found[2]["mismatch/log_ratio_abs_mean"]


@pytest.mark.slow
def test_devices_of_its_own_change_no_bit_and_are_its_own():
    apart = built(1, sampler=Placement(data=2), split=True)
    weights = apart.prepare(tiny.params(CONFIG))
    there = jax.tree.leaves(apart.publish(None, weights))[0].devices()
    assert there == set(jax.devices()[1:3])
    assert there.isdisjoint(jax.tree.leaves(weights)[0].devices())
    assert told(steps_of(apart, exact=True)) == told(steps_of(built(1), exact=True))


@pytest.mark.parametrize("after", [1, 3])
def test_from_any_step_on_it_is_the_run_that_was_not_interrupted(after):
    expected = whole(2)
    begun = steps_of(built(2), steps=after)  # the run was to end here, and goes on
    assert told(begun) == told(expected[:after])
    for stop in (begun[-1], expected[after - 1]):
        rest = steps_of(built(2), stop.state, stop.history)
        assert told(rest) == told(expected[after:])


def test_the_next_step_is_begun_before_one_is_learnt_from():
    run, events = built(2), []

    def noted(name):
        def call(*arguments):
            events.append(name)
            return getattr(run, name)(*arguments)

        return call

    watched = replace(run, sample=noted("sample"), update=noted("update"))
    steps_of(watched, steps=4)
    assert events == [*["sample"] * 3, "update", "sample", *["update"] * 3]


@pytest.mark.slow
def test_steps_and_not_updates_are_counted():
    """Two passes over each step's rollouts: what drew a step is older by whole steps."""
    steps = steps_of(built(1, epochs=2), exact=True, steps=4)
    for before, step in itertools.pairwise(steps):
        expected = built(1, epochs=2).prepare(before.state.params)
        assert tiny.bits(step.history[-1]) == tiny.bits(expected)


@pytest.mark.slow
def test_refills_are_drawn_by_the_weights_of_their_step():
    def equal(examples, completions):
        return [Grade(1.0) for _ in completions]

    state = built(1).init(jax.tree.map(jnp.array, tiny.params(CONFIG)))
    following = loop.train(
        state,
        replace(builtin.running_sums(digits=(1, 3), eval_size=8), grade=equal),
        Text(TOKENIZER, max_prompt_length=6),
        programs=tiny.varied(built(1), exact=True, refills=2),
        seed=0,
        steps=3,
    )
    for step in following:
        assert step.metrics["refill/rounds"] == 2.0
        assert step.metrics["exact_share"] == 1.0


def test_devices_of_several_processes_are_not_split():
    def devices(*processes):
        return [SimpleNamespace(process_index=process) for process in processes]

    both = Placement(fsdp=2), Placement(data=2)
    assert split(*both, devices(0, 0, 0, 0)) == devices(0, 0)
    with pytest.raises(InputError, match="needs all devices in one process"):
        split(*both, devices(0, 0, 1, 1))
    with pytest.raises(InputError, match="need 2 \\+ 2 devices, but there are 3"):
        split(*both, devices(0, 0, 0))


def test_rollouts_of_the_newest_weights_are_compared_with_these():
    """Without a `source`, whose buffers the first update takes."""
    run = built(dial=STALE)
    state = run.init(jax.tree.map(jnp.array, tiny.params(CONFIG)))
    weights = run.prepare(state.params)
    rollout = run.sample(weights, tiny.prompts(count=2), jax.random.key(0))
    *_, metrics = loop.learn(state, weights, rollout, tiny.rewards(rows=8), programs=run)
    assert metrics["mismatch/tokens"] > 0
    assert metrics["drift/log_ratio_abs_max"] == metrics["numerical/log_ratio_abs_max"] == 0.0


def test_what_contradicts_is_refused():
    with pytest.raises(InputError, match="'stale_weights': contradicts max_staleness"):
        built(1, dial=STALE)
    for data, words in (
        ({"sampler": {"max_staleness": 1}, "learner": {"offload": True}}, "must be 0 with offload"),
        ({"sampler": {"max_staleness": 65}}, "sampler.max_staleness"),
        (
            {"exact": "report", "sampler": {"max_staleness": 1, "mismatch": [OLD]}},
            "contradicts max_staleness",
        ),
    ):
        with pytest.raises(InputError, match=words):
            toml.build(data)
    assert "sampler.max_staleness" not in toml.build({}).may_change()


# --- weights that change within a response --------------------------------------------------------

FLIGHT = mismatch.build([{"name": "in_flight_updates", "updates": 2, "every": 3}])


@pytest.mark.parametrize(
    "where", quick.some([Placement(data=2), SINGLE, Placement(fsdp=2, tensor=2)], 1), ids=str
)
def test_weights_that_change_within_a_response_draw_what_each_would(where):
    """Tokens 1 to 3 are the oldest weights', 4 to 6 the next ones', the last two the newest's."""
    numerics = replace(tiny.NUMERICS, column_tiles=where.tensor)
    config = replace(CONFIG, num_kv_heads=2)
    what = replace(EXECUTION, config=config, numerics=numerics, placement=where)
    prepare = jax.jit(what.prepare)
    ages = [prepare(tiny.moved(tiny.params(config), seed=s)) for s in range(3)]
    key, prompts = jax.random.key(0), tiny.prompts(count=4)
    program = programs.in_flight_program(what, samples=tiny.GROUP, mismatch=FLIGHT)
    rollout = jax.device_get(program(ages, prompts, key))
    assert rollout.lengths.min() <= 3
    assert rollout.lengths.max() > 6
    score = jax.jit(tiny.policy(what).score)
    for start, end, weights in zip((0, 3, 6), (3, 6, 8), ages, strict=True):
        own = jax.device_get(score(weights, rollout)[0])
        shown = rollout.mask[:, start:end]
        assert shown.sum() > 5
        assert tiny.bits(own[:, start:end][shown]) == tiny.bits(
            rollout.log_probs[:, start:end][shown]
        )
    assert not rollout.log_probs[~rollout.mask].any()
    # Until the weights change, it is what the oldest alone would have drawn.
    alone = programs.sampling_program(what, samples=tiny.GROUP)(ages[0], prompts, key)
    short = rollout.lengths <= 3
    assert tiny.bits(rollout.responses[:, :3]) == tiny.bits(jax.device_get(alone.responses)[:, :3])
    assert (rollout.lengths[short] == jax.device_get(alone.lengths)[short]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "slots"), [(1, None), (5, 3)])
def test_with_one_version_nothing_changes_within_a_response(every, slots):
    """Neither slots, nor the number of parts (three or two), nor entries beside it change a bit."""
    prompts, key = tiny.prompts(count=4), jax.random.key(1)
    weights = jax.jit(EXECUTION.prepare)(tiny.params(CONFIG))
    more = [{"name": "logit_noise", "std": 0.1}, {"name": "raw_log_probs"}]
    plain = programs.sampling_program(EXECUTION, samples=tiny.GROUP, mismatch=mismatch.build(more))(
        weights, prompts, key
    )
    dial = mismatch.build([*more, {"name": "in_flight_updates", "updates": 2, "every": every}])
    found = programs.in_flight_program(
        EXECUTION, samples=tiny.GROUP, mismatch=dial, batching=Batching(slots)
    )((weights,) * 3, prompts, key)
    assert tiny.bits(found) == tiny.bits(plain)


@pytest.mark.slow
def test_a_run_with_updates_in_flight_tells_drift_from_mismatch():
    found = [step.metrics for step in steps_of(built(dial=FLIGHT))]
    for number, metrics in enumerate(found, 1):
        assert metrics["numerical/log_ratio_abs_max"] == 0.0
        assert (metrics["drift/log_ratio_abs_mean"] > 0.0) == (number > 1)
    old = [step.metrics for step in steps_of(built(dial=STALE))]
    assert found[-1]["drift/log_ratio_abs_mean"] < old[-1]["drift/log_ratio_abs_mean"]


def test_parts_of_a_response():
    entry = FLIGHT.in_flight
    assert entry is not None
    assert [entry.parts(n) for n in (8, 6, 4, 3, 20)] == [
        [3, 3, 2],
        [3, 3],
        [3, 1],
        [3],
        [3, 3, 14],
    ]
    with pytest.raises(InputError, match="every = 3 must be less than the longest response, 3"):
        mismatch.check(FLIGHT, replace(EXECUTION, sampling=Sampling(3)))
    both = mismatch.build([OLD, {"name": "in_flight_updates", "updates": 1, "every": 2}])
    with pytest.raises(InputError, match="both say how old the weights are"):
        mismatch.check(both, EXECUTION)
