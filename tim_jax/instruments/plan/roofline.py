"""How long a program should take on a device, and how long its least work would take.

The model is that of the guide to plans (docs/plan.md, "How long a program should take"), so that it
can be held against a device. Where one has been measured, a class of kernels has a formula for the
time of a call, with one to three parameters, which `scripts/calibrate.py` fits to measured calls
and keeps in tim_jax/data/calibration.json. A class counts as shown only where each measured call is
predicted within 15% by a fit to the others (docs/results/calibration.md).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import jax

from tim_jax.instruments.plan import workload as workloads
from tim_jax.instruments.plan.costs import Call, Figures
from tim_jax.instruments.plan.topology import GENERATIONS, Rates, Target
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model import packing
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import parameter_shapes

MANY, HEAD, FEW = "products of many rows", "products with the head", "products of few rows"
ATTENTION, DECODING, GRADIENT = "attention", "attention in decoding", "attention's gradient"
ROTATIONS, NORMS, WRITES = "rotations", "norms", "cache writes"
NORMALISERS = "sums over the vocabulary"
PRODUCTS, COPIES, FILLS = "XLA's products", "XLA's copies of slices", "XLA's fills with zeros"
OTHERS = "XLA's other work"
LAUNCHES = "launches"  # of XLA's instructions, beside the classes
_BY_NAME = {
    **dict.fromkeys(("row_sum", "log_normaliser"), NORMALISERS),
    **dict.fromkeys(("attention_gradient_rows", "attention_gradient_keys"), GRADIENT),
    **{"turn": ROTATIONS, "norm": NORMS, "cache_write": WRITES},
}
_OF_ATTENTION = "attention"  # the beginning of its kernels' names
# Bytes of a matrix that the cache of an H200 keeps between rows of tiles, and of one that it lacks.
_KEPT, _LACKED = 45e6, 150e6
_INTENSE = 187  # operations for each byte of memory, from which on products take longer
_NEAR = 0.1  # by which operations a byte may differ
SHOWN = 0.15  # the largest error of a class that counts as shown
_BOUNDS = ("products", "loads", "memory", "overhead")


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


def _program_seconds(call: Call, loading: float, rates: Rates) -> float:
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
    return _waves(call, rates) * (fixed + _program_seconds(call, loading, rates))


def _head(call: Call, rates: Rates, fixed: float, memory: float) -> float:
    """Every pass reads the whole matrix from memory."""
    moved = call.memory + ((call.tile.passes - 1) * call.tile.weight if call.tile else 0)
    waves = _waves(call, rates)
    loading = max(call.loaded / call.programs / rates.core, moved / waves / memory)
    return waves * (fixed + _program_seconds(call, loading, rates))


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


def shape_of(call: Call) -> tuple[int, ...]:
    """What of a kernel's programs must not differ from the measured ones.

    A product's tile, as far as it has rows, and stages. Of attention the operations for each byte
    that programs load, which follows from their rows.
    """
    if call.tile is not None:
        return min(call.tile.height, call.tile.rows), call.tile.width, call.tile.stages
    attends = call.flops and call.name.startswith(_OF_ATTENTION)
    return (round(call.flops / call.loaded),) if attends else ()


@dataclass(frozen=True)
class Fit:
    """A class of kernels on a device."""

    parameters: tuple[float, ...]
    error: float | None  # the largest of predicting one by the others; None: there are too few
    shapes: frozenset[tuple[int, ...]] = frozenset()  # of the calls, see `shape_of`

    @property
    def shown(self) -> bool:
        """Whether each measured call is predicted by the others."""
        return self.error is not None and self.error <= SHOWN

    def covers(self, call: Call) -> bool:
        """Whether the class is shown, and calls of this shape are among the measured ones."""
        shape = shape_of(call)
        if len(shape) == 1:
            near = any(abs(shape[0] - one) <= _NEAR * one for (one,) in self.shapes)
        else:
            near = not shape or shape in self.shapes
        return self.shown and near


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
    one = json.loads(FILE.read_text()).get(target.kind)
    if one is None:
        return None
    fits = {
        kind: Fit(tuple(fit["parameters"]), fit["error"], frozenset(map(tuple, fit["shapes"])))
        for kind, fit in one["classes"].items()
    }
    rates = replace(GENERATIONS[target.kind].rates, **one["ceilings"])
    return Calibration(one["device"], rates, fits)


@dataclass(frozen=True)
class Timed:
    """The calls of one kernel by name."""

    seconds: float
    calls: int
    bound: str  # what most of the time goes to: "products", "loads", "memory" or "overhead"


@dataclass(frozen=True)
class Estimate:
    """Seconds of one run of a program."""

    kernels: Mapping[str, Timed]  # by name, the slowest first
    others: float  # XLA's instructions
    links: float
    launches: float  # of XLA's instructions
    classes: Mapping[str, float] = field(default_factory=dict)  # by class, where calibrated
    shown: float = 0.0  # of calls that measured ones predict, see `Fit.covers`

    @property
    def of_kernels(self) -> float:
        """Seconds in kernels."""
        return sum(one.seconds for one in self.kernels.values())

    @property
    def total(self) -> float:
        """Seconds, if nothing overlaps."""
        return self.of_kernels + self.others + self.links + self.launches

    @property
    def unshown(self) -> float:
        """The share of the time in kernels that were not shown to be predicted."""
        return 1 - self.shown / self.total


def estimate(
    figures: Figures,
    rates: Rates,
    dtype: str,
    *,
    seen: float = 1.0,
    prefill: float | None = None,
    measured: Calibration | None = None,
) -> Estimate:
    """The time of a program by its figures.

    Args:
      seen: the share of keys that rows see on average.
      prefill: that of prompts, in a program that decodes as well. It is told from decoding only
        where the device is measured; None: `seen`.
      measured: such a device as it was measured; None: by the data sheet's rates alone.
    """
    parts: dict[str, dict[str, float]] = {}
    calls, classes = Counter[str](), dict[str, float]()
    shown = 0.0
    for call, count in figures.kernels.items():
        part = parts.setdefault(call.name, dict.fromkeys(_BOUNDS, 0.0))
        calls[call.name] += count
        share = seen if call.name.startswith(_OF_ATTENTION) else 1.0
        bound, seconds, overhead = bound_of(call, rates, dtype)
        kind = class_of(call) if measured else None
        if measured and kind:
            share = prefill if kind == ATTENTION and prefill else share
            seconds, overhead = measured.seconds(kind, part_of(call, share)), 0.0
            classes[kind] = classes.get(kind, 0.0) + seconds * count
            shown += seconds * count * measured.fits[kind].covers(call)
        else:
            seconds *= share
        part[bound] += seconds * count
        part["overhead"] += overhead * count
    timed = {
        name: Timed(sum(one.values()), calls[name], max(one, key=lambda bound: one[bound]))
        for name, one in parts.items()
    }
    launches = max(figures.own.launches - calls.total(), 0) * rates.launch
    # A GPU's products outside kernels are calls, after what else there is.
    flops = figures.flops - sum(call.flops * n for call, n in figures.kernels.items())
    of_xla = flops / rates.products(dtype), figures.own.accessed / rates.memory
    others = sum(of_xla) if rates.cache else max(of_xla)
    if measured:
        rest = _xla_seconds(figures, measured)
        classes |= rest
        launches = rest.pop(LAUNCHES)
        others = sum(rest.values())
        shown += sum(n for kind, n in rest.items() if measured.fits[kind].shown)
    return Estimate(
        kernels=dict(sorted(timed.items(), key=lambda pair: -pair[1].seconds)),
        others=others,
        links=sum(one.bytes for one in figures.collectives.values()) / rates.links,
        launches=launches,
        classes=classes,
        shown=shown,
    )


def part_of(call: Call, share: float) -> Call:
    """A call that does this share of its work."""
    flops, loaded, memory = (round(share * n) for n in (call.flops, call.loaded, call.memory))
    return replace(call, flops=flops, loaded=loaded, memory=memory)


def _xla_seconds(figures: Figures, measured: Calibration) -> dict[str, float]:
    """Seconds of XLA's instructions by class, their launches included."""

    def of(kind: str, moved: int, made: int = 0) -> float:
        return measured.seconds(kind, Call("", 1, made, moved, moved))

    own = figures.own
    other = own.accessed - own.copied - own.filled
    calls = sum(figures.kernels.values()) + sum(figures.products.values())
    launch = of(OTHERS, 0)
    return {
        PRODUCTS: sum(measured.seconds(PRODUCTS, one) * n for one, n in figures.products.items()),
        COPIES: of(COPIES, own.copied),
        FILLS: of(FILLS, own.filled, own.made),
        OTHERS: of(OTHERS, other) - launch,
        LAUNCHES: max(own.launches - calls, 0) * launch,
    }


