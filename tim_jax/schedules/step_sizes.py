"""Step sizes that follow the responses: their length, or their importance weights.

Decay by length, after "Beyond Precision" (arXiv 2602.01826): `length_decay` is exactly its
Algorithm 1; `length_triggered_decay` determines the period itself, by an online detector of the
surge of the mean response length, which the paper describes but does not specify. Both multiply the
updates by a scale in [floor, 1], so they combine with any schedule (warm-up, cosine, constant),
which then gives eta_0 of the paper. `scale_by_root_ess` is the step size of VCPO (arXiv
2602.17616). All are optax transforms for the end of a chain.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from tim_jax.common.errors import InputError
from tim_jax.numerics import masked, strict
from tim_jax.numerics.sums import compensated_sum, count
from tim_jax.schedules.surges import SurgeDetector, SurgeState


class LengthDecayState(NamedTuple):
    """State of Algorithm 1. `step` counts updates, 1 at the first; no period (0) means no decay."""

    step: jax.Array  # i32[]
    period: jax.Array  # i32[], steps between halvings; 0 while there is none
    scale: jax.Array  # f32[], the factor on the updates


class TriggeredDecayState(NamedTuple):
    """State of `length_triggered_decay`."""

    decay: LengthDecayState
    surge: SurgeState


def length_decay(
    period: int, *, floor: float = 0.1, factor: float = 0.5
) -> optax.GradientTransformationExtraArgs:
    """Algorithm 1 of arXiv 2602.01826: `if t mod period == 0: eta <- max(eta / 2, floor * eta_0)`.

    t counts updates from 1, so the update at step `period` is the first one halved. `factor` is the
    1/2, `floor` the paper's eta_inf / eta_0. `response_length` may be passed and is not read.
    All three may be scheduled with `optax.inject_hyperparams`; such a value is known only when the
    program runs, so it is not checked, and a period of 0 then means no decay.

    Raises:
        InputError: period not an integer or below 1, floor outside [0, 1] or factor outside (0, 1).
    """
    period = _checked_period(period)
    _check_decay(floor, factor)

    def init(params):
        del params
        return _initial_decay(period)

    def update(updates, state, params=None, **extra):
        del params, extra
        state = _advance(state, jnp.asarray(period, jnp.int32), floor=floor, factor=factor)
        return _scaled(updates, state.scale), state

    return optax.GradientTransformationExtraArgs(init, update)


def length_decay_schedule(
    init_value: float, period: int, *, floor: float = 0.1, factor: float = 0.5
) -> optax.Schedule:
    """Algorithm 1 of arXiv 2602.01826 as a schedule, `step -> rate`, f32[] or of the step's shape.

    `step` counts from 0, as optax does, so `period - 1` is the first step with a halved rate:
    `rate = init_value * max(factor^floor((step + 1) / period), floor)`. As the learning rate of an
    optimiser it does what `length_decay` does at the end of a chain.

    Raises:
        InputError: period not an integer or below 1, floor outside [0, 1] or factor outside (0, 1).
    """
    period = _checked_period(period)
    _check_decay(floor, factor)

    def rate(step):
        halvings = jnp.asarray((step + 1) // period, jnp.float32)
        return init_value * jnp.maximum(jnp.float32(factor) ** halvings, jnp.float32(floor))

    return rate


def length_triggered_decay(
    *,
    multiple: float = 1.8,
    floor: float = 0.1,
    factor: float = 0.5,
    detector: SurgeDetector | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The reactive form: on a surge set `period = round(multiple * surge_step)`, then Algorithm 1.

    `update` needs `response_length`: the mean response length in tokens of the step's batch, a
    number or an array that is then averaged. Until the surge is found the scale is 1; if it never
    comes, it stays 1. The halvings fall on the steps t with `t mod period == 0`, t counted from the
    first update of the run. Everything is in the state (`decay_report` reads it), so a run that is
    resumed from a checkpoint goes on as if it had not stopped. `multiple`, `floor` and `factor` may
    be scheduled with `optax.inject_hyperparams`; such values are not checked.

    Raises:
        InputError: multiple not above 0, floor outside [0, 1] or factor outside (0, 1); and
            `response_length` missing from `update`.
    """
    _check_number("multiple", multiple)
    if not _traced(multiple) and not multiple > 0.0:
        raise InputError(f"multiple is {multiple}; it must be above 0")
    _check_decay(floor, factor)
    detector = SurgeDetector() if detector is None else detector

    def init(params):
        del params
        return TriggeredDecayState(_initial_decay(0), detector.init())

    def update(updates, state, params=None, **extra):
        del params
        if extra.get("response_length") is None:
            raise InputError("length_triggered_decay needs the extra argument 'response_length'")
        length = jnp.mean(jnp.asarray(extra["response_length"]).astype(jnp.float32))
        surge = detector.update(state.surge, length)
        times = jnp.asarray(multiple, jnp.float32)
        period = jnp.maximum(jnp.round(times * surge.surge_step.astype(jnp.float32)), 1.0)
        period = jnp.where(surge.surge_step > 0, period.astype(jnp.int32), 0)
        decay = _advance(state.decay, period, floor=floor, factor=factor)
        return _scaled(updates, decay.scale), TriggeredDecayState(decay, surge)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_root_ess(*, reference: float = 1.0) -> optax.GradientTransformationExtraArgs:
    """VCPO's step size (arXiv 2602.17616): updates times sqrt(min(ess / reference, 1)).

    `update` needs `effective_sample_size`, f32[], the share (sum w)^2 / (B sum w^2) in (0, 1] of
    the batch's B importance weights w. `reference` is the share that on-policy batches have: the
    paper's appendix F has 1.0 for single-turn tasks and 0.55 for long ones of many turns. A share
    that is NaN makes the updates NaN.

    It goes last in a chain: Adam divides by the gradient's own size, so a factor on the gradient
    would not reach the step.

    Raises:
        InputError: reference outside (0, 1]; `effective_sample_size` missing from `update`.
    """
    _check_number("reference", reference)
    if not _traced(reference) and not 0.0 < reference <= 1.0:
        raise InputError(f"reference is {reference}; it must lie in (0, 1]")

    def update(updates, state, params=None, *, effective_sample_size=None, **extra):
        del params, extra
        if effective_sample_size is None:
            raise InputError("scale_by_root_ess needs the extra argument 'effective_sample_size'")
        [share] = strict.widened(effective_sample_size)
        share = masked.quotient(share, jnp.asarray(reference, share.dtype))
        return _scaled(updates, jnp.sqrt(jnp.minimum(share, 1.0))), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def effective_sample_size(log_weights: jax.Array, valid: jax.Array) -> jax.Array:
    """(sum w)^2 / (B sum w^2) of w = exp(log_weights) over the B valid sequences; f32[] in (0, 1].

    Takes f32[B] log-ratios of whole sequences, clipped to ±20 as in the metric `ess_sequence`, and
    bool[B]. Exactly 1 when all weights are equal, 1 / B when one is all there is, 1 when none is
    valid. Weights that are not valid are ignored; a NaN among the valid makes it NaN.
    """
    [wide], bound = strict.widened(log_weights), strict.LOG_RATIO_BOUND
    weights = jnp.where(valid, strict.exp(jnp.clip(wide, -bound, bound)), 0.0)
    total, _ = compensated_sum(weights)
    squares, _ = compensated_sum(jnp.square(weights))
    # All weights are at least e^-20, so the squares are 0 only where none is valid.
    squares = count(valid, total.dtype) * jnp.where(squares == 0.0, 1.0, squares)
    least, most = (masked.extreme(weights, valid, f) for f in (jnp.min, jnp.max))
    return jnp.where(least == most, 1.0, jnp.minimum(jnp.square(total) / squares, 1.0))


