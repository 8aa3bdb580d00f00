"""Tasks from datasets: rows in a common layout become prompts with ground truths.

`tim_jax.tasks.rows` reads them. Their layout follows from the columns of the first row; named
columns override it.

  GSM8K       `question`, `answer` with the number after `####` in its last line
  MATH        `problem`, `solution` with the answer in its last `\\boxed{}`; `answer` if present
  DAPO, verl  `prompt` as text or messages, `reward_model` with `ground_truth`
  plain       `prompt` (or `question`, `problem`), `answer`

A `prompt` goes before a `question` or `problem`.

Datasets of reasoning-gym (extra `gym`) and the grader math-verify (extra `math`) work in guarded
worker processes (`guard`): answers may hang a grader, five datasets of reasoning-gym depend on
Python's hash seed, which is fixed there, and some of its scorers evaluate what the policy wrote.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import check_whole, expanded, shown
from tim_jax.tasks.base import (
    ERROR,
    Example,
    Generated,
    Grade,
    Grader,
    Message,
    Prompt,
    Task,
    check_open,
    check_sizes,
    is_json,
    last_text,
    share,
)
from tim_jax.tasks.guard import Limits, Outcome, Pool, Refusal
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
SYSTEM = (
    "Solve the problem. Think step by step first if that helps, then give the final answer alone"
    " between <answer> and </answer>, in the form that the problem asks for."
)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
KEPT = 4096  # problems that a task keeps in memory
ITEM_SECONDS = 60.0  # CPU seconds to make one problem; some datasets search for a good one


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
    examples, notes = _examples(rows, source, truth), ()
    shares = source.eval_path is source.eval_split is source.eval_subset is None
    if shares:
        evaluation = [e for e in examples if _hash(e, source.seed) < source.eval_share * 2**64]
    else:
        evaluation = _examples(_read_held_out(source), source, truth)
    held_out = {example.prompt for example in evaluation}
    train = tuple(example for example in examples if example.prompt not in held_out)
    if not shares and len(train) < len(examples):
        left_out = len(examples) - len(train)
        notes = (f"{left_out} training rows left out: their prompts are held out",)
    if not train:
        raise InputError(
            f"dataset {source.path!r}: all prompts are held out, none left to train on"
        )
    if not evaluation and source.eval_share:
        raise InputError(
            f"dataset {source.path!r}: eval_share={source.eval_share} of {len(rows)} rows holds"
            " none out; raise it, or set it to 0 for no evaluation"
        )
    first: dict[tuple[Prompt, str], Example] = {}
    for example in evaluation:
        first.setdefault((example.prompt, example.answer), example)
    distinct = [*first.values()]
    if repeated := len(evaluation) - len(distinct):
        notes = (*notes, f"{repeated} of {len(evaluation)} held-out rows left out: not new")
    if source.eval_limit is not None:
        distinct.sort(key=lambda e: _hash(e, source.seed))
        del distinct[source.eval_limit :]
    return Task(source.path, train, tuple(distinct), grade, notes)


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
    return [
        replace(example, prompt=_apply_template(example.prompt, source)) for example in examples
    ]


def _columns(row: Row, source: DatasetSource) -> tuple[str, str]:
    for prompt, answer in LAYOUTS:
        prompt, answer = source.prompt_column or prompt, source.answer_column or answer
        if all(_look_up(row.values, name) is not _MISSING for name in (prompt, answer)):
            return prompt, answer
    for name in (source.prompt_column, source.answer_column):
        if name is not None:
            _value(row, name)
    raise InputError(
        f"dataset {row.where}: no layout fits the columns {_names(row)}; name them by prompt_column"
        f" and answer_column, or have one of {', '.join(f'{p} + {a}' for p, a in LAYOUTS)}"
    )


def _example(row: Row, columns: tuple[str, str], source: DatasetSource, truth: Truth) -> Example:
    where, (prompt, answer) = f"dataset {row.where}", columns
    for name in _BESIDE:
        if name not in columns and not _empty(row.values.get(name)):
            raise InputError(
                f"{where} has {name!r}, which prompts of text do not keep; leave such rows out"
            )
    asked = prompt_of(_value(row, prompt), f"{where}: column {prompt!r}")
    solution = answer == "solution" and source.answer_column is None
    told = truth(_value(row, answer), f"{where}: column {answer!r}", solution=solution)
    return Example(asked, told, where=row.where)


def _apply_template(prompt: Prompt, source: DatasetSource) -> Prompt:
    """A prompt with the template and the system's message."""
    if isinstance(prompt, str):
        text = prompt if source.template is None else source.template.replace(PLACE, prompt)
        if source.system is None:
            return text
        return Message("system", source.system), Message("user", text)
    last = max((i for i, m in enumerate(prompt) if m.role == "user"), default=None)
    if source.template is not None and last is not None:
        text = source.template.replace(PLACE, prompt[last].content)
        prompt = (*prompt[:last], Message("user", text), *prompt[last + 1 :])
    if source.system is None:
        return prompt
    return Message("system", source.system), *(m for m in prompt if m.role != "system")


