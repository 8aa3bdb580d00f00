"""Studies: the file, the arms and their controls, what is done and not done again, verdicts."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from study_files import CACHE, FILE, stated, write_run

from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.run import folders
from tim_jax.common.errors import NOT_FINITE, InputError
from tim_jax.instruments import study
from tim_jax.instruments.study import definition, measurement, running
from tim_jax.instruments.study.definition import Outcome, Study, Test
from tim_jax.instruments.study.report import (
    Verdict,
    exact_test,
    holm,
    least_p,
    outcome,
    surge_step,
    too_few_seeds,
    verdicts,
)


def test_arms_are_all_combinations_and_a_control_for_every_divergent_one(file):
    one = stated(file)
    names = [arm.name for arm in one.arms]
    assert names[:4] == ["exact+none", "exact+tis", "fp8+none", "fp8+tis"]
    assert names[4:] == ["fp8+none+control", "fp8+tis+control"]
    assert {a.name: a.control for a in one.arms if a.divergent} == {
        "fp8+none": "fp8+none+control",
        "fp8+tis": "fp8+tis+control",
    }
    assert len(one.runs) == 12
    assert len({run.folder for run in one.runs}) == 12


def test_a_control_differs_from_its_arm_in_the_learner_alone(file):
    one = stated(file)
    configs = {arm.name: arm.config(3, Path("there")) for arm in one.arms}
    divergent, control = configs["fp8+tis"], configs["fp8+tis+control"]
    assert divergent.exact == "report"
    assert control.exact == "required"
    assert control.sampler.dial == divergent.sampler.dial
    assert control.sampler.both_sides
    changed = {"exact": "report", "sampler": divergent.sampler}
    assert control.model_copy(update=changed) == divergent


def test_what_only_reports_has_the_run_without_it_as_control(file):
    noise = '{ name = "log_prob_noise", std = 0.1 }'
    one = stated(file, FILE.replace(CACHE, noise))
    assert {arm.name: arm.control for arm in one.arms if arm.divergent} == {
        "fp8+none": "exact+none",
        "fp8+tis": "exact+tis",
    }
    assert len(one.arms) == 4


def test_a_control_that_cannot_be_made_is_refused_or_said(file):
    text = FILE.replace(CACHE, '{ name = "logit_noise", std = 0.1 }')
    with pytest.raises(InputError, match=r"arm 'fp8\+none' has no matched control: .*logit_noise"):
        stated(file, text)
    one = stated(file, 'controls = "where_possible"\n' + text)
    lines = [verdict.line(one.study.test) for verdict in verdicts(one)]
    assert len(lines) == 2
    assert all("no verdict on mismatch: no matched control" in line for line in lines)


def test_a_study_of_the_mismatch_itself_may_go_without_controls(file):
    one = stated(file, 'controls = "none"\n' + FILE)
    assert [arm.name for arm in one.arms] == ["exact+none", "exact+tis", "fp8+none", "fp8+tis"]
    lines = [verdict.line(one.study.test) for verdict in verdicts(one)]
    assert len(lines) == 2
    assert all(line.endswith("no matched control: the study makes none") for line in lines)


def test_remedies_may_have_one_control(file):
    one = stated(file, 'controls = "uncorrected"\n' + FILE)
    names = ["exact+none", "exact+tis", "fp8+none", "fp8+tis", "fp8+control"]
    assert [arm.name for arm in one.arms] == names
    assert {arm.name: arm.control for arm in one.arms if arm.divergent} == {
        "fp8+none": "fp8+control",
        "fp8+tis": "fp8+control",
    }
    control = one.arms[-1].config(3, Path("there"))
    assert control.sampler.both_sides
    assert control.learner.corrections == ()


def test_remedies_of_a_dial_that_all_arms_have_may_have_one_control(file):
    text = FILE.replace("[dial.exact]", "").replace("[dial.fp8]", "[common]")
    one = stated(file, 'controls = "uncorrected"\n' + text)
    assert [arm.control for arm in one.arms if arm.divergent] == ["uncorrected+control"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[dial.fp8]", "[dail.fp8]"), "dail: unknown key; did you mean 'dial'"),
        (("kv_cache", "kv_cahe"), "arm fp8+none: .*mismatch 'kv_cahe' is unknown"),
        (("token_tis", "token_tsi"), "did you mean 'token_tis'"),
        (
            ("learner.mode", "learner.mood"),
            'learner.mood = "recompute": unknown key; did you mean',
        ),
        (("seeds = [3, 4]", "seeds = [3, 3]"), "seeds = [3, 3]: must be one or more different"),
        (("[dial.exact]", "[dial.control]"), "this name is kept for the controls"),
        (("[dial.exact]", '[dial."a/b"]'), "a name has letters"),
        (("[correction.none]", "[correction.tis]"), "not TOML"),
        (("[correction.none]", "[correction.none]\nlearner.mode = 'bypass'"), None),
        (("[dial.exact]", "[dial.exact]\n[dial.same]"), "are the same run; leave one out"),
        (("[dial.exact]", "[test]\ncompare = [['fp', 'x']]\n[dial.exact]"), "'fp' is no arm"),
        (("[dial.exact]", "[test]\nkind = 'fisher'\n[dial.exact]"), "what a success is"),
        (
            ("seeds = [3, 4]", f"seeds = {list(range(40))}"),
            "an exact test of 40 seeds has 1.1e+23 divisions to count, more than 3e+06",
        ),
        (("seeds =", "arms = [{dial = 'fp9'}]\nseeds ="), "is no option of dial; did you mean"),
        (
            ("seeds =", "arms = [{dial = 'fp8'}, {name = 'fp8'}]\nseeds ="),
            "two arms have the name 'fp8'",
        ),
        (("run.toml", "rum.toml"), "no such file; did you mean"),
        (("hypothesis =", "hypotheses ="), "did you mean 'hypothesis'"),
        (
            ("[dial.exact]", "[outcome]\nmetric = 'eval/rewrad'\n[dial.exact]"),
            "outcome.metric 'eval/rewrad' is unknown; did you mean 'eval/reward'",
        ),
        (
            ("[dial.exact]", "[dial.exact]\neval.every = 0"),
            "outcome.metric is 'eval/reward', and eval.every = 0 is no evaluation",
        ),
        (("[dial.exact]", "[dial.exact]\nseed = 7"), "dial.exact.seed = 7: a study gives its runs"),
        (
            ("[dial.exact]", "[common]\nrun.folder = 'x'\n[dial.exact]"),
            "common.run.folder = 'x': a",
        ),
        (("[dial.exact]", "[dial.exact]\n[dial.zero]\nsampler.mismatch = []"), "are the same run"),
        (
            ("[dial.exact]", "[outcome]\ntake = 'mean'\nwindow = 2\n[dial.exact]"),
            "window = 2: is for take = \"last\"; take is 'mean'",
        ),
        (
            ("[dial.exact]", "[outcome]\nwindow = 200\n[dial.exact]"),
            "outcome.window = 200: a run of",
        ),
        (
            ("[dial.exact]", "[test]\ncompare = [['fp8+none', 'fp8+none']]\n[dial.exact]"),
            "'fp8+none' is compared with itself",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(file, change, message):
    text = FILE.replace(*change)
    assert text != FILE
    if message is None:
        stated(file, text)
        return
    with pytest.raises(InputError) as error:
        stated(file, text)
    assert "\n" not in f"{error.value}"
    assert message.split(".*")[-1] in f"{error.value}"


def test_a_pair_counts_once_whichever_is_named_first(file):
    pairs = "[['fp8+none+control', 'fp8+none'], ['exact+none', 'fp8+none']]"
    one = stated(file, FILE.replace("[dial.exact]", f"[test]\ncompare = {pairs}\n[dial.exact]"))
    assert [(v.arm, v.against) for v in verdicts(one)] == [
        ("fp8+none", "fp8+none+control"),
        ("fp8+tis", "fp8+tis+control"),
        ("exact+none", "fp8+none"),
    ]


def test_two_controls_that_differ_have_two_names(file):
    """An option of the dial and one of the schedule may have one name."""
    cache = CACHE.replace("e4m3fn", "e5m2")
    tables = f"[schedule.fp8]\nsampler.mismatch = [{cache}]\n[dial.exact]"
    both = (f"{{{axis}='fp8', correction='tis', name='{axis}'}}" for axis in ("dial", "schedule"))
    arms = f"controls = 'uncorrected'\narms = [{', '.join(both)}]\n"
    text = arms + FILE.replace("[dial.exact]", tables)
    with pytest.raises(InputError, match=r"two controls, .* have the name 'fp8\+control'; give"):
        stated(file, text)


def test_a_study_stands_as_it_was_stated(file):
    first = stated(file)
    assert running.read_stated(first.folder) == first
    assert stated(file) == first
    with pytest.raises(InputError, match=r"stated with another study; .*another folder"):
        stated(file, FILE.replace("lowers", "raises"))
    with pytest.raises(InputError, match="another arms"):
        stated(file, FILE.replace('"token_tis"', '"token_mis"'))


def test_a_folder_with_something_else_is_refused(file, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty and holds no study, but notes.txt"):
        stated(file)


def test_the_table_has_a_row_for_every_step_seed_and_arm(file):
    one = stated(file)
    for run in one.runs[:2]:
        write_run(run, [0.5, "nan", 0.7 + run.seed])
    write_run(one.runs[2], [0.25], finished=False)
    (one.runs[3].folder).mkdir(parents=True)
    (one.runs[3].folder / "config.toml").write_text("steps = 2\nnew_key = 3\n")
    loaded = study.load(one.folder)
    assert {len(column) for column in loaded.values()} == {7}
    assert loaded["arm"].tolist() == ["exact+none"] * 3 + ["exact+tis"] * 3 + ["fp8+none"]
    assert loaded["seed"].tolist() == [3] * 7
    assert loaded["step"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    np.testing.assert_array_equal(loaded["eval/reward"], [0.5, np.nan, 3.7, 0.5, np.nan, 3.7, 0.25])
    notes = [run.note for run in running.read_runs(one.folder)]
    assert notes[:3] == ["", "", "unfinished: 0 of 2 steps"]
    assert notes[3].startswith("of another version: ")
    assert "new_key" in notes[3]
    assert set(notes[4:]) == {"not begun"}
    alone = study.load(one.runs[0].folder)
    assert alone["arm"].tolist() == ["seed-3"] * 3
    with pytest.raises(InputError, match="neither a study"):
        study.load(file.parent)


def test_a_run_that_recorded_unread_keys_is_reported(tmp_path):
    """As older versions did; see test_folders.py."""
    text = toml.dump(toml.load(None))
    assert "final_share = 0.0" in text
    (tmp_path / "config.toml").write_text(text.replace("final_share = 0.0", "final_share = 0.1"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "response_length": 3, "surge_step": 1}\n')
    [run] = running.read_runs(tmp_path)
    assert run.note == "unfinished: 1 of 100 steps"
    assert surge_step(run) == 1


def test_the_example_of_the_guide_runs(file, monkeypatch, capsys):
    """That of docs/study.md, in a folder with such a study."""
    pytest.importorskip("pandas")
    guide = Path(__file__).parents[3] / "docs" / "study.md"
    code = (
        guide.read_text()
        .split("tests/instruments/study/test_running.py -->\n```python\n")[1]
        .split("```")[0]
    )
    one = running.read(file)
    assert isinstance(one, Study)
    base = toml.read_toml(file.parent / one.base)
    folder = file.parent / "runs" / "studies" / "smoke"
    made = study.stated(one, base, folder, source="one")
    for run in made.runs:
        write_run(run, [0.25, 0.5], metric="reward")
    monkeypatch.chdir(file.parent)
    exec(code, {})
    words = capsys.readouterr().out.split()
    at = words.index("exact+none")
    assert words[at : at + 5] == ["exact+none", "0", "0.25", "1", "0.50"]


def test_finished_runs_are_not_started_again(file, monkeypatch):
    one, said = stated(file), []
    for run in one.runs:
        write_run(run, [0.5, 0.5, 0.5])
    monkeypatch.setattr(subprocess, "Popen", None)  # none may be started
    running.run(one, jobs=2, say=said.append)
    assert said == ["12 runs, 12 of them done"]


def test_a_run_whose_export_failed_is_tried_again(file, monkeypatch):
    """It has the checkpoint of its last step, but neither a model nor a chart, which come after."""
    one, started = stated(file), []
    for run in one.runs:
        write_run(run, [0.5, 0.5, 0.5])
    chart = one.runs[4].folder / "chart.png"
    chart.unlink()

    def fail(command, *, stdout, **_):
        started.append(Path(command[-1]).with_suffix(""))
        stdout.write(b"tim-jax: cannot write model: No space left on device\n")
        stdout.flush()
        return SimpleNamespace(pid=2, poll=lambda: 2, returncode=2)

    def mend(command, **_):
        chart.touch()
        return SimpleNamespace(pid=2, poll=lambda: 0, returncode=0)

    monkeypatch.setattr(running, "_POLL", 0.0)
    monkeypatch.setattr(subprocess, "Popen", fail)
    for _ in range(2):
        with pytest.raises(InputError, match=r"No space left .*; the same command tries again"):
            running.run(one, jobs=1, say=lambda line: None)
    assert started == [chart.parent] * 2
    monkeypatch.setattr(subprocess, "Popen", mend)
    running.run(one, jobs=1, say=lambda line: None)
    assert one.runs[4].done


def test_who_waits_for_a_study_sees_where_its_runs_are(file, monkeypatch):
    one, said, polls = stated(file), [], iter([None, None, 0])
    for run in one.runs[1:]:
        write_run(run, [0.5, 0.5, 0.5])

    def start(command, *, stdout, **_):
        stdout.write(b"step 1/3  reward 0.500\n")
        stdout.flush()
        write_run(one.runs[0], [0.5, 0.5, 0.5])
        return SimpleNamespace(pid=2, poll=lambda: next(polls), returncode=0)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(running, "_SAY", -1.0)
    monkeypatch.setattr(running, "_POLL", 0.0)
    running.run(one, jobs=1, say=said.append)
    name = f"{one.runs[0].arm}, seed {one.runs[0].seed}"
    assert said[1:3] == [f"{name}: begins, 12 of 12", f"{name}: step 1/3  reward 0.500"]
    assert said[-1] == f"{name}: done"


def test_a_run_that_another_process_has_is_said_once_and_tried_again(file, monkeypatch):
    one, said, tried = stated(file), [], []
    for run in one.runs[1:]:
        write_run(run, [0.5, 0.5, 0.5])

    def start(command, *, stdout, **_):
        tried.append(time.monotonic())
        if len(tried) < 3:
            stdout.write(b"tim-jax: runs/x is in use by process 1\n")
            stdout.flush()
            return SimpleNamespace(pid=2, poll=lambda: 2, returncode=2)
        write_run(one.runs[0], [0.5, 0.5, 0.5])
        return SimpleNamespace(pid=2, poll=lambda: 0, returncode=0)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(running, "_POLL", 0.0)
    monkeypatch.setattr(running, "_AGAIN", 0.05)
    running.run(one, jobs=1, say=said.append)
    assert [line.partition(": ")[2] for line in said[1:]] == [
        "begins, 12 of 12",
        "another process has it; tried again until that has ended",
        "done",
    ]
    assert tried[1] - tried[0] >= 0.05


def test_a_run_that_ends_without_its_last_step_is_no_success(file, monkeypatch):
    """A status of 0 alone is not believed."""
    one = stated(file)
    nothing = [sys.executable, "-c", "print('nothing was done')"]
    monkeypatch.setattr(running, "_command", lambda path: nothing)
    with pytest.raises(InputError, match=r"status 0: nothing was done .*and 11 more"):
        running.run(one, jobs=2, say=lambda line: None)


def test_a_run_is_started_by_the_command_line(tmp_path):
    """It reaches `train`, which says what is wrong with this file."""
    command = running._command(tmp_path / "nowhere.toml")
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"tim-jax: config {tmp_path / 'nowhere.toml'}: no such file")


def test_all_arms_begin_on_the_day_of_their_study(file, monkeypatch):
    one = stated(file)
    began = (one.folder / "started.json").read_text()
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: None)
    run = one.runs[-1]
    begun = running._start(run, one.arms[-1], one.folder)
    begun.log.close()
    assert (run.folder / "started.json").read_text() == began
    with folders.open_run(run.folder, "seed = 0\n"):  # which no other file may be in before
        folders.record_start(run.folder)
    assert folders.read_start(run.folder) == folders.read_start(one.folder)


def test_a_study_that_could_not_say_when_it_began_says_so_later(file):
    one = stated(file)
    (one.folder / "started.json").unlink()
    stated(file)
    assert folders.read_start(one.folder) is not None


def test_a_folder_in_use_is_told_whatever_its_owner_writes_after(file):
    """Both write to one log: the run that is refused, and the one that goes on."""
    one = stated(file).runs[0]
    one.folder.mkdir(parents=True)
    log = one.folder.with_suffix(".log")
    refused = "tim-jax: runs/x is in use by process 1\n"
    log.write_text(f"{refused}step 12/80\n")
    process = subprocess.Popen(["sh", "-c", "exit 2"])
    process.wait()
    with open(log, "ab") as file_of_log:
        ended = running._Running(process, file_of_log, before=0)
        assert running._ended(one, ended) == running._BUSY
        of_an_earlier_one = ended._replace(before=len(refused))
        assert "ended with status 2: step 12/80" in running._ended(one, of_an_earlier_one)
        # Another call's run, which this one's process kept out, writes to the log as well.
        log.write_text(f"what went wrong\n{refused.replace('1', f'{process.pid} on a host')}")
        assert "ended with status 2: what went wrong" in running._ended(one, ended)
        log.write_text(f"{refused}step 12/80\n")
        process.returncode = -signal.SIGKILL
        words = "was killed by SIGKILL, as where memory is short: step 12/80"
        assert words in running._ended(one, of_an_earlier_one)


def test_a_verdict_needs_every_seed(file):
    one = stated(file)
    for run in one.runs[:-1]:
        write_run(run, [0.0, 0.1, 0.2 if "control" in run.arm else 0.5])
    first, second = verdicts(one)
    assert (first.p, first.corrected, first.least) == pytest.approx((1 / 3, 2 / 3, 2 / 3))
    assert "cannot be decided" in first.line(one.study.test)
    assert second.missing == (4,)
    assert "no verdict yet: without an outcome of seeds 4" in second.line(one.study.test)


def test_a_verdict_that_will_never_come_says_why(file):
    """A run that ended as not finite has no outcome, unless the study states one."""
    one = stated(file)
    for run in one.runs:
        write_run(run, [0.0, 0.1, 0.2])
    bad = next(run for run in one.runs if run.arm == "fp8+none" and run.seed == 4)
    (bad.folder / "ended.json").write_text("{}")
    first, second = (v.line(one.study.test) for v in verdicts(one))
    assert first == (
        "fp8+none against fp8+none+control: no verdict: fp8+none, seed 4: ended as not finite, for"
        " which outcome.not_finite would give an outcome"
    )
    assert "no verdict" not in second

    write_run(bad, [0.0, 0.1, "nan"], finished=False)  # it is finished already
    (bad.folder / "ended.json").unlink()
    first = verdicts(one)[0].line(one.study.test)
    assert "no verdict: fp8+none, seed 4: eval/reward not finite, for which outcome.not_f" in first


def test_a_metric_that_no_run_has_is_named(file):
    one = stated(file, FILE + '[outcome]\nmetric = "mismatch/k3"\n')
    for run in one.runs:
        write_run(run, [0.0, 0.1, 0.2], metric="mismatch/kl_k3")
    first = verdicts(one)[0].line(one.study.test)
    near = "no metric 'mismatch/k3'; did you mean 'mismatch/kl_k3'?"
    assert f"no verdict: fp8+none, seeds 3, 4: {near}; fp8+none+control, seeds 3, 4: " in first


def test_a_study_that_can_show_nothing_says_so_before_it_runs(file):
    def one(seeds):
        (folder := file.parent / str(seeds)).mkdir()
        shutil.copy(file.parent / "run.toml", folder)
        text = FILE.replace("[3, 4]", str(list(range(seeds))))
        return stated(folder / "one.toml", text + '[test]\nkind = "paired_permutation"\n')

    small = one(6)
    for run in small.runs:
        write_run(run, [0.0, 0.0, float("control" in run.arm) + run.seed])
    assert too_few_seeds(small) == (
        "2 comparisons of 6 seeds give no p after Holm's correction below 0.0625, and the level is"
        " 0.05: no difference can be shown; with 7 seeds one could"
    )
    assert all("cannot be decided" in v.line(small.study.test) for v in verdicts(small))
    assert too_few_seeds(one(7)) == ""


@pytest.mark.parametrize(
    ("take", "expected"), [("last", 2.5), ("mean", 2.0), ("highest", 4.0), ("lowest", 1.0)]
)
def test_the_outcome_is_what_the_rule_says(take, expected):
    """What was evaluated before training, at step 0, is no part of it."""
    lines = [{"step": i, "m": value} for i, value in enumerate([9.0, 1.0, 2.0, 1.0, 4.0])]
    rule = Outcome(metric="m", take=take, window=2 if take == "last" else 1)
    run = running.RunLines("a", 0, Path("a"), lines, finished=True)
    assert outcome(run, rule) == expected
    assert outcome(run._replace(finished=False), rule) is None
    ended = run._replace(note="ended: not finite")
    assert outcome(ended, rule) is None
    assert outcome(ended, Outcome(metric="m", not_finite=-1.0)) == -1.0


@pytest.mark.parametrize("kind", ["sign", "fisher"])
def test_the_direction_is_that_of_the_test_and_not_of_the_means(kind):
    """One collapsed run of the arm has a mean below the other's."""
    first, second = (1.0,) * 9 + (-100.0,), (0.0,) * 10
    ahead, p = exact_test(first, second, kind, at_least=0.5)
    verdict = Verdict("a", "b", first, second, lead=ahead, p=p, corrected=p, least=0.001)
    assert p < 0.05
    assert verdict.difference < 0
    assert ": higher (" in verdict.line(Test(kind=kind))


