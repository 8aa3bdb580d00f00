"""Entries that give part of the sampler's arithmetic another dtype."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tim_jax.mismatch.base import Entry, Setting
from tim_jax.numerics import CACHE_DTYPES, Numerics, Scale

FLOATS = ("float32", "bfloat16", "float16")
_STAYS = ("_norm", "_bias")  # names of what is float32 in any compute dtype


@dataclass(frozen=True)
class Compute(Entry):
    """The sampler's weights and activations have another dtype; sums and logits stay float32."""

    dtype: str

    name: ClassVar[str] = "compute"
    imitates: ClassVar[str] = (
        "a bfloat16 or float16 engine beside a float32 trainer (arXiv 2510.26788 has float16 on"
        " both sides as the remedy)"
    )

    def __post_init__(self):
        self.need_choice("dtype", FLOATS)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, compute_dtype=self.dtype)

    def weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        return recast(weights, jnp.dtype(self.dtype))


def recast(weights: dict[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """Compute weights in another compute dtype; norms and biases are float32 in any."""

    def cast(path, leaf: jax.Array) -> jax.Array:
        return leaf if path[-1].key.endswith(_STAYS) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


@dataclass(frozen=True)
class _Part(Entry):
    """One field of the numerics' `precision` is another float dtype."""

    dtype: str

    field: ClassVar[str] = ""

    def __post_init__(self):
        self.need_choice("dtype", FLOATS)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, precision=replace(numerics.precision, **{self.field: self.dtype}))


class Head(_Part):
    """Operands of the dot with the LM head, the last norm's result included."""

    name = "lm_head"
    field = "head"
    imitates = "a float32 head in one engine alone (ScaleRL, MiniMax; TRL issue 4303)"


class Logits(_Part):
    """Logits are rounded to this dtype before the softmax."""

    name = "logits"
    field = "logits"
    imitates = "bfloat16 logits, whose step is 0.03 at 8 (MaxText pull request 5231)"


class Softmax(_Part):
    """Every step of the vocabulary's softmax is rounded; the sum itself is taken in float32."""

    name = "softmax"
    field = "softmax"
    imitates = "a log-softmax in the compute dtype, the framework's default on logits"


class AttentionSoftmax(_Part):
    """Every step of the attention's softmax is rounded; the sum itself is taken in float32."""

    name = "attention_softmax"
    field = "attention_softmax"
    imitates = "attention weights normalised in the compute dtype"


@dataclass(frozen=True)
class KVCache(Entry):
    """Keys and values are rounded to this dtype where they enter the cache.

    Without a scale what is too large saturates. scale "token": one scale per token and head, from
    its largest element; int8 has it by default and cannot do without.
    """

    dtype: str
    scale: Scale | None = None

    name: ClassVar[str] = "kv_cache"
    imitates: ClassVar[str] = (
        'vLLM\'s kv_cache_dtype="fp8" with its default scale of 1; int8 with a scale per token and'
        " head (LMDeploy)"
    )

    def __post_init__(self):
        self.need_choice("dtype", CACHE_DTYPES)
        if self.scale is not None:
            self.need_choice("scale", ("none", "token"))
        if self.dtype == "int8" and self.scale == "none":
            raise self.refuse('int8 needs scale = "token"; without one it holds whole numbers only')
        if self.dtype in FLOATS and self.scale == "token":
            raise self.refuse(f"{self.dtype} is stored as it is; leave scale out")

    def numerics(self, numerics: Numerics) -> Numerics:
        scale = self.scale or ("token" if self.dtype == "int8" else "none")
        precision = replace(numerics.precision, cache=self.dtype, cache_scale=scale)
        return replace(numerics, precision=precision)

    def check(self, setting: Setting) -> None:
        wide = setting.numerics.compute_dtype
        if self.dtype == "float32" and wide != "float32":
            raise self.refuse(
                f"float32 is wider than the sampler's {wide}, whose keys and values it would hold"
                " as they are; narrower: " + ", ".join(CACHE_DTYPES[1:])
            )
