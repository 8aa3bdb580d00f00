"""A step's drawing: which prompts, graded how, and what takes the place of groups without signal.

No model: a sampler of ours answers with the names of its random numbers, and the task's own answers
say which of its prompts have groups of unequal rewards.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax import objectives, optimizers
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.rl import drawing, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning
from tim_jax.tasks import base, builtin
from tim_jax.tasks.base import Example, Grade, Task
from tim_jax.tasks.text import character_tokenizer

TOKENIZER: Any = character_tokenizer(builtin.ALPHABET)
TEXT = Text(TOKENIZER, max_prompt_length=4)
GROUP, PROMPTS, WIDTH = 3, 4, 5


def answers(prompts, key, samples):
    """Responses that spell the name of the prompt's numbers and that of the sample, `00123`."""
    del key
    ids = np.asarray(prompts.ids)
    texts = [f"{number:04d}{sample}" for number in ids for sample in range(samples)]
    rows = len(texts)
    return Rollout(
        prompts=jnp.repeat(prompts.tokens, samples, axis=0),
        prompt_lengths=jnp.repeat(prompts.lengths, samples),
        responses=jnp.asarray([TOKENIZER.encode(text) for text in texts], jnp.int32),
        lengths=jnp.full(rows, WIDTH, jnp.int32),
        log_probs=jnp.asarray([[float(text)] * WIDTH for text in texts], jnp.float32),
        finished=jnp.ones(rows, bool),
    )


class Sampler:
    """Counts its calls; `names` are those of the prompts that it was given."""

    def __init__(self, samples):
        self.samples, self.names, self.keys = samples, [], []

    def __call__(self, weights, prompts, key):
        assert weights == "weights"
        self.names += [np.asarray(prompts.ids).tolist()]
        self.keys.append(jax.random.key_data(key).tolist())
        return answers(prompts, key, self.samples)


@cache
def built():
    learning = Learning(objectives.rloo(), GROUP)
    return programs.build(
        Training(tiny.EXECUTION, learning, optimizers.adamw(optimizers.Rate(1.0)))
    )


def stub(greedy=False):
    """The programs of a run with a sampler of ours, and that sampler."""
    sampler = Sampler(GROUP)
    return replace(built(), sample=sampler, greedy=Sampler(1) if greedy else None), sampler


def grade(examples, completions):
    """Rewards of a prompt that speaks are those of its samples; of others they are all equal."""
    given = zip(examples, completions, strict=True)
    return [Grade(float(c[-1]) if e.answer == "speaks" else 7.0) for e, c in given]


def make_task(speaks, grader=grade):
    """One prompt for each of `speaks`; True: its groups have unequal rewards."""
    examples = [Example(f"{i}=", "speaks" if own else "silent") for i, own in enumerate(speaks)]
    return Task("toy", tuple(examples), (), grader)


def draw(task, *, seed=0, step=1, refills=0, greedy=False, prompts=PROMPTS, **changes):
    made, sampler = stub(greedy)
    objective = replace(made.training.learning.objective, **{"estimator": "rloo", **changes})
    made = tiny.varied(made, objective=objective)
    made = tiny.varied(made, prompts_per_step=prompts, refills=refills)
    begun = drawing.begin("weights", task, TEXT, programs=made, seed=seed, step=step)
    return drawing.finish(begun), sampler


def names_of(drawn):
    """What the rollout's rows say that they are of: (name of the prompt, sample)."""
    texts = [TOKENIZER.decode(row) for row in np.asarray(drawn.rollout.responses).tolist()]
    return [(int(text[:4]), int(text[4:])) for text in texts]


def groups_of(drawn):
    return [name for name, _ in names_of(drawn)][::GROUP]


def speaking(drawn):
    rewards = drawn.rewards.reshape(-1, GROUP)
    return [len(set(group)) > 1 for group in rewards.tolist()]


def check_in_step(drawn, task):
    """Rows, samples and rewards are of the same prompts, whole groups in consecutive rows."""
    found = names_of(drawn)
    count = len(found) // GROUP
    assert [sample for _, sample in found] == list(range(GROUP)) * count
    assert [name for name, _ in found] == np.repeat(groups_of(drawn), GROUP).tolist()
    assert len(drawn.samples) == len(drawn.rewards) == len(found) == drawn.rollout.lengths.size
    numbers = [float(f"{name:04d}{sample}") for name, sample in found]
    np.testing.assert_array_equal(drawn.rollout.log_probs[:, 0], np.asarray(numbers, np.float32))
    for (name, sample), told, reward in zip(found, drawn.samples, drawn.rewards, strict=True):
        example = task.train[name % len(task.train)]
        assert (told.prompt, told.answer) == (example.prompt, example.answer)
        assert told.completion == f"{name:04d}{sample}"
        assert told.reward == reward
    prompts = [TOKENIZER.decode(row[:2]) for row in np.asarray(drawn.rollout.prompts).tolist()]
    assert prompts == [sample.prompt[:2] for sample in drawn.samples]


