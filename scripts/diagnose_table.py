"""Makes rollouts with one fault each, diagnoses them, and writes docs/results/diagnose.md.

    python scripts/diagnose_table.py                        # about half an hour on two idle cores
    python scripts/diagnose_table.py --groups parts weights # some of the faults
    python scripts/diagnose_table.py --quick    # one strength and one size of each

The model is small and random, with logits that spread as a trained model's do. Rollouts come from
this library's sampler, with an entry of the dial or with a mistake made in what it recorded.
"""

import argparse
import itertools
import platform
import string
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
from tim_jax.instruments.diagnosis.explanations import Tokens
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


def noisy(size: float) -> Callable[[Tokens], np.ndarray]:
    def change(tokens: Tokens) -> np.ndarray:
        rare = -np.expm1(tokens.recorded)
        return tokens.recorded + size * rare * np.random.default_rng(0).standard_normal(len(rare))

    return change


def by_engine(forward: Forward) -> Callable[[Tokens], np.ndarray]:
    """What a system with this forward records of the same tokens."""
    return lambda tokens: gather(forward, tokens.responses).exact


def shifted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"logprobs": [*row["logprobs"][1:], row["logprobs"][0]]} for row in rows]


def with_prompt(rows: Sequence[dict[str, Any]], change: Callable[..., Any]) -> list[dict[str, Any]]:
    return [row | {"prompt_token_ids": change(row["prompt_token_ids"])} for row in rows]


def declared(rows: Sequence[dict[str, Any]], **values: float) -> list[dict[str, Any]]:
    return [row | values for row in rows]


@dataclass(frozen=True)
class Case:
    """Rollouts with one fault; the names by which it is right; and how strong it is."""

    fault: str
    strength: str
    right: tuple[str, ...]
    rows: Callable[[int, int], list[dict[str, Any]]]  # (tokens, seed) -> rows


HALF = Sampling(temperature=0.6)
WARM = Sampling(temperature=1.2)
TOP_P = Sampling(top_p=0.8)
TOP_K = Sampling(top_k=20)
# Other sums and kernels of sound engines: no source is tried for them, and none is a fault.
SOUND = (
    mismatch.native_kernels(),
    mismatch.tile_sizes(rows=4, kv_block=8),
    mismatch.sum_order(lanes=8),
    mismatch.split_k(pieces=3),
    mismatch.split_kv(programs=132),
    mismatch.tensor_parallel(ranks=2),
    mismatch.pallas_attention(interpret=True),
    mismatch.logit_noise(std=0.01),
    mismatch.log_prob_noise(std=0.01, by="probability"),
)


def plain(tokens: int, seed: int) -> list[dict[str, Any]]:
    return drawn(tokens, seed=seed)


def none_cases() -> Iterator[Case]:
    """Sound engines."""
    none = ("none",)
    yield Case("none", "exact", none, plain)
    for what, sampling in (("top-p 0.8", TOP_P), ("temperature 0.6", HALF)):
        said = {"top_p": sampling.top_p, "temperature": sampling.temperature}
        yield Case(
            "none",
            f"exact, {what}",
            none,
            lambda n, s, how=sampling, said=said: declared(drawn(n, sampling=how, seed=s), **said),
        )
    for size in (1e-4, 1e-2):
        make = noisy(size)
        yield Case(
            "none", f"noise {size:g}", none, lambda n, s, make=make: changed(plain(n, s), make)
        )
    for entry in SOUND:
        label = mismatch.label(entry)
        yield Case(
            "none", label, none, lambda n, s, entry=entry: drawn(n, seed=s, entries=(entry,))
        )


def sampling_cases() -> Iterator[Case]:
    """Temperatures and truncations that are not as they are declared."""
    for how in (HALF, WARM):
        yield Case(
            "temperature",
            f"{how.temperature:g}",
            ("temperature",),
            lambda n, s, how=how: drawn(n, sampling=how, seed=s),
        )

    def half(n: int, s: int) -> list[dict[str, Any]]:
        return changed(drawn(n, sampling=HALF, seed=s), raw)

    yield Case(
        "raw log-probs",
        "0.6, declared",
        ("raw_log_probs",),
        lambda n, s: declared(half(n, s), temperature=0.6),
    )
    yield Case("raw log-probs", "0.6, not declared", ("drawn_temperature",), half)
    for how, name in ((TOP_P, "top_p"), (TOP_K, "top_k")):
        yield from _truncation_cases(how, name, getattr(how, name))


