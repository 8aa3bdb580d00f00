"""A step's rollouts: drawn, graded, and drawn again for groups whose rewards are all equal.

`begin` has the devices start with the rollouts, `finish` waits for them and grades. What a step
draws is a function of (seed, step): its prompts come from the run's order over the training set,
those of its refills from a second order.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import placement
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts, Rollout, make_key, more_rows
from tim_jax.mismatch import dial
from tim_jax.objectives import advantages
from tim_jax.rl import episodes
from tim_jax.rl.episodes import Played
from tim_jax.rl.programs import Programs
from tim_jax.tasks import base
from tim_jax.tasks.base import Answering, Environment, Example, History, SharedGrader, Task
from tim_jax.tasks.bridges import Bridge, Bridged
from tim_jax.tasks.text import check_prompts, dated, encode_prompt, unread_options, uses_template

SAMPLING = "sampling"  # what a wait for it, and memory that runs out in it, are called

# Added to the seed of the order in which refills visit the prompts.
_REFILL = 0x5EED


@dataclass(frozen=True)
class Text:
    """How a task's text becomes tokens.

    `now` is what the clock of a chat template (`strftime_now`) says: one time for all prompts.
    """

    tokenizer: Any
    max_prompt_length: int
    chat_template: bool | Literal["auto"] = "auto"
    template_options: tuple[tuple[str, Any], ...] = ()
    now: datetime = field(default_factory=datetime.now)

    def encoded(self, examples: Sequence[Example], ids: Sequence[int]) -> list[list[int]]:
        """The token ids of examples; refuses those longer than `max_prompt_length`."""
        encode, how = partial(encode_prompt, self.tokenizer), self._how
        return [
            encode(example.prompt, where=_named("prompt", number, example), **how)
            for number, example in zip(ids, examples, strict=True)
        ]

    def prompts(self, examples: Sequence[Example], ids: Sequence[int]) -> Prompts:
        """`encoded` examples, padded to `max_prompt_length`."""
        encoded = self.encoded(examples, ids)
        tokens = np.zeros((len(encoded), self.max_prompt_length), np.int32)
        for row, prompt in zip(tokens, encoded, strict=True):
            row[: len(prompt)] = prompt
        return Prompts(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(prompt) for prompt in encoded], jnp.int32),
            ids=jnp.asarray(np.asarray(ids, np.int32)),
        )

    def unread(self, options: Mapping[str, Any]) -> list[str]:
        """The options of the chat template that no prompt depends on, see `unread_options`."""
        return unread_options(self.tokenizer, options, chat_template=self.chat_template)

    def declaring(self, source: Answering | None) -> "Text":
        """With the tools of an environment, if there is one, in every prompt.

        Raises:
          InputError: the options of the template have other tools.
        """
        if source is None or not source.tools:
            return self
        if "tools" in dict(self.template_options):
            raise InputError(
                "model.template_options.tools: the task's environment declares its own tools; leave"
                " these out"
            )
        return replace(self, template_options=(*self.template_options, ("tools", [*source.tools])))

    def bridged(
        self, source: Answering, stop_tokens: Sequence[int], history: History = "refuse"
    ) -> Environment:
        """An environment in tokens, of one that answers in text.

        Raises:
          InputError: the chat template rewrites earlier turns, which `history` does not allow.
        """
        bridge = Bridge(
            self.tokenizer,
            stop_tokens=stop_tokens,
            templated=uses_template(self.tokenizer, self.chat_template),
            options=self._options,
            history=history,
        )
        return Bridged(source, bridge)

    def check(self, name: str, examples: Iterable[tuple[int, Example]]) -> None:
        """Refuses examples, called `name` and their number, one of which `prompts` would refuse."""
        named = ((_named(name, number, example), example.prompt) for number, example in examples)
        check_prompts(self.tokenizer, named, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "chat_template": self.chat_template,
            "template_options": self._options,
            "max_length": self.max_prompt_length,
        }

    @property
    def _options(self) -> Mapping[str, Any]:
        return dated(self.tokenizer, dict(self.template_options), self.now)

    def completions(self, rollout: Rollout) -> list[str]:
        """The responses as text, without special tokens; other stop tokens stay."""
        responses, lengths = jax.device_get((rollout.responses, rollout.lengths))
        rows = (r[:n].tolist() for r, n in zip(responses, lengths, strict=True))
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def _named(name: str, number: int, example: Example) -> str:
    return f"{name} {number} ({example.where})" if example.where else f"{name} {number}"


class Sample(NamedTuple):
    """One completion and its reward."""

    prompt: str
    completion: str
    answer: str
    reward: float


class Drawn(NamedTuple):
    """A step's rollouts and their rewards. Groups are in consecutive rows."""

    rollout: Rollout
    samples: list[Sample]
    rewards: np.ndarray  # f32[B], or where the rollout has parts, one for each episode
    greedy_rewards: np.ndarray | None  # f32[prompts], of the greedy responses, if they are drawn
    metrics: dict[str, float]
    timing: dict[str, float]  # what depends on the clock too, as in `loop.Step`
    turn_rewards: np.ndarray | None = None  # f32[B, R], of an environment, at turns' last tokens