def p_value(*arguments, **options):
    return exact_test(*arguments, **options)[1]


def brute_force(first, second):
    """The share of divisions whose difference of means is as far from 0, by their list."""
    values, n = [*first, *second], len(first)
    found = abs(np.mean(first) - np.mean(second))
    differences = [
        abs(np.mean([values[i] for i in some]) - np.mean(np.delete(values, some)))
        for some in combinations(range(len(values)), n)
    ]
    return np.mean([d >= found - 1e-12 for d in differences])


def test_divisions_that_tie_in_decimals_are_counted():
    """Outcomes far from 0 and near each other: rounding is not small beside a difference."""
    first, second = [200.2, 200.2, 200.0, 200.0, 200.0], [200.2, 200.8, 200.6, 201.0, 200.6]
    assert p_value(first, second, "permutation") == pytest.approx(6 / 252)


def test_exchanges_that_tie_in_decimals_are_counted():
    """Each pair differs by 0.1, one of five the other way: 2 (1 + 5) of 32 exchanges."""
    first = [2000.1, 2000.3, 2000.7, 2000.6, 2000.8]
    second = [2000.2, 2000.4, 2000.8, 2000.5, 2000.9]
    assert p_value(first, second, "paired_permutation") == pytest.approx(12 / 32)


OUTCOMES = st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=2, max_size=5)


