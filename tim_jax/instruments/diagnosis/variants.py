"""Explanations that need a forward of their own: other numerics, other weights, other prompts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import mismatch
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis.declared import UNSHAPED
from tim_jax.instruments.diagnosis.evidence import Forward, gather, log_probs
from tim_jax.instruments.diagnosis.explanations import Explanation, Kind, Tokens, by_distribution
from tim_jax.instruments.diagnosis.rollouts import Response
from tim_jax.mismatch import Entry, Mismatch
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Weights
from tim_jax.tasks.text import encode_prompt

_OF_WEIGHTS = (
    mismatch.quantised_weights("int8"),
    mismatch.quantised_weights("int8", codes="full"),
    mismatch.quantised_weights("int8", codes="full", per="matrix", head=True),  # torch's dynamic
    mismatch.quantised_weights("float8_e4m3fn"),
    mismatch.quantised_weights("float8_e4m3fn", per="tensor"),
)
# What is multiplied by them in 8 bits as well -> the weights alone, whose rounding shows however an
# engine scales the rest.
EIGHT_BITS: dict[Entry, Entry] = {
    replace(entry, activations=entry.dtype): entry for entry in _OF_WEIGHTS
}
# Low precision, as engines have it: each an entry of the dial. The first makes the smallest gap.
SOURCES: tuple[Entry, ...] = (
    mismatch.compute(dtype="float16"),
    mismatch.compute(dtype="bfloat16"),
    mismatch.lm_head(dtype="bfloat16"),
    mismatch.logits(dtype="bfloat16"),
    mismatch.softmax(dtype="bfloat16"),
    mismatch.attention_softmax(dtype="bfloat16"),
    mismatch.kv_cache(dtype="bfloat16"),
    mismatch.kv_cache(dtype="float8_e4m3fn"),
    mismatch.kv_cache(dtype="float8_e5m2"),
    mismatch.kv_cache(dtype="int8"),
    *_OF_WEIGHTS,
    mismatch.quantised_weights(dtype="int4"),
    *EIGHT_BITS,
)

LOW = "low precision: "  # begins their texts
OTHERS = 9  # variants of requests, routes and prompts, at most
OF_WEIGHTS = ("weights of ", "lora_")  # begin the names of explanations by other weights
LEAST_Z = 5.0  # standard deviations by which a gap must go with a layer's rounding
_FAR = 10.0  # times the largest that the rounding makes: another fault

Change = Callable[[Response], Response | None]


def unchanged(response: Response) -> Response | None:
    """The response in its own context."""
    return response


class Candidate(NamedTuple):
    """Weights that may have drawn the tokens instead of the model's."""

    name: str
    weights: Weights
    rank: int = 0  # of the adapter by which the model's differ from them, if they do


@dataclass(frozen=True, eq=False)
class Variant:
    """One other forward.

    Attributes:
        change: the response with another context; None if this variant does not apply to it.
        after: the name of the variant without which this one need not be tried; "": none.
    """

    name: str
    text: str
    kind: Kind
    forward: Forward
    change: Change = unchanged
    after: str = ""


def explanations(variant: Variant, tokens: Tokens) -> Iterator[Explanation]:
    """What the variant predicts for these tokens: their log-probs; for numerics also the sizes.

    Nothing, if it changes no response. Responses that it does not apply to stay as they are.
    """
    changed = [variant.change(response) for response in tokens.responses]
    if not any(one is not None for one in changed):
        return
    pairs = zip(changed, tokens.responses, strict=True)
    responses = [r if one is None else one for one, r in pairs]
    predicted, drawn = _under(variant.forward, responses, tokens)
    plain = Explanation(variant.name, variant.text, variant.kind, predicted, drawn)
    yield plain
    if variant.kind == "numerics":
        sizes = _sizes(np.abs(predicted - tokens.exact), tokens.exact, tokens.position)
        _, as_declared = by_distribution(tokens)
        yield replace(plain, predicted=tokens.exact, drawn=as_declared, sizes=sizes)


