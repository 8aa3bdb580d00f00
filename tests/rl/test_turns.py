"""Runs with episodes: every step exact, resumed to the same bits; what is refused."""

from collections import deque
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import objectives, optimizers
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Batching, Sampling
from tim_jax.placement import Placement
from tim_jax.rl import drawing, evaluation, loop, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.experience import experience
from tim_jax.rl.rules import Turns
from tim_jax.rl.training import Training
from tim_jax.rl.types import Carried, Learning
from tim_jax.tasks import builtin
from tim_jax.tasks.episodes import Outcome
from tim_jax.tasks.text import character_tokenizer

TOKENIZER: Any = character_tokenizer(builtin.ALPHABET)
TEXT = Text(TOKENIZER, max_prompt_length=6)
TASK = builtin.guessing(format_reward=0.5, eval_size=8)
EXECUTION = replace(
    tiny.EXECUTION,
    config=replace(tiny.CONFIG, vocab_size=len(TOKENIZER)),
    sampling=Sampling(24, stop_tokens=(TOKENIZER.eos_token_id, 9)),
)
LEARNING = Learning(objectives.grpo(kl_coefficient=0.0), tiny.GROUP, micro_batch=4)
OPTIMIZER = optimizers.adamw(optimizers.Rate(1e-2))
TRAINING = Training(
    EXECUTION, LEARNING, OPTIMIZER, prompts_per_step=2, turns=Turns(4, 4), length_buckets=2
)


@cache
def built():
    return programs.build(TRAINING)


def environment():
    return TEXT.bridged(TASK.environment, EXECUTION.sampling.stop_tokens)


def finished(state=None, *, steps=3, asked=None):
    start = built().init(jax.tree.map(jnp.array, tiny.params(EXECUTION.config)))
    for step in loop.train(
        start if state is None else state,
        TASK,
        TEXT,
        programs=built(),
        seed=0,
        steps=steps,
        environment=asked or environment(),
    ):
        yield step.number, step.metrics, step.samples, jax.tree.map(jnp.array, step.state)


def told(steps):
    return [(n, repr(metrics), samples, tiny.bits(state)) for n, metrics, samples, state in steps]


@cache
def whole():
    return list(finished())


def test_every_step_is_exact_and_says_how_its_episodes_went():
    for _, metrics, samples, _ in whole():
        assert metrics["exact_share"] == 1.0
        assert metrics["compared_tokens"] == metrics["response_tokens"] > 0
        assert 1 <= metrics["turns"] <= 4
        drawn = metrics["episode_length"] * len(samples) - metrics["reply_tokens"]
        assert drawn == metrics["response_tokens"]
        assert metrics["environment/failures"] == 0
        assert len(samples) == 2 * tiny.GROUP


class Dying:
    """An environment that takes the program with it, in a later turn of the second step."""

    def __init__(self):
        self.environment, self.begun = environment(), 0

    def outcomes(self, turns):
        self.begun += sum(turn.turn == 0 for turn in turns)
        if self.begun > tiny.GROUP * 2 and any(turn.turn > 0 for turn in turns):
            raise SystemExit("killed")
        yield from self.environment.outcomes(turns)


def test_a_run_that_is_killed_in_the_middle_of_a_turn_resumes_to_the_same_bits():
    seen = []
    with pytest.raises(SystemExit):
        deque(map(seen.append, finished(asked=Dying())))
    assert len(seen) == 1
    assert told(seen) == told(whole()[: len(seen)])
    middle = jax.tree.map(jnp.array, seen[-1][3])
    assert told(finished(middle)) == told(whole()[len(seen) :])


class Alike:
    """An environment that rewards nothing, so that no group has a signal; every turn fails."""

    def outcomes(self, turns):
        for index, _ in enumerate(turns):
            failure = "crash: it was killed by signal 9"
            yield index, Outcome(None, np.zeros(0, np.int32), done=True, failure=failure)


def test_metrics_of_episodes_are_of_what_was_drawn_first_and_failures_of_all():
    def draw(refills):
        used = replace(built(), training=TRAINING.varied(refills=refills))
        weights = used.prepare(tiny.params(EXECUTION.config))
        how = {"programs": used, "environment": Alike(), "seed": 0, "step": 1}
        return drawing.draw(weights, TASK, TEXT, **how).metrics

    once, again = draw(0), draw(1)
    assert again["refill/rounds"] == 1.0
    rows = TRAINING.prompts_per_step * tiny.GROUP
    failures = "environment/failures"
    assert (once.pop(failures), again[failures]) == (rows, 2 * rows)
    assert once["turns"] == 1.0
    assert once.items() <= again.items()


def test_an_evaluation_counts_failures_of_what_it_was_asked_for():
    metrics, samples = evaluated(Alike())
    assert metrics["environment/failures"] == len(samples) == 3 * tiny.GROUP