class _Sampling(NamedTuple):
    """Rollouts that the devices are at work on."""

    examples: Sequence[Example]
    rollout: Rollout
    greedy: Rollout | None
    seconds: float  # that it took to begin
    played: Played | None = None  # where an environment has had its say


class _Draw(NamedTuple):
    """Who draws and grades the prompts of a step, and by which key."""

    weights: Any
    task: Task
    text: Text
    programs: Programs
    environment: Environment | None
    key: jax.Array

    def sample(self, rows: Sequence[int], names: Sequence[int]) -> _Sampling:
        """Has the devices begin; with an environment, they are done.

        `rows` are those of the training set, `names` what their random numbers are keyed by.
        """
        examples = [self.task.train[row] for row in rows]
        prompts, programs = self.text.prompts(examples, names), self.programs
        started, drawn_by = time.perf_counter(), (self.weights, prompts, self.key)
        with waiting.during(SAMPLING, about=programs.compiling(SAMPLING)):
            if programs.episodes is not None:
                asked = {"programs": programs.episodes, "environment": self.environment}
                played = play(self.weights, self.text, examples, prompts, self.key, **asked)
                took = time.perf_counter() - started
                return _Sampling(examples, played.rollout, None, took, played)
            rollout = programs.sample(*drawn_by)
            best = None if programs.greedy is None else programs.greedy(*drawn_by)
        return _Sampling(examples, rollout, best, time.perf_counter() - started)

    def grade(self, sampling: _Sampling) -> Drawn:
        """Waits for the devices, and grades."""
        examples, rollout, best, begun, played = sampling
        if played is not None:
            samples = of_episodes(examples, played, self.text)
            timing = _seconds(begun - played.seconds, played.seconds)
            timing["extended_tokens"] = float(played.extended)
            faults = {"environment/failures": float(played.failed.sum())}
            own = samples, played.rewards, None, faults, timing, played.turn_rewards
            return Drawn(rollout, *own)
        started = time.perf_counter()
        with waiting.during(SAMPLING):  # it is compiled by now
            jax.block_until_ready((rollout, best))
        sampled = time.perf_counter()
        training = self.programs.training
        said = dial.without_replaced_ends(
            rollout,
            mismatch=training.sampler.mismatch,
            stop_tokens=training.execution.sampling.stop_tokens,
        )
        samples, faults = graded(self.task, self.text, examples, said, training.learning.samples)
        greedy = None
        if best is not None:
            graded_best, more = graded(self.task, self.text, examples, best, 1)
            greedy, faults = _rewards(graded_best), _added(faults, more)
        timing = _seconds(begun + sampled - started, time.perf_counter() - sampled)
        return Drawn(rollout, samples, _rewards(samples), greedy, faults, timing)


