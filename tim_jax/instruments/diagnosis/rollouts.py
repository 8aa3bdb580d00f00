"""Recorded responses: rows, their checks, what is good of them, and what is wrong with the others.

A row is a mapping with the keys of `KEYS`; `readers` makes rows of what other systems write.
"""

import base64
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import shown, wrong_number
from tim_jax.common.types import route_dtype
from tim_jax.instruments.diagnosis import declared
from tim_jax.instruments.diagnosis.declared import PLAIN, Distribution
from tim_jax.instruments.diagnosis.rows import Ended, Row, how_ended, is_gap, prompt_text, with_ids
from tim_jax.model.config import ModelConfig
from tim_jax.tasks.base import Message

KEYS = (
    *("prompt_token_ids", "response_token_ids", "logprobs", "top_logprobs", "weights_version"),
    *("prompt", "text", "mask", "finish_reason", "stop_reason"),
    *("supports", "kept_log_mass", "routes", "episode", "turn", "turn_token_ids"),
    *declared.KEYS,
)
_LARGEST = float(np.finfo(np.float32).max)
_TOP_TOLERANCE = 1e-3  # two roundings of one number
_ABOVE_ZERO = 1e-4  # what rounding makes of the log-prob of a certain token
# What is assumed of rows that do not say it: the option, and the key of a row.
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "log_probs": "logprobs_mode",
}
_SHOWN = 20  # kinds of bad rows in a message; the exception holds all rows
_VALUES = re.compile(r"'[^']*'|[-+]?\d[\d.e+-]*|\b(nan|inf|None|null|true|false)\b", re.IGNORECASE)

Values = Mapping[str, Any]  # of a row, with the keys of `KEYS`


@dataclass(frozen=True, eq=False)
class Response:
    """One recorded response of n tokens.

    Attributes:
        where: the place of its row.
        log_probs: f32[n], as recorded; NaN where the mask is 0, whatever stands there.
        mask: bool[n], the loss mask, if the system kept one.
        version: of the weights.
        ended: how it is said to have ended; None if that is not said.
        end: the end token by which it is said to have ended, if that is said.
        stops: end tokens of the request, besides the model's.
        supports: i32[n, K], the tokens that each was drawn among, then -1; -1 alone: among all.
        kept_log_mass: f32[n], the log-probability of these together, if that alone was recorded.
        routes: u8 or u16[p + n, L, k], the experts of each position in each layer of a mixture, the
            most probable first; 0 at the last recorded token, of which they are not known.
        episode, turn: of which episode of several turns it is, and its number there.
        turns: of a whole conversation, the ids that were drawn, turn by turn.
    """

    where: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: np.ndarray
    declared: Distribution
    mask: np.ndarray | None = None
    version: str | None = None
    prompt_text: str | tuple[Message, ...] | None = None
    ended: Ended | None = None
    end: int | None = None
    stops: tuple[int, ...] = ()
    supports: np.ndarray | None = None
    kept_log_mass: np.ndarray | None = None
    routes: np.ndarray | None = None
    episode: str | None = None
    turn: int | None = None
    turns: tuple[tuple[int, ...], ...] | None = None

    @property
    def replays(self) -> bool:
        """True if it is recorded what each token was drawn among."""
        return self.supports is not None or self.kept_log_mass is not None

    @property
    def kept(self) -> np.ndarray:
        """bool[n], the mask; True everywhere without one."""
        return np.ones(len(self), bool) if self.mask is None else self.mask

    def drawn_size(self, stops: Collection[int]) -> int:
        """Tokens up to the last that the mask leaves, and an end token that it hides behind it.

        End tokens are `stops` and those of the request. Padding by one of them looks like one.
        """
        ends, places = {*stops, *self.stops, self.end}, np.flatnonzero(self.kept)
        size = int(places[-1]) + 1 if len(places) else 0
        ended = size > 0 and self.tokens[size - 1] in ends
        return size + (size < len(self) and not ended and self.tokens[size] in ends)

    def without_padding(self, stops: Collection[int]) -> "Response":
        """The response without what it is filled up with: one masked token, twice or more.

        A tool's reply at the end stays, so that no response is said to lack an end token there.
        """
        drawn, size = self.drawn_size(stops), len(self)
        while drawn and size > drawn and self.tokens[size - 1] == self.tokens[-1]:
            size -= 1
        if len(self) - size < 2:
            return self
        of_tokens = ("tokens", "log_probs", "mask", "supports", "kept_log_mass")
        given = {name: getattr(self, name) for name in of_tokens}
        cut = {name: None if x is None else x[:size] for name, x in given.items()}
        routes = None if self.routes is None else self.routes[: len(self.prompt) + size]
        return replace(self, **cut, routes=routes)

    def __len__(self) -> int:
        return len(self.tokens)


