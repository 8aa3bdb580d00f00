"""What tokens are said to be drawn from: the options of a request, and what they do to logits.

`Distribution` is temperature, top-k and top-p, and `Shaping` what is done to the logits before. An
option that cannot be applied here is refused by its name, unless its value changes nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.common.types import Rollout
from tim_jax.model.execution import Sampling
from tim_jax.policy import scoring

_LARGEST = float(np.finfo(np.float32).max)
_MOST_TOKENS = 2**31 - 1  # more than a response can have
LEFT_OUT = -1e5  # a logit that no temperature makes likely, and of which products are finite


@dataclass(frozen=True)
class Shaping:
    """What is done to logits before the temperature; no value changes anything by itself.

    Bias first, then penalties, then tokens are left out: the order of vLLM.

    Attributes:
        repetition: divides positive logits of tokens that stand in the prompt or before in the
            response, and multiplies negative ones.
        presence: is subtracted from logits of tokens that stand before in the response.
        frequency: is subtracted from them once for each time that they stand there.
        min_p: leaves out tokens below this share of the likeliest token's probability.
        min_tokens: end tokens are left out until there are this many.
        bias: (token, what is added to its logit), in the tokens' order.
        allowed: the tokens that are not left out; empty for all.
        stops: the request's own end tokens, which `min_tokens` leaves out like the model's.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_p: float = 0.0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = {name: f"{name} penalty" for name in ("repetition", "presence", "frequency")}
        names |= {"min_p": "min-p", "min_tokens": "min-tokens"}
        changed = (name for name in names if getattr(self, name) != getattr(UNSHAPED, name))
        words = [f"{names[name]} {getattr(self, name):g}" for name in changed]
        words += [f"a bias on {len(self.bias)} tokens"] if self.bias else []
        words += [f"{len(self.allowed)} allowed tokens"] if self.allowed else []
        return ", ".join(words)


UNSHAPED = Shaping()


