"""What one forward says of every recorded token, kept small enough to try distributions afterwards.

The forward is the learner's, over whole sequences. Besides the exact log-prob under the declared
distribution, it keeps for each token what `chances` computes any temperature, top-k and top-p from
later on the host, without the model: the likeliest logits, and the log-normaliser with its first
two derivatives at a grid of inverse temperatures. No array of [tokens, vocabulary] exists at any
time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tim_jax.common.types import Rollout
from tim_jax.instruments.diagnosis.declared import Distribution, Shapes, shape_arrays, shape_logits
from tim_jax.instruments.diagnosis.rollouts import Response
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.model.weights import Weights
from tim_jax.policy import distribution, scoring

LIKELIEST = 128
# Inverse temperatures, dense enough that the log-normaliser between them is good to about 1e-6.
BETAS = 2.0 ** np.arange(-2.25, 5.01, 0.25)
AT_ONE = int(np.flatnonzero(BETAS == 1.0)[0])
COLDEST, HOTTEST = 1.0 / BETAS[-1], 1.0 / BETAS[0]
# A share of draws that no distribution explains: such as a tie at a threshold, or a rounding.
_STRAY = 1e-5
_TOKENS = 8192  # of a batch
_ROWS = 64  # most sequences of a batch
_TOGETHER = 1024  # tokens that are taken in one shape


class Evidence(NamedTuple):
    """Of N tokens. Logits are relative to the largest one of their position, `peak`.

    Fields of the first group are of response tokens; those of the second are of the S sequences.
    But for `raw` and `raw_stops`, and `exact` where raw log-probs are declared, logits are as they
    are shaped (see `shaping`).
    """

    exact: np.ndarray  # f32[N], what is to be recorded by what is declared, the learner's own bits
    raw: np.ndarray  # f32[N], log-prob by the raw logits, at temperature 1
    logit: np.ndarray  # f32[N], of the token
    above: np.ndarray  # i32[N], how many logits are larger
    peak: np.ndarray  # f32[N]
    best: np.ndarray  # i32[N], the likeliest token
    top: np.ndarray  # f32[N, K], the largest logits, falling
    moments: np.ndarray  # f32[N, G, 3], log-sum-exp at BETAS and its two derivatives
    mass_above: np.ndarray  # f32[N, G], probability at BETAS of all tokens with larger logits
    inside: np.ndarray  # f32[N], log-sum-exp over the tokenizer's part of the vocabulary
    stops: np.ndarray  # f32[N, E], logits of the stop tokens
    raw_stops: np.ndarray  # f32[N, E], their log-probs by the raw logits, at temperature 1

    end_stop: np.ndarray  # f32[S], log-prob that a stop token follows the response, temperature 1

    def take(self, index: np.ndarray) -> "Evidence":
        """The evidence of some tokens; that of sequences stays whole."""
        fields = {name: x[index] for name, x in self._asdict().items() if name != "end_stop"}
        return self._replace(**fields)


class Forward(NamedTuple):
    """What evidence comes from: a model, as it computes."""

    weights: Weights
    execution: Execution  # its sampling is not used
    tokenizer_size: int  # tokens that the tokenizer knows
    stop_tokens: tuple[int, ...]

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has."""
        return self.execution.config.vocab_size


def gather(forward: Forward, responses: Sequence[Response]) -> Evidence:
    """The evidence of the tokens of all responses, in their order."""
    fields = [name for name in Evidence._fields if name != "end_stop"]
    ordered = _of_responses(forward, responses, whole=True)
    whole = {name: np.concatenate([x[name][:-1] for x in ordered]) for name in fields}
    end_stop = np.asarray([x["stop"][-1] for x in ordered], np.float32)
    return Evidence(**whole, end_stop=end_stop)


def log_probs(forward: Forward, responses: Sequence[Response]) -> np.ndarray:
    """f32[N], the field `exact` of the evidence alone, which takes less time."""
    ordered = _of_responses(forward, responses, whole=False)
    return np.concatenate([x["exact"][:-1] for x in ordered])


