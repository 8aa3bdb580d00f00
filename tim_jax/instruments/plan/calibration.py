"""What a device does in a second: by its maker's data sheet, and as its kernels were measured.

The kernels of a GPU fall into classes. Each class has a formula for the time of a call, with one to
three parameters, which `scripts/calibrate.py` fits to measured calls and keeps in
tim_jax/data/calibration.json. A class counts as shown only where each measured call is predicted
within 15% by a fit to the others (docs/results/calibration.md).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from tim_jax.instruments.plan.costs import Call
from tim_jax.instruments.plan.topology import Target


@dataclass(frozen=True)
class Rates:
    """Rates of one device, a second, and overheads in seconds."""

    bfloat16: float  # operations of products
    float32: float
    memory: float  # bytes
    links: float  # bytes received from other devices
    launch: float  # of an instruction
    step: float = 0.0  # of a kernel's grid
    cache: float = 0.0  # bytes between cache and cores; 0: programs load from memory
    cores: int = 1  # that run programs of a kernel side by side
    core: float = float("inf")  # bytes that one of them loads

    def products(self, dtype: str) -> float:
        """Operations of products a second, in this compute dtype."""
        return self.float32 if dtype == "float32" else self.bfloat16


def _tpu(bfloat16: float, memory: float, links: float) -> Rates:
    # A float32 product is six products of bfloat16 parts.
    return Rates(bfloat16, bfloat16 / 6, memory, links, launch=1e-6, step=0.35e-6)


def _hopper(memory: float) -> Rates:
    on_chip = {"cache": 5.5e12, "cores": 132, "core": 110e9}  # a core: 64 bytes a clock
    return Rates(989e12, 67e12, memory, 450e9, launch=2e-6, **on_chip)


# Products, memory and links by the makers' data sheets (links in one direction). Launches, steps of
# a grid and the cache are assumptions.
RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "v5e": _tpu(197e12, 819e9, 200e9),
        "v5p": _tpu(459e12, 2765e9, 600e9),
        "v6e": _tpu(918e12, 1640e9, 400e9),
        "tpu7x": _tpu(1153e12, 3690e9, 300e9),  # one of a chip's two devices
        "h100": _hopper(3350e9),
        "h200": _hopper(4800e9),
    }
)


def rates(target: Target) -> Rates | None:
    """The rates of a target's devices, if they are known."""
    return RATES.get(_kind(target))


def _kind(target: Target) -> str:
    return target.name.partition(":")[0]


MANY, HEAD, FEW = "products of many rows", "products with the head", "products of few rows"
ATTENTION, DECODING, GRADIENT = "attention", "attention in decoding", "attention's gradient"
ROTATIONS, NORMS, WRITES = "rotations", "norms", "cache writes"
NORMALISERS = "sums over the vocabulary"
PRODUCTS, COPIES, FILLS = "XLA's products", "XLA's copies of slices", "XLA's fills with zeros"
OTHERS = "XLA's other work"
_BY_NAME = {
    **dict.fromkeys(("row_sum", "log_normaliser"), NORMALISERS),
    **dict.fromkeys(("attention_gradient_rows", "attention_gradient_keys"), GRADIENT),
    **{"turn": ROTATIONS, "norm": NORMS, "cache_write": WRITES},
}
# Bytes of a matrix that the cache of an H200 keeps between rows of tiles, and of one that it lacks.
_KEPT, _LACKED = 45e6, 150e6
_INTENSE = 187  # operations for each byte of memory, from which on products take longer


def class_of(call: Call) -> str | None:
    """The class of a kernel's call on a GPU; None: there is none for it."""
    if call.name == "attention":
        return ATTENTION if call.flops > _INTENSE * call.memory else DECODING
    if call.tile is None:
        return _BY_NAME.get(call.name)
    if call.tile.rows <= call.tile.height:
        return FEW
    return HEAD if call.tile.weight > _LACKED else MANY


