"""What the values in a dataset's row mean: a prompt, and the answer in a reference solution.

What would lose its meaning is refused: messages with more than a role and content, images, a prompt
that has its answer in it, and a solution in which no answer can be told from the rest.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Message

Prompt = str | tuple[Message, ...]

_MARKER = re.compile(r"(?<!#)####(?!#)")  # GSM8K's, but also a heading of Markdown
_NUMBER = re.compile(r"[-+$€£]?\s*\d[\d,. /]*\s*\S*")  # perhaps with a unit
_BESIDE = ("tools", "image", "images", "video", "videos", "audio", "audios")  # columns


def prompt_of(value: object, where: str) -> Prompt:
    """Returns a prompt: text as it is, or messages.

    Raises:
      InputError: it is neither, or empty; a message has what a `Message` has no place for; the last
        one is the assistant's.
    """
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        messages = tuple(message_of(item, where) for item in value)
        check_open(messages, where)
        return messages
    raise InputError(f"{where} must be text or a list of messages, not empty; got {_shown(value)}")


def message_of(value: object, where: str) -> Message:
    """Returns one chat message.

    Raises:
      InputError: role or content are no text, or there is more to it, such as tool calls.
    """
    if isinstance(value, Message):
        return value
    match value:
        case {"role": str(role), "content": str(content), **others}:
            more = [key for key, other in others.items() if not _empty(other)]
            if more:
                raise InputError(
                    f"{where}: a message has {more[0]!r} beside role and content, which would be"
                    f" lost; write it into the content, or leave the row out: {_shown(value)}"
                )
            return Message(role, content)
    raise InputError(f"{where}: a message needs a role and a content of text, got {_shown(value)}")


def _empty(value: object) -> bool:
    """What Parquet files have where other rows have a value."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def check_open(prompt: Prompt, where: str) -> None:
    """Refuses messages that the assistant has answered already."""
    if not isinstance(prompt, str) and prompt and prompt[-1].role == "assistant":
        raise InputError(
            f"{where} ends with the assistant's turn, {_shown(prompt[-1].content)}, so that the"
            " prompt has its answer in it; leave that message out"
        )


def check_hidden(prompt: Prompt, truth: str, where: str) -> None:
    """Refuses a prompt at whose end the ground truth stands, as in a solution."""
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    ending = text.rstrip(" \t\n.$")
    if any(ending.endswith(end) for end in (f"\\boxed{{{truth}}}", f"#### {truth}")):
        raise InputError(
            f"{where} ends with its answer, {_shown(ending[-40:])}; name the column of the question"
            " as prompt_column, or take the solution out of it"
        )


def check_beside(row: Mapping[str, Any], used: tuple[str, ...], where: str) -> None:
    """Refuses a row with images or tools: its prompt means nothing without them."""
    for name in _BESIDE:
        if name not in used and not _empty(row.get(name)):
            raise InputError(
                f"{where} has {name!r}, which prompts of text do not keep; leave such rows out"
            )


def truth_of(value: object, where: str, *, solution: bool) -> str:
    """Returns a row's ground truth as text.

    Args:
      solution: whether it is a worked solution, which must say which part of it is the answer.

    Raises:
      InputError: it is no text and no number, or has no answer, or several.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{where} must be text or a number, got {_shown(value)}")
    text = value if isinstance(value, str) else _written_out(value, where)
    text = _only_one(text, where)
    if (solution or _MARKER.search(text)) and _marked(text) is None:
        needs = "no \\boxed{} answer" if solution else "headings (####), but no answer that is told"
        raise InputError(f"{where} has {needs}: {_shown(text[-60:])}")
    truth = truth_in(text)
    if not truth:
        raise InputError(f"{where} has an empty answer: {_shown(text[-60:])}")
    return truth


def truth_in(text: str) -> str:
    """Returns the final answer in a reference solution, or all of a text that is only an answer.

    That is what follows `####` in the last line (GSM8K), else the content of the last `\\boxed{}`.
    A line that begins with `####` may be a heading of Markdown: one with lines after it is, and one
    without a number where there is a box.
    """
    marked = _marked(text)
    return text.strip() if marked is None else marked


def _marked(text: str) -> str | None:
    """The answer that a text tells from the rest."""
    boxed = _last_boxed(text)
    markers = list(_MARKER.finditer(text))
    last = text[markers[-1].end() :].strip() if markers else None
    if last is None or "\n" in last or "\\boxed{" in last:
        return boxed
    return last if boxed is None or _NUMBER.fullmatch(last) else boxed


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for i in range(begin, len(text)):
        escaped = text[i - 1] == "\\"
        depth += 0 if escaped else (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i].strip()
    return None


def _only_one(text: str, where: str) -> str:
    """The one answer in a JSON list of texts, as some datasets have it; other texts as they are."""
    if not text.lstrip().startswith('["'):
        return text
    try:
        answers = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if len(answers) != 1 or not isinstance(answers[0], str):
        raise InputError(f"{where} must have one answer, got {_shown(text)}")
    return answers[0]


def _written_out(number: float, where: str) -> str:
    """Digits without an exponent, which a grader would take for Euler's number."""
    if not math.isfinite(number):
        raise InputError(f"{where} must be text or a finite number, got {number}")
    return str(number) if isinstance(number, int) else f"{Decimal(repr(float(number))):f}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