def _hash(example: Example, seed: int) -> int:
    text = f"{seed}\0{example.prompt!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


_MISSING = object()


def _value(row: Row, column: str) -> object:
    found = _look_up(row.values, column)
    if found is _MISSING:
        hint = did_you_mean(column, map(str, row.values))
        raise InputError(f"dataset {row.where}: no column {column!r}; has {_names(row)}{hint}")
    return found


def _look_up(values: object, column: str) -> object:
    if not isinstance(values, Mapping):
        return _MISSING
    if column in values:
        return values[column]
    outer, dot, inner = column.partition(".")
    return _look_up(values.get(outer), inner) if dot else _MISSING


def _names(row: Row) -> str:
    return ", ".join(row.values) or "none"


# What the values of a row mean: a prompt, and the answer in a reference solution. What would lose
# its meaning is refused: messages with more than a role and content, images, a prompt that has its
# answer in it, and a solution in which no answer can be told from the rest.

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


def check_hidden(examples: Sequence[Example], column: str) -> None:
    """Refuses a prompt at whose end the ground truth stands, as in a solution.

    An ending only shows how an answer is to be written if a fifth of the prompts that have it, or
    more, have other truths. Fewer may be wrong labels.
    """
    shared: set[str] = set()
    for example in examples:
        end = _find_answer_at_end(example)
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


def _find_answer_at_end(example: Example) -> str | None:
    """The end of the prompt that is the ground truth as a solution has it, if there is one."""
    ends = (f"\\boxed{{{example.answer}}}", f"#### {example.answer}")
    return next((end for end in ends if _ending(example).endswith(end)), None)


def _ending(example: Example) -> str:
    return last_text(example.prompt).rstrip(" \t\n.$")


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
    text = value if isinstance(value, str) else _write_digits(value, where)
    text = _only_one(text, where)
    if not solution and _is_table(text):
        return text.strip()
    if (solution or _MARKER.search(text)) and _find_marked_answer(text) is None:
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
    if isinstance(value, str) and _is_table(value):
        return value
    return truth_of(value, where, solution=solution)


def _is_table(text: str) -> bool:
    """Whether a text is a list or an object of JSON."""
    return text.lstrip().startswith(("[", "{")) and is_json(text)


def truth_in(text: str) -> str:
    """Returns the final answer in a reference solution, or all of a text that is only an answer.

    That is what follows `####` in the last line (GSM8K), else the content of the last `\\boxed{}`,
    or of the last `\\fbox{}` if there is none. Without braces that is the rest of the formula.
    A line that begins with `####` may be a heading of Markdown: one with lines after it is, and one
    without a number where there is a box.
    """
    marked = _find_marked_answer(text)
    return text.strip() if marked is None else marked


def _find_marked_answer(text: str) -> str | None:
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


def _write_digits(number: float, where: str) -> str:
    """Digits without an exponent, which a grader would take for Euler's number."""
    if not math.isfinite(number):
        raise InputError(f"{where} must be text or a finite number, got {number}")
    return str(number) if isinstance(number, int) else f"{Decimal(repr(float(number))):f}"


def grade_of(outcome: Outcome) -> Grade:
    """Returns the grade for an outcome whose value is a reward. A fault has reward 0."""
    if outcome.fault is not None:
        return Grade(0.0, outcome.fault)
    return Grade(outcome.value) if math.isfinite(outcome.value) else Grade(0.0, ERROR)


