"""Rotary position frequencies: default, linear, llama3 and YaRN.

Frequencies are part of the model, so they are computed once, on the host, in NumPy. The steps and
their float32 roundings are those of `transformers`, with which checkpoints were trained. A
frequency that was merely closer to the real number would turn by other angles than those of
training: by 1e-3 radians at theta 1e6 and position 30,000.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import changes, whole

KINDS = ("default", "linear", "llama3", "yarn")
_OPTIONS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}

# vLLM multiplies it by a factor of its own, so the same number as attention_factor would be wrong.
_HINTS = {
    ("yarn", "attn_factor"): ", which transformers ignores: remove it, or give attention_factor,"
    " all that cos and sin are multiplied by"
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Which rotary frequencies a model uses. Fields beyond `theta` belong to some kinds only.

    `kind` "default": theta^(-2i/d), Su et al. 2021 (arXiv:2104.09864), section 3.2.2.
    "linear": those, divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    "llama3": wavelengths above `original_max_positions` / `low_freq_factor` are stretched by
    `factor`, those below `original_max_positions` / `high_freq_factor` left alone, those between
    blended (Llama 3.1's reference code).
    "yarn": Peng et al. 2023 (arXiv:2309.00071), sections 3.2 and 3.4; cos and sin are multiplied
    by `attention_factor`, derived from `factor` (and `mscale`, `mscale_all_dim`) where it is None.

    Raises `InputError` for an unknown kind, a missing field or a value out of range.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    __repr__ = changes

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"rope kind {self.kind!r} is not supported{did_you_mean(self.kind, KINDS)}"
            )
        _check_numbers(self)
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "original_max_positions"),
        }.get(self.kind, ())
        for name in needed:
            if getattr(self, name) is None:
                raise InputError(f"rope kind {self.kind!r} needs {name!r}, which is missing")
        _check_ranges(self)

    @property
    def stretched_positions(self) -> int:
        """Positions that YaRN makes of the original ones; 0 of other kinds.

        A config.json may name fewer as the model's, as Qwen3's with the `rope_scaling` of its card.
        """
        if self.kind != "yarn":
            return 0
        return int(_given(self.factor) * _given(self.original_max_positions))


def _check_numbers(rope: RopeConfig) -> None:
    for field in dataclasses.fields(RopeConfig):
        value = getattr(rope, field.name)
        if field.name in ("kind", "truncate") or value is None:
            continue
        whole = field.name == "original_max_positions"
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < 1e38:  # within f32
            kind = "whole number" if whole else "finite number"
            raise InputError(f"rope {field.name} must be a {kind} above 0, found {value!r}")
    if not isinstance(rope.truncate, bool):
        raise InputError(f"rope truncate must be true or false, found {rope.truncate!r}")


def _check_ranges(rope: RopeConfig) -> None:
    if rope.theta <= 1:
        raise InputError(f"rope theta must be above 1, found {rope.theta!r}")
    if rope.factor is not None and rope.factor < 1:
        raise InputError(f"rope factor must be at least 1, found {rope.factor!r}")
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if low is not None and high is not None and high <= low:
        raise InputError(f"rope high_freq_factor {high!r} must be above low_freq_factor {low!r}")
    if rope.beta_fast < rope.beta_slow:
        raise InputError(
            f"rope beta_fast {rope.beta_fast!r} must be at least beta_slow {rope.beta_slow!r}"
        )


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns `(inv_freq f32[head_dim // 2], attention_scaling)`.

    Dimension pair i of a head is turned by position * inv_freq[i] radians, and the cosine and sine
    are multiplied by attention_scaling (1 for every kind but "yarn"). Equal to the entries of
    `transformers`' ROPE_INIT_FUNCTIONS but for the last bit of a power.
    """
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"head_dim must be even and at least 2 for rotary pairs, found {head_dim}")
    powers = _powers(rope.theta, head_dim)
    inv_freq = np.float32(1) / powers
    if rope.kind == "linear":
        return inv_freq / np.float32(_given(rope.factor)), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, powers, head_dim), attention_scaling(rope)
    return inv_freq, 1.0