class Limits(NamedTuple):
    """What a model takes."""

    vocabulary: int
    positions: int
    # Layers of experts, experts of a token, and of a layer.
    routes: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, config: ModelConfig) -> "Limits":
        """Those of an architecture."""
        routes = config.expert_layers, config.num_experts_per_tok, config.num_experts
        return cls(config.vocab_size, config.most_positions, routes)


def checked(
    values: Values, where: str, *, limits: Limits, default: Distribution = PLAIN
) -> Response:
    """A row with token ids as a response.

    Raises:
      InputError: what is wrong with it, without its place.
    """
    prompt = _ids(values, "prompt_token_ids", limits.vocabulary)
    tokens = _ids(values, "response_token_ids", limits.vocabulary)
    mask = _mask(values, len(tokens))
    log_probs = _log_probs(values, len(prompt), len(tokens), mask)
    if len(prompt) + len(tokens) > limits.positions:
        raise InputError(
            f"prompt and response have {len(prompt) + len(tokens)} tokens, more than the model's"
            f" {limits.positions} positions"
        )
    _check_top(values, tokens, log_probs)
    asked = declared.read(values, default=default, vocabulary=limits.vocabulary)
    declared.check_drawn(tokens, asked.shaping, mask)
    supports = _supports(values, tokens, limits.vocabulary, mask)
    mass = _kept_log_mass(values, len(tokens), mask)
    if supports is not None and mass is not None:
        raise InputError("has supports and kept_log_mass; leave the latter out")
    if asked.raw and (supports is not None or mass is not None):
        raise InputError(
            "has raw log-probs, which no support is for; leave supports and kept_log_mass out"
        )
    ended, end = how_ended(values)
    return Response(
        *(where, prompt, tokens, log_probs, asked),
        mask=mask,
        version=_text(values, "weights_version"),
        prompt_text=prompt_text(values.get("prompt")),
        ended=ended,
        end=end,
        stops=declared.token_ids(values, "stop_token_ids", limits.vocabulary),
        supports=supports,
        kept_log_mass=mass,
        routes=_routes(values, len(prompt), len(tokens), limits.routes),
        episode=_text(values, "episode"),
        turn=_turn(values),
        turns=_turns(values, limits.vocabulary),
    )


def _text(values: Values, key: str) -> str | None:
    return None if values.get(key) is None else str(values[key])


def _turn(values: Values) -> int | None:
    number = values.get("turn")
    if number is None or (isinstance(number, int) and not isinstance(number, bool)):
        return number
    raise InputError(f"turn must be a whole number, got {shown(number)}")


def _turns(values: Values, vocabulary: int) -> tuple[tuple[int, ...], ...] | None:
    if values.get("turn_token_ids") is None:
        return None
    turns = []
    for number, one in enumerate(_list(values, "turn_token_ids")):
        try:
            turns.append(_ids({"turn_token_ids": one}, "turn_token_ids", vocabulary))
        except InputError as error:
            raise InputError(f"turn {number}: {error}") from None
    return tuple(turns)


def _supports(
    values: Values, tokens: Sequence[int], vocabulary: int, mask: np.ndarray | None
) -> np.ndarray | None:
    """i32[n, K]: a list of ids a token; or all ids in one list with `offsets`, or with `counts`."""
    given, count = values.get("supports"), len(tokens)
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = _supports_of(given)
    if not isinstance(given, Sequence) or len(given) != count:
        found = len(given) if isinstance(given, Sequence) else shown(given)
        raise InputError(f"supports must be of the {count} response tokens, got {found}")
    if not all(one is None or isinstance(one, Sequence) for one in given):
        raise InputError(f"supports must be a list of ids a token, got {shown(given)}")
    kept = [[x for x in one or () if x != -1] for one in given]
    most = max(map(len, kept))  # one of few sizes, so that few programs are compiled
    array = np.full((count, 1 << max(most - 1, 0).bit_length()), -1, np.int32)
    for place, (one, token) in enumerate(zip(kept, tokens, strict=True)):
        if not all(type(x) is int and 0 <= x < vocabulary for x in one):
            raise InputError(
                f"supports[{place}] must be ids of the model's {vocabulary} tokens, got"
                f" {shown(one)}"
            )
        if one and token not in one and (mask is None or mask[place]):
            raise InputError(
                f"response_token_ids[{place}] = {token} was drawn, but is not among the {len(one)}"
                " tokens of its support; one of the two is shifted"
            )
        array[place, : len(one)] = one
    return array


