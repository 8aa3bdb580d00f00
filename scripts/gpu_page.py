"""Draws docs/results/gpu.md from what GPU checks found, one JSON file a device.

    bash scripts/gpu_check.sh --minutes 9              # on a machine with a GPU
    python scripts/gpu_page.py runs/gpu_check --name h200
    python scripts/gpu_page.py                         # again, of the files that are there

The first form takes the check's gpu.json into docs/results/gpu/ under that name, in place of what
was there. What stands outside the page's marks is a person's: what the figures mean, and what to
doubt.
"""

import argparse
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_common as common

PAGE = common.RESULTS / "gpu.md"
PREDICTED = common.RESULTS / "predicted.json"  # by scripts/gpu_predicted.py, before a run
FILES = common.RESULTS / "gpu"
_RUN = ("passed", "FAILED", "measured")
_PROGRAM = re.compile(r"(sampler|learner|GRPO step) (\S+) (exact|native), (.+)")
_KERNELS = 14  # of a profile, those that take longest

Row = Mapping[str, Any]
Parts = Mapping[str, Sequence[Row]]


def main() -> None:
    """Takes a check's results along, if a folder is given, and draws the page."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path, nargs="?", help="of a check's results (its --out)")
    options.add_argument("--name", help="of the device, such as h200; needed with a folder")
    chosen = options.parse_args()
    if (chosen.folder is None) != (chosen.name is None):
        options.error("a folder and --name go together")
    if chosen.folder is not None:
        FILES.mkdir(exist_ok=True)
        shutil.copyfile(chosen.folder / "gpu.json", FILES / f"{chosen.name}.json")
    PAGE.write_text(common.between_marks(PAGE.read_text(), measured(sorted(FILES.glob("*.json")))))


def measured(files: Iterable[Path]) -> str:
    """Everything between the page's marks."""
    lines: list[str] = []
    predicted = json.loads(PREDICTED.read_text())
    for file in files:
        content = json.loads(file.read_text())
        if content["machine"].get("smoke"):
            raise SystemExit(f"{file}: of a smoke run, whose figures mean nothing")
        cases = of_run(predicted.get(file.stem, {}), content["machine"].get("tree", ""))
        lines += [*device(content["machine"], content["parts"], f"gpu/{file.name}", cases), ""]
    return "\n".join(lines).rstrip() + "\n"


def of_run(predicted: Row, tree: str) -> Row:
    """The predictions for the kernels that ran: of that tree, or else of the last one."""
    fitting = [one for one in predicted.values() if tree.startswith(one.get("of", ""))]
    own = [one for one in fitting if "of" in one]
    return (own or fitting or [{"cases": {}}])[-1]["cases"]


def device(machine: Row, parts: Parts, link: str, predicted: Row) -> Iterator[str]:
    """A device's section. `predicted`: figures of whole programs by their names."""
    yield f"## {machine['device']}"
    yield ""
    said = [f"{name} {value}" for name, value in machine.items() if _telling(name, value)]
    yield f"{', '.join(said)}. [All rows]({link})."
    compared = [*parts.get("exactness", ()), *parts.get("controls", ())]
    whole = [*parts.get("speed", ()), *parts.get("profile", ())]
    profiled = [row for row in whole if "kernels" in row["values"]]
    timed = [row for row in whole if row not in profiled]
    for title, table in (
        ("Same bits", exactness(compared, parts.get("run", ()))),
        ("Whole programs", speeds(timed, parts.get("torch", ()), predicted)),
        ("Where the time goes", profiles(profiled)),
        ("Products", products(parts.get("products", ()))),
        ("Kernels and accuracy", others(parts)),
        ("Not run", left(parts)),
    ):
        rows = list(table)
        if rows:
            yield from ("", f"### {title}", "", *rows)


def _telling(name: str, value: Any) -> bool:
    return name not in ("device", "platform", "smoke") and value not in ("none", None)


