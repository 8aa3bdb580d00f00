"""Tasks from datasets: rows in a common layout become prompts with ground truths.

`tim_jax.tasks.rows` reads them. Their layout follows from the columns of the first row; named
columns override it.

  GSM8K       `question`, `answer` with the number after `####` in its last line
  MATH        `problem`, `solution` with the answer in its last `\\boxed{}`; `answer` if present
  DAPO, verl  `prompt` as text or messages, `reward_model` with `ground_truth`
  plain       `prompt` (or `question`, `problem`), `answer`

A `prompt` goes before a `question` or `problem`.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Protocol

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import check_whole, expanded, shown
from tim_jax.tasks.base import Example, Grader, Message, Task, share
from tim_jax.tasks.rows import Row, read_rows

# (prompt, ground truth) columns, the first pair that a row has. `a.b` is column b inside column a.
LAYOUTS = (
    ("prompt", "reward_model.ground_truth"),
    # Before the others: who maps a dataset to prompts, as for TRL, leaves its first columns in it.
    ("prompt", "answer"),
    ("prompt", "solution"),
    ("question", "answer"),
    ("problem", "answer"),
    ("problem", "solution"),
)
PLACE = "{prompt}"


@dataclass(frozen=True)
class DatasetSource:
    """Where a dataset is and how to read it.

    Attributes:
      path: file, folder or hub name, as for `read_rows`.
      split, subset: of a folder or a hub dataset, as for `read_rows`.
      prompt_column, answer_column: override the detection; `a.b` is column b inside column a. A
        `solution` that is named here may be the answer itself, and is read as an answer is.
      template: text with `{prompt}` in it, put around a text prompt or the last user message.
      system: system prompt; makes a text prompt a chat, and replaces a chat's own.
      eval_path, eval_split, eval_subset: held-out rows of their own. What is not given is as for
        training, but `subset` is not for another dataset.
      eval_share: without those, this share of the prompts is held out; 0 for no evaluation.
      eval_limit: at most this many held-out prompts, chosen by a hash.
      seed: of the share and the choice.
    """

    path: str
    split: str = "train"
    subset: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    template: str | None = None
    system: str | None = None
    eval_path: str | None = None
    eval_split: str | None = None
    eval_subset: str | None = None
    eval_share: float = 0.05
    eval_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        share("eval_share", self.eval_share)
        check_whole("seed", self.seed, least=0)
        if self.eval_limit is not None:
            check_whole("eval_limit", self.eval_limit, least=1)
        if self.template is not None and PLACE not in self.template:
            raise InputError(f"template must contain {PLACE}, got {self.template!r}")


class Truth(Protocol):
    """Makes the text of a row's answer, as `truth_of` does."""

    def __call__(self, value: object, where: str, *, solution: bool) -> str: ...


def dataset_task(source: DatasetSource, grade: Grader, truth: Truth | None = None) -> Task:
    """Returns the dataset as a task; no prompt is both in training and held out.

    `truth` reads the answers: `truth_of` if None, `state_text` for an environment's states.

    With a share held out, equal prompts fall on the same side. With held-out rows of their own,
    training rows with one of their prompts are left out. Of held-out rows with the same prompt and
    answer one is kept, so that each counts once. `notes` says how many rows are left out.

    Raises:
      InputError: as `read_rows`; for a missing column (naming those present), a value that is no
        prompt or answer (file and line), and if nothing is left to train on or to evaluate.
    """
    rows = read_rows(source.path, split=source.split, subset=source.subset)
    truth = truth or truth_of
    train = _examples(rows, source, truth)
    if source.eval_path is source.eval_split is source.eval_subset is None:
        evaluation = [e for e in train if _hash(e, source.seed) < source.eval_share * 2**64]
        notes = ()
    else:
        evaluation = _examples(_read_held_out(source), source, truth)
        notes = _overlap(train, evaluation)
    held_out = {example.prompt for example in evaluation}
    train = [example for example in train if example.prompt not in held_out]
    if not train:
        raise InputError(
            f"dataset {source.path!r}: all prompts are held out, none left to train on"
        )
    if not evaluation and source.eval_share:
        raise InputError(
            f"dataset {source.path!r}: eval_share={source.eval_share} of {len(rows)} rows holds"
            " none out; raise it, or set it to 0 for no evaluation"
        )
    distinct = _distinct(evaluation)
    if repeated := len(evaluation) - len(distinct):
        notes = (*notes, f"{repeated} of {len(evaluation)} held-out rows left out: not new")
    if source.eval_limit is not None:
        distinct.sort(key=lambda e: _hash(e, source.seed))
        del distinct[source.eval_limit :]
    return Task(source.path, tuple(train), tuple(distinct), grade, notes)


