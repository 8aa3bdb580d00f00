"""An audit's results as one value, as JSON and as a table."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from types import MappingProxyType

import jax
from rich.table import Table

from tim_jax.auditing.running import CaseResult


@dataclass(frozen=True)
class Summary:
    """The result of an audit. Counts leave out the controls."""

    passed: bool  # no case failed, and there was one
    compared_tokens: int
    unequal_tokens: int
    max_abs_diff: float
    control_unequal_tokens: int | None  # None if no control ran; above 0 it saw a difference
    cases: tuple[CaseResult, ...]
    model: str
    versions: dict[str, str]
    platform: str
    device_kind: str
    kernels: dict[str, list[str]]  # of each numerics, the Pallas kernels in its forward and head


def summarise(
    results: Sequence[CaseResult],
    *,
    model: str = "",
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Summary:
    """Sums the results up, with the versions, the device and the kernels that they hold for."""
    checks = [result for result in results if not result.control]
    controls = [result for result in results if result.control]
    device = jax.devices()[0]
    return Summary(
        passed=bool(checks) and all(result.passed for result in checks),
        compared_tokens=sum(result.compared_tokens for result in checks),
        unequal_tokens=sum(result.unequal_tokens for result in checks),
        max_abs_diff=max((result.max_abs_diff for result in checks), default=0.0),
        control_unequal_tokens=sum(c.unequal_tokens for c in controls) if controls else None,
        cases=tuple(results),
        model=model,
        versions={
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
        },
        platform=device.platform,
        device_kind=device.device_kind,
        kernels={name: list(names) for name, names in kernels.items()},
    )


def to_json(summary: Summary) -> str:
    """The summary as a JSON object; a difference that is not a number becomes null."""
    values = asdict(summary)
    for case, result in zip(values["cases"], summary.cases, strict=True):
        first = result.first_unequal
        case["first_unequal"] = None if first is None else first._asdict()
        case["passed"] = result.passed
    return json.dumps(_finite(values), indent=2, allow_nan=False)


def _finite(node):
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    if isinstance(node, float) and not abs(node) < float("inf"):
        return None
    return node


def table(results: Sequence[CaseResult]) -> Table:
    """The results for a terminal, one case a row."""
    drawn = Table(title="Log-probs of the sampler against those of ...", title_justify="left")
    for name in ("numerics", "case"):
        drawn.add_column(name)
    for name in ("tokens", "unequal", "max |diff|", "seconds"):
        drawn.add_column(name, justify="right")
    drawn.add_column("")
    for result in results:
        verdict = "[green]equal" if result.passed else "[red]UNEQUAL"
        if result.control:
            verdict = "[dim]control"
        elif not result.compared_tokens:
            verdict = "[red]NOTHING COMPARED"
        drawn.add_row(
            result.numerics,
            result.name + _where(result),
            f"{result.compared_tokens:,}",
            f"{result.unequal_tokens:,}",
            f"{result.max_abs_diff:.1e}" if result.max_abs_diff else "0",
            f"{result.seconds:.1f}",
            verdict,
        )
    return drawn


def _where(result: CaseResult) -> str:
    """The first unequal token of a failed case, on a line of its own."""
    first = result.first_unequal
    if first is None or result.control:
        return ""
    (drawn, other), (recorded, computed) = first.tokens, first.values
    place = f"sequence {first.sequence}, position {first.position}"
    if drawn != other:
        return f"\n  first at {place}: token {drawn} and {other}"
    return f"\n  first at {place}: {recorded!r} and {computed!r}"
