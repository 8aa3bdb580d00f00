"""Compares sampler and learner on thousands of drawn cases and writes docs/results/exactness.md.

    python scripts/exactness_cases.py                 # 10,000 cases, 42 minutes on one core
    python scripts/exactness_cases.py --cases 500 --out /tmp/exactness.md
    python scripts/exactness_cases.py --cases 1000 --dtype float16    # its own section of the page
    python scripts/exactness_cases.py --cases 100 --packed --seed 1 --tally all.json

The last has few programs and no padding. Counts are added to those of the file, and the page's
section reports them all, so that several short runs with other seeds make one table.

Hypothesis draws each case: numerics, temperature and truncation, the sampler's batch, the prompts'
lengths and contents, the order in which sequences are given to slots, and with what to compare: a
learner of some micro-batch, with some padding or none, or a sampler of another batch and other
slots. Shapes come from a few lists, so that some 250 compiled programs serve all cases; lengths,
contents, orders, keys and weights vary inside them. The cases of one numerics follow each other:
all programs at once would need more memory mappings than a kernel usually allows.
"""

import argparse
import dataclasses
import json
import pathlib
import platform
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from bench_common import RESULTS, cpu_model, with_section
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from tim_jax.common.types import Prompts, Rollout
from tim_jax.instruments.auditing import PRESETS, Unequal, compare, random_params
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, Sampling
from tim_jax.model.fitting import calibrate_once
from tim_jax.numerics import COMPUTE_DTYPES, Numerics, describe
from tim_jax.policy import sampler, scoring

OUT = RESULTS / "exactness.md"
TITLE = "# Sampler against learner, drawn cases"
MODEL = "qwen3-awkward"
CONFIG = PRESETS[MODEL]
WEIGHTS = 4  # sets of random weights
LONGEST = 40  # response tokens
STOPS = tuple(range(3, CONFIG.vocab_size, 24))

SAMPLINGS = {
    "T 1": Sampling(LONGEST, stop_tokens=STOPS),
    "T 0.6": Sampling(LONGEST, temperature=0.6, stop_tokens=STOPS),
    "T 1.3, top-p 0.95": Sampling(LONGEST, temperature=1.3, top_p=0.95, stop_tokens=STOPS),
    "T 0.8, top-k 20, top-p 0.9": Sampling(
        LONGEST, temperature=0.8, top_k=20, top_p=0.9, stop_tokens=STOPS
    ),
}


class Batch(NamedTuple):
    """A sampler's shape."""

    prompts: int
    samples: int
    prompt_length: int
    response_length: int
    batching: Batching = ALL_AT_ONCE


class Learner(NamedTuple):
    """A learner's shape."""

    rows: int
    prompt_length: int
    response_length: int
    remat: bool = False
    buffer: int | None = None  # tokens that the rows lie in, without padding


BATCHES = (
    Batch(1, 1, 9, LONGEST),
    Batch(3, 2, 30, 25, Batching(2)),
    Batch(4, 4, 24, LONGEST),
    Batch(4, 4, 24, LONGEST, Batching(5, 2, 7)),
)
LEARNERS = (
    Learner(1, 30, LONGEST),
    Learner(3, 37, 57, remat=True),
    Learner(8, 30, LONGEST),
    Learner(16, 30, 45),
    Learner(8, 30, LONGEST, buffer=600),
    Learner(5, 24, 53, remat=True, buffer=411),
    Learner(16, 30, 45, buffer=1200),
)
PACKED = tuple(learner for learner in LEARNERS if learner.buffer)


@dataclass(frozen=True)
class Drawn:
    """One case."""

    numerics: Numerics
    sampling: str
    batch: Batch
    against: Batch | Learner
    lengths: tuple[int, ...]  # of the prompts
    contents: int  # seed of tokens, names, order
    weights: int
    key: int


@st.composite
def drawn_cases(draw, numerics, samplings, packed):
    batch = draw(st.sampled_from(BATCHES[2:] if packed else BATCHES))
    length = st.integers(1, batch.prompt_length)
    others = tuple(other for other in BATCHES if other != batch)
    return Drawn(
        numerics=numerics,
        sampling=draw(st.sampled_from(samplings)),
        batch=batch,
        against=draw(st.sampled_from(PACKED if packed else LEARNERS + others)),
        lengths=tuple(draw(st.lists(length, min_size=batch.prompts, max_size=batch.prompts))),
        contents=draw(st.integers(0, 2**32 - 1)),
        weights=draw(st.integers(0, WEIGHTS - 1)),
        key=draw(st.integers(0, 2**31 - 1)),
    )


