"""A user's own reward: `module:function`, imported from the current folder or any package."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tim_jax.errors import InputError, did_you_mean
from tim_jax.tasks.base import Example, Grade, Grader, Message


def _answer(example: Example) -> Any:
    return example.answer


def load_reward(name: str) -> Grader:
    """Returns the grader that calls the function `name`, written `module:function`.

    It is called as `function(prompts, completions, answers)`, three lists of equal length: prompts
    as text or as lists of {"role", "content"}, completions and ground truths as text. It returns
    one finite number for each. It runs in this process, without a time limit.

    Raises:
      InputError: when loading, if there is no such module or function or the import fails; when
        grading, if the function raises, or returns anything but as many finite numbers.
    """
    return as_grader(load_function(name), name)


def as_grader(
    function: Callable[..., Any],
    name: str,
    *,
    batched: bool = True,
    answer: Callable[[Example], Any] = _answer,
) -> Grader:
    """Returns the grader that calls `function`, with three lists as `load_reward` says.

    Args:
      name: what the function is called in errors.
      batched: False calls it once for each completion, with (prompt, completion, answer).
      answer: what it is given as an example's answer.

    Raises:
      InputError: when grading, as `load_reward` says.
    """

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        prompts = [_plain(example.prompt) for example in examples]
        answers = [answer(example) for example in examples]
        try:
            if batched:
                values = function(prompts, list(completions), answers)
            else:
                rows = zip(prompts, completions, answers, strict=True)
                values = [function(*row) for row in rows]
        except Exception as error:
            raise InputError(f"reward {name} raised {_described(error)}") from error
        return [Grade(value) for value in _checked(values, len(completions), name)]

    return grade


def load_function(name: str) -> Callable[..., Any]:
    """Imports the function that `module:function` names; the current folder is searched too.

    Raises:
      InputError: the name is not written so, the import fails, or there is no such function.
    """
    module_name, colon, function_name = name.partition(":")
    if module_name.endswith(".py") or os.sep in module_name:
        right = f"{module_name.removesuffix('.py').replace(os.sep, '.')}:{function_name}"
        raise InputError(f"reward {name!r}: write a module, not a file: {right.lstrip('.')!r}")
    if not (colon and module_name and function_name):
        raise InputError(f"reward must be written module:function, got {name!r}")
    if os.getcwd() not in sys.path:
        # As `python -m` does: a console script has its own folder there instead.
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(
            f"reward {name}: importing {module_name} raised {_described(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value)]
        hint = did_you_mean(function_name, public) if public else ""
        raise InputError(f"reward {name}: {module_name} has no {function_name!r}{hint}")
    if not callable(function):
        raise InputError(f"reward {name}: not a function but {type(function).__name__}")
    return function


def _plain(prompt: str | tuple[Message, ...]) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        return prompt
    return [{"role": message.role, "content": message.content} for message in prompt]


def _checked(values: Any, count: int, name: str) -> list[float]:
    try:
        values = list(values)
    except TypeError:
        raise InputError(
            f"reward {name} must return a sequence of {count} numbers, got {_shown(values)}"
        ) from None
    if len(values) != count:
        raise InputError(f"reward {name} returned {len(values)} rewards for {count} completions")
    return [_number(value, i, name) for i, value in enumerate(values)]


def _number(value: Any, index: int, name: str) -> float:
    try:
        number = np.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    # Rewards become float32 arrays: a number beyond its range is as bad as an infinite one.
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise InputError(
            f"reward {name} must return finite numbers, got {_shown(value)} at {index}"
        )
    return number


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
