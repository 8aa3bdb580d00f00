"""Makes rollouts with one fault each, diagnoses them, and writes docs/results/diagnose.md.

    python scripts/diagnose_table.py runs/diagnose_table            # faults, then sound engines
    python scripts/diagnose_table.py runs/diagnose_table --parts faults --only shifted --shares 0.1
    python scripts/diagnose_table.py runs/diagnose_table --parts    # the page, of what is there

The model is small and random, with logits that spread as a trained model's do. A fault lies in a
share of the rows or tokens; the others are those of an engine in float16. What is measured is kept
in the folder, line by line, and not measured again. Sound rollouts are of transformers; that needs
torch.
"""

import argparse
import itertools
import json
import platform
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import mismatch
from tim_jax.common.types import Prompts
from tim_jax.instruments.auditing import random_params
from tim_jax.instruments.diagnosis import readers, variants, verdict
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.evidence import Forward, chances, gather, log_normaliser
from tim_jax.instruments.diagnosis.explanations import LEAST_MOVE, Tokens
from tim_jax.instruments.diagnosis.rollouts import Limits, collect
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import Numerics, Rows
from tim_jax.rl import programs
from tim_jax.tasks.text import character_tokenizer

ROOT = Path(__file__).parent.parent
TOKENIZER = character_tokenizer(string.ascii_letters + string.digits + " .,:;+-*/=()!?\n")
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
NUMERICS = Numerics(rows=Rows(16, 16), attention_rows=Rows(16, 16), kv_block=32, head_rows=64)
RESPONSE = 32  # tokens at most
PLAIN = Sampling(RESPONSE)


@cache
def params(seed: int = 0) -> Any:
    return jax.tree.map(jnp.asarray, random_params(CONFIG, seed))


def nudged(scale: float, seed: int = 7) -> Any:
    """Weights of another time, or without an adapter."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        return x + scale * jnp.std(x) * jnp.asarray(rng.standard_normal(x.shape, np.float32))

    return jax.tree.map(leaf, params())


@cache
def prepared(source: float = 0.0) -> Any:
    return jax.jit(Execution(CONFIG, NUMERICS).prepare)(params() if not source else nudged(source))


@cache
def _sampler(sampling: Sampling, samples: int, drawing: Mismatch) -> Any:
    execution = Execution(CONFIG, NUMERICS, sampling)
    return programs.sampling_program(execution, samples=samples, mismatch=drawing)


def prompts(count: int, seed: int) -> Prompts:
    """Ragged, all beginning with BOS."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, len(TOKENIZER), (count, 12))
    tokens[:, 0] = BOS
    return Prompts(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(rng.integers(4, 13, count), jnp.int32),
        ids=jnp.arange(count, dtype=jnp.int32),
    )


@cache
def drawn(
    tokens: int,
    *,
    entries: tuple[mismatch.Entry, ...] = (),
    sampling: Sampling = PLAIN,
    source: float = 0.0,
    seed: int = 0,
    stops: tuple[int, ...] = STOPS,
) -> list[dict[str, Any]]:
    """Rows of at least `tokens` response tokens, in whole responses."""
    sampling = replace(sampling, max_tokens=RESPONSE, stop_tokens=stops)
    whole = Mismatch(entries)
    samples, rows, count = 4, [], 0
    for part in range(1000):
        given, key = prompts(4, seed * 1000 + part), jax.random.key(seed * 1000 + part)
        sample = _sampler(sampling, samples, whole.drawing)
        rollout = sample(whole.weights(prepared(source)), given, key)
        rollout = dial.report(rollout, given, key, mismatch=whole, samples=samples)
        for row in as_rows(jax.device_get(rollout)):
            rows.append(row)
            count += len(row["response_token_ids"])
            if count >= tokens:
                return rows
    raise AssertionError("responses are too short")


def as_rows(rollout: Any) -> Iterator[dict[str, Any]]:
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
        yield row


def forward() -> Forward:
    return Forward(prepared(), Execution(CONFIG, NUMERICS), len(TOKENIZER), STOPS)


def changed(rows: Sequence[dict[str, Any]], change: Callable[..., Any]) -> list[dict[str, Any]]:
    """The rows with `change(exact, declared, responses)` f64[N] in place of their log-probs."""
    responses = collect(readers.read(rows), limits=Limits.of(CONFIG)).responses
    tokens = Tokens(responses, gather(forward(), responses), STOPS, CONFIG.vocab_size, 0)
    moved = np.minimum(change(tokens), 0.0)
    parts = np.split(moved, tokens.lasts[:-1] + 1)
    return [row | {"logprobs": x.tolist()} for row, x in zip(rows, parts, strict=True)]


