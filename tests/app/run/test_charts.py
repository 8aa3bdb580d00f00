import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.app.run.charts import series, smooth, source_chart, training_chart
from tim_jax.app.run.loggers import JsonLines
from tim_jax.common.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"


def write(path, rows):
    sink = JsonLines(path)
    for step, row in enumerate(rows, start=1):
        sink.write(step, row)
    sink.close()
    return path


def rows(steps, unequal=0):
    rng = np.random.default_rng(0)
    for step in range(steps):
        row = {
            "reward": float(np.clip(1 - np.exp(-step / 25) + rng.normal() * 0.07, 0, 1)),
            "response_length": 12 + step / 6 + rng.normal(),
            "exact_share": 1.0 - unequal / 4096,
            "compared_tokens": 4096,
            "unequal_tokens": unequal,
        }
        yield {**row, "eval/reward": row["reward"]} if step % 20 == 0 else row


def pixels(path):
    from matplotlib import image

    return image.imread(path)


def near(shown, color):
    """How many pixels have about that colour."""
    target = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(shown[..., :3] - target).max(axis=-1) < 0.03).sum())


def test_the_chart_shows_what_happened(tmp_path):
    sys.modules.pop("matplotlib.pyplot", None)
    good = training_chart(write(tmp_path / "a.jsonl", rows(120)), tmp_path / "a.png")
    assert good.read_bytes().startswith(PNG)
    shown = pixels(good)
    assert shown.shape[0] > 1000
    assert shown.shape[1] > 1200
    for color in ("#1f6fb4", "#7b4fa3", "#2a8f4f", "#e07b00"):
        assert near(shown, color) > 300, color
    assert near(shown, "#c0392b") == 0
    bad = training_chart(write(tmp_path / "b.jsonl", rows(120, unequal=400)), tmp_path / "b.png")
    assert near(pixels(bad), "#c0392b") > 300
    assert "matplotlib.pyplot" not in sys.modules


def test_short_partial_and_odd_files_are_drawn(tmp_path):
    for name, content in {
        "one": rows(1),
        "no exact share": [{"reward": 0.5}, {"reward": 0.6}],
        "strange": [{"reward": float("nan")}, {"reward": "x"}, {"other": [1, 2]}, {"reward": None}],
    }.items():
        path = write(tmp_path / f"{name}.jsonl", content)
        assert training_chart(path, tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_a_dollar_in_a_name_is_no_formula(tmp_path):
    name = r"a $x^$ cost $\frac{$"
    (tmp_path / name).mkdir()
    metrics = write(tmp_path / name / "metrics.jsonl", rows(3))
    assert training_chart(metrics, tmp_path / "run.png").read_bytes().startswith(PNG)
    sampler = {
        "case": "kernels",
        "group": "kernels",
        "metrics": {"log_ratio_abs_mean": 0.1, "log_ratio_abs_max": 0.5},
        "profiles": {key: [] for key in ("by_position", "by_probability", "by_length")},
    }
    record = {"model": name, "jax": "0.10", "cases": [sampler]}
    assert source_chart(record, tmp_path / "source.png").read_bytes().startswith(PNG)


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        training_chart(tmp_path / "absent.jsonl", tmp_path / "a.png")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="holds no step yet"):
        training_chart(tmp_path / "empty.jsonl", tmp_path / "a.png")
    path = write(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(InputError, match=r"cannot write the chart .*: No such file"):
        training_chart(path, tmp_path / "absent" / "a.png")
    with pytest.raises(InputError, match=r"cannot write the chart .*a\.xyz: Format 'xyz'"):
        training_chart(path, tmp_path / "a.xyz")


def test_series_skips_what_is_no_number():
    steps, values = series(
        [{"step": 1, "a": 1.5}, {"step": 2}, {"step": 3, "a": "nan"}, {"step": 4, "a": True}], "a"
    )
    assert steps.tolist() == [1, 4]
    assert values.tolist() == [1.5, 1.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.sampled_from([1, 3, 5, 9]))
def test_smooth_is_the_mean_of_the_neighbours(values, window):
    got = smooth(np.array(values), window)
    for i, value in enumerate(got):
        around = values[max(i - window // 2, 0) : i + window // 2 + 1]
        assert value == pytest.approx(np.mean(around), abs=1e-7)