@dataclass(frozen=True)
class Distribution:
    """What tokens are said to be drawn from: temperature, then top-k, then top-p.

    Attributes:
        raw: the log-probs are said to be those of the raw logits, before all of this.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    raw: bool = False
    shaping: Shaping = UNSHAPED

    @classmethod
    def of(cls, sampling: Sampling) -> "Distribution":
        """That of a sampler, whose log-probs are processed ones."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p)

    @property
    def truncated(self) -> bool:
        """True if top-k or top-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def shaped(self) -> bool:
        """True if anything is done to the logits before the temperature."""
        return self.shaping != UNSHAPED

    @property
    def plain(self) -> bool:
        """True if tokens are drawn from the softmax of the logits as they are."""
        return self.temperature in (0, 1) and not self.truncated and not self.shaped

    def __str__(self) -> str:
        words = [f"temperature {self.temperature:.4g}"]
        words += [f"top-k {self.top_k}"] if self.top_k else []
        words += [f"top-p {self.top_p:.4g}"] if self.top_p < 1 else []
        words += [str(self.shaping)] if self.shaped else []
        return ", ".join(words)


PLAIN = Distribution()


class Option(NamedTuple):
    """A number among the options: its names, the bounds, and the value that changes nothing."""

    names: tuple[str, ...]
    least: float
    most: float
    neutral: float


_SHAPING = {
    "repetition": Option(("repetition_penalty",), 0.01, 100.0, 1.0),
    "presence": Option(("presence_penalty",), -100.0, 100.0, 0.0),
    "frequency": Option(("frequency_penalty",), -100.0, 100.0, 0.0),
    "min_p": Option(("min_p",), 0.0, 1.0, 0.0),
    "min_tokens": Option(("min_tokens", "min_new_tokens"), 0, math.inf, 0),
}
# Options that cannot be applied here, with the values besides None that change nothing.
_NOTHING = (False, "", 0)
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "tfs_z", "repeat_penalty", "num_beams"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty",), (1,)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "xtc_probability"), (0,)),
    **dict.fromkeys(("dry_multiplier", "mirostat", "dynatemp_range", "smoothing_factor"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "penalty_alpha"), (0,)),
    "top_n_sigma": (0, -1),
    "use_beam_search": (False,),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
    "exponential_decay_length_penalty": (),
    **dict.fromkeys(("bad_words", "bad_words_ids", "sequence_bias", "suppress_tokens"), _NOTHING),
    **dict.fromkeys(("begin_suppress_tokens", "logits_processors"), _NOTHING),
    **dict.fromkeys(("custom_logit_processor", "structured_outputs"), _NOTHING),
    **dict.fromkeys(("guided_decoding", "guided_json", "guided_regex", "guided_choice"), _NOTHING),
    **dict.fromkeys(("guided_grammar", "response_format"), _NOTHING),
}
# Words that other things are called by too, so that they are options in a request alone.
IN_REQUESTS: dict[str, tuple[Any, ...]] = {
    **{"typical": (1,), "guidance_scale": (1,), "min_length": (0,)},
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "structural_tag"), _NOTHING),
}
_LISTS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "stop")
_OWN = ("temperature", "top_k", "top_p", "logprobs_mode")
KEYS = (*_OWN, *(name for one in _SHAPING.values() for name in one.names), *_LISTS, *_REFUSED)


def asked(request: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request, and those that a response or a row says of itself.

    Also those of an inner `sampling_params`, `extra_body` or `meta_info`. Some keys are options in
    a request alone.

    Raises:
      InputError: a number is said twice, with two values, or `sampling_params` is no mapping.
    """
    options = {key: request[key] for key in IN_REQUESTS if request.get(key) is not None}
    for one in (request, *others):
        _add(options, {key: one[key] for key in KEYS if one.get(key) is not None})
        for name in ("sampling_params", "extra_body"):
            inner = one.get(name)
            if isinstance(inner, Mapping):
                _add(options, asked(inner))
            elif inner is not None:
                raise InputError(f"{name} must be a mapping of options, got {shown(inner)}")
        if isinstance(meta := one.get("meta_info"), Mapping):
            _add(options, {key: meta[key] for key in _OWN if meta.get(key) is not None})
    return options