def raw(tokens: Tokens) -> np.ndarray:
    return chances(tokens.evidence, Distribution()).drawn


def padded(rows: int) -> Callable[[Tokens], np.ndarray]:
    def change(tokens: Tokens) -> np.ndarray:
        normaliser = log_normaliser(tokens.evidence.moments, 1.0)
        extra = np.log(rows) - tokens.evidence.peak
        return tokens.recorded + normaliser - np.logaddexp(normaliser, extra)

    return change


def by_engine(forward: Forward) -> Callable[[Tokens], np.ndarray]:
    """What a system with this forward records of the same tokens."""
    return lambda tokens: gather(forward, tokens.responses).exact


Row = dict[str, Any]
Rows = list[Row]
Change = Callable[[Rows, np.ndarray], Rows]  # rows, and which are wrong

SHARES = (0.001, 0.01, 0.1, 1.0)
TOKENS, LONG = 2048, 20_480  # of the latter a thousandth is twenty
PARTS = ("faults", "sound")


@cache
def low_precision(entry: mismatch.Entry) -> Forward:
    (variant,) = variants.of_numerics(forward(), [entry])
    return variant.forward


@cache
def sound(tokens: int, seed: int, sampling: Sampling = PLAIN) -> Rows:
    """What an engine in float16 records, and how it says that it sampled."""
    said = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    rows = [row | said for row in drawn(tokens, seed=seed, sampling=sampling)]
    return changed(rows, by_engine(low_precision(mismatch.compute(dtype="float16"))))


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


def each(change: Callable[[Row], Row]) -> Change:
    """A change of every wrong row by itself."""
    return lambda rows, wrong: [
        change(row) if own else row for row, own in zip(rows, wrong, strict=True)
    ]


def recorded_by(other: Callable[[], Forward]) -> Change:
    """Wrong rows have the log-probs of another forward."""

    def change(rows: Rows, wrong: np.ndarray) -> Rows:
        found = changed(rows, by_engine(other()))
        return [two if own else one for one, two, own in zip(rows, found, wrong, strict=True)]

    return change


def recomputed(of: Callable[[Tokens], np.ndarray]) -> Change:
    """Wrong rows have log-probs that follow from the exact evidence."""

    def change(rows: Rows, wrong: np.ndarray) -> Rows:
        found = changed(rows, of)
        return [two if own else one for one, two, own in zip(rows, found, wrong, strict=True)]

    return change


def shifted(row: Row) -> Row:
    return row | {"logprobs": [*row["logprobs"][1:], row["logprobs"][0]]}


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


def checkpoint(size: float) -> list[variants.Candidate]:
    return [variants.Candidate("checkpoint", prepared(size))]


HALF = Sampling(temperature=0.6)
TOP_P = Sampling(top_p=0.8)
TOP_K = Sampling(top_k=20)
WHOLE = (1.0,)


def undeclared(sampling: Sampling, tokens: int, seed: int) -> Rows:
    return drawn(tokens, sampling=sampling, seed=seed)


