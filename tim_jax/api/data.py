"""What users give as data: prompts, answers and reward functions, as the library takes them."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import shown
from tim_jax.placement import processes
from tim_jax.tasks import custom
from tim_jax.tasks.base import Example, Message, Task
from tim_jax.tasks.custom import user_code
from tim_jax.tasks.dataset import check_open, message_of
from tim_jax.tasks.environments import Here, pack

_KEYS = ("prompt", "answer")
_SHORTEST = 16  # tokens that are padded to
_ANSWER = "answer"  # where an example's data keep it: any value, not only text


def as_prompt(prompt: Any, where: str) -> str | tuple[Message, ...]:
    """Text as it is; a list of chat messages as `Message`s.

    Raises:
      InputError: it is neither; `where` says which one in the message.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt:
        return tuple(message_of(message, where) for message in prompt)
    raise InputError(f"{where} must be text or a list of chat messages, got {shown(prompt)}")


def as_examples(prompts_and_answers: Any) -> tuple[Example, ...]:
    """Pairs, or rows with the keys "prompt" and "answer", read once from any iterable.

    Other keys of a row are left alone. Answers may be any value.

    Raises:
      InputError: there are none, or one is neither.
    """
    if isinstance(prompts_and_answers, str) or not isinstance(prompts_and_answers, Iterable):
        raise InputError(
            "grpo: prompts_and_answers must be a list of (prompt, answer) or another iterable of"
            f" them, got {shown(prompts_and_answers)}"
        )
    rows = tuple(_example(row, f"grpo: row {i}") for i, row in enumerate(prompts_and_answers))
    if not rows:
        raise InputError(
            "grpo: prompts_and_answers is empty; a generator that was read before has nothing left"
        )
    return rows


def _example(row: Any, where: str) -> Example:
    if isinstance(row, Mapping):
        for key in _KEYS:
            if key not in row:
                hint = did_you_mean(key, map(str, row)) if row else ""
                raise InputError(f"{where} has no {key!r}{hint}")
        prompt, answer = (row[key] for key in _KEYS)
    elif isinstance(row, Sequence) and not isinstance(row, str) and len(row) == len(_KEYS):
        prompt, answer = row
    else:
        raise InputError(
            f'{where} must be a pair (prompt, answer) or {{"prompt": ..., "answer": ...}}, got'
            f" {shown(row)}"
        )
    asked = as_prompt(prompt, f"{where}: prompt")
    check_open(asked, f"{where}: prompt")
    with user_code(f"{where}: the answer's text"):
        text = str(answer)
    return Example(asked, text, {_ANSWER: answer})


def as_episodes(examples: tuple[Example, ...], respond: Callable[..., Any]) -> Task:
    """A task of these examples, whose answers are the states that episodes begin with."""
    if not callable(respond):
        raise InputError(
            "grpo: respond must be a function (state, completion) -> (state, tim_jax.Reply), got"
            f" {shown(respond)}"
        )
    if jax.process_count() > 1:
        raise InputError("grpo: respond needs a single process; there are several")
    name = getattr(respond, "__name__", type(respond).__name__)
    for row, example in enumerate(examples):
        try:
            pack(example.data[_ANSWER])
        except InputError as error:
            raise InputError(f"grpo: row {row}: {error}") from error.__cause__
    begun = tuple(replace(x, data={"state": x.data[_ANSWER]}) for x in examples)
    return Task(name, begun, (), lambda *_: [], environment=Here(respond))


def as_task(examples: tuple[Example, ...], reward: Callable[..., Any] | None) -> Task:
    """A task of these examples, graded by the user's function.

    It is tried at once, with the first example's answer as its completion.

    Raises:
      InputError: it is no function of lists, or fails when it is tried.
    """
    if not callable(reward):
        raise InputError(
            "grpo: reward must be a function (prompts, completions, answers) -> numbers, got"
            f" {shown(reward)}"
        )
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        grade = custom.as_grader(reward, name, answer=lambda example: example.data[_ANSWER])
        grade(examples[:1], [examples[0].answer])
    except InputError as error:
        hint = f"; is it a function of one completion? reward=tim_jax.per_item({name})"
        lists = isinstance(error.__cause__, TypeError | AttributeError) or "sequence" in str(error)
        single = lists and not hasattr(reward, "__wrapped__")
        raise InputError(f"grpo: {error}{hint if single else ''}") from error.__cause__
    return Task(name, examples, (), grade)


def agree(examples: tuple[Example, ...], settings: str) -> None:
    """Raises `InputError` on all processes if they were not given the same prompts and settings."""
    if jax.process_count() == 1:
        return
    prompts = repr([example.prompt for example in examples])
    digest = hashlib.sha256(prompts.encode()).hexdigest()
    processes.agree(f"{digest} {settings}", "its prompts or its arguments of grpo")


def padded(length: int) -> int:
    """Returns the length to pad prompts or responses to: a power of two.

    So few programs are compiled. Padding changes no bit.
    """
    return max(_SHORTEST, 1 << (length - 1).bit_length())
