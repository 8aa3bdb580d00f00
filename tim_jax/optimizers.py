"""The optimiser of a run: an optax chain that ends in what scales finished steps."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from tim_jax import schedules

Schedule = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True)
class Rate:
    """A learning rate over steps: a linear rise from 0, then constant, cosine or linear."""

    peak: float
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int = 1  # where cosine and linear end
    final_share: float = 0.0

    def schedule_fn(self) -> optax.Schedule:
        rest = max(self.total_steps - self.warmup_steps, 1)
        after = {
            "constant": optax.constant_schedule(self.peak),
            "cosine": optax.cosine_decay_schedule(self.peak, rest, alpha=self.final_share),
            "linear": optax.linear_schedule(self.peak, self.peak * self.final_share, rest),
        }[self.schedule]
        if not self.warmup_steps:
            return after
        rise = optax.linear_schedule(0.0, self.peak, self.warmup_steps)
        # Step 0 already moves: a rise that starts at exactly 0 would waste a rollout.
        return lambda step: optax.join_schedules([rise, after], [self.warmup_steps])(step + 1)


@dataclass(frozen=True)
class Decay:
    """Length-triggered decay: a fixed period, or (None) one found from the surge in length."""

    period: int | None = None
    multiple: float = 1.8
    floor: float = 0.1
    detector: schedules.SurgeDetector | None = None  # of the surge; None: its defaults

    def transform(self) -> optax.GradientTransformationExtraArgs:
        if self.period is not None:
            return schedules.length_decay(self.period, floor=self.floor)
        return schedules.length_triggered_decay(
            multiple=self.multiple, floor=self.floor, detector=self.detector
        )


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """g -> g min(1, most / |g|), as `optax.clip_by_global_norm`, of a norm that may be known.

    `update` takes `gradient_norm`, f32[]. A norm over a mesh that is taken in a fixed order keeps
    the bits of an update from depending on how a runtime adds up.
    """

    def update(updates, state, params=None, *, gradient_norm=None, **_):
        del params
        norm = optax.tree.norm(updates) if gradient_norm is None else gradient_norm

        def clip(g):
            return jnp.where(norm < most, g, g / norm.astype(g.dtype) * most)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def adamw(
    rate: Rate,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    decay: Decay | None = None,
    ess_reference: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """clip -> AdamW -> length-triggered decay -> root of the effective sample size.

    `max_grad_norm` 0 turns clipping off; else `update` may be given the `gradient_norm`. With
    `decay` it takes `response_length`, with `ess_reference` (see `schedules.scale_by_root_ess`)
    `effective_sample_size`.
    """
    parts = [clip_by_norm(max_grad_norm)] if max_grad_norm else []
    parts.append(optax.adamw(rate.schedule_fn(), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay))
    if decay is not None:
        parts.append(decay.transform())
    if ess_reference is not None:
        parts.append(schedules.scale_by_root_ess(reference=ess_reference))
    return optax.with_extra_args_support(optax.chain(*parts))
