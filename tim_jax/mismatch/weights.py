"""Entries that give the sampler other weights than the learner's."""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tim_jax.kernels import cache, tiles
from tim_jax.mismatch.base import Entry
from tim_jax.model.execution import Execution
from tim_jax.model.weights import JOINED, Joined, joined, size
from tim_jax.numerics import EIGHT_BITS, Numerics

_FORMATS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
_MATRICES = tuple(row for row in JOINED if row.quantised)


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

    dtype: str
    per: Literal["channel", "matrix", "tensor"] = "channel"
    group: int = 0
    head: bool = False  # the LM head too; engines leave it, and the embedding, as they are
    codes: Literal["symmetric", "full"] = "symmetric"
    activations: str | None = None

    name, kind = "quantised_weights", "weights"
    imitates = (
        "a quantised rollout engine (FlashRL's int8 and fp8; int4 in groups of 128 as in GPTQ and"
        " AWQ; with activations the W8A8 of vLLM and SGLang)"
    )

    def __post_init__(self):
        self.need_choice("dtype", _FORMATS)
        self.need_choice("per", ("channel", "matrix", "tensor"))
        self.need_choice("codes", ("symmetric", "full"))
        self.need_number("group", least=0)
        if self.activations is not None:
            self.need_choice("activations", EIGHT_BITS)
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

    dtype: str

    name, kind = "lora_merge", "weights"
    imitates = (
        "an adapter merged into bfloat16 weights by one engine alone (PEFT's merge_and_unload of a"
        " model loaded in bfloat16)"
    )

    def __post_init__(self):
        self.need_choice("dtype", ("float32", "bfloat16", "float16"))

    @property
    def inert(self) -> bool:
        return self.dtype == "float32"

    def check(self, execution: Execution) -> None:
        if execution.lora is None and not self.inert:
            raise self.refuse("this run trains no adapters, see the section lora")

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, precision=replace(numerics.precision, lora=self.dtype))


@dataclass(frozen=True)
class StaleWeights(Entry):
    """The sampler has the weights of `updates` updates ago (at the start of a run: the first ones).

    This is the only entry that is drift and not mismatch: at equal weights it is exact. The
    training loop keeps the old weights.
    """

    updates: int

    name, kind = "stale_weights", "weights"
    imitates = "asynchronous RL, or a weight transfer that arrives late"
    no_control = "old weights are drift: with equal weights there is no mismatch"

    def __post_init__(self):
        self.need_number("updates", least=0)

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

    every: int

    name = "in_flight_updates"
    imitates = "in-flight weight updates of asynchronous RL (AReaL, PipelineRL)"

    def __post_init__(self):
        super().__post_init__()
        self.need_number("every", least=1)

    def check(self, execution: Execution) -> None:
        longest = execution.sampling.max_tokens
        if not self.inert and self.every >= longest:
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
