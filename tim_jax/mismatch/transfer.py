"""Entries that change what passes between learner and sampler: weights, reports, and noise.

Weights are those that the sampler is given. Reports make mistakes of real systems: not in what is
computed, but in what is recorded. Noise is a mismatch of any size and shape that is reproducible to
the bit: like the sampler's, a random number is keyed by (seed, step of the run, prompt, sample,
position), and does not depend on the batch that its row is in.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from tim_jax.common.types import Names, Rollout
from tim_jax.kernels import cache, tiles
from tim_jax.mismatch.base import Between, Count, Dtype, Entry, OneOf, Seed, Size, Whole
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import JOINED, Joined, joined, size
from tim_jax.numerics import EIGHT_BITS, Numerics, strict
from tim_jax.policy import distribution

_FORMATS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
_MATRICES = tuple(row for row in JOINED if row.quantised)
# Salts of the random numbers of lost ends, of the two noises of logits, and of that of log-probs.
_DROPS, _LOGITS, _TOKENS, _LOG_PROBS = 0x0E5D, 0x1061, 0x70CE, 0x1096
_NOT_GIVEN = "what was drawn is not what the learner is given"
Distribution = Literal["gaussian", "student"]


@dataclass(frozen=True)
class QuantisedWeights(Entry):
    """Weight matrices are rounded to a narrow format, with symmetric scales from largest elements.

    per "channel": a scale per output column, "matrix": one per matrix, "tensor": one where q, k and
    v, or gate and up, are one. With `group` > 0 each run of that many rows of a column has its own.
    codes "symmetric": whole numbers from -127 to 127, "full": from -128, and the scale is the
    largest element's over 127.5, as torch, torchao, qwix and compressed-tensors have it (in int4
    GPTQ, from -8). With `activations`, what these matrices are multiplied by is rounded as well, to
    that format with a scale per token (W8A8). Sums and the rest are those of the compute dtype.
    """

    dtype: Annotated[str, OneOf(_FORMATS)]
    per: Literal["channel", "matrix", "tensor"] = "channel"
    group: Whole = 0
    head: bool = False  # the LM head too; engines leave it, and the embedding, as they are
    codes: Literal["symmetric", "full"] = "symmetric"
    activations: Annotated[str, OneOf(EIGHT_BITS)] | None = None

    name, kind = "quantised_weights", "weights"

    def __post_init__(self):
        super().__post_init__()
        if self.group and self.per != "channel":
            raise self.refuse(f'group = {self.group} contradicts per = "{self.per}"')
        if self.codes == "full" and not self.dtype.startswith("int"):
            raise self.refuse(f'codes = "full" is of int8 and int4; {self.dtype} has one range')

    @property
    def draws(self) -> bool:
        return self.activations is not None

    def numerics(self, numerics: Numerics) -> Numerics:
        if self.activations is None:
            return numerics
        head = self.activations if self.head else None
        precision = replace(numerics.precision, activations=self.activations, head_activations=head)
        return replace(numerics, precision=precision)

    def check(self, execution: Execution) -> None:
        if self.activations and (execution.config.num_experts or execution.config.latent):
            what = "mixture of experts" if execution.config.num_experts else "latent attention"
            raise self.refuse(f"activations = {self.activations!r} takes no {what}; leave it out")
        for row in joined(execution.config):
            if not row.quantised:
                continue
            stored = row.outputs[0] if row.turned else row.input
            inputs = size(stored, execution.config)
            if self.group and inputs % self.group:
                raise self.refuse(
                    f"group = {self.group} does not divide the model's"
                    f" {execution.config.titled(stored)} {inputs}"
                )

    def weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        stacks = {name: leaf for name, leaf in weights.items() if isinstance(leaf, dict)}
        rounded = {name: self._of_layers(layers) for name, layers in stacks.items()}
        head = weights["head"]
        head = self.rounded(head, tiled=head.ndim == 3) if self.head else head
        return weights | rounded | {"head": head}

    def _of_layers(self, layers: dict[str, Any]) -> dict[str, Any]:
        """The compute weights of a stack of layers, its matrices rounded."""
        tiled = layers["o"].ndim == 4
        rounded = {}
        for row in _MATRICES:
            if row.name not in layers:
                continue
            matrix = layers[row.name]
            matrix = jnp.swapaxes(matrix, -1, -2) if row.turned else matrix
            parts = jnp.split(matrix, self._ends(row, layers), axis=-1)
            how: dict[str, Any] = {"tiled": tiled, "largest": self._largest(row, layers)}
            matrix = jnp.concatenate([self.rounded(x, **how) for x in parts], axis=-1)
            rounded[row.name] = jnp.swapaxes(matrix, -1, -2) if row.turned else matrix
        return layers | rounded

    def _ends(self, row: Joined, layers: dict[str, Any]) -> list[int]:
        """The columns of a joined matrix, or of its tiles, at which its parts end but the last."""
        columns = layers[row.name].shape[-1]
        if self.per != "matrix" or len(row.parts) == 1:
            return []
        if len(row.parts) == 2:
            return [columns // 2]
        tiles = layers["o"].shape[1] if layers["o"].ndim == 4 else 1
        query = layers["o"].shape[-2] // tiles
        return [query, (query + columns) // 2]

    def _largest(self, row: Joined, layers: dict[str, Any]) -> jax.Array | None:
        """f32[L, 1, 1, 1], of a matrix that is kept by head and in two parts; None of others."""
        own = [x.name for x in _MATRICES if x.parts == row.parts and x.name in layers]
        if self.per == "channel" or len(own) == 1:
            return None
        wide = (jnp.abs(layers[name].astype(jnp.float32)) for name in own)
        return reduce(jnp.maximum, (jnp.max(x, axis=(-3, -2, -1), keepdims=True) for x in wide))

    def rounded(
        self, matrix: jax.Array, *, tiled: bool = False, largest: jax.Array | None = None
    ) -> jax.Array:
        """Matrices [..., in, out], or in column tiles [..., T, in, out / T], in their own dtype.

        `largest`: the elements that the scales are of; None: those of these matrices.
        """
        wide = matrix.astype(jnp.float32)
        if self.group:
            wide = wide.reshape(*wide.shape[:-2], -1, self.group, wide.shape[-1])
        whole = (-3, -2, -1) if tiled else (-2, -1)
        axes = (-2,) if self.per == "channel" else whole
        if largest is None:
            largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
        full = self.codes == "full"
        scaled = cache.scaled(wide, self.dtype, largest=largest, fence=tiles.fence, full=full)
        return scaled.reshape(matrix.shape).astype(matrix.dtype)


@dataclass(frozen=True)
class LoraMerge(Entry):
    """Base, product and sum are rounded to this dtype where the sampler's adapters are merged.

    The learner keeps the rule, a float32 sum that is rounded once. For runs that train adapters.
    The sampler's weights are made of the base and the adapters again in every step.
    """

    dtype: Dtype

    name, kind = "lora_merge", "weights"

    @property
    def inert(self) -> bool:
        return self.dtype == "float32"

    def check(self, execution: Execution) -> None:
        if execution.lora is None:
            raise self.refuse("this run trains no adapters, see the section lora")

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, precision=replace(numerics.precision, lora=self.dtype))


@dataclass(frozen=True)
class StaleWeights(Entry):
    """The sampler has the weights of `updates` updates ago (at the start of a run: the first ones).

    This is the only entry that is drift and not mismatch: at equal weights it is exact. The
    training loop keeps the old weights.
    """

    updates: Whole

    name, kind = "stale_weights", "weights"
    no_control = "old weights are drift: with equal weights there is no mismatch"

    @property
    def inert(self) -> bool:
        return self.updates == 0


@dataclass(frozen=True)
class InFlightUpdates(StaleWeights):
    """The sampler's weights change within a response: an update arrives after every `every` tokens.

    The first `every` tokens are drawn by the weights of `updates` updates ago, the next ones by
    those of one update later, and so on up to the newest. After a change all keys and values are
    made again by the new weights, as in AReaL (arXiv 2505.24298). Like `stale_weights` this is
    drift: under the weights that drew it, every token is exact.
    """

    every: Count

    name = "in_flight_updates"

    def check(self, execution: Execution) -> None:
        longest = execution.sampling.max_tokens
        if self.every >= longest:
            raise self.refuse(
                f"every = {self.every} must be less than the longest response, {longest}, within"
                " which the weights are to change"
            )
        if execution.routing != "own":
            raise self.refuse(
                f"goes only with learner.routing = 'own', not {execution.routing!r}: the experts of"
                " a response in parts are not recorded"
            )

    def parts(self, longest: int) -> list[int]:
        """Most tokens of a response that are drawn by one and the same weights, oldest first."""
        starts = range(0, min(longest, (self.updates + 1) * self.every), self.every)
        ends = [*starts[1:], longest]
        return [end - start for start, end in zip(starts, ends, strict=True)]


class RawLogProbs(Entry):
    """Reports log-probs of the raw logits, though drawn under temperature, top-k and top-p."""

    name, kind = "raw_log_probs", "semantics"
    reports = True
    only_reports = True
    ignored: ClassVar[dict[str, float]] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def reported(
        self, logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
    ) -> jax.Array:
        plain: Any = replace(sampling, **self.ignored)
        return distribution.log_prob(logits, tokens, sampling=plain, numerics=numerics)


class IgnoredTruncation(RawLogProbs):
    """Reports log-probs under the temperature, not renormalised over what top-k and top-p keep.

    They are too small by minus the log of the kept mass.
    """

    name = "ignored_truncation"
    ignored: ClassVar[dict[str, float]] = {"top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class DroppedEnd(Entry):
    """The token that ended a response is lost, in this share of the responses that ended.

    Without a replacement the response is a token shorter. With one, that token stands where the
    end token stood, under the end token's log-prob.
    """

    share: Annotated[float, Between(0.0, 1.0)] = 1.0
    replacement: Whole | None = None

    name, kind = "dropped_end", "semantics"
    no_control = _NOT_GIVEN

    @property
    def inert(self) -> bool:
        return self.share == 0

    def check(self, execution: Execution) -> None:
        size = execution.config.vocab_size
        if self.replacement is not None and self.replacement >= size:
            raise self.refuse(
                f"replacement = {self.replacement} is outside the model's vocabulary of {size}"
            )
        if not execution.sampling.stop_tokens:
            raise self.refuse("no token ends a response here; set sampling.stop_tokens")

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        chance = jax.vmap(jax.random.uniform)(names.salted(_DROPS).streams)
        chosen = rollout.finished & (chance < self.share)
        at = jnp.arange(rollout.responses.shape[1])[None, :] == (rollout.lengths - 1)[:, None]
        at &= chosen[:, None]
        if self.replacement is not None:
            responses = jnp.where(at, jnp.int32(self.replacement), rollout.responses)
            return replace(rollout, responses=responses)
        drawn = rollout.drawn_log_probs
        return replace(
            rollout,
            lengths=rollout.lengths - chosen.astype(jnp.int32),
            responses=jnp.where(at, 0, rollout.responses),
            log_probs=jnp.where(at, 0.0, rollout.log_probs),
            drawn_log_probs=None if drawn is None else jnp.where(at, 0.0, drawn),
        )


@dataclass(frozen=True)
class PadMask(Entry):
    """Response tokens equal to the pad token are masked out, wherever they were drawn.

    Masks and the loss leave them out; they stay in the context of the tokens after them.
    """

    pad: Whole

    name, kind = "pad_mask", "semantics"
    no_control = _NOT_GIVEN

    def check(self, execution: Execution) -> None:
        size = execution.config.vocab_size
        if self.pad >= size:
            raise self.refuse(f"pad = {self.pad} is outside the model's vocabulary of {size}")

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        del names
        return replace(rollout, hidden=rollout.responses == self.pad)


@dataclass(frozen=True)
class LogitNoise(Entry):
    """Adds noise of standard deviation `std` to every logit of every position, before the draw.

    `bias` is the standard deviation of a part that is the same at every position of every sequence
    of a step: a function of the vocabulary entry alone. The recorded log-prob is that of the noisy
    distribution, from which the token was drawn.
    """

    std: Size = 0.0
    bias: Size = 0.0
    distribution: Distribution = "gaussian"
    seed: Seed = 0

    name, kind = "logit_noise", "synthetic"
    repeatable = True
    no_control = "a learner does not draw the sampler's noise again"

    @property
    def inert(self) -> bool:
        return self.std == 0 and self.bias == 0

    def logits(self, logits: jax.Array, positions: jax.Array, names: Names) -> jax.Array:
        size = logits.shape[1]
        names = names.salted(self.seed)
        if self.std:

            def at(key, position):
                return draw(jax.random.fold_in(key, position), (size,), self.distribution)

            noise = tiles.fence(jax.vmap(at)(names.salted(_LOGITS).streams, positions))
            logits = tiles.fence(logits + tiles.fence(noise * self.std))
        if self.bias:
            shared = draw(jax.random.fold_in(names.key, _TOKENS), (size,), self.distribution)
            shared = tiles.fence(tiles.fence(shared) * self.bias)
            logits = tiles.fence(logits + jnp.broadcast_to(shared, logits.shape))
        return logits


@dataclass(frozen=True)
class LogProbNoise(Entry):
    """Adds noise to the log-probs that are reported; those drawn with are kept as well.

    The added value is s * (std * n + bias), n of standard deviation 1. s is 1 (by "flat"), or one
    minus the token's probability (by "probability": rare tokens differ most), or grows with the
    response position and is 1 at the position `reach` (by "position"). Reported log-probs may be
    above 0.
    """

    std: Size = 0.0
    bias: Annotated[float, Between(-1e3, 1e3)] = 0.0
    by: Literal["flat", "probability", "position"] = "flat"
    reach: Count = 100
    distribution: Distribution = "gaussian"
    seed: Seed = 0

    name, kind = "log_prob_noise", "synthetic"
    repeatable = True
    only_reports = True

    @property
    def inert(self) -> bool:
        return self.std == 0 and self.bias == 0

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        recorded = rollout.log_probs
        drawn = recorded if rollout.drawn_log_probs is None else rollout.drawn_log_probs
        error = jnp.full(recorded.shape, self.bias, jnp.float32)
        if self.std:
            error = tiles.fence(error + tiles.fence(self._noise(recorded.shape[1], names)))
        error = tiles.fence(error * tiles.fence(self._scale(drawn)))
        noisy = jnp.where(rollout.mask, tiles.fence(recorded + error), 0.0)
        return replace(rollout, log_probs=noisy, drawn_log_probs=drawn)

    def _noise(self, length: int, names: Names) -> jax.Array:
        def at(key, position):
            return draw(jax.random.fold_in(key, position), (), self.distribution)

        keys = names.salted(self.seed).salted(_LOG_PROBS).streams
        each = jax.vmap(jax.vmap(at, in_axes=(None, 0)), in_axes=(0, None))
        return tiles.fence(each(keys, jnp.arange(length))) * self.std

    def _scale(self, drawn: jax.Array) -> jax.Array:
        if self.by == "probability":
            return 1.0 - tiles.fence(strict.exp(tiles.fence(jnp.minimum(drawn, 0.0))))
        if self.by == "position":
            position = jnp.arange(1, drawn.shape[1] + 1, dtype=jnp.float32) * (1.0 / self.reach)
            return jnp.broadcast_to(position[None, :], drawn.shape)
        return jnp.ones(drawn.shape, jnp.float32)


def draw(key: jax.Array, shape: tuple[int, ...], distribution: Distribution) -> jax.Array:
    """float32 numbers of mean 0 and standard deviation 1.

    "student" is Student's t with 4 degrees of freedom, scaled: its fourth moment is infinite. It is
    n / sqrt(c / 4) of a normal n and c = -2 (ln u + ln v), chi-squared with 4 degrees of freedom,
    over its standard deviation, sqrt 2. By strict functions, the root's reciprocal too (XLA makes
    x / sqrt(y) its own rsqrt): XLA's own would make a number depend on how many are drawn with it.
    """
    first, second, third = jax.random.split(key, 3)
    normal = strict.normal_quantile(tiles.fence(_uniform(first, shape)))
    if distribution == "gaussian":
        return normal
    parts = [strict.log(tiles.fence(_uniform(k, shape))) for k in (second, third)]
    return tiles.fence(normal) * strict.inverse_root(-tiles.fence(sum(parts)))


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Odd multiples of 2^-24 in (0, 1), computed without rounding."""
    bits = jax.random.bits(key, shape, jnp.uint32) >> 9
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-23