# --- one case --------------------------------------------------------------------------------


def check(case: Drawn):
    """What `compare` returns for one case."""
    rng = np.random.default_rng(case.contents)
    count, length = case.batch.prompts, case.batch.prompt_length
    prompts = Prompts(
        tokens=jnp.asarray(rng.integers(0, CONFIG.vocab_size, (count, length)), jnp.int32),
        lengths=jnp.asarray(case.lengths, jnp.int32),
        ids=jnp.asarray(rng.integers(0, 2**31 - 1, count), jnp.int32),
    )
    rollout = draw(case, case.batch, prompts)
    if isinstance(case.against, Batch):
        return check_sampler(case, prompts, rollout, case.against, rng)
    return check_learner(case, rollout, case.against, rng)


def check_learner(case: Drawn, rollout: Rollout, learner: Learner, rng):
    """Some rows of the rollout, in any order, some perhaps twice, in other paddings."""
    size = rollout.lengths.shape[0]
    rows = rng.permutation(size)[: learner.rows]
    rows = np.concatenate([rows, rng.integers(0, size, learner.rows - len(rows))])
    part = jax.tree.map(lambda x: x[rows], rollout)
    log_probs, _ = learn(
        prepared(case.weights, case.numerics),
        replace(
            part,
            prompts=fitted(part.prompts, learner.prompt_length, rng),
            responses=fitted(part.responses, learner.response_length, rng),
        ),
        execution=Execution(CONFIG, case.numerics, SAMPLINGS[case.sampling]),
        remat=learner.remat,
        buffer=learner.buffer,
    )
    width = part.responses.shape[1]
    return compare(part, part.responses, part.mask, np.asarray(log_probs)[:, :width])


def check_sampler(case: Drawn, prompts: Prompts, rollout: Rollout, other: Batch, rng):
    """Some of the prompts again, among others, in another batch, group and padding."""
    prompts = jax.tree.map(np.asarray, prompts)
    rows = np.flatnonzero(prompts.lengths <= other.prompt_length)
    assume(len(rows))  # otherwise no prompt is short enough for the other batch: draw anew
    rows = rng.permutation(rows)[: other.prompts]
    places = rng.permutation(other.prompts)[: len(rows)]
    lengths = rng.integers(1, other.prompt_length + 1, other.prompts).astype(np.int32)
    tokens = (other.prompts, other.prompt_length)
    tokens = rng.integers(0, CONFIG.vocab_size, tokens).astype(np.int32)
    ids = rng.integers(0, 2**31 - 1, other.prompts).astype(np.int32)
    tokens[places] = fitted(prompts.tokens[rows], other.prompt_length, rng)
    lengths[places], ids[places] = prompts.lengths[rows], prompts.ids[rows]
    again = draw(case, other, Prompts(*(jnp.asarray(x) for x in (tokens, lengths, ids))))
    sample = np.arange(min(case.batch.samples, other.samples))
    before = (rows[:, None] * case.batch.samples + sample).reshape(-1)
    after = (places[:, None] * other.samples + sample).reshape(-1)
    width = min(case.batch.response_length, other.response_length)
    first, second = cut(rollout, before, width), cut(again, after, width)
    return compare(first, second.responses, second.mask, second.log_probs)


def cut(rollout: Rollout, rows, width: int) -> Rollout:
    """Rows of the rollout, their first `width` response tokens."""
    part = jax.tree.map(lambda x: x[rows], rollout)
    return replace(
        part,
        responses=part.responses[:, :width],
        log_probs=part.log_probs[:, :width],
        lengths=np.minimum(part.lengths, width),
    )


def fitted(tokens, width: int, rng):
    """Tokens [B, T] cut or filled with other tokens to [B, width]."""
    filling = rng.integers(0, CONFIG.vocab_size, (len(tokens), width)).astype(np.int32)
    filling[:, : tokens.shape[1]] = tokens[:, :width]
    return filling


def draw(case: Drawn, batch: Batch, prompts: Prompts) -> Rollout:
    sampling = replace(SAMPLINGS[case.sampling], max_tokens=batch.response_length)
    rollout = sample(
        prepared(case.weights, case.numerics),
        prompts,
        jax.random.key(case.key),
        execution=Execution(CONFIG, case.numerics, sampling),
        samples=batch.samples,
        batching=batch.batching,
        order=np.random.default_rng(case.contents).permutation(batch.prompts * batch.samples),
    )
    return jax.tree.map(np.asarray, rollout)


# --- programs --------------------------------------------------------------------------------


