"""Learner steps from what another engine drew: rows and rewards in, a step out, and so on."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax import placement
from tim_jax.api import foreign
from tim_jax.api.foreign import Response
from tim_jax.api.model import Model, check_jax, check_model
from tim_jax.api.rollouts import Rollout, as_rows
from tim_jax.api.steps import Started, Step, start
from tim_jax.api.training import IN_TRAINING, named, settle
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_whole, refuse_all_but, shown
from tim_jax.corrections import Correction
from tim_jax.objectives import Objective
from tim_jax.rl import drawing, loop, programs
from tim_jax.rl.drawing import Drawn
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import TrainState


@refuse_all_but(IN_TRAINING)
def learn(
    before: Model | Step,
    rows: str | Path | Rollout | Iterable[Mapping[str, Any]],
    rewards: Sequence[float] | np.ndarray,
    *,
    samples: int | None = None,
    format: str = "auto",
    greedy_rewards: Sequence[float] | np.ndarray | None = None,
    optimizer: optax.GradientTransformation | None = None,
    objective: Objective | None = None,
    correction: Correction | None = None,
    training: Training | None = None,
    seed: int | None = None,
) -> Step:
    """Makes one learner step from responses that another engine drew and recorded.

        step = model
        for rows, rewards in engine_draws:
            step = tim_jax.learn(step, rows, rewards)
            engine.load_weights(tim_jax.named_arrays(step.model))

    The recorded log-probs are the behaviour policy: in bypass mode the loss's ratio is to them, in
    recompute mode a correction weights by pi_old / pi_recorded. `mismatch/*` of the step's metrics
    compare them with the learner's own at the weights before the step.

    State goes in and comes out: a step holds the weights, the optimizer's and the correction's
    state, and the settings of the first step. It is used up by the next one.

    Args:
      before: a model to start from, or the step to go on from, of this function or of `grpo`.
      rows: as `diagnose` reads them: what `sample` returns, a file, or rows with token ids,
        log-probs, and perhaps a mask, `supports` and `routes`. Samples of a prompt stand one after
        the other. All must be drawn from one distribution; what rows do not say of it is as
        `training` has it.
      rewards: f32[B], finite, one for each row.
      samples: responses per prompt. None: that of the step before; at the first step as many as the
        rows have of each prompt in a row, which must be equally many.
      format: of the rows, one of `tim_jax.instruments.diagnosis.readers.FORMATS`.
      greedy_rewards: f32[B / samples], of each prompt's greedy response, which ReMax compares with.
      optimizer: as in `grpo`, whose docstring says which axes arrays have; so are the next ones. At
        the first step only.
      objective: advantages, loss, how losses are added up, and a KL to the first weights.
      correction: of the mismatch between the engine and the learner.
      training: everything else, such as `model.training(micro_batch=4, mode="recompute")`. With
        `routing="replayed"` the forward takes the experts of `routes`, with "compared" its own, and
        metrics say how many agree, and what of the mismatch would be left with the engine's.
      seed: of the first values of adapters; 0 if None.

    Raises:
      InputError: rows or rewards that cannot be learnt from, settings that do not go together, or
        an objective that counts from a `max_length` that it lacks.
      NonFiniteError: after five updates in a row that were not finite.
      MismatchError: `training` has `exact=True`, and a log-prob is not the engine's to the bit.
    """
    began = time.perf_counter()
    check_jax("learn")
    given = {"optimizer": optimizer, "objective": objective, "correction": correction}
    if isinstance(before, Step):
        _refuse_again(given | {"training": training, "seed": seed})
        before.check_there()
        model, known = before.started.model, before.started.programs.training
    else:
        check_model("learn", before)
        model, known = before, training or before.training()
    rows = as_rows(rows, "learn") if isinstance(rows, Rollout) else rows
    responses = foreign.learnable(model, rows, format, known)
    foreign.check_groups(responses, samples := _samples_of(responses, samples, before))
    numbers = _rewards("rewards", rewards, len(responses), "rows")
    if greedy_rewards is not None:
        count = len(responses) // samples
        greedy_rewards = _rewards("greedy_rewards", greedy_rewards, count, "prompts")
    if isinstance(before, Step):
        began_with = _going_on(before, responses, samples)
    else:
        given |= {"samples": samples, "prompts_per_step": len(responses) // samples}
        began_with = _first(model, responses, known, given, seed or 0)
    return _step(began_with, responses, numbers, greedy_rewards, began)


class _Before(NamedTuple):
    """What a step begins with."""

    number: int
    state: TrainState
    weights: Any
    started: Started


def _refuse_again(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"learn: {name} is that of the first step; to change it, start anew from step.model"
            )


def _samples_of(responses: Sequence[Response], samples: int | None, before: Model | Step) -> int:
    if isinstance(before, Step):
        own = before.started.programs.training.learning.samples
        if samples not in (None, own):
            raise InputError(f"learn: samples = {samples}, but the steps before had {own}")
        return own
    if samples is not None:
        check_whole("learn: samples", samples, least=1)
        return samples
    ends = [i for i, r in enumerate(responses[1:], 1) if r.prompt != responses[i - 1].prompt]
    return ends[0] if ends else len(responses)


def _rewards(name: str, given: Any, count: int, what: str) -> np.ndarray:
    try:
        array = np.asarray(given, np.float32)
    except (TypeError, ValueError, OverflowError):  # text, or a generator
        raise InputError(
            f"learn: {name} must be a list or array of {count} numbers, got {shown(given)}"
        ) from None
    if array.shape != (count,):
        raise InputError(f"learn: {name} has the shape {array.shape}, but there are {count} {what}")
    if not np.isfinite(array).all():
        place = int(np.argmin(np.isfinite(array)))
        raise InputError(f"learn: {name}[{place}] is {array[place]}; it must be finite")
    return array


def _first(
    model: Model,
    responses: Sequence[Response],
    run: Training,
    given: Mapping[str, Any],
    seed: int,
) -> _Before:
    """What the first step begins with: its programs and a fresh state."""
    asked = responses[0].declared
    _check_sampler(run)
    _check_length(given.get("objective") or run.learning.objective)
    drawn = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
    model, run = settle("learn", model, run.varied(**drawn), given)
    _check_objective(run, responses)
    built = programs.build(run, foreign=True)
    state, started = start(model, built, seed)
    return _Before(0, state, started.prepared(state), started)


def _check_sampler(
    run: Training,
    mend: str = "leave sampler, max_staleness, own_devices and refills as they are",
) -> None:
    plain = replace(run.sampler, batching=Sampler().batching)
    if plain != Sampler() or run.refills:
        raise InputError(
            f"learn: training has settings of a sampler, but the rows are drawn elsewhere; {mend}"
        )
    if run.turns is not None or run.learning.credit != "episode":
        raise InputError(
            f"learn: training has turns = {run.turns} and credit = {run.learning.credit!r}, but"
            " rows have no turns; leave both as they are, and give a reward for each row"
        )


def _check_length(objective: Any) -> None:
    if isinstance(objective, Objective) and objective.lacks_length:
        raise InputError(
            "learn: the objective counts from the longest length that a response may have, which"
            " rows do not say; give it max_length, such as tim.objectives.dr_grpo(max_length=1024)"
        )


def _check_objective(run: Training, responses: Sequence[Response]) -> None:
    if any(response.replays for response in responses):
        run.learning.objective.check_whole_distribution()


def _going_on(before: Step, responses: Sequence[Response], samples: int) -> _Before:
    """What a later step begins with: programs for its number of rows."""
    built = before.started.programs
    _check_sampler(built.training.varied(refills=0), "start anew from step.model")
    if built.training.learning.routing == "compared" and built.compare is None:
        raise InputError(
            "learn: the step is one of grpo with routing = 'compared', which compares no experts of"
            " another engine; start anew from step.model"
        )
    foreign.check_distribution(responses[0], built.training.execution.sampling)
    run = built.training.varied(prompts_per_step=len(responses) // samples)
    _check_objective(run, responses)
    with named("learn"):
        run.check()
    started = before.started._replace(programs=replace(built, training=run))
    return _Before(before.number, before.state, before.weights, started)


def _step(
    before: _Before,
    responses: Sequence[Response],
    rewards: np.ndarray,
    greedy: np.ndarray | None,
    began: float,
) -> Step:
    started, built = before.started, before.started.programs
    run, rollout = built.training, foreign.arrays(built.training.execution, responses)
    if run.learning.needs_greedy and greedy is None:
        raise InputError(
            f"learn: the estimator {run.learning.objective.estimator!r} needs greedy_rewards, the"
            " reward of a greedy response to each prompt"
        )
    if run.learning.routing == "own":
        rollout = replace(rollout, routes=None)
    samples = foreign.samples(started.model, responses, rewards)
    drawn = Drawn(rollout, samples, rewards, greedy, {}, {})
    state = placement.to_devices(before.state) if run.offload else before.state
    with named("learn"), waiting.during(loop.UPDATING, about=waiting.COMPILES):
        state, weights, exactness, metrics = loop.learn(
            state,
            before.weights,
            rollout,
            jnp.asarray(rewards),
            programs=built,
            greedy_rewards=greedy,
            reference=started.reference,
            base=started.base,
        )
    exactness = jax.device_get(exactness)
    if run.exact:
        loop.check_exact(exactness, before.number + 1)
    state = replace(state, step=state.step + jnp.int32(1))
    state = placement.to_host(state) if run.offload else state
    metrics |= drawing.drawn_metrics(drawn, built)
    metrics |= loop.exact_metrics(exactness)
    seconds = time.perf_counter() - began
    timing = {"seconds": seconds, "tokens_per_second": metrics["response_tokens"] / seconds}
    return Step(before.number + 1, metrics, timing, samples, state, weights, started)