class MathGrader:
    """Reward 1 for a completion whose final answer equals the example's answer, else 0.

    The answer is what `math_verify.parse` finds in the completion: a final-answer phrase, a
    `\\boxed{}`, mathematics in dollars or a plain number, usually the last one. `1/2`, `0.5` and
    `\\frac{2}{4}` are equal. Two boxes close to each other are read as a set, so that a corrected
    answer is wrong; letters are read as a product, in any order. A grade depends only on (answer,
    completion): not on the batch, the number of workers or what they graded before.

    Raises:
      InputError: when made, if `math-verify` is not installed.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        if find_spec("math_verify") is None:
            raise InputError("grading mathematics needs math-verify: pip install 'tim-jax[math]'")
        self._pool = Pool("math", "grading with math", limits or Limits())
        self._pool.start()
        self.close = self._pool.close

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        pairs = zip(examples, completions, strict=True)
        bodies = [{"answer": example.answer, "completion": text} for example, text in pairs]
        return [grade_of(outcome) for outcome in self._pool.map(bodies)]

    def __enter__(self) -> "MathGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gym_task(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    train_size: int = 4096,
    eval_size: int = 128,
    system: str | None = SYSTEM,
    limits: Limits | None = None,
) -> Task:
    """Returns the reasoning-gym dataset `name` as a task.

    Items 0 to train_size - 1 of the dataset are for training, the next eval_size for evaluation,
    without repeated questions. A training item whose question is held out is replaced by the next
    one that is not.

    The answer is the text of the last `<answer>...</answer>`, or the whole completion without a
    system prompt; rewards are the dataset's own, from 0 to 1.

    Args:
      parameters: the dataset's own, without `seed` and `size`.
      system: system prompt of a chat; None gives the bare question as plain text.

    Raises:
      InputError: if reasoning-gym is missing, for an unknown name or parameter (the nearest is
        named) or a value that the dataset refuses, and if it has too few different questions.
    """
    if find_spec("reasoning_gym") is None:
        raise InputError(f"task {name!r} needs reasoning-gym: pip install 'tim-jax[gym]'")
    for key in ("seed", "size"):
        if key in (parameters or {}):
            raise InputError(f"reasoning-gym task {name!r}: {key!r} is set by the task, not here")
    seed = check_whole("seed", seed, least=0)
    check_sizes(train_size, eval_size)
    given = {**(parameters or {}), "seed": seed, "size": train_size + eval_size}
    pool = Pool("gym", "grading with gym", limits or Limits(), name=name, parameters=given)
    dataset = GymDataset(name, pool, system)
    evaluation = _distinct(dataset.examples(range(train_size, train_size + eval_size)))
    held_out = frozenset(last_text(example.prompt) for example in evaluation)

    @lru_cache(maxsize=KEPT)
    def train_item(index: int) -> Example:
        for step in range(train_size):
            example = dataset.examples([(index + step) % train_size])[0]
            if last_text(example.prompt) not in held_out:
                return example
        raise InputError(f"reasoning-gym task {name!r}: all training questions are held out")

    train_item(0)
    lacking = eval_size - len(evaluation)
    notes = (f"{lacking} of {eval_size} evaluation questions left out: not new",) if lacking else ()
    return Task(f"gym:{name}", Generated(train_item, train_size), evaluation, dataset, notes)


@dataclass(frozen=True)
class GymDataset:
    """One dataset in the workers: makes its examples, and is the grader of their answers.

    A grade is the dataset's own score, 0 to 1. A score that is not finite is a fault.
    """

    name: str
    pool: Pool
    system: str | None

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """Returns the items of these numbers.

        Raises:
          InputError: the data set refuses its parameters, or cannot make an item.
        """
        bodies = [{"index": int(index)} for index in indices]
        try:
            outcomes = self.pool.map(bodies, seconds=ITEM_SECONDS)
        except Refusal as refusal:
            names = refusal.reply.get("known")
            hint = did_you_mean(refusal.reply.get("parameter", self.name), names) if names else ""
            raise InputError(f"reasoning-gym task {self.name!r}: {refusal}{hint}") from None
        return [self._example(i, outcome) for i, outcome in zip(indices, outcomes, strict=True)]

    def _example(self, index: int, outcome: Outcome) -> Example:
        if outcome.fault is not None:
            raise InputError(
                f"reasoning-gym task {self.name!r}: item {index} could not be made:"
                f" {outcome.fault} {outcome.detail}".rstrip()
            )
        question = outcome.value["question"]
        prompt = question
        if self.system is not None:
            prompt = (Message("system", self.system), Message("user", question))
        return Example(prompt, str(outcome.value["answer"] or ""), {"index": index})

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        pairs = zip(examples, map(self._answer, completions), strict=True)
        bodies = [{"index": example.data["index"], "answer": text} for example, text in pairs]
        return [grade_of(outcome) for outcome in self.pool.map(bodies)]

    def _answer(self, completion: str) -> str | None:
        answers = [completion] if self.system is None else TAGGED.findall(completion)
        return answers[-1].strip() if answers else None

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        self.pool.close()


def _distinct(examples: Sequence[Example]) -> tuple[Example, ...]:
    by_question = {last_text(example.prompt): example for example in reversed(examples)}
    return tuple(by_question.values())[::-1]