@given(OUTCOMES, OUTCOMES)
def test_the_permutation_test_is_exact(first, second):
    second = (second * 3)[: len(first)]
    expected = brute_force(first, second)
    assert p_value(first, second, "permutation") == pytest.approx(expected)


@given(OUTCOMES)
def test_tests_of_pairs_agree_with_their_definition(first):
    second = [1 - x for x in first]
    differences = np.subtract(first, second)
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(first))).reshape(len(first), -1)
    share = np.mean(np.abs(differences @ signs) >= abs(differences.sum()) - 1e-12)
    assert p_value(first, second, "paired_permutation") == pytest.approx(share)
    higher, lower = int((differences > 0).sum()), int((differences < 0).sum())
    n = higher + lower
    tail = sum(math.comb(n, k) for k in range(max(higher, lower), n + 1)) / 2**n
    assert p_value(first, second, "sign") == pytest.approx(min(1.0, 2 * tail))


def test_fishers_test_counts_successes():
    first, second = [0.9, 0.9, 0.9, 0.9], [0.1, 0.2, 0.3, 0.1]
    expected = 2 / math.comb(8, 4)
    assert p_value(first, second, "fisher", at_least=0.8) == pytest.approx(expected)
    assert least_p("fisher", 4) == pytest.approx(expected)
    assert least_p("sign", 6) == pytest.approx(2 / 64)


