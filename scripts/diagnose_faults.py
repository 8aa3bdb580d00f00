"""Rollouts with one fault each, made by this library's sampler, for diagnose_table.py.

The model is small and random, with logits that spread as a trained model's do. A fault lies in a
share of the rows or tokens; the others are those of an engine in float16.
"""

import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import mismatch
from tim_jax.common.types import Prompts
from tim_jax.instruments.auditing import random_params
from tim_jax.instruments.diagnosis import readers, variants
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.evidence import (
    Forward,
    chances,
    gather,
    log_normaliser,
    side_by_side,
)
from tim_jax.instruments.diagnosis.explanations import Tokens
from tim_jax.instruments.diagnosis.rollouts import Limits, collect
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.numerics import Rows as RowTiles
from tim_jax.policy import distribution, sampler, scoring
from tim_jax.rl import programs
from tim_jax.tasks.text import character_tokenizer, encode_prompt

ALPHABET = string.ascii_letters + string.digits + " .,:;+-*/=()!?\n"
TOKENIZER = character_tokenizer(ALPHABET)
CHAT = character_tokenizer(ALPHABET)
CHAT.chat_template = "{% for one in messages %}?{{ one.content }}\n{% endfor %}!"
BOS = 2  # plays the part of a token that prompts begin with
STOPS = (1, 3, 5)
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=len(TOKENIZER) + 4,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_positions=256,
    tied_embeddings=False,
    qk_norm=True,
)
MIXTURE = replace(
    CONFIG,
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
NUMERICS = Numerics(
    rows=RowTiles(16, 16), attention_rows=RowTiles(16, 16), kv_block=32, head_rows=64
)
RESPONSE = 32  # tokens at most
LONGEST = 16  # prompt
PLAIN = Sampling(RESPONSE)


Row = dict[str, Any]
Rows = list[Row]
Change = Callable[[Rows, np.ndarray], Rows]  # rows, and which are wrong


@cache
def params(config: ModelConfig = CONFIG) -> Any:
    return jax.tree.map(jnp.asarray, random_params(config, 0))


def nudged(scale: float) -> Any:
    """Weights of another time, or without an adapter."""
    rng = np.random.default_rng(7)

    def leaf(x):
        return x + scale * jnp.std(x) * jnp.asarray(rng.standard_normal(x.shape, np.float32))

    return jax.tree.map(leaf, params())


@cache
def prepared(source: float = 0.0, config: ModelConfig = CONFIG) -> Any:
    found = nudged(source) if source else params(config)
    return jax.jit(Execution(config, NUMERICS).prepare)(found)


def _draw_above(logits, uniform, positions, sequences, *, min_p: float, execution: Execution):
    least = jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p)
    how = {"sampling": execution.sampling, "numerics": execution.numerics}
    return (*distribution.draw(jnp.where(logits >= least, logits, -1e9), uniform, **how), None)


@cache
def _sampler(
    config: ModelConfig, sampling: Sampling, samples: int, drawing: Mismatch, min_p: float
) -> Any:
    execution = Execution(config, NUMERICS, sampling)
    if min_p:
        draw = partial(_draw_above, min_p=min_p, execution=execution)
        program = partial(sampler.sample, execution=execution, samples=samples, draw=draw)
        return jit(program, NUMERICS)
    if config.num_experts:
        execution = replace(execution, routing="compared")  # its experts are recorded
    return programs.sampling_program(execution, samples=samples, mismatch=drawing)