@cache
def prepared(index: int, numerics: Numerics):
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, index))
    return jax.jit(Execution(CONFIG, numerics).prepare)(params)


sample = jax.jit(sampler.sample, static_argnames=("execution", "samples", "batching"))


@partial(jax.jit, static_argnames=("execution", "remat", "buffer"))
def learn(weights, rollout, **how):
    """Log-probs as they are inside the gradient program, and the gradient."""

    def loss(weights):
        log_probs = scoring.score(weights, rollout, **how).log_probs
        return jnp.sum(jnp.where(rollout.mask, jnp.exp(log_probs), 0.0)), log_probs

    (_, log_probs), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    return log_probs, gradient


# --- all cases -------------------------------------------------------------------------------


@dataclass
class Count:
    cases: int = 0
    tokens: int = 0
    unequal: int = 0
    largest: float = 0.0

    def add(self, cases: int, tokens: int, unequal: int, largest: float):
        self.cases += cases
        self.tokens += tokens
        self.unequal += unequal
        self.largest = max(self.largest, largest)


@dataclass
class Tally:
    """Counts by each property of the cases."""

    total: Count = field(default_factory=Count)
    by: dict[str, dict[str, Count]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Count))
    )
    failures: list[tuple[Drawn, Unequal]] = field(default_factory=list)

    def add(self, case: Drawn, found):
        tokens, unequal, largest, first = found
        assert tokens, case
        kind = "sampler" if isinstance(case.against, Batch) else "learner"
        self.total.add(1, tokens, unequal, largest)
        for name, value in (
            ("numerics", describe(case.numerics)),
            ("distribution", case.sampling),
            ("sampler's batch", in_words(case.batch)),
            ("against", f"{kind}, {in_words(case.against)}"),
        ):
            self.by[name][value].add(1, tokens, unequal, largest)
        if first is not None:
            self.failures.append((case, first))

    def plain(self) -> dict:
        """Counts only, for a file."""
        by = {name: {k: vars(v) for k, v in counts.items()} for name, counts in self.by.items()}
        return {"total": vars(self.total), "by": by}

    def join(self, plain: dict) -> None:
        """Adds the counts of an earlier run."""
        self.total.add(**plain["total"])
        for name, counts in plain["by"].items():
            for value, count in counts.items():
                self.by[name][value].add(**count)


def in_words(shape: Batch | Learner) -> str:
    lengths = f"up to {shape.prompt_length} + {shape.response_length} tokens"
    if isinstance(shape, Batch):
        named = dataclasses.asdict(shape.batching).items()
        batching = "".join(f", {value} {name}" for name, value in named if value)
        return f"{shape.prompts} x {shape.samples}{batching}, {lengths}"
    remat = ", layers recomputed" if shape.remat else ""
    rows, most = f"{shape.rows} rows", f"{shape.prompt_length} + {shape.response_length}"
    if shape.buffer is not None:
        return f"{rows} of up to {most} in {shape.buffer} tokens without padding{remat}"
    return f"{rows} padded to {most}{remat}"


def mappings() -> int:
    """Memory mappings of this process (Linux), which every compiled program adds to."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@cache
def most_mappings() -> int:
    """Three quarters of the kernel's limit, at which compiling ends with an error."""
    limit = pathlib.Path("/proc/sys/vm/max_map_count")
    return int(limit.read_text()) * 3 // 4 if limit.exists() else 50_000


def run(numerics, *, cases: int, seed_: int, samplings=tuple(SAMPLINGS), packed=False) -> Tally:
    """`cases` in all, as many of each of `numerics`; `packed`: see PACKED."""
    tally = Tally()
    for index, one in enumerate(numerics):
        jax.clear_caches()
        share = cases // len(numerics) + (index < cases % len(numerics))
        if share:
            drawn = drawn_cases(one, samplings, packed)
            _run(drawn, tally, cases=share, seed_=seed_ + index)
    return tally


def _run(drawn, tally: Tally, *, cases: int, seed_: int) -> None:
    start = time.perf_counter()

    @seed(seed_)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(drawn)
    def every(case):
        if mappings() > most_mappings():
            jax.clear_caches()
        tally.add(case, check(case))
        if tally.total.cases % 50 == 0:
            seconds = time.perf_counter() - start
            total = tally.total
            print(
                f"{total.cases} cases, {total.tokens} tokens, {total.unequal} unequal,"
                f" {seconds:.0f} s",
                flush=True,
            )

    every()


# --- the report ------------------------------------------------------------------------------


