"""The loop: a generator of steps. No logging, no files: callers do that with what it yields."""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import schedules
from tim_jax.errors import MismatchError, NonFiniteError
from tim_jax.learner import Exactness, Experience, TrainState
from tim_jax.programs import Programs
from tim_jax.tasks import base
from tim_jax.tasks.base import Example, Task
from tim_jax.tokenizers import encode_prompt
from tim_jax.types import Prompts, Rollout

_OPTIONAL = ("drawn_log_probs", "hidden")


@dataclass(frozen=True)
class Text:
    """How a task's text becomes tokens."""

    tokenizer: Any
    max_prompt_length: int
    chat_template: bool | Literal["auto"] = "auto"
    template_options: tuple[tuple[str, Any], ...] = ()

    def prompts(self, examples: Sequence[Example], ids: Sequence[int]) -> Prompts:
        """Encodes examples, padded to `max_prompt_length`; too long a prompt is refused."""
        encoded = [
            encode_prompt(
                self.tokenizer,
                example.prompt,
                chat_template=self.chat_template,
                template_options=dict(self.template_options),
                max_length=self.max_prompt_length,
                where=f"prompt {number}",
            )
            for number, example in zip(ids, examples, strict=True)
        ]
        tokens = np.zeros((len(encoded), self.max_prompt_length), np.int32)
        for row, prompt in zip(tokens, encoded, strict=True):
            row[: len(prompt)] = prompt
        return Prompts(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(prompt) for prompt in encoded], jnp.int32),
            ids=jnp.asarray(np.asarray(ids, np.int32)),
        )

    def completions(self, rollout: Rollout) -> list[str]:
        """The responses as text, stop tokens left out."""
        responses, lengths = jax.device_get((rollout.responses, rollout.lengths))
        rows = (r[:n].tolist() for r, n in zip(responses, lengths, strict=True))
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


class Sample(NamedTuple):
    """One completion and what came of it."""

    prompt: str
    completion: str
    answer: str
    reward: float


class Step(NamedTuple):
    """One finished RL step."""

    number: int  # from 1
    state: TrainState
    weights: Any
    metrics: dict[str, float]  # a function of the run's config and seed alone
    timing: dict[str, float]  # seconds and rates
    samples: list[Sample]
    history: tuple[Any, ...] = ()  # older weights, oldest first, if the sampler's are stale


def train(
    state: TrainState,
    task: Task,
    text: Text,
    *,
    programs: Programs,
    seed: int,
    steps: int,
    prompts_per_step: int,
    exact: bool,
    reference: Any = None,
    history: Sequence[Any] = (),
) -> Iterator[Step]:
    """Yields RL steps from `state.step` to `steps`.

    The data of a step and its random numbers are functions of (seed, step): a resumed loop goes on
    as if it had not stopped. `state` is donated; use the yielded one.

    Args:
      exact: stop at the first token whose two log-probs are not the same bits.
      reference: compute weights of the KL term's reference policy, if there is one.
      history: of a resumed loop whose sampler has stale weights: that of the last step.

    Raises:
      MismatchError: `exact`, and a token differs, or none was compared.
      NonFiniteError: `programs.learning.max_skipped` updates in a row were not finite.
      InputError: a prompt that is too long, a reward function that raises or returns nonsense.
    """
    weights = programs.prepare(state.params)
    older = first_history(weights, programs, history)
    for number in range(int(state.step) + 1, steps + 1):
        started = time.perf_counter()
        indices = base.order(seed, number - 1, prompts_per_step, len(task.train))
        examples = [task.train[int(i)] for i in indices]
        prompts = text.prompts(examples, prompt_ids(indices, len(task.train)))
        rollout = jax.block_until_ready(
            # No name for what is published: a copy elsewhere is not to stay while learning.
            programs.sample(
                programs.publish(state.params, older[0] if older else weights),
                prompts,
                step_key(seed, number),
            )
        )
        sampled = time.perf_counter()
        samples, faults = graded(task, text, examples, rollout, programs.learning.group_size)
        rewards = jnp.asarray([s.reward for s in samples], jnp.float32)
        graded_at = time.perf_counter()
        state, weights, found, metrics = learn(
            state, weights, rollout, rewards, programs=programs, reference=reference, older=older
        )
        # Not a new array: one that is bound to a device like the others, or not, as they are. The
        # update would be compiled again after its first step of a resumed run.
        state = replace(state, step=state.step + jnp.int32(1))
        found = jax.device_get(found)
        if exact:
            check_exact(found, number)
        metrics |= rollout_metrics(rollout, rewards) | exact_metrics(found) | faults
        done = time.perf_counter()
        tokens = metrics["response_tokens"]
        timing = {
            "seconds": done - started,
            "seconds_sampling": sampled - started,
            "seconds_grading": graded_at - sampled,
            "seconds_learning": done - graded_at,
            "tokens_per_second": tokens / (done - started),
        }
        yield Step(number, state, weights, metrics, timing, samples, tuple(older))


