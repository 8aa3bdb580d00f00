"""The loops, generators of steps: RL, and the warm start before it; and held-out evaluation.

Callers do the logging and write the files.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax import optimizers, schedules
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, MismatchError, NonFiniteError
from tim_jax.common.types import Rollout
from tim_jax.model import adapters
from tim_jax.model.execution import Batching, Execution, jit
from tim_jax.model.parameters import with_buffers
from tim_jax.policy import scoring
from tim_jax.rl import drawing, episodes, programs
from tim_jax.rl.drawing import Sample, Text, graded
from tim_jax.rl.programs import Programs
from tim_jax.rl.rules import Turns
from tim_jax.rl.types import Exactness, Experience, TrainState, cut_rollout, whole_lengths
from tim_jax.tasks.base import Environment, Example, Task

UPDATING = "updating"  # what a wait for it, and memory that runs out in it, are called
EVALUATING = "sampling for the evaluation"


class Step(NamedTuple):
    """One finished RL step."""

    number: int  # from 1
    state: TrainState
    weights: Any
    metrics: dict[str, float]  # a function of the run's config and seed alone
    timing: dict[str, float]  # seconds and rates, and what else depends on the clock
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
    that are k steps newer than those that drew it (the first k steps: as many as there are). Where
    the sampler has devices of its own, it draws while the learner learns. Exactness then compares
    the learner at the weights that drew with what was recorded.

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
    ahead = training.sampler.max_staleness
    how = {"programs": programs, "environment": environment, "seed": seed}

    def published(source: Any) -> Any:
        return programs.publish(adapters.whole(state.params, base), source)

    def begin(step: int, given: Any) -> drawing.Begun:
        return drawing.begin(given, task, text, step=step, **how)

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
            state = training.at_rest(state)
            begun.append(begin(number + ahead, given))
            del given
        # What was begun, a copy of the weights among it, is freed before the learner works.
        drawn = drawing.finish(begun.popleft())
        state = training.at_work(state)
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
        **drawn.timing,
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
    if training.learning.micro_batch_tokens is not None:
        training.check_longest(int(whole_lengths(rollout).max()))
    rollout = trimmed(rollout, training.length_buckets)
    greedy = None if greedy_rewards is None else jnp.asarray(greedy_rewards)
    of_turns = ()
    if turn_rewards is not None and training.learning.credit == "turn":
        of_turns = (jnp.asarray(_narrowed(turn_rewards, rollout.responses.shape[1])),)
    given = rollout, rewards, greedy, *of_turns
    prepared = programs.experience(weights, reference, state.carried, *given)
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
        unknown = length * jnp.float32(jnp.nan)  # as the length is, on its devices
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
    logged = schedules.decay_report(state.optimizer)
    logged |= optimizers.loss_scale_report(state.optimizer)
    metrics |= {name: float(value) for name, value in (shaped | found | logged).items()}
    skips = [report["skipped"] for report in reports if not report.get("overflows")]
    check_finite(state, batch, most_in_a_row(before, skips), training.learning.max_skipped)
    if training.sampler.max_staleness and at_source is not None:
        comparisons = [at_source]
    return state, weights, merged(comparisons), metrics


def _compared(
    programs: Programs, rollout: Rollout, weights: Any, source: Any, trainer: jax.Array | None
) -> tuple[dict[str, Any], Exactness | None]:
    """`mismatch/*` and what they are made of, by the trainer's log-probs or else its weights."""
    if programs.compare is not None:
        return programs.compare(weights, source, rollout, trainer)
    return programs.mismatch_report(trainer, rollout), None


_OF_LEFT = ("loss/", "update_skew")  # means and extremes of tokens that no rejection removed
_EXTREMES = {"_min": np.min, "_max": np.max, "_max_deviation": np.max}


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """A step's metrics from those of its updates: means, and for extremes the outermost value.

    An update without a token to learn from, whose means are 0, counts in `tokens` alone, unless
    there is no other. Nor does one whose tokens are all rejected count in what is of the others.
    """
    learning = [report for report in reports if report["tokens"] > 0] or reports
    left = [x for x in learning if x.get("correction/removed_share", 0.0) < 1.0] or learning

    def over(name: str) -> float:
        some = left if name.startswith(_OF_LEFT) else learning
        values = [report[name] for report in (reports if name == "tokens" else some)]
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


def _narrowed(turn_rewards: np.ndarray, width: int) -> np.ndarray:
    """Rewards of turns f32[B, R] as f32[B, width]; the last column has what stood beyond it.

    The dial's `dropped_end` makes a response a token shorter, but its last turn's reward stays.
    """
    kept = turn_rewards[:, :width].copy()
    kept[:, -1] += turn_rewards[:, width:].sum(axis=1)
    return kept


