"""Mismatch metrics and corrections of two arrays, in any trainer."""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import corrections, metrics
from tim_jax.common.errors import InputError
from tim_jax.corrections import Correction

# What corrections read and the two arrays say: given once more, it could disagree with them.
_FOLLOWING = ("log_ratio", "log_probs")


class Observed(NamedTuple):
    """What a monitor found in one batch.

    Attributes:
        metrics: name -> number: those of `tim_jax.metrics.mismatch_metrics`, under `mismatch/`,
            and what the correction did, under `correction/`.
        coefficients: f32[B, R], by which the loss of each token is to be multiplied; 0 off the
            mask.
        kept: bool[B, R], the tokens that no rejection took out of the loss's denominator.
        state: of the correction, for the next call; only some corrections remember anything.
    """

    metrics: dict[str, float]
    coefficients: np.ndarray
    kept: np.ndarray
    state: Any


@dataclass(frozen=True)
class Monitor:
    """Logs the mismatch of any trainer, and corrects for it, from two arrays.

        monitor = tim_jax.diagnose.Monitor(tim_jax.corrections.token_tis())
        seen = monitor(trainer_log_probs, rollout_log_probs, response_mask)
        loss = (loss_per_token * seen.coefficients).sum() / seen.kept.sum()
        wandb.log(seen.metrics)

    Arrays are NumPy's, JAX's or torch's, on any device and in any float dtype; what comes back is
    NumPy's. Nothing is remembered between calls.
    """

    correction: Correction = field(default_factory=corrections.none)

    def __call__(
        self, trainer: Any, rollout: Any, mask: Any, *, state: Any = None, **extra: Any
    ) -> Observed:
        """Metrics and coefficients of a batch.

        Args:
          trainer: f32[B, R], the trainer's log-probs of the response tokens.
          rollout: f32[B, R], those that the sampler recorded.
          mask: bool[B, R], True on response tokens; what stands elsewhere is never read.
          state: what the last call returned.
          extra: what the correction reads besides, such as `advantages` f32[B]. Not `log_probs`,
            which `kpop` and `dppo` read: that is `trainer`.

        Raises:
          InputError: arrays whose shapes do not go together, or one that the correction lacks, or
            that follows from the others.
        """
        for name in _FOLLOWING:
            if name in extra:
                raise InputError(f"Monitor: {name} follows from trainer and rollout; leave it out")
        arrays = {"trainer": _array(trainer), "rollout": _array(rollout)}
        of_mask = _array(mask)
        if of_mask.ndim != 2:
            raise InputError(f"Monitor: mask must be [sequences, tokens], got {of_mask.shape}")
        arrays |= {name: _array(value) for name, value in extra.items()}
        for name, array in arrays.items():
            of_sequence = name in extra and array.shape == of_mask.shape[:1]
            if array.shape != of_mask.shape and not of_sequence:
                raise InputError(
                    f"Monitor: {name} has shape {array.shape}; it must be the mask's,"
                    f" {of_mask.shape}"
                )
        # Few shapes, so that few programs are compiled.
        shape = tuple(max(8, 1 << (size - 1).bit_length()) for size in of_mask.shape)
        given = {name: _padded(array, shape[: array.ndim]) for name, array in arrays.items()}
        run = _program(self.correction)
        numbers, coefficients, kept, state = run(given, _padded(of_mask != 0, shape), state)
        rows, columns = of_mask.shape
        return Observed(
            {name: float(value) for name, value in jax.device_get(numbers).items()},
            np.asarray(coefficients)[:rows, :columns],
            np.asarray(kept)[:rows, :columns],
            state,
        )


def _array(value: Any) -> np.ndarray:
    """A NumPy array of any array; torch's tensors without their gradient, in float32."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    value = np.asarray(value)
    return value if value.dtype == bool else value.astype(np.float32)


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    pairs = zip(array.shape, shape, strict=True)
    return jnp.asarray(np.pad(array, [(0, whole - size) for size, whole in pairs]))


@lru_cache(maxsize=16)
def _program(correction: Correction) -> Any:
    return jax.jit(partial(_observe, correction))


def _observe(correction, arrays, mask, state):
    trainer, rollout = arrays.pop("trainer"), arrays.pop("rollout")
    log_ratio = jnp.where(mask, trainer - rollout, 0.0)
    needs = {need for block in correction.blocks for need in block.needs}
    given = {"log_probs": trainer} if "log_probs" in needs else {}
    corrected = corrections.correct(
        correction, log_ratio=log_ratio, mask=mask, state=state, **given, **arrays
    )
    numbers = metrics.mismatch_metrics(trainer, rollout, mask)
    named = {f"mismatch/{name}": value for name, value in numbers.items()}
    named |= {f"correction/{name}": value for name, value in corrected.metrics.items()}
    return named, corrected.coefficients, corrected.kept, corrected.state
