"""What the fuzzer stands on: commands run in this process, and a model, a run and rows to spoil.

A command runs as `cli.main` runs it, up to where it would begin to compile: `Began` is raised in
place of what is expensive, which is

    train, eval   the compiled programs: after config, memory, model, task and text are made, and
                  the prompts of the first steps and of the evaluation are encoded
    generate      the drawing: after the prompts are encoded and the weights are read
    audit         the audit itself, or with --sampler the measurement: after the model is read
    plan          the planning, for this machine's devices in place of libtpu's
    study         the runs: after its arms are made and study.json is written
    diagnose      the forward: after the model and the rollouts are read

Row ranges are not measured, no hub is asked, and no other process is joined. `export` does all,
`report` all but its PNG files and the charts' runtime in its page.
"""

import json
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import jax

from tim_jax import placement
from tim_jax.api import diagnosing, rollouts
from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import audit, planning, train
from tim_jax.app.run import assembly, folders, sources
from tim_jax.common import machine
from tim_jax.common.errors import ENDINGS, InputError
from tim_jax.instruments import study as studies
from tim_jax.instruments.study import report, running
from tim_jax.instruments.study.definition import Study
from tim_jax.instruments.study.gradient import BYPASS, RECOMPUTE
from tim_jax.instruments.study.measurement import Compared
from tim_jax.model import fitting, hf
from tim_jax.rl import programs

LONGEST_LINE = 1100  # characters of a message
SECONDS = 120  # of the processor, or ten times as many by the clock: the command hangs
MEMORY = 8 << 30  # bytes of address space that a command may take
ENCODED = 32  # prompts

CONFIG = {
    "seed": "0",
    "steps": "3",
    "exact": '"required"',
    "model.architecture.hidden_size": "16",
    "model.architecture.num_layers": "2",
    "model.architecture.num_heads": "2",
    "model.architecture.num_kv_heads": "1",
    "model.architecture.head_dim": "8",
    "model.architecture.intermediate_size": "24",
    "model.architecture.max_positions": "24",
    "sampling.samples": "4",
    "sampling.max_prompt_length": "8",
    "sampling.max_tokens": "8",
    "sampling.stop_tokens": "[7, 9]",
    "learner.prompts_per_step": "2",
    "learner.mode": '"recompute"',
    "learner.corrections": '[{ name = "token_tis", cap = 2.0 }]',
    "optimizer.learning_rate": "0.01",
    "task.kind": '"builtin"',
    "task.name": '"running_sums"',
    "task.parameters.digits": "[1, 3]",
    "task.parameters.eval_size": "16",
    "eval.every": "2",
    "eval.prompts": "5",
    "eval.samples": "2",
    "run.folder": '"made"',
    "run.checkpoint_every": "1",
}
STUDY = {
    "base": '"good.toml"',
    "hypothesis": '"an fp8 cache lowers the reward"',
    "seeds": "[0, 1]",
    "common.steps": "2",
    "dial.exact": "{}",
    "dial.fp8.sampler.mismatch": '[{ name = "kv_cache", dtype = "float8_e4m3fn" }]',
    "correction.tis.learner.corrections": '[{ name = "token_tis" }]',
    "outcome.metric": '"reward"',
    "outcome.take": '"last"',
    "outcome.window": "1",
    "outcome.at_least": "0.5",
    "test.kind": '"permutation"',
    "test.level": "0.05",
    "test.compare": '[["fp8+tis", "exact+tis"]]',
}
GRADIENT = {
    "kind": '"gradient"',
    "base": '"good.toml"',
    "hypothesis": '"int4 weights bias the gradient"',
    "batches": "4",
    "states": "2",
    "common.steps": "2",
    "common.learner.objective.kl_coefficient": "0.0",
    "source.int4.mismatch": '[{ name = "quantised_weights", dtype = "int4" }]',
    "remedy.tis.corrections": '[{ name = "token_tis" }]',
    "horizon.4.task.parameters.digits": "[3, 3]",
}
ROLLOUT = {
    "prompt_token_ids": [3, 4, 5],
    "response_token_ids": [6, 8, 7],
    "logprobs": [-1.5, -2.25, -0.5],
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "top_logprobs": [{"6": -1.5}, {"8": -2.25, "6": -1.0}, {"7": -0.5}],
    "weights_version": "1",
    "prompt": "1+2=",
    "text": "3;",
    "mask": [1, 1, 0],
    "finish_reason": "stop",
}