def over_all(sampling: Sampling, tokens: int, seed: int) -> Rows:
    """Drawn under a truncation or temperature that nobody declared, recorded without it."""
    return changed(undeclared(sampling, tokens, seed), raw)


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
    temperature = ("temperature", "recorded_temperature")
    yield Fault("temperature 0.6", temperature, None, partial(undeclared, HALF))
    half = {"sampling": HALF, "draw": partial(sound, sampling=HALF)}
    yield Fault("raw log-probs", ("raw_log_probs",), recomputed(raw), **half)
    yield Fault("top-p 0.8, not declared", ("top_p",), None, partial(undeclared, TOP_P))
    yield Fault("top-k 20, not declared", ("top_k",), None, partial(undeclared, TOP_K))
    kept = {"sampling": TOP_P, "draw": partial(sound, sampling=TOP_P)}
    yield Fault("top-p 0.8, over all", ("ignored_truncation",), recomputed(raw), **kept)
    for name, one in (("top_p", TOP_P), ("top_k", TOP_K), ("temperature", HALF)):
        right = "drawn_temperature" if name == "temperature" else f"{name}_ignored"
        draw = partial(over_all, one)
        yield Fault(f"{name}, in the draws alone", (right,), None, draw, shares=WHOLE)
    yield from faults_of_tokens()
    yield from faults_of_forwards()


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
    ):
        yield Fault(f"prompt: {what}", (name,), each(partial(with_prompt, change=change)))
    drawings: dict[str, tuple[str, Callable[[int, int], Rows]]] = {
        "pad mask": (
            "pad_mask",
            lambda n, s: drawn(n, seed=s, entries=(mismatch.pad_mask(pad=3),)),
        ),
        "another end token": ("other_end_token", lambda n, s: drawn(n, seed=s, stops=(9, 11))),
    }
    for what, (name, draw) in drawings.items():
        yield Fault(what, (name,), None, draw, shares=WHOLE)
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
    names = ("weights of checkpoint",)
    yield Fault("replaced in flight", names, in_flight, others=partial(checkpoint, 0.1))
    yield Fault("an older version", ("other_version",), by_version, shares=SHARES[1:3])
    for name in ("lora_not_applied", "lora_half_scale", "lora_merged(bfloat16)"):
        yield Fault(name, (name,), recorded_by(partial(of_adapter, name)), others=adapter)
    name = "quantised_weights(int4) in some layers"
    yield Fault("one layer in int4", (name,), recorded_by(partly_quantised), shares=WHOLE)
    for entry in variants.SOURCES:
        label = mismatch.label(entry)
        change = recorded_by(partial(low_precision, entry))
        yield Fault(label, (label,), change, partial(plain, ()), shares=WHOLE)


# Other sums and kernels of sound engines: no source is tried for them, and none is a fault.
SOUND = (
    mismatch.native_kernels(),
    mismatch.split_k(pieces=3),
    mismatch.tensor_parallel(ranks=2),
    mismatch.pallas_attention(interpret=True),
    mismatch.logit_noise(std=0.01),
    mismatch.log_prob_noise(std=0.01, by="probability"),
)


def plain(entries: tuple[mismatch.Entry, ...], tokens: int, seed: int) -> Rows:
    return drawn(tokens, seed=seed, entries=entries)


def controls() -> Iterator[Fault]:
    """Sound rollouts."""
    how = {"change": None, "right": ("none",), "shares": WHOLE}
    yield Fault("none: exact", draw=partial(plain, ()), **how)
    for sampling in (PLAIN, TOP_P, HALF):
        draw = partial(sound, sampling=sampling)
        said = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
        yield Fault(f"none: float16, {said}", draw=draw, **how)
    for entry in SOUND:
        yield Fault(f"none: {mismatch.label(entry)}", draw=partial(plain, (entry,)), **how)