def _add(options: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds options; a number that is there already must be the same."""
    for name, value in more.items():
        before = options.get(name)
        numbers = isinstance(before, int | float) and isinstance(value, int | float)
        if numbers and before != value and not (name == "top_k" and max(before, value) <= 0):
            raise InputError(f"{name} is said twice, as {shown(before)} and as {shown(value)}")
    options |= more


def read(values: Mapping[str, Any], *, default: Distribution, vocabulary: int) -> Distribution:
    """What a row's tokens are said to be drawn from.

    Raises:
      InputError: an option is no number, is out of bounds, or cannot be applied here.
    """
    _refuse(values)
    temperature = _number(values, Option(("temperature",), 0.0, 100.0, default.temperature))
    top_k = int(_number(values, Option(("top_k",), -1, math.inf, default.top_k)))
    top_p = _number(values, Option(("top_p",), 0.0, 1.0, default.top_p))
    if top_p == 0:
        raise InputError("top_p must be a number from 0.0 to 1.0, got 0")
    top_k = max(0, top_k)  # -1 and 0 are both off, in one engine or another
    shaping = _shaping(values, vocabulary)
    said = Distribution(temperature, top_k if top_k < vocabulary else 0, top_p, shaping=shaping)
    if shaping.min_p and top_p < 1:
        raise InputError(
            "min_p together with top_p is not scored here: engines differ in which of the two comes"
            " first"
        )
    return replace(said, raw=_is_raw(values, default) and not said.plain)


def _is_raw(values: Mapping[str, Any], default: Distribution) -> bool:
    mode = values.get("logprobs_mode")
    if mode is None:
        return default.raw
    if mode not in ("raw_logprobs", "processed_logprobs"):
        raise InputError(
            f"logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got {shown(mode)}"
        )
    return mode == "raw_logprobs"


def _refuse(values: Mapping[str, Any]) -> None:
    for name, neutral in (_REFUSED | IN_REQUESTS).items():
        value = values.get(name)
        plain_text = name == "response_format" and value == {"type": "text"}
        if value is None or plain_text or _empty(value) or any(value == one for one in neutral):
            continue
        raise InputError(
            f"{name} = {shown(value)} shaped the draws and cannot be applied here; leave such rows"
            " out (--skip-bad does)"
        )


def _empty(value: Any) -> bool:
    """Whether nothing is in it: such as a dumped value whose fields are all None."""
    if isinstance(value, Mapping):
        return all(x is None or x is False for x in value.values())
    return isinstance(value, Sequence) and not len(value)


def _number(values: Mapping[str, Any], option: Option) -> float:
    for name in option.names:
        value = values.get(name)
        if value is None:
            continue
        number = not isinstance(value, bool) and isinstance(value, int | float)
        whole = option.most == math.inf
        if number and whole and not (abs(value) < _LARGEST and value == int(value)):
            raise InputError(f"{name} must be a whole number, got {shown(value)}")
        if not number or not option.least <= value <= option.most:
            raise InputError(
                f"{name} must be a number from {option.least} to {option.most}, got {shown(value)}"
            )
        return float(value)
    return option.neutral


def _shaping(values: Mapping[str, Any], vocabulary: int) -> Shaping:
    numbers = {name: _number(values, one) for name, one in _SHAPING.items()}
    minimum = min(int(numbers.pop("min_tokens")), _MOST_TOKENS)
    return Shaping(
        **numbers,
        min_tokens=minimum,
        bias=_bias(values.get("logit_bias"), vocabulary),
        allowed=token_ids(values, "allowed_token_ids", vocabulary),
        stops=token_ids(values, "stop_token_ids", vocabulary) if minimum else (),
    )


def _bias(given: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    if not given:
        return ()
    try:
        pairs = given.items() if isinstance(given, Mapping) else given
        # A table has a column for every token that any of its rows names.
        biases = sorted((int(token), float(x)) for token, x in pairs if x is not None)
    except (TypeError, ValueError, OverflowError):
        biases = []
    # One of minus infinity leaves the token out.
    biases = [(token, LEFT_OUT if x == -math.inf else x) for token, x in biases]
    fine = all(0 <= token < vocabulary and math.isfinite(x) for token, x in biases)
    if not biases or not fine:
        raise InputError(
            f"logit_bias must map ids of the model's {vocabulary} tokens to numbers, got"
            f" {shown(given)}"
        )
    return tuple((token, value) for token, value in biases if value)


def token_ids(values: Mapping[str, Any], name: str, vocabulary: int) -> tuple[int, ...]:
    """A list of token ids among a row's options, sorted; empty if it is not there.

    Raises:
      InputError: it is no list of ids of the model's tokens.
    """
    given = values.get(name)
    if given is None or (isinstance(given, Sequence) and not given):
        return ()
    listed = isinstance(given, list)
    if not listed or not all(type(x) is int and 0 <= x < vocabulary for x in given):
        raise InputError(
            f"{name} must be ids of the model's {vocabulary} tokens, got {shown(given)}"
        )
    return tuple(sorted(set(given)))


def check_drawn(tokens: Sequence[int], shaping: Shaping, mask: np.ndarray | None) -> None:
    """Refuses a row whose own options leave out a token that was drawn.

    Those that a loss mask bool[n] hides, such as the output of a tool, were not.
    """
    banned = {token for token, bias in shaping.bias if bias <= LEFT_OUT}
    for place, token in enumerate(tokens if banned or shaping.allowed else ()):
        if mask is not None and not mask[place]:
            continue
        if token in banned or (shaping.allowed and token not in shaping.allowed):
            name = "logit_bias" if token in banned else "allowed_token_ids"
            raise InputError(
                f"response_token_ids[{place}] = {token} was drawn, but {name} leaves it out"
            )


class Shapes(NamedTuple):
    """`declared.Shaping`s of B responses."""

    repetition: jax.Array  # f32[B]
    presence: jax.Array  # f32[B]
    frequency: jax.Array  # f32[B]
    margin: jax.Array  # f32[B], logits this far below the largest are left out: -T log(min-p)
    min_tokens: jax.Array  # i32[B]
    bias: jax.Array  # f32[B, V], or f32[B, 1] if there is none; LEFT_OUT for tokens not allowed
    stops: jax.Array  # bool[B, V], or bool[B, 1]: the requests' own end tokens


def shape_arrays(declared: Sequence[Distribution], rows: int, vocabulary: int) -> Shapes:
    """The shapes of `rows` responses; the last one's are repeated."""
    filled = [*declared, *[declared[-1]] * (rows - len(declared))]
    all_of = [one.shaping for one in filled]
    temperatures = np.asarray([one.temperature or 1.0 for one in filled], np.float32)
    biased = any(one.bias or one.allowed for one in all_of)
    bias = np.zeros((rows, vocabulary if biased else 1), np.float32)
    for row, one in enumerate(all_of):
        if one.allowed:
            bias[row] = LEFT_OUT
            bias[row, list(one.allowed)] = 0.0
        for token, value in one.bias:
            bias[row, token] += value
    stops = np.zeros((rows, vocabulary if any(one.stops for one in all_of) else 1), bool)
    for row, one in enumerate(all_of):
        if one.stops:
            stops[row, list(one.stops)] = True

    def column(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.asarray([getattr(one, name) for one in all_of], dtype)

    with np.errstate(divide="ignore"):
        margin = np.minimum(-np.log(column("min_p")) * temperatures, -LEFT_OUT)
    numbers = (column("repetition"), column("presence"), column("frequency"), margin)
    return Shapes(*map(jnp.asarray, (*numbers, column("min_tokens", np.int32), bias, stops)))


def shape_logits(
    logits: jax.Array,
    tokens: jax.Array,
    places: jax.Array,
    *,
    rollout: Rollout,
    shapes: Shapes,
    stop_tokens: tuple[int, ...],
) -> jax.Array:
    """The logits f32[N, V] that i32[N] tokens at `places` b R + t of a rollout [B, R] are drawn by.

    The token itself is never left out, as in `policy.distribution`.
    """
    row, place = places // rollout.responses.shape[1], places % rollout.responses.shape[1]
    before, inside = _counts(logits.shape, row, place, rollout)
    z = logits + shapes.bias[row]
    factor = jnp.where(before, shapes.repetition[row][:, None], 1.0)
    z = jnp.where(z > 0, z / factor, z * factor)
    z -= shapes.frequency[row][:, None] * inside
    z -= shapes.presence[row][:, None] * (inside > 0).astype(jnp.float32)
    early = place < shapes.min_tokens[row]
    ids = jnp.arange(logits.shape[1])
    stops = jnp.isin(ids, jnp.asarray(stop_tokens, jnp.int32))[None, :] | shapes.stops[row]
    own = ids[None, :] == tokens[:, None]
    z = jnp.where(early[:, None] & stops & ~own, LEFT_OUT, z)
    rare = z < jnp.max(z, axis=-1, keepdims=True) - shapes.margin[row][:, None]
    return jnp.where(rare & ~own, jnp.minimum(z, LEFT_OUT), z)


def _counts(
    size: tuple[int, ...], row: jax.Array, place: jax.Array, rollout: Rollout
) -> tuple[jax.Array, jax.Array]:
    """[N, V]: whether a token stands before the place, and how often in the response."""
    history = scoring.sequences(rollout)[row]
    at = jnp.arange(history.shape[1])[None, :] - rollout.prompt_lengths[row][:, None]
    past = at < place[:, None]
    numbers = jnp.arange(size[0])[:, None]
    zeros = jnp.zeros(size, jnp.float32)
    before = zeros.at[numbers, history].add(past.astype(jnp.float32)) > 0
    return before, zeros.at[numbers, history].add((past & (at >= 0)).astype(jnp.float32))