def _supports_of(given: Mapping[str, Any]) -> list[list[Any]]:
    """The lists of ids that lie one after the other in one."""
    ids = given.get("token_ids", given.get("ids")) or []
    offsets, counts = given.get("offsets"), given.get("counts")
    numbers = offsets or counts or []
    whole = isinstance(numbers, list) and all(type(x) is int for x in numbers)
    if not whole or not isinstance(ids, list):
        raise InputError(
            "supports must have token_ids and offsets or counts, lists of whole numbers; got"
            f" {shown(given)}"
        )
    ends = numbers if offsets else [0, *accumulate(numbers)]
    return [ids[start:end] for start, end in pairwise(ends)]


def _routes(
    values: Values, before: int, count: int, sizes: tuple[int, int, int]
) -> np.ndarray | None:
    """u8 or u16[p + n, L, k], of numbers in lists, or of bytes."""
    given = values.get("routes")
    if given is None:
        return None
    layers, chosen, experts = sizes
    if not experts:
        raise InputError("has routes, but the model is no mixture of experts")
    try:
        array = _route_numbers(given, layers, chosen)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise InputError(f"routes cannot be read: {shown(f'{error}')}") from None
    length = before + count
    array = array[:, -layers:] if array.ndim == 3 and array.shape[1] > layers else array
    if array.shape not in ((length, layers, chosen), (length - 1, layers, chosen)):
        raise InputError(
            f"routes have the shape {array.shape}; they must have one of"
            f" {(length - 1, layers, chosen)}, for every token of prompt and response but the last"
        )
    known = array[: length - 1]
    if known.min() < 0 or known.max() >= experts:
        raise InputError(
            f"routes go from {known.min()} to {known.max()}, but a layer has {experts} experts,"
            " numbered from 0"
        )
    last = np.zeros((1, layers, chosen), np.int32)
    return np.concatenate([known, last]).astype(route_dtype(experts))


def _route_numbers(given: Any, layers: int, chosen: int) -> np.ndarray:
    if isinstance(given, Mapping):
        return _decoded(given["data"]).reshape(tuple(given["shape"]))
    if isinstance(given, str):
        return _decoded(given).reshape(-1, layers, chosen)
    array = np.asarray(given)
    if not np.array_equal(array, array.astype(np.int32)):
        raise ValueError("they must be whole numbers")
    return array.astype(np.int32)


def _decoded(text: str) -> np.ndarray:
    """Bytes of int32 in base64, as SGLang has them, or in base85."""
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        found = base64.b85decode(text)
    return np.frombuffer(found, np.int32)


def _ids(values: Values, key: str, vocabulary: int) -> tuple[int, ...]:
    ids = _list(values, key)
    if not ids:
        raise InputError(f"{key} is empty")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"{key}[{place}] must be a token id, got {shown(token)}")
        if not 0 <= token < vocabulary:
            raise InputError(
                f"{key}[{place}] = {token} is outside the model's vocabulary of {vocabulary}"
            )
    return tuple(ids)


