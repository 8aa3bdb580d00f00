"""The arguments of all commands, and how each is read: what argparse calls with its text."""

import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
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


def add_commands(parser: ArgumentParser, runs: Mapping[str, Callable[..., int]]) -> None:
    """Adds every command with its arguments; `runs` says what is called to run it.

    Its own page says what it does as well as the list of commands.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, about) in _COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=description)
        command.set_defaults(run=runs[name])
        add(command)


def _flag(parser: ArgumentParser, option: str, about: str) -> None:
    parser.add_argument(option, action="store_true", help=about)


def _output(parser: ArgumentParser, option: str, about: str, endings: Sequence[str] = ()) -> None:
    """A file to write, which is refused before any work is done for it.

    `endings`: of names that it may have; none for any.
    """

    def read(text: str) -> Path:
        chosen = _path(text)
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
    folder = inputs.shown(str(file.parent))
    if not os.path.isdir(file.parent):
        return f"there is no folder {folder}"
    may = os.access(file.parent, os.W_OK | os.X_OK)
    return "" if may else f"you may not write to the folder {folder}"


def _family(parser: ArgumentParser, **options: Any) -> None:
    parser.add_argument("--family", choices=FAMILIES, metavar="NAME", help=KERNELS, **options)


def _config(parser: ArgumentParser, about: str = "TOML file, see configs/") -> None:
    """A config, and changes to it. With a default: else argparse says that some are required."""
    parser.add_argument("config", help=about)
    about = "changes to the config, such as steps=200; KEY=none takes the key's default"
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=about)


def _whole(
    parser: ArgumentParser, option: str, least: int, below: int = 2**31, **options: Any
) -> None:
    """A whole number from `least` to `below` - 1."""

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


def _number(parser: ArgumentParser, option: str, about: str) -> None:
    """A finite number, 1 if it is left out."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise RefusedError(f"{option} must be a number, got {inputs.shown(text)}") from None
        wrong = inputs.wrong_number(value)
        if wrong is not None:
            raise RefusedError(f"{option} {wrong[-1]}, got {text}")
        return value

    parser.add_argument(option, type=read, default=1.0, help=about)


def _refusing(read: Callable[[str], T]) -> Callable[[str], T]:
    def refusing(text: str) -> T:
        try:
            return read(text)
        except InputError as error:
            raise RefusedError(f"{error}") from None

    return refusing


_path = _refusing(inputs.expanded)
_name = _refusing(inputs.expanded_name)  # of a model or a run


def _train(parser: ArgumentParser) -> None:
    _config(parser)
    about = "one of several processes, as SLURM, Open MPI, GKE or a TPU pod started them"
    _flag(parser, "--distributed", about)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="one of several: process 0")
    _whole(parser, "--processes", 1, metavar="N", help="one of several: how many")
    _whole(parser, "--process", 0, metavar="I", help="one of several: which, from 0")


def _eval(parser: ArgumentParser) -> None:
    _config(parser, "run folder, or TOML file, see configs/")
    about = "folder or hub name; default: the run's checkpoint"
    parser.add_argument("--model", type=_name, help=about)
    _output(parser, "--json", "write the scores there")


def _generate(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=_name, help=A_MODEL)
    parser.add_argument("prompt", nargs="+", help="text, or a user's message in a chat")
    _whole(parser, "--samples", 1, default=1, help="of each prompt; default: 1")
    about = "of a response; default: 64, or half of the model's positions if that is less"
    _whole(parser, "--max-tokens", 1, help=about)
    _number(parser, "--temperature", "default: 1; 0 is greedy")
    _whole(parser, "--top-k", 0, default=0, help="0 is off")
    _number(parser, "--top-p", "1 is off")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    _family(parser, default="auto")
    _whole(parser, "--seed", 0, 2**32, default=0)
    _flag(parser, "--plain", "no chat template")
    for axis in ("data", "fsdp", "expert", "tensor"):
        _whole(parser, f"--{axis}", 1, default=1, help=f"devices on the {axis} axis")


def _export(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="run", type=_name, help="run folder")
    parser.add_argument("folder", type=_path, help="new folder for the model")
    _whole(parser, "--step", 0, help="of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32")
    _flag(parser, "--adapter", "the trained adapter alone, as PEFT loads it")