def _truncation_cases(how: Sampling, name: str, value: float) -> Iterator[Case]:
    def kept(n: int, s: int) -> list[dict[str, Any]]:
        return drawn(n, sampling=how, seed=s)

    def whole(n: int, s: int) -> list[dict[str, Any]]:
        return changed(kept(n, s), raw)

    said = {name: value}
    for what, right, rows in (
        ("renormalised", name, kept),
        ("not renormalised", f"{name}_ignored", whole),
        (
            "declared, not renormalised",
            "ignored_truncation",
            lambda n, s: declared(whole(n, s), **said),
        ),
    ):
        yield Case(name, f"{value:g}, {what}", (right,), rows)


def token_cases() -> Iterator[Case]:
    """Tokens and log-probs that are not where they belong."""
    yield Case("shifted", "by one", ("shifted",), lambda n, s: shifted(plain(n, s)))
    for share in (0.5, 1.0):
        entry = mismatch.dropped_end(share=share, replacement=0)
        yield Case(
            "end token replaced",
            f"in {share:.0%}",
            ("end_token_replaced",),
            lambda n, s, entry=entry: drawn(n, seed=s, entries=(entry,)),
        )
    for fault, name, entry in (
        ("end token stripped", "end_token_stripped", mismatch.dropped_end()),
        ("pad mask", "pad_mask", mismatch.pad_mask(pad=3)),
    ):
        yield Case(fault, "", (name,), lambda n, s, entry=entry: drawn(n, seed=s, entries=(entry,)))
    yield Case("another end token", "", ("other_end_token",), by_other_end)
    for count in (4, 64):
        yield Case(
            "padded vocabulary",
            f"{count} rows",
            ("padded_vocabulary",),
            lambda n, s, count=count: changed(plain(n, s), padded(count)),
        )
    yield Case("first token stripped", "", ("first_token_stripped",), without_first)


def without_first(tokens: int, seed: int) -> list[dict[str, Any]]:
    names = ("response_token_ids", "logprobs")
    long = [row for row in plain(tokens, seed) if len(row["logprobs"]) > 1]
    return [row | {name: row[name][1:] for name in names} for row in long]


def by_other_end(tokens: int, seed: int) -> list[dict[str, Any]]:
    """The engine ends at a token that does not end the model's responses."""
    return drawn(tokens, seed=seed, stops=(9, 11))


def prompt_cases() -> Iterator[Case]:
    """Other prompts."""
    changes: dict[str, tuple[str, Callable[..., Any]]] = {
        "one token more": ("prompt_longer", lambda ids: [*ids, 4]),
        "BOS lost": ("bos_missing", lambda ids: ids[1:]),
        "BOS added": ("bos_added", lambda ids: [BOS, *ids]),
    }
    for what, (name, change) in changes.items():
        yield Case(
            "prompt", what, (name,), lambda n, s, change=change: with_prompt(plain(n, s), change)
        )


def weight_cases() -> Iterator[Case]:
    """Other weights: in all rows, in some, in the first tokens, in some layers; low precision."""
    names = ("weights of checkpoint",)
    for size in (0.01, 0.1):
        yield Case(
            "weights",
            f"off by {size:.0%}",
            names,
            lambda n, s, size=size: drawn(n, source=size, seed=s),
        )
    for share in SHARES[:-1]:
        yield Case(
            "weights",
            f"off by 10%, in {share:.1%} of rows",
            names,
            lambda n, s, share=share: of_checkpoint(sound(n, s), share),
        )
    yield Case("weights", "off by 10%, replaced in flight", names, replaced_in_flight)
    yield Case("weights", "off by 3%, in a third, by version", ("other_version",), by_version)
    yield Case(
        "some layers",
        "the second, int8",
        ("quantised_weights(int8) in some layers",),
        half_quantised,
    )
    for entry in variants.SOURCES:
        label = mismatch.label(entry)
        yield Case(
            "low precision",
            label,
            (label,),
            lambda n, s, entry=entry: changed(plain(n, s), by_engine(low_precision(entry))),
        )


