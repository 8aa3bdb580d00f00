"""The static audit: every product, float sum and kernel of the sampler's forward against the
learner's, in the compiled programs' own text."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tim_jax.plan import hlo, sites
from tim_jax.plan.hlo import Type
from tim_jax.plan.sites import Site

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
    for site in sites.sites(hlo.parse(sampler)):
        drawn[site] = drawn.get(site, 0) + 1
    known = {
        site
        for text in learner
        for site in sites.sites(hlo.parse(text))
        if not sites.backward(site)
    }
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
    ours, theirs = sites.layout(a), sites.layout(b)
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