def _audit(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=_name, help=f"{A_MODEL}; or a preset")
    _output(parser, "--json", "write the result there")
    _flag(parser, "--quick", "fewer cases")
    _family(parser)
    _flag(parser, "--interpret", "run Pallas kernels without their device, slowly")
    _flag(parser, "--several-tiles", "as numerics.several_tiles; see docs/kernels.md")
    about = "measure the mismatch of a sampler instead: TOML file or inline list, such as"
    example = """'[{name = "kv_cache", dtype = "float8_e4m3fn"}]'; see docs/mismatch.md"""
    parser.add_argument("--sampler", metavar="ENTRIES", help=f"{about} {example}")
    _output(parser, "--markdown", "with --sampler: tables")
    _output(parser, "--chart", "with --sampler: PNG, PDF or SVG", endings=CHARTS)
    about = "the only one to audit; default: float32 and bfloat16; with --sampler: the learner's"
    parser.add_argument("--dtype", choices=DTYPES, help=about)
    _whole(parser, "--prompts", 1, help="with --sampler; default: 32")
    _whole(parser, "--samples", 1, help="with --sampler: per prompt; default: 8")


def _diagnose(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=_name, help=A_MODEL)
    parser.add_argument("rollouts", type=_path, help="JSON lines, JSON or Parquet, see docs")
    formats = ("auto", "plain", "vllm", "sglang", "verl", "trl", "tunix")
    parser.add_argument("--format", choices=formats, default="auto", help="what wrote the file")
    about = "of lines that do not say"
    _number(parser, "--temperature", about)
    _whole(parser, "--top-k", 0, default=0, help=f"{about}; 0 is off")
    _number(parser, "--top-p", f"{about}; 1 is off")
    about = f"{about}: of what was drawn from, or of the raw logits, as vLLM has by default"
    kinds = ("processed", "raw")
    parser.add_argument("--log-probs", choices=kinds, default="processed", help=about)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--candidate-weights",
        type=_name,
        action="append",
        default=[],
        metavar="MODEL",
        help="may have drawn them instead: an earlier checkpoint, a base without its adapter",
    )
    _flag(parser, "--skip-bad", "diagnose the lines that are good")
    _output(parser, "--json", "write the result there")
    _output(parser, "--html", "write a page there")


def _plan(parser: ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--topology", required=True, help="such as v5e:4x4, v5p:2x2x4 or h200:1")
    about = "a config.json to plan for in place of the config's model"
    parser.add_argument("--architecture", type=_path, metavar="FILE", help=about)
    about = "sampler: compiled with two numbers of layers and continued to all (4,8), or: all"
    parser.add_argument("--layers", default="4,8", help=about)
    about = "of a response; needs learner.micro_batch_tokens (default: all are the longest)"
    parser.add_argument("--mean-tokens", type=int, metavar="N", help=about)
    _flag(parser, "--quick", "do not search for the largest batch")
    _output(parser, "--json", "write the plan there")


def _study(parser: ArgumentParser) -> None:
    parser.add_argument("study", nargs="?", type=_path, help="TOML file, see configs/studies/")
    _flag(parser, "--list", "the studies that are shipped")
    _whole(parser, "--jobs", 1, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--folder", type=_path, help="default: runs/studies/NAME")


def _report(parser: ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=_path, metavar="RUN_OR_STUDY")
    about = "the page; figures as PNG beside it"
    parser.add_argument("--out", type=_path, default=Path("report.html"), help=about)


def _translate(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=_path, help="YAML file of verl, interpolations resolved")
    _output(parser, "--out", "write the TOML there")


# Name -> its arguments, and what it does. In the order of the list that --help shows.
_COMMANDS: Mapping[str, tuple[Callable[[ArgumentParser], None], str]] = {
    "train": (_train, "train (or resume) the run of a config"),
    "eval": (_eval, "evaluate on the held-out problems of a run"),
    "generate": (_generate, "sample completions"),
    "export": (_export, "write a run's checkpoint as transformers loads it"),
    "audit": (_audit, "prove that sampler and learner agree to the bit"),
    "diagnose": (_diagnose, "say what is wrong with log-probs that another system recorded"),
    "plan": (_plan, "what a step would take on TPUs or GPUs that are not here"),
    "study": (_study, "run the arms of a study side by side, with controls"),
    "report": (_report, "a page with the figures of runs and studies"),
    "translate": (_translate, "a verl configuration as one of this library, and what differs"),
}
