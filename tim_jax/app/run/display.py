"""The display of a run: a live panel in a terminal, one line a step elsewhere.

The display draws what it is given, and measures nothing but the time.

    with Display(total=80, title="quickstart") as display:
        for state, metrics in train(...):
            display.update(step, metrics)
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tim_jax.app.run.loggers import scalars
from tim_jax.common import errors, pages
from tim_jax.common.errors import InputError
from tim_jax.rl.drawing import Sample, all_failed
from tim_jax.rl.loop import Step

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 48  # steps shown by a sparkline, where there is room
_GAP = 2  # between columns of the panel
_RECENT = 20  # steps that the time left is estimated from


class Display:
    """Follows one run, live if it is shown in a terminal. A context manager.

    Args:
        total: the step at which the run ends.
        start: the step it begins after; above 0 for a resumed run.
        extra: label -> metric name, shown after the usual ones.
        file: where to; None: standard output. `console`: the same, as one of `rich`.
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        *,
        total: int,
        start: int = 0,
        title: str = "",
        extra: Mapping[str, str] | None = None,
        file: TextIO | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console or Console(file=file or sys.stdout, highlight=False)
        self._title, self._clock = title, clock
        self._extra = dict(extra or {})
        self._trends = {  # label -> the metric whose history is drawn
            "reward": "reward",
            "length": "response_length",
            "speed": "tokens_per_second",
            **self._extra,
        }
        self._total, self._step = total, start
        self._times: deque[tuple[int, float]] = deque(maxlen=_RECENT + 1)
        self._history: dict[str, deque[float]] = {}
        self._values: dict[str, float] = {}
        self._compared = self._unequal = 0
        self._completions: list[tuple[str, tuple[Sample, ...]]] = []  # the first, the newest
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
            self._draw(self._live)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of one finished step; values that are not numbers are ignored."""
        self._step, self._values = step, scalars(metrics)
        self._times.append((step, self._clock()))
        for name, value in self._values.items():
            self._history.setdefault(name, deque(maxlen=_HISTORY)).append(value)
        self._compared += _count(self._values, "compared_tokens")
        self._unequal += _count(self._values, "unequal_tokens")
        if self._live:
            self._draw(self._live)
        else:
            fields = step_fields(self._values, extra=self._extra)
            fields.append(("", time_left(self._times, self._total)))
            self._print(step_line(fields, step=step, total=self._total))

    def completions(self, rows: Iterable[Sample], *, title: str = "completions") -> None:
        """Shows a few completions, as lines, or in a terminal below the panel.

        There the first ones stay, so that those before training stand above the newest.
        """
        shown = tuple(rows)
        self._completions = [*self._completions[:1], (title, shown)]
        if self._live:
            self._draw(self._live)
        else:
            self._print(f"{title}:")
            for row in shown:
                self._print("  " + completion_line(row, width=160))

    def note(self, text: str) -> None:
        """Prints a line that stays, above the panel."""
        if self._live:
            self._console.print(Text(printable(text)))
        else:
            self._print(printable(text))

    def _print(self, line: str) -> None:
        stream = self._console.file
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            stream.flush()
        except OSError as error:
            # What could not be written may be gone from the buffer, and with it the error.
            reason = errors.lost_output() or error.strerror or f"{error}"
            raise InputError(f"cannot write to standard output: {reason}") from error

    def _draw(self, live: Live) -> None:
        parts = [Panel(self._panel(), title=Text(self._title), border_style="cyan")]
        for title, rows in self._completions:
            lines = [_completion_text(row, width=self._console.width - 6) for row in rows]
            parts.append(Panel(Group(*lines), title=Text(title), border_style="dim"))
        live.update(Group(*parts), refresh=True)

    def _panel(self) -> Group:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=self._total, completed=self._step)
        head.add_row(
            Text(f"step {self._step}/{self._total}", style="bold"),
            bar,
            Text(time_left(self._times, self._total) or "starting"),
        )
        fields = step_fields(self._values, extra=self._extra)
        widths = [max(map(len, column), default=0) for column in zip(*fields, strict=True)]
        body = Table.grid(padding=(0, _GAP))
        for width in widths:
            body.add_column(no_wrap=True, min_width=width)
        body.add_column(no_wrap=True)
        # The panel's border and padding take 4.
        room = max(self._console.width - 4 - sum(widths) - 2 * _GAP, 0)
        for label, text in fields:
            body.add_row(Text(label, style="bold"), *self._row(label, text, room))
        return Group(head, body)

    def _row(self, label: str, text: str, room: int) -> tuple[Text, Text]:
        if label == "exact":
            style = "green" if not self._unequal else "bold red"
            so_far = f"{self._compared:,} so far, {self._unequal:,} unequal"
            # A number that is cut would read as another.
            return Text(text, style=style), Text(so_far if len(so_far) <= room else "", style="dim")
        trend = sparkline(self._history.get(self._trends[label], ()))
        newest = trend[max(len(trend) - room, 0) :]
        return Text(text), Text(newest, style="cyan")


def step_fields(
    values: Mapping[str, float], *, extra: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """Returns (label, text) of what is known of a step, in reading order."""
    fields = []
    if "reward" in values:
        fields.append(("reward", f"{values['reward']:.3f}"))
    if "response_length" in values:
        fields.append(("length", f"{values['response_length']:.1f}"))
    if "exact_share" in values or "compared_tokens" in values:
        fields.append(("exact", exact_text(values)))
    if "tokens_per_second" in values:
        fields.append(("speed", f"{values['tokens_per_second']:,.0f} tokens/s"))
    for label, name in (extra or {}).items():
        if name in values:
            fields.append((label, f"{values[name]:.4g}"))
    return fields


def exact_text(values: Mapping[str, float]) -> str:
    """`100% (12,288 tokens)`; never rounded up to 100%, and not 100% if nothing was compared."""
    compared = _count(values, "compared_tokens")
    unequal = _count(values, "unequal_tokens")
    share = values.get("exact_share", math.nan)
    if "compared_tokens" in values and compared == 0:
        return "no token compared"
    if math.isnan(share) and compared:
        share = 1.0 - unequal / compared
    if math.isnan(share):
        return "not known"
    # Cut, not rounded: 99.9996% must not read 100%.
    cut = min(math.floor(100 * share * 100) / 100, 99.99)
    percent = "100%" if share == 1.0 and not unequal else f"{cut:.2f}%"
    if not compared:
        return percent
    tokens = f"{compared:,} tokens"
    return f"{percent} ({unequal:,} of {tokens} differ)" if unequal else f"{percent} ({tokens})"


def step_line(fields: Sequence[tuple[str, str]], *, step: int, total: int) -> str:
    """Returns `step  12/80  reward 0.412  length 23.1  exact 100% (12,288 tokens)  ...`."""
    width = len(str(total))
    shown = (text if label in ("", "speed") else f"{label} {text}" for label, text in fields)
    return "  ".join([f"step {step:>{width}}/{total}", *filter(None, shown)])


def time_left(times: Sequence[tuple[int, float]], total: int) -> str:
    """Returns `1:02 left` from the (step, second) of recent steps; empty while it is not known.

    The first step, which compiles, is only ever the start of an interval.
    """
    if times and times[-1][0] >= total:
        return "done"
    if len(times) < 2 or times[-1][0] <= times[0][0]:
        return ""
    per_step = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
    return f"{duration(per_step * (total - times[-1][0]))} left"


def duration(seconds: float) -> str:
    """Returns `0:07`, `12:30`, `3:04:00` or `2 days 4 h`."""
    whole = max(round(seconds), 0)
    if whole >= 48 * 3600:
        return f"{whole // 86400} days {whole % 86400 // 3600} h"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Iterable[float]) -> str:
    """Returns one block character per value, from the lowest to the highest; non-finite: `·`."""
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "·" * len(values)
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    return "".join(
        "·"
        if not math.isfinite(value)
        else _BARS[round((value - low) / span * top) if span else top // 2]
        for value in values
    )


def printable(text: str) -> str:
    """Returns `text` on one line, with control characters (escape sequences, too) made visible.

    A model may sample anything, and a terminal would obey it.
    """
    shown = text.replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " ")
    return "".join(char if char.isprintable() else f"<{ord(char):02x}>" for char in shown)


def printable_lines(text: str) -> str:
    """Returns `text` as `printable`, but on the lines that it has."""
    return "\n".join(map(printable, text.replace("\r\n", "\n").split("\n")))


def completion_line(row: Sample, *, width: int) -> str:
    """Returns `1.00  prompt → response`, cut to `width`: the prompt's start, the response's end."""
    prompt, response = printable(row.prompt), printable(row.completion)
    head = f"{row.reward:5.2f}  "
    room = max(width - len(head) - 3, 20)
    left = max(room // 2, room - len(response))
    prompt = prompt if len(prompt) <= left else prompt[: left - 1] + "…"
    right = room - len(prompt)
    response = response if len(response) <= right else "…" + response[len(response) - right + 1 :]
    return f"{head}{prompt} → {response}"


def completions_html(line: str, samples: Iterable[Sample]) -> str:
    """A line, and under it a table of completions with their rewards."""
    rows = [(f"{x.reward:g}", x.prompt, x.completion, x.answer) for x in samples]
    head = ("reward", "prompt", "completion", "answer")
    return pages.paragraphs([line]) + pages.html_table(pages.Table("", head, rows))


def _completion_text(row: Sample, *, width: int) -> Text:
    line = completion_line(row, width=width)
    style = "green" if row.reward > 0 else "default"
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


def _count(values: Mapping[str, float], name: str) -> int:
    value = values.get(name, 0.0)
    return int(value) if math.isfinite(value) else 0


@dataclass
class RewardWatch:
    """Counts the steps whose rewards teach nothing, and says so.

    It says too if an environment fails in all episodes of a step, the first time.
    """

    steps: int = 0
    without: int = 0
    failed: bool = False
    rewards: set[float] = field(default_factory=set)  # two of those seen at most

    def add(self, step: Step, display: Display) -> None:
        """Counts a step; the first one without signal is said."""
        self.steps += 1
        for sample in step.samples:
            if len(self.rewards) < 2:
                self.rewards.add(sample.reward)
        if not self.failed and all_failed(step.metrics, len(step.samples)):
            self.failed = True
            display.note(
                f"step {step.number}: the environment failed in all {len(step.samples)} episodes;"
                " failures.jsonl says why; a resumed run repeats what stands there, so once the"
                " environment is mended, delete that file and resume"
            )
        if step.metrics["without_signal"]:
            self.without += 1
            if self.without == 1:
                display.note(
                    f"step {step.number} teaches nothing: no reward differs from its baseline"
                    " (without_signal counts such steps)"
                )

    def sum_up(self, display: Display) -> None:
        """Says how many steps taught nothing, and warns if no reward ever differed."""
        if self.steps == self.without > 0 and len(self.rewards) == 1:
            display.note(
                f"warning: all completions of {self.steps} steps had the same reward,"
                f" {next(iter(self.rewards)):g}: there was nothing to learn; look at the reward"
            )
        elif self.without:
            display.note(f"{self.without} of {self.steps} steps taught nothing")
