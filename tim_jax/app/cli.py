"""The command line: thin commands over the jobs, and what they take from the environment."""

import argparse
import gc
import io
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tim_jax.app.arguments import Parser, RefusedError, add_commands
from tim_jax.common import errors, inputs, machine, waiting
from tim_jax.common.errors import Ending, InputError, writing

if TYPE_CHECKING:
    from tim_jax.app.config.run import RunConfig

# What JAX's own errors say when another process is gone: of the transport, or of the coordinator.
_SIGNS_OF_LOSS = ("gloo", "Gloo", "Connection", "coordination", "heartbeat", "UNAVAILABLE")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, one of `errors.ENDINGS`."""
    _replace_closed_streams()
    try:
        arguments = _arguments(argv)
    except RefusedError as error:
        return _ended(errors.BAD_INPUT, f"{error}")
    _quiet()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A completion may have any character; one that the output cannot show must not end all.
        sys.stdout.reconfigure(errors="replace")
    with waiting.shown():
        if _one_of_several(arguments):
            return _run_with_others(arguments)
        _keep_programs()
        return _run(arguments)


def run_and_exit() -> NoReturn:
    """Runs one command and ends the process: what the installed `tim-jax` calls."""
    status = main()
    # A second Ctrl-C ends the process, in place of a traceback of what libraries do at its end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threads = threading.enumerate()
    if status and any(type(thread).__module__.startswith("orbax") for thread in threads):
        # After a save that failed, they wait ten minutes for what never comes.
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(arguments: argparse.Namespace) -> int:
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        hint = "set TMPDIR to a folder that can be written"
        return _ended(errors.BAD_INPUT, f"{error.strerror}; {hint}")
    try:
        if arguments.run not in (_study, _report, _translate):  # which compute no model themselves
            _check_bits()
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except errors.EXPECTED as error:
        return _ended(error.ending, f"{error}")
    except MemoryError as error:
        return _ended(errors.OUT_OF_MEMORY, f"on this machine: {error}")
    except KeyboardInterrupt:
        resumed = arguments.run in (_train, _study)
        goes_on = "; the same command goes on from the last checkpoint" if resumed else ""
        return _ended(errors.INTERRUPTED, goes_on)
    except (SystemExit, GeneratorExit, OSError) as error:
        lost = errors.lost_output()
        if lost or isinstance(error.__context__, BrokenPipeError):  # which rich makes a SystemExit
            reason = lost or "nobody reads it"
            return _ended(errors.BAD_INPUT, f"cannot write to standard output: {reason}")
        if isinstance(error, PermissionError) and error.filename:
            return _ended(errors.BAD_INPUT, f"{error.filename}: {error.strerror}")
        if isinstance(error, OSError):
            raise
        # No command ends so by itself: code of the user's did. Its status must not become ours.
        what = f"{type(error).__name__}({error})"
        return _ended(errors.BAD_INPUT, f"not done: code that the command called raised {what}")


def _check_bits() -> None:
    bits = os.environ.get("JAX_ENABLE_X64", "")
    if bits.lower() in ("1", "true", "t", "yes", "y", "on"):
        raise InputError(
            f"JAX_ENABLE_X64 = {bits} in the environment: models are computed in 32 bits; unset it"
        )


def _run_with_others(arguments: argparse.Namespace) -> int:
    aborted = errors.LOST.line.format("most likely: JAX's runtime aborted this one")
    with machine.print_if_aborted(aborted):
        try:
            status = _run(arguments)
        except Exception as error:
            from jax.errors import JaxRuntimeError

            reason = " ".join(str(error).split())
            lost = any(sign in reason for sign in _SIGNS_OF_LOSS)
            if isinstance(error, JaxRuntimeError) and lost:
                status = _ended(errors.LOST, reason[:200])
            else:
                traceback.print_exc()
                status = errors.FAILED.status
        if status:
            # JAX would wait at this process's end for others that may be gone, or abort it here.
            _leave(status)
    return status


def _ended(ending: Ending, details: str = "") -> int:
    # A name of a file, or what a reward raised, may have several lines; the message has one.
    details = inputs.one_line(errors.without_secrets(details, os.environ))
    print(ending.line.format(details), file=sys.stderr)
    return ending.status


def _one_of_several(arguments: argparse.Namespace) -> bool:
    names = ("coordinator", "processes", "process")
    given = any(getattr(arguments, name, None) is not None for name in names)
    return given or getattr(arguments, "distributed", False)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed; changes to the config may stand before and after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (rest[0].startswith("-") or not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _replace_closed_streams() -> None:
    """Gives what is printed a place where a shell closed the stream (`>&-`), which is None then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (to the end of the process)