def _read_held_out(source: DatasetSource) -> list[Row]:
    if source.eval_path is None and expanded(source.path).is_file():
        raise InputError(f"dataset {source.path!r} is one file, without splits: set eval_path")
    path, split = source.eval_path or source.path, source.eval_split or source.split
    same = expanded(path) == expanded(source.path)
    subset = source.subset if same else None  # names are of one dataset
    return read_rows(path, split=split, subset=source.eval_subset or subset)


def _examples(rows: Sequence[Row], source: DatasetSource, truth: Truth) -> list[Example]:
    columns = _columns(rows[0], source)
    examples = [_example(row, columns, source, truth) for row in rows]
    check_hidden(examples, columns[0])
    return [replace(example, prompt=_dressed(example.prompt, source)) for example in examples]


def _columns(row: Row, source: DatasetSource) -> tuple[str, str]:
    for prompt, answer in LAYOUTS:
        prompt, answer = source.prompt_column or prompt, source.answer_column or answer
        if _has(row.values, prompt) and _has(row.values, answer):
            return prompt, answer
    for name in (source.prompt_column, source.answer_column):
        if name is not None and not _has(row.values, name):
            raise _missing(row, name)
    raise InputError(
        f"dataset {row.where}: no layout fits the columns {_names(row)}; name them by prompt_column"
        f" and answer_column, or have one of {', '.join(f'{p} + {a}' for p, a in LAYOUTS)}"
    )


def _example(row: Row, columns: tuple[str, str], source: DatasetSource, truth: Truth) -> Example:
    where, (prompt, answer) = f"dataset {row.where}", columns
    check_beside(row.values, columns, where)
    asked = prompt_of(_get(row, prompt), f"{where}: column {prompt!r}")
    solution = answer == "solution" and source.answer_column is None
    told = truth(_get(row, answer), f"{where}: column {answer!r}", solution=solution)
    return Example(asked, told, where=row.where)


def _dressed(prompt: str | tuple[Message, ...], source: DatasetSource) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        text = prompt if source.template is None else source.template.replace(PLACE, prompt)
        return text if source.system is None else _chat(source.system, Message("user", text))
    last = max((i for i, m in enumerate(prompt) if m.role == "user"), default=None)
    if source.template is not None and last is not None:
        text = source.template.replace(PLACE, prompt[last].content)
        prompt = (*prompt[:last], Message("user", text), *prompt[last + 1 :])
    if source.system is None:
        return prompt
    return _chat(source.system, *(m for m in prompt if m.role != "system"))


def _chat(system: str, *rest: Message) -> tuple[Message, ...]:
    return (Message("system", system), *rest)


def _hash(example: Example, seed: int) -> int:
    text = f"{seed}\0{example.prompt!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def _overlap(train: Sequence[Example], evaluation: Sequence[Example]) -> tuple[str, ...]:
    held_out = {example.prompt for example in evaluation}
    count = sum(example.prompt in held_out for example in train)
    return (f"{count} training rows left out: their prompts are held out",) if count else ()


def _distinct(examples: Sequence[Example]) -> list[Example]:
    """The first example of each prompt and answer, in their order."""
    first: dict[tuple[Prompt, str], Example] = {}
    for example in examples:
        first.setdefault((example.prompt, example.answer), example)
    return list(first.values())


def _has(values: Mapping[str, Any], column: str) -> bool:
    if column in values:
        return True
    outer, dot, inner = column.partition(".")
    return bool(dot) and isinstance(values.get(outer), Mapping) and _has(values[outer], inner)


def _get(row: Row, column: str) -> object:
    values: Any = row.values
    if not _has(values, column):
        raise _missing(row, column)
    while column not in values:
        outer, _, column = column.partition(".")
        values = values[outer]
    return values[column]


def _missing(row: Row, column: str) -> InputError:
    hint = did_you_mean(column, map(str, row.values))
    return InputError(f"dataset {row.where}: no column {column!r}; has {_names(row)}{hint}")


def _names(row: Row) -> str:
    return ", ".join(row.values) or "none"


# What the values of a row mean: a prompt, and the answer in a reference solution. What would lose
# its meaning is refused: messages with more than a role and content, images, a prompt that has its
# answer in it, and a solution in which no answer can be told from the rest.

Prompt = str | tuple[Message, ...]

_MARKER = re.compile(r"(?<!#)####(?!#)")  # GSM8K's, but also a heading of Markdown
_BOX = re.compile(r"\\(boxed|fbox)(?![A-Za-z])\s*")
_FORMULA_END = re.compile(r"\$|\\[)\]]|\n")
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
    raise InputError(f"{where} must be text or a list of messages, not empty; got {shown(value)}")


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
                    f" lost; write it into the content, or leave the row out: {shown(value)}"
                )
            return Message(role, content)
    raise InputError(f"{where}: a message needs a role and a content of text, got {shown(value)}")