def prompts(count: int, seed: int, *, templated: bool = False) -> Prompts:
    """Prompts of several lengths that begin with BOS, or these through the chat template."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, len(TOKENIZER), (count, 12))
    tokens[:, 0] = BOS
    lists = [row[:n].tolist() for row, n in zip(tokens, rng.integers(4, 13, count), strict=True)]
    if templated:
        lists = [through_template(ids) for ids in lists]
    padded = np.zeros((count, LONGEST), np.int32)
    for row, ids in zip(padded, lists, strict=True):
        row[: len(ids)] = ids
    return Prompts(
        tokens=jnp.asarray(padded),
        lengths=jnp.asarray([len(ids) for ids in lists], jnp.int32),
        ids=jnp.arange(count, dtype=jnp.int32),
    )


def through_template(ids: Sequence[int]) -> list[int]:
    return encode_prompt(CHAT, CHAT.decode(ids), chat_template=True)


@cache
def drawn(
    tokens: int,
    seed: int = 0,
    *,
    entries: tuple[mismatch.Entry, ...] = (),
    sampling: Sampling = PLAIN,
    source: float = 0.0,
    stops: tuple[int, ...] = STOPS,
    templated: bool = False,
    config: ModelConfig = CONFIG,
    min_p: float = 0.0,
) -> Rows:
    """Rows of at least `tokens` response tokens, in whole responses."""
    sampling = replace(sampling, max_tokens=RESPONSE, stop_tokens=stops)
    whole = Mismatch(entries)
    samples, rows, count = 4, [], 0
    for part in range(seed * 1000, (seed + 1) * 1000):
        given, key = prompts(4, part, templated=templated), jax.random.key(part)
        sample = _sampler(config, sampling, samples, whole.drawing, min_p)
        rollout = sample(whole.weights(prepared(source, config)), given, key)
        rollout = dial.report(rollout, given, key, mismatch=whole, samples=samples)
        for row in as_rows(jax.device_get(rollout)):
            rows.append(row)
            count += len(row["response_token_ids"])
            if count >= tokens:
                return rows
    raise AssertionError("responses are too short")


def as_rows(rollout: Any) -> Iterator[Row]:
    """A rollout as another system would have written it down."""
    for i, length in enumerate(rollout.lengths):
        if length == 0:
            continue
        row = {
            "prompt_token_ids": rollout.prompts[i, : rollout.prompt_lengths[i]].tolist(),
            "response_token_ids": rollout.responses[i, :length].tolist(),
            "logprobs": np.minimum(rollout.log_probs[i, :length], 0.0).tolist(),
        }
        if rollout.hidden is not None:
            row["mask"] = (~rollout.hidden[i, :length]).astype(int).tolist()
        if rollout.routes is not None:
            row["routes"] = rollout.routes[i, : rollout.prompt_lengths[i] + length - 1].tolist()
        yield row


def forward(config: ModelConfig = CONFIG) -> Forward:
    return Forward(prepared(0.0, config), Execution(config, NUMERICS), len(TOKENIZER), STOPS)


def changed(
    rows: Sequence[Row], change: Callable[[Tokens], np.ndarray], model: Forward | None = None
) -> Rows:
    """The rows with what `change` makes of their tokens, f64[N], in place of their log-probs."""
    model = model or forward()
    responses = collect(readers.read(rows), limits=Limits.of(model.execution.config)).responses
    tokens = Tokens(responses, gather(model, responses), STOPS, model.vocabulary, 0)
    moved = np.minimum(change(tokens), 0.0)
    pairs = zip(rows, tokens.by_response(moved), strict=True)
    return [row | {"logprobs": x.tolist()} for row, x in pairs]


def raw(tokens: Tokens) -> np.ndarray:
    return chances(tokens.evidence, Distribution()).drawn


def at(temperature: float) -> Callable[[Tokens], np.ndarray]:
    return lambda tokens: chances(tokens.evidence, Distribution(temperature)).drawn


def over_tokenizer(tokens: Tokens) -> np.ndarray:
    """The softmax is over the tokenizer's tokens, and the model has four more."""
    normaliser = log_normaliser(tokens.evidence.moments, 1.0)
    return tokens.recorded + normaliser - tokens.evidence.inside


def padded(rows: int) -> Callable[[Tokens], np.ndarray]:
    def change(tokens: Tokens) -> np.ndarray:
        normaliser = log_normaliser(tokens.evidence.moments, 1.0)
        extra = np.log(rows) - tokens.evidence.peak
        return tokens.recorded + normaliser - np.logaddexp(normaliser, extra)

    return change


def by_engine(forward: Forward) -> Callable[[Tokens], np.ndarray]:
    """What a system with this forward records of the same tokens."""
    return lambda tokens: gather(forward, tokens.responses).exact


SHARES = (0.001, 0.01, 0.1, 1.0)
HALF_PRECISION = mismatch.compute(dtype="float16")
TOKENS, LONG = 2048, 20_480  # of the latter a thousandth is twenty


@cache
def low_precision(entry: mismatch.Entry) -> Forward:
    (variant,) = variants.of_numerics(forward(), [entry])
    return variant.forward


@cache
def sound(tokens: int, seed: int, sampling: Sampling = PLAIN) -> Rows:
    """What an engine in float16 records, and how it says that it sampled."""
    said = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    rows = [row | said for row in drawn(tokens, seed, sampling=sampling)]
    return changed(rows, by_engine(low_precision(HALF_PRECISION)))