def test_tools_of_the_template_s_options_and_of_an_environment_are_refused():
    own = replace(TEXT, template_options=(("tools", []),))
    assert own.declaring(TASK.environment) is own  # which declares none
    with pytest.raises(InputError, match=r"model\.template_options\.tools: .*; leave these out"):
        own.declaring(builtin.arithmetic(eval_size=8).environment)


def evaluated(environment):
    return evaluation.evaluate(
        built().prepare(tiny.params(EXECUTION.config)),
        TASK,
        TEXT,
        sample=built().episodes,
        environment=environment,
        key=jax.random.key(0),
        prompts=3,
        samples=tiny.GROUP,
        batch=2,
        ks=[1],
    )


def test_an_evaluation_plays_episodes_too():
    metrics, samples = evaluated(environment())
    assert metrics["prompts"] == 3
    assert len(samples) == 3 * tiny.GROUP
    assert metrics["reward"] == pytest.approx(np.mean([sample.reward for sample in samples]))


# --- credit ----------------------------------------------------------------------------------


def test_a_turn_may_be_given_the_rewards_from_it_on_alone():
    rollout = replace(
        tiny.rollout(),
        drawn=jnp.arange(10)[None, :] % 4 < jnp.asarray([[3]] * tiny.ROWS),
    )
    rewards = np.zeros((tiny.ROWS, 10), np.float32)
    rewards[:, 2], rewards[:, 6] = 1.0, 4.0
    learning = Learning(objectives.Objective(estimator="reinforce"), tiny.GROUP, credit="turn")

    def advantages(*of_turns):
        return experience(
            None,
            None,
            Carried(()),
            replace(rollout, lengths=jnp.full(tiny.ROWS, 8)),
            jnp.asarray(rewards.sum(1)),
            None,
            *of_turns,
            score=lambda *_: (jnp.zeros((tiny.ROWS, 10)), None),
            learning=learning,
        ).experience.advantages

    np.testing.assert_array_equal(advantages(), np.full(tiny.ROWS, 5.0, np.float32))
    returns = np.asarray(advantages(jnp.asarray(rewards)))[0]
    assert returns[:7].tolist() == [5.0] * 3 + [0.0] + [4.0] * 3  # the reply has none


# --- what there is not -----------------------------------------------------------------------

REFUSED = {
    "staleness": ({"max_staleness": 1}, "max_staleness = 1: must be 0"),
    "greedy": (
        {"objective": objectives.Objective(estimator="remax")},
        "estimator = 'remax': needs greedy responses",
    ),
    "credit": ({"credit": "turn"}, "credit = 'turn': needs an estimator of what follows"),
    "turn": ({"turns": Turns(2, 30)}, "max_tokens = 30: must be at most the 24 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_episodes_cannot_have_is_refused_by_name(name):
    changes, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        TRAINING.varied(**changes).check()


def test_credit_for_turns_needs_turns():
    with pytest.raises(InputError, match="credit = 'turn': needs episodes of several turns"):
        TRAINING.varied(turns=None, credit="turn").check()
    with pytest.raises(InputError, match="credit"):
        TRAINING.varied(credit="token")


@pytest.mark.slow
def test_slots_and_pages_change_no_bit_of_a_run():
    few = programs.build(TRAINING.varied(slots=3, pages=9))
    start = few.init(jax.tree.map(jnp.array, tiny.params(EXECUTION.config)))
    steps = loop.train(start, TASK, TEXT, programs=few, seed=0, steps=1, environment=environment())
    (step,) = steps
    assert Batching(3, pages=9) == few.training.sampler.batching
    _, metrics, samples, state = whole()[0]
    assert step.metrics["exact_share"] == metrics["exact_share"] == 1.0
    assert step.samples == samples
    assert tiny.bits(step.state) == tiny.bits(state)


@pytest.mark.slow
def test_episodes_and_learner_on_meshes_of_their_own():
    """Samples and metrics are those of one device, and every drawn token has the learner's bits."""
    where = {"placement": Placement(fsdp=2), "sampler_placement": Placement(data=2)}
    meshed = programs.build(TRAINING.varied(**where, own_devices=True, slots=4))
    start = meshed.init(jax.tree.map(jnp.array, tiny.params(EXECUTION.config)))
    (step,) = loop.train(
        start, TASK, TEXT, programs=meshed, seed=0, steps=1, environment=environment()
    )
    _, metrics, samples, _ = whole()[0]
    assert step.samples == samples
    assert step.metrics["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-4)
    known = {name: x for name, x in step.metrics.items() if not name.startswith("gradient")}
    assert known == {name: metrics[name] for name in known}
    assert known["exact_share"] == 1.0