def _empty(value: object) -> bool:
    """What Parquet files have where other rows have a value."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def check_open(prompt: Prompt, where: str) -> None:
    """Refuses messages that the assistant has answered already."""
    if not isinstance(prompt, str) and prompt and prompt[-1].role == "assistant":
        raise InputError(
            f"{where} ends with the assistant's turn, {shown(prompt[-1].content)}, so that the"
            " prompt has its answer in it; leave that message out"
        )


def check_hidden(examples: Sequence[Example], column: str) -> None:
    """Refuses a prompt at whose end the ground truth stands, as in a solution.

    An ending only shows how an answer is to be written if a fifth of the prompts that have it, or
    more, have other truths. Fewer may be wrong labels.
    """
    shared: set[str] = set()
    for example in examples:
        end = _hidden(example)
        if end is None or end in shared:
            continue
        truths = [other.answer for other in examples if _ending(other).endswith(end)]
        if 5 * sum(truth != example.answer for truth in truths) < len(truths):
            raise InputError(
                f"dataset {example.where}: column {column!r} ends with its answer,"
                f" {shown(_ending(example)[-40:])}; name the column of the question as"
                " prompt_column, or take the solution out of it"
            )
        shared.add(end)


def _hidden(example: Example) -> str | None:
    """The end of the prompt that is the ground truth as a solution has it, if there is one."""
    ends = (f"\\boxed{{{example.answer}}}", f"#### {example.answer}")
    return next((end for end in ends if _ending(example).endswith(end)), None)


def _ending(example: Example) -> str:
    prompt = example.prompt
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return text.rstrip(" \t\n.$")


def check_beside(row: Mapping[str, Any], used: tuple[str, ...], where: str) -> None:
    """Refuses a row with images or tools: its prompt means nothing without them."""
    for name in _BESIDE:
        if name not in used and not _empty(row.get(name)):
            raise InputError(
                f"{where} has {name!r}, which prompts of text do not keep; leave such rows out"
            )


def truth_of(value: object, where: str, *, solution: bool) -> str:
    """Returns a row's ground truth as text.

    JSON of a list or an object, such as the tests of a program, is taken whole. Of a list of one
    text, that is the text.

    Args:
      solution: whether it is a worked solution, which must say which part of it is the answer.

    Raises:
      InputError: it is no text and no number, or has no answer, or several.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{where} must be text or a number, got {shown(value)}")
    text = value if isinstance(value, str) else _written_out(value, where)
    text = _only_one(text, where)
    if not solution and _is_json(text):
        return text.strip()
    if (solution or _MARKER.search(text)) and _marked(text) is None:
        needs = "no \\boxed{} answer" if solution else "headings (####), but no answer that is told"
        hint = "; if it is the answer itself, set task.answer_column=solution" if solution else ""
        raise InputError(f"{where} has {needs}: {shown(text[-60:])}{hint}")
    truth = truth_in(text)
    if not truth:
        raise InputError(f"{where} has an empty answer: {shown(text[-60:])}")
    return truth


def state_text(value: object, where: str, *, solution: bool) -> str:
    """Returns a row's answer as the text that an environment's state begins as.

    That is `truth_of` it, but JSON of a list or an object is taken as it is, a list of one too.

    Raises:
      InputError: as `truth_of`.
    """
    if isinstance(value, str) and _is_json(value):
        return value
    return truth_of(value, where, solution=solution)


def _is_json(text: str) -> bool:
    """Whether a text is a list or an object."""
    if text.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return True
    return False


def truth_in(text: str) -> str:
    """Returns the final answer in a reference solution, or all of a text that is only an answer.

    That is what follows `####` in the last line (GSM8K), else the content of the last `\\boxed{}`,
    or of the last `\\fbox{}` if there is none. Without braces that is the rest of the formula.
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
    if last is None or "\n" in last or _BOX.search(last):
        return boxed
    return last if boxed is None or _NUMBER.fullmatch(last) else boxed


def _last_boxed(text: str) -> str | None:
    boxes = sorted(_BOX.finditer(text), key=lambda box: box[1] == "boxed")
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        return _FORMULA_END.split(text[start:], maxsplit=1)[0].strip() or None
    begin, depth = start + 1, 1
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
        raise InputError(f"{where} must have one answer, got {shown(text)}")
    return answers[0]


def _written_out(number: float, where: str) -> str:
    """Digits without an exponent, which a grader would take for Euler's number."""
    if not math.isfinite(number):
        raise InputError(f"{where} must be text or a finite number, got {number}")
    return str(number) if isinstance(number, int) else f"{Decimal(repr(float(number))):f}"