WAIT = re.compile(r"tim-jax: still .* after \d+ s\b.*\n")  # said on a machine that is slow
ROW = re.compile(r"\S+, (line|row) \d+\b|\.\.\. and \d+ more$")


class Began(BaseException):
    """The command was right: it came to where it would begin to compute."""


class Outcome(NamedTuple):
    """How a command ended. `status` is None if it `Began`."""

    status: int | None
    err: str


def run(arguments: list[str]) -> Outcome:
    """Runs a command with its standard error, that of other languages included, in a file."""
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as err, _captured(err.fileno()):
        status = None
        with suppress(Began), _limited():
            status = _status(arguments)
        sys.stderr.flush()
        err.seek(0)
        return Outcome(status, "".join(line for line in err if not WAIT.fullmatch(line)))


def _status(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except _Left as error:
        return error.status
    except SystemExit as error:  # of --help
        return error.code if isinstance(error.code, int) else 1


@contextmanager
def _captured(to: int):
    """Standard output, which must be able to take what is printed, is thrown away."""
    kept = os.dup(2)
    own = sys.stdout, sys.stderr
    try:
        os.dup2(to, 2)
        with (
            open(os.devnull, "w", encoding="utf-8") as out,
            open(2, "w", errors="backslashreplace", closefd=False) as err,
        ):
            sys.stdout, sys.stderr = out, err
            yield
    finally:
        sys.stdout, sys.stderr = own
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _limited():
    def hung(number: int, frame: Any) -> None:
        raise AssertionError(f"the command hangs: {signal.Signals(number).name}")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, memory[1]))
    before = [signal.signal(one, hung) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        for one, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(one, handler)


def check(outcome: Outcome, *, rows: bool = False) -> None:
    """A command begins or is done, without a word; or says why not, in one clear line.

    Args:
      rows: the command names bad rows of a file in lines before the last.
    """
    err = outcome.err
    assert "Traceback" not in err, err
    if outcome.status in (None, 0):
        # A checkpoint that is damaged, and what is taken in its place, are said.
        assert all(line.startswith("checkpoint of step") for line in err.splitlines()), err
        return
    lines = {ending.status: ending.line.partition("{")[0] for ending in ENDINGS}
    assert outcome.status in lines, outcome
    assert outcome.status == 2, outcome  # nothing was computed that could end otherwise
    assert err.endswith("\n"), err
    *before, last = err[:-1].split("\n")
    assert last.startswith(lines[outcome.status]), err
    assert all(rows and ROW.match(line) for line in before), err
    for line in (*before, last):
        assert line.isprintable(), err
        assert len(line) < LONGEST_LINE, f"{len(line)} characters: {line}"


def stand(patch) -> None:
    """Puts `Began` in place of what is expensive; see the module."""

    def began(*args: Any, **options: Any) -> Any:
        raise Began

    def offline(*args: Any, **options: Any) -> Any:
        raise InputError("no hub can be reached from here")

    def evaluated(config: RunConfig, *, training: bool = True, **options: Any) -> Any:
        job = assemble(config, training=training, **options)
        return job if training else _encoded(job)

    def checked(*args: Any, **options: Any) -> Any:
        check_arms(*args, **options)
        raise Began

    def runtime(name: str) -> Any:
        return SimpleNamespace(javascript_bundle=lambda: "")

    assemble, check_arms = train.assemble, audit.ablation.check
    here = SimpleNamespace(tracing=nullcontext, devices=tuple(jax.devices()))
    patch.setattr(fitting, "calibrate", lambda config, numerics, **_: numerics)
    patch.setattr(hf, "snapshot_download", offline)
    patch.setattr("tim_jax.tasks.rows._hub", offline)
    patch.setattr(placement, "join", began)
    patch.setattr(machine, "print_if_aborted", lambda line: nullcontext())
    patch.setattr(os, "_exit", _left)
    patch.setattr(train, "begun", lambda job, run: _encoded(job))
    patch.setattr(train, "assemble", evaluated)
    patch.setattr(rollouts, "draw", began)
    patch.setattr(audit.auditing, "audit", began)
    patch.setattr(audit.ablation, "check", checked)
    patch.setattr(planning.topology, "target", lambda name: here)
    patch.setattr(planning.plan, "make", began)
    patch.setattr(running, "run", began)
    patch.setattr(diagnosing.verdict, "diagnose", began)
    patch.setattr(report, "importlib", SimpleNamespace(import_module=runtime))
    patch.setattr(report.findings, "_finished", lambda chart, title: _Chart(chart))


class _Chart:
    """A figure that is not drawn."""

    def __init__(self, chart: Any):
        self.to_dict = chart.to_dict

    def properties(self, **properties: Any) -> "_Chart":
        return self

    def save(self, file: BinaryIO, **options: Any) -> None:
        file.write(b"a figure")


class _Left(BaseException):
    """How one of several processes leaves."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def _left(status: int) -> None:
    raise _Left(status)


def _encoded(job: train.Job) -> Any:
    with closing(job.task):
        for part in (job.task.train, job.task.evaluation):
            some = [part[i] for i in range(min(ENCODED, len(part)))]
            job.text.prompts(some, range(len(some)))
    raise Began


def lines(config: Mapping[str, str]) -> str:
    """A config as TOML text of dotted keys."""
    return "".join(f"{key} = {value}\n" for key, value in config.items())


def furnish(folder: Path) -> None:
    """Configs, a model, runs, a study, and rows of a dataset and of rollouts, as they should be."""
    folder.mkdir(exist_ok=True)
    (folder / "good.toml").write_text(lines(CONFIG))
    config = toml.load(folder / "good.toml")
    model = sources.make_model(config)
    hf.save(folder / "model", model.params, model.config, tokenizer=model.tokenizer)
    # For devices that are given, nothing is measured.
    execution = assembly.make_execution(config, model, devices=tuple(jax.devices()))
    state = programs.build(assembly.make_training(config, execution)).init(model.params)
    with folders.open_run(folder / "run", toml.dump(config)) as run:
        run.metrics.write(0, {})
        run.save(0, folders.saved(state, None))
    rows = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(8)]
    write_lines(folder / "rows.jsonl", rows)
    write_lines(folder / "rollouts.jsonl", [ROLLOUT] * 2)
    _furnish_studies(folder)


def _furnish_studies(folder: Path) -> None:
    """The files of studies, and a finished study beside them."""
    (folder / "study.toml").write_text(lines(STUDY))
    (folder / "gradient.toml").write_text(lines(GRADIENT))
    study, base = running.read(folder / "study.toml"), toml.read_toml(folder / "good.toml")
    assert isinstance(study, Study)
    stated = studies.stated(study, base, folder / "study", source="study.toml")
    configs = {arm.name: toml.dump(arm.config(0, Path("made"))) for arm in stated.arms}
    for run in stated.runs:
        write_run(run.folder, configs[run.arm])
    gradient = running.read(folder / "gradient.toml")
    running.state(gradient, [], folder / "gradient", seeds=[0])
    write_lines(folder / "gradient" / "measured.jsonl", [_measured()])


def _measured() -> dict[str, Any]:
    """A record of a study at fixed weights."""
    parts = {name: [0.5, 0.1] for name in Compared._fields}
    metrics = {name: [0.2, 0.01] for name in report.findings.METRICS}
    return {
        "horizon": "4",
        "source": "int4",
        "estimators": {BYPASS: parts, RECOMPUTE: parts, "tis": parts},
        "signs": {"positive": parts, "negative": parts},
        "metrics": metrics,
        "exact_metrics": metrics,
        "reward_difference": [0.0, 0.1],
        "longest": 4.0,
        "score_norm": 1.5,
        "variation_largest": 0.1,
        "bound": 4.8,
    }


def write_run(folder: Path, config: str) -> None:
    """A finished run of two steps, as far as a report reads it."""
    (folder / "checkpoints" / "2").mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    steps = [{"step": step, "reward": 0.5, "response_length": 4.0} for step in (1, 2)]
    write_lines(folder / "metrics.jsonl", steps)
    shown = {"prompt": "1+2=", "completion": "3;", "answer": "3;", "reward": 1.0}
    write_lines(folder / "samples.jsonl", [{"step": step} | shown for step in (1, 2)])


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def listing(folder: Path) -> dict[str, int]:
    """What is in a folder: relative path -> time of the last change, 0 for folders."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): 0 if path.is_dir() else path.lstat().st_mtime_ns
        for path in paths
    }


def keys() -> list[str]:
    """All dotted keys that a config can have."""
    return sorted(set(_below(RunConfig, "")))


def _below(section: type, prefix: str) -> Iterator[str]:
    for name, kind in toml._keys(section).items():
        yield f"{prefix}{name}"
        for inner in toml._sections(kind):
            yield from _below(inner, f"{prefix}{name}.")
