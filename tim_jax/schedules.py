"""Learning-rate decay by response length, as optax transforms for the end of any chain.

Source: "Beyond Precision" (arXiv 2602.01826). `length_decay` is its Algorithm 1 to the letter;
`length_triggered_decay` finds the period itself, from an online detector of the surge of the mean
response length, which the paper describes but does not specify. Both multiply the updates by a
scale in [floor, 1], so any schedule (warm-up, cosine, constant) composes under them, and eta_0 of
the paper is whatever that schedule gives.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tim_jax.errors import InputError

# Share of the maximum length from which the recent lengths count as pinned: cut off, not grown.
PINNED = 0.95
# The median absolute deviation of a normal distribution, times this, is its standard deviation.
MAD_TO_DEVIATION = 1.4826


class LengthDecayState(NamedTuple):
    """State of Algorithm 1. `step` counts updates, 1 at the first; no period (0) means no decay."""

    step: jax.Array  # i32[]
    period: jax.Array  # i32[], steps between halvings; 0 while there is none
    scale: jax.Array  # f32[], the factor on the updates


class SurgeState(NamedTuple):
    """State of the detector: what a report wants to read, and the lengths it remembers."""

    step: jax.Array  # i32[], lengths offered so far, missing ones included
    surge_step: jax.Array  # i32[], the step at which the surge set in; 0 while there is none
    recent: jax.Array  # f32[], median of the newest lengths, tokens
    baseline: jax.Array  # f32[], median of the older lengths, tokens; 0 while too few are known
    history: jax.Array  # f32[window], log-lengths, newest last, +inf where not yet known
    steps: jax.Array  # i32[window], the step of each of them, 0 where not yet known


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

    Raises:
        InputError: period below 1, floor outside [0, 1] or factor outside (0, 1).
    """
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise InputError(f"period is {period!r}; it must be a whole number of steps, at least 1")
    _check_decay(floor, factor)

    def init(params):
        del params
        return _initial_decay(period)

    def update(updates, state, params=None, **extra):
        del params, extra
        state = _advance(state, state.period, floor=floor, factor=factor)
        return _scaled(updates, state.scale), state

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class SurgeDetector:
    """Finds the first surge of a noisy series of mean response lengths, online.

    The baseline is the median of the remembered lengths that are older than `gap` steps. A surge is
    found when all but one of the `recent` newest lengths exceed it by a factor of `rise`, and by
    `noise` standard deviations of the baseline's lengths (from their median absolute deviation), in
    logarithms. Single batches gone astray are not enough; the baseline moves along, so growth that
    takes longer than `window` steps is not seen. Nothing looks ahead.

    The surge's step is then read back from the memory: the lengths of the newest `gap` steps that
    stand above half the rise (in logarithms) belong to it.

    - no surge: `surge_step` stays 0
    - a second surge: not looked for; the first sets the period
    - lengths pinned at `max_length` (all but one of the newest at 95% of it or more): their true
      rise is cut off, so a factor of sqrt(rise) is enough; pinned from the start, nothing is seen
    - a missing length (NaN or not positive) leaves the memory as it is
    - no surge is found before `gap + minimum` lengths are known
    """

    rise: float = 1.8
    window: int = 60
    gap: int = 10
    recent: int = 6
    minimum: int = 20
    noise: float = 4.0
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not self.rise > 1.0:
            raise InputError(f"rise is {self.rise}; it must be above 1")
        if not self.noise >= 0.0:
            raise InputError(f"noise is {self.noise}; it must be 0 or more")
        if not 2 <= self.recent <= self.gap:
            raise InputError(f"recent is {self.recent}; it must lie in [2, gap], gap is {self.gap}")
        if not 1 <= self.minimum <= self.window - self.gap:
            raise InputError(
                f"minimum is {self.minimum}; it must lie in [1, window - gap], which is"
                f" {self.window - self.gap}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length is {self.max_length}; it must be at least 1")

    def init(self) -> SurgeState:
        """Returns the state before any length is known."""
        none = jnp.zeros((), jnp.int32)
        zero = jnp.zeros((), jnp.float32)
        unknown = jnp.full(self.window, jnp.inf, jnp.float32)
        return SurgeState(none, none, zero, zero, unknown, jnp.zeros(self.window, jnp.int32))

    def update(self, state: SurgeState, length: jax.Array) -> SurgeState:
        """Takes the mean response length of one more step, f32[], in tokens."""
        known = jnp.isfinite(length) & (length > 0.0)
        newest = jnp.log(jnp.where(known, length, 1.0))
        history = jnp.where(known, jnp.append(state.history[1:], newest), state.history)
        newest = history[-self.recent :]
        level = jnp.sort(newest)[1]
        older = history[: -self.gap]
        baseline, number = _median(older)
        spread, _ = _median(jnp.where(jnp.isfinite(older), jnp.abs(older - baseline), jnp.inf))
        rise = jnp.float32(math.log(self.rise))
        if self.max_length is not None:
            rise = jnp.where(level >= math.log(PINNED * self.max_length), 0.5 * rise, rise)
        needed = jnp.maximum(rise, self.noise * MAD_TO_DEVIATION * spread)
        ready = number >= self.minimum
        found = known & ready & (state.surge_step == 0) & (level - baseline >= needed)
        raised = jnp.isfinite(history) & (history >= baseline + 0.5 * needed)
        step = state.step + 1
        steps = jnp.where(known, jnp.append(state.steps[1:], step), state.steps)
        onset = steps[-jnp.maximum(jnp.sum(raised[-self.gap :]), 1)]
        middle, some = _median(newest)
        return SurgeState(
            step=step,
            surge_step=jnp.where(found, onset, state.surge_step),
            recent=jnp.where(some > 0, jnp.exp(middle), 0.0),
            baseline=jnp.where(ready, jnp.exp(baseline), 0.0),
            history=history,
            steps=steps,
        )


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
    resumed from a checkpoint goes on as if it had not stopped.

    Raises:
        InputError: multiple not above 0, floor outside [0, 1] or factor outside (0, 1); and
            `response_length` missing from `update`.
    """
    if not multiple > 0.0:
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
        period = jnp.maximum(jnp.round(multiple * surge.surge_step.astype(jnp.float32)), 1.0)
        period = jnp.where(surge.surge_step > 0, period.astype(jnp.int32), 0)
        decay = _advance(state.decay, period, floor=floor, factor=factor)
        return _scaled(updates, decay.scale), TriggeredDecayState(decay, surge)

    return optax.GradientTransformationExtraArgs(init, update)


def decay_report(opt_state: Any) -> dict[str, jax.Array]:
    """Returns what to log from any optimiser state that holds one of this module's states.

    `lr_scale` f32[], `decay_period` i32[] (0: none yet); from `length_triggered_decay` also
    `surge_step` i32[] (0: none yet), `response_length_recent` and `response_length_baseline` f32[]
    in tokens. Empty if there is no such state.
    """
    kinds = (LengthDecayState, TriggeredDecayState)
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    report = {}
    for state in leaves:
        if isinstance(state, TriggeredDecayState):
            report |= {
                "surge_step": state.surge.surge_step,
                "response_length_recent": state.surge.recent,
                "response_length_baseline": state.surge.baseline,
            }
            state = state.decay
        if isinstance(state, LengthDecayState):
            report |= {"lr_scale": state.scale, "decay_period": state.period}
    return report


def _initial_decay(period: int) -> LengthDecayState:
    return LengthDecayState(
        jnp.zeros((), jnp.int32), jnp.full((), period, jnp.int32), jnp.ones((), jnp.float32)
    )


def _advance(state: LengthDecayState, period, *, floor: float, factor: float) -> LengthDecayState:
    step = state.step + 1
    due = (period > 0) & (step % jnp.maximum(period, 1) == 0)
    scale = jnp.where(due, jnp.maximum(state.scale * factor, floor), state.scale)
    return LengthDecayState(step, period, scale)


def _scaled(updates, scale: jax.Array):
    return jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)


def _median(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The median f32[] and the number i32[] of the finite values; +inf marks the others."""
    ordered = jnp.sort(values)
    number = jnp.sum(jnp.isfinite(values), dtype=jnp.int32)
    upper = ordered[number // 2]
    lower = ordered[jnp.maximum(number - 1, 0) // 2]
    return 0.5 * (lower + upper), number


def _check_decay(floor: float, factor: float) -> None:
    if not 0.0 <= floor <= 1.0:
        raise InputError(f"floor is {floor}; it must lie in [0, 1]")
    if not 0.0 < factor < 1.0:
        raise InputError(f"factor is {factor}; it must lie in (0, 1)")