def first_history(weights: Any, programs: Programs, history: Sequence[Any]) -> deque[Any]:
    """The weights of the last `stale_updates` updates, oldest first; before them, the first ones.

    They are copies: an update takes its weights' buffers.
    """
    length = programs.mismatch.stale_updates
    found = [*history] or [copied(weights) for _ in range(length)]
    return deque(found, maxlen=length)


def remember(history: deque[Any] | None, weights: Any) -> None:
    """Puts weights that are about to be updated at the end of the history, if there is one."""
    if history is not None and history.maxlen:
        history.append(copied(weights))


def copied(tree: Any) -> Any:
    """The same arrays in buffers of their own."""
    return jax.tree.map(jnp.copy, tree)


def step_key(seed: int, step: int) -> jax.Array:
    """The random key of a step; steps count from 1, evaluations use 0."""
    return jax.random.fold_in(jax.random.key(seed), step)


def prompt_ids(indices: np.ndarray, size: int) -> list[int]:
    """Names for the random numbers of a step's prompts, rows `indices` of `size`.

    A prompt's name is its row; where a small dataset comes round again within one step, each round
    has names of its own, or its groups would be copies of each other.
    """
    rounds: Counter[int] = Counter()
    names = []
    for index in indices.tolist():
        names.append((index + rounds[index] * size) % 2**31)
        rounds[index] += 1
    return names


def graded(
    task: Task, text: Text, examples: Sequence[Example], rollout: Rollout, group_size: int
) -> tuple[list[Sample], dict[str, float]]:
    """Grades every completion; also how often the grader ran out of time or failed."""
    repeated = [example for example in examples for _ in range(group_size)]
    completions = text.completions(rollout)
    grades = task.grade(repeated, completions)
    samples = [
        Sample(prompt_text(example), completion, example.answer, float(grade.reward))
        for example, completion, grade in zip(repeated, completions, grades, strict=True)
    ]
    faults = {f"grader/{name}": float(n) for name, n in base.faults(grades).items()}
    return samples, faults