def chosen_alike(forward: Forward, responses: Sequence[Response]) -> np.ndarray:
    """f64[N, L], the share of the recorded experts of a layer that the model takes as well.

    Of the positions that predict the tokens of all responses, which must have `routes`.
    """
    program = _routing_program(replace(forward.execution, routing="compared"))
    shares: dict[int, np.ndarray] = {}
    for numbers, rollout, _ in _batches(responses):
        found = np.asarray(program(forward.weights, rollout), np.float64)
        for row, number in enumerate(numbers):
            shares[number] = found[row, : len(responses[number])]
    return np.concatenate([shares[number] for number in range(len(responses))])


@lru_cache(maxsize=16)
def _routing_program(execution: Execution) -> Any:
    return jit(partial(scoring.chosen_alike, execution=execution), execution.numerics)


def _of_responses(
    forward: Forward, responses: Sequence[Response], *, whole: bool
) -> list[dict[str, np.ndarray]]:
    """What a program finds of each response's tokens, and of the place after them."""
    parts: dict[int, dict[str, np.ndarray]] = {}
    for numbers, rollout, declared in _batches(responses):
        execution = _execution_for(forward.execution, responses[numbers[0]])
        shaped = None
        if declared.shaped:
            each = [responses[i].declared for i in numbers]
            shaped = shape_arrays(each, len(rollout.lengths), forward.vocabulary)
        special = forward.tokenizer_size, forward.stop_tokens
        run = _program(execution, *special, raw=declared.raw, whole=whole)
        fields = jax.device_get(run(forward.weights, rollout, shaped))
        for row, number in enumerate(numbers):
            count = len(responses[number]) + 1
            parts[number] = {name: x[row, :count].copy() for name, x in fields.items()}
            if (mass := responses[number].kept_log_mass) is not None:
                parts[number]["exact"] -= np.append(mass, np.float32(0.0))
    return [parts[number] for number in range(len(responses))]


def _execution_for(execution: Execution, response: Response) -> Execution:
    declared = response.declared
    # At temperature 0 engines report log-probs of the plain distribution.
    plain = declared.raw or declared.temperature == 0
    whole = plain or response.replays
    sampling = Sampling(
        temperature=1.0 if plain else declared.temperature,
        top_k=0 if whole else declared.top_k,
        top_p=1.0 if whole else declared.top_p,
    )
    routing = "own" if response.routes is None else execution.routing
    return Execution(execution.config, execution.numerics, sampling, routing=routing)


@lru_cache(maxsize=128)
def _program(
    execution: Execution,
    tokenizer_size: int,
    stop_tokens: tuple[int, ...],
    *,
    raw: bool,
    whole: bool,
) -> Any:
    """A program of weights, a rollout, and what shapes its logits, if anything does.

    It finds `exact`, of the logits as they are shaped unless `raw`, and with `whole` the rest.
    """
    sampling, numerics = execution.sampling, execution.numerics

    def of_tile(
        plain: jax.Array, shaped: jax.Array, tokens: jax.Array, supports: jax.Array | None
    ) -> dict[str, jax.Array]:
        more = _summary(shaped, tokens, tokenizer_size, stop_tokens) if whole else {}
        logits = plain if raw else shaped
        how = {"sampling": sampling, "numerics": numerics, "supports": supports}
        exact = distribution.log_prob(logits, tokens, **how)
        if whole:
            relative = plain - jnp.max(plain, axis=-1, keepdims=True)
            own = jnp.take_along_axis(relative, tokens[:, None], axis=1)[:, 0]
            normaliser = jax.scipy.special.logsumexp(relative, axis=-1)
            stops = relative[:, jnp.asarray(stop_tokens, jnp.int32)]
            more |= {"raw": own - normaliser, "raw_stops": stops - normaliser[:, None]}
        return {"exact": exact} | more

    def run(weights: Weights, rollout: Rollout, shaped: Shapes | None) -> dict[str, jax.Array]:
        def of_rows(
            logits: jax.Array, tokens: jax.Array, places: Any, supports: jax.Array | None
        ) -> Any:
            if shaped is None:
                return of_tile(logits, logits, tokens, supports)
            how = {"rollout": rollout, "shapes": shaped, "stop_tokens": stop_tokens}
            return of_tile(logits, shape_logits(logits, tokens, places, **how), tokens, supports)

        size = rollout.responses.shape
        places = None if shaped is None else jnp.arange(size[0] * size[1]).reshape(size)
        more = places, rollout.supports
        return scoring.of_logits(weights, rollout, of_rows, execution=execution, more=more)

    return jit(run, numerics)


