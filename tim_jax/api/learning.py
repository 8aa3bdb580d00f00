"""Learner steps from what another engine drew: rows and rewards in, a step out, and so on."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax.api.model import Model, check_jax, check_model
from tim_jax.api.rollouts import Rollout, lay_out, read_rows
from tim_jax.api.training import IN_TRAINING, Step, named, settle, start
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_whole, refuse_all_but, shown
from tim_jax.corrections import Correction
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.rollouts import Response
from tim_jax.objectives import Objective
from tim_jax.rl import drawing, loop, programs
from tim_jax.rl.drawing import Drawn, Sample
from tim_jax.rl.training import Sampler, Training
from tim_jax.tasks.custom import LARGEST


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
    if seed is not None:
        seed = check_whole("learn: seed", seed, least=0, most=2**32 - 1)
    given = {"optimizer": optimizer, "objective": objective, "correction": correction}
    if isinstance(before, Step):
        again = given | {"training": training, "seed": seed}
        if name := next((name for name, value in again.items() if value is not None), None):
            raise InputError(
                f"learn: {name} is that of the first step; to change it, start anew from step.model"
            )
        before.check_there()
        model, known = before.started.model, before.started.programs.training
    else:
        check_model("learn", before)
        model, known = before, training or before.training()
    responses = learnable(model, rows, format, known)
    _check_groups(responses, samples := _count_samples(responses, samples, before))
    numbers = _read_rewards("rewards", rewards, len(responses), "rows")
    if greedy_rewards is not None:
        count = len(responses) // samples
        greedy_rewards = _read_rewards("greedy_rewards", greedy_rewards, count, "prompts")
    if isinstance(before, Step):
        before = _go_on(before, responses, samples)
    else:
        given |= {"samples": samples, "prompts_per_step": len(responses) // samples}
        before = _begin(model, responses, known, given, seed or 0)
    return _step(before, responses, numbers, greedy_rewards, began)


def learnable(model: Model, rows: Any, form: str, training: Training) -> tuple[Response, ...]:
    """The rows for `learn`, if all of them can be learnt from as they are."""
    default = Distribution.of(training.execution.sampling)
    collected = read_rows("learn", model, rows, form=form, default=default)
    responses = tuple(map(_whole_vocabulary, collected.responses))
    for response in responses:
        _check(response, responses[0], routed=training.learning.routing != "own")
    return responses


def _whole_vocabulary(response: Response) -> Response:
    """A response whose truncation is recorded as a mass, with log-probs over the whole vocabulary.

    Both policies of a ratio are renormalised by the recorded mass, so that it cancels.
    """
    mass = response.kept_log_mass
    if mass is None:
        return response
    declared = replace(response.declared, top_k=0, top_p=1.0)
    return replace(response, log_probs=response.log_probs + mass, declared=declared)


def _check(response: Response, first: Response, *, routed: bool) -> None:
    asked, where = response.declared, f"learn: {response.where}"
    if asked.shaped:
        raise InputError(
            f"{where}: drawn with {asked.shaping}, which the learner's forward does not apply; ask"
            " the engine without it"
        )
    if asked.raw:
        raise InputError(
            f"{where}: has raw log-probs, but was drawn with {asked}; record processed ones, which"
            " vLLM does with logprobs_mode='processed_logprobs'"
        )
    if asked.temperature == 0:
        raise InputError(f"{where}: is greedy; it has no log-probs to learn from")
    if asked != first.declared:
        raise InputError(
            f"{where}: drawn with {asked}, but {first.where} with {first.declared}; a step is of"
            " one distribution"
        )
    for name, needed in (("supports", first.supports is not None), ("routes", routed)):
        if needed and getattr(response, name) is None:
            raise InputError(f"{where}: has no {name}, which all rows of this step must have")
    if first.supports is None and response.supports is not None:
        raise InputError(f"{where}: has supports, but {first.where} has none")
    if response.mask is not None and not response.mask.any():
        raise InputError(f"{where}: mask is 0 at all tokens; leave its group out")


def _check_groups(responses: Sequence[Response], samples: int) -> None:
    """Refuses rows that are no whole groups of samples of one prompt."""
    if len(responses) % samples:
        raise InputError(
            f"learn: {len(responses)} rows are no whole groups of {samples} samples a prompt"
        )
    for number, response in enumerate(responses):
        first = responses[number - number % samples]
        if response.prompt != first.prompt:
            raise InputError(
                f"learn: {response.where}: has another prompt than {first.where}, but should be of"
                f" its group of {samples} samples; give the samples of a prompt one after the other"
            )


def _count_samples(responses: Sequence[Response], samples: int | None, before: Model | Step) -> int:
    if isinstance(before, Step):
        own = before.started.programs.training.learning.samples
        if samples not in (None, own):
            raise InputError(f"learn: samples = {samples}, but the steps before had {own}")
        return own
    if samples is not None:
        return check_whole("learn: samples", samples, least=1)
    ends = [i for i, r in enumerate(responses[1:], 1) if r.prompt != responses[i - 1].prompt]
    return ends[0] if ends else len(responses)


def _read_rewards(name: str, given: Any, count: int, what: str) -> np.ndarray:
    try:
        # A list, since NumPy refuses tensors that have a gradient, or are in bfloat16 or on a GPU.
        listed = given.tolist() if hasattr(given, "tolist") else given
        array = np.asarray(listed, np.float32)
    except (TypeError, ValueError, OverflowError):  # text, or a generator
        raise InputError(
            f"learn: {name} must be a list or array of {count} numbers, got {shown(given)}"
        ) from None
    if array.shape != (count,):
        raise InputError(f"learn: {name} has the shape {array.shape}, but there are {count} {what}")
    if not np.isfinite(array).all():
        place = int(np.argmin(np.isfinite(array)))
        raise InputError(f"learn: {name}[{place}] is {array[place]}; it must be finite")
    if (np.abs(array) > LARGEST).any():
        place = int(np.argmax(np.abs(array)))
        raise InputError(
            f"learn: {name}[{place}] is {array[place]:g}; it must be at most {LARGEST:g} in size"
        )
    return array


def _begin(
    model: Model,
    responses: Sequence[Response],
    run: Training,
    given: Mapping[str, Any],
    seed: int,
) -> Step:
    """What the first step begins with: its programs and a fresh state, as of a step 0."""
    asked = responses[0].declared
    _check_sampler(run)
    objective = given.get("objective") or run.learning.objective
    if isinstance(objective, Objective) and objective.lacks_length:
        raise InputError(
            "learn: the objective counts from the longest length that a response may have, which"
            " rows do not say; give it max_length, such as tim.objectives.dr_grpo(max_length=1024)"
        )
    drawn = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
    model, run = settle("learn", model, run.varied(**drawn), given)
    _check_objective(run, responses)
    built = programs.build_once(run, foreign=True)
    state, started = start(model, built, seed)
    return Step(0, {}, {}, [], state, started.prepared(state), started)


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


def _check_objective(run: Training, responses: Sequence[Response]) -> None:
    if any(response.replays for response in responses):
        run.learning.objective.check_whole_distribution()


def _go_on(before: Step, responses: Sequence[Response], samples: int) -> Step:
    """The step that a later one begins with, with programs for its number of rows."""
    built = before.started.programs
    _check_sampler(built.training.varied(refills=0), "start anew from step.model")
    if built.training.learning.routing == "compared" and built.compare is None:
        raise InputError(
            "learn: the step is one of grpo with routing = 'compared', which compares no experts of"
            " another engine; start anew from step.model"
        )
    asked, known = responses[0].declared, Distribution.of(built.training.execution.sampling)
    if asked != known:
        raise InputError(
            f"learn: {responses[0].where}: drawn with {asked}, but the steps before with {known}"
        )
    run = built.training.varied(prompts_per_step=len(responses) // samples)
    _check_objective(run, responses)
    with named("learn"):
        run.check()
    return replace(before, started=before.started._replace(programs=replace(built, training=run)))


def _step(
    before: Step,
    responses: Sequence[Response],
    rewards: np.ndarray,
    greedy: np.ndarray | None,
    began: float,
) -> Step:
    started, built = before.started, before.started.programs
    run, rollout = built.training, lay_out(responses, built.training.execution)
    if run.learning.objective.needs_greedy and greedy is None:
        raise InputError(
            f"learn: the estimator {run.learning.objective.estimator!r} needs greedy_rewards, the"
            " reward of a greedy response to each prompt"
        )
    if run.learning.routing == "own":
        rollout = replace(rollout, routes=None)
    decode = started.model.tokenizer.decode
    samples = [
        Sample(decode(r.prompt), decode(r.tokens, skip_special_tokens=True), "", float(reward))
        for r, reward in zip(responses, rewards, strict=True)
    ]
    drawn = Drawn(rollout, samples, rewards, greedy, {}, {})
    with named("learn"), waiting.during(loop.UPDATING, about=waiting.COMPILES):
        state, weights, exactness, metrics = loop.learn(
            run.at_work(before.state),
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
    state = run.at_rest(replace(state, step=state.step + jnp.int32(1)))
    metrics |= drawing.drawn_metrics(drawn, built)
    metrics |= loop.exact_metrics(exactness)
    seconds = time.perf_counter() - began
    timing = {"seconds": seconds, "tokens_per_second": metrics["response_tokens"] / seconds}
    return Step(before.number + 1, metrics, timing, samples, state, weights, started)