def _waves(call: Call, rates: Rates) -> int:
    """How often every core has a program."""
    return -(-call.programs // rates.cores)


def _of_program(call: Call, loading: float, rates: Rates) -> float:
    """Seconds of a program that multiplies while it loads.

    The p-norm of both. The more steps are in flight, the more they overlap: p is half of them.
    """
    stages = 2 if call.tile is None else max(call.tile.stages, 2)
    products = call.flops / call.programs / (rates.bfloat16 / rates.cores)
    return (loading ** (stages / 2) + products ** (stages / 2)) ** (2 / stages)


def _many(call: Call, rates: Rates, fixed: float, kept: float, lacked: float) -> float:
    tile = call.tile
    again = tile is not None and tile.passes >= tile.rows / tile.height  # for every row of tiles
    rate = lacked if tile is not None and tile.weight >= _KEPT and again else kept
    loading = call.loaded / call.programs / rate
    return _waves(call, rates) * (fixed + _of_program(call, loading, rates))


def _head(call: Call, rates: Rates, fixed: float, memory: float) -> float:
    """Every pass reads the whole matrix from memory."""
    moved = call.memory + ((call.tile.passes - 1) * call.tile.weight if call.tile else 0)
    waves = _waves(call, rates)
    loading = max(call.loaded / call.programs / rates.core, moved / waves / memory)
    return waves * (fixed + _of_program(call, loading, rates))


def _few(call: Call, rates: Rates, fixed: float, core: float, memory: float) -> float:
    """A program loads no faster than its core can, and all of them no faster than the memory."""
    loading = _waves(call, rates) * call.loaded / call.programs / core
    return fixed + max(loading, call.memory / memory)


def _by_row(call: Call, rates: Rates, core: float, memory: float) -> float:
    """Of one program a row, several of which share a core."""
    return max(call.loaded / call.programs / core, call.memory / memory)


def _slower(call: Call, rates: Rates, products: float, memory: float) -> float:
    return max(call.flops / products, call.memory / memory)


def _multiplied(call: Call, rates: Rates, products: float) -> float:
    return call.flops / products


def _moved(call: Call, rates: Rates, fixed: float, memory: float) -> float:
    return fixed + call.memory / memory


def _read(call: Call, rates: Rates, memory: float) -> float:
    return call.memory / memory


def _fixed(call: Call, rates: Rates, fixed: float) -> float:
    return fixed


# Class -> the seconds of a call by its parameters, and where a search for these begins. Parameters
# are seconds, or bytes or operations a second.
FORMULAS: Mapping[str, tuple[Callable[..., float], tuple[float, ...]]] = MappingProxyType(
    {
        MANY: (_many, (2e-6, 110e9, 80e9)),
        HEAD: (_head, (2e-6, 4e12)),
        FEW: (_few, (3e-6, 100e9, 4e12)),
        ATTENTION: (_multiplied, (250e12,)),
        DECODING: (_read, (3e12,)),
        GRADIENT: (_multiplied, (130e12,)),
        ROTATIONS: (_moved, (2e-6, 3e12)),
        NORMS: (_moved, (2e-6, 3e12)),
        NORMALISERS: (_by_row, (10e9, 3e12)),
        WRITES: (_fixed, (3e-6,)),
        PRODUCTS: (_slower, (700e12, 3.5e12)),
        COPIES: (_read, (2.6e12,)),
        FILLS: (_multiplied, (1e12,)),  # elements
        OTHERS: (_moved, (1e-6, 4e12)),
    }
)
_ATTENDING = ("attention", "attention_gradient_rows", "attention_gradient_keys")
_NEAR = 0.1  # by which operations a byte may differ
SHOWN = 0.15  # the largest error of a class that counts as shown


@dataclass(frozen=True)
class Fit:
    """A class of kernels on a device."""

    parameters: tuple[float, ...]
    rows: int  # measured calls that it is fitted to
    error: float | None  # the largest of predicting one by the others; None: there are too few
    shapes: frozenset[tuple[int, ...]] = frozenset()  # of the calls, see `shape_of`

    @property
    def shown(self) -> bool:
        """Whether each measured call is predicted by the others."""
        return self.error is not None and self.error <= SHOWN

    def covers(self, call: Call) -> bool:
        """Whether the class is shown, and calls of this shape are among the measured ones."""
        shape = shape_of(call)
        return self.shown and (not shape or any(_near(shape, one) for one in self.shapes))


def shape_of(call: Call) -> tuple[int, ...]:
    """What of a kernel's programs must not differ from the measured ones.

    A product's tile, as far as it has rows, and stages. Of attention the operations for each byte
    that programs load, which follows from their rows.
    """
    if call.tile is not None:
        return min(call.tile.height, call.tile.rows), call.tile.width, call.tile.stages
    return (round(call.flops / call.loaded),) if call.flops and call.name in _ATTENDING else ()


def _near(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    if len(shape) != 1:
        return shape == other
    return abs(shape[0] - other[0]) <= _NEAR * other[0]


@dataclass(frozen=True)
class Calibration:
    """A device as it was measured, in bfloat16."""

    device: str
    rates: Rates
    fits: Mapping[str, Fit]

    def seconds(self, kind: str, call: Call) -> float:
        """Of a call of this class."""
        return FORMULAS[kind][0](call, self.rates, *self.fits[kind].parameters)

    @property
    def error(self) -> float:
        """The largest of the classes that are shown."""
        return max(one.error or 0.0 for one in self.fits.values() if one.shown)


FILE = Path(__file__).parents[2] / "data" / "calibration.json"


def calibration(target: Target) -> Calibration | None:
    """Of a target's devices; None if no such device has been measured."""
    return _calibrations().get(_kind(target))


@cache
def _calibrations() -> Mapping[str, Calibration]:
    found = json.loads(FILE.read_text())
    return {
        name: Calibration(
            device=one["device"],
            rates=replace(RATES[name], **one["ceilings"]),
            fits={
                kind: Fit(
                    tuple(fit["parameters"]),
                    fit["rows"],
                    fit["error"],
                    frozenset(map(tuple, fit["shapes"])),
                )
                for kind, fit in one["classes"].items()
            },
        )
        for name, one in found.items()
    }
