"""A verdict as a record of plain values, and the record as text, JSON and an HTML page."""

import html
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import metrics
from tim_jax.common import pages
from tim_jax.common.pages import Table
from tim_jax.instruments.diagnosis import variants
from tim_jax.instruments.diagnosis.explanations import (
    LEAST_LOCAL,
    NORMAL_K3,
    NORMAL_LARGEST,
    NORMAL_MEAN,
    Judged,
    Tokens,
    abnormal,
    sizes_of,
)
from tim_jax.instruments.diagnosis.parts import Part
from tim_jax.instruments.diagnosis.verdict import Place, Verdict, place

WORST = 12
_SHOWN = 8  # explanations in the text
_MOST = 0.5  # of the gap, that low precision explains if the whole is called so
_ROWS = 5  # rows of a bad part in the text
_LENGTH_BINS = 6
_CONTEXT = 6  # tokens before one that is shown
_BAR = 40  # characters of the longest bar

Decode = Callable[[Sequence[int]], str]


def as_record(
    verdict: Verdict, decode: Decode, *, warnings: Sequence[str] = (), assumed: str = ""
) -> dict[str, Any]:
    """Everything that a report says, as plain values.

    Keys: `state` ("exact", "numerics", "undecided", "fault"), `verdict` (a sentence), `sizes`,
    `rounded_to` (the decimal step that log-probs were rounded to, such as 0.1, or 0: sizes are of
    what is beyond half of it), `normal`, `explanation` and `remains` (None without one), `nearest`
    (whether what remains is no numerics either, so that the explanation is not the cause, or not
    the only one), `more` (the sizes of what remains where the explanation changes nothing, if they
    are of no numerics), `half_precision` (None if the differences are more than twice those that it
    makes on this model), `first` (the first token that shows a fault), `part` (of a fault that
    touches less than half of the tokens: its `rows`, `positions` in them, and the sizes of the
    `others`; else None), `routing` (of a mixture whose experts were recorded: `agreement` of each
    layer, the `share` of the gap that is due to them, and what then `remains`), `versions` (of the
    weights, with their rows and sizes), `turns` (episodes of several turns that do not hold what
    was drawn: the fields of `turns.Break`), `explanations` (all that were tried, the most likely
    first), `metrics` and `profiles` (of `tim_jax.metrics`, and `by_length`), `worst` tokens,
    `assumed` (what no row says, and the option for it), `warnings`.
    """
    tokens = verdict.tokens
    columns = _columns(tokens)
    numbers, profiles = jax.device_get(_compare(*map(jnp.asarray, columns)))
    best = verdict.best
    gap = np.nan_to_num(np.abs(tokens.gap))
    worst = np.argsort(-gap, kind="stable")[:WORST].tolist()
    return {
        "state": verdict.state,
        "verdict": sentence(verdict),
        "tokens": int((~tokens.hidden).sum()),
        "responses": len(tokens.responses),
        "sizes": verdict.sizes,
        "rounded_to": tokens.step,
        "normal": {"k3": NORMAL_K3, "mean": NORMAL_MEAN, "largest": NORMAL_LARGEST},
        "explanation": _judged(best),
        "nearest": verdict.nearest,
        "more": verdict.more,
        "half_precision": _judged(verdict.half),
        "remains": None if best is None else sizes_of(best.residual),
        "second": _judged(verdict.second),
        "first": None if verdict.first is None else _place(verdict.first, tokens, decode),
        "part": None if verdict.part is None else _part(verdict.part),
        "routing": _routing(verdict),
        "versions": _versions(tokens),
        "turns": [one._asdict() for one in verdict.breaks],
        "explanations": [_judged(one) for one in verdict.judged],
        "metrics": {name: float(value) for name, value in numbers.items()},
        "profiles": _profiles(profiles, columns),
        "worst": [_place(place(tokens, i, None), tokens, decode) for i in worst if gap[i] > 0],
        "assumed": assumed,
        "warnings": list(warnings),
    }


