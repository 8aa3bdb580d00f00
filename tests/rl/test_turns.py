"""Runs with episodes: every step exact, resumed to the same bits; what is refused."""

from collections import deque
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
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
from tim_jax.rl import drawing, loop, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.learner import experience
from tim_jax.rl.rules import Turns
from tim_jax.rl.training import Training
from tim_jax.rl.types import Carried, Learning
from tim_jax.tasks import builtin
from tim_jax.tasks.base import History, Outcome
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


def bridged(text: Text, history: History = "refuse"):
    assert TASK.environment is not None
    return text.bridged(TASK.environment, EXECUTION.sampling.stop_tokens, history)


def environment():
    return bridged(TEXT)


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

    def __init__(self, asked=None):
        self.environment, self.begun = asked or environment(), 0

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
        return drawing.finish(drawing.begin(weights, TASK, TEXT, **how)).metrics

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


def evaluated(environment, text=TEXT):
    played = built().episodes
    assert played is not None
    return loop.evaluate(
        built().prepare(tiny.params(EXECUTION.config)),
        TASK,
        text,
        sample=played,
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


# --- episodes that are cut -------------------------------------------------------------------

# What was said with an 8 or 9 in it is shorter in later turns; and a template that only appends.
SHORTENS = """{%- for m in messages -%}
{%- set broken = m.role == 'assistant' and ('8' in m.content or '9' in m.content) -%}
{{ m.content[:1] if broken else m.content }}
{%- if m.role == 'assistant' -%}<eos>{%- endif -%}{%- endfor -%}"""
APPENDS = SHORTENS.replace("'8'", "'x'").replace("'9'", "'x'")


def templated(template):
    tokenizer = character_tokenizer(builtin.ALPHABET)
    tokenizer.chat_template = template
    return replace(TEXT, tokenizer=tokenizer)


def cut_steps(template, history, *, state=None, steps=2, compiled=None, wrapped=lambda x: x):
    text, compiled = templated(template), compiled or built()
    start = compiled.init(jax.tree.map(jnp.array, tiny.params(EXECUTION.config)))
    environment = bridged(text, history)
    how = {"programs": compiled, "environment": wrapped(environment), "seed": 0, "steps": steps}
    for step in loop.train(state or start, TASK, text, **how):
        yield step.number, step.metrics, step.samples, jax.tree.map(jnp.array, step.state)


@cache
def cut():
    return list(cut_steps(SHORTENS, "cut"))


@pytest.mark.slow
def test_a_run_whose_episodes_are_cut_is_exact():
    for _, metrics, samples, _ in cut():
        assert metrics["exact_share"] == 1.0
        assert metrics["compared_tokens"] == metrics["response_tokens"] > 0
        assert metrics["cuts"] > 0
        assert metrics["rows"] == 1 + metrics["cuts"] / len(samples)
        drawn = metrics["episode_length"] * len(samples) - metrics["reply_tokens"]
        assert drawn == metrics["response_tokens"] == metrics["tokens"]
        assert len(samples) == 2 * tiny.GROUP
        assert sum("\n" in sample.completion for sample in samples) > 0


@pytest.mark.slow
def test_a_template_that_only_appends_has_the_bits_of_a_run_without_cuts():
    assert told(cut_steps(APPENDS, "cut", steps=1)) == told(cut_steps(APPENDS, "refuse", steps=1))


@pytest.mark.slow
def test_a_run_with_cuts_that_is_killed_resumes_to_the_same_bits():
    seen = []
    with pytest.raises(SystemExit):
        deque(map(seen.append, cut_steps(SHORTENS, "cut", wrapped=Dying)))
    assert told(seen) == told(cut()[:1])
    middle = jax.tree.map(jnp.array, seen[-1][3])
    assert told(cut_steps(SHORTENS, "cut", state=middle)) == told(cut()[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 3, "pages": 9},
        {"micro_batch_tokens": 64},
        {"placement": Placement(fsdp=2), "slots": 4, "pages": 18},
    ],
)
def test_neither_slots_nor_buffers_nor_a_mesh_change_what_is_drawn_and_cut(changes):
    (step,) = cut_steps(
        SHORTENS, "cut", steps=1, compiled=programs.build(TRAINING.varied(**changes))
    )
    _, metrics, samples, state = step
    assert metrics["exact_share"] == 1.0
    assert samples == cut()[0][2]
    np.testing.assert_allclose(metrics["loss"], cut()[0][1]["loss"], atol=1e-6)
    np.testing.assert_allclose(metrics["gradient_norm"], cut()[0][1]["gradient_norm"], rtol=1e-4)
    assert list(changes) != ["slots", "pages"] or tiny.bits(state) == tiny.bits(cut()[0][3])


