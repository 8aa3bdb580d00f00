"""What an audit finds: two recordings compared as raw bits, and all comparisons summed up."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from rich import box
from rich.table import Table

from tim_jax.common import pages
from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing.compiler import GradientResult
from tim_jax.numerics.strict import unequal_bits


class Unequal(NamedTuple):
    """The first token whose two log-probs are unequal, in order of sequences and positions."""

    sequence: int
    position: int  # of the response
    tokens: tuple[int, int]  # drawn, and drawn again
    values: tuple[float, float]  # their log-probs


@dataclass(frozen=True)
class CaseResult:
    """The result of a case."""

    name: str
    numerics: str
    compared_tokens: int
    unequal_tokens: int
    max_abs_diff: float
    first_unequal: Unequal | None
    control: bool = False  # unequal tokens are expected, and no failure
    seconds: float = 0.0  # compilation included

    @property
    def passed(self) -> bool:
        """Zero compared tokens is a failure."""
        return self.control or (self.compared_tokens > 0 and self.unequal_tokens == 0)


def compare(
    recorded: Rollout, tokens: ArrayLike, mask: ArrayLike, log_probs: ArrayLike
) -> tuple[int, int, float, Unequal | None]:
    """(tokens compared, unequal, largest |difference|, first unequal) against arrays [B, R].

    Compared are all places that are a response token on either side. Unequal are those that are
    one on one side only, hold another token, or whose log-probs are not the same finite bits.
    """
    drawn, ours = np.asarray(recorded.responses), np.asarray(recorded.log_probs)
    tokens, mask, log_probs = (np.asarray(x) for x in (tokens, mask, log_probs))
    theirs = np.asarray(recorded.mask)
    either, both = theirs | mask, theirs & mask
    differ = np.asarray(unequal_bits(jnp.asarray(ours), jnp.asarray(log_probs)))
    unequal = either & ~(both & (drawn == tokens) & ~differ)
    with np.errstate(invalid="ignore"):
        difference = np.abs(ours.astype(np.float64) - log_probs)
    largest = float(np.max(difference, where=both, initial=0.0))
    if not unequal.any():
        return int(either.sum()), 0, largest, None
    row, column = (int(i) for i in np.argwhere(unequal)[0])
    pair = int(drawn[row, column]), int(tokens[row, column])
    values = float(ours[row, column]), float(log_probs[row, column])
    first = Unequal(row, column, pair, values)
    return int(either.sum()), int(unequal.sum()), largest, first


@dataclass(frozen=True)
class Summary:
    """The result of an audit. Counts leave out the controls."""

    passed: bool  # no case and no gradient failed, and there was a case
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
    gradients: tuple[GradientResult, ...]  # as the compiler makes them; () if not checked


def summarise(
    results: Sequence[CaseResult],
    *,
    model: str = "",
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    gradients: Sequence[GradientResult] = (),
) -> Summary:
    """Sums the results up, with the versions, the device and the kernels that they hold for."""
    checks = [result for result in results if not result.control]
    controls = [result for result in results if result.control]
    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "jaxlib": version("jaxlib")}
    return Summary(
        passed=bool(checks) and all(result.passed for result in (*checks, *gradients)),
        compared_tokens=sum(result.compared_tokens for result in checks),
        unequal_tokens=sum(result.unequal_tokens for result in checks),
        max_abs_diff=max((result.max_abs_diff for result in checks), default=0.0),
        control_unequal_tokens=sum(c.unequal_tokens for c in controls) if controls else None,
        cases=tuple(results),
        model=model,
        versions=versions | {"python": platform.python_version()},
        platform=device.platform,
        device_kind=device.device_kind,
        kernels={name: list(names) for name, names in kernels.items()},
        gradients=tuple(gradients),
    )


def verdict(summary: Summary) -> str:
    """A line on the tokens, and one on the compiler's gradients if they were checked."""
    compared = any(case.compared_tokens for case in summary.cases if not case.control)
    exact = compared and all(case.passed for case in summary.cases)
    tokens = (
        f"{'exact' if exact else 'NOT EXACT'}: {summary.unequal_tokens} of"
        f" {summary.compared_tokens} response tokens unequal"
    )
    return f"{tokens}\n{_of_gradients(summary)}" if summary.gradients else tokens


def _of_gradients(summary: Summary) -> str:
    gradients = summary.gradients
    compiler = f"compiled by jaxlib {summary.versions['jaxlib']} on {summary.platform}"
    wrong = [result for result in gradients if not result.passed]
    if not wrong:
        return f"right gradients: all {len(gradients)} agree with float64, {compiler}"
    errors = ", ".join(
        f"{x.unit} by {x.way} in {x.numerics.split()[-1]} is off by {x.error:.1g} of its size"
        for x in wrong
    )
    return f"WRONG GRADIENTS: {len(wrong)} of {len(gradients)}, {compiler}: {errors}"


def to_json(summary: Summary) -> str:
    """The summary as a JSON object; a difference that is not a number becomes null."""
    values = asdict(summary)
    for case, result in zip(values["cases"], summary.cases, strict=True):
        first = result.first_unequal
        case["first_unequal"] = None if first is None else first._asdict()
        case["passed"] = result.passed
    for gradient, result in zip(values["gradients"], summary.gradients, strict=True):
        gradient["passed"] = result.passed
    return pages.as_json(values)


def table(results: Sequence[CaseResult]) -> Table:
    """The results for a terminal, one case a row; of 80 columns, without a broken word."""
    title = "Log-probs of the sampler against those of ..."
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "tokens", "unequal", "max |diff|", "seconds", ""):
        drawn.add_column(name, justify="left" if name in ("case", "") else "right")
    said = ""
    for result in results:
        # The family and dtype; a line below says all.
        numerics = " ".join(result.numerics.split()[:2])
        if numerics != said:
            said = numerics
            drawn.add_row(f"[bold]{numerics}")
        verdict = "[green]equal" if result.passed else "[red]UNEQUAL"
        if result.control:
            verdict = "[dim]control"
        elif not result.compared_tokens:
            verdict = "[red]NOTHING COMPARED"
        drawn.add_row(
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