SOME = [i % 3 == 0 for i in range(9)]


def test_without_refills_a_step_is_its_prompts_in_the_order_of_the_run():
    task = make_task(SOME)
    drawn, sampler = draw(task, seed=5, step=3)
    indices = base.order(5, 2, PROMPTS, 9)
    assert groups_of(drawn) == indices.tolist()
    assert sampler.names == [drawing.prompt_ids(indices, 9)]
    assert sampler.keys == [jax.random.key_data(drawing.step_key(5, 3)).tolist()]
    check_in_step(drawn, task)
    silent = [i % 3 != 0 for i in indices]
    assert drawn.metrics["groups_without_signal"] == np.mean(silent)
    assert drawn.metrics["without_signal"] == all(silent)
    assert not any(name.startswith("refill/") for name in drawn.metrics)
    assert drawn.greedy_rewards is None
    assert set(drawn.timing) == {"seconds_sampling", "seconds_grading"}


def test_groups_without_signal_give_their_places_to_others():
    """By hand: the places that were silent take the first groups drawn later that are not."""
    task = make_task(SOME)
    plain, _ = draw(task, step=2)
    drawn, sampler = draw(task, step=2, refills=8)
    assert sampler.names[0] == groups_of(plain)
    later = [n for names in sampler.names[1:] for n in names if SOME[n % 9]]
    expected = [n if SOME[n % 9] else later.pop(0) for n in groups_of(plain)]
    assert groups_of(drawn) == expected
    assert all(speaking(drawn))
    assert not all(speaking(plain))
    check_in_step(drawn, task)
    assert len(sampler.names) == 1 + drawn.metrics["refill/rounds"] < 9
    assert drawn.metrics["refill/groups_without_signal"] == 0.0
    assert drawn.metrics["refill/reward"] == np.mean(drawn.rewards)
    assert drawn.metrics["without_signal"] == 0.0
    # What the run is worth is said of what was drawn first.
    kept = ("reward", "reward_std", "groups_without_signal", "response_tokens")
    assert {k: drawn.metrics[k] for k in kept} == {k: plain.metrics[k] for k in kept}
    assert drawn.metrics["reward"] != drawn.metrics["refill/reward"]


@pytest.mark.parametrize("refills", [1, 2, 5])
def test_refills_are_bounded(refills):
    task = make_task([False] * 6)
    drawn, sampler = draw(task, refills=refills)
    assert len(sampler.names) == 1 + refills
    assert groups_of(drawn) == sampler.names[0]  # nothing came that was any better
    assert drawn.metrics["refill/rounds"] == refills
    assert drawn.metrics["groups_without_signal"] == 1.0
    assert drawn.metrics["refill/groups_without_signal"] == 1.0
    assert drawn.metrics["without_signal"] == 1.0
    check_in_step(drawn, task)


def test_a_step_has_no_signal_if_no_reward_differs_from_those_it_is_compared_with():
    """Without a baseline of their groups, prompts are compared with each other."""
    equal = make_task([False] * 6)
    by_prompt = make_task(
        [False] * 6, lambda examples, _: [Grade(float(e.prompt[0])) for e in examples]
    )
    for estimator, expected in (("rloo", (1.0, 1.0)), ("reinforce", (1.0, 0.0))):
        found = [draw(task, estimator=estimator)[0] for task in (equal, by_prompt)]
        assert tuple(drawn.metrics["without_signal"] for drawn in found) == expected
    # The greedy response to a prompt has the reward of all others to it.
    assert draw(by_prompt, estimator="remax", greedy=True)[0].metrics["without_signal"] == 1.0


def test_shaped_rewards_speak_where_those_of_the_task_are_equal():
    equal = make_task([False] * 6)
    shaped: dict[str, Any] = {"overlong_cache": 2, "max_length": 4}
    assert draw(equal, **shaped)[0].metrics["without_signal"] == 0.0
    dropped = draw(equal, **shaped, drop_uninformative=True)[0]
    assert dropped.metrics["without_signal"] == 1.0


def test_rewards_of_turns_speak_where_their_sums_are_equal():
    """By return: what follows a token differs between turns, unless all is given at the end."""
    drawn, _ = draw(make_task([False] * 6))
    at_end = np.zeros((len(drawn.rewards), WIDTH), np.float32)
    at_end[:, -1] = 7.0
    earlier = at_end.copy()
    earlier[0] = [0.0, 3.0, 0.0, 0.0, 4.0]
    for estimator in ("optimal_token_baseline", "reinforce"):
        objective = replace(built().training.learning.objective, estimator=estimator)
        for credit, turned, expected in (
            ("turn", at_end, 1.0),
            ("turn", earlier, 0.0),
            ("episode", earlier, 1.0),
        ):
            made = tiny.varied(built(), objective=objective, credit=credit)
            found = drawing.drawn_metrics(drawn._replace(turn_rewards=turned), made)
            assert found["without_signal"] == expected