@cache
def drawn_and_cut():
    text = templated(SHORTENS)
    environment = bridged(text, "cut")
    weights = built().prepare(tiny.params(EXECUTION.config))
    how = {"programs": built(), "environment": environment, "seed": 0, "step": 1}
    return drawing.finish(drawing.begin(weights, TASK, text, **how))


def experienced(rollout, rewards, *of_turns, **options):
    learning = Learning(samples=tiny.GROUP, **options)

    def score(*_, **__):
        return rollout.log_probs, 1.0 + jnp.abs(rollout.log_probs)

    given = Carried(()), rollout, jnp.asarray(rewards), None, *of_turns
    made = partial(experience, score=score, learning=learning)
    return jax.jit(lambda *given: made({}, None, *given).experience)(*given)


def in_one_row(rollout):
    """The episodes' rows side by side: what an episode that was not cut would be."""
    wide = ("responses", "log_probs", "drawn")
    whole = {name: rollout.by_episode(getattr(rollout, name)) for name in wide}
    rows = slice(None, None, rollout.parts)
    made = np.asarray(rollout.prompt_lengths).reshape(-1, rollout.parts) > 0
    ends = np.asarray(rollout.finished).reshape(made.shape)
    finished = [row[: count.sum()][-1] for row, count in zip(ends, made, strict=True)]
    return replace(
        rollout,
        prompts=rollout.prompts[rows],
        prompt_lengths=rollout.prompt_lengths[rows],
        lengths=jnp.full(len(whole["drawn"]), whole["drawn"].shape[1]),
        finished=jnp.asarray(finished),
        parts=1,
        **whole,
    )


def test_an_episode_ended_as_its_last_row_did_even_if_that_has_no_token():
    """As where its only token was an end token that a sampler does not report."""
    rollout = drawn_and_cut().rollout
    count = jnp.sum(rollout.prompt_lengths.reshape(-1, rollout.parts) > 0, axis=1)
    last = jnp.arange(len(count)) * rollout.parts + count - 1
    assert count.max() > 1
    ended = jnp.zeros(len(rollout.lengths), bool).at[last].set(True)
    found = replace(rollout, lengths=rollout.lengths.at[last].set(0), finished=ended)
    assert found.finished_episodes.all()


OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence_mean_token_mean"},
    "turns": {},
    "dr_grpo": {"drop_cut": True},
    "reinforce": {},
    "reinforce_plus_plus": {"aggregation": "sequence_mean_token_mean"},
    "opo": {"aggregation": "sequence_mean_token_sum"},
    "rloo": {"aggregation": "constant_length", "overlong_cache": 3, "max_length": 9},
    "optimal_token_baseline": {},
    "pass_at_k": {"drop_uninformative": True},
}