class Begun(NamedTuple):
    """A step's draw that has begun."""

    draw: _Draw
    refills: list[tuple[list[int], list[int]]]  # rows of the training set, and their names
    first: _Sampling


def shared(task: Task) -> Task:
    """The task, graded in parts by several processes if there are any: all then must grade."""
    count = jax.process_count()
    if count == 1:
        return task
    grade = SharedGrader(task.grade, jax.process_index(), count, placement.texts)
    return replace(task, grade=grade)


def begin(
    weights: Any,
    task: Task,
    text: Text,
    *,
    programs: Programs,
    seed: int,
    step: int,
    environment: Environment | None = None,
) -> Begun:
    """Has the sampler's devices draw for the groups of a step's prompts; steps count from 1.

    It waits for nothing but a first compilation; with an `environment` (where `programs` have
    episodes) for all of the step's first episodes. `weights` are the sampler's.

    Raises:
      InputError: a prompt that is too long.
    """
    prompts, refills = programs.training.prompts_per_step, programs.training.refills
    size = len(task.train)
    indices = base.order(seed, step - 1, prompts, size)
    if refills:
        more = base.order(seed + _REFILL, step - 1, prompts * refills, size)
        indices = np.concatenate([indices, more])
    names = prompt_ids(indices, size)
    parts = [slice(start, start + prompts) for start in range(0, len(names), prompts)]
    first, *others = [(indices[rows].tolist(), names[rows]) for rows in parts]
    draw = _Draw(weights, task, text, programs, environment, step_key(seed, step))
    return Begun(draw, others, draw.sample(*first))


def finish(begun: Begun) -> Drawn:
    """Waits for a step's rollouts and grades them.

    While a group's rewards are all equal, and at most `refills` times, as many prompts again are
    drawn, and their groups with a signal take the places of those without (DAPO's dynamic sampling,
    arXiv 2503.14476, 3.2). `reward` and the other metrics of the rollout are of what was drawn
    first, because groups after a refill are selected by their rewards. `refill/*` report the
    refills.

    Raises:
      InputError: a prompt that is too long, a reward function that raises or returns nonsense.
    """
    draw, programs = begun.draw, begun.draw.programs
    drawn, group = draw.grade(begun.first), programs.training.learning.samples
    metrics = drawn_metrics(drawn, programs)
    if begun.first.played is not None:
        metrics |= begun.first.played.metrics
    if not begun.refills:
        return drawn._replace(metrics=metrics | drawn.metrics)
    rounds, silent = 0, _silent(drawn.rewards, group)
    for refill in begun.refills:
        if not silent.any():
            break
        drawn = _refilled(drawn, draw.grade(draw.sample(*refill)), programs=programs)
        rounds, silent = rounds + 1, _silent(drawn.rewards, group)
    metrics |= {
        "refill/rounds": float(rounds),
        "refill/groups_without_signal": float(np.mean(silent)),
        "refill/reward": float(np.mean(drawn.rewards)),
        "without_signal": _without_signal(drawn, programs),
    }
    return drawn._replace(metrics=metrics | drawn.metrics)


def drawn_metrics(drawn: Drawn, programs: Programs) -> dict[str, float]:
    """Metrics of a step's rollouts and rewards, and of how much these say.

    Lengths are of drawn tokens: in an episode, of all its turns.
    """
    rollout, group = drawn.rollout, programs.training.learning.samples
    lengths, finished = jax.device_get((rollout.drawn_lengths, rollout.finished_episodes))
    metrics = {
        "reward": float(np.mean(drawn.rewards)),
        "reward_std": float(np.std(drawn.rewards)),
        "response_length": float(np.mean(lengths)),
        "response_length_max": float(np.max(lengths)),
        "response_tokens": float(np.sum(lengths)),
        "cut_share": float(1.0 - np.mean(finished)),
    }
    if group > 1:  # a single sample always equals itself
        silent = _silent(drawn.rewards, group)
        metrics["groups_without_signal"] = float(np.mean(silent))
    return metrics | {"without_signal": _without_signal(drawn, programs)}


