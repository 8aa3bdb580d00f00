"""The training loop, a generator of steps. Callers do the logging and write the files."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import optimizers, placement, schedules
from tim_jax.common import waiting
from tim_jax.common.errors import MismatchError, NonFiniteError
from tim_jax.common.types import Rollout
from tim_jax.model import adapters
from tim_jax.rl import drawing, micro_batches, rules
from tim_jax.rl.drawing import Sample, Text
from tim_jax.rl.micro_batches import cut_rollout
from tim_jax.rl.programs import Programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Exactness, Experience, TrainState
from tim_jax.tasks.base import Task
from tim_jax.tasks.episodes import Environment

UPDATING = "updating"  # what a wait for it, and memory that runs out in it, are called


class Step(NamedTuple):
    """One finished RL step."""

    number: int  # from 1
    state: TrainState
    weights: Any
    metrics: dict[str, float]  # a function of the run's config and seed alone
    timing: dict[str, float]  # seconds and rates
    samples: list[Sample]
    history: tuple[Any, ...] = ()  # the `kept_weights` of its programs, oldest first


def train(
    state: TrainState,
    task: Task,
    text: Text,
    *,
    programs: Programs,
    seed: int,
    steps: int,
    reference: Any = None,
    history: Sequence[Any] = (),
    base: Any = None,
    environment: Environment | None = None,
) -> Iterator[Step]:
    """Yields RL steps from `state.step` to `steps`.

    The data of a step and its random numbers are functions of (seed, step), so a resumed loop goes
    on as if it had not stopped. `state` is donated; use the yielded one.

    With a `max_staleness` of k, the sampler is k steps ahead: before a step is learnt from, the
    k-th after it is begun, with the weights of that moment. So a step is learnt from by weights
    that are k steps newer than those that drew it (the first k steps: as many as there are), in
    every run alike. Where the sampler has devices of its own, it draws while the learner learns.
    Exactness then compares the learner at the weights that drew with what was recorded.

    Args:
      reference: compute weights of the KL term's reference policy, if there is one.
      history: if the loop is resumed, that of the last step.
      base: if adapters are trained, the parameters that stay as they are, of `programs.place`.
      environment: of episodes of several turns, see `drawing.Text.bridged`.

    Raises:
      MismatchError: the run is to be exact, and a token differs, or none was compared.
      NonFiniteError: `programs.training.learning.max_skipped` updates in a row were not finite, or
        log-probs of a run that is to be exact are not.
      InputError: a prompt that is too long, a reward function that raises or returns nonsense.
    """
    weights = programs.prepare(adapters.whole(state.params, base))
    older, training = first_history(weights, programs, history), programs.training
    ahead, how = training.sampler.max_staleness, {"programs": programs, "environment": environment}

    def published(source: Any) -> Any:
        return programs.publish(adapters.whole(state.params, base), source)

    def begin(step: int, given: Any) -> drawing.Begun:
        return drawing.begin(given, task, text, seed=seed, step=step, **how)

    numbers = range(int(state.step) + 1, steps + 1)
    early = zip(numbers, older, strict=False) if ahead else ()  # fewer, if the run ends before
    begun = deque(begin(number, published(own)) for number, own in early)
    for number in numbers:
        started = time.perf_counter()
        source = programs.source(older, weights)
        if ahead:
            older.append(copied(weights))  # the next update takes the buffers of the weights
        if number + ahead <= steps:
            given = published(older[-1] if ahead else source)
            if training.offload:
                state = placement.to_host(state)
            begun.append(begin(number + ahead, given))
            del given
        # What was begun, a copy of the weights among it, is freed before the learner works.
        drawn = drawing.finish(begun.popleft(), task, text, **how)
        if training.offload:
            state = placement.to_devices(state)
        drawn_at = time.perf_counter()
        with waiting.during(UPDATING, about=programs.compiling(UPDATING)):
            state, weights, exactness, metrics = learn(
                state,
                weights,
                drawn.rollout,
                jnp.asarray(drawn.rewards),
                programs=programs,
                greedy_rewards=drawn.greedy_rewards,
                turn_rewards=drawn.turn_rewards,
                response_length=drawn.metrics["response_length"],
                reference=reference,
                source=source,
                older=None if ahead else older,
                base=base,
            )
        del source
        # Computed from the old count, so that it is committed to devices just as the rest of the
        # state is. With a new array, the update would be compiled twice in a resumed run.
        state = replace(state, step=state.step + jnp.int32(1))
        exactness = jax.device_get(exactness)
        if training.stops_unless_exact:
            check_exact(exactness, number)
        metrics |= drawn.metrics | exact_metrics(exactness)
        timing = _timing(drawn, started, drawn_at, time.perf_counter())
        yield Step(number, state, weights, metrics, timing, drawn.samples, tuple(older))


def _timing(drawn: drawing.Drawn, started: float, drawn_at: float, done: float) -> dict[str, float]:
    return {
        "seconds": done - started,
        "seconds_sampling": drawn.seconds["sampling"],
        "seconds_grading": drawn.seconds["grading"],
        "seconds_learning": done - drawn_at,
        "tokens_per_second": drawn.metrics["response_tokens"] / (done - started),
    }


def first_history(weights: Any, programs: Programs, history: Sequence[Any]) -> deque[Any]:
    """The `kept_weights` of the last updates or steps, oldest first; at the start the first ones.

    They are copies, because an update reuses the buffers of its weights.
    """
    length = programs.training.kept_weights
    copies = [*history] or [copied(weights) for _ in range(length)]
    return deque(copies, maxlen=length)


def remember(history: deque[Any] | None, weights: Any) -> None:
    """Puts weights that are about to be updated at the end of the history, if there is one."""
    if history is not None and history.maxlen:
        history.append(copied(weights))


def copied(tree: Any) -> Any:
    """The same arrays in new buffers."""
    return jax.tree.map(jnp.copy, tree)


def learn(
    state: TrainState,
    weights: Any,
    rollout: Rollout,
    rewards: jax.Array,
    *,
    programs: Programs,
    greedy_rewards: np.ndarray | None = None,
    turn_rewards: np.ndarray | None = None,
    response_length: float | None = None,
    reference: Any = None,
    source: Any = None,
    older: deque[Any] | None = None,
    base: Any = None,
) -> tuple[TrainState, Any, Exactness, dict[str, float]]:
    """All updates of one step: epochs times mini-batches.

    The exactness is that of the first pass before the weights move: of the forward over all rows
    if there was one, and always of the first update's gradient program. `mismatch/*` are taken from
    the same log-probs: in bypass mode with mini-batches, of the first mini-batch. `source` are the
    weights that the rollouts were drawn with, where they are not `weights`; if they were drawn
    ahead, the exactness is that of a forward with these. `older` is the history of a sampler with
    stale weights, which is updated. `base` as in `train`.

    Raises:
      RuleError: `micro_batch_tokens` do not hold the longest sequence.
      NonFiniteError: `programs.training.learning.max_skipped` updates in a row were not finite.
    """
    training = programs.training
    _check_fits(training, rollout)
    rollout = trimmed(rollout, training.length_buckets)
    greedy = None if greedy_rewards is None else jnp.asarray(greedy_rewards)
    of_turns = ()
    if turn_rewards is not None and training.learning.credit == "turn":
        of_turns = (jnp.asarray(turn_rewards[:, : rollout.responses.shape[1]]),)
    prepared = programs.experience(
        weights, reference, state.carried, rollout, rewards, greedy, *of_turns
    )
    batch, checked = prepared.experience, prepared.exactness
    state = replace(state, **prepared.carried._asdict())
    drawn_by = weights if source is None else source
    compare, compared = partial(_compared, programs, rollout), None
    # By the first update's log-probs, unless it has not all of them, or takes what they need.
    takes = source is None or training.sampler.mismatch.in_flight is not None
    early = training.rows < training.sequences or (takes and training.kept_weights)
    early |= training.learning.routing == "compared"  # by a forward with the sampler's experts
    if prepared.trainer is not None or (programs.compare and early):
        compared = compare(weights, drawn_by, prepared.trainer)
    if not training.kept_weights:
        drawn_by = None  # the update is about to take the weights
    length = jnp.mean(rollout.drawn_lengths.astype(jnp.float32))
    if response_length is not None:
        length = jnp.full_like(length, response_length)
    with jax.debug_nans(False):  # this one is no fault
        unknown = length * jnp.float32(jnp.nan)
    before = int(state.skipped)
    comparisons, reports = [] if checked is None else [checked], []
    for number, index in enumerate(training.order, 1):
        remember(older, weights)
        # The decay counts steps and not updates, so only the last update is given a length.
        told = length if number == training.updates else unknown
        state, weights, report = programs.update(
            state, weights, batch, jnp.int32(index), told, base
        )
        reports.append(report.metrics)
        if number == 1:
            comparisons.append(report.exactness)
            if compared is None:
                compared = compare(None, drawn_by, report.log_probs)
    assert compared is not None  # there is at least one update
    found, at_source = compared
    reports, found, shaped = jax.device_get((reports, found, prepared.metrics))
    counted = [name for name in ("skipped", "overflows") if name in reports[0]]
    metrics = joined(reports) | {k: float(np.sum([r[k] for r in reports])) for k in counted}
    metrics |= {name: float(value) for name, value in (shaped | found).items()}
    logged = schedules.decay_report(state.optimizer)
    logged |= optimizers.loss_scale_report(state.optimizer)
    metrics |= {k: float(v) for k, v in logged.items()}
    skips = [report["skipped"] for report in reports if not report.get("overflows")]
    check_finite(state, batch, most_in_a_row(before, skips), training.learning.max_skipped)
    if training.sampler.max_staleness and at_source is not None:
        comparisons = [at_source]
    return state, weights, merged(comparisons), metrics


def _check_fits(training: Training, rollout: Rollout) -> None:
    """Refuses sequences that a micro-batch of tokens does not hold."""
    if (tokens := training.learning.micro_batch_tokens) is not None:
        longest = int(micro_batches.whole_lengths(rollout).max())
        where = training.execution.placement
        rules.check_micro_batch_tokens(tokens, longest=longest, placement=where)


def _compared(
    programs: Programs, rollout: Rollout, weights: Any, source: Any, trainer: jax.Array | None
) -> tuple[dict[str, Any], Exactness | None]:
    """`mismatch/*` and what they are made of, by the trainer's log-probs or else its weights."""
    if programs.compare is not None:
        return programs.compare(weights, source, rollout, trainer)
    return programs.mismatch_report(trainer, rollout), None