def decay_report(opt_state: Any) -> dict[str, jax.Array]:
    """Returns what to log from any optimiser state that holds this module's decay states.

    `lr_scale` f32[], `decay_period` i32[] (0: none yet); from `length_triggered_decay` also
    `surge_step` i32[] (0: none yet), `response_length_recent` and `response_length_baseline` f32[]
    in tokens. Empty if there is no such state.

    Where there are several, each key ends in what distinguishes their places in the state:
    `lr_scale/actor` and `lr_scale/critic` of an `optax.partition` with these labels, `lr_scale/0`
    and `lr_scale/1` of a chain of two.
    """
    kinds = (LengthDecayState, TriggeredDecayState)
    leaves, _ = jax.tree.flatten_with_path(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    states = [(path, state) for path, state in leaves if isinstance(state, kinds)]
    places = _distinguished([path for path, _ in states])
    return {
        name + place: value
        for (_, state), place in zip(states, places, strict=True)
        for name, value in _report(state).items()
    }


def _report(state: LengthDecayState | TriggeredDecayState) -> dict[str, jax.Array]:
    if isinstance(state, LengthDecayState):
        return {"lr_scale": state.scale, "decay_period": state.period}
    return _report(state.decay) | {
        "surge_step": state.surge.surge_step,
        "response_length_recent": state.surge.recent,
        "response_length_baseline": state.surge.baseline,
    }


def _distinguished(paths: list[tuple[Any, ...]]) -> list[str]:
    """Paths in a tree as endings of names, without their common beginning and end."""
    if len(paths) < 2:
        return ["" for _ in paths]
    start = next(i for i, keys in enumerate(zip(*paths, strict=False)) if len(set(keys)) > 1)
    rests = [path[start:] for path in paths]
    while min(map(len, rests)) > 1 and len({rest[-1] for rest in rests}) == 1:
        rests = [rest[:-1] for rest in rests]
    return ["/" + jax.tree_util.keystr(rest, simple=True, separator="/") for rest in rests]


def _initial_decay(period) -> LengthDecayState:
    return LengthDecayState(
        jnp.zeros((), jnp.int32), jnp.asarray(period, jnp.int32), jnp.ones((), jnp.float32)
    )


def _advance(state: LengthDecayState, period, *, floor, factor) -> LengthDecayState:
    step = state.step + 1
    due = (period > 0) & (step % jnp.maximum(period, 1) == 0)
    lower = state.scale * jnp.asarray(factor, jnp.float32)
    lower = jnp.maximum(lower, jnp.asarray(floor, jnp.float32))
    return LengthDecayState(step, period, jnp.where(due, lower, state.scale))


def _scaled(updates, scale: jax.Array):
    # Rounded once, also where the updates have 16 bits.
    return jax.tree.map(lambda u: jnp.multiply(*strict.widened(u, scale)).astype(u.dtype), updates)


def _traced(value: Any) -> bool:  # a number that is known only when the program runs
    return isinstance(value, Tracer)


def _checked_period(period: Any):
    """Returns the period as an int, or as it is if it is traced."""
    error = f"period is {period!r}; it must be a whole number of steps, from 1 to 2^31 - 1"
    if _traced(period):
        if not jnp.issubdtype(period.dtype, jnp.integer):
            raise InputError(error)
        return period
    try:
        whole = 0 if isinstance(period, bool) else operator.index(period)
    except TypeError:
        whole = 0
    if not 1 <= whole < 2**31:
        raise InputError(error)
    return whole


def _check_number(name: str, value: Any) -> None:
    if value is None or isinstance(value, bool | str):
        raise InputError(f"{name} is {value!r}; it must be a number")


def _check_decay(floor: Any, factor: Any) -> None:
    _check_number("floor", floor)
    _check_number("factor", factor)
    if not _traced(floor) and not 0.0 <= floor <= 1.0:
        raise InputError(f"floor is {floor}; it must lie in [0, 1]")
    if not _traced(factor) and not 0.0 < factor < 1.0:
        raise InputError(f"factor is {factor}; it must lie in (0, 1)")