def _summary(logits, tokens, tokenizer_size, stop_tokens) -> dict[str, jax.Array]:
    peak = jnp.max(logits, axis=-1)
    relative = logits - peak[:, None]
    logit = jnp.take_along_axis(relative, tokens[:, None], axis=1)[:, 0]
    # Not the indices that `top_k` gives as well: with a slice of these XLA sorts the vocabulary.
    top, _ = jax.lax.top_k(relative, min(LIKELIEST, logits.shape[1]))
    betas = jnp.asarray(BETAS, jnp.float32)
    by_beta = jax.lax.map(lambda beta: _moments(relative, logit, beta), betas)
    moments, mass_above = (jnp.moveaxis(x, 0, 1) for x in by_beta)
    stops = relative[:, jnp.asarray(stop_tokens, jnp.int32)]
    normaliser = jax.scipy.special.logsumexp(relative, axis=-1)
    return {
        "logit": logit,
        "above": jnp.sum((relative > logit[:, None]).astype(jnp.int32), axis=-1),
        "peak": peak,
        "best": jnp.argmax(relative, axis=-1).astype(jnp.int32),
        "top": top,
        "moments": moments,
        "mass_above": mass_above,
        "inside": jax.scipy.special.logsumexp(relative[:, :tokenizer_size], axis=-1),
        "stops": stops,
        "stop": jax.scipy.special.logsumexp(stops, axis=-1) - normaliser,
    }