def merged(comparisons: Sequence[Exactness]) -> Exactness:
    """A comparison with unequal tokens if there is one, then the one that compared the most."""
    comparisons = jax.device_get(list(comparisons))
    return max(comparisons, key=lambda e: (int(e.unequal) > 0, int(e.compared)))


def check_exact(exactness: Exactness, step: int) -> None:
    """Raises MismatchError if a token differs or nothing was compared.

    And NonFiniteError if neither side has a finite value: then the weights are at fault.
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
            fault = "neither is finite, so the weights are not, or are too large to compute with"
            raise NonFiniteError(f"{message}: {fault}")
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


# --- the warm start ----------------------------------------------------------------------------


def demonstrations(pairs: Sequence[tuple[str, str]], text: Text, *, response_size: int) -> Rollout:
    """(prompt, completion) pairs as a rollout, the end token appended, log-probs zero.

    Raises:
      InputError: a prompt or a completion is too long; to learn from a part would teach the wrong
        thing.
    """
    prompts = text.prompts([Example(prompt, "") for prompt, _ in pairs], range(len(pairs)))
    responses = np.zeros((len(pairs), response_size), np.int32)
    lengths = np.zeros((len(pairs),), np.int32)
    for row, (_, completion) in enumerate(pairs):
        tokens = text.tokenizer.encode(completion, add_special_tokens=False)
        tokens = [*tokens, text.tokenizer.eos_token_id]
        if len(tokens) > response_size:
            raise InputError(
                f"a worked completion has {len(tokens)} tokens, more than"
                f" max_tokens = {response_size}: {completion!r}"
            )
        responses[row, : len(tokens)], lengths[row] = tokens, len(tokens)
    return Rollout(
        prompts=prompts.tokens,
        prompt_lengths=prompts.lengths,
        responses=jnp.asarray(responses),
        lengths=jnp.asarray(lengths),
        log_probs=jnp.zeros(responses.shape, jnp.float32),
        finished=jnp.ones((len(pairs),), bool),
    )


def warm_start(
    params: Any,
    batches: Iterator[Rollout],
    *,
    execution: Execution,
    learning_rate: float,
    steps: int,
) -> Iterator[tuple[Any, float]]:
    """Supervised steps on a task's worked solutions, for a model that cannot solve anything yet.

    Yields (params, mean negative log-likelihood per token) after each of `steps` AdamW steps.
    """
    rise = min(max(steps // 10, 1), steps - 1)
    rate = optimizers.Rate(learning_rate, rise, "cosine", steps)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate.schedule_fn(), b2=0.98))
    optimizer = optimizers.for_dtype(chain, execution.numerics.compute_dtype)

    def loss(params, batch: Rollout, scale: jax.Array | None):
        weights = execution.prepare(params)
        log_probs = scoring.score(weights, batch, execution=execution).log_probs
        mask = batch.mask
        value = -jnp.sum(jnp.where(mask, log_probs, 0.0)) / jnp.sum(mask, dtype=jnp.float32)
        return (value if scale is None else scale * value), value

    @partial(jit, numerics=execution.numerics, donate_argnums=(0, 1))
    def step(params, state, batch):
        differentiated = jax.value_and_grad(loss, has_aux=True)
        (_, value), gradient = differentiated(params, batch, optimizers.loss_scale(state))
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(gradient, state, params)
            moved = with_buffers(optax.apply_updates(params, changes), params)
            return moved, state, value

    params = jax.tree.map(jnp.array, params)
    state = optimizer.init(params)
    for _ in range(steps):
        params, state, value = step(params, state, next(batches))
        yield params, float(value)


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Returns the unbiased estimate of P(at least one of k samples is right), f64 like `correct`.

    With c right ones among n samples, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, eq. 1), computed as 1 - prod_{i = n - c + 1}^{n} (1 - k / i), which neither
    overflows nor cancels.

    Args:
      correct: integers [...], right samples per prompt, each in 0..samples.
      samples: n.
      k: 1..samples.

    Raises:
      InputError: if k or a count is out of range.
    """
    correct = np.asarray(correct)
    if not 1 <= k <= samples:
        raise InputError(f"pass@k: k must be in 1..{samples} (samples per prompt), got {k}")
    if correct.size and not (correct.min() >= 0 and correct.max() <= samples):
        raise InputError(
            f"pass@k: counts must be in 0..{samples}, got {correct.min()}..{correct.max()}"
        )
    i = np.arange(1, samples + 1)
    # A factor below 0 belongs to i < k, which is reached only if n - c < k: the product is 0 there.
    factors = np.maximum(1.0 - k / i, 0.0)
    taken = i > (samples - correct)[..., None]
    return 1.0 - np.prod(np.where(taken, factors, 1.0), axis=-1)


