"""Rows as responses: those that are good, and what is wrong with the others."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.instruments.diagnosis.declared import PLAIN, Distribution
from tim_jax.instruments.diagnosis.rows import Limits, Response, Row, checked, prompt_text
from tim_jax.tasks.text import encode_prompt, encode_text

# Of a request of chat messages: what makes another prompt of them.
SHAPING = ("chat_template_kwargs", "tools", "continue_final_message", "add_generation_prompt")
# What is assumed of rows that do not say it: the option, and the key of a row.
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "log_probs": "logprobs_mode",
}
_SHOWN = 20  # kinds of bad rows in a message; the exception holds all rows


@dataclass(frozen=True)
class Collected:
    """What was read.

    Attributes:
        responses: the good ones, in their order.
        problems: a line for each bad row: its place, and what is wrong.
        warnings: lines about rows that were taken, but not as they should be.
        silent: option -> how many rows do not say what it was.
    """

    responses: tuple[Response, ...]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    silent: Mapping[str, int] = field(default_factory=dict)

    def assumed(self, default: Distribution) -> str:
        """A line that says what is assumed of silent rows, and the option for it; or ""."""
        words = {
            "temperature": f"temperature {default.temperature:g}",
            "top_k": f"top-k {default.top_k or 'off'}",
            "top_p": f"top-p {default.top_p if default.top_p < 1 else 'off'}",
            "log_probs": f"{'raw' if default.raw else 'processed'} log-probs",
        }
        total = len(self.responses)
        found = [
            f"{words[name]}{f' in {count} rows' if count < total else ''}"
            f" (--{name.replace('_', '-')})"
            for name, count in self.silent.items()
            if count
        ]
        return f"Assumed, where rows do not say it: {', '.join(found)}" if found else ""


class RolloutsError(InputError):
    """Rows that cannot be diagnosed. The message has the first, `problems` a line for each.

    Attributes:
        total: how many rows there are, good and bad.
    """

    def __init__(self, problems: Sequence[str], total: int):
        self.problems, self.total = tuple(problems), total
        super().__init__(problems[0] + (f" ({self.summary})" if total > 1 else ""))

    @property
    def summary(self) -> str:
        """How many are bad, and what can be done."""
        good = self.total - len(self.problems)
        rest = f"; --skip-bad diagnoses the other {good}" if good else ""
        return f"{len(self.problems)} of {self.total} rows are bad{rest}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The problems in their order for a person, those of one kind in one line."""
        return by_kind(self.problems)


def by_kind(problems: Sequence[str]) -> tuple[str, ...]:
    """The first problem of each kind, with a count of the others; at most 20 kinds.

    Two are of one kind if they differ by nothing but places, numbers and quoted values.
    """
    kinds: dict[str, list[str]] = {}
    for line in problems:
        kinds.setdefault(_VALUES.sub("", line.partition(": ")[2]), []).append(line)
    lines = []
    for alike in kinds.values():
        more = len(alike) - 1
        last = alike[-1].partition(": ")[0].rpartition(", ")[2]
        lines.append(alike[0] + (f" (and {more} more like it, the last in {last})" if more else ""))
    hidden = len(lines) - _SHOWN
    return (*lines[:_SHOWN], *([f"... and {hidden} more"] if hidden > 0 else []))


_VALUES = re.compile(r"'[^']*'|[-+]?\d[\d.e+-]*|\b(nan|inf|None|null|true|false)\b", re.IGNORECASE)


def collect(
    rows: Iterable[Row | InputError],
    *,
    limits: Limits,
    tokenizer: Any = None,
    default: Distribution = PLAIN,
    skip_bad: bool = False,
) -> Collected:
    """Returns the rows as responses.

    Args:
      rows: of `readers.read`; an `InputError` stands for a row that could not be read.
      limits: of the model that is to score them.
      tokenizer: for rows that have text in place of token ids. None: such rows are bad.
      default: for rows that do not say what they were drawn from.
      skip_bad: leave bad rows out, if any is good.

    Raises:
      RolloutsError: a row is bad, and they are not skipped, or none is good.
      InputError: there are no rows.
    """
    responses: list[Response] = []
    problems: list[str] = []
    tokenised: list[str] = []
    silent = dict.fromkeys(OPTIONS, 0)
    total = 0
    for row in rows:
        total += 1
        try:
            if isinstance(row, InputError):
                raise row
            values, changed = with_ids(row, tokenizer)
            response = checked(Row(values, row.where), limits=limits, default=default)
            _same_version(response, responses)
        except InputError as error:
            problems.append(f"{error}")
            continue
        responses.append(response)
        tokenised += [row.where] if changed else []
        for option, key in OPTIONS.items():
            silent[option] += values.get(key) is None
    if not total:
        raise InputError("rollouts: there are none")
    if problems and (not skip_bad or not responses):
        raise RolloutsError(problems, total)
    return Collected(tuple(responses), tuple(problems), _warnings(tokenised), silent)


def _warnings(tokenised: Sequence[str]) -> tuple[str, ...]:
    if not tokenised:
        return ()
    return (
        f"{len(tokenised)} rows have text without token ids, from {tokenised[0]} on; they were"
        " tokenised again, which by itself is a common fault: text does not say which tokens were"
        " drawn",
    )


def _same_version(response: Response, before: Sequence[Response]) -> None:
    if before and response.version != before[0].version:
        raise InputError(
            f"{response.where}: weights_version is {shown(response.version)}, but"
            f" {before[0].where} has {shown(before[0].version)}; one diagnosis is of one version"
        )


def with_ids(row: Row, tokenizer: Any) -> tuple[Any, bool]:
    """The values with token ids made of text where only text is there, and whether any were."""
    values = row.values
    if not isinstance(values, Mapping):
        raise InputError(f"{row.where}: must be an object with keys, got {shown(values)}")
    made: dict[str, Any] = {}
    for ids, text in (("prompt_token_ids", "prompt"), ("response_token_ids", "text")):
        if values.get(ids) is not None or not values.get(text):
            continue
        if tokenizer is None:
            raise InputError(f"{row.where}: has {text} but no {ids}, and there is no tokenizer")
        prompt = prompt_text(values[text])
        if ids == "prompt_token_ids" and prompt is not None:
            # Text is taken as the engine was given it; messages went through the template there.
            plain = isinstance(prompt, str)
            made[ids] = encode_prompt(
                tokenizer,
                prompt,
                chat_template=not plain,
                template_options={} if plain else _template_options(row),
                where=f"{row.where}: prompt",
            )
        elif isinstance(values[text], str):
            made[ids] = encode_text(tokenizer, values[text], where=f"{row.where}: {text}")
    return {**values, **made}, bool(made)


def _template_options(row: Row) -> Mapping[str, Any]:
    """What the request of chat messages says of the template."""
    asked = row.values
    shapes = [name for name in ("tools", "continue_final_message") if asked.get(name)]
    shapes += ["add_generation_prompt"] if asked.get("add_generation_prompt") is False else []
    if shapes:
        raise InputError(
            f"{row.where}: {shapes[0]} shaped the prompt, which is not made again from its messages"
            " with it; give prompt_token_ids"
        )
    options = asked.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise InputError(f"{row.where}: chat_template_kwargs must be a mapping, got {options!r}")
    return options