@dataclass(frozen=True)
class Fault:
    """A kind of mistake; the names by which it is right; and how rows get it."""

    name: str
    right: tuple[str, ...]
    change: Change | None  # None: rows are drawn by `draw` in place of sound ones
    draw: Callable[[int, int], Rows] = sound
    shares: tuple[float, ...] = SHARES
    of_tokens: bool = False  # single tokens, not rows
    enough: int = 20  # tokens from which on it must be named
    others: Callable[[], list[variants.Candidate]] = lambda: []
    sampling: Sampling = PLAIN  # of the sound rows
    model: Callable[[], Forward] = forward


def each(change: Callable[[Row], Row]) -> Change:
    """A change of every wrong row by itself."""
    return lambda rows, wrong: [
        change(row) if own else row for row, own in zip(rows, wrong, strict=True)
    ]


def put(others: Rows, rows: Rows, wrong: np.ndarray) -> Rows:
    """The rows with others in place of those that are wrong."""
    return [two if own else one for one, two, own in zip(rows, others, wrong, strict=True)]


def recorded_by(other: Callable[[], Forward]) -> Change:
    """Wrong rows have the log-probs of another forward."""
    return lambda rows, wrong: put(changed(rows, by_engine(other())), rows, wrong)


def recomputed(of: Callable[[Tokens], np.ndarray]) -> Change:
    """Wrong rows have log-probs that follow from the exact evidence."""
    return lambda rows, wrong: put(changed(rows, of), rows, wrong)


def shifted(row: Row) -> Row:
    return row | {"logprobs": [*row["logprobs"][1:], row["logprobs"][0]]}


def clipped(row: Row) -> Row:
    return row | {"logprobs": [max(x, -3.0) for x in row["logprobs"]]}


def to_base_2(row: Row) -> Row:
    return row | {"logprobs": [x / math.log(2) for x in row["logprobs"]]}


def with_prompt(row: Row, change: Callable[[list[int]], list[int]]) -> Row:
    return row | {"prompt_token_ids": change(row["prompt_token_ids"])}


def without(row: Row, part: slice) -> Row:
    """The row with a part of its response; as it is if nothing else is left."""
    names = ("response_token_ids", "logprobs")
    return row if len(row["logprobs"]) < 2 else row | {name: row[name][part] for name in names}


def without_end(row: Row) -> Row:
    ended = row["response_token_ids"][-1] in STOPS
    return without(row, slice(0, -1)) if ended else row | {"finish_reason": "length"}


def with_other_end(row: Row) -> Row:
    ids = row["response_token_ids"]
    return row | {"response_token_ids": [*ids[:-1], 0]} if ids[-1] in STOPS else row


def rotated(rows: Rows, wrong: np.ndarray) -> Rows:
    """Wrong rows hold the log-probs of the next one of them that is as long, or longer."""
    own = sorted(np.flatnonzero(wrong), key=lambda i: len(rows[i]["logprobs"]))
    found = list(rows)
    for i, j in itertools.pairwise(own):
        found[i] = rows[i] | {"logprobs": rows[j]["logprobs"][: len(rows[i]["logprobs"])]}
    return found


def with_other_first(rows: Rows, wrong: np.ndarray) -> Rows:
    """The first token of wrong rows has the log-prob after a shorter prompt."""
    shorter = [with_prompt(row, lambda ids: ids[:-1]) for row in rows]
    found = changed(shorter, by_engine(low_precision(HALF_PRECISION)))
    others = [
        row | {"logprobs": [*other["logprobs"][:1], *row["logprobs"][1:]]}
        for row, other in zip(rows, found, strict=True)
    ]
    return put(others, rows, wrong)


def in_flight(rows: Rows, wrong: np.ndarray) -> Rows:
    """The first ten tokens of wrong rows are of the weights before."""
    old = recorded_by(partial(engine, 0.1))(rows, wrong)
    return [
        one | {"logprobs": [*two["logprobs"][:10], *one["logprobs"][10:]]}
        for one, two in zip(rows, old, strict=True)
    ]


def by_version(rows: Rows, wrong: np.ndarray) -> Rows:
    """Wrong rows are of weights that nobody has any more, and say so."""
    found = recorded_by(partial(engine, 0.03))(rows, wrong)
    return [row | {"weights_version": int(own)} for row, own in zip(found, wrong, strict=True)]


def engine(source: float) -> Forward:
    return forward()._replace(weights=prepared(source))


