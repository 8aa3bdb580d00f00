"""How arguments are read: what argparse calls with a text, and the options of some commands."""

import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tim_jax.common import inputs
from tim_jax.common.errors import InputError

# Without the JAX of numerics.
DTYPES = ("float32", "bfloat16", "float16")
FAMILIES = ("auto", "tiles", "native", "pallas_gpu", "pallas_mosaic_gpu", "pallas_tpu")
A_MODEL = "folder, hub name or run folder, or tiny, which comes with the package"
CHARTS = (".png", ".pdf", ".svg")
KERNELS = f"kernels: {', '.join(FAMILIES)}; auto: tiles on CPU, pallas_gpu or pallas_tpu there"


T = TypeVar("T")


class RefusedError(Exception):
    """The value of an argument is wrong. No `ValueError`, of which argparse would make its own."""


class Parser(ArgumentParser):
    """Refuses in one line what argparse would refuse in several."""

    def error(self, message: str) -> NoReturn:
        """Raises `RefusedError`. The program's name, which the line begins with, is left out."""
        command = self.prog.partition(" ")[2]
        where = f"{command}: " if command else ""
        raise RefusedError(f"{where}{message}; see {self.prog} --help")


def add_command(commands: Any, name: str, about: str, run: Callable[..., int]) -> ArgumentParser:
    """Adds a command, whose own page says what it does as well as the list of commands."""
    description = f"{about[0].upper()}{about[1:]}."
    parser = commands.add_parser(name, help=about, description=description)
    parser.set_defaults(run=run)
    return parser


def add_flag(parser: ArgumentParser, option: str, about: str) -> None:
    """Adds an option without a value."""
    parser.add_argument(option, action="store_true", help=about)


def add_output(
    parser: ArgumentParser, option: str, about: str, endings: Sequence[str] = ()
) -> None:
    """Adds an option that is a file to write, which is refused before any work is done for it.

    Args:
      endings: of names that it may have; none for any.
    """

    def read(text: str) -> Path:
        chosen = path(text)
        reason = _why_not_written(chosen)
        if not reason and endings and chosen.suffix.lower() not in endings:
            reason = f"its name must end in {', '.join(endings)}"
        if reason:
            raise RefusedError(f"{option}: cannot write {inputs.shown(text)}: {reason}")
        return chosen

    parser.add_argument(option, type=read, metavar="FILE", help=about)


def _why_not_written(file: Path) -> str:
    if os.path.isdir(file):
        return "it is a folder"
    if os.path.exists(file):
        return "" if os.access(file, os.W_OK) else "you may not write to it"
    if not os.path.isdir(file.parent):
        return f"there is no folder {inputs.shown(str(file.parent))}"
    may = os.access(file.parent, os.W_OK | os.X_OK)
    return "" if may else f"you may not write to the folder {inputs.shown(str(file.parent))}"


def add_kernels(parser: ArgumentParser, **options: Any) -> None:
    """Adds `--family`."""
    parser.add_argument("--family", choices=FAMILIES, metavar="NAME", help=KERNELS, **options)


def add_overrides(parser: ArgumentParser) -> None:
    """Adds changes to a config. With a default, for else argparse says that some are required."""
    about = "changes to the config, such as steps=200; KEY=none takes the key's default"
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=about)


def add_whole(
    parser: ArgumentParser, option: str, least: int, below: int = 2**31, **options: Any
) -> None:
    """Adds an option that is a whole number from `least` to `below` - 1."""

    def read(text: str) -> int:
        digits = text[1:] if text[:1] in ("+", "-") else text
        if not (digits.isascii() and digits.isdecimal()):
            raise RefusedError(f"{option} must be a whole number, got {inputs.shown(text)}")
        value = int(text) if len(digits) < 20 else None
        if value is None or value >= below:
            raise RefusedError(f"{option} must be less than {below}, got {inputs.shown(text)}")
        if value < least:
            raise RefusedError(f"{option} must be at least {least}, got {value}")
        return value

    parser.add_argument(option, type=read, **options)


def add_number(parser: ArgumentParser, option: str, **options: Any) -> None:
    """Adds an option that is a finite number."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise RefusedError(f"{option} must be a number, got {inputs.shown(text)}") from None
        wrong = inputs.wrong_number(value)
        if wrong is not None:
            raise RefusedError(f"{option} {wrong[-1]}, got {text}")
        return value

    parser.add_argument(option, type=read, **options)


def _refusing(read: Callable[[str], T]) -> Callable[[str], T]:
    def refusing(text: str) -> T:
        try:
            return read(text)
        except InputError as error:
            raise RefusedError(f"{error}") from None

    return refusing


path = _refusing(inputs.expanded)
name = _refusing(inputs.expanded_name)  # of a model or a run


def add_eval(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax eval`."""
    evaluate = add_command(commands, "eval", "evaluate on the held-out problems of a run", run)
    evaluate.add_argument("config", help="run folder, or TOML file, see configs/")
    add_overrides(evaluate)
    evaluate.add_argument(
        "--model", type=name, help="folder or hub name; default: the run's checkpoint"
    )
    add_output(evaluate, "--json", "write the scores there")


