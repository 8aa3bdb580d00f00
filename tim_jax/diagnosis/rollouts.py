"""Responses as another system recorded them: token ids, log-probs, and what is known of the rest.

A row is a mapping with the keys of `KEYS`; `readers` makes rows of what other systems write.
`collect` turns rows into `Response`s, and says of each bad row what is wrong with it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tim_jax.errors import InputError, did_you_mean
from tim_jax.inputs import shown, wrong_number
from tim_jax.tasks.base import Message
from tim_jax.tasks.text import encode_prompt, encode_text

KEYS = (
    "prompt_token_ids",
    "response_token_ids",
    "logprobs",
    "temperature",
    "top_k",
    "top_p",
    "top_logprobs",
    "weights_version",
    "prompt",
    "text",
    "mask",
    "finish_reason",
)
# Of a request of chat messages: what makes another prompt of them.
SHAPING = ("chat_template_kwargs", "tools", "continue_final_message", "add_generation_prompt")
_LARGEST = float(np.finfo(np.float32).max)
_TOP_TOLERANCE = 1e-3  # two roundings of one number
_SHOWN = 20  # bad lines in a message; the exception holds all


class Row(NamedTuple):
    """One row of a file, and its place, such as `rollouts.jsonl, line 3`."""

    values: Any
    where: str


@dataclass(frozen=True)
class Distribution:
    """What tokens are said to be drawn from: temperature, then top-k, then top-p."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    @property
    def truncated(self) -> bool:
        """True if top-k or top-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1

    def __str__(self) -> str:
        words = [f"temperature {self.temperature:.4g}"]
        words += [f"top-k {self.top_k}"] if self.top_k else []
        words += [f"top-p {self.top_p:.4g}"] if self.top_p < 1 else []
        return ", ".join(words)


PLAIN = Distribution()


@dataclass(frozen=True, eq=False)
class Response:
    """One recorded response of n tokens."""

    where: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: np.ndarray  # f32[n], as recorded
    declared: Distribution
    mask: np.ndarray | None = None  # bool[n], the loss mask, if the system kept one
    version: str | None = None  # of the weights
    prompt_text: str | tuple[Message, ...] | None = None
    finished: bool | None = None  # False: the longest length cut it off; None: not said

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Collected:
    """What was read.

    Attributes:
        responses: the good ones, in their order.
        problems: a line for each bad row: its place, and what is wrong.
        warnings: lines about rows that were taken, but not as they should be.
    """

    responses: tuple[Response, ...]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class RolloutsError(InputError):
    """Rows that cannot be diagnosed. The message has the first, `problems` a line for each."""

    def __init__(self, problems: Sequence[str], total: int):
        self.problems = tuple(problems)
        more = f" ({len(problems)} of {total} are bad; the rest can be diagnosed with --skip-bad)"
        super().__init__(problems[0] + (more if total > 1 else ""))

    @property
    def lines(self) -> tuple[str, ...]:
        """The first problems, for a person."""
        hidden = len(self.problems) - _SHOWN
        more = (f"... and {hidden} more",) if hidden > 0 else ()
        return self.problems[:_SHOWN] + more


class Limits(NamedTuple):
    """What a model takes."""

    vocabulary: int
    positions: int


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
    if not total:
        raise InputError("rollouts: there are none")
    if problems and (not skip_bad or not responses):
        raise RolloutsError(problems, total)
    return Collected(tuple(responses), tuple(problems), _warnings(tokenised))


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
        prompt = _prompt_text(values[text])
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


def checked(row: Row, *, limits: Limits, default: Distribution = PLAIN) -> Response:
    """A row with token ids as a response.

    Raises:
      InputError: what is wrong with it, with its place.
    """
    values, where = row
    prompt = _ids(row, "prompt_token_ids", limits.vocabulary)
    tokens = _ids(row, "response_token_ids", limits.vocabulary)
    log_probs = _log_probs(row, len(tokens))
    if len(prompt) + len(tokens) > limits.positions:
        raise InputError(
            f"{where}: prompt and response have {len(prompt) + len(tokens)} tokens, more than the"
            f" model's {limits.positions} positions"
        )
    _check_top(row, tokens, log_probs)
    version = values.get("weights_version")
    reason = values.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    return Response(
        where=where,
        prompt=prompt,
        tokens=tokens,
        log_probs=log_probs,
        declared=_declared(row, default, limits.vocabulary),
        mask=_mask(row, len(tokens)),
        version=None if version is None else str(version),
        prompt_text=_prompt_text(values.get("prompt")),
        finished=None if reason is None else reason != "length",
    )


def _ids(row: Row, key: str, vocabulary: int) -> tuple[int, ...]:
    ids = _list(row, key)
    if not ids:
        raise InputError(f"{row.where}: {key} is empty")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InputError(f"{row.where}: {key}[{place}] must be a token id, got {shown(token)}")
        if not 0 <= token < vocabulary:
            raise InputError(
                f"{row.where}: {key}[{place}] = {token} is outside the model's vocabulary of"
                f" {vocabulary}"
            )
    return tuple(int(token) for token in ids)


def _list(row: Row, key: str) -> list[Any]:
    value = row.values.get(key)
    if value is None:
        known = [name for name in row.values if name not in KEYS]
        hint = did_you_mean(key, known) if known else ""
        raise InputError(f"{row.where}: has no {key}{hint}")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"{row.where}: {key} must be a list, got {shown(value)}")
    return list(value)


def _log_probs(row: Row, count: int) -> np.ndarray:
    found = _list(row, "logprobs")
    if len(found) != count:
        hint = "; was the end token stripped?" if len(found) == count + 1 else ""
        raise InputError(f"{row.where}: {len(found)} logprobs for {count} tokens{hint}")
    for place, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise InputError(f"{row.where}: logprobs[{place}] must be a number, got {shown(value)}")
        if wrong_number(value) is not None or not -_LARGEST < value < _LARGEST:
            raise InputError(
                f"{row.where}: logprobs[{place}] is {shown(value)}, which is not finite"
            )
        if value > 0:
            raise InputError(
                f"{row.where}: logprobs[{place}] = {value:.6g} is positive; a log-probability is"
                " at most 0"
            )
    return np.asarray(found, np.float32)


def _declared(row: Row, default: Distribution, vocabulary: int) -> Distribution:
    given = {}
    for key, least, most in (
        ("temperature", 0.0, 100.0),
        ("top_k", -1, math.inf),
        ("top_p", 0.0, 1.0),
    ):
        value = row.values.get(key)
        if value is None:
            given[key] = getattr(default, key)
            continue
        number = not isinstance(value, bool) and isinstance(value, int | float | np.number)
        if number and key == "top_k" and not (abs(value) < _LARGEST and value == int(value)):
            raise InputError(f"{row.where}: top_k must be a whole number, got {shown(value)}")
        if not number or not least <= value <= most or (key == "top_p" and value == 0):
            raise InputError(
                f"{row.where}: {key} must be a number from {least} to {most}, got {shown(value)}"
            )
        given[key] = value
    top_k = max(0, int(given["top_k"]))  # -1 and 0 are both off, in one engine or another
    return Distribution(
        float(given["temperature"]), top_k if top_k < vocabulary else 0, float(given["top_p"])
    )


def _mask(row: Row, count: int) -> np.ndarray | None:
    if row.values.get("mask") is None:
        return None
    found = _list(row, "mask")
    if len(found) != count or any(value not in (0, 1) for value in found):
        raise InputError(
            f"{row.where}: mask must have {count} times 0 or 1, got {len(found)}: {shown(found)}"
        )
    return np.asarray(found, bool)


def _check_top(row: Row, tokens: Sequence[int], log_probs: np.ndarray) -> None:
    """`top_logprobs`, a mapping of token ids for every token, must agree with `logprobs`."""
    if row.values.get("top_logprobs") is None:
        return
    top = _list(row, "top_logprobs")
    if len(top) != len(tokens):
        raise InputError(f"{row.where}: {len(top)} top_logprobs for {len(tokens)} tokens")
    for place, (choices, token) in enumerate(zip(top, tokens, strict=True)):
        if not isinstance(choices, Mapping):
            continue
        given = choices.get(str(token), choices.get(token))
        if given is None:
            continue
        if not isinstance(given, float | int) or wrong_number(given) is not None:
            raise InputError(
                f"{row.where}: top_logprobs[{place}] must have finite numbers, got {shown(given)}"
            )
        if abs(given - log_probs[place]) > _TOP_TOLERANCE:
            raise InputError(
                f"{row.where}: logprobs[{place}] = {log_probs[place]:.6g}, but top_logprobs has"
                f" {given:.6g} for the same token {token}; one of the two is shifted"
            )


def _prompt_text(value: Any) -> str | tuple[Message, ...] | None:
    if isinstance(value, str):
        return value or None
    if isinstance(value, Sequence) and value:
        try:
            return tuple(Message(str(m["role"]), _content(m["content"])) for m in value)
        except (KeyError, TypeError):
            return None
    return None


def _content(value: Any) -> str:
    """The text of a chat message; parts of it that are text are joined.

    Raises:
      TypeError: there is none, or another part.
    """
    if isinstance(value, str):
        return value
    if any(part["type"] != "text" for part in value):
        raise TypeError
    return "".join(part["text"] for part in value)