@dataclass(frozen=True)
class Outcome:
    """What a diagnosis said of one share of a fault; `affected` tokens differ from sound ones."""

    fault: str
    share: float
    tokens: int
    seed: int
    affected: int
    enough: int
    right: list[str]
    named: str
    state: str
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether it is named first; what is sound, or has no name, must be called so."""
        if self.right == ["none"]:
            sound = self.fault.startswith("none")
            expected = self.state != "fault" if sound else self.state == "fault"
            return expected and (self.named == "none" or (sound and self.named in LABELS))
        return self.named in self.right

    @property
    def due(self) -> bool:
        """Whether it must be named."""
        return self.affected >= self.enough and verdict.abnormal(self.sizes)


LABELS = tuple(mismatch.label(entry) for entry in variants.SOURCES)


def chosen(count: int, share: float, least: int, seed: int) -> np.ndarray:
    found = np.zeros(count, bool)
    size = min(count, max(least, round(share * count)))
    found[np.random.default_rng(seed).choice(count, size, replace=False)] = True
    return found


def with_fault(fault: Fault, share: float, tokens: int, seed: int) -> tuple[Rows, int]:
    """Rows with a share that is wrong, and how many tokens that touches."""
    pool = fault.draw(tokens, seed)
    if fault.change is None and share == 1:
        return pool, sum(len(row["logprobs"]) for row in pool)
    rows = sound(tokens, seed, fault.sampling) if fault.change is None else pool
    rows = rows[: len(pool)]
    count = sum(len(row["logprobs"]) for row in rows) if fault.of_tokens else len(rows)
    wrong = chosen(count, share, 1 if fault.of_tokens else 2, seed)
    if fault.change is None:
        found = [two if own else one for one, two, own in zip(rows, pool, wrong, strict=False)]
    else:
        found = fault.change(rows, wrong)
    return found, sum(map(_moved, rows, found))


def _moved(one: Row, two: Row) -> int:
    """How many tokens of a row differ; all, if its tokens or its prompt do."""
    if any(one[name] != two[name] for name in ("prompt_token_ids", "response_token_ids")):
        return len(two["logprobs"])
    apart = np.subtract(one["logprobs"], two["logprobs"])
    return int((np.abs(apart) > LEAST_MOVE).sum())


class Tokenizer:
    """The tokenizer with BOS, as far as a diagnosis asks for it."""

    bos_token_id = BOS
    chat_template = None

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return TOKENIZER.decode(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def diagnosed(rows: Sequence[Row], others: Sequence[Any] = ()) -> verdict.Verdict:
    collected = collect(readers.read(rows), limits=Limits.of(CONFIG))
    return verdict.diagnose(collected.responses, forward(), others=others, tokenizer=Tokenizer())


def outcome(fault: Fault, share: float, tokens: int, seed: int) -> Outcome:
    rows, affected = with_fault(fault, share, tokens, seed)
    found = diagnosed(rows, fault.others())
    named = "none" if found.best is None else found.best.explanation.name
    about = (fault.name, share, tokens, seed, affected, fault.enough, list(fault.right))
    return Outcome(*about, named, found.state, found.sizes)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "| fault | share | tokens | affected | mean \\|d\\| | K3 | named first | |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for one in outcomes:
        judged = "right" if one.correct else "**wrong**" if one.due else "cannot be told"
        if one.fault.startswith("none") and not one.correct:
            judged = "**false alarm**"
        lines.append(
            f"| {one.fault} | {one.share:.1%} | {one.tokens:,} | {one.affected:,} |"
            f" {one.sizes['mean']:.2g} | {one.sizes['k3']:.2g} | `{one.named}` ({one.state}) |"
            f" {judged} |"
        )
    return lines


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """The shares that matter."""
    faulty = [one for one in outcomes if not one.fault.startswith("none")]
    groups = {
        "Rollouts without a fault that are called so": [
            one for one in outcomes if one.fault.startswith("none")
        ],
        "Faults that must be named (20 tokens or more, one for a sentinel, above the normal size)"
        " and are named first": [one for one in faulty if one.due],
        "Other faults (fewer tokens, or of a normal size) that are named first nevertheless": [
            one for one in faulty if not one.due
        ],
    }
    lines = []
    for text, some in groups.items():
        count = sum(one.correct for one in some)
        lines.append(f"- {text}: {count} of {len(some)} ({count / max(len(some), 1):.1%}).")
    return lines


@dataclass(frozen=True)
class Engine:
    """A configuration of transformers' `generate` on the CPU."""

    dtype: str = "float32"  # "int8": weights and activations of all linear layers, in torch
    attention: str = "sdpa"
    temperature: float = 1.0
    raw: bool = False  # log-probs of the logits before the temperature

    def __str__(self) -> str:
        raw = ", raw log-probs" if self.raw else ""
        how = f"{self.dtype}, {self.attention}, temperature {self.temperature:g}{raw}"
        return f"transformers, {how}"

    def model(self, folder: Path) -> Any:
        """The model as torch runs it."""
        import torch
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if self.dtype == "int8" else getattr(torch, self.dtype)
        how = {"dtype": dtype, "attn_implementation": self.attention}
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
        if self.dtype == "int8":
            return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        return model


@cache
def loaded(engine: Engine, folder: Path) -> Any:
    return engine.model(folder)


def by_transformers(folder: Path, engine: Engine, *, rounds: int = 1, seed: int = 0) -> Rows:
    """What an engine draws, and the log-probs of its own logits. Needs torch."""
    import torch

    model = loaded(engine, folder)
    torch.manual_seed(seed)
    rows = []
    for part in range(rounds):
        for prompt in prompt_lists(part + 100 * seed):
            made = model.generate(
                torch.tensor([prompt] * 4),
                attention_mask=torch.ones(4, len(prompt), dtype=torch.long),
                do_sample=True,
                temperature=engine.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=RESPONSE,
                eos_token_id=list(STOPS),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                output_scores=True,
            )
            logits = torch.stack(made.logits if engine.raw else made.scores, dim=1)
            drawn_tokens = made.sequences[:, len(prompt) :]
            chances = torch.log_softmax(logits.float(), dim=-1)
            found = chances.gather(2, drawn_tokens[..., None])[..., 0]
            for ids, own in zip(drawn_tokens.tolist(), found.tolist(), strict=True):
                length = next((i + 1 for i, x in enumerate(ids) if x in STOPS), len(ids))
                rows.append(
                    {
                        "prompt_token_ids": prompt,
                        "response_token_ids": ids[:length],
                        "logprobs": own[:length],
                        "temperature": engine.temperature,
                    }
                )
    return rows