def scores(rewards: np.ndarray, ks: Sequence[int], *, solved: float = 1.0) -> dict[str, float]:
    """Returns mean@n, the mean over prompts of pass@k for every k, and their standard errors.

    `reward_error` is that of mean@n, `pass@k_error` those of pass@k: over prompts, whose samples
    count as one each; 0 for a single prompt, of which nothing is known.

    Args:
      rewards: finite, [P, n], n samples for each of P prompts.
      ks: the k of pass@k, each in 1..n.
      solved: a sample counts as right from this reward on.

    Raises:
      InputError: some k is out of range, or a reward is not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        value = rewards[prompt, sample]
        raise InputError(f"rewards must be finite: prompt {prompt}, sample {sample} has {value}")
    prompts, samples = rewards.shape
    correct, mean = np.sum(rewards >= solved, axis=1), float(rewards.mean())
    passes = {f"pass@{k}": pass_at_k(correct, samples, k) for k in ks}
    return {
        f"mean@{samples}": mean,
        **{name: float(np.mean(values)) for name, values in passes.items()},
        "prompts": float(prompts),
        "reward": mean,
        "reward_error": _standard_error(rewards.mean(axis=1)),
        **{f"{name}_error": _standard_error(values) for name, values in passes.items()},
    }


def _standard_error(values: np.ndarray) -> float:
    """The standard error of their mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def evaluation_program(
    execution: Execution, *, samples: int, batching: Batching, turns: Turns | None
) -> Callable[..., Rollout] | episodes.Programs:
    """What `evaluate` draws by: a sampler of responses, or with `turns` one of episodes."""
    if turns is None:
        return programs.sampling_program(execution, samples=samples, batching=batching)
    return episodes.build(execution, samples=samples, batching=batching, turns=turns)


def evaluate(
    weights: Any,
    task: Task,
    text: Text,
    *,
    sample: Callable[..., Rollout] | episodes.Programs,
    environment: Environment | None = None,
    key: jax.Array,
    prompts: int,
    samples: int,
    batch: int,
    ks: Sequence[int],
    solved: float = 1.0,
) -> tuple[dict[str, float], list[Sample]]:
    """Evaluates the first `prompts` held-out problems with `samples` responses each.

    `sample` is an `evaluation_program` for `batch` prompts at a time, with an `environment` one of
    episodes. The last batch is filled up with prompts that are not counted. A response is right
    from the reward `solved` on.

    Returns:
      `scores` of the rewards, the mean response length, how many answers could not be graded; and
      all samples.

    Raises:
      InputError: the task has no held-out problems, or as the training loop.
    """
    count = min(prompts, len(task.evaluation))
    if not count:
        raise InputError(f"task {task.name} has no held-out problems to evaluate on")
    rows: list[Sample] = []
    lengths: list[np.ndarray] = []
    failed: dict[str, float] = {}
    for start in range(0, count, batch):
        indices = [min(i, count - 1) for i in range(start, start + batch)]
        examples = [task.evaluation[i] for i in indices]
        encoded = text.prompts(examples, indices)
        wanted = min(batch, count - start)
        counted = slice(wanted * samples)
        with waiting.during(EVALUATING, about=waiting.COMPILES):
            if isinstance(sample, episodes.Programs):
                played = drawing.play(
                    weights, text, examples, encoded, key, programs=sample, environment=environment
                )
            else:
                played = jax.device_get(sample(weights, encoded, key))
        if isinstance(played, episodes.Played):
            found = drawing.of_episodes(examples, played, text)[counted]
            faults = {"environment/failures": float(played.failed[counted].sum())}
            drawn = np.asarray(played.rollout.drawn_lengths)[counted]
        else:
            kept = jax.tree.map(lambda x, own=counted: x[own], played)
            found, faults = graded(task, text, examples[:wanted], kept, samples)
            drawn = kept.lengths
        rows += found
        failed = {name: failed.get(name, 0.0) + number for name, number in faults.items()}
        lengths.append(drawn)
    rewards = np.array([row.reward for row in rows]).reshape(count, samples)
    length = float(np.concatenate(lengths).mean())
    return scores(rewards, ks, solved=solved) | {"length": length} | failed, rows
