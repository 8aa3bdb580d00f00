"""A user's own reward or task: `module:function`, imported from the current folder or any package.

`load_reward` and `make_task` call it in this process; `IsolatedReward` and `isolated_task` in one
of its own, with a time limit (`guard.Isolated`).
"""

import base64
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from inspect import iscoroutine, signature
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import shown
from tim_jax.tasks.base import (
    Example,
    Generated,
    Grade,
    Grader,
    Lazy,
    Message,
    Packed,
    Prompt,
    Task,
    close,
    first_line,
    state_of,
)
from tim_jax.tasks.guard import Isolated
from tim_jax.tasks.worker import Watched, end_if_forked

# Sums of squares of larger rewards, which deviations need, are beyond float32.
LARGEST = 1e15
_PARTS = ("train", "evaluation")
_AT_A_TIME = 256  # examples that a process makes together


def load_reward(name: str) -> Grader:
    """Returns the grader that calls the function `name`, written `module:function`.

    It is called as `function(prompts, completions, answers)`, three lists of equal length: prompts
    as text or as lists of {"role", "content"}, completions and ground truths as text. It returns
    one finite number for each. It runs in this process, without a time limit.

    Raises:
      InputError: when loading, as `load_function` and `as_grader`; when grading, if the function
        raises, or returns anything but as many finite numbers.
    """
    return as_grader(load_function(name), name)


def as_grader(
    function: Callable[..., Any],
    name: str,
    *,
    answer: Callable[[Example], Any] = attrgetter("answer"),
) -> Grader:
    """Returns the grader that calls `function`, with three lists as `load_reward` says.

    Args:
      name: what the function is called in errors.
      answer: what it is given as an example's answer.

    Raises:
      InputError: it does not take three arguments; when grading, as `load_reward` says.
    """
    check_reward(function, name)

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        prompts = [plain(example.prompt) for example in examples]
        answers = [answer(example) for example in examples]
        rewards = _rewards_by(function, name, prompts, list(completions), answers)
        return [Grade(reward) for reward in rewards]

    return grade


def check_reward(function: Callable[..., Any], name: str) -> None:
    """Refuses a reward that does not take three lists, or names them in another order."""
    _check_takes(function, f"reward {name}", "lists", ("prompts", "completions", "answers"))


def _check_takes(
    function: Callable[..., Any], what: str, kind: str, given: tuple[str, str, str]
) -> None:
    try:
        takes = signature(function)
    except ValueError:  # of a builtin that does not say
        return
    named = ", ".join(given)
    try:
        takes.bind(*given)
    except TypeError:
        raise InputError(f"{what} must take three {kind}, ({named}); it takes {takes}") from None
    places = [name.rstrip("s") for name in given]
    for place, own in zip(places, takes.parameters, strict=False):
        if own.rstrip("s") in places and own.rstrip("s") != place:
            raise InputError(f"{what} is given ({named}) in this order; it takes {takes}")