def test_nothing_is_drawn_again_where_every_group_speaks():
    drawn, sampler = draw(make_task([True] * 6), refills=5)
    assert len(sampler.names) == 1
    assert drawn.metrics["refill/rounds"] == drawn.metrics["groups_without_signal"] == 0.0
    assert drawn.metrics["refill/reward"] == drawn.metrics["reward"]


def test_a_step_is_a_function_of_its_seed_and_number():
    """A resumed loop begins with step 3, and draws what one that came from step 1 draws."""
    task = make_task(SOME)
    steps = {step: draw(task, step=step, refills=3)[0] for step in (1, 2, 3)}
    again, _ = draw(task, step=3, refills=3)
    assert tiny.bits(again.rollout) == tiny.bits(steps[3].rollout)
    assert (again.samples, again.metrics) == (steps[3].samples, steps[3].metrics)
    assert len({tuple(groups_of(drawn)) for drawn in steps.values()}) == 3
    other, _ = draw(task, step=3, refills=3, seed=1)
    assert groups_of(other) != groups_of(again)


def test_refills_visit_the_prompts_in_an_order_of_their_own():
    """Every prompt as often as any other, and not those that the run comes to next."""
    task, seen, next_ones = make_task([False] * 12), Counter(), 0
    for step in range(1, 7):
        _, sampler = draw(task, step=step, refills=2)
        again = [name % 12 for names in sampler.names[1:] for name in names]
        seen.update(again)
        next_ones += again[:PROMPTS] == base.order(0, step, PROMPTS, 12).tolist()
    assert set(seen.values()) == {6 * 2 * PROMPTS // 12}
    assert next_ones == 0


@given(
    speaks=st.lists(st.booleans(), min_size=1, max_size=12),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(1, 50),
    refills=st.integers(0, 4),
    prompts=st.integers(1, 5),
)
@settings(max_examples=60)
def test_whatever_speaks_rows_stay_in_step(speaks, seed, step, refills, prompts):
    task = make_task(speaks)
    options: dict[str, Any] = {"seed": seed, "step": step, "prompts": prompts}
    drawn, sampler = draw(task, refills=refills, **options)
    check_in_step(drawn, task)
    # No two groups of a step have the same random numbers.
    names = [name for own in sampler.names for name in own]
    assert len(set(names)) == len(names)
    assert set(groups_of(drawn)) <= set(names)
    # A group that spoke stays where it was.
    plain, _ = draw(task, **options)
    for before, now, spoke in zip(groups_of(plain), groups_of(drawn), speaking(plain), strict=True):
        assert now == before or not spoke
    # Drawing ends when all speak, not before, or with the last refill.
    enough = sum(speaks[n % len(speaks)] for n in names) >= prompts
    assert all(speaking(drawn)) == enough
    assert enough or len(sampler.names) == 1 + refills
    fewer = [n for own in sampler.names[:-1] for n in own]
    assert len(sampler.names) == 1 or sum(speaks[n % len(speaks)] for n in fewer) < prompts


# Greedy responses


def test_a_greedy_response_to_each_prompt_is_graded_too():
    """The stub's greedy sample is number 0 of its group, so its reward is that of the first."""
    task = make_task(SOME)
    drawn, sampler = draw(task, step=2, greedy=True)
    assert sampler.names == [groups_of(drawn)]
    np.testing.assert_array_equal(drawn.greedy_rewards, drawn.rewards[::GROUP])
    assert drawn.greedy_rewards is not None
    assert drawn.greedy_rewards.dtype == np.float32


def test_greedy_rewards_move_with_their_groups():
    task = make_task(SOME)
    drawn, _ = draw(task, step=2, refills=8, greedy=True)
    plain, _ = draw(task, step=2, greedy=True)
    assert groups_of(drawn) != groups_of(plain)
    np.testing.assert_array_equal(drawn.greedy_rewards, drawn.rewards[::GROUP])


# The grader


def test_faults_of_all_that_was_graded_are_counted():
    def failing(examples, completions):
        return [replace(g, fault=base.TIMEOUT, reward=0.0) for g in grade(examples, completions)]

    drawn, _ = draw(make_task([True] * 6, failing), refills=2, greedy=True)
    assert drawn.metrics["grader/timeout"] == 3 * PROMPTS * (GROUP + 1)
    assert drawn.metrics["grader/error"] == 0.0


def test_a_grader_that_fails_in_a_refill_ends_the_step():
    calls = []

    def failing(examples, completions):
        calls.append(len(completions))
        if len(calls) > 1:
            raise InputError("reward my:own raised ValueError: no")
        return grade(examples, completions)

    with pytest.raises(InputError, match="my:own"):
        draw(make_task([False] * 6, failing), refills=2)
    assert calls == [PROMPTS * GROUP] * 2