def play(
    weights: Any,
    text: Text,
    examples: Sequence[Example],
    prompts: Prompts,
    key: jax.Array,
    *,
    programs: episodes.Programs,
    environment: Environment | None,
) -> Played:
    """Plays the episodes of some examples, `prompts` of theirs; see `episodes.play`."""
    if environment is None:
        raise InputError("episodes of several turns need an environment; the task has none")
    return episodes.play(
        weights,
        prompts,
        key,
        programs=programs,
        environment=environment,
        states=[base.state_of(example) for example in examples],
        asked=[example.prompt for example in examples],
        text=partial(text.tokenizer.decode, skip_special_tokens=True),
    )


def of_episodes(examples: Sequence[Example], played: Played, text: Text) -> list[Sample]:
    """Episodes as samples. What their environment replied is in the completions."""
    count = len(played.rewards) // len(examples)
    repeated = [example for example in examples for _ in range(count)]
    rows = zip(repeated, _said(played.rollout, text), played.rewards, strict=True)
    return [Sample(prompt_text(x), said, x.answer, float(reward)) for x, said, reward in rows]


def _said(rollout: Rollout, text: Text) -> list[str]:
    """The text of each episode. One in several rows has of each what differs from the one before,
    on a new line: the conversation from where it was rendered anew, and what follows."""
    if rollout.parts == 1:
        return text.completions(rollout)
    rollout, said = jax.device_get(rollout), []
    sizes = rollout.prompt_lengths, rollout.lengths
    rows = zip(rollout.prompts, rollout.responses, *sizes, strict=True)
    wholes = [[*prompt[:start], *response[:end]] for prompt, response, start, end in rows]
    for first in range(0, len(wholes), rollout.parts):
        before = wholes[first][: rollout.prompt_lengths[first]]
        texts = []
        for whole in filter(None, wholes[first : first + rollout.parts]):
            pairs = enumerate(zip(before, whole, strict=False))
            start = next((i for i, (x, y) in pairs if x != y), min(len(before), len(whole)))
            texts.append(text.tokenizer.decode(whole[start:], skip_special_tokens=True))
            before = whole
        said.append("\n".join(texts))
    return said


def all_failed(metrics: Mapping[str, float], episodes: int) -> bool:
    """Whether the environment failed in all `episodes` of a step, and in all those of refills."""
    drawn = episodes * (1.0 + metrics.get("refill/rounds", 0.0))
    return metrics.get("environment/failures") == drawn


def _seconds(sampling: float, grading: float) -> dict[str, float]:
    return {"seconds_sampling": sampling, "seconds_grading": grading}


def _rewards(samples: Sequence[Sample]) -> np.ndarray:
    return np.asarray([sample.reward for sample in samples], np.float32)