def test_holms_correction_is_that_of_its_paper():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_a_verdict_says_the_direction():
    verdict = Verdict(
        "a", "b", (1.0,) * 4, (0.0,) * 4, lead=1.0, p=0.02, corrected=0.03, least=0.02
    )
    assert verdict.line(Test()).startswith("a against b: higher (1 against 0, p = 0.02, 0.03 after")
    assert "no difference shown" in verdict.line(Test(level=0.025))


def test_the_shipped_studies_are_whole(capsys):
    assert cli.main(["study", "--list"]) == 0
    listed = capsys.readouterr().out
    for path, hypothesis in study.shipped():
        assert path.name in listed
        assert hypothesis in listed
        one = running.read(path)
        base = toml.read_toml(path.parent / one.base)
        if isinstance(one, Study):
            found = definition.arms(one, base, source=path.name)
            assert all(arm.control or arm.uncontrolled for arm in found if arm.divergent)
            continue
        configs = measurement.horizons(one, definition.merged(base, one.common))
        # Others have a model or problems that come from the network.
        if not path.stem.endswith("_gpu") and "smollm2" not in path.stem:
            measurement.check(one, configs)


def test_a_policy_that_did_not_end_well_is_not_measured(tmp_path, monkeypatch):
    """Its newest checkpoint may be of any step."""
    path = tmp_path / "gradient.toml"
    (tmp_path / "base.toml").write_text(tiny.RUN)
    path.write_text(
        'kind = "gradient"\nbase = "base.toml"\nhypothesis = "x"\n'
        'common.learner.objective = { preset = "rloo" }\n'
        'source.int4.mismatch = [{ name = "quantised_weights", dtype = "int4" }]\n'
    )
    status = NOT_FINITE.status
    ends = [sys.executable, "-c", f"import sys; print('no number'); sys.exit({status})"]
    monkeypatch.setattr(running, "_command", lambda path: ends)
    for _ in range(2):  # the second time nothing is left to run
        with pytest.raises(InputError, match=r"ended before its last step .*no policy to"):
            study.run(path, folder=tmp_path / "out", jobs=1)


