"""Multi-head latent attention (MLA) in `ModelConfig` and in a checkpoint's config.json.

DeepSeek-V2 (arXiv 2405.04434), section 2.1: keys and values of all heads are linear maps of one
compressed state of `kv_lora_rank` numbers a token, beside which a rotated key of
`qk_rope_head_dim` numbers is shared by all heads. `attention` says how it is computed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import whole
from tim_jax.model.rope import RopeConfig

FAMILIES = ("deepseek_v3",)
NORM_EPS = 1e-6  # of the norms of compressed states, whatever `rms_norm_eps` is

_MOST = 2**31
# What `transformers` takes absent keys for.
_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_QUERY_RANK = 1536


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention, under the names that config.json has for them.

    A head's query and key have `qk_nope_head_dim` numbers without and `qk_rope_head_dim` with
    rotation, its value `v_head_dim`. With a `q_lora_rank` above 0 queries too are made of a
    compressed state. With `rope_interleave` the rotated pairs are neighbours (2 i, 2 i + 1), as
    DeepSeek has them, and not (i, i + half).

    Raises `InputError` naming the field at fault.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if name == "rope_interleave":
                if not isinstance(value, bool):
                    raise InputError(f"{name} must be true or false, found {value!r}")
                continue
            least = 0 if name == "q_lora_rank" else 1
            if not whole(value) or not least <= value < _MOST:
                raise InputError(
                    f"{name} must be a whole number from {least} to {_MOST - 1}, found {value!r}"
                )
        if self.qk_rope_head_dim % 2:
            raise InputError(
                f"qk_rope_head_dim must be even for rotary pairs, found {self.qk_rope_head_dim}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def state_dim(self) -> int:
        """Numbers of a token in the cache: the compressed state and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_head_dim(self) -> int:
        """Numbers that a head's key and value take from the compressed state."""
        return self.qk_nope_head_dim + self.v_head_dim


def check(config: Any) -> None:
    """Checks the fields of a `ModelConfig`. Raises `InputError` naming the field at fault."""
    latent, family = config.latent, config.model_type
    if (latent is not None) != (family in FAMILIES):
        has = "has" if family in FAMILIES else "has no"
        raise InputError(f"a {family} model {has} latent attention, found latent={latent!r}")
    if latent is None:
        return
    if config.num_kv_heads != config.num_heads:
        raise InputError(
            f"latent attention has as many key heads as heads, {config.num_heads}, found"
            f" num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim != latent.qk_rope_head_dim:
        raise InputError(
            f"a {family} model's head_dim is its qk_rope_head_dim {latent.qk_rope_head_dim}, found"
            f" {config.head_dim}"
        )


def refuse_other_code(values: Mapping[str, Any]) -> None:
    """Raises `InputError` for code that comes with a checkpoint, unless it is known.

    Moonlight brings DeepSeek-V3's classes, from before `transformers` had them.
    """
    remote = values.get("auto_map") or {}
    names = remote.values() if isinstance(remote, Mapping) else [remote]
    known = all(str(name).split(".")[-1].startswith("DeepseekV3") for name in names)
    if remote and not (known and values["model_type"] in FAMILIES):
        raise InputError(f"auto_map is not supported; it must be absent, found {remote!r}")


def read(values: Mapping[str, Any]) -> LatentConfig | None:
    """From the contents of a config.json; None for other attention."""
    if values["model_type"] not in FAMILIES:
        return None
    given = {
        name: default if values.get(name) is None else values[name]
        for name, default in _DEFAULTS.items()
    }
    rank = values.get("q_lora_rank", _QUERY_RANK)
    return LatentConfig(**given, q_lora_rank=0 if rank is None else rank)


def written(config: Any) -> dict[str, Any]:
    """What a config.json has of it; nothing for other attention."""
    latent = config.latent
    if latent is None:
        return {}
    sizes = {name: getattr(latent, name) for name in _DEFAULTS}
    return sizes | {"q_lora_rank": latent.q_lora_rank or None, "qk_head_dim": latent.qk_head_dim}


def scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """What scores are multiplied by: D^-1/2 of a query's D numbers, and YaRN's temperature.

    With `mscale_all_dim` m and `factor` s of YaRN the latter is (0.1 m ln(s) + 1)^2, as DeepSeek-V2
    has it (its section 3.1.4).
    """
    plain = latent.qk_head_dim**-0.5
    if rope.kind != "yarn" or rope.mscale_all_dim is None or rope.factor is None:
        return plain
    return plain * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
