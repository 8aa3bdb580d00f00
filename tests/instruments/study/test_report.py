"""Reports: pages that say what is there and need no network, and figures."""

import errno
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from study_files import FILE, make_file, stated, write_run

from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.common.errors import InputError
from tim_jax.instruments.study import findings, report, running
from tim_jax.instruments.study.gradient import BYPASS, RECOMPUTE

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SEEDS = FILE.split("[correction.none]")[0]


def make_study(file):
    """Exact, fp8 and its control over two seeds; the control's last run is cut short."""
    one = stated(file, SEEDS)
    for run in one.runs:
        cut = run == one.runs[-1]
        write_run(run, [0.1, 0.2, 0.3 + 0.1 * run.seed][: 2 if cut else 3], finished=not cut)
        path = run.folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [x | {"reward": 0.5, "response_length": 7.0} for x in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sample = {"prompt": "1+2=", "completion": "1 3#3 <b>", "answer": "3", "reward": 1.0}
        samples = [{"step": step} | sample for step in (1, 2)]
        (run.folder / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in samples))
    return one.folder


@pytest.fixture
def study_folder(file):
    return make_study(file)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of two folders of one name, and its figures. A prompt has half a character."""
    folder = tmp_path_factory.mktemp("report")
    one, other = make_study(make_file(folder)), folder / "elsewhere" / "study"
    shutil.copytree(one, other)
    samples = other / "runs" / "exact" / "seed-3" / "samples.jsonl"
    samples.write_text(samples.read_text().replace("1 3#3", r"\ud800"))
    out = folder / "pages" / "page.html"
    assert cli.main(["report", str(one), str(other), "--out", str(out)]) == 0
    return out


def test_a_page_is_whole_small_and_asks_no_network(page):
    text = page.read_text()
    assert len(text) < 3_000_000
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "an fp8 cache lowers the reward" in markup
    assert "fp8 against fp8+control: no verdict yet: without an outcome of seeds 4" in markup
    assert "fp8+control, seed 4: unfinished: 1 of 2 steps" in markup
    assert "1+2=1 3#3 &lt;b&gt;   (reward 1)" in markup
    assert "Held-out reward under the trainer&#x27;s own policy" in markup
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\(", markup)
    assert r"1+2=\ud800 " in markup  # half a character, as its number


def test_folders_of_one_name_have_figures_of_their_own_which_are_the_same_bits(page):
    images = {path.name: path.read_bytes() for path in page.parent.glob("*.png")}
    first = {name: bits for name, bits in images.items() if "-one-2-" not in name}
    assert len(images) == 2 * len(first) == 2 * 3
    for name, bits in first.items():
        assert bits.startswith(b"\x89PNG")
        assert bits == images[name.replace("-one-", "-one-2-")]


def test_a_page_is_the_same_text_again(study_folder):
    one, two = (report.page([report.section(study_folder)], "report") for _ in range(2))
    assert one == two


def test_a_figure_that_stands_alone_says_what_its_lines_are(study_folder):
    one = report.section(study_folder)
    title = report._signed("Reward", one.lines, "tim-jax report x")
    assert title["subtitle"][0].startswith("Thick lines are means over 2 seeds")
    assert "tim-jax report x" in title["subtitle"][1]


@pytest.mark.slow
def test_a_browser_shows_the_charts(page):
    """The titles are text of the charts themselves, which the page's script draws."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is here")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [browser, *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    drawn = " ".join(re.findall(r"<svg.*?</svg>", done.stdout, flags=re.DOTALL))
    for title in ("Reward under the sampler", "Response length"):
        assert title in drawn


def test_long_runs_are_thinned_to_means_of_the_same_steps():
    steps = np.arange(1000)
    table = {
        "arm": np.repeat(["a", "b"], 1000),
        "seed": np.zeros(2000, np.int64),
        "step": np.tile(steps, 2),
        "m": np.concatenate([steps, np.where(steps < 500, np.nan, 1.0)]),
    }
    rows = findings.thinned(table, "m", 10)
    assert len(rows) == 15
    assert rows[0] == {"arm": "a", "seed": 0, "step": 0, "value": 49.5}
    assert {row["value"] for row in rows if row["arm"] == "b"} == {1.0}
    assert findings.thinned({**table, "m": np.full(2000, np.nan)}, "m", 10) == []


def test_arms_keep_apart_without_colours():
    names = [f"arm{i}" for i in range(12)]
    colours, dashes = findings.colours(names), findings.dashes(names, dashed=["arm1"])
    assert len({(colours[n], tuple(dashes[n])) for n in names}) == 12
    assert dashes["arm1"] != dashes["arm0"]


def measured(source, bias):
    parts = {
        "bias": [bias, 0.01],
        "cosine": [0.9, 0.01],
        "variance": [3.0, 0.1],
        "exact_variance": [2.0, 0.1],
        "signal": [0.5, 0.01],
    }
    names = report.findings.METRICS
    return {
        "horizon": "all",
        "source": source,
        "estimators": {BYPASS: parts, RECOMPUTE: parts, "tis": parts},
        "signs": {"positive": parts, "negative": parts},
        "metrics": dict.fromkeys([*names, "kl_k3"], (0.2, 0.01)),
        "exact_metrics": dict.fromkeys([*names, "kl_k3"], (0.2 if source == "weak" else 0.0, 0.0)),
        "reward_difference": [0.0, 0.1],
    }