def add_export(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax export`."""
    export = add_command(
        commands, "export", "write a run's checkpoint as transformers loads it", run
    )
    export.add_argument("source", metavar="run", type=name, help="run folder")
    export.add_argument("folder", type=path, help="new folder for the model")
    add_whole(export, "--step", 0, help="of the checkpoint; default: the newest")
    export.add_argument("--dtype", choices=DTYPES, help="default: float32")
    about = "the trained adapter alone, as PEFT loads it"
    add_flag(export, "--adapter", about)


def add_audit(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax audit`."""
    audit = add_command(commands, "audit", "prove that sampler and learner agree to the bit", run)
    audit.add_argument("model", type=name, help=f"{A_MODEL}; or a preset")
    add_output(audit, "--json", "write the result there")
    add_flag(audit, "--quick", "fewer cases")
    add_kernels(audit)
    add_flag(audit, "--interpret", "run Pallas kernels without their device, slowly")
    add_flag(audit, "--several-tiles", "as numerics.several_tiles; see docs/kernels.md")
    audit.add_argument(
        "--sampler",
        metavar="ENTRIES",
        help="measure the mismatch of a sampler instead: TOML file or inline list, such as"
        """ '[{name = "kv_cache", dtype = "float8_e4m3fn"}]'; see docs/mismatch.md""",
    )
    add_output(audit, "--markdown", "with --sampler: tables")
    add_output(audit, "--chart", "with --sampler: PNG, PDF or SVG", endings=CHARTS)
    audit.add_argument(
        "--dtype",
        choices=DTYPES,
        help="the only one to audit; default: float32 and bfloat16; with --sampler: the learner's",
    )
    add_whole(audit, "--prompts", 1, help="with --sampler; default: 32")
    add_whole(audit, "--samples", 1, help="with --sampler: per prompt; default: 8")


def add_plan(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax plan`."""
    plan = add_command(
        commands, "plan", "what a step would take on TPUs or GPUs that are not here", run
    )
    plan.add_argument("config", help="TOML file, see configs/")
    add_overrides(plan)
    plan.add_argument("--topology", required=True, help="such as v5e:4x4, v5p:2x2x4 or h200:1")
    plan.add_argument(
        "--architecture",
        type=path,
        metavar="FILE",
        help="a config.json to plan for in place of the config's model",
    )
    plan.add_argument(
        "--layers",
        default="4,8",
        help="sampler: compiled with two numbers of layers and continued to all (4,8), or: all",
    )
    plan.add_argument(
        "--mean-tokens",
        type=int,
        metavar="N",
        help="of a response; needs learner.micro_batch_tokens (default: all are the longest)",
    )
    add_flag(plan, "--quick", "do not search for the largest batch")
    add_output(plan, "--json", "write the plan there")


def add_diagnose(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax diagnose`."""
    parser = add_command(
        commands, "diagnose", "say what is wrong with log-probs that another system recorded", run
    )
    parser.add_argument("model", type=name, help=A_MODEL)
    parser.add_argument("rollouts", type=path, help="JSON lines, JSON or Parquet, see docs")
    parser.add_argument(
        "--format",
        choices=("auto", "plain", "vllm", "sglang", "verl", "trl", "tunix"),
        default="auto",
        help="what wrote the file",
    )
    about = "of lines that do not say"
    add_number(parser, "--temperature", default=1.0, help=about)
    add_whole(parser, "--top-k", 0, default=0, help=f"{about}; 0 is off")
    add_number(parser, "--top-p", default=1.0, help=f"{about}; 1 is off")
    parser.add_argument(
        "--log-probs",
        choices=("processed", "raw"),
        default="processed",
        help=f"{about}: of what was drawn from, or of the raw logits, as vLLM has by default",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--candidate-weights",
        type=name,
        action="append",
        default=[],
        metavar="MODEL",
        help="may have drawn them instead: an earlier checkpoint, a base without its adapter",
    )
    add_flag(parser, "--skip-bad", "diagnose the lines that are good")
    add_output(parser, "--json", "write the result there")
    add_output(parser, "--html", "write a page there")


def add_study(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax study`."""
    study = add_command(
        commands, "study", "run the arms of a study side by side, with controls", run
    )
    study.add_argument("study", nargs="?", type=path, help="TOML file, see configs/studies/")
    add_flag(study, "--list", "the studies that are shipped")
    add_whole(study, "--jobs", 1, default=1, metavar="N", help="runs at a time")
    study.add_argument("--folder", type=path, help="default: runs/studies/NAME")


def add_report(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax report`."""
    report = add_command(commands, "report", "a page with the figures of runs and studies", run)
    report.add_argument("folders", nargs="+", type=path, metavar="RUN_OR_STUDY")
    report.add_argument(
        "--out", type=path, default=Path("report.html"), help="the page; figures as PNG beside it"
    )


def add_translate(commands: Any, run: Callable[..., int]) -> None:
    """Adds `tim-jax translate`."""
    translate = add_command(
        commands, "translate", "a verl configuration as one of this library, and what differs", run
    )
    translate.add_argument("file", type=path, help="YAML file of verl, interpolations resolved")
    add_output(translate, "--out", "write the TOML there")