def partly_quantised() -> Forward:
    """The second layer of two is quantised."""
    rounded = Mismatch((mismatch.quantised_weights(dtype="int4"),)).weights(prepared())
    some = variants.mixed_layers(prepared(), rounded, np.asarray([False, True]))
    return forward()._replace(weights=some)


@cache
def base_weights() -> Any:
    """The model without an adapter of rank 2."""
    rng = np.random.default_rng(3)

    def leaf(x: jax.Array) -> jax.Array:
        if x.ndim < 3:
            return x
        rows = x.reshape(len(x), -1, x.shape[-1]).shape
        down, up = (rng.standard_normal((rows[0], n, 2)) for n in rows[1:])
        change = np.einsum("lmr,lnr->lmn", down, up).reshape(x.shape)
        return x - jnp.asarray(0.05 * np.std(x) * change, jnp.float32)

    return params() | {"layers": jax.tree.map(leaf, params()["layers"])}


def adapter() -> list[variants.Candidate]:
    weights = jax.jit(Execution(CONFIG, NUMERICS).prepare)(base_weights())
    return [variants.Candidate("base", weights, variants.adapter_rank(params(), base_weights()))]


def of_adapter(name: str) -> Forward:
    found = variants.of_weights(forward(), adapter())
    return next(one.forward for one in found if one.name == name)


def templated(tokens: int, seed: int) -> Rows:
    """Drawn after the chat template; recorded are the prompts without it."""
    return [with_prompt(row, plain_prompt) for row in drawn(tokens, seed, templated=True)]


def plain_prompt(ids: list[int]) -> list[int]:
    return ids[1:-2]  # without what the template of one message adds


def said_templated(row: Row) -> Row:
    """Drawn after a plain prompt; recorded is its text, and its ids through the chat template."""
    ids = row["prompt_token_ids"]
    return row | {"prompt": CHAT.decode(ids), "prompt_token_ids": through_template(ids)}


@cache
def mixture() -> Forward:
    """A model with experts, which takes the recorded ones."""
    found = forward(MIXTURE)
    return found._replace(execution=replace(found.execution, routing="replayed"))


@cache
def routed(tokens: int, seed: int) -> Rows:
    """Of a mixture, by an engine in float16 that records its experts."""
    return by_mixture(drawn(tokens, seed, config=MIXTURE))


def by_mixture(rows: Rows) -> Rows:
    (engine,) = variants.of_numerics(mixture(), [HALF_PRECISION])
    execution = replace(engine.forward.execution, routing="replayed")
    return changed(rows, by_engine(engine.forward._replace(execution=execution)), mixture())


def by_other_experts(rows: Rows, wrong: np.ndarray) -> Rows:
    """Wrong rows have the next expert in place of each that the second layer of two chose."""

    def moved(row: Row) -> Row:
        first, second = np.moveaxis(np.asarray(row["routes"]), 1, 0)
        routes = np.stack([first, (second + 1) % MIXTURE.num_experts], 1)
        return row | {"routes": routes.tolist()}

    return put(by_mixture([moved(row) for row in rows]), rows, wrong)


@cache
def kept_tokens(tokens: int, seed: int) -> Rows:
    """Drawn from the likeliest tokens, which an engine in float16 records; not how many."""
    rows = drawn(tokens, seed, sampling=TOP_K)
    responses = collect(readers.read(rows), limits=Limits.of(CONFIG)).responses
    rollout = side_by_side(responses, LONGEST, RESPONSE)
    ids = scoring.of_logits(prepared(), rollout, _likeliest, execution=forward().execution)
    each = zip(rows, np.asarray(ids), strict=True)
    recorded = [row | {"supports": x[: len(row["logprobs"])].tolist()} for row, x in each]
    return changed(recorded, by_engine(low_precision(HALF_PRECISION)))


def _likeliest(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.lax.top_k(logits, TOP_K.top_k)[1]


def over_all_tokens(rows: Rows, wrong: np.ndarray) -> Rows:
    """The log-probs of wrong rows are not renormalised over what is recorded as kept."""
    plain = [{name: row[name] for name in row if name != "supports"} for row in rows]
    found = changed(plain, by_engine(low_precision(HALF_PRECISION)))
    others = [row | {"logprobs": x["logprobs"]} for row, x in zip(rows, found, strict=True)]
    return put(others, rows, wrong)


def halfway() -> Forward:
    between = jax.tree.map(lambda x, y: (x + y) / 2, prepared(), prepared(0.1))
    return forward()._replace(weights=between)


def on_coarse_grid() -> Forward:
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), prepared())
    return forward()._replace(weights=coarse)


