"""The ablation of a sampler's differences: measured alone and together, written and drawn."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dials
import jax
import numpy as np
import pytest
import tiny

from tim_jax import metrics, mismatch
from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.jobs import audit
from tim_jax.app.run import charts
from tim_jax.common.errors import InputError
from tim_jax.instruments.auditing import Score, ablation, learner_log_probs
from tim_jax.model import fitting, hf
from tim_jax.model.execution import Sampling
from tim_jax.rl import programs

NOISE, TRUNCATION = (
    {"name": "log_prob_noise", "std": 0.01, "by": "probability"},
    {"name": "ignored_truncation"},
)
WHOLE = replace(dials.EXECUTION, sampling=Sampling(8, stop_tokens=(3, 5, 7)))
BENCH = audit.Bench("tiny", WHOLE, tiny.params(dials.CONFIG), tiny.prompts(), tiny.GROUP)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    chart = tmp_path_factory.mktemp("ablation") / "chart.png"
    measured = audit.report(BENCH, ablation.alone_and_together(dials.dial(NOISE)))
    charts.source_chart(measured.record, chart)
    return measured, chart


@pytest.mark.slow
def test_baseline_each_alone_and_together():
    bench = replace(BENCH, execution=dials.EXECUTION)
    found = audit.report(bench, ablation.alone_and_together(dials.dial(NOISE, TRUNCATION)))
    cases = {case["case"]: case for case in found.record["cases"]}
    labels = ["log_prob_noise(std=0.01, by=probability)", "ignored_truncation"]
    assert list(cases) == [ablation.BASELINE, *labels, ablation.TOGETHER]
    baseline, noise, truncation, together = cases.values()
    assert baseline["metrics"]["tokens"] > 20
    assert baseline["metrics"]["unequal_tokens"] == baseline["metrics"]["log_ratio_abs_max"] == 0
    assert found.exact
    assert 1e-3 < noise["metrics"]["log_ratio_abs_mean"] < 0.01
    assert truncation["metrics"]["log_ratio_abs_mean"] > 0
    assert together["metrics"]["unequal_tokens"] >= noise["metrics"]["unequal_tokens"]
    assert [case["group"] for case in cases.values()] == ["", "synthetic", "semantics", ""]
    assert together["entries"] == labels
    for case in (noise, truncation, together):
        assert case["reporting"]["log_ratio_abs_mean"] == case["metrics"]["log_ratio_abs_mean"]
    assert (found.record["temperature"], found.record["top_p"]) == (0.8, 0.9)


def test_profiles_hold_every_token_once(result):
    baseline, noise = result[0].record["cases"]
    assert result[0].exact
    assert baseline["metrics"]["tokens"] > 20
    assert baseline["metrics"]["unequal_tokens"] == baseline["metrics"]["log_ratio_abs_max"] == 0
    assert 1e-3 < noise["metrics"]["log_ratio_abs_mean"] < 0.01
    for case in (baseline, noise):
        tokens, mean = case["metrics"]["tokens"], case["metrics"]["log_ratio_abs_mean"]
        for name in ("by_position", "by_probability", "by_length", "by_difference"):
            bins = case["profiles"][name]
            assert sum(b[2] for b in bins) == tokens
            assert np.isclose(sum(b[2] * b[3] for b in bins), tokens * mean, rtol=1e-4)
            assert all(b[0] < (b[1] or np.inf) for b in bins)


def test_lengths_are_binned_by_response():
    lengths = np.asarray([1, 8, 3, 5, 8, 2], np.int32)
    mask = np.arange(8) < lengths[:, None]
    rollout: Any = SimpleNamespace(mask=mask, lengths=lengths, responses=mask)
    difference = np.where(mask, lengths[:, None] * 1.0, 0.0)
    bins = ablation._by_length(difference, rollout)
    assert sum(b.tokens for b in bins) == lengths.sum()
    for b in bins:
        assert not b.tokens or b.low <= b.mean < b.high


def test_written_as_json_and_markdown(result):
    assert json.loads(result[0].json) == json.loads(json.dumps(result[0].record))
    lines = result[0].markdown.splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert any("mean \\|d\\|" in line for line in tables)
    assert any(line.startswith("| `log_prob_noise(std=0.01, by=probability)` |") for line in tables)
    assert all(
        f"| `{name}` |" in result[0].markdown for name in result[0].record["cases"][0]["metrics"]
    )
    widths = {line.count(" | ") for line in lines if line.startswith("| `kl_k3`")}
    assert widths == {len(result[0].record["cases"])}


def test_drawn(result):
    assert result[1].read_bytes().startswith(b"\x89PNG")
    assert result[1].stat().st_size > 20_000


def test_nothing_to_draw(result, tmp_path):
    record = dict(result[0].record, cases=result[0].record["cases"][:1])
    with pytest.raises(InputError, match="nothing to draw"):
        charts.source_chart(record, tmp_path / "x.png")
    with pytest.raises(InputError, match="cannot write"):
        charts.source_chart(result[0].record, tmp_path / "none" / "x.png")


def test_short_numbers():
    short = ablation._short
    found = [short(x) for x in (0.0, 12345.0, 1.5e-5, 0.12345, 1e7 + 0.5, None)]
    assert found == ["0", "12,345", "1.50e-05", "0.1235", "1.00e+07", "not finite"]


def test_weights_are_rounded_once_where_activations_are_too():
    """A sampler is measured as a run has it; with these codes to round again is not the same."""
    entry = {"name": "quantised_weights", "dtype": "int4", "codes": "full", "activations": "int8"}
    dial, prompts, execution = dials.dial(entry), BENCH.prompts, WHOLE
    weights, samples = dials.weights(), tiny.GROUP
    arms = [ablation.Arm("W4A8", dial)]
    (found,) = ablation.ablate(weights, prompts, arms, execution=execution, samples=samples)
    sample = programs.sampling_program(execution, samples=samples, mismatch=dial)
    rollout = sample(weights, prompts, jax.random.key(0))
    plain = replace(rollout, drawn_log_probs=None, hidden=None)
    log_probs, _ = learner_log_probs(execution, Score())(weights, plain)
    measure = jax.jit(metrics.mismatch_metrics)
    expected = measure(log_probs, rollout.log_probs, rollout.mask)
    assert found.metrics == pytest.approx({k: float(x) for k, x in expected.items()}, rel=1e-5)


# --- refusals -----------------------------------------------------------------------------------


def test_stale_weights_need_older_ones():
    with tiny.compilations() as counted, pytest.raises(InputError, match="no older weights"):
        audit.report(BENCH, ablation.alone_and_together(dials.standard("stale_weights")))
    assert not counted


@pytest.mark.slow
def test_stale_weights_are_those_that_are_given(capsys):
    older = {2: tiny.moved(tiny.params(dials.CONFIG))}
    bench = replace(BENCH, older=older.__getitem__)
    cases = [
        ablation.Arm("stale", dials.standard("stale_weights")),
        ablation.Arm(ablation.BASELINE, mismatch.EXACT),
    ]
    found = audit.report(bench, cases)
    assert found.record["cases"][0]["metrics"]["log_ratio_abs_mean"] > 0.01
    assert found.record["cases"][1]["metrics"]["unequal_tokens"] == 0
    assert not found.exact  # the first case is to be the baseline
    assert "stale" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["no list of entries"]),
        ("[{name = 1", ["not TOML"]),
        ("nowhere.toml", ["nowhere.toml", "no such file"]),
        ('[{name = "kv_cash"}]', ["did you mean 'kv_cache'"]),
        ("[3]", ["no table with a name"]),
    ],
)
def test_a_bad_sampler_is_refused(text, words):
    with pytest.raises(InputError) as error:
        toml.read_dial(text)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_dial_from_text_and_from_files(tmp_path):
    entries = '[{ name = "kv_cache", dtype = "int8" }, { name = "native_kernels" }]'
    expected = dials.dial({"name": "kv_cache", "dtype": "int8"}, {"name": "native_kernels"})
    assert toml.read_dial(f" {entries}") == expected
    for number, head in enumerate(("", "[sampler]\n")):
        path = tmp_path / f"{number}.toml"
        path.write_text(f"{head}mismatch = {entries}\n")
        assert toml.read_dial(str(path)) == expected
    (tmp_path / "other.toml").write_text("x = 1\n")
    with pytest.raises(InputError, match="no list `mismatch`"):
        toml.read_dial(str(tmp_path / "other.toml"))


@pytest.mark.slow
def test_the_command(tmp_path, capsys, monkeypatch):
    """Of a model folder; tests/app/test_cli.py has that of a run."""
    monkeypatch.setattr(fitting, "calibrate", lambda config, numerics, **_: numerics)
    short = replace(dials.CONFIG, max_positions=24)
    hf.save(tmp_path / "model", tiny.params(dials.CONFIG), short)
    files = {name: tmp_path / name for name in ("json", "markdown", "chart")}
    arguments = [
        "audit",
        str(tmp_path / "model"),
        "--sampler",
        '[{name = "log_prob_noise", std = 0.1}]',
    ]
    for name, path in files.items():
        arguments += [f"--{name}", str(path.with_suffix(".png" if name == "chart" else ".txt"))]
    assert cli.main([*arguments, "--prompts", "3", "--samples", "2"]) == 0
    assert "exact where the sampler is the learner's own" in capsys.readouterr().out
    record = json.loads((tmp_path / "json.txt").read_text())
    assert len(record["cases"]) == 2
    assert all(case["metrics"]["tokens"] > 6 for case in record["cases"])
    assert (tmp_path / "chart.png").exists()
    assert "| sampler |" in (tmp_path / "markdown.txt").read_text()
    assert cli.main([*arguments, "--prompts", "0"]) == 2
    assert "--prompts must be at least 1" in capsys.readouterr().err
    assert cli.main(["audit", "qwen3", "--chart", "x.png"]) == 2
    assert "--chart goes with --sampler" in capsys.readouterr().err


def test_a_chart_that_cannot_be_drawn_loses_no_measurement(tmp_path, capsys, monkeypatch):
    """As when the disk is full."""

    def refuse(record, image):
        raise InputError(f"cannot write the chart {image}: No space left on device")

    record = {"cases": [{"metrics": {"unequal_tokens": 1}}]}
    measured = audit.Result(record, "{}", "| sampler |", exact=True)
    monkeypatch.setattr(audit, "make_bench", lambda *model, **sizes: BENCH)
    monkeypatch.setattr(audit, "report", lambda *bench, **options: measured)
    monkeypatch.setattr(charts, "source_chart", refuse)
    sampler = ["--sampler", '[{name = "log_prob_noise", std = 0.1}]']
    names = {"json": "json", "markdown": "markdown", "chart": "chart.png"}
    files = [f"--{option}={tmp_path / name}" for option, name in names.items()]
    assert cli.main(["audit", "tiny", *sampler, *files]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "json").read_text() == "{}\n"
    assert (tmp_path / "markdown").read_text() == "| sampler |\n"


@pytest.mark.parametrize("option", ["--prompts", "--samples"])
def test_sizes_of_an_ablation_are_refused_without_one(option, capsys):
    assert cli.main(["audit", "qwen3", "--quick", option, "1"]) == 2
    assert f"{option} goes with --sampler" in capsys.readouterr().err


def test_what_an_ablation_would_not_heed_is_refused(capsys):
    arguments = ["audit", "qwen3", "--sampler", '[{name = "log_prob_noise", std = 0.1}]']
    for option in (["--family", "pallas_gpu"], ["--interpret"], ["--quick"], ["--several-tiles"]):
        assert cli.main([*arguments, *option]) == 2
        assert "does not go with --sampler" in capsys.readouterr().err