def exactness(cases: Sequence[Row], runs: Sequence[Row]) -> Iterator[str]:
    """Tokens compared and unequal of each kind of numerics and model; gradients; runs."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for case in cases:
        if case["status"] in _RUN and "unequal" in case["values"]:
            kinds[case["name"].partition(": ")[0]].append(case)
    if not kinds:
        return
    yield "| numerics, model | cases | compared | unequal |"
    yield "|---|--:|--:|--:|"
    total = [0, 0]
    for kind, rows in kinds.items():
        by_what = defaultdict(list)
        for row in rows:
            by_what["tokens" if "tokens" in row["values"] else "numbers"].append(row["values"])
        for what, values in by_what.items():
            compared, unequal = (sum(v[key] for v in values) for key in (what, "unequal"))
            label = kind if what == "tokens" else f"{kind}: a gradient, five times"
            yield f"| {label} | {len(values)} | {compared:,} {what} | {unequal:,} |"
            if what == "tokens" and kind.startswith("pallas"):
                total = [total[0] + compared, total[1] + unequal]
    for run in runs:
        values = run["values"]
        compared = f"{values['tokens']:,} tokens | {values['unequal']:,}"
        yield f"| {run['name']} | {values['steps']} steps | {compared} |"
    yield ""
    yield f"**{total[1]:,} of {total[0]:,} tokens unequal** but for controls and runs."
    for run in runs:
        shown = [f"{name} {_show(value)}" for name, value in run["values"].items()]
        yield from ("", f"{run['name']}: {'; '.join(shown)}.")


def speeds(programs: Sequence[Row], peers: Sequence[Row], predicted: Row) -> Iterator[str]:
    """Exact and native side by side, and what else was run beside them."""
    sides: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in programs:
        found = _PROGRAM.fullmatch(row["name"])
        if found and row["status"] in _RUN:
            kind, model, side, amount = found.groups()
            sides[f"{kind} {model}", amount][side] = row
    others = [
        row
        for row in (*programs, *peers)
        if row["status"] in _RUN and not _PROGRAM.fullmatch(row["name"])
    ]
    if sides:
        yield from _sides(sides, predicted)
    if others:
        yield from ("", "| beside them | found |", "|---|---|")
        yield from (f"| {row['name']} | {_values(row)} |" for row in others)


def _sides(sides: Mapping[tuple[str, str], Mapping[str, Row]], predicted: Row) -> Iterator[str]:
    rates = "predicted, tokens/s", "exact, tokens/s", "native, tokens/s"
    yield f"| program | of | {' | '.join(rates)} | exact / native | exact, of the limit |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for (program, amount), row in sides.items():
        exact, native = (_rate(row.get(side)) for side in ("exact", "native"))
        ratio = f"{exact / native:.2f}" if exact and native else ""
        shown = [
            f"{rate:,.0f}" if rate else _why(row.get(side))
            for rate, side in ((exact, "exact"), (native, "native"))
        ]
        case = predicted.get(f"{program} exact, {amount}", {})
        before = f"{case['tokens/s']:,}" if "tokens/s" in case else ""
        cells = before, *shown, ratio, _limit(row)
        yield f"| {program} | {amount} | {' | '.join(cells)} |"


def _rate(row: Row | None) -> float | None:
    return None if row is None else row["values"].get("tokens/s")


def _why(row: Row | None) -> str:
    if row is None:
        return ""
    return str(row["values"].get("left out", row["reason"]))[:60].replace("|", "/")


def _limit(sides: Mapping[str, Row]) -> str:
    exact = sides.get("exact", {"values": {}})["values"]
    if "compared" in exact:
        return f"{exact['unequal']:,} of {exact['compared']:,} tokens unequal"
    shares = {k: v for k, v in exact.items() if "share" in k}
    return "; ".join(f"{value:.0%} {name.removeprefix('share ')}" for name, value in shares.items())


def profiles(rows: Sequence[Row]) -> Iterator[str]:
    """Kernels of a program by their time on the device."""
    for row in rows:
        kernels = row["values"]["kernels"]
        total = row["values"].get("kernels ms", sum(kernel["ms"] for kernel in kernels))
        yield f"**{row['name']}**: {row['values']['ms']:,.0f} ms by the clock; kernels listed,"
        yield f"{len(kernels)} of them, {total:,.1f} ms."
        yield ""
        yield "| kernel | ms | share of those | calls | us a call |"
        yield "|---|--:|--:|--:|--:|"
        for kernel in sorted(kernels, key=lambda kernel: -kernel["ms"])[:_KERNELS]:
            each = 1e3 * kernel["ms"] / kernel["calls"]
            cells = f"{kernel['ms']:.1f} | {kernel['ms'] / total:.1%} | {kernel['calls']:,}"
            yield f"| `{kernel['name']}` | {cells} | {each:,.1f} |"
        yield ""


def products(rows: Sequence[Row]) -> Iterator[str]:
    """Rates of tiles, a column each."""
    rows = [row for row in rows if row["status"] in _RUN]
    if not rows:
        return
    tiles = list(dict.fromkeys(tile for row in rows for tile in row["values"]))
    yield f"| product | {' | '.join(tiles)} |"
    yield "|---" * (1 + len(tiles)) + "|"
    for row in rows:
        cells = (str(row["values"].get(tile, "")) for tile in tiles)
        yield f"| {row['name'].removeprefix('dot ')} | {' | '.join(cells)} |"


def others(parts: Parts) -> Iterator[str]:
    """How many cases of kernels and accuracy passed; each case that did not, or was left out."""
    for name in ("exactness", "controls", "programs", "kernels", "accuracy"):
        rows = [row for row in parts.get(name, ()) if row["status"] in _RUN]
        verdicts = [row for row in rows if row["status"] != "measured"]
        if rows and name in ("kernels", "accuracy"):
            passed = sum(row["status"] == "passed" for row in verdicts)
            yield f"- {name}: {passed} of {len(verdicts)} cases passed"
        for row in rows:
            if row["status"] == "FAILED" or "left out" in row["values"]:
                yield f"- {row['name']}: {row['status']}; {_values(row)} {row['reason']}".rstrip()


def left(parts: Parts) -> Iterator[str]:
    """Names of what has no result."""
    for name, rows in parts.items():
        missing = [row["name"] for row in rows if row["status"] not in _RUN]
        if missing:
            yield f"- {name}: {'; '.join(missing)}"


def _values(row: Row) -> str:
    shown = (f"{name}: {_show(value)}" for name, value in row["values"].items())
    return "; ".join(shown).replace("|", "/")


def _show(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    main()