def per_item(function: Callable[[Any, str, Any], Any]) -> Callable[..., list[Any]]:
    """Makes a reward of a function of one completion.

    A reward takes three lists and returns one; `per_item(f)` is the reward that calls
    `f(prompt, completion, answer)` for each completion. It is a decorator too.

    Raises:
      InputError: `function` is none, or does not take these.
    """
    if not callable(function):
        raise InputError(f"per_item: give a function, got {shown(function)}")
    name = getattr(function, "__name__", shown(function))
    _check_takes(function, f"per_item: {name}", "arguments", ("prompt", "completion", "answer"))

    @wraps(function)
    def reward(prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[Any]):
        return [function(*row) for row in zip(prompts, completions, answers, strict=True)]

    return reward


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
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise InputError(
            f"reward {name!r}: {module_name} is a module of Python; name one of your own"
        )
    if os.getcwd() not in sys.path:
        # As `python -m` does: a console script has its own folder there instead.
        sys.path.insert(0, os.getcwd())
    with user_code(f"reward {name}: importing {module_name}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value)]
        hint = did_you_mean(function_name, public) if public else ""
        raise InputError(f"reward {name}: {module_name} has no {function_name!r}{hint}")
    if not callable(function):
        raise InputError(f"reward {name}: not a function but {type(function).__name__}")
    return function


def make_task(factory: str, parameters: Mapping[str, Any]) -> Task:
    """Returns the task that the function `factory`, written `module:function`, makes.

    Its examples are looked at now if they are in a list or tuple, else when they are read.

    Raises:
      InputError: when making, as `load_function`, or if the function raises or makes no `Task`;
        when an example is read that is none, or raises; when grading, if the grader raises.
    """
    make = load_function(factory)
    with user_code(f"task.factory {factory}"):
        task = make(**parameters)
    if not isinstance(task, Task):
        raise InputError(
            f"task.factory {factory} must return a tim_jax.tasks.base.Task, got"
            f" {type(task).__name__}"
        )
    parts = {part: _its_examples(getattr(task, part), part, factory) for part in _PARTS}
    return replace(task, grade=_ItsGrader(task.grade, factory), **parts)


def _its_examples(examples: Sequence[Example], part: str, factory: str) -> Sequence[Example]:
    """The examples of a user's task, each looked at when it is read."""

    def read(row: int) -> Example:
        what = f"task.factory {factory}: example {row} of {part}"
        with user_code(what):
            example = examples[row]
        if not _is_example(example):
            raise InputError(
                f"{what} must be a tim_jax.tasks.base.Example with text or messages as its prompt"
                f" and text as its answer, got {shown(example)}"
            )
        return example

    with user_code(f"task.factory {factory}: {part}"):
        its = Generated(read, len(examples), source=examples)
    return tuple(its) if type(examples) in (list, tuple) else its


def _is_example(value: Any) -> bool:
    if not (isinstance(value, Example) and isinstance(value.answer, str)):
        return False
    prompt: Any = value.prompt
    return isinstance(prompt, str) or (
        isinstance(prompt, list | tuple)
        and all(
            isinstance(m, Message) and isinstance(m.role, str) and isinstance(m.content, str)
            for m in prompt
        )
    )


class _ItsGrader:
    """The grader of a user's task. Not a function, because the task may close it."""

    def __init__(self, grade: Grader, factory: str) -> None:
        self._grade, self._factory = grade, factory

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        with user_code(f"the grader of task.factory {self._factory}"):
            grades = list(self._grade(examples, completions))
        if len(grades) != len(completions) or not all(isinstance(x, Grade) for x in grades):
            raise InputError(
                f"the grader of task.factory {self._factory} must return {len(completions)}"
                f" tim_jax.tasks.base.Grade, got {shown(grades)}"
            )
        rewards = _checked([grade.reward for grade in grades], len(grades), self._factory)
        return [Grade(reward, x.fault) for reward, x in zip(rewards, grades, strict=True)]

    def close(self) -> None:
        """Closes the grader, if it can be."""
        close(self._grade)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """A context for code of the user's: nothing that it raises ends the program but `InputError`.

    That includes `sys.exit`, and `os._exit` as Python calls it, which would end a run in the middle
    with the status of one that is done. A process that was forked inside ends there.

    Raises:
      InputError: the code, called `what`, raised something. An `InputError` of its own is passed
        on, and so is Ctrl-C.
    """
    own, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != own:  # a child that was forked ends so
            leave(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        end_if_forked(own)
        raise InputError(f"{what} raised {described(error)}") from error
    finally:
        os._exit = leave
        end_if_forked(own)


def plain(prompt: Prompt) -> str | list[dict[str, str]]:
    """Returns a prompt as a user's reward is given it."""
    return prompt if isinstance(prompt, str) else list(map(asdict, prompt))


def described(error: BaseException) -> str:
    """Returns an exception's type and the first line of its message."""
    kind, line = type(error).__name__, first_line(error)
    return line if line == kind else f"{kind}: {line}"


def _rewards_by(function: Callable[..., Any], name: str, *lists: list[Any]) -> list[float]:
    """What a reward returns for prompts, completions and answers, checked."""
    count = len(lists[0])
    with user_code(f"reward {name}"):
        values = _listed(function(*lists), count)
    return _checked(values, count, name)


def _listed(values: Any, count: int) -> Any:
    """An iterable as a list, which runs the rest of a generator. At most one more than needed."""
    if isinstance(values, str | bytes | Mapping | set | frozenset):
        return values
    try:
        rest = iter(values)
    except TypeError:
        return values
    return [value for _, value in zip(range(count + 1), rest, strict=False)]


def _checked(values: Any, count: int, name: str) -> list[float]:
    waiting = [x for x in (values if isinstance(values, list) else [values]) if iscoroutine(x)]
    for coroutine in waiting:
        coroutine.close()  # otherwise Python warns of it
    if waiting:
        raise InputError(f"reward {name} must be a plain function, not async: got a coroutine")
    if not isinstance(values, list):
        raise InputError(
            f"reward {name} must return a sequence of {count} numbers, got {shown(values)}"
        )
    if len(values) != count:
        more = "more than " if len(values) > count else ""
        raise InputError(
            f"reward {name} returned {more}{min(len(values), count)} rewards for {count}"
            " completions"
        )
    return [_number(value, i, name) for i, value in enumerate(values)]


def _number(value: Any, index: int, name: str) -> float:
    try:
        number = np.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # whatever a user's own type raises
        number = np.nan
    if not np.isfinite(number):
        raise InputError(f"reward {name} must return finite numbers, got {shown(value)} at {index}")
    if abs(number) > LARGEST:
        raise InputError(
            f"reward {name} must return numbers of at most {LARGEST:g} in size, got"
            f" {shown(value)} at {index}"
        )
    return number


class IsolatedReward:
    """The grader of `load_reward`, with the function in a process of its own."""

    def __init__(self, name: str, *, seconds: float) -> None:
        """Starts the process and imports the function; errors as of `Isolated`."""
        handler = f"{__name__}:{answer_rewards.__name__}"
        self._there = Isolated(handler, f"reward {name}", seconds=seconds, name=name)
        self.close = self._there.close

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        prompts, texts = [plain(example.prompt) for example in examples], list(completions)
        answers = [example.answer for example in examples]
        values = self._there.call([prompts, texts, answers], of=(prompts, texts))
        return [Grade(value) for value in values]


def answer_rewards(setup: Mapping[str, Any]) -> Callable[[Any], list[float]]:
    """Returns what answers `IsolatedReward`: [prompts, completions, answers] -> rewards."""
    name, notes = setup["name"], setup["notes"]
    function = load_function(name)
    check_reward(function, name)

    return lambda lists: _rewards_by(function, name, *(Watched(items, notes) for items in lists))


def isolated_task(factory: str, parameters: Mapping[str, Any], *, seconds: float) -> Task:
    """Returns the task that `make_task` makes, in a process of its own.

    The examples stay there: here they have prompt, answer and solution, and their `data` says which
    of them they are, and what the state of an episode begins as.

    Args:
      seconds: limit by the clock of making it, and of each call of its grader.

    Raises:
      InputError: as `make_task`, or the code takes too long or ends its process.
    """
    handler, setup = f"{__name__}:{TaskHere.__name__}", {"parameters": dict(parameters)}
    there = Isolated(handler, f"task.factory {factory}", seconds=seconds, name=factory, **setup)
    train, evaluation = (
        Lazy(partial(_made_there, there, part), there.made[part], _AT_A_TIME, source=there)
        for part in _PARTS
    )
    notes = tuple(there.made["notes"])
    return Task(there.made["name"], train, evaluation, _GraderThere(there), notes)


def _made_there(there: Isolated, part: str, rows: Sequence[int]) -> list[Example]:
    """Examples of a part of a task in another process."""
    doing = f"making its {part} examples"
    found = there.call({"part": part, "rows": list(rows)}, doing=doing)
    return [
        Example(
            prompt if isinstance(prompt, str) else tuple(Message(**item) for item in prompt),
            answer,
            {"part": part, "row": row, "state": Packed(base64.b64decode(state))},
            solution,
        )
        for row, (prompt, answer, solution, state) in zip(rows, found, strict=True)
    ]


@dataclass(frozen=True)
class _GraderThere:
    """The grader of a task in another process."""

    there: Isolated

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        rows = [[example.data["part"], example.data["row"]] for example in examples]
        message = {"graded": rows, "completions": list(completions)}
        of = [plain(example.prompt) for example in examples], list(completions)
        return [Grade(*grade) for grade in self.there.call(message, doing="its grader", of=of)]

    def close(self) -> None:
        self.there.close()


class TaskHere:
    """What answers `isolated_task`.

    {"part", "rows"} -> those examples; {"graded", "completions"} -> grades.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._notes = setup["notes"]
        self._task = task = make_task(setup["name"], setup["parameters"])
        if task.environment is not None:
            raise InputError(
                f"task.factory {setup['name']}: its environment must be named as task.environment,"
                " so that it has processes of its own"
            )
        sizes = {part: len(getattr(task, part)) for part in _PARTS}
        self.about = {"name": str(task.name), "notes": [str(x) for x in task.notes], **sizes}

    def __call__(self, message: Mapping[str, Any]) -> list[Any]:
        if "rows" in message:
            part = getattr(self._task, message["part"])
            read = (part[row] for row in message["rows"])
            packed = ((e, base64.b64encode(pickle.dumps(state_of(e))).decode()) for e in read)
            return [[plain(e.prompt), e.answer, e.solution, state] for e, state in packed]
        examples = [getattr(self._task, part)[row] for part, row in message["graded"]]
        lists = (Watched(items, self._notes) for items in (examples, message["completions"]))
        return [[grade.reward, grade.fault] for grade in self._task.grade(*lists)]