def _list(values: Values, key: str) -> list[Any]:
    value = values.get(key)
    if value is None:
        known = [name for name in values if name not in KEYS]
        raise InputError(f"has no {key}{did_you_mean(key, known) if known else ''}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"{key} must be a list, got {shown(value)}")
    return list(value)


def _log_probs(values: Values, before: int, count: int, mask: np.ndarray | None) -> np.ndarray:
    """f32[n] of the `count` response tokens, NaN where a mask hides what stands there.

    Those of the `before` prompt tokens may come first; the first of all has none, or null or NaN.
    """
    given = _list(values, "logprobs")
    start = len(given) - count
    if start and not (start == before and (before > 1 or is_gap(given[0]))):
        start = start if 1 < start == before - 1 else 0
    if len(given) - start != count:
        hint = "; was the end token stripped?" if len(given) == count + 1 else ""
        raise InputError(f"{len(given)} logprobs for {count} tokens{hint}")
    return _numbers("logprobs", given[start:], mask, hidden=np.nan)


def _kept_log_mass(values: Values, count: int, mask: np.ndarray | None) -> np.ndarray | None:
    if values.get("kept_log_mass") is None:
        return None
    given = _list(values, "kept_log_mass")
    if len(given) != count:
        raise InputError(f"{len(given)} numbers of kept_log_mass for {count} tokens")
    return _numbers("kept_log_mass", given, mask, hidden=0.0)


def _numbers(key: str, given: Sequence[Any], mask: np.ndarray | None, hidden: float) -> np.ndarray:
    """Log-probabilities f32[n], and `hidden` where the mask is 0, whatever stands there."""
    numbers = np.full(len(given), hidden, np.float32)
    for place, value in enumerate(given):
        if mask is not None and not mask[place]:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{key}[{place}] must be a number, got {shown(value)}")
        if wrong_number(value) is not None or not -_LARGEST < value < _LARGEST:
            raise InputError(f"{key}[{place}] is {shown(value)}, which is not finite")
        if value > _ABOVE_ZERO:
            raise InputError(
                f"{key}[{place}] = {value:.6g} is positive; a log-probability is at most 0"
            )
        numbers[place] = min(value, 0.0)
    return numbers


def _mask(values: Values, count: int) -> np.ndarray | None:
    if values.get("mask") is None:
        return None
    mask = _list(values, "mask")
    if len(mask) != count or any(value not in (0, 1) for value in mask):
        raise InputError(f"mask must have {count} times 0 or 1, got {len(mask)}: {shown(mask)}")
    return np.asarray(mask, bool)


def _check_top(values: Values, tokens: Sequence[int], log_probs: np.ndarray) -> None:
    """`top_logprobs`, a mapping of token ids for every token, must agree with `logprobs`."""
    if values.get("top_logprobs") is None:
        return
    top = _list(values, "top_logprobs")
    if len(top) != len(tokens):
        raise InputError(f"{len(top)} top_logprobs for {len(tokens)} tokens")
    for place, (choices, token) in enumerate(zip(top, tokens, strict=True)):
        if not isinstance(choices, Mapping) or np.isnan(log_probs[place]):
            continue
        given = choices.get(str(token), choices.get(token))
        if given is None:
            continue
        if not isinstance(given, float | int) or wrong_number(given) is not None:
            raise InputError(f"top_logprobs[{place}] must have finite numbers, got {shown(given)}")
        if abs(given - log_probs[place]) > _TOP_TOLERANCE:
            raise InputError(
                f"logprobs[{place}] = {log_probs[place]:.6g}, but top_logprobs has {given:.6g} for"
                f" the same token {token}; one of the two is shifted"
            )


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
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    silent: Mapping[str, int]

    def assumed(self, default: Distribution) -> str:
        """A line that says what is assumed of silent rows, and the option for it; or ""."""
        words = {
            "temperature": f"temperature {default.temperature:g}",
            "top_k": f"top-k {default.top_k or 'off'}",
            "top_p": f"top-p {default.top_p if default.top_p < 1 else 'off'}",
            "log_probs": f"{'raw' if default.raw else 'processed'} log-probs",
        }
        total = len(self.responses)
        said = [
            f"{words[name]}{f' in {count} rows' if count < total else ''}"
            f" (--{name.replace('_', '-')})"
            for name, count in self.silent.items()
            if count
        ]
        return f"Assumed, where rows do not say it: {', '.join(said)}" if said else ""


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
    for row in rows:
        if isinstance(row, InputError):
            problems.append(f"{row}")
            continue
        try:
            values, changed = with_ids(row.values, tokenizer)
            responses.append(checked(values, row.where, limits=limits, default=default))
        except InputError as error:
            problems.append(f"{row.where}: {error}")
            continue
        tokenised += [row.where] if changed else []
        for option, key in OPTIONS.items():
            silent[option] += values.get(key) is None
    total = len(responses) + len(problems)
    if not total:
        raise InputError("rollouts: there are none")
    if problems and (not skip_bad or not responses):
        raise RolloutsError(problems, total)
    warnings = [
        f"{len(tokenised)} rows have text without token ids, from {where} on; they were tokenised"
        " again, which by itself is a common fault: text does not say which tokens were drawn"
        for where in tokenised[:1]
    ]
    return Collected(tuple(responses), tuple(problems), tuple(warnings), silent)