def prompt_lists(part: int) -> list[list[int]]:
    given = prompts(4, 90 + part)
    pairs = zip(np.asarray(given.tokens), given.lengths, strict=True)
    return [tokens[: int(length)].tolist() for tokens, length in pairs]


CONFIGURATIONS = (
    Engine(attention="eager"),
    Engine(),
    Engine("float16"),
    Engine("bfloat16"),
    Engine("int8"),
)
MORE = (
    Engine(temperature=0.6),
    Engine(temperature=0.6, raw=True),
    Engine("bfloat16", temperature=0.6, raw=True),
)
ROLLOUTS = 20


@dataclass(frozen=True)
class Sound:
    """What was said of a sound rollout of another program."""

    engine: str
    seed: int
    tokens: int
    state: str
    named: str
    sizes: dict[str, float]


def exported(folder: Path) -> Path:
    """Where the model lies as transformers loads it; it is written if it is not there."""
    model = folder / "model"
    if not (model / "config.json").exists():
        hf.save(model, jax.device_get(params()), CONFIG, tokenizer=TOKENIZER)
    return model


def said_of(engine: str, seed: int, rows: Rows) -> Sound:
    found = diagnosed(rows)
    named = "none" if found.best is None else found.best.explanation.name
    return Sound(engine, seed, len(found.tokens.sequence), found.state, named, found.sizes)


def sound_table(found: Sequence[Sound]) -> list[str]:
    lines = [
        "| program | rollouts | tokens | called a fault | named |"
        " mean \\|d\\|, largest of all | K3, largest of all |",
        "|---|--:|--:|--:|---|--:|--:|",
    ]
    for name in dict.fromkeys(one.engine for one in found):
        own = [one for one in found if one.engine == name]
        named = sorted({f"`{one.named}`" for one in own})
        mean, k3 = (max(one.sizes[x] for one in own) for x in ("mean", "k3"))
        alarms = sum(one.state == "fault" for one in own)
        lines.append(
            f"| {name} | {len(own)} | {sum(one.tokens for one in own):,} | {alarms} |"
            f" {', '.join(named)} | {mean:.2g} | {k3:.2g} |"
        )
    return lines


BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()] if path.exists() else []


def write_page(folder: Path) -> None:
    """The page, of what is in the folder."""
    outcomes = [Outcome(**one) for one in lines_of(folder / "faults.jsonl")]
    found = [Sound(**one) for one in lines_of(folder / "sound.jsonl")]
    made = (
        f"Made by `python scripts/diagnose_table.py FOLDER` with jax {jax.__version__}, Python"
        f" {platform.python_version()}, {jax.default_backend()}; {len(outcomes)} rollouts of this"
        f" library's sampler, {len(found)} of other programs."
    )
    parts = [[made], summary(outcomes), table(outcomes), sound_table(found)]
    text = "\n\n".join("\n".join(part) for part in parts)
    page = ROOT / "docs" / "results" / "diagnose.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def measure_faults(folder: Path, only: Sequence[str], shares: Sequence[float]) -> None:
    """Faults and controls that are not in the folder yet."""
    path = folder / "faults.jsonl"
    there = {(x["fault"], x["share"]) for x in lines_of(path)}
    for fault in (*faults(), *controls()):
        if only and not any(name in fault.name for name in only):
            continue
        for share in fault.shares:
            if share in shares and (fault.name, share) not in there:
                append(path, outcome(fault, share, LONG if share == SHARES[0] else TOKENS, 0))


def measure_sound(folder: Path) -> None:
    """Rollouts of transformers that are not in the folder yet."""
    path, model = folder / "sound.jsonl", exported(folder)
    there = {(x["engine"], x["seed"]) for x in lines_of(path)}
    many = itertools.product(range(ROLLOUTS), CONFIGURATIONS)
    for seed, engine in (*many, *((0, one) for one in MORE)):
        if (str(engine), seed) not in there:
            append(path, said_of(str(engine), seed, by_transformers(model, engine, seed=seed)))


def append(path: Path, found: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found)) + "\n")
    print(found, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of faults")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if "faults" in given.parts:
        measure_faults(given.folder, given.only, given.shares)
    if "sound" in given.parts:
        measure_sound(given.folder)
    write_page(given.folder)


if __name__ == "__main__":
    main()