_EXTREMES = {"_min": np.min, "_max": np.max, "_max_deviation": np.max}


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """A step's metrics from those of its updates: means, and for extremes the outermost value.

    An update without a token to learn from, whose means are 0, counts in `tokens` alone, unless
    there is no other.
    """
    learning = [report for report in reports if report["tokens"] > 0] or reports

    def over(name: str) -> float:
        values = [report[name] for report in (reports if name == "tokens" else learning)]
        which = (of for ending, of in _EXTREMES.items() if name.endswith(ending))
        return float(next(which, np.mean)(values))

    metrics = {name: over(name) for name in reports[0]}
    if "noise_scale" in metrics:  # a mean of quotients is infinite as soon as one of them is
        noise, signal = metrics["gradient_noise"], metrics["gradient_signal"]
        metrics["noise_scale"] = noise / signal if signal > 0.0 else float("inf")
    return metrics


def trimmed(rollout: Rollout, buckets: int) -> Rollout:
    """Cuts padding off the responses: to R, R / 2, ... R / 2^(buckets - 1), whichever suffices.

    Padding changes no bit, so this only saves time, at the cost of a compilation per bucket.
    """
    full, longest = rollout.responses.shape[1], int(rollout.lengths.max())
    sizes = [-(-full // 2**i) for i in range(buckets)]
    return cut_rollout(rollout, min(size for size in sizes if size >= longest))


def merged(comparisons: Sequence[Exactness]) -> Exactness:
    """A comparison with unequal tokens if there is one, then the one that compared the most."""
    comparisons = jax.device_get(list(comparisons))
    return max(comparisons, key=lambda e: (int(e.unequal) > 0, int(e.compared)))


def check_exact(exactness: Exactness, step: int) -> None:
    """Raises MismatchError if a token differs or nothing was compared.

    Raises NonFiniteError if neither side has a finite value: then the weights are at fault.
    """
    if int(exactness.compared) == 0:
        raise MismatchError(f"step {step}: no response token was compared")
    if int(exactness.unequal):
        row, position = (int(i) for i in exactness.first)
        trainer, rollout = (float(v) for v in exactness.values)
        message = (
            f"step {step}: {int(exactness.unequal)} of {int(exactness.compared)} response tokens"
            f" have unequal log-probs; first: sequence {row}, response position {position}, learner"
            f" {trainer!r} ({trainer.hex()}), sampler {rollout!r} ({rollout.hex()})"
        )
        if not np.isfinite(exactness.values).any():
            raise NonFiniteError(
                f"{message}: neither is finite, so the weights are not, or are too large to compute"
                " with"
            )
        raise MismatchError(message)


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


def exact_metrics(exactness: Exactness) -> dict[str, float]:
    """Returns the comparison of a step's log-prob bits as metrics; a share of nothing is NaN."""
    compared, unequal = int(exactness.compared), int(exactness.unequal)
    return {
        "exact_share": (compared - unequal) / compared if compared else float("nan"),
        "compared_tokens": float(compared),
        "unequal_tokens": float(unequal),
        "log_prob_difference_max": float(exactness.max_difference),
        "log_prob_difference_mean": float(exactness.mean_difference),
    }