def _quiet() -> None:
    """Silences what libraries say about themselves on stderr."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for library in ("TRANSFORMERS", "HF_HUB", "DATASETS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    # jaxlib 0.10.1 logs a false error for every program from the cache on AMD processors.
    false_errors = metadata.version("jaxlib").startswith(("0.10.0", "0.10.1"))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if false_errors else "2")
    os.environ.setdefault("JAX_LOGGING_LEVEL", "CRITICAL" if false_errors else "ERROR")
    for library in ("transformers", "matplotlib"):
        logging.getLogger(library).setLevel(logging.ERROR)
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _report_unraisable:
        sys.unraisablehook = partial(_report_unraisable, otherwise=before)
    if not sys.warnoptions:  # nobody asked for them by `python -W` or PYTHONWARNINGS
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").propagate = False
        logging.getLogger("py.warnings").addHandler(logging.NullHandler())


def _report_unraisable(
    error: "sys.UnraisableHookArgs", *, otherwise: Callable[["sys.UnraisableHookArgs"], object]
) -> None:
    if issubclass(error.exc_type, KeyboardInterrupt):
        # It came while garbage was collected, where JAX is called and an exception is lost.
        main_thread = threading.main_thread().ident
        again = threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()
    # When a save fails, each array that is still being written says this with a traceback.
    elif str(error.exc_value) != "Event loop is closed":
        otherwise(error)


def _keep_programs() -> None:
    """Keeps compiled programs from run to run, unless JAX was already told where to."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    programs = _kept_folder() / "programs"
    _remove_cut(programs)
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(4 * 2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }.items():
        os.environ.setdefault(name, value)


def _remove_cut(programs: Path) -> None:
    """Removes the programs that a full disk or a power cut has left in part.

    JAX writes a program's time of use after it. It never writes a program anew, and before 0.12 it
    keeps no other beside one without a time.
    """
    with suppress(OSError):
        for program in programs.glob("*-cache"):
            used = program.with_name(f"{program.name.removesuffix('cache')}atime")
            if not used.exists() or not program.stat().st_size:
                program.unlink(missing_ok=True)


def _kept_folder() -> Path:
    """What is compiled and measured on this kind of machine: ~/.cache/tim_jax/PROCESSOR.

    Several machines of different kinds may share a home.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as containers have
        home = _folder_of_this_call()
    return Path(home, "tim_jax", machine.kind())


@cache
def _folder_of_this_call() -> str:
    return tempfile.mkdtemp(prefix="tim_jax-")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tim-jax",
        description="RL for language models with sampler and learner log-probs equal to the bit.",
    )
    about = f"tim-jax {metadata.version('tim-jax')}, jax {metadata.version('jax')}"
    parser.add_argument("--version", action="version", version=about)
    runs = {
        "train": _train,
        "eval": _evaluate,
        "generate": _generate,
        "export": _export,
        "audit": _audit,
        "diagnose": _diagnose,
        "plan": _plan,
        "study": _study,
        "report": _report,
        "translate": _translate,
    }
    add_commands(parser, runs)
    return parser


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Arguments that a job takes by the same names."""
    return {name: getattr(arguments, name) for name in names}


# The jobs are imported by the command that needs them, so that --help and bad arguments do not
# wait for JAX, and once its config is known to be right: a mistake in it is named without delay.


def _config(arguments: argparse.Namespace) -> "RunConfig":
    gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the time
    from tim_jax.app.config import toml

    gc.freeze()
    gc.enable()
    return toml.load(arguments.config, arguments.overrides)