def of_checkpoint(rows: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """A share of the rows with the log-probs of other weights."""
    other = changed(rows, by_engine(forward()._replace(weights=prepared(0.1))))
    _, chosen = chosen_rows(rows, share)
    return [two if own else one for one, two, own in zip(rows, other, chosen, strict=True)]


def replaced_in_flight(tokens: int, seed: int) -> list[dict[str, Any]]:
    """The first ten tokens of every second row are of the weights before."""
    rows = sound(tokens, seed)
    other = changed(rows, by_engine(forward()._replace(weights=prepared(0.1))))
    for row, old in list(zip(rows, other, strict=True))[::2]:
        row["logprobs"] = [*old["logprobs"][:10], *row["logprobs"][10:]]
    return rows


def by_version(tokens: int, seed: int) -> list[dict[str, Any]]:
    """Every third row is of weights that nobody has any more."""
    rows = sound(tokens, seed)
    other = changed(rows, by_engine(forward()._replace(weights=prepared(0.03))))
    return [
        (two if i % 3 == 0 else one) | {"weights_version": int(i % 3 > 0)}
        for i, (one, two) in enumerate(zip(rows, other, strict=True))
    ]


def half_quantised(tokens: int, seed: int) -> list[dict[str, Any]]:
    entry = mismatch.quantised_weights(dtype="int8")
    rounded = Mismatch((entry,)).weights(prepared())
    some = variants.mixed_layers(prepared(), rounded, np.asarray([False, True]))
    return changed(plain(tokens, seed), by_engine(forward()._replace(weights=some)))


SHARES = (0.001, 0.01, 0.1, 1.0)


def part_cases() -> Iterator[Case]:
    """Faults of a share of the tokens or rows, beside the rounding of float16."""
    for share in SHARES:
        for fault, name, change in (
            ("sentinel -9999", "sentinel", lambda x, own: np.where(own, -9999.0, x)),
            ("zeros", "sentinel", lambda x, own: np.where(own, 0.0, x)),
        ):
            yield Case(
                fault,
                f"in {share:.1%} of tokens",
                (name,),
                lambda n, s, share=share, change=change: with_part(n, s, share, change),
            )
        yield Case(
            "another row's",
            f"in {share:.1%} of rows",
            ("other_row",),
            lambda n, s, share=share: with_other_rows(sound(n, s), share),
        )
        yield Case(
            "shifted",
            f"in {share:.1%} of rows",
            ("shifted",),
            lambda n, s, share=share: [
                shifted([row])[0] if own else row
                for row, own in zip(*chosen_rows(sound(n, s), share), strict=True)
            ],
        )
    for share in SHARES[:-1]:
        yield Case(
            "off by 3 to 9 nats",
            f"in {share:.1%} of tokens",
            ("none",),
            lambda n, s, share=share: with_part(n, s, share, off),
        )


GROUPS = {
    "none": none_cases,
    "sampling": sampling_cases,
    "tokens": token_cases,
    "prompts": prompt_cases,
    "weights": weight_cases,
    "parts": part_cases,
}


def off(log_probs: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return log_probs - chosen * np.random.default_rng(1).uniform(3, 9, len(chosen))


def sound(tokens: int, seed: int) -> list[dict[str, Any]]:
    """What an engine in float16 records."""
    entry = mismatch.compute(dtype="float16")
    return changed(plain(tokens, seed), by_engine(low_precision(entry)))


def with_part(
    tokens: int, seed: int, share: float, change: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Log-probs `change(log-probs f64[n], chosen bool[n])`, at least at one token of all."""
    rows = sound(tokens, seed)
    whole = np.concatenate([row["logprobs"] for row in rows])
    chosen = np.zeros(len(whole), bool)
    size = max(1, round(share * len(whole)))
    chosen[np.random.default_rng(seed).choice(len(whole), size, replace=False)] = True
    parts = np.split(change(whole, chosen), np.cumsum([len(r["logprobs"]) for r in rows])[:-1])
    return [row | {"logprobs": x.tolist()} for row, x in zip(rows, parts, strict=True)]


def chosen_rows(
    rows: list[dict[str, Any]], share: float
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The rows, and which are of a share, at least two."""
    chosen = np.zeros(len(rows), bool)
    size = min(len(rows), max(2, round(share * len(rows))))
    chosen[np.random.default_rng(0).choice(len(rows), size, replace=False)] = True
    return rows, chosen


def with_other_rows(rows: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """Rows of a share hold the log-probs of the next one of them that is as long, or longer."""
    _, chosen = chosen_rows(rows, share)
    own = sorted(np.flatnonzero(chosen), key=lambda i: len(rows[i]["logprobs"]))
    found = list(rows)
    for i, j in itertools.pairwise(own):
        count = len(rows[i]["logprobs"])
        found[i] = rows[i] | {"logprobs": rows[j]["logprobs"][:count]}
    return found


@cache
def low_precision(entry: mismatch.Entry) -> Forward:
    (variant,) = variants.of_numerics(forward(), [entry])
    return variant.forward


class Tokenizer:
    """The tokenizer with BOS, as far as a diagnosis asks for it."""

    bos_token_id = BOS
    chat_template = None

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return TOKENIZER.decode(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


@dataclass(frozen=True)
class Outcome:
    """What a diagnosis said of a case."""

    case: Case
    tokens: int
    named: str
    state: str
    sizes: dict[str, float]

    @property
    def due(self) -> bool:
        """Whether it must be named: a gap above the normal size."""
        return verdict.abnormal(self.sizes)

    @property
    def right(self) -> bool:
        if self.case.fault == "none":
            return self.state != "fault" and self.named in ("none", *LABELS)
        if self.case.right == ("none",):  # nothing that is known: a fault that nothing explains
            return self.state == "fault" and self.named == "none"
        return self.named in self.case.right


LABELS = tuple(mismatch.label(entry) for entry in variants.SOURCES)


def diagnosed(rows: Sequence[dict[str, Any]], others: Sequence[Any] = ()) -> verdict.Verdict:
    collected = collect(readers.read(rows), limits=Limits.of(CONFIG))
    return verdict.diagnose(collected.responses, forward(), others=others, tokenizer=Tokenizer())


def outcome(case: Case, tokens: int, seed: int) -> Outcome:
    size = 0.1 if "10%" in case.strength else 0.01
    found = diagnosed(case.rows(tokens, seed), [("checkpoint", prepared(size))])
    named = "none" if found.best is None else found.best.explanation.name
    return Outcome(case, tokens, named, found.state, found.sizes)


def table(outcomes: Sequence[Outcome]) -> str:
    """The confusion table in Markdown: a row a fault and strength, a column a number of tokens."""
    sizes = sorted({one.tokens for one in outcomes})
    lines = [
        "| fault | strength | mean \\|d\\| | K3 | "
        + " | ".join(f"{n:,} tokens" for n in sizes)
        + " |",
        "|---|---|--:|--:|" + "---|" * len(sizes),
    ]
    for key in dict.fromkeys((one.case.fault, one.case.strength) for one in outcomes):
        own = [one for one in outcomes if (one.case.fault, one.case.strength) == key]
        last = own[-1].sizes
        cells = []
        for n in sizes:
            at = [one for one in own if one.tokens == n]
            named = sorted({f"`{one.named}`" for one in at})
            count = sum(one.right for one in at)
            cells.append(f"{count} of {len(at)}: {', '.join(named)}" if at else "")
        lines.append(
            f"| {key[0]} | {key[1]} | {last['mean']:.2g} | {last['k3']:.2g} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The two shares that matter."""
    exact = [one for one in outcomes if one.case.fault == "none"]
    due = [one for one in outcomes if one.case.fault != "none" and one.due]
    small = [one for one in outcomes if one.case.fault != "none" and not one.due]

    def share(some: Sequence[Outcome]) -> str:
        count = sum(one.right for one in some)
        return f"{count} of {len(some)}" + (f" ({count / len(some):.1%})" if some else "")

    return (
        f"- Rollouts without a fault that are called so: {share(exact)}.\n"
        f"- Faults above the normal size whose explanation is named first: {share(due)}.\n"
        f"- Faults below it, or without any effect on log-probs, named first: {share(small)}."
    )


@dataclass(frozen=True)
class Engine:
    """A configuration of transformers' `generate` on the CPU."""

    dtype: str = "float32"  # "int8": weights and activations of all linear layers, in torch
    attention: str = "sdpa"
    temperature: float = 1.0
    raw: bool = False  # log-probs of the logits before the temperature

    def __str__(self) -> str:
        raw = ", raw log-probs" if self.raw else ""
        return f"{self.dtype}, {self.attention}, temperature {self.temperature:g}{raw}"

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


def by_transformers(folder: Path, engine: Engine, *, rounds: int = 2) -> list[dict[str, Any]]:
    """What an engine draws, and the log-probs of its own logits. Needs torch."""
    import torch

    model = engine.model(folder)
    torch.manual_seed(0)
    rows = []
    for part in range(rounds):
        for prompt in _prompt_lists(part):
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


def _prompt_lists(part: int) -> Iterator[list[int]]:
    given = prompts(4, 90 + part)
    for tokens, length in zip(np.asarray(given.tokens), given.lengths, strict=True):
        yield tokens[: int(length)].tolist()


ENGINES = (
    Engine(attention="eager"),
    Engine(),
    Engine("float16"),
    Engine("bfloat16"),
    Engine("int8"),
    Engine(temperature=0.6),
    Engine(temperature=0.6, raw=True),
    Engine("bfloat16", temperature=0.6, raw=True),
)
_ROUNDS = 7  # of 16 responses


def engines(folder: Path) -> str:
    """A table of what is said of `transformers`' own rollouts."""
    hf.save(folder, jax.device_get(params()), CONFIG, tokenizer=TOKENIZER)
    lines = [
        "| transformers' generate | responses | tokens | state | named | mean \\|d\\| | K3 |",
        "|---|--:|--:|---|---|--:|--:|",
    ]
    for engine in ENGINES:
        found = diagnosed(by_transformers(folder, engine, rounds=_ROUNDS))
        named = "none" if found.best is None else f"`{found.best.explanation.name}`"
        lines.append(
            f"| {engine} | {len(found.tokens.responses)} | {len(found.tokens.sequence):,} |"
            f" {found.state} | {named} | {found.sizes['mean']:.2g} | {found.sizes['k3']:.2g} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write(outcomes: Sequence[Outcome], arguments: argparse.Namespace, *more: str) -> None:
    """The page as far as it is measured."""
    sizes = " ".join(map(str, arguments.tokens))
    groups = "" if arguments.groups == list(GROUPS) else f" --groups {' '.join(arguments.groups)}"
    made = (
        f"Made by `python scripts/diagnose_table.py --seeds {arguments.seeds} --tokens"
        f" {sizes}{groups}` with jax {jax.__version__}, Python"
        f" {platform.python_version()}, {jax.default_backend()}; {len(outcomes)} rollouts."
    )
    text = "\n\n".join([made, summary(outcomes), table(outcomes), *more])
    page = ROOT / "docs" / "results" / "diagnose.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048, 4096])
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    arguments = parser.parse_args()
    arguments.tokens = [512] if arguments.quick else arguments.tokens
    outcomes, every = [], [case for name in arguments.groups for case in GROUPS[name]()]
    for tokens, case, seed in itertools.product(arguments.tokens, every, range(arguments.seeds)):
        outcomes.append(outcome(case, tokens, seed))
        one = outcomes[-1]
        print(case.fault, case.strength, tokens, one.named, one.right, flush=True)
        write(outcomes, arguments)
    if "none" not in arguments.groups:
        return
    with tempfile.TemporaryDirectory() as folder:
        engine = engines(Path(folder) / "model")
    write(outcomes, arguments, engine)


if __name__ == "__main__":
    main()