def sentence(verdict: Verdict) -> str:
    """The verdict in a sentence."""
    sizes, best = verdict.sizes, verdict.best
    size = _sizes(sizes, figures=2)
    source = f"; {best.explanation.text}" if best is not None else ""
    if verdict.state == "exact":
        return "Exact: every recorded log-prob has the bits of the exact forward."
    if verdict.state == "numerics":
        if not sizes["largest"]:
            step = f"{verdict.tokens.step:g}"
            return f"This is numerics: log-probs are rounded to {step}, and differ by no more."
        source, half, where = source or "; of no source tried here", verdict.half, "among engines"
        if half is not None and abnormal(sizes):
            what = half.explanation.text.removeprefix(variants.LOW)
            where = f"for this model ({half.scale:.1f} times that of {what})"
        return f"This is numerics, of a size normal {where}: {size}{source}."
    if verdict.state == "undecided":
        count = int((~verdict.tokens.hidden).sum())
        few = f"{_count(count, 'token')} {'is' if count == 1 else 'are'} too few"
        return f"Undecided: {few} to tell numerics of this size from a fault ({size})."
    is_fault = best is not None and best.kind == "fault"
    cause = best.explanation.text if best is not None and is_fault else ""
    if best is not None and verdict.nearest:
        cause += f", which explains {100 * best.share:.0f}% of the gap"
    near = "nearest is: " if verdict.nearest else ""
    if broken := sum(one.fault for one in verdict.breaks):
        return (
            f"This is a fault: {_count(broken, 'episode')} of several turns"
            f" {'does' if broken == 1 else 'do'} not hold what was drawn"
            f"{f', and: {near}{cause}' if cause else ''}."
        )
    if verdict.nearest:
        return f"This is a fault that no known cause explains; nearest is: {cause}."
    if cause:
        more = ""
        if verdict.more is not None:
            more = f" Other tokens differ by more than numerics, too ({_sizes(verdict.more)})."
        return f"This is a fault: {cause}.{more}"
    if (part := verdict.part) is not None:
        count, rows = len(part.places), len(np.unique(part.tokens.sequence[part.places]))
        whole = int((~verdict.tokens.hidden).sum()), len(verdict.tokens.responses)
        return (
            f"This is a fault: {count:,} of {_count(whole[0], 'token')}, in {rows:,} of"
            f" {_count(whole[1], 'row')}, differ by what no known cause explains ({size})."
        )
    if best is not None and best.share >= _MOST:
        return f"This is low precision, but larger than normal: {size}{source}."
    return f"This is a fault: a difference of this size that no known cause explains ({size})."


def text(record: dict[str, Any]) -> str:
    """The record for a terminal."""
    lines = [
        record["verdict"],
        f"{_count(record['tokens'], 'token')} of {_count(record['responses'], 'response')}:"
        f" {_sizes(record['sizes'])}"
        f" (normal: up to {NORMAL_MEAN:g}, {NORMAL_LARGEST:g} and {NORMAL_K3:g})",
    ]
    lines += [record["assumed"]] if record["assumed"] else []
    if step := record["rounded_to"]:
        lines.append(f"Log-probs are rounded to {step:g}; differences count beyond half of that")
    if record["explanation"] is not None:
        lines.append(_explained(record["explanation"], record["remains"]))
    elif record["state"] == "fault":
        tried = dict.fromkeys(one["name"] for one in record["explanations"])
        lines.append(f"Tried: {', '.join(tried)}")
    if record["second"] is not None:
        lines.append(f"Of what remains most is {record['second']['text']}")
    if record["first"] is not None:
        lines.append(f"The first token that shows it: {_sentence_of(record['first'])}")
    if record["part"] is not None:
        lines.append(_sentence_of_part(record["part"]))
    lines += [_sentence_of_routing(record["routing"])] if record["routing"] else []
    lines += [_sentence_of_versions(record["versions"])] if len(record["versions"]) > 1 else []
    turns = [f"{one['where']}: {one['message']}" for one in record["turns"]]
    lines += _few(turns, "more episodes with turns that changed")
    lines += [f"warning: {line}" for line in record["warnings"]]
    worth = filter(_worth_showing, record["explanations"])
    if shown := _first_of_each_name(worth)[:_SHOWN]:
        lines += ["", f"{'gain, nats':>11}  {'of the gap':<11}  explanation"]
        lines += [_row(one) for one in shown]
    return "\n".join(lines)


def _few(lines: Sequence[str], more: str = "more") -> list[str]:
    """The first lines, and how many more there are."""
    hidden = len(lines) - _ROWS
    return [*lines[:_ROWS], *([f"and {hidden} {more}"] if hidden > 0 else [])]