def _train(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from tim_jax import placement
    from tim_jax.app.jobs import train

    if _one_of_several(arguments):
        placement.join(arguments.coordinator, arguments.processes, arguments.process)
    folder = train.train_run(config)
    if placement.leads():
        what = "samples, chart and model" if config.run.export else "samples and chart"
        print(f"metrics, {what}: {folder}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from tim_jax.app.jobs import train

    metrics = train.evaluate_run(config, model=arguments.model)
    for name, value in metrics.items():
        if name.endswith("_error"):
            continue
        mean = "reward" if name.startswith("mean@") else name  # the same number
        error = metrics.get(f"{mean}_error")
        interval = "" if error is None else f" ± {1.96 * error:.4f} (95%)"
        print(f"{name:>12}  {value:.4f}{interval}")
    _write(arguments.json, json.dumps(metrics, indent=2))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    if not all(arguments.prompt):
        raise InputError("the prompt is empty; give it some text to go on from")
    from tim_jax.app.jobs import models
    from tim_jax.app.run import display
    from tim_jax.placement import Placement

    rows = models.generate(
        arguments.model,
        arguments.prompt,
        shape=_given(arguments, "temperature", "top_k", "top_p"),
        chat_template=False if arguments.plain else "auto",
        where=Placement(**_given(arguments, "data", "fsdp", "expert", "tensor")),
        measured=_kept_folder() / "measured",
        **_given(arguments, "samples", "max_tokens", "dtype", "seed", "family"),
    )
    for prompt, completion, log_prob in rows:
        shown = (display.printable_lines(text) for text in (prompt, completion))
        print("{}\n  -> {}   (log-prob {:.3f})".format(*shown, log_prob))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from tim_jax.app.jobs import models

    own = _given(arguments, "step", "dtype", "adapter")
    step = models.export(arguments.source, arguments.folder, **own)
    loads = "PEFT" if arguments.adapter else "transformers"
    print(f"checkpoint of step {step}, as {loads} loads it: {arguments.folder}")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from tim_jax.app.jobs import audit

    if arguments.sampler is not None:
        return _ablate(arguments)
    for name, value in _given(arguments, "markdown", "chart", "prompts", "samples").items():
        if value is not None:
            raise InputError(f"--{name} goes with --sampler")
    family = arguments.family or "auto"
    own = _given(arguments, "quick", "interpret", "dtype", "several_tiles")
    report, passed = audit.audit_model(arguments.model, family=family, **own)
    _write(arguments.json, report)
    return 0 if passed else 1


def _ablate(arguments: argparse.Namespace) -> int:
    from tim_jax.app.config import toml
    from tim_jax.app.jobs import audit
    from tim_jax.instruments.auditing import ablation
    from tim_jax.instruments.plan import budget

    for name, value in _given(arguments, "quick", "family", "interpret", "several_tiles").items():
        if value:
            raise InputError(f"--{name.replace('_', '-')} does not go with --sampler")
    arms = ablation.alone_and_together(toml.read_dial(arguments.sampler))
    sizes = {"prompts": arguments.prompts or 32, "samples": arguments.samples or 8}
    with budget.explaining_memory(lambda: {"": ("--prompts", "--samples", "--dtype bfloat16")}):
        bench = audit.make_bench(arguments.model, **sizes, dtype=arguments.dtype, arms=arms)
        result = audit.report(bench, arms)
    _write(arguments.json, result.json)
    _write(arguments.markdown, result.markdown)
    if arguments.chart is not None and not result.differs:
        print(f"{arguments.chart} was not drawn: no token differs")
    elif arguments.chart is not None:
        from tim_jax.app.run import charts

        charts.source_chart(result.record, arguments.chart)
    return 0 if result.exact else 1


def _study(arguments: argparse.Namespace) -> int:
    if arguments.list == (arguments.study is not None):
        raise InputError("study: name a file, or give --list for those that are shipped")
    from tim_jax.instruments import study

    if arguments.list:
        study.say_shipped()
    else:
        study.run(arguments.study, folder=arguments.folder, jobs=arguments.jobs)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    for folder in arguments.folders:
        if not folder.exists():
            raise InputError(f"{folder}: no such folder")
    from tim_jax.instruments.study import report

    for path in report.write(arguments.folders, arguments.out):
        print(path)
    return 0


def _translate(arguments: argparse.Namespace) -> int:
    from tim_jax.app.config import verl, verl_keys

    source = str(arguments.file)
    found = verl.translate(verl_keys.read_yaml(source), source=source)
    written = verl.text(found, source=arguments.file.name).rstrip()
    print(written)
    _write(arguments.out, written)
    return 0


def _diagnose(arguments: argparse.Namespace) -> int:
    if not arguments.rollouts.exists():
        raise InputError(f"rollouts {arguments.rollouts}: no such file")
    from tim_jax import api
    from tim_jax.instruments.diagnosis.rollouts import RolloutsError, by_kind

    how = _given(arguments, "format", "temperature", "top_k", "top_p", "log_probs", "skip_bad")
    model = api.load(arguments.model, dtype=arguments.dtype)
    try:
        found = api.diagnose(model, arguments.rollouts, weights=arguments.candidate_weights, **how)
    except RolloutsError as error:
        if error.total == 1:
            raise
        for line in error.lines:
            print(line, file=sys.stderr)
        raise InputError(error.summary) from error
    for line in by_kind(found.problems):
        print(f"skipped: {line}", file=sys.stderr)
    print(found)
    _write(arguments.json, found.json)
    _write(arguments.html, found.html)
    return 0 if found.normal else 1


def _plan(arguments: argparse.Namespace) -> int:
    _for_libtpu()
    if (file := arguments.architecture) is not None:  # else rules would hold of the config's model
        of_file = f"model={{path={json.dumps(str(file), ensure_ascii=False)}}}"
        arguments.overrides = [*arguments.overrides, of_file]
    config = _config(arguments)
    from tim_jax.app.jobs import planning
    from tim_jax.instruments.plan import as_json, text

    plan = planning.plan_run(
        config,
        arguments.topology,
        architecture=arguments.architecture,
        layers=planning.parse_layers(arguments.layers),
        mean_tokens=arguments.mean_tokens,
        searching=not arguments.quick,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(text(plan))
    _write(arguments.json, json.dumps(as_json(plan), indent=2))
    return 0 if plan.fits else 1


def _for_libtpu() -> None:
    """What libtpu wants to know before it compiles on a machine without TPU."""
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else its lock file keeps other processes out
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_LOG_DIR": "disabled",
    }.items():
        os.environ.setdefault(name, value)


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    from tim_jax.model.files import write_text

    with writing(path):
        write_text(path, text + "\n", errors="backslashreplace")