def test_a_measurement_of_episodes_is_refused(tmp_path, capsys):
    base = Path(__file__).parents[3] / "configs" / "turns.toml"
    path = tmp_path / "episodes.toml"
    path.write_text(
        f'kind = "gradient"\nbase = {json.dumps(str(base))}\nhypothesis = "x"\n'
        'source.int4.mismatch = [{ name = "quantised_weights", dtype = "int4" }]\n'
        "horizon.one = {}\n"
    )
    assert cli.main(["study", str(path), "--folder", str(tmp_path / "out")]) == 2
    assert "sampling.max_turns = 4: a measurement draws responses of one turn" in (
        capsys.readouterr().err
    )


def test_a_task_that_cannot_be_made_is_refused_before_training(tmp_path, capsys):
    base = Path(__file__).parents[3] / "configs" / "small.toml"
    path = tmp_path / "few.toml"
    path.write_text(
        f'kind = "gradient"\nbase = {json.dumps(str(base))}\nhypothesis = "x"\n'
        'source.int4.mismatch = [{ name = "quantised_weights", dtype = "int4" }]\n'
        "horizon.one.task.parameters = { digits = [1, 1], eval_size = 99 }\n"
    )
    assert cli.main(["study", str(path), "--folder", str(tmp_path / "out")]) == 2
    assert "different problems for eval_size=99" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_arguments_end_in_one_line(capsys, file):
    for words in (["study"], ["study", "x", "--list"], ["study", str(file.parent / "no.toml")]):
        assert cli.main(words) == 2
        line = capsys.readouterr().err
        assert line.startswith("tim-jax: ")
        assert line.count("\n") == 1