def prompt_text(example: Example) -> str:
    """An example's prompt as one string."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n".join(f"{message.role}: {message.content}" for message in example.prompt)


def learn(
    state: TrainState,
    weights: Any,
    rollout: Rollout,
    rewards: jax.Array,
    *,
    programs: Programs,
    reference: Any = None,
    older: deque[Any] | None = None,
) -> tuple[TrainState, Any, Exactness, dict[str, float]]:
    """All updates of one step: epochs times mini-batches.

    The exactness is that of the first pass before the weights move: of the forward over all rows
    if there was one, and always of the first update's gradient program. `older` is the history of
    a sampler with stale weights; it moves on.

    Raises:
      NonFiniteError: `programs.learning.max_skipped` updates in a row were not finite.
    """
    rollout = trimmed(rollout, programs.length_buckets)
    compared = {}
    if programs.compare is not None:
        source = older[0] if older else weights
        compared = jax.device_get(programs.compare(weights, source, rollout))
    batch, correction, checked = programs.experience(
        weights, reference, state.correction, rollout, rewards
    )
    state = replace(state, correction=correction)
    length = jnp.mean(rollout.lengths.astype(jnp.float32))
    unknown = length * jnp.float32(jnp.nan)
    before = int(state.skipped)
    found, reports = [] if checked is None else [checked], []
    for epoch in range(programs.epochs):
        for index in range(programs.mini_batches):
            remember(older, weights)
            # A step has one length, however many updates: a surge is one of steps.
            last = len(reports) == programs.epochs * programs.mini_batches - 1
            state, weights, report = programs.update(
                state, weights, batch, jnp.int32(index), length if last else unknown
            )
            reports.append(report.metrics)
            if epoch == index == 0:
                found.append(report.exactness)
    reports = jax.device_get(reports)
    skips = [report["skipped"] for report in reports]
    metrics = {
        name: float(np.mean([report[name] for report in reports])) for name in reports[0]
    } | {"skipped": float(np.sum(skips))}
    metrics |= {name: float(value) for name, value in compared.items()}
    metrics |= {k: float(v) for k, v in schedules.decay_report(state.optimizer).items()}
    check_finite(state, batch, most_in_a_row(before, skips), programs.learning.max_skipped)
    return state, weights, merged(found), metrics


def trimmed(rollout: Rollout, buckets: int) -> Rollout:
    """Cuts padding off the responses: to R, R / 2, ... R / 2^(buckets - 1), whichever suffices.

    Padding changes no bit, so this is speed alone, for one compilation a bucket.
    """
    full, longest = rollout.responses.shape[1], int(rollout.lengths.max())
    sizes = [-(-full // 2**i) for i in range(buckets)]
    size = min(size for size in sizes if size >= longest)
    wide = {name: getattr(rollout, name) for name in ("responses", "log_probs", *_OPTIONAL)}
    return replace(rollout, **{k: None if x is None else x[:, :size] for k, x in wide.items()})


def merged(found: Sequence[Exactness]) -> Exactness:
    """The comparison that found something, or the one that compared the most."""
    found = jax.device_get(list(found))
    return max(found, key=lambda e: (int(e.unequal) > 0, int(e.compared)))


def check_exact(found: Exactness, step: int) -> None:
    """Raises MismatchError if a token differs or nothing was compared."""
    if int(found.compared) == 0:
        raise MismatchError(f"step {step}: no response token was compared")
    if int(found.unequal):
        row, position = (int(i) for i in found.first)
        trainer, rollout = (float(v) for v in found.values)
        raise MismatchError(
            f"step {step}: {int(found.unequal)} of {int(found.compared)} response tokens have"
            f" unequal log-probs; first: sequence {row}, response position {position}, learner"
            f" {trainer!r} ({trainer.hex()}), sampler {rollout!r} ({rollout.hex()})"
        )


def most_in_a_row(before: int, skips: Sequence[float]) -> int:
    """The longest run of skipped updates among a step's, `before` of them just before it."""
    longest = row = before
    for skipped in skips:
        row = row + 1 if skipped else 0
        longest = max(longest, row)
    return longest


def check_finite(state: TrainState, batch: Experience, skipped: int, most: int) -> None:
    """Raises NonFiniteError, with the step's batch, if `most` updates in a row were skipped."""
    if skipped < most:
        return
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(batch))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    raise NonFiniteError(
        f"step {int(state.step) + 1}: the loss or gradient of {skipped} updates in a row was not"
        " finite; they were skipped",
        arrays,
    )


def exact_metrics(found: Exactness) -> dict[str, float]:
    compared, unequal = int(found.compared), int(found.unequal)
    return {
        "exact_share": (compared - unequal) / compared if compared else float("nan"),
        "compared_tokens": float(compared),
        "unequal_tokens": float(unequal),
        "log_prob_difference_max": float(found.max_difference),
        "log_prob_difference_mean": float(found.mean_difference),
    }


def rollout_metrics(rollout: Rollout, rewards: jax.Array) -> dict[str, float]:
    lengths, finished, rewards_ = jax.device_get((rollout.lengths, rollout.finished, rewards))
    return {
        "reward": float(np.mean(rewards_)),
        "reward_std": float(np.std(rewards_)),
        "response_length": float(np.mean(lengths)),
        "response_length_max": float(np.max(lengths)),
        "response_tokens": float(np.sum(lengths)),
        "cut_share": float(1.0 - np.mean(finished)),
    }