def _added(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return {name: value + right[name] for name, value in left.items()}


def _silent(rewards: np.ndarray, group: int) -> np.ndarray:
    """bool[groups], True for groups of equal rewards."""
    groups = rewards.reshape(-1, group)
    return np.all(groups == groups[:, :1], axis=1)


def _without_signal(drawn: Drawn, programs: Programs) -> float:
    """1.0 if no reward differs from those that it is compared with, so that none says anything.

    Rewards that are shaped, and those of turns if each has its own, may differ where those of the
    task do not, unless groups of equal ones are left out.
    """
    learning = programs.training.learning
    objective, group = learning.objective, learning.samples
    rewards = drawn.rewards
    if not objective.drop_uninformative:
        if objective.shapes_rewards:
            return 0.0
        if learning.credit == "turn" and drawn.turn_rewards is not None:
            rewards, group = _bounds(drawn.turn_rewards, drawn.rollout), 2 * group
    if objective.estimator in advantages.GROUP_BASELINES:
        return float(_silent(rewards, group).all())
    if drawn.greedy_rewards is not None:
        return float(np.all(rewards.reshape(-1, group) == drawn.greedy_rewards[:, None]))
    return float(len({*rewards.tolist()}) == 1)


def _bounds(turn_rewards: np.ndarray, rollout: Rollout) -> np.ndarray:
    """f64[2 B], the least and the most that follows a token of each of B episodes."""
    own = turn_rewards.astype(np.float64), jax.device_get(rollout.mask)
    of_turns, seen = (x.reshape(-1, rollout.parts * x.shape[1]) for x in own)
    returns = np.cumsum(of_turns[:, ::-1], axis=1)[:, ::-1]
    returns = np.where(seen, returns, returns[:, :1])
    return np.stack([returns.min(axis=1), returns.max(axis=1)], axis=1).ravel()


def _refilled(drawn: Drawn, more: Drawn, *, programs: Programs) -> Drawn:
    """`drawn`, with groups without signal replaced by those of `more` that have one."""
    group = programs.training.learning.samples
    empty = np.flatnonzero(_silent(drawn.rewards, group))
    full = np.flatnonzero(~_silent(more.rewards, group))
    count = len(drawn.rewards) // group
    places = np.arange(count)
    places[empty[: len(full)]] = count + full[: len(empty)]
    rows = _members(places, group)
    samples = [*drawn.samples, *more.samples]
    greedy, turned = None, None
    parts = max(drawn.rollout.parts, more.rollout.parts)
    both = [one.rollout.in_parts(parts) for one in (drawn, more)]
    of_rows = _members(rows, parts)
    if drawn.turn_rewards is not None and more.turn_rewards is not None:
        turned = np.concatenate(
            [more_rows(one.turn_rewards, one.rollout.parts, parts) for one in (drawn, more)]
        )[of_rows]
    if drawn.greedy_rewards is not None and more.greedy_rewards is not None:
        greedy = np.concatenate([drawn.greedy_rewards, more.greedy_rewards])[places]
    return Drawn(
        rollout=programs.merge(*both, jnp.asarray(of_rows, jnp.int32)),
        samples=[samples[row] for row in rows],
        rewards=np.concatenate([drawn.rewards, more.rewards])[rows],
        greedy_rewards=greedy,
        metrics=_added(drawn.metrics, more.metrics),
        timing=_added(drawn.timing, more.timing),
        turn_rewards=turned,
    )


def _members(numbers: np.ndarray, size: int) -> np.ndarray:
    """The rows of things that have `size` rows each."""
    return (numbers[:, None] * size + np.arange(size)[None, :]).reshape(-1)


def step_key(seed: int, step: int) -> jax.Array:
    """The random key of a step; steps count from 1, evaluations use 0."""
    return jax.random.fold_in(make_key(seed), step)


def prompt_ids(indices: np.ndarray, size: int) -> list[int]:
    """What the random numbers of a step's prompts, rows `indices` of `size`, are keyed by.

    A prompt's id is its row. If a small dataset repeats within one step, every repetition has other
    ids, or its groups would be copies of each other.
    """
    rounds: Counter[int] = Counter()
    names = []
    for index in indices.tolist():
        names.append((index + rounds[index] * size) % 2**31)
        rounds[index] += 1
    return names


def graded(
    task: Task, text: Text, examples: Sequence[Example], rollout: Rollout, samples: int
) -> tuple[list[Sample], dict[str, float]]:
    """Grades every completion, and counts how often the grader ran out of time or failed."""
    repeated = [example for example in examples for _ in range(samples)]
    completions = text.completions(rollout)
    with waiting.during("grading"):
        grades = task.grade(repeated, completions)
    graded = [
        Sample(prompt_text(example), completion, example.answer, float(grade.reward))
        for example, completion, grade in zip(repeated, completions, grades, strict=True)
    ]
    faults = {f"grader/{name}": float(n) for name, n in base.faults(grades).items()}
    return graded, faults


def prompt_text(example: Example) -> str:
    """An example's prompt as one string."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n".join(f"{message.role}: {message.content}" for message in example.prompt)