def slow_but(quick, names):
    marks = {name: () if name in quick else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", slow_but(("grpo", "turns"), OBJECTIVES))
def test_an_episode_in_several_rows_learns_what_it_would_in_one(name):
    """Advantages and weights of every drawn token are those of the episode in a single row."""
    credit, estimator = ("turn", "reinforce") if name == "turns" else ("episode", name)
    options: dict[str, Any] = OBJECTIVES[name] | {"estimator": estimator}
    objective = objectives.Objective(**options)
    drawn = drawn_and_cut()
    assert drawn.rollout.drawn is not None
    ended = np.random.default_rng(1).random(len(drawn.rollout.lengths)) < 0.6
    rollout = replace(drawn.rollout, finished=(drawn.rollout.prompt_lengths > 0) & ended)
    assert not np.array_equal(rollout.finished_episodes, rollout.finished[:: rollout.parts])
    last = np.arange(drawn.rollout.drawn.shape[1]) == np.asarray(rollout.lengths)[:, None] - 1
    rewards = last * np.random.default_rng(0).integers(0, 9, last.shape).astype(np.float32) / 8
    sums = rewards.reshape(len(drawn.rewards), -1).sum(1)
    how = {"objective": objective, "mode": "recompute" if objective.needs_energy else "bypass"}
    how["credit"] = credit
    of_turns = (jnp.asarray(rewards),) if credit == "turn" else ()
    cut = experienced(rollout, sums, *of_turns, **how)
    of_turns = tuple(map(rollout.by_episode, of_turns))
    whole = experienced(in_one_row(rollout), sums, *of_turns, **how)
    mask = np.asarray(whole.mask)
    np.testing.assert_array_equal(rollout.by_episode(cut.mask), mask)

    def of_tokens(one):
        given = one.advantages
        wide = given if given.ndim == 2 else jnp.broadcast_to(given[:, None], one.mask.shape)
        return np.where(mask, one.rollout.by_episode(wide), 0)

    np.testing.assert_array_equal(of_tokens(cut), of_tokens(whole))
    assert np.abs(of_tokens(cut)).max() > 0.1
    weights = objective.token_weights(cut.mask, parts=rollout.parts)
    np.testing.assert_array_equal(rollout.by_episode(weights), objective.token_weights(whole.mask))


@pytest.mark.slow
def test_the_loss_of_episodes_that_were_cut_is_the_sum_by_hand():
    drawn, training = drawn_and_cut(), TRAINING.varied(objective=objectives.Objective())
    rollout, rewards = drawn.rollout, np.arange(8, dtype=np.float64)
    assert rollout.drawn is not None
    used = programs.build(training)
    state = used.init(jax.tree.map(jnp.array, tiny.params(EXECUTION.config)))
    weights = used.prepare(tiny.params(EXECUTION.config))
    given = state, weights, rollout, jnp.asarray(rewards, jnp.float32)
    _, _, exactness, metrics = loop.learn(*given, programs=used)
    groups = rewards.reshape(-1, tiny.GROUP)
    centred = groups - groups.mean(1, keepdims=True)
    advantages = (centred / (groups.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)
    tokens = np.asarray(rollout.mask).reshape(8, -1).sum(1)
    # Each token's ratio is 1, so its loss is less its episode's advantage.
    np.testing.assert_allclose(
        metrics["loss"], -(advantages * tokens).sum() / tokens.sum(), rtol=1e-5
    )
    assert int(exactness.compared) == tokens.sum() == rollout.drawn.sum()
    assert int(exactness.unequal) == 0


def test_refilled_groups_have_as_many_rows_as_the_longest():
    """Of a step whose first draw was cut and whose refill was not, and the reverse."""
    cut_ones, plain = drawn_and_cut(), None
    assert cut_ones.turn_rewards is not None
    rollout = replace(
        jax.tree.map(lambda x: x[:: cut_ones.rollout.parts], cut_ones.rollout), parts=1
    )
    flat = cut_ones.rewards * 0
    plain = cut_ones._replace(
        rollout=rollout, rewards=flat, turn_rewards=cut_ones.turn_rewards[:: cut_ones.rollout.parts]
    )
    signal = cut_ones._replace(rewards=np.arange(8, dtype=np.float32))
    merged = drawing._refilled(plain, signal, programs=built())
    assert merged.rollout.parts == cut_ones.rollout.parts
    assert tiny.bits(merged.rollout) == tiny.bits(cut_ones.rollout)
    np.testing.assert_array_equal(merged.turn_rewards, cut_ones.turn_rewards)
    merged = drawing._refilled(
        cut_ones._replace(rewards=flat), plain._replace(rewards=signal.rewards), programs=built()
    )
    assert tiny.bits(merged.rollout) == tiny.bits(rollout.in_parts(cut_ones.rollout.parts))


def test_an_evaluation_counts_episodes_and_not_their_rows():
    text = templated(SHORTENS)
    environment = bridged(text, "cut")
    metrics, samples = evaluated(environment, text)
    assert metrics["prompts"] == 3
    assert len(samples) == 3 * tiny.GROUP
    assert metrics["length"] <= 16


# --- credit ----------------------------------------------------------------------------------


def two_turns(hidden=()):
    """Responses of two turns of three tokens, with a reply's between, and the turns' rewards."""
    column = np.arange(10)[None, :] + np.zeros((tiny.ROWS, 1), np.int32)
    rollout = replace(
        jax.device_get(tiny.rollout()),
        drawn=column % 4 < 3,
        lengths=np.full(tiny.ROWS, 8, np.int32),
        hidden=np.isin(column, hidden),
    )
    return rollout, np.where(column == 2, 1, np.where(column == 6, 4, 0)).astype(np.float32)


@jax.jit
def credited(rollout, rewards, *of_turns):
    objective = objectives.Objective(estimator="reinforce")
    learning = Learning(objective, tiny.GROUP, credit="turn")
    how = {"score": lambda *_: (jnp.zeros((tiny.ROWS, 10)), None), "learning": learning}
    given = rollout, jnp.sum(rewards, axis=1), None, *of_turns
    return experience({}, None, Carried(()), *given, **how).experience.advantages


def test_a_turn_may_be_given_the_rewards_from_it_on_alone():
    rollout, rewards = two_turns()
    np.testing.assert_array_equal(credited(rollout, rewards), np.full(tiny.ROWS, 5.0, np.float32))
    returns = np.asarray(credited(rollout, rewards, rewards))[0]
    assert returns[:7].tolist() == [5.0] * 3 + [0.0] + [4.0] * 3  # the reply has none


@pytest.mark.parametrize("masked", [[6], [2, 6], [4, 5, 6]])
def test_a_turns_reward_outlives_its_last_token(masked):
    """Masked, dropped or rejected: the other tokens up to there have it."""
    (whole, rewards), (masking, _) = two_turns(), two_turns(masked)
    found, expected = (np.asarray(credited(x, rewards, rewards)) for x in (masking, whole))
    left = np.setdiff1d(np.arange(8), masked)
    np.testing.assert_array_equal(found[:, left], expected[:, left])
    assert not found[:, masked].any()


def test_a_turns_reward_outlives_an_end_that_a_shorter_shape_has_no_place_for():
    """The dial has dropped the ends, after which the responses fit half of their width."""
    (rollout, _), rewards = two_turns(), np.zeros((tiny.ROWS, 10), np.float32)
    rewards[:, 2], rewards[:, 5] = 1, 4
    short = replace(rollout, lengths=np.full(tiny.ROWS, 5, np.int32))
    taken = []
    learning = Learning(objectives.Objective(estimator="reinforce"), tiny.GROUP, credit="turn")
    training = SimpleNamespace(learning=learning, length_buckets=2)
    built: Any = SimpleNamespace(training=training, experience=lambda *given: taken.extend(given))
    state: Any = SimpleNamespace(carried=None)
    with pytest.raises(AttributeError):  # nothing is made of what was taken
        loop.learn(state, None, short, jnp.zeros(1), programs=built, turn_rewards=rewards)
    assert taken[-1].tolist() == [[0.0, 0.0, 1.0, 0.0, 4.0]] * tiny.ROWS


# --- what there is not -----------------------------------------------------------------------

REFUSED = {
    "staleness": ({"max_staleness": 1}, "max_staleness = 1: must be 0"),
    "greedy": (
        {"objective": objectives.Objective(estimator="remax")},
        "estimator = 'remax': needs greedy responses",
    ),
    "credit": ({"credit": "turn"}, "credit = 'turn': needs an estimator of what follows"),
    "turn": ({"turns": Turns(2, 30)}, "max_tokens = 30: must be at most the 24 tokens"),
    "noise": (
        {"turns": Turns(4, 4, "cut"), "noise_scale": True, "micro_batch": 4},
        'noise_scale = True: needs .*history = "cut" adds some',
    ),
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
