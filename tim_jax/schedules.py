"""Step sizes that follow the responses: their length, or their importance weights.

Decay by length, after "Beyond Precision" (arXiv 2602.01826): `length_decay` is exactly its
Algorithm 1; `length_triggered_decay` determines the period itself, by an online detector of the
surge of the mean response length (`SurgeDetector`), which the paper describes but does not specify.
Both multiply the updates by a scale in [floor, 1], so they combine with any schedule (warm-up,
cosine, constant), which then gives eta_0 of the paper. `scale_by_root_ess` is the step size of VCPO
(arXiv 2602.17616). All are optax transforms for the end of a chain.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_kinds, shown
from tim_jax.numerics import strict
from tim_jax.numerics.strict import compensated_sum, count, tree_sum

__all__ = [
    "LengthDecayState",
    "SurgeDetector",
    "SurgeState",
    "TriggeredDecayState",
    "decay_report",
    "effective_sample_size",
    "length_decay",
    "length_decay_schedule",
    "length_triggered_decay",
    "scale_by_root_ess",
]

# Share of the maximum length from which the recent lengths count as pinned: cut off, not grown.
PINNED = 0.95
# The median absolute deviation of a normal distribution, times this, is its standard deviation.
MAD_TO_DEVIATION = 1.4826
# Shares of the needed rise: from the first on the new level is sustained, from the second on the
# lengths have left the baseline, though perhaps by growth that is no surge.
SUSTAINED, SET_IN = 0.6, 0.25
# The newest lengths by which a surge is dated, after how many steps one of them counts e times
# less, and how many of them are before the surge at least.
DATED_BY, FADING, BEFORE = 80, 40, 12
# Steps that a surge may take, besides all those until now.
SPANS = (1, 3, 8, 20)


def __dir__() -> list[str]:
    return __all__


class SurgeState(NamedTuple):
    """State of the detector: values to report, and the lengths that it remembers."""

    step: jax.Array  # i32[], lengths offered so far, missing ones included
    surge_step: jax.Array  # i32[], the step at which the surge set in; 0 while there is none
    recent: jax.Array  # f32[], median of the newest lengths, tokens
    baseline: jax.Array  # f32[], median of the older lengths, tokens; 0 while none is known
    history: jax.Array  # f32[window], log-lengths, newest last, +inf where not yet known
    steps: jax.Array  # i32[window], the step of each of them, 0 where not yet known


@dataclass(frozen=True)
class SurgeDetector:
    """Finds the first surge of a noisy series of mean response lengths, online.

    The baseline is the median of the `window` remembered lengths without the newest `gap`. The
    needed rise is a factor of `rise`, or `noise` standard deviations of the baseline's lengths
    (from their median absolute deviation) if that is more. A surge is found when, in logarithms,

    - the median of the `recent` newest lengths exceeds the baseline by the needed rise,
    - all but one of the `hold` newest exceed it by 0.6 of that rise, so that a short burst does not
      count, and
    - that median also exceeds nine tenths of the baseline's lengths by 0.6 of the rise, so that a
      return from a dip does not count.

    The step of the surge is then read from the memory, by least squares over the newest 80 lengths,
    of which a length counts e times less than one 40 steps newer. Of all lines that are straight up
    to some step, rise from there within 1, 3, 8 or 20 steps or until now, and are level afterwards,
    it is that step of the one that fits best. So growth before a surge is not taken for its
    beginning. Where the lengths, smoothed by medians of five, have stayed above the baseline by a
    quarter of the needed rise since fewer than `minimum` lengths from the first, the rise is taken
    for the start of the run and not for a surge; no surge is dated to before that number, so no
    period is shorter than `multiple * minimum`. Only the first surge counts.

    If lengths are pinned at `max_length` (all but one of the newest `hold` at 95% of it or more),
    their true rise is cut off, so a factor of sqrt(rise) is enough; if they are so from the start,
    no surge is found. A missing length (NaN, infinite or not positive) leaves the memory as it is.
    """

    rise: float = 1.8
    window: int = 160
    gap: int = 24
    recent: int = 6
    hold: int = 13
    minimum: int = 30
    noise: float = 3.0
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        room, longest = self.window - self.gap, self.max_length
        for holds, name, rule in (
            (self.rise > 1.0, "rise", "be above 1"),
            (self.noise >= 0.0, "noise", "be 0 or more"),
            (5 <= self.hold <= self.gap, "hold", f"lie in [5, gap], gap is {self.gap}"),
            (2 <= self.recent <= self.hold, "recent", f"lie in [2, hold], hold is {self.hold}"),
            (1 <= self.minimum <= room, "minimum", f"lie in [1, window - gap], which is {room}"),
            (longest is None or longest >= 1, "max_length", "be at least 1"),
        ):
            if not holds:
                raise InputError(f"{name} is {getattr(self, name)}; it must {rule}")

    def init(self) -> SurgeState:
        """Returns the state before any length is known."""
        # Each field is made by itself: a buffer each, so that the state can be donated.
        return SurgeState(
            step=jnp.zeros((), jnp.int32),
            surge_step=jnp.zeros((), jnp.int32),
            recent=jnp.zeros((), jnp.float32),
            baseline=jnp.zeros((), jnp.float32),
            history=jnp.full(self.window, jnp.inf, jnp.float32),
            steps=jnp.zeros(self.window, jnp.int32),
        )

    def update(self, state: SurgeState, length: jax.Array) -> SurgeState:
        """Takes the mean response length of one more step, f32[], in tokens."""
        length = jnp.asarray(length, jnp.float32)
        valid = jnp.isfinite(length) & (length > 0.0)
        step = state.step + 1
        newest = strict.log(jnp.where(valid, length, 1.0))
        history = jnp.where(valid, jnp.append(state.history[1:], newest), state.history)
        steps = jnp.where(valid, jnp.append(state.steps[1:], step), state.steps)
        older = history[: -self.gap]
        baseline, number = _median(older)
        high = jnp.sort(older)[9 * number // 10]
        level, some = _median(history[-self.recent :])
        sustained = jnp.sort(history[-self.hold :])[1]
        needed = self._needed(older, baseline, sustained)
        unknown = jnp.sum(~jnp.isfinite(history), dtype=jnp.int32)
        before = _last_below(history, baseline + SET_IN * needed) + 1 - unknown
        risen = (level >= baseline + needed) & (sustained >= baseline + SUSTAINED * needed)
        new = risen & (level >= high + SUSTAINED * needed) & (before >= self.minimum)
        first = valid & new & (state.surge_step == 0)

        def nowhere(history, _):  # the search costs more than all else: it waits for a surge
            return jnp.zeros_like(history[0], jnp.int32)

        onset = jax.lax.cond(first, _onset, nowhere, history, baseline)
        onset = jnp.maximum(onset, unknown + self.minimum)
        return SurgeState(
            step=step,
            surge_step=jnp.where(first, steps[onset], state.surge_step),
            recent=jnp.where(some > 0, jnp.exp(level), 0.0),
            baseline=jnp.where(number > 0, jnp.exp(baseline), 0.0),
            history=history,
            steps=steps,
        )

    def _needed(self, older: jax.Array, baseline: jax.Array, sustained: jax.Array) -> jax.Array:
        """The rise that counts as a surge, f32[], in logarithms."""
        deviations = jnp.where(jnp.isfinite(older), jnp.abs(older - baseline), jnp.inf)
        spread, _ = _median(deviations)
        rise = jnp.float32(math.log(self.rise))
        if self.max_length is not None:
            rise = jnp.where(sustained >= math.log(PINNED * self.max_length), 0.5 * rise, rise)
        return jnp.maximum(rise, self.noise * MAD_TO_DEVIATION * spread)


def _median(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The median f32[] and the number i32[] of the finite values; +inf marks the others."""
    ordered = jnp.sort(values)
    number = jnp.sum(jnp.isfinite(values), dtype=jnp.int32)
    upper = ordered[number // 2]
    lower = ordered[jnp.maximum(number - 1, 0) // 2]
    return 0.5 * (lower + upper), number


def _last_below(history: jax.Array, threshold: jax.Array) -> jax.Array:
    """i32[], the last place around which the lengths are below the threshold."""
    smooth = _median_of_five(*(history[i : history.shape[0] - 4 + i] for i in range(5)))
    raised = jnp.isfinite(history[2:-2]) & (smooth >= threshold)
    # The first neighbourhood of five has its middle at 2.
    return 2 + jnp.max(jnp.where(raised, -1, jnp.arange(raised.shape[0], dtype=jnp.int32)))


def _median_of_five(a, b, c, d, e):
    """The median of five, elementwise, by dropping the least and the greatest of two pairs."""
    low = jnp.maximum(jnp.minimum(a, b), jnp.minimum(c, d))
    high = jnp.minimum(jnp.maximum(a, b), jnp.maximum(c, d))
    return jnp.maximum(jnp.minimum(low, high), jnp.minimum(e, jnp.maximum(low, high)))


def _onset(history: jax.Array, baseline: jax.Array) -> jax.Array:
    """i32[], the place in the history at which the line that fits it best begins to rise.

    What a line with free coefficients explains of the lengths is the square of their part in the
    space of its shapes, of which `_rises` has a basis. The baseline stands where a length is not
    known.
    """
    bases, onsets = _rises(min(DATED_BY, history.shape[0]))
    newest = history[-bases.shape[-1] :]
    newest = jnp.where(jnp.isfinite(newest), newest - baseline, 0.0)
    explained = tree_sum(jnp.square(tree_sum(bases * newest[None, None, :])))
    return history.shape[0] - bases.shape[-1] + jnp.asarray(onsets)[jnp.argmax(explained)]


@functools.cache
def _rises(length: int) -> tuple[np.ndarray, np.ndarray]:
    """f32[C, 2, length], a basis of each candidate's shapes, and i32[C], its first rising place.

    The shapes are the rise and the slope before it, times the roots of the lengths' weights. The
    basis is orthonormal, and orthogonal to the constant, which explains the same in all candidates;
    it is returned times the roots, which the lengths are to be multiplied by as well.
    """
    first = max(2, min(BEFORE, length // 4))  # at 1, a rise at once is the slope and the constant
    candidates = [
        (onset, span)
        for onset in range(first, length - 1)
        for span in (*(span for span in SPANS if span < length - onset), length - onset)
    ]
    onsets, spans = np.asarray(candidates).T
    places = np.arange(length)
    since = places - onsets[:, None]
    root = np.exp((places - length + 1) / (2 * FADING))
    rise = np.clip((since + 1) / spans[:, None], 0.0, 1.0) * root
    slope = np.minimum(since, 0.0) * root
    basis: list[np.ndarray] = [root / np.sqrt(np.square(root).sum())]
    for shape in (rise, slope):
        for other in basis:
            shape = shape - (shape * other).sum(axis=1, keepdims=True) * other
        basis.append(shape / np.sqrt(np.square(shape).sum(axis=1, keepdims=True)))
    bases = np.stack(basis[1:], axis=1) * root
    return bases.astype(np.float32), onsets.astype(np.int32)


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
) -> Callable[[ArrayLike], jax.Array]:
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
        InputError: multiple not above 0, floor outside [0, 1], factor outside (0, 1) or a
            detector of another type; and `response_length` missing from `update`.
    """
    _check_number("multiple", multiple, lambda x: x > 0.0, "be above 0")
    _check_decay(floor, factor)
    detector = SurgeDetector() if detector is None else detector
    if not isinstance(detector, SurgeDetector):
        raise InputError(f"detector is {shown(detector)}; it must be a SurgeDetector(...)")

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
        InputError: reference outside (0, 1]; `effective_sample_size` missing from `update`, or
            not one number.
    """
    _check_number("reference", reference, lambda x: 0.0 < x <= 1.0, "lie in (0, 1]")

    def update(updates, state, params=None, *, effective_sample_size=None, **extra):
        del params, extra
        if effective_sample_size is None:
            raise InputError("scale_by_root_ess needs the extra argument 'effective_sample_size'")
        [share] = strict.widened(effective_sample_size)
        if share.shape:
            raise InputError(
                f"effective_sample_size has shape {share.shape}; it must be one number, such as"
                " effective_sample_size(log_weights, valid)"
            )
        share = strict.quotient(share, jnp.asarray(reference, share.dtype))
        return _scaled(updates, jnp.sqrt(jnp.minimum(share, 1.0))), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def effective_sample_size(log_weights: jax.Array, valid: jax.Array) -> jax.Array:
    """(sum w)^2 / (B sum w^2) of w = exp(log_weights) over the B valid sequences; f32[] in (0, 1].

    Takes f32[B] log-ratios of whole sequences, clipped to ±20 as in the metric `ess_sequence`, and
    bool[B]. Exactly 1 when all weights are equal, 1 / B when one is all there is, 1 when none is
    valid. Weights that are not valid are ignored; a NaN among the valid makes it NaN.

    Raises:
        InputError: arrays that are not both of one number a sequence.
    """
    if log_weights.ndim != 1 or log_weights.shape != valid.shape:
        raise InputError(
            f"log_weights have shape {log_weights.shape} and valid {valid.shape}; they must both be"
            " [batch]: a sequence's log-ratio is the sum of its tokens'"
        )
    [wide], bound = strict.widened(log_weights), strict.LOG_RATIO_BOUND
    valid = valid.astype(bool)
    weights = jnp.where(valid, strict.exp(jnp.clip(wide, -bound, bound)), 0.0)
    total, _ = compensated_sum(weights)
    squares, _ = compensated_sum(jnp.square(weights))
    # All weights are at least e^-20, so the squares are 0 only where none is valid.
    squares = count(valid, total.dtype) * jnp.where(squares == 0.0, 1.0, squares)
    least, most = (strict.extreme(weights, valid, f) for f in (jnp.min, jnp.max))
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
        name + place: jnp.asarray(value)  # flax keeps an optimizer's state in variables
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
    def scaled(update):
        if jnp.iscomplexobj(update):
            return jax.lax.complex(scaled(update.real), scaled(update.imag))
        # Rounded once, also where the updates have 16 bits.
        return jnp.multiply(*strict.widened(update, scale)).astype(update.dtype)

    return jax.tree.map(scaled, updates)


def _checked_period(period: Any) -> Any:
    """Returns the period as an int, or as it is if it is traced: known when the program runs."""
    error = f"period is {period!r}; it must be a whole number of steps, from 1 to 2^31 - 1"
    if isinstance(period, Tracer):
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


def _check_number(name: str, value: Any, holds: Callable[[Any], bool], rule: str) -> None:
    if value is None or isinstance(value, bool | str):
        raise InputError(f"{name} is {value!r}; it must be a number")
    if not isinstance(value, Tracer) and not holds(value):
        raise InputError(f"{name} is {value}; it must {rule}")


def _check_decay(floor: Any, factor: Any) -> None:
    _check_number("floor", floor, lambda x: 0.0 <= x <= 1.0, "lie in [0, 1]")
    _check_number("factor", factor, lambda x: 0.0 < x < 1.0, "lie in (0, 1)")