@pytest.fixture
def gradient_folder(tmp_path):
    study = {"kind": "gradient", "name": "one", "base": "run.toml", "hypothesis": "a bias"}
    study |= {"source": {s: {"mismatch": []} for s in ("strong", "weak", "later")}}
    record = {"study": study, "seeds": [0], "arms": []}
    (tmp_path / "study.json").write_text(json.dumps(record))
    lines = [measured("strong", 0.3), measured("weak", 0.01)]
    text = "".join(json.dumps({"step": 0} | line) + "\n" for line in lines)
    (tmp_path / "measured.jsonl").write_text(text)
    return tmp_path


def test_a_measurement_says_what_is_seen_and_what_is_not(gradient_folder):
    one = report.section(gradient_folder)
    said = " ".join(one.sentences)
    assert "Unfinished: 2 of 3 measurements are there." in said
    assert "is seen under: strong." in said
    assert "not seen under: weak." in said
    tables = {table.title: table for table in one.tables}
    biases, *_, metrics = tables.values()
    assert biases.rows[0][3] == f"{np.sqrt(0.3):.3g}"
    assert biases.rows[1][3] == "not seen"
    assert "(as exact)" not in metrics.rows[0][1]
    assert metrics.rows[1][1].endswith("(as exact)")
    assert len(one.figures) == 3
    assert "| strong |" in report.markdown(one.tables)


LINES = {
    "no step": "{}",
    "a step in words": '{"step": "one"}',
    "a step before the first": '{"step": -1}',
    "thousands of digits": f'{{"step": 1, "reward": {"9" * 5000}}}',
    "more than 64 bits": f'{{"step": 1, "reward": {"9" * 400}}}',
    "too deep": '{"step": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_no_run_writes_is_said_and_the_other_runs_are_shown(study_folder, line):
    first = study_folder / "runs" / "exact" / "seed-3"
    for name in ("metrics.jsonl", "samples.jsonl"):
        (first / name).write_text(line + "\n")
    one = report.section(study_folder)
    notes = [row for table in one.tables if table.title == "Not finished" for row in table.rows]
    assert any(f"{first / 'metrics.jsonl'}, line 1: not " in cell for (cell,) in notes)
    assert "Reward under the sampler" in one.figures
    assert not one.completions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward_difference": [0.0]}, "line 1: not what a study writes: reward_difference.1: "),
        ({"metrics": {"kl_k3": ["x", 0.0]}}, "line 1: not what a study writes: metrics.kl_k3.0: "),
        ({"estimators": {}}, "of another version: a line has no 'recompute, uncorrected'"),
    ],
)
def test_a_measurement_that_no_study_writes_is_refused(gradient_folder, change, words):
    line = measured("strong", 0.3) | change
    (gradient_folder / "measured.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError) as error:
        report.section(gradient_folder)
    assert words in f"{error.value}"


def test_a_measurement_that_is_not_finite_is_shown(gradient_folder):
    line = measured("strong", 0.3)
    line["metrics"]["kl_k1"] = line["reward_difference"] = ["nan", "inf"]
    (gradient_folder / "measured.jsonl").write_text(json.dumps(line) + "\n")
    biases, *_ = report.section(gradient_folder).tables
    assert biases.rows[0][-1] == "nan ± inf"


ARM = {"name": "a", "run": {}}
DAMAGED = [
    "[]",
    "[" * 100_000 + "]" * 100_000,
    json.dumps({"study": [{}], "seeds": [0], "arms": []}),
    json.dumps({"study": {"base": "a", "hypothesis": "b", "seeds": [0]}, "seeds": 0, "arms": []}),
    *(
        json.dumps({"study": {"base": "a", "hypothesis": "b", "seeds": [0]}, "seeds": [0]} | x)
        for x in ({"arms": [ARM | {"run": 1}]}, {"arms": [ARM | {"name": "x" * 300}]})
    ),
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_study_is_refused_in_one_line(tmp_path, capsys, text):
    (tmp_path / "study.json").write_text(text)
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    line = capsys.readouterr().err
    assert f"{tmp_path / 'study.json'}" in line
    assert line.count("\n") == 1


def test_bad_folders_end_in_one_line(tmp_path, capsys, gradient_folder):
    empty = tmp_path / "nothing"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "study.json").write_text('{"study": {"kind": "training", "new": 1}, "arms": []}')
    for folder, rule in ((empty, "neither a study"), (other, "of another version")):
        assert cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 2
        line = capsys.readouterr().err
        assert rule in line
        assert line.count("\n") == 1


def test_a_full_disk_leaves_the_page_before(study_folder, tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "page.html"
    out.write_text("good")
    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["report", str(study_folder), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"tim-jax: cannot write {out}: No space left on device\n"
    assert out.read_text() == "good"


def pinned_run(file):
    """A run whose lengths rise 1.4 times after 60 steps, to the 8 tokens that are its longest."""
    run = stated(file).runs[0]
    lengths = 5.5 + np.random.default_rng(0).normal(0.0, 0.1, 60)
    write_run(run, [*lengths, *[7.9] * 60], metric="response_length")
    return run.folder


def test_a_surge_to_the_longest_response_is_seen(file):
    """By the run's own longest response, as its decay would see it."""
    (run,) = running.read_runs(pinned_run(file))
    assert abs(report.surge_step(run) - 61) <= 3


@pytest.mark.parametrize(("updates", "expected"), [(1, 40), (2, 20)])
def test_the_surge_is_the_one_that_the_decay_of_the_run_has_found(file, updates, expected):
    """It counts updates, and the report steps."""
    folder = pinned_run(file)
    config = toml.load(folder / "config.toml", [f"learner.epochs={updates}"])
    (folder / "config.toml").write_text(toml.dump(config))
    (run,) = running.read_runs(folder)
    for line in run.lines:
        line["surge_step"] = 40 * (line["step"] >= 70)
    assert report.surge_step(run) == expected
    for line in run.lines:
        line["surge_step"] = 0
    assert report.surge_step(run) == 0