def table(rope: RopeConfig, head_dim: int, *, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin f32[positions, head_dim / 2], made on the host.

    Unlike `jnp.cos`, a table has the same bits in every program, and is exact to float32 rounding.
    """
    inverse_frequencies, scale = frequencies(rope, head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies[None, :]
    cos = (np.cos(angles.astype(np.float64)) * scale).astype(np.float32)
    sin = (np.sin(angles.astype(np.float64)) * scale).astype(np.float32)
    return cos, sin


def attention_scaling(rope: RopeConfig) -> float:
    """The factor on cos and sin: YaRN's sqrt(1/t) = 0.1 ln(factor) + 1 (its section 3.4), else 1.

    With `mscale` and `mscale_all_dim`, DeepSeek's quotient
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
    """
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    log_factor = math.log(_given(rope.factor))
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        above = 0.1 * rope.mscale * log_factor + 1.0
        return above / (0.1 * rope.mscale_all_dim * log_factor + 1.0)
    return 0.1 * log_factor + 1.0


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta^(2i/d): exponent and result rounded to f32, the power itself taken in f64."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    factor = np.float32(_given(rope.factor))
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    original = _given(rope.original_max_positions)
    # torch divides a number by a tensor as number * reciprocal, which shows in the last bits
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    turns = np.float32(1) / wavelength * np.float32(original)
    long = wavelength > np.float32(original / low)
    short = wavelength < np.float32(original / high)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * inv_freq / factor + blend * inv_freq
    return np.where(long, inv_freq / factor, np.where(short, inv_freq, blended))


def _yarn(rope: RopeConfig, powers: np.ndarray, head_dim: int) -> np.ndarray:
    factor, original = _given(rope.factor), _given(rope.original_max_positions)

    def pair_turning(rotations: float) -> float:
        """The (fractional) pair that makes this many turns over the original positions."""
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(width), np.float32(0), np.float32(1))
    extrapolated = np.float32(1) / powers
    interpolated = np.float32(1) / (np.float32(factor) * powers)
    keep = np.float32(1) - ramp
    return interpolated * (np.float32(1) - keep) + extrapolated * keep


def _given(value: float | None) -> float:
    assert value is not None  # RopeConfig checks at construction
    return value


def read(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """From the contents of a config.json, in the older layout or that of transformers 5.

    Raises `InputError` for another kind, an option of another kind, or layouts that differ.
    """
    old, new = values.get("rope_scaling") or {}, values.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        raise InputError("rope_scaling and rope_parameters must be objects")
    beside = values.get("rope_theta")
    thetas = [one.get("rope_theta") for one in (values, old, new)]
    thetas = [theta for theta in thetas if theta is not None]
    # transformers reads no rope_parameters where there is a rope_scaling
    if old and new and {"rope_theta": beside, **old} != {"rope_theta": beside, **new}:
        raise InputError("rope_scaling and rope_parameters are both given and differ")
    given: dict[str, Any] = {
        k: v
        for k, v in (old or new).items()
        if k != "rope_theta" and (v is not None or k == "truncate")
    }
    if any(theta != thetas[0] for theta in thetas):  # readers differ in which of them they take
        raise InputError(f"rope_theta is given several times and differs: {thetas}")
    kind = given.pop("rope_type", given.get("type", "default"))
    given.pop("type", None)
    if kind not in KINDS:
        raise InputError(f"rope type {kind!r} is not supported{did_you_mean(str(kind), KINDS)}")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("partial_rotary_factor other than 1 is not supported")
    original = given.pop("original_max_position_embeddings", max_positions)
    unknown = sorted(set(given) - set(_OPTIONS[kind]))
    if unknown:
        hint = _HINTS.get((kind, unknown[0]), "")
        raise InputError(f"rope type {kind!r} does not take {unknown[0]!r}{hint}")
    if kind in ("llama3", "yarn"):
        # a value beside the rope's own wins in transformers
        original = values.get("original_max_position_embeddings") or original
        given["original_max_positions"] = original
        if not whole(original) or original < 1:
            raise InputError(
                f"original_max_position_embeddings must be above 0, found {original!r}"
            )
    if kind == "yarn" and "factor" not in given and whole(max_positions):
        given["factor"] = max_positions / original
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if given.get(name) == 0:  # transformers takes 0 for absent
            del given[name]
    return RopeConfig(kind=kind, theta=thetas[0] if thetas else 10_000.0, **given)


def written(rope: RopeConfig) -> dict[str, Any]:
    """What a config.json has of it: in the older layout and in that of transformers 5.

    Version 4 takes `rope_theta` for 10,000 where it is only among the `rope_parameters`.
    """
    values: dict[str, Any] = {"rope_type": rope.kind}
    for name in _OPTIONS[rope.kind]:
        if getattr(rope, name) is not None:
            values[name] = getattr(rope, name)
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_max_positions
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else values,
        "rope_parameters": values | {"rope_theta": rope.theta},
    }