def _moments(relative: jax.Array, logit: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log sum exp(beta z) of z f32[N, V], the mean of z and its variance: f32[N, 3].

    And f32[N], the share of that sum of the logits above `logit`.
    """
    weights = jnp.exp(beta * relative)
    total = jnp.sum(weights, axis=-1)
    mean = jnp.sum(weights * relative, axis=-1) / total
    variance = jnp.sum(weights * jnp.square(relative - mean[:, None]), axis=-1) / total
    above = jnp.sum(jnp.where(relative > logit[:, None], weights, 0.0), axis=-1)
    return jnp.stack([jnp.log(total), mean, variance], axis=-1), above / total


def _batches(responses: Sequence[Response]) -> Iterator[tuple[list[int], Rollout, Distribution]]:
    """Batches of one distribution and of similar lengths, in few shapes."""

    few = sum(map(len, responses)) <= _TOGETHER
    least = 16 if few else 64
    shapes = [(_rounded(len(r.prompt), least), _rounded(len(r) + 1, least)) for r in responses]
    if few:  # another shape costs more than padding does
        shapes = [tuple(map(max, zip(*shapes, strict=True)))] * len(shapes)

    def key(number: int):
        response, shape = responses[number], shapes[number]
        declared = response.declared
        numbers = declared.temperature, declared.top_k, declared.top_p
        recorded = response.supports is not None, response.replays, response.routes is not None
        return (*numbers, declared.raw, declared.shaped, *recorded), shape

    for (_, shape), group in groupby(sorted(range(len(responses)), key=key), key=key):
        numbers = list(group)
        most = max(1, min(_ROWS, _TOKENS // sum(shape), _rounded(len(numbers), 1)))
        for start in range(0, len(numbers), most):
            some = numbers[start : start + most]
            filled = some + some[-1:] * (most - len(some))
            rollout = side_by_side([responses[i] for i in filled], *shape, following=1)
            yield some, replace(rollout, hidden=None), responses[some[0]].declared


def _rounded(size: int, least: int) -> int:
    """One of few sizes, multiples of `least`, so that few programs are compiled.

    At most a sixteenth of the next power of two is added, or up to `least`. Padding changes no bit.
    """
    step = max(least, (1 << (size - 1).bit_length()) // 16)
    return size + -size % step


def side_by_side(
    responses: Sequence[Response], prompt_size: int, size: int, *, following: int = 0
) -> Rollout:
    """B responses as arrays, with prompts of `prompt_size` and responses of `size` places.

    What a loss mask leaves out is `hidden`. `following`: places that count as the response's behind
    each, for what would follow it.
    """
    hidden = None
    if any(r.mask is not None for r in responses):
        hidden = ~_filled([r.mask for r in responses], (size,), bool, value=True)
    arrays = {
        "prompts": _filled([r.prompt for r in responses], (prompt_size,), np.int32),
        "prompt_lengths": np.asarray([len(r.prompt) for r in responses], np.int32),
        "responses": _filled([r.tokens for r in responses], (size,), np.int32),
        "lengths": np.asarray([len(r) + following for r in responses], np.int32),
        "log_probs": _filled([np.nan_to_num(r.log_probs) for r in responses], (size,), np.float32),
        "finished": np.asarray([r.ended != "cut" for r in responses]),
        "hidden": hidden,
        "supports": _stack([r.supports for r in responses], size, value=-1),
        "routes": _stack([r.routes for r in responses], prompt_size + size, value=0),
    }
    return Rollout(**jax.tree.map(jnp.asarray, arrays))


def _filled(
    rows: Sequence[Any], shape: tuple[int, ...], dtype: DTypeLike, *, value: Any = 0
) -> np.ndarray:
    """Rows of different lengths as [B, *shape], with `value` where they end, or are None."""
    array = np.full((len(rows), *shape), value, dtype)
    for number, row in enumerate(rows):
        if row is not None:
            array[(number, *map(slice, np.shape(row)))] = row
    return array


def _stack(rows: Sequence[np.ndarray | None], length: int, *, value: int) -> np.ndarray | None:
    """Arrays [n, ...] as [B, length, ...], the last axis as long as the longest; None of none."""
    given = [row for row in rows if row is not None]
    if not given:
        return None
    inner = *given[0].shape[1:-1], max(row.shape[-1] for row in given)
    return _filled(rows, (length, *inner), given[0].dtype, value=value)


class Chances(NamedTuple):
    """Log-probs f64[N] of the tokens under a distribution, two ways."""

    renormalised: np.ndarray  # over what the truncation keeps; a token outside counts as kept
    drawn: np.ndarray  # of the draw itself: nearly impossible outside of what is kept


def chances(evidence: Evidence, distribution: Distribution) -> Chances:
    """The tokens' log-probs under `distribution`, of whose shaping only min-p is applied here.

    The log-normaliser between the inverse temperatures of the grid is a polynomial of degree 5 that
    has its value and two derivatives at both sides: good to about 1e-6 nats. A top-p set that is
    larger than the stored logits is taken to hold `top_p` of the mass; it has the tokens above
    which there is less than that. A temperature below COLDEST or above HOTTEST is taken for it. At
    temperature 0 the draw is the likeliest token, and the log-probs are those at temperature 1.
    """
    if distribution.temperature == 0:
        plain = chances(evidence, Distribution())
        greedy = np.where(evidence.above == 0, 0.0, np.log(_STRAY))
        return plain._replace(drawn=greedy)
    beta = float(np.clip(1.0 / distribution.temperature, BETAS[0], BETAS[-1]))
    normaliser = log_normaliser(evidence.moments, beta)
    scaled = beta * evidence.logit.astype(np.float64)
    whole = scaled - normaliser
    if not (distribution.truncated or distribution.shaping.min_p):
        return Chances(whole, whole)
    kept, inside = _kept(evidence, distribution, beta, normaliser)
    drawn = np.where(inside, whole - kept, whole + np.log(_STRAY))
    outside = np.where(inside, 0.0, np.exp(whole))
    return Chances(whole - np.log(np.exp(kept) + outside), drawn)


def at_edge(evidence: Evidence, distribution: Distribution, off: float) -> np.ndarray:
    """bool[N], tokens that are left out, but kept if logits are off by so many nats.

    Of such a draw rounding decides. At temperature 0 the likeliest token alone is kept.
    """
    if distribution.temperature == 0:
        distribution = Distribution(top_k=1)
    beta = float(np.clip(1.0 / distribution.temperature, BETAS[0], BETAS[-1]))
    normaliser = log_normaliser(evidence.moments, beta)
    _, inside = _kept(evidence, distribution, beta, normaliser)
    odds = distribution.top_p / max(1.0 - distribution.top_p, 1e-9) * np.exp(beta * off)
    wider = replace(
        distribution, top_k=int(distribution.top_k * (1 + off)), top_p=odds / (1 + odds)
    )
    raised = evidence._replace(logit=evidence.logit + off)
    return ~inside & _kept(raised, wider, beta, normaliser)[1]


def log_normaliser(moments: np.ndarray, beta: float) -> np.ndarray:
    """log sum_v exp(beta z_v), f64[N], by Hermite interpolation of degree 5."""
    place, x = _between(beta)
    width = BETAS[place + 1] - BETAS[place]
    at = moments[:, place : place + 2].astype(np.float64)
    (f0, g0, h0), (f1, g1, h1) = (
        (at[:, i, 0], at[:, i, 1] * width, at[:, i, 2] * width**2) for i in (0, 1)
    )
    # f0 + x g0 + x^2 h0 / 2, and what is missing from it at x = 1.
    value, slope, curve = f1 - f0 - g0 - h0 / 2, g1 - g0 - h0, h1 - h0
    c3 = 10 * value - 4 * slope + curve / 2
    c4 = -15 * value + 7 * slope - curve
    c5 = 6 * value - 3 * slope + curve / 2
    return f0 + x * g0 + x**2 * h0 / 2 + x**3 * (c3 + x * (c4 + x * c5))


def _between(beta: float) -> tuple[int, float]:
    """The place in BETAS before `beta`, and how far it is from there to the next, from 0 to 1."""
    place = int(np.clip(np.searchsorted(BETAS, beta, side="right") - 1, 0, len(BETAS) - 2))
    low, high = BETAS[place], BETAS[place + 1]
    return place, (beta - low) / (high - low)


def _kept(evidence, distribution, beta, normaliser) -> tuple[np.ndarray, np.ndarray]:
    """Log of the mass f64[N] that the truncation keeps, and whether the token is kept."""
    top = evidence.top.astype(np.float64)
    mass = np.exp(beta * top - normaliser[:, None])
    running = np.cumsum(mass, axis=1)
    count = top.shape[1]
    of_k, last = np.ones(len(top)), np.full(len(top), count)
    inside = np.ones(len(top), bool)
    if 0 < distribution.top_k <= count:
        last = np.full(len(top), distribution.top_k)
        of_k = running[:, distribution.top_k - 1]
        inside = evidence.logit >= evidence.top[:, distribution.top_k - 1]
    elif distribution.top_k:
        inside = evidence.above < distribution.top_k
    rows = np.arange(len(top))
    if min_p := distribution.shaping.min_p:
        least = np.log(min_p) / beta  # a top-k of each token's own, if it ends within those stored
        inside &= evidence.logit >= least
        above = np.sum(top >= least, axis=1)
        last = np.minimum(last, above)
        of_k = np.where(above < count, running[rows, last - 1], of_k)
    if distribution.top_p == 1:
        return np.log(of_k), inside
    reached = running >= distribution.top_p * of_k[:, None] - 1e-7
    ends = reached.any(axis=1)  # within the stored logits
    place = np.where(ends, np.minimum(np.argmax(reached, axis=1), last - 1), last - 1)
    held = np.where(ends, running[rows, place], distribution.top_p * of_k)
    at, x = _between(beta)  # by straight lines
    above = (1 - x) * evidence.mass_above[:, at].astype(np.float64)
    in_set = above + x * evidence.mass_above[:, at + 1] < distribution.top_p * of_k
    inside &= np.where(ends, evidence.logit >= evidence.top[rows, place], in_set)
    return np.log(held), inside
