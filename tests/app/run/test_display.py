import io
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tim_jax.app.run import display
from tim_jax.app.run.display import Display, exact_text
from tim_jax.rl.drawing import Sample

METRICS = {
    "reward": 0.4123,
    "response_length": jnp.float32(23.06),
    "exact_share": 1.0,
    "compared_tokens": 12288,
    "unequal_tokens": 0,
    "tokens_per_second": 5243.4,
    "grad_norm": 0.123456,
    "mode": "bypass",
}


def clock_of(*seconds):
    ticks = iter(seconds)
    return lambda: next(ticks)


def test_plain_lines_hold_everything_and_no_escape_codes():
    out = io.StringIO()
    clock = clock_of(0.0, 100.0, 110.0)
    with Display(total=80, file=out, extra={"grad": "grad_norm"}, clock=clock) as display:
        display.update(1, METRICS)
        display.update(2, METRICS)
        display.update(3, {**METRICS, "reward": float("nan")})
    first, second, third = out.getvalue().splitlines()
    assert first == (
        "step  1/80  reward 0.412  length 23.1  exact 100% (12,288 tokens)  5,243 tokens/s"
        "  grad 0.1235"
    )
    assert second == first.replace("step  1", "step  2") + "  2:10:00 left"
    # (110 s over 2 steps) times 77 steps
    assert third.startswith("step  3/80  reward nan")
    assert third.endswith("  1:10:35 left")
    assert "\x1b" not in out.getvalue()


def test_absent_metrics_are_left_out():
    out = io.StringIO()
    with Display(total=2, file=out) as display:
        display.update(1, {"loss": 1.0})
        display.update(2, {})
    assert out.getvalue() == "step 1/2\nstep 2/2  done\n"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"exact_share": 1.0, "compared_tokens": 12288, "unequal_tokens": 0},
            "100% (12,288 tokens)",
        ),
        (
            {"exact_share": 12285 / 12288, "compared_tokens": 12288, "unequal_tokens": 3},
            "99.97% (3 of 12,288 tokens differ)",
        ),
        ({"compared_tokens": 4, "unequal_tokens": 1}, "75.00% (1 of 4 tokens differ)"),
        ({"exact_share": 1.0, "compared_tokens": 0, "unequal_tokens": 0}, "no token compared"),
        ({"exact_share": 1.0}, "100%"),
        ({"exact_share": float("nan")}, "not known"),
        ({}, "not known"),
    ],
)
def test_exact_text(values, expected):
    assert exact_text(values) == expected


@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_an_unequal_token_never_reads_as_100_percent(compared, unequal):
    unequal = min(unequal, compared)
    values = {
        "exact_share": float(np.float32(1 - unequal / compared)),
        "compared_tokens": float(compared),
        "unequal_tokens": float(unequal),
    }
    assert not exact_text(values).startswith("100")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-1, "0:00"), (7.4, "0:07"), (750, "12:30"), (11040, "3:04:00"), (187200, "2 days 4 h")],
)
def test_duration(seconds, expected):
    assert display.duration(seconds) == expected


def test_time_left_starts_after_the_compiling_step():
    assert display.time_left([(1, 0.0)], 10) == ""
    assert display.time_left([(5, 50.0), (7, 54.0)], 17) == "0:20 left"
    assert display.time_left([(9, 0.0), (10, 1.0)], 10) == "done"


def test_sparkline():
    assert display.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert display.sparkline([2.0, 2.0]) == "▄▄"
    assert display.sparkline([float("nan"), 0.0, 1.0, float("inf")]) == "·▁█·"
    assert display.sparkline([]) == ""


@given(st.text(), st.text(), st.integers(30, 200))
def test_completions_never_send_control_characters(prompt, response, width):
    line = display.completion_line(Sample(prompt, response, "", 1.0), width=width)
    assert line.isprintable()
    assert len(line) <= width


def test_completions_keep_the_answer_and_cut_the_middle():
    row = Sample("p" * 300, "r" * 300 + "\x1b[2J 42\n", "", 0.5)
    line = display.completion_line(row, width=80)
    assert len(line) <= 80
    assert re.fullmatch(r" 0\.50  p+… → …r+<1b>\[2J 42⏎", line)


def test_plain_completions_and_notes():
    out = io.StringIO()
    with Display(total=2, file=out) as display:
        display.note("checkpoint 4 is damaged")
        display.completions([Sample("1+2=", "3", "", 1.0)], title="before")
    assert out.getvalue() == "checkpoint 4 is damaged\nbefore:\n   1.00  1+2= → 3\n"


def test_a_stream_that_is_not_utf8_gets_question_marks():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    with Display(total=2, file=out) as display:
        display.completions([Sample("π", "3", "", 1.0)])
    assert b"? ? 3" in raw.getvalue()


def terminal(width=100):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=40, _environ={})
    return out, console


def test_the_live_panel_shows_the_same_facts():
    out, console = terminal()
    with Display(
        console=console, total=80, title="quickstart", clock=clock_of(0.0, 10.0)
    ) as display:
        display.update(1, METRICS)
        display.note("[bold]not markup")
        display.completions([Sample("[red]2+2=", "4\x1b[2J", "", 1.0)])
        display.update(2, {**METRICS, "unequal_tokens": 5, "exact_share": 0.999})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for text in (
        "quickstart",
        "step 1/80",
        "0.412",
        "100% (12,288 tokens)",
        "99.90% (5 of 12,288 tokens differ)",
        "24,576 so far, 5 unequal",
        "5,243 tokens/s",
        "13:00 left",
        "[bold]not markup",
        "[red]2+2= → 4<1b>[2J",
    ):
        assert text in shown, text
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_live_panel_shows_labels_values_and_the_newest_steps_at_any_width(width):
    out, console = terminal(width=width)
    with Display(console=console, total=80, extra={"held-out": "eval/reward"}) as display:
        for step in range(60):
            out.truncate(0)
            reward = float(step == 59)
            display.update(step, {**METRICS, "reward": reward, "eval/reward": 0.5})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).strip("\0\r\n")
    rows = [line.strip("│ ") for line in shown.splitlines()]
    for label in ("reward ", "length ", "exact ", "speed ", "held-out "):
        assert any(row.startswith(label) for row in rows), label
    *_, reward = (row for row in rows if row.startswith("reward "))
    assert re.fullmatch(r"reward +1\.000 +▁{3,47}█", reward)
    *_, exact = (row for row in rows if row.startswith("exact "))
    assert re.fullmatch(r"exact +100% \(12,288 tokens\)( +737,280 so far, 0 unequal)?", exact)


def test_completions_before_training_stay_beside_the_newest():
    out, console = terminal()
    with Display(console=console, total=9) as display:
        for step in range(3):
            display.completions([Sample("2+2=", f"{step}", "", 1.0)], title=f"after step {step}")
        out.truncate(0)
        display.update(3, METRICS)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "2+2= → 0" in last
    assert "2+2= → 2" in last
    assert "2+2= → 1" not in last


def test_the_cursor_comes_back_after_an_error():
    out, console = terminal()
    with pytest.raises(KeyError), Display(console=console, total=3):
        raise KeyError("boom")
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_narrow_terminal_is_survived():
    out, console = terminal(width=20)
    with Display(console=console, total=3) as display:
        display.update(1, METRICS)
        display.completions([Sample("a" * 50, "b" * 50, "", 0.0)])
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= 20
    assert any("0.412" in line for line in lines)