def bound_of(call: Call, rates: Rates, dtype: str) -> tuple[str, float, float]:
    """What bounds a call by the data sheet's rates, its seconds, and those of its overhead."""
    full = call.programs / (_waves(call, rates) * rates.cores)
    times = {
        "products": call.flops / rates.products(dtype) / full,
        "loads": _loading(call, rates) if rates.cache else 0.0,
        "memory": call.memory / rates.memory,
    }
    bound = max(times, key=lambda name: times[name])
    return bound, times[bound], rates.launch + rates.step * call.programs


def _loading(call: Call, rates: Rates) -> float:
    """Seconds of loads: few programs do not draw all that the cache could give."""
    of_program = call.loaded / call.programs
    waves, rest = divmod(call.programs, rates.cores)
    return sum(
        count * of_program * programs / min(rates.cache, programs * rates.core)
        for count, programs in ((waves, rates.cores), (1, rest))
        if programs
    )


def shares(workload: Workload, stage: str) -> dict[str, float]:
    """What `estimate` takes of keys that rows see in a stage's program."""
    found = {"seen": seen(workload, stage)}
    return found | ({"prefill": seen(workload, "prefill")} if stage == "sampler" else {})


def seen(workload: Workload, stage: str) -> float:
    """The share of a sequence's blocks of keys that its rows see on average.

    In the sampler rows are those of decoding, in "prefill" of prompts, and else of whole sequences.
    """
    prompt, block = workload.prompt_length, workload.execution.numerics.kv_block
    if workload.tokens and stage in ("scoring", "update"):
        return _seen_in_buffers(workload)
    length = prompt if stage == "prefill" else workload.longest
    rows = range(prompt if stage == "sampler" else 0, length)
    blocks = sum(_blocks(workload, row) for row in rows)
    return blocks / len(rows) / -(-length // block)


def _seen_in_buffers(workload: Workload) -> float:
    """The same of what attention takes out of buffers of tokens at a time.

    Rows behind a sequence's end see one block.
    """
    numerics, count = workload.execution.numerics, workload.part_rows
    block, grouping = numerics.kv_block, packing.grouping(numerics.family)
    rows, keys = 0, 0
    for part in workloads.parts(workload):
        for loop in grouping.loops(part, workload.longest, count):
            taken = loop.times * loop.rows
            rows, keys = rows + taken, keys + taken * -(-loop.keys // block)
    upto = [0.0, *accumulate(_blocks(workload, row) for row in range(workload.longest))]
    seen = sum(upto[length] for length in workload.lengths)
    return (seen + rows - int(sum(workload.lengths))) / keys


def _blocks(workload: Workload, row: int) -> float:
    """Blocks of keys that a row sees, on average over layers."""
    config, block = workload.execution.config, workload.execution.numerics.kv_block
    blocks = (
        layers * (row // block - max(row + 1 - window, 0) // block + 1)
        for window, layers in _windows(config, workload.longest).items()
    )
    return sum(blocks) / config.num_layers


def _windows(config: ModelConfig, length: int) -> Counter[int]:
    """Positions that a token attends to at most: in how many layers."""
    windowed = config.window_layers or (bool(config.sliding_window),) * config.num_layers
    return Counter(config.sliding_window if one else length for one in windowed)


def _attended(config: ModelConfig, start: int, stop: int) -> int:
    """Positions that the tokens start..stop attend to in all layers, their own included."""
    return sum(
        count * sum(min(position + 1, window) for position in range(start, stop))
        for window, count in _windows(config, stop).items()
    )


@dataclass(frozen=True)
class Least:
    """The least work of a program on one device."""

    flops: float
    bytes: float

    def seconds(self, rates: Rates, dtype: str) -> float:
        """The time of this work, if nothing else were done."""
        return max(self.flops / rates.products(dtype), self.bytes / rates.memory)


def least(workload: Workload, stage: str) -> Least:
    """Of a stage: "sampler", "scoring" or one "update", all responses being the longest.

    With the workload's `mean_tokens` the learner's sequences have its `lengths`. A sampler reads
    the prompt of a group once, and has the logits of what it draws alone.
    """
    execution = workload.training.drawing if stage == "sampler" else workload.execution
    config, where = execution.config, execution.placement
    prompt, response = workload.prompt_length, execution.sampling.max_tokens
    total = workload.training.rows if stage == "update" else workload.sequences
    length, rows = prompt + response, total // where.shards
    per_token = 2 * _active_parameters(config)
    heads, key, value = config.attention
    per_pair = 2 * config.num_heads * (key + value)  # of a token and one that it attends to

    def whole(start: int, stop: int) -> float:
        """Operations for these tokens of a sequence."""
        return per_token * (stop - start) + per_pair * _attended(config, start, stop)

    if stage != "sampler":
        times = 3 if stage == "update" else 1
        lengths = Counter(workload.lengths.tolist())
        mean = sum(n * whole(0, one) for one, n in lengths.items()) / lengths.total()
        return Least(times * rows * mean / where.tensor, 0.0)
    head = 2 * config.vocab_size * config.hidden_size * prompt
    shared = (whole(0, prompt) - head) / workload.learning.samples
    flops = rows * (shared + whole(prompt, length)) / where.tensor
    itemsize = execution.numerics.dtype.itemsize
    table = config.vocab_size * config.hidden_size * itemsize  # of which a step takes a few rows
    weights = (workloads.weight_bytes(workload) - table) / (where.tensor * where.expert)
    slots = min(workload.sampler.batching.of_device(where).slots or rows, rows)
    steps = -(-rows // slots) * response
    # A step reads what its token attends to but itself; keys and values of every layer.
    read = _attended(config, prompt, length) - response * config.num_layers
    position = heads * (key if config.latent else key + value) * itemsize  # bytes in the cache
    cache = rows * read * position / where.tensor
    return Least(flops, steps * weights + cache)


def _active_parameters(config: ModelConfig) -> float:
    """Parameters that a token is multiplied by: of all experts, those that it goes through."""
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config)):
        name = jax.tree_util.keystr(path)
        share = config.num_experts_per_tok / config.num_experts if "expert_" in name else 1.0
        table = "embed" in name and not config.tied_embeddings  # rows are taken, not multiplied
        total += 0.0 if table else share * leaf.size
    return total
