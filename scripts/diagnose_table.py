"""Diagnoses rollouts with one fault each and sound ones, and writes docs/results/diagnose.md.

    python scripts/diagnose_table.py runs/diagnose_table            # faults, then sound engines
    python scripts/diagnose_table.py runs/diagnose_table --parts faults --only shifted --shares 0.1
    python scripts/diagnose_table.py runs/diagnose_table --parts    # the page, of what is there

What is measured is kept in the folder, line by line, and not measured again. The faults are of
diagnose_faults.py. Sound rollouts are of transformers; that needs torch.
"""

import argparse
import itertools
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_common import RESULTS, between_marks, cpu_model, generated, keep, read_rows
from diagnose_faults import (
    BOS,
    CHAT,
    CONFIG,
    LONG,
    RESPONSE,
    SHARES,
    STOPS,
    TOKENIZER,
    TOKENS,
    Fault,
    Row,
    Rows,
    controls,
    faults,
    forward,
    params,
    prompts,
    sound,
)

from tim_jax import mismatch
from tim_jax.instruments.diagnosis import readers, variants, verdict
from tim_jax.instruments.diagnosis.evidence import Forward
from tim_jax.instruments.diagnosis.explanations import LEAST_MOVE
from tim_jax.instruments.diagnosis.rollouts import Limits, collect
from tim_jax.model import hf

PAGE = RESULTS / "diagnose.md"
PARTS = ("faults", "sound")


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
    """How many tokens of a row differ; all, if anything but log-probs does."""
    if one | {"logprobs": None} != two | {"logprobs": None}:
        return len(two["logprobs"])
    apart = np.subtract(one["logprobs"], two["logprobs"])
    return int((np.abs(apart) > LEAST_MOVE).sum())


class Tokenizer:
    """The tokenizer with BOS, as far as a diagnosis asks for it."""

    bos_token_id = BOS

    def __getattr__(self, name: str) -> Any:
        return getattr(CHAT, name)


def diagnosed(
    rows: Sequence[Row], others: Sequence[Any] = (), model: Forward | None = None
) -> verdict.Verdict:
    model = model or forward()
    collected = collect(readers.read(rows), limits=Limits.of(model.execution.config))
    return verdict.diagnose(collected.responses, model, others=others, tokenizer=Tokenizer())


def outcome(fault: Fault, share: float, tokens: int, seed: int) -> Outcome:
    rows, affected = with_fault(fault, share, tokens, seed)
    found = diagnosed(rows, fault.others(), fault.model())
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


@cache
def loaded(engine: Engine, folder: Path) -> Any:
    """The model as torch runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if engine.dtype == "int8" else getattr(torch, engine.dtype)
    how = {"dtype": dtype, "attn_implementation": engine.attention}
    model = AutoModelForCausalLM.from_pretrained(folder, **how)
    if engine.dtype == "int8":
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    return model


def by_transformers(folder: Path, engine: Engine, seed: int = 0) -> Rows:
    """What an engine draws, and the log-probs of its own logits. Needs torch."""
    import torch

    model = loaded(engine, folder)
    torch.manual_seed(seed)
    how = {"temperature": engine.temperature, "top_p": 1.0, "pad_token_id": 0}
    how |= {"samples": 4, "stops": STOPS, "max_new_tokens": RESPONSE}
    rows = generated(model, prompt_lists(100 * seed), **how)
    recorded = "raw" if engine.raw else "logprobs"
    return [row | {"logprobs": row[recorded], "temperature": engine.temperature} for row in rows]


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


def write_page(folder: Path) -> None:
    """The page, of what is in the folder."""
    order = {fault.name: i for i, fault in enumerate((*faults(), *controls()))}
    outcomes = [Outcome(**one) for one in read_rows(folder / "faults.jsonl")]
    outcomes.sort(key=lambda one: (order[one.fault], one.share))
    found = [Sound(**one) for one in read_rows(folder / "sound.jsonl")]
    made = (
        f"Made by `python scripts/diagnose_table.py FOLDER` with jax {jax.__version__}, Python"
        f" {platform.python_version()}, {cpu_model()}; {len(outcomes)} rollouts of this"
        f" library's sampler, {len(found)} of other programs."
    )
    parts = [[made], summary(outcomes), table(outcomes), sound_table(found)]
    text = "\n\n".join("\n".join(part) for part in parts)
    PAGE.write_text(between_marks(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


def measure_faults(folder: Path, only: Sequence[str], shares: Sequence[float]) -> None:
    """Faults and controls that are not in the folder yet."""
    path = folder / "faults.jsonl"
    there = {(x["fault"], x["share"]) for x in read_rows(path)}
    for fault in (*faults(), *controls()):
        if only and not any(name in fault.name for name in only):
            continue
        for share in fault.shares:
            if share in shares and (fault.name, share) not in there:
                append(path, outcome(fault, share, LONG if share == SHARES[0] else TOKENS, 0))


def measure_sound(folder: Path) -> None:
    """Rollouts of transformers that are not in the folder yet."""
    path, model = folder / "sound.jsonl", exported(folder)
    there = {(x["engine"], x["seed"]) for x in read_rows(path)}
    many = itertools.product(range(ROLLOUTS), CONFIGURATIONS)
    for seed, engine in (*many, *((0, one) for one in MORE)):
        if (str(engine), seed) not in there:
            append(path, said_of(str(engine), seed, by_transformers(model, engine, seed)))


def append(path: Path, found: Any) -> None:
    keep(path, asdict(found))
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