# Two arms of the same programs, which a moment compiles; a step takes long enough to be met.
KILLED = """
base = "run.toml"
hypothesis = "longer problems have longer responses"
seeds = [3]

[common]
steps = 20
exact = "report"
numerics.family = "native"
model.architecture.num_layers = 1
task.reward = "slow_rewards:by_length"
task.reward_in_process = true
warmup.steps = 0
eval.every = 0
[dial.short]
task.parameters.digits = [1, 3]
[dial.long]
task.parameters.digits = [2, 3]
[outcome]
metric = "reward"
"""
REWARDS = """
import time


def by_length(prompts, completions, answers):
    time.sleep(0.1)
    return [len(completion) / 8 for completion in completions]
"""
# One depth alone: below it a run makes and removes folders while they are looked through.
METRICS = "runs/*/*/metrics.jsonl"


def started(file, folder, *words):
    """`tim-jax study`, beside the file with the rewards."""
    return subprocess.Popen(
        [sys.executable, "-m", "tim_jax", "study", str(file), "--folder", str(folder), *words],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(*arguments):
    """What a study says that comes to its end."""
    process = started(*arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def results(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob(METRICS)}


def at_work(folder):
    """How many runs have written a step; the first line is of the start."""
    return sum(lines.count(b"\n") > 1 for lines in results(folder).values())


@pytest.mark.slow(minutes=6)
def test_a_study_that_is_killed_goes_on_to_the_same_result(file, tmp_path):
    """SIGKILL when the first run has written a step, which goes on; SIGTERM when the second has."""
    file.write_text(KILLED)
    (tmp_path / "slow_rewards.py").write_text(REWARDS)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finished(file, whole, "--jobs", "2")
    for runs, (end, status) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 143))):
        process = started(file, cut)
        while process.poll() is None and at_work(cut) <= runs:
            time.sleep(0.05)
        process.send_signal(end)
        _, err = process.communicate()
        assert process.returncode == status, err
    finished(file, cut)
    assert "resumed after step" in (cut / "runs" / "long" / "seed-3.log").read_text()
    assert len(results(whole)) == 2
    assert results(cut) == results(whole)
    assert "2 runs, 2 of them done" in finished(file, cut)
