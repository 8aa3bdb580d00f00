"""An online detector of the first surge of a noisy series of mean response lengths."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_kinds
from tim_jax.numerics import strict
from tim_jax.numerics.sums import tree_sum

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
    beginning. Where the lengths, smoothed by medians of five, have
    stayed above the baseline by a quarter of the needed rise since fewer than `minimum` lengths
    from the first, the rise is taken for the start of the run and not for a surge; no surge is
    dated to before that number, so no period is shorter than `multiple * minimum`. Only the first
    surge counts.

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
        if not self.rise > 1.0:
            raise InputError(f"rise is {self.rise}; it must be above 1")
        if not self.noise >= 0.0:
            raise InputError(f"noise is {self.noise}; it must be 0 or more")
        if not 5 <= self.hold <= self.gap:
            raise InputError(f"hold is {self.hold}; it must lie in [5, gap], gap is {self.gap}")
        if not 2 <= self.recent <= self.hold:
            rule = f"it must lie in [2, hold], hold is {self.hold}"
            raise InputError(f"recent is {self.recent}; {rule}")
        if not 1 <= self.minimum <= self.window - self.gap:
            rule = f"it must lie in [1, window - gap], which is {self.window - self.gap}"
            raise InputError(f"minimum is {self.minimum}; {rule}")
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
        onset = jax.lax.cond(first, _onset, _no_place, history, baseline)
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


def _no_place(history: jax.Array, baseline: jax.Array) -> jax.Array:
    del history, baseline  # the search costs more than all else: it waits for a surge
    return jnp.zeros((), jnp.int32)


@functools.cache
def _rises(length: int) -> tuple[np.ndarray, np.ndarray]:
    """f32[C, 2, length], a basis of each candidate's shapes, and i32[C], its first rising place.

    The shapes are the rise and the slope before it, times the roots of the lengths' weights. The
    basis is orthonormal, and orthogonal to the constant, which explains the same in all candidates;
    it is returned times the roots, which the lengths are to be multiplied by as well.
    """
    first = min(BEFORE, length // 4)
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
