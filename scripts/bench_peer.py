"""tim_jax against google-tunix and TRL, and writes sections of docs/results/peer.md.

    JAX_PLATFORMS=cpu python scripts/bench_peer.py --peer-python /path/to/python
    python scripts/bench_peer.py --peer-python /path/to/python --shape wide
    python scripts/bench_peer.py --peer trl --peer-python /path/to/other --shape llama-135m

`--peer-python` is an interpreter with google-tunix 0.1.7 installed, or with TRL 1.16, PyTorch and
jax. Each library works in a process of its own (peer_ours.py, peer_tunix.py, peer_trl.py); timed
calls take turns, one process idle while the other works. Of TRL, steps are measured.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import bench_common as common

PAGE = common.RESULTS / "peer.md"
NAMES = {"tunix": "google-tunix", "trl": "TRL"}
SPEED_GOALS = {8: 2.0, 16: 1.8, 32: 2.0, 64: 2.5}
SKEWED_GOAL = 3.0
_HERE = pathlib.Path(__file__).parent


class Row(NamedTuple):
    """Seconds by side of one batch size and dtype."""

    batch: int
    dtype: str
    sampler: Mapping[str, tuple[float, ...]]  # empty where it is not measured
    skewed: Mapping[int, Mapping[str, tuple[float, ...]]]  # by number of slots
    step: Mapping[str, tuple[float, ...]]
    versions: Mapping[str, Mapping[str, str]]


class Worker:
    """A process that answers one operation at a time."""

    def __init__(self, python: str, script: str, options: list[str]):
        self.name = script
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by __exit__
        self.process = subprocess.Popen(
            [python, str(_HERE / script), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def ask(self, operation: str) -> dict:
        """The answer; raises with the end of the worker's own messages if it died."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(operation + "\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} ended at {operation!r}:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def seconds(self, operation: str, tokens: int) -> float:
        answer = self.ask(operation)
        if answer["tokens"] != tokens:
            raise SystemExit(f"{self.name}: {answer['tokens']} tokens, expected {tokens}")
        if answer["compiled"]:
            names = ", ".join(answer["compiled"])
            raise SystemExit(f"{self.name}: {operation!r} was timed while JAX compiled {names}")
        return answer["seconds"]


def measure(batch: int, dtype: str, options) -> Row:
    """One row of both tables."""
    sizes = common.SHAPES[options.shape]
    tokens = batch * sizes.response
    arguments = ["--batch", str(batch), "--dtype", dtype, "--shape", options.shape]
    with (
        Worker(sys.executable, "peer_ours.py", arguments) as ours,
        Worker(options.peer_python, f"peer_{options.peer}.py", arguments) as peer,
    ):
        sides = {"ours": ours, "peer": peer}
        found = {name: worker.ask("about") for name, worker in sides.items()}
        take_turns = partial(turns, sides, repeats=options.repeats)
        sampler, skewed = {}, {}
        if options.peer == "tunix":
            warm_up(sides, "prepare_sampler")
            sampler = take_turns("sample", tokens)
        skews = batch == max(common.SHAPE_BATCHES[options.shape]) and sizes.limit is None
        if skews and options.peer == "tunix":
            warm_up(sides, "prepare_skewed")
            drawn = int(common.skewed(batch, sizes.longest).sum())
            for slots in common.slots(batch):
                skewed[slots] = take_turns(f"sample_skewed {slots}", drawn)
        warm_up(sides, "prepare_learner")
        step = take_turns("step", tokens)
    return Row(batch, dtype, sampler, skewed, step, found)


def warm_up(sides: Mapping[str, Worker], operation: str) -> None:
    """One call on both sides that is not counted; the first one compiles."""
    for worker in sides.values():
        worker.ask(operation)


def turns(
    sides: Mapping[str, Worker], operation: str, tokens: int, *, repeats: int
) -> dict[str, tuple[float, ...]]:
    """Seconds by side, after one more call of each that is not counted."""
    warm_up(sides, operation)
    calls = {name: partial(worker.seconds, operation, tokens) for name, worker in sides.items()}
    return common.interleaved(calls, repeats)


