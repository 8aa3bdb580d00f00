"""How long a program should take by the rates of a device, and how long its least work would take.

The model, so that it can be held against a device:

- A kernel takes as long as the slowest of its products, its loads and its memory traffic, and an
  overhead for its launch and for every step of its grid. On a GPU its programs run in waves, one on
  each core, and a wave that is not full takes as long as a full one.
- Attention passes over the blocks of keys that no row of a tile sees: its kernels take the share
  of their time that rows see of the keys on average.
- What XLA computes beside the kernels takes as long as its products and, on a GPU, after them its
  memory traffic (on a TPU, whichever is slower), and an overhead for every instruction.
- Nothing hides the exchange of data among devices.
- Where a device has been measured, kernels take what the formulas of `calibration` say.

The least work is what no implementation can avoid: the model's products for every token once (three
times in an update), and in decoding all weights once for a step, and every sequence's keys and
values up to the token.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import jax

from tim_jax.instruments.plan import workload as workloads
from tim_jax.instruments.plan.calibration import (
    ATTENTION,
    COPIES,
    FILLS,
    OTHERS,
    PRODUCTS,
    Calibration,
    Rates,
    class_of,
)
from tim_jax.instruments.plan.costs import Call, Figures
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model import packing
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import parameter_shapes


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
    shown: float = 0.0  # of calls that measured ones predict, see `calibration.Fit.covers`

    @property
    def total(self) -> float:
        """Seconds, if nothing overlaps."""
        of_kernels = sum(one.seconds for one in self.kernels.values())
        return of_kernels + self.others + self.links + self.launches

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
    calls: dict[str, int] = {}
    classes: dict[str, float] = {}
    shown = 0.0
    for call, count in figures.kernels.items():
        part = parts.setdefault(call.name, dict.fromkeys(_BOUNDS, 0.0))
        calls[call.name] = calls.get(call.name, 0) + count
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
    launches = max(figures.launches - sum(calls.values()), 0) * rates.launch
    others = _by_rates(figures, rates, dtype)
    if measured:
        of_xla = _of_xla(figures, measured)
        classes |= of_xla
        shown += sum(n for kind, n in of_xla.items() if kind in _shown(measured))
        launches = of_xla.pop(LAUNCHES)
        others = sum(of_xla.values())
    return Estimate(
        kernels=dict(sorted(timed.items(), key=lambda pair: -pair[1].seconds)),
        others=others,
        links=figures.collective_bytes / rates.links,
        launches=launches,
        classes=classes,
        shown=shown,
    )


def _shown(measured: Calibration) -> set[str]:
    return {kind for kind, fit in measured.fits.items() if fit.shown}


LAUNCHES = "launches"  # of XLA's instructions, beside the classes of `calibration`
_OF_ATTENTION = "attention"  # the beginning of its kernels' names
_BOUNDS = ("products", "loads", "memory", "overhead")


def part_of(call: Call, share: float) -> Call:
    """A call that does this share of its work."""
    flops, loaded, memory = (round(share * n) for n in (call.flops, call.loaded, call.memory))
    return replace(call, flops=flops, loaded=loaded, memory=memory)


def _moved(figures: Figures) -> int:
    """Bytes between memory and XLA's instructions."""
    return figures.bytes_accessed - sum(call.memory * n for call, n in figures.kernels.items())


def _by_rates(figures: Figures, rates: Rates, dtype: str) -> float:
    """Seconds of XLA's instructions. A GPU's products are calls, after what else there is."""
    flops = figures.flops - sum(call.flops * n for call, n in figures.kernels.items())
    parts = flops / rates.products(dtype), _moved(figures) / rates.memory
    return sum(parts) if rates.cache else max(parts)


def _of_xla(figures: Figures, measured: Calibration) -> dict[str, float]:
    """Seconds of XLA's instructions by class, their launches included."""

    def of(moved: int, made: int = 0) -> Call:
        return Call("", 1, made, moved, moved)

    other = _moved(figures) - figures.copied - figures.filled
    calls = sum(figures.kernels.values()) + sum(figures.products.values())
    launch = measured.seconds(OTHERS, of(0))
    return {
        PRODUCTS: sum(measured.seconds(PRODUCTS, one) * n for one, n in figures.products.items()),
        COPIES: measured.seconds(COPIES, of(figures.copied)),
        FILLS: measured.seconds(FILLS, of(figures.filled, figures.made)),
        OTHERS: measured.seconds(OTHERS, of(other)) - launch,
        LAUNCHES: max(figures.launches - calls, 0) * launch,
    }


def bound_of(call: Call, rates: Rates, dtype: str) -> tuple[str, float, float]:
    """What bounds a call by the data sheet's rates, its seconds, and those of its overhead."""
    waves = -(-call.programs // rates.cores)
    full = call.programs / (waves * rates.cores)
    times = {
        "products": call.flops / rates.products(dtype) / full,
        "loads": _loading(call, rates) if rates.cache else 0.0,
        "memory": call.memory / rates.memory,
    }
    bound = max(times, key=lambda name: times[name])
    return bound, times[bound], rates.launch + rates.step * call.programs


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
    windows = Counter(_windows(config, workload.longest))
    blocks = (
        layers * (row // block - max(row + 1 - window, 0) // block + 1)
        for window, layers in windows.items()
    )
    return sum(blocks) / config.num_layers


def _windows(config: ModelConfig, length: int) -> list[int]:
    """Positions that a token of each layer attends to at most."""
    windowed = config.window_layers or (bool(config.sliding_window),) * config.num_layers
    return [config.sliding_window if one else length for one in windowed]


def _attended(config: ModelConfig, start: int, stop: int) -> int:
    """Positions that the tokens start..stop attend to in all layers, their own included."""
    return sum(
        count * sum(min(position + 1, window) for position in range(start, stop))
        for window, count in Counter(_windows(config, stop)).items()
    )


def _loading(call: Call, rates: Rates) -> float:
    """Seconds of loads: few programs do not draw all that the cache could give."""
    of_program = call.loaded / call.programs
    waves, rest = divmod(call.programs, rates.cores)
    return sum(
        count * of_program * programs / min(rates.cache, programs * rates.core)
        for count, programs in ((waves, rates.cores), (1, rest))
        if programs
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
    """Of a stage: "sampler", "scoring" or "update", all responses being the longest.

    With the workload's `mean_tokens` the learner's sequences have its `lengths`. A sampler reads
    the prompt of a group once, and has the logits of what it draws alone.
    """
    execution = workload.training.drawing if stage == "sampler" else workload.execution
    config, where = execution.config, execution.placement
    prompt, response = workload.prompt_length, execution.sampling.max_tokens
    length, rows = prompt + response, workload.sequences // where.shards
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