def checkpoint(size: float) -> list[variants.Candidate]:
    return [variants.Candidate("checkpoint", prepared(size))]


HALF = Sampling(temperature=0.6)
TOP_P = Sampling(top_p=0.8)
TOP_K = Sampling(top_k=20)
WHOLE = (1.0,)


def over_all(tokens: int, seed: int, **undeclared: Any) -> Rows:
    """Drawn under a truncation or temperature that nobody declared, recorded without it."""
    return changed(drawn(tokens, seed, **undeclared), raw)


def numbers(log_probs: np.ndarray, value: float | None) -> np.ndarray:
    """A number in place of log-probs; or, of no known cause, 3 to 9 nats less."""
    less = np.random.default_rng(1).uniform(3, 9, len(log_probs))
    return log_probs - less if value is None else np.full(len(log_probs), value)


def of_values(value: float | None) -> Change:
    def change(rows: Rows, wrong: np.ndarray) -> Rows:
        whole = np.concatenate([row["logprobs"] for row in rows])
        found = np.where(wrong, numbers(whole, value), whole)
        parts = np.split(found, np.cumsum([len(r["logprobs"]) for r in rows])[:-1])
        return [row | {"logprobs": x.tolist()} for row, x in zip(rows, parts, strict=True)]

    return change


def faults() -> Iterator[Fault]:
    """Every mistake that has a name, and one that has none."""
    single = {"of_tokens": True, "shares": SHARES[:3]}
    yield Fault("sentinel -9999", ("sentinel",), of_values(-9999.0), enough=1, **single)
    yield Fault("zeros", ("sentinel",), of_values(0.0), enough=1, **single)
    yield Fault("off by 3 to 9 nats", ("none",), of_values(None), **single)
    yield Fault("another row", ("other_row",), rotated)
    yield Fault("shifted", ("shifted",), each(shifted))
    yield Fault("clipped at -3", ("clipped",), each(clipped), shares=WHOLE)
    yield Fault("to base 2", ("log_base",), each(to_base_2), shares=WHOLE)
    temperature = ("temperature", "recorded_temperature")
    yield Fault("temperature 0.6", temperature, None, partial(drawn, sampling=HALF))
    half = {"sampling": HALF, "draw": partial(sound, sampling=HALF)}
    yield Fault("raw log-probs", ("raw_log_probs",), recomputed(raw), **half)
    yield Fault("top-p 0.8, not declared", ("top_p",), None, partial(drawn, sampling=TOP_P))
    yield Fault("top-k 20, not declared", ("top_k",), None, partial(drawn, sampling=TOP_K))
    yield Fault("min-p 0.1, not declared", ("min_p",), None, partial(drawn, min_p=0.1))
    kept = {"sampling": TOP_P, "draw": partial(sound, sampling=TOP_P)}
    yield Fault("top-p 0.8, over all", ("ignored_truncation",), recomputed(raw), **kept)
    for name, one in (("top_p", TOP_P), ("top_k", TOP_K), ("temperature", HALF)):
        right = "drawn_temperature" if name == "temperature" else f"{name}_ignored"
        draw = partial(over_all, sampling=one)
        yield Fault(f"{name}, in the draws alone", (right,), None, draw, shares=WHOLE)
    draw = partial(over_all, min_p=0.1)
    yield Fault("min_p, in the draws alone", ("min_p_ignored",), None, draw, shares=WHOLE)
    yield from faults_of_declarations()
    yield from faults_of_tokens()
    yield from faults_of_forwards()


def faults_of_declarations() -> Iterator[Fault]:
    """What was asked for, or recorded, and is not in the log-probs."""
    said_raw = each(lambda row: row | {"logprobs_mode": "raw_logprobs"})
    half = {"sampling": HALF, "draw": partial(sound, sampling=HALF)}
    yield Fault("processed, said to be raw", ("processed_log_probs",), said_raw, **half)
    names = ("recorded_temperature",)
    yield Fault("temperature 0.6, in the log-probs alone", names, recomputed(at(0.6)))
    # Of the log-probs both say the same; only draws without the penalty tell them apart.
    names = ("shaping_ignored", "raw_log_probs")
    for option, value in (("repetition_penalty", 1.3), ("presence_penalty", 1.0)):
        asked = each(lambda row, asked={option: value}: row | asked)
        yield Fault(f"{option} {value:g}, never applied", names, asked)
    change, names = over_all_tokens, ("ignored_truncation",)
    yield Fault("kept tokens recorded, over all", names, change, kept_tokens)
    change = recomputed(over_tokenizer)
    yield Fault("vocabulary without the model's last 4", ("cut_vocabulary",), change)
    yield Fault(
        "other experts than the model's",
        ("routing",),
        by_other_experts,
        routed,
        model=partial(forward, MIXTURE),
    )