def _first_of_each_name(explanations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The likeliest of each name: one may hold in all rows, and in nearly all as well."""
    found: dict[str, dict[str, Any]] = {}
    for one in explanations:
        found.setdefault(one["name"], one)
    return list(found.values())


def _row(one: dict[str, Any]) -> str:
    """Of the table of explanations, whose names may be long: 80 columns at most."""
    numbers = f"{one['gain']:>11.1f}  {_share(one):<11}  "
    return numbers + f"\n{' ' * len(numbers)}".join(textwrap.wrap(one["name"], 80 - len(numbers)))


def _worth_showing(one: dict[str, Any]) -> bool:
    """Whether an explanation is likelier than none, and explains anything of what it is about.

    Not if it is refuted by draws, whatever else speaks for it.
    """
    if one["gain"] <= 0 or one["matches"] == "sizes" or one["refuted"]:
        return False
    return one["share"] >= LEAST_LOCAL or not one["moves"]


def _share(one: dict[str, Any]) -> str:
    return f"{100 * one['share']:.1f}%" if one["moves"] else "draws, ends"


def _judged(one: Judged | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        **{name: getattr(one.explanation, name) for name in ("name", "text", "kind", "parameters")},
        "matches": "sizes" if one.by_sizes else "tokens",
        **{x: getattr(one, x) for x in ("gain", "share", "moves", "remains", "scale", "refuted")},
        "tokens": len(one.tokens.sequence),
    }


def _place(one: Place, tokens: Tokens, decode: Decode) -> dict[str, Any]:
    response = next(r for r in tokens.responses if r.where == one.where)
    before = (*response.prompt, *response.tokens[: one.position])[-_CONTEXT:]
    return one._asdict() | {"text": decode([one.token]), "context": decode(before)}


def _sentence_of(one: dict[str, Any]) -> str:
    predicted = "" if one["predicted"] is None else f", explained {one['predicted']:.4f}"
    recorded = "left out" if math.isnan(one["recorded"]) else f"{one['recorded']:.4f}"
    return (
        f"{one['where']}, response token {one['position']} {one['text']!r} after"
        f" {one['context']!r}: recorded {recorded}, exact {one['exact']:.4f}{predicted}"
    )


def _explained(one: dict[str, Any], left: dict[str, float]) -> str:
    odds = f"at odds of e^{one['gain']:.0f}"
    if not one["moves"]:
        return f"It is about draws or ends, not about the gap, {odds}; the gap: {_sizes(left)}"
    start = "It explains" if one["kind"] == "fault" else f"{one['name']} explains"
    return f"{start} {_share(one)} of the gap, {odds}; what remains: {_sizes(left)}"


def _sizes(sizes: dict[str, float], *, figures: int = 3) -> str:
    mean, largest, k3 = (f"{sizes[name]:.{figures}g}" for name in ("mean", "largest", "k3"))
    return f"mean |d| {mean}, largest {largest}, K3 {k3}"


def _part(part: Part) -> dict[str, Any]:
    tokens = part.tokens
    positions, owners = tokens.position[part.places], tokens.sequence[part.places]
    rows = [
        {"where": tokens.responses[i].where, "positions": positions[owners == i].tolist()}
        for i in dict.fromkeys(owners.tolist())
    ]
    others = sizes_of(np.delete(tokens.gap, part.places))
    return {"tokens": len(part.places), "rows": rows, "others": others}


def _sentence_of_part(part: dict[str, Any]) -> str:
    rows = part["rows"]
    places = [one["where"] for one in rows]
    short = [x[max(x.rfind("line "), x.find("row "), 0) :] for x in places]  # without the file
    named = [f"{x} ({len(one['positions'])})" for x, one in zip(short, rows, strict=True)]
    return (
        f"The part of {_count(part['tokens'], 'token')} lies in {_count(len(rows), 'row')}:"
        f" {', '.join(_few(named))}; the other tokens: {_sizes(part['others'])}"
    )


def _routing(verdict: Verdict) -> dict[str, Any] | None:
    """How many of the recorded experts are the model's own, and the gap that others make."""
    if verdict.agreement is None:
        return None
    replayed = (one for one in verdict.judged if one.name == "routing" and not one.by_sizes)
    plain = next(replayed, None)
    return {
        "agreement": verdict.agreement.tolist(),
        "share": 0.0 if plain is None else plain.share,
        "remains": None if plain is None else sizes_of(plain.residual),
    }


def _sentence_of_routing(one: dict[str, Any]) -> str:
    shares = one["agreement"]
    least = min(range(len(shares)), key=shares.__getitem__)
    text = (
        f"Experts: {np.mean(shares):.2%} of those that are recorded are the model's own choice,"
        f" least in mixture layer {least} ({shares[least]:.2%})"
    )
    if one["remains"] is None:
        return text
    return (
        f"{text}; with the recorded ones {100 * one['share']:.1f}% of the gap are gone, and there"
        f" is left: {_sizes(one['remains'])}"
    )


def _versions(tokens: Tokens) -> list[dict[str, Any]]:
    """The sizes of the gap by the recorded version of the weights; empty if none is recorded."""
    names = [r.version for r in tokens.responses]
    found = []
    for name in dict.fromkeys(name for name in names if name is not None):
        own = np.asarray([x == name for x in names])
        sizes = sizes_of(tokens.gap[own[tokens.sequence]])
        found.append({"version": name, "rows": int(own.sum()), "sizes": sizes})
    return found


def _sentence_of_versions(versions: Sequence[dict[str, Any]]) -> str:
    each = [
        f"{one['version']} ({_count(one['rows'], 'row')}): {_sizes(one['sizes'])}"
        for one in versions
    ]
    return f"By weights_version: {'; '.join(_few(each))}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _columns(tokens: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(exact, recorded, mask), [S, R] each."""
    shape = len(tokens.responses), max(len(r) for r in tokens.responses)
    at = tokens.sequence, tokens.position
    exact, recorded = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    mask = np.zeros(shape, bool)
    exact[at], mask[at] = tokens.evidence.exact, ~tokens.hidden
    recorded[at] = np.nan_to_num(tokens.recorded)
    return exact, recorded, mask


@jax.jit
def _compare(exact: jax.Array, recorded: jax.Array, mask: jax.Array) -> tuple[Any, Any]:
    return (
        metrics.mismatch_metrics(exact, recorded, mask),
        metrics.mismatch_profiles(exact, recorded, mask),
    )


def _profiles(measured: dict[str, Any], columns: Sequence[np.ndarray]) -> dict[str, list[Any]]:
    """Bins of |d|: `low` <= key < `high`, `tokens` in it and their `mean`."""
    profiles = {
        name: _bins(*(np.asarray(x, np.float64).tolist() for x in profile))
        for name, profile in measured.items()
    }
    exact, recorded, mask = columns
    gap = np.abs(exact - recorded)
    lengths = np.broadcast_to(mask.sum(axis=1)[:, None], mask.shape)
    edges = np.linspace(1, mask.shape[1] + 1, min(_LENGTH_BINS, mask.shape[1]) + 1)
    inside = [mask & (lengths >= a) & (lengths < b) for a, b in itertools.pairwise(edges)]
    counts = [int(x.sum()) for x in inside]
    means = [float(gap[x].mean()) if x.any() else 0.0 for x in inside]
    return profiles | {"by_length": _bins(edges.tolist(), counts, means)}


def _bins(edges, counts, means) -> list[dict[str, float]]:
    return [
        {"low": a, "high": b, "tokens": int(count), "mean": mean}
        for (a, b), count, mean in zip(itertools.pairwise(edges), counts, means, strict=True)
    ]


_STYLE = """
.fault, .numerics, .exact { border-left: 6px solid #1b7f3b; padding-left: 1rem; }
.fault { border-color: #b3261e; } .undecided { border-color: #b58900; } table { width: 100%; }
td, th { text-align: right; } td:first-child, th:first-child { text-align: left; }
"""


def as_html(record: dict[str, Any], title: str) -> str:
    """The record as a page of its own."""
    explained = [
        (one["text"], f"{one['gain']:.1f}", _share(one), f"{one['remains']:.3g}")
        for one in filter(_worth_showing, record["explanations"])
    ]
    worst = [
        (
            f"{one['context']}[{one['text']}]",
            f"{one['where']}, token {one['position']}",
            f"{one['recorded']:.4f}",
            f"{one['exact']:.4f}",
        )
        for one in record["worst"]
    ]
    measured = [(name, f"{value:.6g}") for name, value in record["metrics"].items()]
    head = ("explanation", "gain, nats", "of the gap", "remains, mean |d|")
    tables = [
        Table("Explanations", head, explained),
        Table("Worst tokens", ("token", "where", "recorded", "exact"), worst),
        *(_profile(name, bins) for name, bins in record["profiles"].items()),
        Table("Metrics", ("metric", "value"), measured),
    ]
    summary = itertools.takewhile(bool, text(record).split("\n")[1:])  # up to its table
    head = f"<h1>{html.escape(record['verdict'])}</h1>{pages.paragraphs([*summary])}"
    body = f'<div class="{record["state"]}">{head}</div>\n'
    return pages.page(title, body + "\n".join(map(pages.html_table, tables)), style=_STYLE)


def _profile(name: str, bins: Sequence[dict[str, float]]) -> Table:
    """A profile with a bar for each bin."""
    most = max((one["mean"] for one in bins), default=0.0) or 1.0
    rows = [
        (
            f"{one['low']:.4g} to {one['high']:.4g}",
            f"{one['tokens']:,}",
            f"{one['mean']:.3g}",
            ("█" * round(_BAR * one["mean"] / most)).ljust(_BAR, "░"),
        )
        for one in bins
    ]
    return Table(f"|d| {name.replace('_', ' ')}", ("bin", "tokens", "mean |d|", ""), rows)
