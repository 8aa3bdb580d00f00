"""Exceptions with a message for users: what they can mend, and how a command may end early.

`ENDINGS` is the one table of exit statuses: the command line ends by it, and the documentation
shows it.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

# Variables of the environment that hold a secret.
_SECRET, _SHORTEST_SECRET = re.compile("API_?KEY|TOKEN|SECRET|PASSWORD"), 8


@dataclass(frozen=True)
class Ending:
    """One way in which a command ends.

    Attributes:
        status: the exit status.
        line: the last line on standard error, where {} stands for the details; empty for none.
        meaning: what the status says, for the documentation.
    """

    status: int
    line: str
    meaning: str


DONE = Ending(0, "", "All is done. Every step of a run is done and saved.")
FAILED = Ending(
    1,
    "",
    "An audit found a difference or a wrong gradient, a diagnosis a fault, or a plan does not fit."
    " With a traceback: a fault of ours.",
)
BAD_INPUT = Ending(
    2,
    "tim-jax: {}",
    "Something you gave is wrong: an argument, a config, a file, a model, a reward function.",
)
NOT_EXACT = Ending(
    3, "tim-jax: not exact: {}", "The two log-probs of a token differ; the line names the token."
)
NOT_FINITE = Ending(
    4,
    "tim-jax: {}",
    "The loss or gradient was not finite `learner.max_skipped` times in a row, or log-probs of an"
    " exact run are no longer finite.",
)
LOST = Ending(
    5,
    "tim-jax: another process of this job is gone; start all again with the same command ({})",
    "A process of a job of several is gone. 134 where JAX's runtime was the first to know.",
)
OUT_OF_MEMORY = Ending(
    6,
    "tim-jax: out of memory {}",
    "A device, or the machine, had too little memory; the line says for what, and what would help."
    " The last checkpoint is unharmed.",
)
INTERRUPTED = Ending(
    130,
    "tim-jax: interrupted{}",
    "Ctrl-C, or SIGINT. The line says so if the same command goes on from a checkpoint.",
)
PREEMPTED = Ending(143, "tim-jax: {}", "SIGTERM: the step was finished and saved.")

ENDINGS = (
    DONE,
    FAILED,
    BAD_INPUT,
    NOT_EXACT,
    NOT_FINITE,
    LOST,
    OUT_OF_MEMORY,
    INTERRUPTED,
    PREEMPTED,
)


class InputError(ValueError):
    """Bad input. The message is one line: what, where, the offending value, what would be right.

    The command line prints it without a traceback and exits non-zero; every other exception is a
    fault of the library and keeps its traceback.
    """

    ending: ClassVar[Ending] = BAD_INPUT


# What TRL, verl, tunix and vLLM call the settings of this library (docs/python.md).
_ELSEWHERE = {
    theirs: ours
    for ours, names in {
        "samples": ("num_generations", "num_return_sequences", "group_size", "n"),
        "max_tokens": (
            *("max_completion_length", "max_response_length", "max_new_tokens", "max_length"),
            *("max_tokens_to_generate", "total_generation_steps"),
        ),
        "prompts_per_step": ("train_batch_size", "batch_size"),
        "epochs": ("num_iterations", "ppo_epochs"),
        "micro_batch": (
            *("per_device_train_batch_size", "train_micro_batch_size"),
            *("ppo_micro_batch_size_per_gpu", "micro_batch_size"),
        ),
        "mini_batches": ("ppo_mini_batch_size",),
        "remat": ("gradient_checkpointing", "enable_gradient_checkpointing"),
        "reward": ("reward_funcs", "reward_fns", "reward_fn", "reward_function"),
        "clip_low": ("epsilon", "clip_ratio", "clip_ratio_low", "cliprange"),
        "clip_high": ("epsilon_high", "clip_ratio_high"),
        "kl_coefficient": ("beta", "kl_loss_coef", "kl_coef"),
        "aggregation": ("loss_agg_mode", "loss_type"),
        "estimator": ("adv_estimator", "advantage_estimator"),
        "steps": ("max_steps", "total_training_steps", "num_steps"),
        "learning_rate": ("lr", "actor_lr"),
        "optimizer": ("learning_rate",),
    }.items()
    for theirs in names
}


def ours(name: str) -> str:
    """The name here of a setting that another library calls `name`; else the name itself."""
    return _ELSEWHERE.get(name, name)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the nearest of `known`, or all if none is near.

    The nearest is the one that another library calls so, if there is one.
    """
    known = sorted(known)
    meant = ours(word.rpartition(".")[2])
    meant = meant if meant in known else ours(meant)
    near = [meant] if meant in known else difflib.get_close_matches(word, known, n=1)
    return suggestion(word, near[0]) if near else f"; known: {', '.join(known)}"


def suggestion(word: str, name: str) -> str:
    """Returns `"; did you mean 'name'?"`, and more if `word` is the size of what `name` counts."""
    counts = word.endswith("_size") and name.endswith("mini_batches")
    return f"; did you mean {name!r}{' (how many, not their size)' if counts else ''}?"


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Refuses a value that is not among the known ones, naming the nearest."""
    if value not in (known := tuple(known)):
        raise InputError(f"{what} {value!r} is unknown{did_you_mean(str(value), known)}")


class MismatchError(Exception):
    """An exact run met a token whose log-probs differ. The message says which, in one line."""

    ending: ClassVar[Ending] = NOT_EXACT


class NonFiniteError(Exception):
    """Too many updates in a row had a loss or a gradient that is not finite, or log-probs are not.

    Attributes:
        batch: name -> NumPy array, what the last of the updates was computed from, if it were they.
    """

    ending: ClassVar[Ending] = NOT_FINITE

    def __init__(self, message: str, batch: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.batch = batch


class PreemptedError(Exception):
    """The system asked the process to end, and the run was saved. The message says where."""

    ending: ClassVar[Ending] = PREEMPTED


class OutOfMemoryError(Exception):
    """Memory ran out. The message says while doing what, how much was asked for, and what helps."""

    ending: ClassVar[Ending] = OUT_OF_MEMORY


EXPECTED = (InputError, MismatchError, NonFiniteError, PreemptedError, OutOfMemoryError)


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Returns a message, which may be a library's, with keys and tokens replaced by their names.

    Args:
      environment: its variables, of which those count that are called so, such as WANDB_API_KEY.
    """
    for name, value in environment.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name):
            text = text.replace(value, f"${name}")
    return text


@contextmanager
def writing(path: object) -> Iterator[None]:
    """A context in which what cannot be written is an `InputError` that names the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def lost_output() -> str:
    """Returns why standard output takes nothing, such as a full disk; "" if it takes what comes.

    If so it is replaced, because Python would complain of it once more at the end.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)
        return error.strerror or f"{error}"
    return ""