def sampler_table(rows: list[Row], response: int) -> list[str]:
    lines = [
        "| batch | dtype | ours tok/s | its tok/s | ours / its, median | of the best times"
        " | goal |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        median, best = common.ratios(row.sampler["peer"], row.sampler["ours"])
        speeds = [
            f"{row.batch * response / statistics.median(times):,.0f}"
            for times in (row.sampler["ours"], row.sampler["peer"])
        ]
        goal = f">= {SPEED_GOALS[row.batch]:.1f}"
        lines.append(
            f"| {row.batch} | {row.dtype} | {speeds[0]} | {speeds[1]} | {median:.2f} | {best:.2f}"
            f" | {goal} |"
        )
    return lines


def skewed_table(rows: list[Row], longest: int) -> list[str]:
    lines = [
        "| sequences | side by side | dtype | tokens | ours tok/s | its tok/s | ours / its, median"
        " | of the best times | goal |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        tokens = int(common.skewed(row.batch, longest).sum())
        for slots, times in row.skewed.items():
            median, best = common.ratios(times["peer"], times["ours"])
            ours, peer = (tokens / statistics.median(times[side]) for side in ("ours", "peer"))
            lines.append(
                f"| {row.batch} | {slots} | {row.dtype} | {tokens:,} | {ours:,.0f} | {peer:,.0f} |"
                f" {median:.2f} | {best:.2f} | >= {SKEWED_GOAL:.1f} |"
            )
    return lines


def step_goal(peer: str, shape: str, dtype: str) -> float:
    """The most that ours may take of the peer's time."""
    if peer == "trl":
        return 0.55 if dtype == "float32" else 0.4
    return 0.5 if shape == "wide" else 0.45


def step_table(rows: list[Row], options) -> list[str]:
    lines = [
        "| batch | dtype | ours, s | its, s | time ours / its, median | of the best times | goal |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        median, best = common.ratios(row.step["ours"], row.step["peer"])
        ours, peer = (f"{statistics.median(row.step[side]):.3f}" for side in ("ours", "peer"))
        goal = step_goal(options.peer, options.shape, row.dtype)
        lines.append(
            f"| {row.batch} | {row.dtype} | {ours} | {peer} | {median:.2f} | {best:.2f}"
            f" | <= {goal:.2f} |"
        )
    return lines


def section(rows: list[Row], load: float, options) -> list[str]:
    """Lines of one peer and shape; the first is the section's title."""
    sizes = common.SHAPES[options.shape]
    ours, peer = rows[0].versions["ours"], rows[0].versions["peer"]
    named = {f"ours: {k}" if k == "Python" else k: v for k, v in ours.items()}
    named |= {f"peer: {k}" if k == "Python" else f"its {k}": v for k, v in peer.items()}
    lines = [
        f"## {NAMES[options.peer]}, {options.shape}",
        "",
        sizes.text(),
        f"{options.repeats} calls of each.",
        "",
        *common.machine_text(load, named),
    ]
    if drawn := [row for row in rows if row.sampler]:
        lines += ["### Sampler, log-probs returned", "", *sampler_table(drawn, sizes.response), ""]
    if skewed := [row for row in rows if row.skewed]:
        lines += [
            f"### Sampler, skewed lengths of up to {sizes.longest} tokens",
            "",
            "Lengths are forced: log-normal, with a mean of a quarter of the longest. Ours draws in"
            " that many slots; the peer in batches of that many, each until its longest has ended."
            " Only tokens up to each sequence's end count.",
            "",
            *skewed_table(skewed, sizes.longest),
            "",
        ]
    heading = f"### GRPO step: groups of {common.GROUP}, one update, AdamW, no KL term"
    return [*lines, heading, "", *step_table(rows, options)]


def page(before: str, lines: list[str]) -> list[str]:
    """The page with a section in place of the one of its name, or behind all others."""
    introduction = [
        "# Speed against other libraries",
        "",
        "`python scripts/bench_peer.py --peer ... --shape ...` writes each section. Ours is exact"
        " (tiles, calibrated for the batch). Both libraries hold float32 master weights and compute"
        " in the dtype named. Each has its own process. After two calls of each for warming up,"
        " calls take turns (A B B A); a ratio is the median of the ratios of neighbours.",
    ]
    _, found, sections = before.partition("\n## ")
    head = "\n".join(introduction)
    return [common.with_section(f"{head}\n{found}{sections}", "\n".join(lines).rstrip() + "\n")]


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    parser = common.parser("Measures tim_jax against google-tunix or TRL.", PAGE)
    parser.add_argument("--peer", choices=NAMES, default="tunix")
    parser.add_argument("--peer-python", required=True, help="interpreter that has the peer")
    shapes = [name for name in common.SHAPES if name != "smoke"]
    parser.add_argument("--shape", choices=shapes, default="small")
    parser.add_argument("--batch", type=int, nargs="+", help="these batch sizes only")
    parser.add_argument("--dtype", choices=common.DTYPES, nargs="+", help="these dtypes only")
    options = parser.parse_args()
    options.shape = "smoke" if options.smoke else options.shape
    before = PAGE.read_text() if PAGE.exists() and not options.smoke else ""
    load = common.load_average()
    rows = []
    for batch, dtype in common.cases(options.shape):
        if options.batch is not None and batch not in options.batch:
            continue
        if options.dtype is None or dtype in options.dtype:
            rows.append(measure(batch, dtype, options))
            # After every row: a run that is stopped keeps what it has measured.
            common.publish(page(before, section(rows, load, options)), options, PAGE)


if __name__ == "__main__":
    main()