def row(name: str, count: Count) -> str:
    largest = f"{count.largest:.1e}" if count.largest else "0"
    return f"| {name} | {count.cases:,} | {count.tokens:,} | {count.unequal:,} | {largest} |"


def report(tally: Tally, control: Tally, command: str, seconds: float) -> str:
    heading = "cases | response tokens compared | unequal | largest difference |"
    rule = "|---|---:|---:|---:|---:|"
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, Python "
    lines = [
        TITLE,
        "",
        f"Made by {command} in {seconds / 60:.0f} minutes",
        f"({versions}{platform.python_version()}; {jax.default_backend()}: {cpu_model()}).",
        "",
        f"The model is the audit's preset `{MODEL}` (3 key heads, groups of 5, heads of 20,",
        f"vocabulary 101) with {WEIGHTS} sets of random weights. Hypothesis drew every case. The",
        "raw bits of the recorded log-probs are compared with those computed again, and for a",
        "second sampler the tokens too, over all response tokens.",
        "",
        f"| | {heading}",
        rule,
        row("**all cases**", tally.total),
        row("control: native numerics", control.total),
    ]
    for name, counts in tally.by.items():
        lines += ["", f"| {name} | {heading}", rule]
        lines += [row(value, counts[value]) for value in sorted(counts)]
    for case, first in tally.failures[:20]:
        lines += ["", f"Unequal: `{case}`: `{first}`"]
    return "\n".join(lines) + "\n"


def with_report(page: str, text: str, name: str) -> str:
    """The page with a new report: the whole, or the section of this name."""
    if name:
        return with_section(page, text.replace(TITLE, f"## {name}", 1))
    _, found, sections = page.partition("\n## ")
    return f"{text}{found}{sections}"


def add_up(file: pathlib.Path, tally: Tally, control: Tally, seconds: float) -> float:
    """Joins the counts of a file's earlier runs and writes them back; their seconds."""
    before = 0.0
    if file.exists():
        earlier = json.loads(file.read_text())
        before = earlier["seconds"]
        tally.join(earlier["tally"])
        control.join(earlier["control"])
    after = {"seconds": before + seconds, "tally": tally.plain(), "control": control.plain()}
    file.write_text(json.dumps(after))
    return before


def kept(tally: pathlib.Path | None, numerics: Numerics) -> pathlib.Path | None:
    """Where the runs that are added up keep what was measured for one dtype."""
    return tally and tally.with_suffix(f".{numerics.compute_dtype}.json")


def main():
    parser = argparse.ArgumentParser(description="Sampler against learner.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument(
        "--dtype", choices=COMPUTE_DTYPES, action="append", help="default: float32 and bfloat16"
    )
    parser.add_argument(
        "--packed", action="store_true", help="only learners without padding, of fewer shapes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tally", type=pathlib.Path, help="counts of runs to be added up")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    start = time.perf_counter()
    dtypes = args.dtype or ["float32", "bfloat16"]
    fixed = tuple(Numerics(compute_dtype=dtype) for dtype in dtypes)
    longest = max(one.prompt_length + one.response_length for one in (*BATCHES, *LEARNERS))
    wide = tuple(
        calibrate_once(CONFIG, one, batch=16, longest=longest, file=kept(args.tally, one))
        for one in fixed
    )
    options = {"seed_": args.seed, "packed": args.packed}
    drawn = wide if args.packed else tuple(dict.fromkeys(fixed + wide))
    samplings = tuple(SAMPLINGS)
    samplings = (samplings[args.seed % len(samplings)],) if args.packed else samplings
    tally = run(drawn, cases=args.cases, samplings=samplings, **options)
    native = tuple(replace(one, family="native") for one in fixed)
    control = Tally()
    if not (args.tally and args.tally.exists()):  # of several runs the first has the control
        control = run(native, cases=max(args.cases // 50, 2), samplings=("T 1",), **options)
    command = f"python scripts/exactness_cases.py --cases {args.cases} --seed {args.seed}"
    command += "".join(f" --dtype {dtype}" for dtype in args.dtype or ())
    command += " --packed" * args.packed
    found = tally.total.unequal or not tally.total.tokens
    seconds = time.perf_counter() - start
    command = f"`{command}`"
    if args.tally:
        seconds += add_up(args.tally, tally, control, seconds)
        command += " and runs of other seeds and dtypes"
    text = report(tally, control, command, seconds)
    name = "without padding" if args.packed else " and ".join(args.dtype or ())
    page = args.out.read_text() if args.out.exists() else ""
    args.out.write_text(with_report(page, text, name))
    print(text)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
