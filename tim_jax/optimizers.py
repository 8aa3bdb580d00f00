"""The optimiser of a run: an optax chain that ends in what scales finished steps.

Around it, where the learner computes in float16, lies what scales the loss (`LossScale`).
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from tim_jax import schedules
from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import check_kinds

_LEAST_SCALE, _MOST_SCALE = 1.0, 2.0**32
Schedule = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True)
class Rate:
    """A learning rate over updates: a linear rise, then constant, cosine or linear.

    Raises `InputError` for a value out of its range.
    """

    learning_rate: float
    """At its highest."""
    warmup_steps: int = 0
    """Updates of linear rise, of which the first is a step above 0 and the last at the highest."""
    schedule: Schedule = "constant"
    """After the rise."""
    total_steps: int | None = None
    """Updates after which a cosine or linear schedule ends; needed by these."""
    final_share: float = 0.0
    """Share of the learning rate that a cosine or linear schedule ends with."""

    def __post_init__(self) -> None:
        check_kinds(self)
        check_choice("schedule", self.schedule, get_args(Schedule))
        _check("learning_rate", self.learning_rate, self.learning_rate > 0, "greater than 0")
        _check("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more")
        total = self.total_steps
        _check("total_steps", total, total is None or total >= 1, "1 or more")
        _check("final_share", self.final_share, 0 <= self.final_share <= 1, "from 0 to 1")

    def schedule_fn(self) -> optax.Schedule:
        """Returns the rate as an optax schedule, from the update (counted from 0) to f32[]."""
        peak, rise_steps = self.learning_rate, self.warmup_steps
        self._check_end()
        if self.schedule == "constant":
            after = optax.constant_schedule(peak)
        elif self.total_steps is None:
            raise InputError(f"total_steps is missing: the schedule {self.schedule!r} needs an end")
        else:
            rest = max(self.total_steps - rise_steps, 1)
            after = {
                "cosine": optax.cosine_decay_schedule(peak, rest, alpha=self.final_share),
                "linear": optax.linear_schedule(peak, peak * self.final_share, rest),
            }[self.schedule]
        if not rise_steps:
            return after
        rise = optax.linear_schedule(0.0, peak, rise_steps)
        # Update 0 already moves: a rise that starts at exactly 0 would waste a rollout.
        return optax.join_schedules([lambda step: rise(step + 1), after], [rise_steps])

    def _check_end(self) -> None:
        """Refuses what would have no effect."""
        total, share = self.total_steps, self.final_share
        if self.schedule == "constant" and (total is not None or share):
            raise InputError(
                f"Rate: total_steps = {total} and final_share = {share} have no effect on a"
                " constant learning rate; set schedule too"
            )
        if total is not None and self.warmup_steps >= total:
            raise InputError(
                f"Rate: warmup_steps = {self.warmup_steps} must be below total_steps = {total}"
            )


@dataclass(frozen=True)
class Decay:
    """Length-triggered decay: a fixed period, or (None) one found from the surge in length."""

    period: int | None = None
    multiple: float = 1.8
    floor: float = 0.1
    detector: schedules.SurgeDetector | None = None  # of the surge; None: its defaults

    def __post_init__(self) -> None:
        check_kinds(self)
        unread = self.multiple != Decay.multiple or self.detector is not None
        if self.period is not None and unread:
            raise InputError(
                f"Decay: period = {self.period} is given, so multiple and detector, which find one,"
                " have no effect; leave them out"
            )

    def transform(self) -> optax.GradientTransformationExtraArgs:
        """Returns the decay as an optax transform for the end of a chain."""
        if self.period is not None:
            return schedules.length_decay(self.period, floor=self.floor)
        return schedules.length_triggered_decay(
            multiple=self.multiple, floor=self.floor, detector=self.detector
        )


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """g -> g min(1, most / |g|), as `optax.clip_by_global_norm`, where the norm may be passed in.

    `update` takes `gradient_norm`, f32[]. Over a mesh, a norm that was added up in a fixed order
    keeps the bits of an update independent of how the runtime adds up.
    """

    def update(updates, state, params=None, *, gradient_norm=None, **_):
        del params
        norm = optax.tree.norm(updates) if gradient_norm is None else gradient_norm

        def clip(g):
            return jnp.where(norm < most, g, g / norm.astype(g.dtype) * most)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class Guarded(optax.GradientTransformationExtraArgs):
    """A transformation whose `update` takes `finite`, bool[], and keeps its state if it is False.

    It does so where it computes the new state, so that this can lie in the buffers of the old one.
    """


def guarded_step(
    optimizer: optax.GradientTransformationExtraArgs,
    gradient: Any,
    state: Any,
    params: Any,
    *,
    finite: jax.Array,
    **extra: Any,
) -> tuple[Any, Any]:
    """The next parameters and optimiser state; if not `finite`, to the bit those that are given.

    With buffers that are donated and a `Guarded` optimiser nothing is held twice: every array is
    computed from its own old value, in its place.
    """
    # optax computes with mixed dtypes (int steps, float decays) on purpose.
    with jax.numpy_dtype_promotion("standard"):
        changes, new_state = _guarded_update(optimizer, gradient, state, params, finite, **extra)
        new_params = _chosen(finite, optax.apply_updates(params, changes), params)
    # What is made of the new parameters is to read these, not to compute them again from the old.
    return jax.lax.optimization_barrier(new_params), new_state


def _guarded_update(optimizer, gradient, state, params, finite, **extra: Any) -> tuple[Any, Any]:
    """The changes and the state after them; if not `finite`, the state that is given."""
    if isinstance(optimizer, Guarded):
        return optimizer.update(gradient, state, params, finite=finite, **extra)
    changes, new = optimizer.update(gradient, state, params, **extra)
    return changes, _chosen(finite, new, state)


def _chosen(finite: jax.Array | bool, new: Any, old: Any) -> Any:
    return jax.tree.map(partial(jnp.where, finite), new, old)


def _adam(b1: float, b2: float, eps: float) -> Guarded:
    """`optax.scale_by_adam`, with its state, formula and bits, as a `Guarded` transformation."""
    plain = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(updates, state, params=None, *, finite=True, **_):
        del params
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        count = optax.safe_increment(state.count)
        new = _chosen(finite, optax.ScaleByAdamState(count=count, mu=mu, nu=nu), state)
        # The step is to read the new moments: computed again from the old ones, these would be
        # needed beside the new.
        new = new._replace(**jax.lax.optimization_barrier({"mu": new.mu, "nu": new.nu}))
        mu_hat = optax.tree.bias_correction(new.mu, b1, count)
        nu_hat = optax.tree.bias_correction(new.nu, b2, count)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        return steps, new

    return Guarded(plain.init, update)


def _guarded_chain(*parts: optax.GradientTransformation) -> Guarded:
    """`optax.chain`; of parts that are not guarded, whose states are small, the old is chosen."""
    whole = [optax.with_extra_args_support(part) for part in parts]

    def update(updates, state, params=None, *, finite=True, **extra):
        after = []
        for part, before in zip(whole, state, strict=True):
            updates, new = _guarded_update(part, updates, before, params, finite, **extra)
            after.append(new)
        return updates, tuple(after)

    return Guarded(optax.chain(*parts).init, update)


@dataclass(frozen=True)
class AdamW(Rate):
    """AdamW, its learning rate over updates, and what scales its steps.

    Raises `InputError` for a value out of its range.
    """

    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Global norm that gradients are scaled down to; 0 is off."""
    ess_reference: float | None = None
    """Steps times sqrt(min(e / this, 1)), e the effective sample size of the update's importance
    weights as a share (VCPO): 1.0 for single-turn tasks. None: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weight_decay", "max_grad_norm"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("b1", "b2"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < 1, "in [0, 1)")
        _check("eps", self.eps, self.eps > 0, "greater than 0")
        share = self.ess_reference
        _check("ess_reference", share, share is None or 0 < share <= 1, "in (0, 1]")

    def transform(self, decay: Decay | None = None) -> optax.GradientTransformationExtraArgs:
        """clip -> AdamW -> length-triggered decay -> root of the effective sample size.

        With clipping on, `update` may be given the `gradient_norm`. With `decay` it takes
        `response_length`, with `ess_reference` (see `schedules.scale_by_root_ess`)
        `effective_sample_size`.
        """
        parts = [clip_by_norm(self.max_grad_norm)] if self.max_grad_norm else []
        # As `optax.adamw`, whose state this has.
        parts.append(
            _guarded_chain(
                _adam(self.b1, self.b2, self.eps),
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(self.schedule_fn()),
            )
        )
        if decay is not None:
            parts.append(decay.transform())
        if self.ess_reference is not None:
            parts.append(schedules.scale_by_root_ess(reference=self.ess_reference))
        return _guarded_chain(*parts)


def adamw(
    rate: Rate, *, decay: Decay | None = None, **settings: Any
) -> optax.GradientTransformationExtraArgs:
    """The chain of `AdamW.transform`; `settings` are the other fields of `AdamW`."""
    return AdamW(**{**asdict(rate), **settings}).transform(decay)


class LossScaleState(NamedTuple):
    """The state of `LossScale.transform`."""

    scale: jax.Array  # f32[], a power of two: what the next loss is to be multiplied by
    since: jax.Array  # i32[], updates without an overflow since the scale last changed
    skipped: jax.Array  # i32[], updates that were skipped by an overflow, in all
    inner: Any  # of the optimiser inside


class LossScaled(Guarded):
    """An optimiser that takes the gradients of a scaled loss, see `LossScale.transform`."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, sections 3.2 and 6).

    Float16 has no normal numbers below 6e-5, where most of a language model's gradients lie. So the
    loss is multiplied by a scale, and the gradients are divided by it in float32. The scale is
    halved when a gradient overflows, and that update is skipped; it is doubled after
    `growth_interval` updates without an overflow. Powers of two only, so that scaling rounds
    nothing. It stays within [1, 2^32].

    Raises `InputError` for a value out of its range.
    """

    initial: float = 2.0**16
    """The first scale, a power of two."""
    growth_interval: int = 400
    """Updates without an overflow after which the scale is doubled."""

    def __post_init__(self) -> None:
        check_kinds(self)
        first = self.initial
        fits = _LEAST_SCALE <= first <= _MOST_SCALE and math.frexp(first)[0] == 0.5
        _check("initial", first, fits, "a power of two from 1 to 2^32")
        _check("growth_interval", self.growth_interval, self.growth_interval >= 1, "1 or more")

    def transform(self, inner: optax.GradientTransformation) -> LossScaled:
        """Returns `inner` for the gradients of a loss that was multiplied by `loss_scale(state)`.

        `update` divides them by the scale, in float32 (float64 stays), before `inner` sees them. If
        they are not finite, all updates are 0 and the state of `inner` stays to the bit. This must
        be the outermost transformation, as what lies around it would not know of a skipped update.

        Two extra arguments say what else than these gradients shows it: `finite`, bool[], whether
        to make the update, and `overflow`, bool[], whether to halve the scale, by default where it
        is not made.
        """
        inside = optax.with_extra_args_support(inner)

        def init(params):
            first = jnp.asarray(self.initial, jnp.float32)
            # Counters are made one by one: a buffer each, so that the state can be donated.
            since, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
            # Moments have the dtype of the gradients that they are of, whatever the parameters'.
            wide = jax.tree.map(lambda x: jnp.asarray(x, _wide_dtype(x)), params)
            return LossScaleState(first, since, skipped, inside.init(wide))

        def update(updates, state, params=None, *, finite=None, overflow=None, **extra):
            gradient = jax.tree.map(partial(_divided, scale=state.scale), updates)
            if finite is None:
                parts = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]
                finite = jnp.all(jnp.stack([jnp.bool_(True), *parts]))
            overflow = ~finite if overflow is None else overflow
            changes, new = _guarded_update(inside, gradient, state.inner, params, finite, **extra)
            changes = jax.tree.map(lambda x: jnp.where(finite, x, jnp.zeros_like(x)), changes)
            return changes, self._after(state, finite, overflow)._replace(inner=new)

        return LossScaled(init, update)

    def _after(self, state: LossScaleState, finite: jax.Array, overflow: jax.Array):
        since = state.since + finite.astype(jnp.int32)
        grows = since >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(2.0 * state.scale, _MOST_SCALE), state.scale)
        halved = jnp.maximum(0.5 * state.scale, _LEAST_SCALE)
        return state._replace(
            scale=jnp.where(overflow, halved, grown),
            since=jnp.where(overflow | grows, 0, since),
            skipped=state.skipped + overflow.astype(jnp.int32),
        )


def dynamic_loss_scale(inner: optax.GradientTransformation, **settings: Any) -> LossScaled:
    """`LossScale(**settings).transform(inner)`, for an optimiser of optax.

    optimizer = dynamic_loss_scale(optax.adamw(1e-6))
    state = optimizer.init(params)
    gradient = jax.grad(lambda p: loss_scale(state) * loss(p))(params)
    updates, state = optimizer.update(gradient, state, params)
    """
    return LossScale(**settings).transform(inner)


def for_dtype(
    optimizer: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformationExtraArgs:
    """The optimiser of a learner that computes in `dtype`: with a scaled loss if that is float16.

    One that scales the loss already stays as it is, and so does any for another dtype.
    """
    if dtype == "float16" and not isinstance(optimizer, LossScaled):
        return dynamic_loss_scale(optimizer)
    return optax.with_extra_args_support(optimizer)


def loss_scale(opt_state: Any) -> jax.Array | None:
    """f32[], what the loss is to be multiplied by; None if the optimiser scales no loss."""
    return opt_state.scale if isinstance(opt_state, LossScaleState) else None


def can_shrink(scale: jax.Array) -> jax.Array:
    """bool[], whether a smaller scale is left to try after an overflow."""
    return scale > _LEAST_SCALE


def loss_scale_report(opt_state: Any) -> dict[str, jax.Array]:
    """What to log of an optimiser's state: `loss_scale` f32[], as it is for the next update, and
    `loss_scale_skips` i32[], updates skipped by an overflow so far. Empty if no loss is scaled.
    """
    if not isinstance(opt_state, LossScaleState):
        return {}
    return {"loss_scale": opt_state.scale, "loss_scale_skips": opt_state.skipped}


def first_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """`optimizer.init(params)`.

    Raises:
      InputError: a loss is scaled by anything but the outermost transformation.
    """
    with jax.numpy_dtype_promotion("standard"):
        opt_state: Any = optimizer.init(params)
    inside = opt_state.inner if isinstance(optimizer, LossScaled) else opt_state
    nodes = jax.tree.leaves(inside, is_leaf=lambda node: isinstance(node, LossScaleState))
    if LossScaleState in map(type, nodes):
        raise InputError(
            "optimizer: dynamic_loss_scale must be the outermost transformation and the only one,"
            " such as dynamic_loss_scale(optax.chain(...)), got it inside of another"
        )
    return opt_state


def _divided(gradient: jax.Array, scale: jax.Array) -> jax.Array:
    wide = _wide_dtype(gradient)
    return gradient.astype(wide) / scale.astype(wide)


def _wide_dtype(x: Any) -> Any:
    return jnp.float64 if jnp.result_type(x) == jnp.float64 else jnp.float32


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {rule}, got {value}")
