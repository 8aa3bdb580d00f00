"""An ablation as JSON and as Markdown tables."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax

from tim_jax.instruments.auditing.ablation import ArmResult

# Columns of the first table: the metric, its heading.
MAIN = {
    "tokens": "tokens",
    "unequal_tokens": "unequal",
    "log_ratio_abs_mean": "mean \\|d\\|",
    "log_ratio_abs_max": "max \\|d\\|",
    "kl_k3": "k3",
    "chi2_token": "chi2",
    "ratio_min": "min r",
    "ratio_max": "max r",
    "outside_1pct": "r outside 1%",
    "log_ppl_abs_diff_sum": "mean \\|sum d\\|",
    "prob_diff_max": "max \\|dp\\|",
}
PROFILES = {
    "by_position": "position in the response",
    "by_probability": "probability under the learner",
    "by_length": "length of the response",
    "by_difference": "\\|d\\| itself",
}


def to_record(
    results: Sequence[ArmResult], *, model: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The ablation as plain values, with what it was made from."""
    device = jax.devices()[0]
    return {
        "model": model,
        **about,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform} {device.device_kind}",
        "cases": [_plain(asdict(case)) for case in results],
    }


def to_json(record: Mapping[str, Any]) -> str:
    """The record as JSON; what is not finite is null."""
    return json.dumps(record, indent=1, allow_nan=False)


def _plain(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    if isinstance(node, float) and not math.isfinite(node):
        return None
    return node


def to_markdown(
    record: Mapping[str, Any], *, every_metric: bool = True, profiles: bool = True
) -> str:
    """Tables of a record: the main metrics by case, and if wanted the profiles and all metrics."""
    cases = record["cases"]
    lines = _table(
        ["sampler", *MAIN.values()],
        [[_name(case), *(_short(case["metrics"][name]) for name in MAIN)] for case in cases],
    )
    for profile, title in PROFILES.items() if profiles else ():
        lines += ["", f"Mean |d| by {title}; under each bin, the baseline's tokens:", ""]
        lines += _profile(cases, profile)
    if every_metric:
        lines += ["", "Every metric (`tim_jax.metrics.mismatch_metrics`):", ""]
        names = list(cases[0]["metrics"])
        rows = [[f"`{n}`", *(_short(case["metrics"][n]) for case in cases)] for n in names]
        lines += _table(["metric", *(_name(case) for case in cases)], rows)
    return "\n".join(lines) + "\n"


def _profile(cases: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    bins = cases[0]["profiles"][name]
    heads = [f"{_edge(b[0])} to {_edge(b[1])} ({b[2]:,})" for b in bins]
    rows = [
        [_name(case), *(_short(b[3]) if b[2] else "" for b in case["profiles"][name])]
        for case in cases
    ]
    return _table(["sampler", *heads], rows)


def _name(case: Mapping[str, Any]) -> str:
    return f"`{case['case']}`" if case["entries"] else case["case"]


def _edge(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _short(value: float | None) -> str:
    """Three figures; an exact 0 as 0."""
    if value is None:
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"