def faults_of_tokens() -> Iterator[Fault]:
    """Tokens and prompts that are not those that were drawn."""
    yield Fault("end token replaced", ("end_token_replaced",), each(with_other_end))
    yield Fault("end token stripped", ("end_token_stripped",), each(without_end), shares=WHOLE)
    first = each(lambda row: without(row, slice(1, None)))
    yield Fault("first token stripped", ("first_token_stripped",), first)
    for what, name, change in (
        ("one token more", "prompt_longer", lambda ids: [*ids, 4]),
        ("BOS lost", "bos_missing", lambda ids: ids[1:]),
        ("BOS added", "bos_added", lambda ids: [BOS, *ids]),
        ("pads before it", "prompt_padded", lambda ids: [0, 0, 0, *ids]),
    ):
        yield Fault(f"prompt: {what}", (name,), each(partial(with_prompt, change=change)))
    yield Fault("prompt: through a chat template", ("prompt_templated",), None, templated)
    yield Fault("prompt: not through the template", ("prompt_plain",), each(said_templated))
    yield Fault("first token after a shorter prompt", ("first_tokens",), with_other_first)
    draw = partial(drawn, entries=(mismatch.pad_mask(pad=3),))
    yield Fault("pad mask", ("pad_mask",), None, draw, shares=WHOLE)
    draw = partial(drawn, stops=(9, 11))
    yield Fault("another end token", ("other_end_token",), None, draw, shares=WHOLE)
    for count in (4, 64):
        change = recomputed(padded(count))
        yield Fault(f"vocabulary padded by {count}", ("padded_vocabulary",), change)


def faults_of_forwards() -> Iterator[Fault]:
    """Other weights, and low precision of a size that no sound engine has."""
    for size in (0.01, 0.1):
        yield Fault(
            f"weights off by {size:.0%}",
            ("weights of checkpoint",),
            recorded_by(partial(engine, size)),
            others=partial(checkpoint, size),
        )
    between, grid = "weights half way to checkpoint", "weights on a bfloat16 grid"
    tenth = partial(checkpoint, 0.1)
    yield Fault("an average of two weights", (between,), recorded_by(halfway), others=tenth)
    yield Fault("weights rounded to bfloat16", (grid,), recorded_by(on_coarse_grid), others=tenth)
    yield Fault("replaced in flight", ("weights of checkpoint",), in_flight, others=tenth)
    yield Fault("an older version", ("other_version",), by_version, shares=SHARES[1:3])
    for name in ("lora_not_applied", "lora_half_scale", "lora_twice", "lora_merged(bfloat16)"):
        yield Fault(name, (name,), recorded_by(partial(of_adapter, name)), others=adapter)
    name = "quantised_weights(int4) in some layers"
    yield Fault("one layer in int4", (name,), recorded_by(partly_quantised), shares=WHOLE)
    for entry in variants.SOURCES:
        label = mismatch.label(entry)
        change = recorded_by(partial(low_precision, entry))
        yield Fault(label, (label,), change, drawn, shares=WHOLE)


# Other sums and kernels of sound engines: no source is tried for them, and none is a fault.
SOUND = (
    mismatch.native_kernels(),
    mismatch.split_k(pieces=3),
    mismatch.tensor_parallel(ranks=2),
    mismatch.pallas_attention(interpret=True),
    mismatch.logit_noise(std=0.01),
    mismatch.log_prob_noise(std=0.01, by="probability"),
)


def controls() -> Iterator[Fault]:
    """Sound rollouts."""
    how = {"change": None, "right": ("none",), "shares": WHOLE}
    yield Fault("none: exact", draw=drawn, **how)
    for sampling in (PLAIN, TOP_P, HALF):
        draw = partial(sound, sampling=sampling)
        said = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
        yield Fault(f"none: float16, {said}", draw=draw, **how)
    for entry in SOUND:
        yield Fault(f"none: {mismatch.label(entry)}", draw=partial(drawn, entries=(entry,)), **how)
