"""Where a compiled program adds up: its products, float sums and kernels, and how each is done.

The static audit: every product, float sum and kernel of the sampler's forward against the
learner's, in the compiled programs' own text.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tim_jax.plan import hlo
from tim_jax.plan.hlo import Computation, Instruction, Module, Type

_PRODUCTS = ("dot", "convolution", "ragged-dot")
_ACROSS = ("all-reduce", "all-reduce-start", "reduce-scatter")
_SUMS = ("reduce", "reduce-window", "scatter", "select-and-scatter", *_ACROSS)
# Beginnings of JAX's primitives that add up; a sum elsewhere is the compiler's.
_ADDS = ("reduce_", "cum", "psum", "scatter", "dot_general", "conv_general", "add")
_BACKWARD = re.compile(r"transpose\(|rematted|/backward")
# Not part of what is computed.
_IGNORED = re.compile(
    r"metadata=\{[^}]*\}|frontend_attributes=\{[^}]*\}|sharding=\{[^}]*\}|origin=\{[^}]*\}"
    r"|backend_config=.*$|(calls|to_apply|body|condition)=%?[\w.\-]+|control-predecessors=\{[^}]*\}"
)
_SIZES = re.compile(r"(slice|padding|window|dynamic_slice_sizes|slice_sizes)=(\{[^}]*\}|[\d_x\-]+)")
_MEMORY = re.compile(r"S\(\d+\)")
_TILING = re.compile(r'"window_config":(\{[^}]*\})')


# A crossing is a sum over devices. A pick is a sum by the compiler's hand where the traced program
# slices or gathers: everything but one value is zero.
KINDS = ("kernel", "product", "sum", "crossing", "pick")


@dataclass(frozen=True)
class Site:
    """A product, a sum of floats or a kernel, alone or with the fusion that it is part of.

    Two sites with the same fields, up to how many rows their arrays have, run the same operations
    in the same order for every row, as far as the text of a program says it.
    """

    kind: str  # one of KINDS
    name: str  # the opcode, or the kernel's name
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    summed: tuple[int, ...]  # sizes that are summed over, where the text says so
    body: str = field(repr=False)  # what is done, with no sizes in it
    tiling: str = ""  # how the compiler cuts it up, where the text says so
    place: str = field(default="", compare=False)  # of one of them in the traced program


def sites(module: Module) -> Iterator[Site]:
    """All that a run of the program comes to, each once."""
    for visit in hlo.visits(module):
        if visit.fused:
            continue
        found = _site(visit.instruction, visit.computation, module)
        if found is not None:
            yield found


def layout(one: Type) -> str:
    """An array's layout, in whichever memory it is."""
    return _MEMORY.sub("", one.layout)


def backward(site: Site) -> bool:
    """Whether it belongs to a gradient, by its place in the traced program."""
    return bool(_BACKWARD.search(site.place))


def _site(one: Instruction, computation: Computation, module: Module) -> Site | None:
    inner = list(_inside(one, computation, module))
    products = [(i, c) for i, c in inner if i.opcode in _PRODUCTS]
    sums = [(i, c) for i, c in inner if _adds_floats(i, module)]
    kernel = one.opcode == "custom-call" and "tpu_custom_call" in one.attributes
    if not (products or sums or kernel):
        return None
    place = next((i.op_name for i, _ in (*products, *sums) if i.op_name), one.op_name)
    tiling = _TILING.search(one.attributes)
    return Site(
        kind="kernel" if kernel else "product" if products else _kind(sums),
        name=_kernel_name(one) if kernel else (products or sums)[0][0].opcode,
        operands=tuple(t for name in one.operands for t in computation[name].types),
        results=one.types,
        summed=tuple(sorted(n for i, c in (*products, *sums) for n in _summed(i, c))),
        body=hlo.body(one.attributes) if kernel else _written(one, computation, module),
        tiling=tiling[1] if tiling else "",
        place=place,
    )


def _kind(sums: list[tuple[Instruction, Computation]]) -> str:
    if not any(_is_sum(one.op_name) for one, _ in sums):
        return "pick"
    across = any(one.opcode in _ACROSS for one, _ in sums)
    return "crossing" if across else "sum"


def _is_sum(place: str) -> bool:
    """Whether the traced program adds up here; it does if the program does not say."""
    return not place or place.rpartition("/")[2].startswith(_ADDS)


def _kernel_name(one: Instruction) -> str:
    """The name that the kernel was given; the instruction's has more or less after it."""
    parts = one.op_name.split("/")
    return parts[-2] if parts[-1] == "pallas_call" and len(parts) > 1 else one.name


def _inside(one: Instruction, computation: Computation, module: Module):
    """The instruction itself, or all of a fusion's, inner fusions included."""
    if one.opcode != "fusion":
        yield one, computation
        return
    body = module.computations[one.called["calls"][0]]
    for inner in body.values():
        yield from _inside(inner, body, module)


def _adds_floats(one: Instruction, module: Module) -> bool:
    """Whether it is a sum whose order shows; a maximum has none, nor has a sum of integers."""
    if one.opcode not in _SUMS or not any(t.dtype.startswith(("f", "bf")) for t in one.types):
        return False
    (applied,) = one.called["to_apply"]
    codes = {inner.opcode for inner in module.computations[applied].values()}
    return bool(codes & {"add", "multiply", "fusion"})


