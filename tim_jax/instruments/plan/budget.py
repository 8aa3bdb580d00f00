"""What a run's step needs of a device's memory, estimated from shapes before anything is made.

The estimate counts what is large and certain, and leaves out what a compiler may add. It is meant
to refuse what cannot run, in one line and at once; `tim-jax plan` compiles and is exact.

If memory runs out all the same, XLA says RESOURCE_EXHAUSTED of a device, and NumPy raises
MemoryError of the machine; what was being done is known from the `waiting.during` around it.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.errors import JaxRuntimeError

from tim_jax.common import waiting
from tim_jax.common.errors import InputError, OutOfMemoryError
from tim_jax.instruments.plan import workload as workloads
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model import parameters
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution
from tim_jax.objectives import reinforce
from tim_jax.placement import Devices
from tim_jax.policy import sampler
from tim_jax.policy.scoring import shares_gradient
from tim_jax.rl.rules import Turns
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning

Ways = Mapping[str, Sequence[str]]  # what was being done -> settings; "": anything else

_GIB = 2**30
_MARGIN = 1.05  # an estimate may be so much too high, so what is near the limit may try
_LOGITS = 2.5  # float32 arrays of a tile's logits that exist at a time, learner and sampler
_STAGES = MappingProxyType(
    {"sampling": "sampling", "update": "an update", "weights": "making the weights"}
)
# Where a container's limit stands, by versions 2 and 1 of Linux's control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Need:
    """Bytes that one stage of a step needs on a device, by what they are for."""

    stage: str  # a key of what `needs` returns
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        large = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = [f"{name} {_size(size)}" for name, size in large if size > self.total / 50]
        return (
            f"{_STAGES[self.stage]} needs about {_size(self.total)} a device ({', '.join(shown)})"
        )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def needs(workload: Workload, devices: Devices) -> tuple[Need, Need]:
    """What sampling and an update need on one of `devices`."""
    state, weights, base = workloads.laid_out(workload, devices)
    always = workloads.held(workload, state, weights, base)
    waiting = ("masters", "optimiser") if workloads.offloaded(workload, devices) else ()
    kept = {name: size for name, size in always.items() if name not in waiting}
    drawn = {} if workload.sampler.own_devices else kept
    drawn = {**drawn, **_drawing(workload, devices)}
    learnt = {**always, **_learning(workload, state, weights)}
    if _widened_bytes(workload.execution, weights, devices):
        # One at a time: a gradient's products take their operands row by row.
        learnt["a transposed factor of products"] = workloads.bytes_per_device(weights["head"])
    if workload.execution.lora is not None:  # after the gradient, before they are joined
        before = learnt["a layer or the logits"] + learnt.get("a transposed factor of products", 0)
        learnt["merged matrices"] = max(0, workloads.bytes_per_device(weights["layers"]) - before)
    return Need("sampling", drawn), Need("update", learnt)


def _drawing(workload: Workload, devices: Devices) -> dict[str, int]:
    """Bytes of sampling beside the run's state: the sampler's weights, keys and values, logits."""
    given, decoding = workloads.drawing_weights(workload)
    widened = _widened_bytes(workload.execution, decoding, devices)
    drawing = workload.training.drawing
    rows = max(1, _slots(workload) // drawing.placement.shards)
    made = {
        "cache": _cache(workload),
        "logits": int(_LOGITS * 4 * rows * drawing.config.vocab_size),
        "float32 factors of products": widened,
    }
    return {
        "the sampler's own weights": workload.sampler_copies * workloads.bytes_per_device(given),
        "weights for decoding": _copies(workload, decoding, devices, sum(made.values())),
        **made,
    }


def _copies(workload: Workload, weights: Any, devices: Devices, beside: int) -> int:
    """Bytes of the copies of the weights that sampling makes: gathered over fsdp, and by layer.

    Args:
      weights: as they are in the decode loop.
      beside: bytes of what else is made for the loop. It may take the place of the gathered stacks
        of layers, which are of no more use once they are cut into layers.
    """
    size, drawing = workloads.bytes_per_device, workload.training.drawing
    whole, stacks = size(weights), size([weights[name] for name in drawing.config.stacks])
    gathers = sampler.in_loop(drawing)[0].placement != drawing.placement
    if devices[0].platform == "tpu":  # whose compiler reads layers where the stacks lie
        made = gathers * stacks
    else:
        made = whole + max(0, stacks - beside) if gathers else stacks
    turns = workload.training.turns is not None  # whose weights outlast a call
    return max(whole, made) if turns else made


def _widened_bytes(execution: Execution, weights: Any, devices: Devices) -> int:
    """Bytes of the float32 copies of bfloat16 matrices that a CPU makes to multiply by them."""
    if devices[0].platform != "cpu" or execution.numerics.compute_dtype == "float32":
        return 0
    narrow = [leaf for leaf in jax.tree.leaves(weights) if leaf.dtype.itemsize == 2]
    table = workloads.bytes_per_device(weights["embed"])  # of which only rows are read
    return 2 * (workloads.bytes_per_device(narrow) - table)


def _slots(workload: Workload) -> int:
    """Sequences that are decoded at a time, over all devices."""
    return min(workload.sampler.batching.slots or workload.sequences, workload.sequences)


def _cache(workload: Workload) -> int:
    """Bytes of a device's keys and values: of its prompts, and of slots or of pages."""
    execution, where = workload.training.drawing, workload.training.drawing.placement
    config, numerics = execution.config, execution.numerics
    length = workload.prompt_length + execution.sampling.max_tokens
    length += -length % numerics.kv_block
    pages, kept = workload.sampler.batching.pages, _slots(workload)
    if workload.training.turns is not None:  # a row that waits keeps its pages, and has no slot
        kept = workload.sequences
    whole = kept * length if pages is None else pages * numerics.kv_block
    of_prompts = -(-workload.training.prompts_per_step // where.shards) * workload.prompt_length
    heads, key, value = config.attention
    width = config.num_layers * (heads // where.tensor) * (key + value) * numerics.dtype.itemsize
    return (whole // where.shards + of_prompts) * width


def _gradient(workload: Workload, state: Any, weights: Any) -> tuple[int, int]:
    """Bytes of the gradient's sums, and of a micro-batch's gradient beside them."""
    execution, where = workload.execution, workload.execution.placement
    head = execution.config.hidden_size * execution.config.vocab_size // where.tensor
    head *= where.fsdp > 1  # it is whole while it is used, and so is its gradient
    wide = execution.numerics.dtype.itemsize
    if execution.lora is not None:
        of_adapters = 4 * _elements(state.params)
        return of_adapters + head * wide, of_adapters
    learnt = {name: leaf for name, leaf in weights.items() if name != "head"}
    learnt = learnt if shares_gradient(execution) else weights
    # A micro-batch's gradient of the layers stands beside the sum, in the compute dtype.
    several = bool(workload.tokens) or workload.training.micro_batch < workload.training.rows
    stacks = [weights[name] for name in execution.config.stacks]
    layers = several * workloads.bytes_per_device(stacks)
    return 4 * _elements(learnt) + head * (4 + wide), layers


def _learning(workload: Workload, state: Any, weights: Any) -> dict[str, int]:
    """Bytes of an update beside its state: gradient, activations and logits of a micro-batch."""
    execution, where = workload.execution, workload.execution.placement
    config, numerics = execution.config, execution.numerics
    gradient, layers = _gradient(workload, state, weights)
    tokens = (workload.tokens or workload.training.micro_batch * workload.longest) // where.shards
    wide = numerics.dtype.itemsize
    layer = 4 * config.hidden_size + _attention_numbers(config) + 3 * config.active_width
    layer *= tokens
    if config.num_experts:  # what each of a token's experts makes of it, float32
        layer += tokens * config.num_experts_per_tok * config.hidden_size * 4 // wide
    exchanged = _exchanged_bytes(workload, tokens)
    kept = tokens * config.hidden_size if workload.learning.remat else layer
    logits = min(numerics.head_rows, tokens) * config.vocab_size // where.tensor
    return {
        "gradient": gradient,
        "activations": (config.num_layers * kept * wide) // where.tensor,
        "a layer or the logits": max(
            int(_LOGITS * 4 * logits), layers + 4 * layer // where.tensor + exchanged
        ),
    }


def _attention_numbers(config: ModelConfig) -> int:
    """Numbers a token that a layer's attention makes: its projections, and what they become."""
    heads, key, value = config.attention
    if config.latent is None:
        return 2 * (config.num_heads * key + heads * (key + value))
    of_head = config.query_dim + key + value + config.value_dim
    return config.num_heads * of_head + 2 * key + config.latent.q_lora_rank


def _exchanged_bytes(workload: Workload, tokens: int) -> int:
    """Bytes of what the experts of a device make of the tokens of its group, and of what it sends.

    There is room for the least favourable choice, by which all tokens go to one device.
    """
    execution, devices = workload.execution, workload.execution.placement.expert
    pairs = devices * tokens * execution.config.num_experts_per_tok
    return (devices > 1) * 2 * 4 * pairs * execution.config.hidden_size


def _elements(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(workloads.bytes_per_device(leaf) // leaf.dtype.itemsize for leaf in leaves)


def capacity(device: Any, sharing: int = 1) -> int | None:
    """Bytes that a device has; None if that is not known.

    A CPU has the machine's memory, or what a container may use of it, divided by the `sharing`
    devices that are on it.
    """
    if device.platform != "cpu":
        stats = device.memory_stats()
        return None if stats is None else stats.get("bytes_limit")
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdecimal() else []
    return min(found) // sharing


def check(workload: Workload, devices: Devices, *, most: int | None = None) -> None:
    """Refuses a step that the devices cannot hold.

    Args:
      most: bytes of a device; None: as `capacity` finds them.

    Raises:
      InputError: one line that says which stage needs how much for what, how much there is, and
        which settings would make it fit.
    """
    used = _used_devices(workload, devices)
    most = _shared_capacity(used) if most is None else most
    if most is None:
        return
    need = max(needs(workload, used), key=lambda need: need.total)
    if need.total <= _MARGIN * most:
        return
    helps = _find_settings(workload, devices, most) or (
        f"no setting makes it fit on {len(used)} of these; placement.fsdp ="
        f" {-(-need.total // most)} or more, on as many, splits masters, optimiser and gradient"
    )
    raise InputError(_too_much(need, used, most, helps))


def check_sampling(
    execution: Execution,
    *,
    prompts: int,
    samples: int,
    prompt_length: int,
    helps: str,
    batching: Batching = ALL_AT_ONCE,
    turns: Turns | None = None,
    offload: bool = False,
) -> None:
    """Refuses more responses at a time than the devices here can hold, before a weight is read.

    Args:
      helps: what would need less, in words.
      offload: whether the float32 parameters are in the host's memory while responses are drawn.

    Raises:
      InputError: one line, as `check`.
    """
    training = Training(
        execution,
        Learning(reinforce(), samples),
        optax.identity(),
        prompts_per_step=prompts,
        sampler=Sampler(batching=batching),
        turns=turns,
        offload=offload,
    )
    step = Workload(training, prompt_length=prompt_length)
    used = _used_devices(step, tuple(jax.devices()))
    kept = workloads.held(step, *workloads.laid_out(step, used))
    parts = ("masters", "the adapters' base", "weights")
    made = Need("weights", {name: kept[name] for name in parts})
    need = max(made, needs(step, used)[0], key=lambda need: need.total)
    most = _shared_capacity(used)
    if most is not None and need.total > _MARGIN * most:
        raise InputError(_too_much(need, used, most, helps))


def _shared_capacity(used: Devices) -> int | None:
    """Bytes of each of the devices that are used, those of this machine sharing its memory."""
    local = sum(device.process_index == used[0].process_index for device in used)
    return capacity(used[0], local)


def _too_much(need: Need, used: Devices, most: int, helps: str) -> str:
    kind = "machine" if used[0].platform == "cpu" else f"{used[0].device_kind}"
    each = f" for each of its {len(used)} devices" if len(used) > 1 else ""
    return f"memory: {need}, but this {kind} has {_size(most)}{each}; {helps}"


def _find_settings(workload: Workload, devices: Devices, most: int) -> str | None:
    """Settings that make it fit: the first of the single changes, else those changes together.

    On more of the devices, if there are any that nothing lies on, where no change helps without.
    """
    found: list[str] = []
    changed = workload
    for text, change in _changes(workload, devices, most):
        if _fits(change(workload), devices, most):
            return text
        changed = change(changed)
        found.append(text)
        if len(found) > 1 and _fits(changed, devices, most):
            return ", ".join(found)
    if (wider := _spread_wider(workload, devices)) is None:
        return None
    text, spread = wider
    if _fits(spread, devices, most):
        return text
    more = _find_settings(spread, devices, most)
    return more and f"{text}, {more}"


Change = Callable[[Workload], Workload]


def _changes(workload: Workload, devices: Devices, most: int) -> Iterator[tuple[str, Change]]:
    """Changes that need less memory, those that cost least first."""
    training, drawing = workload.training, workload.training.drawing.placement
    slots = _slots(workload)
    fewer = (n for n in reversed(divisors(workload.sequences, drawing.shards)) if n <= slots)
    fitting = (n for n in fewer if _fits(workload.varied(slots=n), devices, most, drawing=True))
    best = next(fitting, None)
    if best is not None and best < slots:
        yield f"sampler.slots = {best}", lambda it: it.varied(slots=best)
    sizes = divisors(training.rows, workload.execution.placement.shards)
    sizes = [n for n in reversed(sizes) if n < workload.full_rows]
    fitting = (n for n in sizes if _fits(workload.with_micro_batch(n), devices, most))
    size = next(fitting, sizes[-1] if sizes else None)
    if size is not None:
        key, unit = workload.micro_batch
        yield f"{key} = {size * unit}", lambda it: it.with_micro_batch(size)
    if not workload.learning.remat:
        yield "learner.remat = true", lambda it: it.varied(remat=True)
    staying = training.offload or training.kept_weights
    if workloads.offloaded(workload.varied(offload=True), devices) and not staying:
        yield "learner.offload = true", lambda it: it.varied(offload=True)
    if drawing.fsdp > 1 and drawing.decode == "whole":
        key, field = _drawing_key(workload)
        sharded = {field: replace(drawing, decode="sharded")}
        yield f'{key}.decode = "sharded"', lambda it: it.varied(**sharded)
    numerics = workload.execution.numerics
    if numerics.compute_dtype == "float32" and devices[0].platform != "cpu":
        narrow = replace(numerics, compute_dtype="bfloat16")
        yield 'numerics.dtype = "bfloat16"', lambda it: it.varied(numerics=narrow)


def divisors(count: int, step: int) -> list[int]:
    """Those that are multiples of `step`, ascending."""
    return [n for n in range(step, count + 1, step) if count % n == 0]


def _drawing_key(workload: Workload) -> tuple[str, str]:
    """The key, and the field of a training, of the placement that draws."""
    if workload.sampler.placement is None:
        return "placement", "placement"
    return "placement.sampler", "sampler_placement"


def _spread_wider(workload: Workload, devices: Devices) -> tuple[str, Workload] | None:
    """The step on as many of the devices as it can be, and its settings; None: on no more.

    Micro-batches that do not spread over them become the smallest that do.
    """
    where = workload.execution.placement
    if workload.sampler.own_devices:
        return None
    for times in range(len(devices) // where.devices, 1, -1):
        wider = replace(where, fsdp=times * where.fsdp)
        text, step = f"placement.fsdp = {wider.fsdp}", workload.varied(placement=wider)
        if _is_possible(step):
            return text, step
        size = next(iter(divisors(workload.training.rows, wider.shards)), None)
        if size is not None and _is_possible(step.with_micro_batch(size)):
            key, unit = workload.micro_batch
            return f"{text}, {key} = {size * unit}", step.with_micro_batch(size)
    return None


def _is_possible(workload: Workload) -> bool:
    """Whether a run takes these settings."""
    execution, training = workload.execution, workload.training
    try:
        training.check()
        for one in {execution.placement, training.drawing.placement}:
            parameters.check(execution.config, execution.numerics, one)
        training.check_longest(workload.longest)
    except InputError:
        return False
    return True


def _fits(workload: Workload, devices: Devices, most: int, *, drawing: bool = False) -> bool:
    """Whether both stages fit; with `drawing` the first alone."""
    both = needs(workload, _used_devices(workload, devices))
    return all(need.total <= most for need in both[: 1 if drawing else 2])


def _used_devices(workload: Workload, devices: Devices) -> Devices:
    return tuple(devices[: workload.execution.placement.devices])


def advice(workload: Workload, stage: str, devices: Devices, *, slots: int | None) -> Iterator[str]:
    """Changes that would make a compiled program fit, a line each, those that cost least first.

    Args:
      stage: the program that does not fit: "sampler", "scoring" or "update".
      slots: the most sequences at a time for which the sampler fits; 0 if it never does, None
        if that is not known.
    """
    where = workload.execution.placement
    if (wider := _spread_wider(workload, devices)) is not None:
        yield f"{wider[0]}: the slice has devices that nothing lies on"
    fsdp = where.data * where.fsdp
    merged = workload.varied(placement=replace(where, data=1, fsdp=fsdp))
    if where.data > 1 and _is_possible(merged):
        now, then = (workloads.resident(it, devices, "scoring") for it in (workload, merged))
        yield (
            f"placement.data = 1 with placement.fsdp = {fsdp}: masters and optimiser take"
            f" {then / _GIB:.1f} instead of {now / _GIB:.1f} GiB a device"
        )
    if stage == "sampler":
        yield from _sampler_advice(workload, slots, devices)
    else:
        yield from _learner_advice(workload)
    if workload.execution.numerics.compute_dtype == "float32":
        yield 'numerics.dtype = "bfloat16": half the weights, keys and values, and activations'
    yield "a slice of more chips: a batch's rows, masters and optimiser are split over all of them"


def _sampler_advice(workload: Workload, slots: int | None, devices: Devices) -> Iterator[str]:
    where, numerics = workload.training.drawing.placement, workload.execution.numerics
    key, field = _drawing_key(workload)
    if slots:
        yield f"sampler.slots = {slots}: this many sequences are decoded at a time, same bits"
    yield "sampling.max_tokens: room for keys and values is made for the longest response"
    if where.decode == "whole" and where.fsdp > 1:
        whole = workloads.weight_bytes(workload) / where.tensor
        saved = whole * (1 - 1 / where.fsdp) / _GIB
        yield (
            f'{key}.decode = "sharded": {saved:.1f} GiB less a device, but all weights are gathered'
            " for every token"
        )
    wider = replace(where, tensor=2 * where.tensor)
    tiled = replace(numerics, column_tiles=math.lcm(numerics.column_tiles, wider.tensor))
    spread = {field: wider, "numerics": tiled}
    if wider.devices <= len(devices) and _is_possible(workload.varied(**spread)):
        yield f"{key}.tensor = {wider.tensor}: half the weights and key heads a device"


def _learner_advice(workload: Workload) -> Iterator[str]:
    shards = workload.execution.placement.shards
    if not workload.learning.remat:
        yield "learner.remat = true: activations of one layer at a time, for a second forward"
    if workload.full_rows > shards:
        key, unit = workload.micro_batch
        yield f"{key} = {shards * unit}: one sequence a device at a time"


# Once memory has run out

# XLA says the first of memory on a device; the others are the memory inside a GPU's or a TPU's
# core, which a kernel's tiles must fit into.
_OF_XLA = "RESOURCE_EXHAUSTED"
_OF_KERNEL = ("Shared memory size limit exceeded", "CompileTimeScopedVmemOom")
_BYTES = re.compile(r"alloc\w* (?:of )?(\d+) bytes")
_SIZE = re.compile(r"[Aa]llocate ([\d.]+ ?[KMGTP]i?B?)\b")
_USED = re.compile(r"Used ([\d.]+[KMGTP]?) of ([\d.]+[KMGTP]?)")  # by a TPU's compiler


@contextmanager
def explaining_memory(ways: Callable[[], Ways]) -> Iterator[None]:
    """A context of a job, in which memory that runs out becomes an `OutOfMemoryError`.

    Args:
      ways: called once memory has run out; gives the settings that need less, best ones first.

    Raises:
      InputError: a kernel is too large for a core of the device, which none of them changes.
    """
    try:
        yield
    except (JaxRuntimeError, MemoryError) as error:
        if isinstance(error, JaxRuntimeError) and _OF_XLA not in str(error):
            raise
        if any(text in str(error) for text in _OF_KERNEL):
            raise InputError(
                "numerics: a kernel needs more memory than a core of this"
                f' {jax.devices()[0].device_kind} has; family "tiles" works there, slowly'
            ) from error
        doing, found = waiting.task_of(error), ways()
        said = [f"while {doing}" if doing else "", _how_much(str(error))]
        what = ": ".join(filter(None, said)) or "on a device"
        helps = ", ".join(found.get(doing or "", found[""]))
        raise OutOfMemoryError(f"{what}; each of these needs less: {helps}") from error


def _how_much(message: str) -> str:
    """How much was asked for, as far as the message says."""
    if found := _BYTES.search(message):
        return f"{int(found[1]) / 1e9:.2f} GB could not be allocated"
    if found := _SIZE.search(message):
        return f"{found[1]} could not be allocated"
    if found := _USED.search(message):
        return f"the program needs {found[1]} of the device's {found[2]}"
    return ""
