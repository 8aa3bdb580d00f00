"""tim_jax against google-tunix, and writes docs/results/peer.md.

    JAX_PLATFORMS=cpu python scripts/bench_peer.py --peer-python /path/to/python

`--peer-python` is an interpreter with google-tunix 0.1.7 installed. Each library works in a process
of its own (peer_ours.py, peer_tunix.py); timed calls take turns, one process idle while the other
works.
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
SPEED_GOALS = {8: 2.0, 32: 2.0, 64: 2.5}
STEP_GOAL = 0.45
SKEWED_GOAL = 3.0
SKEWED_BATCH = 64
_HERE = pathlib.Path(__file__).parent


class Row(NamedTuple):
    """Seconds by side of one batch size and dtype."""

    batch: int
    dtype: str
    sampler: Mapping[str, tuple[float, ...]]
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
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
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
    sizes = common.SMOKE if options.smoke else common.SMALL
    tokens = batch * sizes.response
    arguments = ["--batch", str(batch), "--dtype", dtype, *(["--smoke"] if options.smoke else [])]
    with (
        Worker(sys.executable, "peer_ours.py", arguments) as ours,
        Worker(options.peer_python, "peer_tunix.py", arguments) as peer,
    ):
        sides = {"ours": ours, "peer": peer}
        found = {name: worker.ask("about") for name, worker in sides.items()}
        take_turns = partial(turns, sides, repeats=options.repeats)
        warm_up(sides, "prepare_sampler")
        sampler = take_turns("sample", tokens)
        skewed = {}
        if batch == SKEWED_BATCH or options.smoke:
            warm_up(sides, "prepare_skewed")
            drawn = int(common.skewed(batch, sizes.longest).sum())
            for slots in common.slots(batch):
                skewed[slots] = take_turns(f"skewed_{slots}", drawn)
        warm_up(sides, "prepare_learner")
        step = take_turns("step", tokens)
    return Row(batch, dtype, sampler, skewed, step, found)


def warm_up(sides: Mapping[str, Worker], operation: str) -> None:
    """Compiles on both sides; every timed operation has run once after it."""
    for worker in sides.values():
        worker.ask(operation)


def turns(
    sides: Mapping[str, Worker], operation: str, tokens: int, *, repeats: int
) -> dict[str, tuple[float, ...]]:
    """Seconds by side, after one more call of each that is not counted."""
    for worker in sides.values():
        worker.ask(operation)
    calls = {name: partial(worker.seconds, operation, tokens) for name, worker in sides.items()}
    return common.interleaved(calls, repeats)


def sampler_table(rows: list[Row], response: int) -> list[str]:
    lines = [
        "| batch | dtype | ours tok/s | tunix tok/s | ours / tunix, median | of the best times"
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
        "| sequences | side by side | dtype | tokens | ours tok/s | tunix tok/s | ours / tunix,"
        " median | of the best times | goal |",
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


def step_table(rows: list[Row]) -> list[str]:
    lines = [
        "| batch | dtype | ours, s | tunix, s | time ours / tunix, median | of the best times"
        " | goal |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        median, best = common.ratios(row.step["ours"], row.step["peer"])
        seconds = [
            f"{statistics.median(times):.3f}" for times in (row.step["ours"], row.step["peer"])
        ]
        lines.append(
            f"| {row.batch} | {row.dtype} | {seconds[0]} | {seconds[1]} | {median:.2f} | {best:.2f}"
            f" | <= {STEP_GOAL:.2f} |"
        )
    return lines


def page(rows: list[Row], load: float, options) -> list[str]:
    sizes = common.SMOKE if options.smoke else common.SMALL
    ours, peer = rows[0].versions["ours"], rows[0].versions["peer"]
    named = {f"ours: {k}" if k == "Python" else k: v for k, v in ours.items()}
    named |= {f"peer: {k}" if k == "Python" else f"its {k}": v for k, v in peer.items()}
    return [
        "# Speed against google-tunix",
        "",
        "Written by `python scripts/bench_peer.py`. Ours is exact (tiles, calibrated for the"
        " batch). Each library works in its own process, calls take turns (A B B A), one process"
        f" idle while the other works, {options.repeats} calls of each after two for warming up;"
        " ratios are medians of the ratios of neighbours. Both hold float32 master weights and"
        " compute in the dtype named. Tokens per second are as of this machine.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, named),
        "## Sampler, log-probs returned",
        "",
        *sampler_table(rows, sizes.response),
        "",
        f"## Sampler, skewed lengths of up to {sizes.longest} tokens",
        "",
        "Lengths are log-normal with a mean of a quarter of the longest, and are forced. Ours draws"
        " them in that many slots; the peer in batches of that many, each until its longest one"
        " has ended. Only tokens up to each sequence's end are counted.",
        "",
        *skewed_table(rows, sizes.longest),
        "",
        f"## GRPO step: groups of {common.GROUP}, one update, AdamW, no KL term",
        "",
        *step_table(rows),
    ]


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    parser = common.parser("Measures tim_jax against google-tunix.", PAGE)
    parser.add_argument("--peer-python", required=True, help="interpreter with google-tunix 0.1.7")
    parser.add_argument("--batch", type=int, nargs="+", help="these batch sizes only")
    options = parser.parse_args()
    load = common.load_average()
    rows = []
    for batch, dtype in common.cases(options.smoke):
        if options.batch is None or batch in options.batch:
            rows.append(measure(batch, dtype, options))
            # After every row: a run that is stopped keeps what it has measured.
            common.publish(page(rows, load, options), options, PAGE)


if __name__ == "__main__":
    main()