def _under(
    forward: Forward, responses: Sequence[Response], tokens: Tokens
) -> tuple[np.ndarray, np.ndarray]:
    """f64[N], the log-probs by another forward, and those of the draws under what is declared."""
    # Whether the log-probs of draws are others than those to be recorded.
    if not any(d.truncated or d.raw or d.temperature == 0 for d in (r.declared for r in responses)):
        exact = log_probs(forward, responses).astype(np.float64)
        return exact, exact
    evidence = gather(forward, responses)
    _, drawn = by_distribution(replace(tokens, evidence=evidence))
    return evidence.exact.astype(np.float64), drawn


def _sizes(difference: np.ndarray, exact: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The size of differences f64[N] as a smooth function of probability and position.

    By least squares of log |d| on log(1 - p) and log(1 + position), which is also how length
    enters; scaled to the mean |d|.
    """
    some = difference > 0
    if some.sum() < 8:
        return np.full(len(difference), max(float(difference.mean()), 1e-9))
    rare = np.log(np.maximum(-np.expm1(np.minimum(exact, 0.0)), 1e-3))
    columns = np.stack([np.ones(len(rare)), rare, np.log1p(position)], axis=1)
    fitted, *_ = np.linalg.lstsq(columns[some], np.log(difference[some]), rcond=None)
    sizes = np.exp(columns @ fitted)
    return sizes * (difference.mean() / sizes.mean())


def of_all(
    forward: Forward,
    others: Sequence[Candidate],
    tokenizer: Any,
    tokens: Tokens,
    sources: Sequence[Entry],
) -> Iterator[Variant]:
    """Every other forward that may have recorded these tokens; low precision last."""
    text = "the penalties and biases that were asked for were not applied"
    yield Variant("shaping_ignored", text, "fault", forward, _unshaped)
    if forward.execution.config.num_experts:
        replayed = replace(forward.execution, routing="replayed")
        yield Variant(
            "routing",
            "routing: the experts are those that were recorded, not the model's own choice",
            "numerics",
            forward._replace(execution=replayed),
            lambda response: response if response.routes is not None else None,
        )
    yield from of_weights(forward, others)
    yield from of_prompts(forward, tokenizer, tokens)
    yield from of_numerics(forward, sources)


def _unshaped(response: Response) -> Response | None:
    plain = replace(response.declared, shaping=UNSHAPED)
    return replace(response, declared=plain) if response.declared.shaped else None


def of_numerics(forward: Forward, sources: Sequence[Entry] = SOURCES) -> Iterator[Variant]:
    """A variant for each entry of the dial that this model and its numerics can have."""
    for entry in sources:
        dial = Mismatch((entry,))
        try:
            mismatch.check(dial, forward.execution)
        except InputError:
            continue
        numerics = dial.numerics(forward.execution.numerics)
        weights = dial.weights(forward.weights)
        if numerics == forward.execution.numerics and weights is forward.weights:
            continue
        execution = Execution(forward.execution.config, numerics)
        label, alone = mismatch.label(entry), EIGHT_BITS.get(entry)
        bits = entry.activations if isinstance(entry, mismatch.QuantisedWeights) else None
        what = f"{bits} weights and activations, " if bits else ""
        yield Variant(
            label,
            f"{LOW}{what}{label}",
            "numerics",
            forward._replace(weights=weights, execution=execution),
            after=mismatch.label(alone) if alone and alone in sources else "",
        )


def of_weights(forward: Forward, others: Sequence[Candidate]) -> Iterator[Variant]:
    """Variants of each set of other weights, and of averages; or of an adapter, if it differs by
    one."""

    def variant(name: str, text: str, weights: Weights) -> Variant:
        return Variant(name, text, "fault", forward._replace(weights=weights))

    coarse = forward.execution.numerics.compute_dtype == "float32"
    for name, weights, rank in others:
        between = jax.tree.map(_between, forward.weights, weights)
        if rank:
            adapter = f"adapter of rank {rank} by which the model differs from {name}"
            yield variant("lora_not_applied", f"without the {adapter}: it was not applied", weights)
            yield variant("lora_half_scale", f"with half of the {adapter}", between)
            twice = jax.tree.map(_as_far_again, forward.weights, weights)
            text = f"with the {adapter} twice: it was added to weights that had it already"
            yield variant("lora_twice", text, twice)
            if coarse:
                merged = jax.tree.map(_merged_coarsely, forward.weights, weights)
                text = f"with the {adapter}, merged in bfloat16"
                yield variant("lora_merged(bfloat16)", text, merged)
            continue
        yield variant(f"{OF_WEIGHTS[0]}{name}", f"the weights are those of {name}", weights)
        text = f"the weights are half way between the model's and those of {name}, as of an average"
        yield variant(f"weights half way to {name}", text, between)
    if coarse and any(not one.rank for one in others):
        text = "the weights are rounded to bfloat16, as those of an adapter that is merged there"
        yield variant("weights on a bfloat16 grid", text, jax.tree.map(_coarse, forward.weights))


def _coarse(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def _merged_coarsely(model: jax.Array, base: jax.Array) -> jax.Array:
    """Base, change and sum are rounded to bfloat16, as PEFT does where the base is loaded so."""
    return _coarse(_coarse(base) + _coarse(model - base))


def _between(one: jax.Array, other: jax.Array) -> jax.Array:
    return ((one.astype(jnp.float32) + other.astype(jnp.float32)) / 2).astype(one.dtype)


def _as_far_again(one: jax.Array, other: jax.Array) -> jax.Array:
    return (2 * one.astype(jnp.float32) - other.astype(jnp.float32)).astype(one.dtype)


def adapter_rank(params: Any, base: Any) -> int:
    """The rank of an adapter by which parameters differ from `base`; 0 if they do by more or none.

    They do if nothing but matrices of layers differs, each by a matrix of at most a quarter of its
    rank. The first layer is looked at.
    """
    if set(params) != set(base):
        return 0
    ranks = [0]
    for name in params:
        own, others = jax.tree.leaves(params[name]), jax.tree.leaves(base[name])
        for one, other in zip(own, others, strict=True):
            if np.array_equal(one, other):
                continue
            rank = _rank(np.asarray(one), np.asarray(other)) if name == "layers" else -1
            if rank < 0:
                return 0
            ranks.append(rank)
    return max(ranks)


def _rank(one: np.ndarray, other: np.ndarray) -> int:
    """The rank of the difference of two stacks of matrices in the first layer; -1 if not low."""
    change = np.asarray(one[0], np.float32) - np.asarray(other[0], np.float32)
    if change.ndim < 2:
        return -1
    matrix = change.reshape(-1, change.shape[-1])
    singular = np.linalg.svd(matrix, compute_uv=False)
    rounding = np.finfo(np.float32).eps * np.abs(other).max() * sum(np.sqrt(matrix.shape))
    rank = int((singular > max(1e-4 * singular[0], rounding)).sum())
    return rank if 4 * rank <= min(matrix.shape) else -1


def in_some_layers(forward: Forward, tokens: Tokens, entry: Entry) -> Explanation | None:
    """Weights that are quantised in some of the layers alone, by an entry of the dial.

    What each layer's rounding makes of the log-probs nearly adds up, so that least squares on all
    of it says which layers have it: those with coefficients above a half.

    Returns:
      None if it is all of the layers, or none.
    """
    (whole,) = of_numerics(forward, [entry])
    label = mismatch.label(entry)
    rounded = whole.forward.weights
    count = len(jax.tree.leaves(forward.weights["layers"])[0])

    def under(chosen: np.ndarray) -> np.ndarray:
        weights = mixed_layers(forward.weights, rounded, chosen)
        return log_probs(forward._replace(weights=weights), tokens.responses).astype(np.float64)

    each = (under(np.arange(count) == i) - tokens.exact for i in range(count))
    doing = "looking for the layers whose weights are quantised"
    columns = np.stack(list(waiting.each(each, doing, total=count)), axis=1)
    seen = np.abs(tokens.gap) <= _FAR * np.abs(columns).max()  # not what is hidden, which is NaN
    fitted, *_ = np.linalg.lstsq(columns[seen], tokens.gap[seen], rcond=None)
    chosen = fitted > 0.5
    if chosen.all() or not chosen.any():
        return None
    text = f"{label} in {chosen.sum()} of {count} layers alone"
    layers = ", ".join(map(str, np.flatnonzero(chosen)))
    predicted, drawn = _under(
        forward._replace(weights=mixed_layers(forward.weights, rounded, chosen)),
        tokens.responses,
        tokens,
    )
    return Explanation(
        f"{label} in some layers",
        f"{text}: {layers}",
        "fault",
        predicted,
        drawn,
        structure=-count * float(np.log(2)),
    )


def goes_with(tokens: Tokens, explanation: Explanation) -> float:
    """By how many standard deviations what is recorded goes with what an explanation makes.

    Of tokens that are not off by much more than that.
    """
    changed = explanation.predicted - tokens.exact
    seen = np.abs(tokens.gap) <= _FAR * np.abs(changed).max()
    gap, made = tokens.gap[seen], changed[seen]
    both = np.sqrt((gap**2).sum() * (made**2).sum())
    return float((gap * made).sum() / both * np.sqrt(len(gap))) if both > 0 else 0.0


def mixed_layers(plain: Weights, rounded: Weights, chosen: np.ndarray) -> Weights:
    """Weights whose layers are the rounded ones where `chosen`, bool[L]."""

    def leaf(one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), other, one)

    return {**plain, "layers": jax.tree.map(leaf, plain["layers"], rounded["layers"])}


def of_prompts(forward: Forward, tokenizer: Any, tokens: Tokens) -> Iterator[Variant]:
    """Variants of what stood before the response; a stripped first token was the likeliest."""
    first = tokens.evidence.best[tokens.position == 0].tolist()
    best = dict(zip((r.where for r in tokens.responses), first, strict=True))
    bos = None if tokenizer is None else tokenizer.bos_token_id

    def variant(name: str, text: str, change: Change) -> Variant:
        return Variant(name, text, "fault", forward, change)

    if bos is not None:
        begun = all(r.prompt[0] == bos for r in tokens.responses)
        twice = all(r.prompt[:2] == (bos, bos) for r in tokens.responses)
        one = f"a second BOS token {bos}" if begun else f"a BOS token {bos}"
        yield variant(
            "bos_missing",
            f"the system had {one} before the prompt",
            lambda r: replace(r, prompt=(bos, *r.prompt)),
        )
        yield variant(
            "bos_added",
            f"the system had {'one BOS token and not two' if twice else 'no BOS token'} before the"
            " prompt",
            lambda r: _with_prompt(r, r.prompt[1:]) if r.prompt[0] == bos else None,
        )
    if tokenizer is not None and (pad := tokenizer.pad_token_id) is not None:
        yield variant(
            "prompt_padded",
            f"the system had no pad tokens {pad} before the prompt",
            lambda r: _without_pads(r, pad),
        )
    yield variant(
        "prompt_longer",
        "the system's prompt was without its last token",
        lambda r: _with_prompt(r, r.prompt[:-1]),
    )
    yield variant(
        "first_token_stripped",
        "the first drawn token of each response was stripped",
        lambda r: replace(r, prompt=(*r.prompt, best[r.where])),
    )
    if tokenizer is None:
        return
    for templated in (True, False) if tokenizer.chat_template else (False,):
        how = "through the chat template" if templated else "without the chat template"
        yield variant(
            "prompt_templated" if templated else "prompt_plain",
            f"the system was given the prompt {how}",
            _encoded(tokenizer, templated),
        )


def _with_prompt(response: Response, prompt: tuple[int, ...]) -> Response | None:
    return replace(response, prompt=prompt) if prompt else None


def _without_pads(response: Response, pad: int) -> Response | None:
    prompt = tuple(itertools.dropwhile(lambda token: token == pad, response.prompt))
    return None if prompt == response.prompt else _with_prompt(response, prompt)


def _encoded(tokenizer: Any, templated: bool) -> Change:
    def change(response: Response) -> Response | None:
        text = response.prompt_text
        if text is None:
            text = tokenizer.decode(response.prompt, skip_special_tokens=templated)
        try:
            prompt = tuple(encode_prompt(tokenizer, text, chat_template=templated))
        except InputError:
            return None
        return None if prompt == response.prompt else replace(response, prompt=prompt)

    return change