def _summed(one: Instruction, computation: Computation) -> list[int]:
    if one.opcode in _ACROSS:
        return []
    dims = computation[one.operands[0]].types[0].dims
    if one.opcode == "reduce":
        return [dims[int(axis)] for axis in _listed("dimensions", one.attributes)]
    if one.opcode == "dot":
        return [dims[int(axis)] for axis in _listed("lhs_contracting_dims", one.attributes)]
    labels = re.search(r"dim_labels=([\w?]+)_", one.attributes)
    return [dims[labels[1].index("f")]] if labels else []


def _listed(name: str, attributes: str) -> list[str]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [n for n in found[1].split(",") if n] if found else []


def _written(one: Instruction, computation: Computation, module: Module) -> str:
    """What an instruction does, from its result back to its arguments, without names and sizes."""
    numbers: dict[tuple[int, str], int] = {}
    lines: list[str] = []

    def line(value: Instruction, within: Computation, top: bool) -> int:
        key = (id(within), value.name)
        if key in numbers:
            return numbers[key]
        ins = [] if top and within is computation else value.operands
        given = [line(within[name], within, False) for name in ins if name in within]
        called = [
            _written(next(i for i in body.values() if i.root), body, module)
            for names in value.called.values()
            for body in (module.computations[name] for name in names)
        ]
        # A scalar constant is part of what is done; an argument is whatever comes in.
        literal = value.arguments if value.opcode == "constant" else ""
        types = ",".join(f"{t.dtype}/{len(t.dims)}{layout(t)}" for t in value.types)
        attributes = _SIZES.sub(r"\1", _IGNORED.sub("", value.attributes))
        lines.append(f"{types} {value.opcode}{given}{literal}{attributes.strip(' ,')}{called}")
        numbers[key] = len(numbers)
        return numbers[key]

    line(one, computation, True)
    return "\n".join(lines)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Twin:
    """A site of the sampler, how often its program has it, and the nearest site of the learner."""

    site: Site
    count: int
    other: Site | None  # None: the learner has nothing of the kind
    differences: tuple[str, ...]  # empty: they are twins
    sizes: tuple[str, ...]  # row counts and the like in which twins may differ: "64 and 10240"


def audit(sampler: str, learner: Iterable[str], *, weights: Collection[Shape]) -> tuple[Twin, ...]:
    """Compares the texts of compiled programs; what differs comes first.

    Args:
      learner: of programs that hold the learner's forward; their gradients are left out.
      weights: shapes of the model's weights. Twins have the same; their other arrays may differ in
        how many rows they have.
    """
    drawn: dict[Site, int] = {}
    for site in sites(hlo.parse(sampler)):
        drawn[site] = drawn.get(site, 0) + 1
    known = {site for text in learner for site in sites(hlo.parse(text)) if not backward(site)}
    found = [_nearest(site, count, known, weights) for site, count in drawn.items()]
    return tuple(sorted(found, key=lambda twin: (not twin.differences, twin.site.name)))


def _nearest(site: Site, count: int, known: Collection[Site], weights: Collection[Shape]) -> Twin:
    same = [other for other in known if other.kind == site.kind]
    if not same:
        return Twin(site, count, None, (f"the learner has no {site.kind}",), ())
    compared = [(differences(site, other, weights=weights), other) for other in same]
    # The same operation on other arrays is nearer than another operation on the same.
    found, other = min(
        compared,
        key=lambda pair: (pair[1].name != site.name, pair[1].body != site.body, len(pair[0])),
    )
    return Twin(site, count, other, found, () if found else _sizes(site, other))


def differences(site: Site, other: Site, *, weights: Collection[Shape]) -> tuple[str, ...]:
    """What keeps two sites from being twins, in words; the sampler's first."""
    found = []
    for what in ("name", "summed", "tiling", "body"):
        ours, theirs = getattr(site, what), getattr(other, what)
        if ours != theirs:
            found.append(what if what == "body" else f"{what} {_text(ours)} / {_text(theirs)}")
    for what in ("operands", "results"):
        ours, theirs = getattr(site, what), getattr(other, what)
        if len(ours) != len(theirs):
            found.append(f"{len(ours)} / {len(theirs)} {what}")
            continue
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            found += [f"{what[:-1]} {index}: {text}" for text in _types(a, b, weights)]
    return tuple(found)


def _types(a: Type, b: Type, weights: Collection[Shape]) -> list[str]:
    if (a.dtype, len(a.dims)) != (b.dtype, len(b.dims)):
        return [f"{a} / {b}"]
    ours, theirs = layout(a), layout(b)
    found = [] if ours == theirs else [f"layout {ours} / {theirs}"]
    known = (a.dims in weights) + (b.dims in weights)
    # Where one is a weight's shape by chance, the arrays differ in their rows alone.
    if a.dims != b.dims and (known == 2 or (known and a.dims[1:] != b.dims[1:])):
        found.append(f"sizes {list(a.dims)} / {list(b.dims)}")
    return found


def _sizes(site: Site, other: Site) -> tuple[str, ...]:
    """Pairs of sizes in which the arrays of two sites differ."""
    ours, theirs = ((*one.operands, *one.results) for one in (site, other))
    pairs = [
        (x, y)
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a.dims, b.dims, strict=True)
        if x != y
    ]
    return tuple(f"{x} and {y}" for x, y in dict.fromkeys(pairs))


def _text(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
