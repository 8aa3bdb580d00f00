"""Measures what docs/results/smollm2.md shows of SmolLM2-135M-Instruct, a part at a time.

    bash scripts/real_model.sh                              # the model, once
    python scripts/smollm2_table.py logits                  # against transformers; needs torch
    python scripts/smollm2_table.py audit                   # sampler and learner, both dtypes
    python scripts/smollm2_table.py audit --chat            # from the questions, as chat prompts
    python scripts/smollm2_table.py sources [--dtype bfloat16]   # every difference of a sampler
    python scripts/smollm2_table.py engines [FOLDER]        # transformers' generate; needs torch
    python scripts/smollm2_table.py faults [FOLDER] --trained runs/smollm2   # made in these
    python scripts/smollm2_table.py runs FOLDER...          # runs of configs/smollm2.toml
    python scripts/smollm2_table.py ties RUN                # half precision after one step

Each writes its part of the page. `engines` and `faults` write the
rollouts to a folder, and have `tim-jax diagnose` name what it sees.
These and `sources` write the page after every row and keep the rows
in a file, so that the same command goes on where it was stopped.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_common import RESULTS, between_marks, cpu_model, generated, keep, read_rows
from diagnose_faults import shifted, with_prompt, without
from mismatch_table import PLAIN, cases
from scipy import stats

import tim_jax as tim
from tim_jax import mismatch
from tim_jax.api.diagnosing import Diagnosis
from tim_jax.app.config import toml
from tim_jax.app.run import assembly, folders
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import ablation
from tim_jax.instruments.diagnosis.evidence import Forward, log_probs
from tim_jax.instruments.diagnosis.rollouts import Limits, collect
from tim_jax.instruments.diagnosis.rows import Row as Line
from tim_jax.instruments.diagnosis.variants import of_numerics
from tim_jax.model import fitting, hf, transformer
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.files import load_tokenizer
from tim_jax.numerics import EXACT_F32, Numerics, describe
from tim_jax.tasks.base import Example
from tim_jax.tasks.builtin import addition
from tim_jax.tasks.text import encode_prompt, encode_text

PAGE = RESULTS / "smollm2.md"
QUESTIONS = (
    "What is gravity?",
    "Name three primary colours.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is 17 + 25?",
    "Who wrote Hamlet, and when?",
    "Translate 'good morning' into French.",
    "Explain why the sky is blue in one sentence.",
)
HELD = "eval/reward"
RESPONSE, SAMPLES = 32, 4
LINE_BREAK = 198
HALF, PROBLEMS = ("bfloat16", "float16"), 16
STALE = "weights of before the run"
Row = dict[str, Any]  # of rollouts, or of a table
SOURCES = tuple(
    one | {"ranks": 3} if one["name"] == "tensor_parallel" else one  # of 9 heads
    for one in PLAIN
    if one["name"] not in ("stale_weights", "pallas_attention")
)


def prompt_ids(model: Path) -> list[list[int]]:
    """The questions through the chat template."""
    tokenizer = load_tokenizer(model, vocab_size=hf.load_config(model).vocab_size)
    return [encode_prompt(tokenizer, text, chat_template=True) for text in QUESTIONS]


def padded(rows: Sequence[Sequence[int]]) -> Prompts:
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, ids in zip(tokens, rows, strict=True):
        place[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in rows], jnp.int32)
    return Prompts(jnp.asarray(tokens), lengths, jnp.arange(len(rows), dtype=jnp.int32))


def machine(**more: str) -> str:
    versions = {"jax": jax.__version__, "Python": platform.python_version(), **more}
    named = ", ".join(f"{name} {value}" for name, value in versions.items())
    return f"{named}; {cpu_model()}, 2 cores shared with other work"


def logits(model: Path) -> str:
    """Ours against transformers' on a chat prompt of every question, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = hf.load_config(model)
    execution = Execution(config, EXACT_F32)
    weights = jax.jit(execution.prepare)(hf.load_params(model, config))

    @jax.jit
    def ours(weights: Any, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, _, _ = transformer.forward(weights, tokens, places, execution=execution)
        return transformer.logits(weights, hidden[0], execution=execution)

    tokens = np.concatenate(prompt_ids(model))[None]  # one sequence
    with torch.no_grad():
        expected = theirs(torch.as_tensor(tokens)).logits[0].double().numpy()
        exact = theirs.double()(torch.as_tensor(tokens)).logits[0].numpy()
    found = np.asarray(ours(weights, jnp.asarray(tokens, jnp.int32)), np.float64)
    engine = {"torch": torch.__version__, "transformers": version("transformers")}
    spread = np.ptp(exact, axis=-1).mean()
    rows = [
        ("transformers, float32", expected, found),
        ("transformers, float64", exact, found),
        ("transformers, float32 against float64", exact, expected),
    ]
    lines = [
        f"{tokens.shape[1]} positions, {config.vocab_size:,} logits each, whose range is"
        f" {spread:.1f} on average; {machine(**engine)}.",
        "",
        "| against | largest \\|difference\\| | largest, over the largest \\|logit\\| |",
        "|---|--:|--:|",
    ]
    for name, right, got in rows:
        worst = np.abs(got - right).max()
        lines.append(f"| {name} | {worst:.1e} | {worst / np.abs(right).max():.1e} |")
    return "\n".join(lines)


def measured(
    config: ModelConfig, dtype: str, *, batch: int, longest: int, file: Path | None = None
) -> Numerics:
    """The numerics of a training run."""
    plain = assembly.fitted_numerics("auto", dtype, config, length=longest)
    return fitting.calibrate_once(config, plain, batch=batch, longest=longest, file=file)


def audited(model: Path, chat: bool) -> str:
    """Standard cases in both dtypes, by long responses that no token ends.

    The prompts are random tokens or, with `chat`, the questions through the chat template.
    """
    config = hf.load_config(model)
    params = jax.tree.map(jnp.asarray, hf.load_params(model, config))
    sizes, prompts = auditing.Sizes(response_length=96), None
    if chat:
        prompts = padded(prompt_ids(model))
        count, length = prompts.tokens.shape
        sizes = replace(sizes, prompts=count, samples=2, prompt_length=length)
    longest = sizes.prompt_length + sizes.response_length
    found = [
        replace(case, sampling=replace(case.sampling, stop_tokens=()))
        for case in auditing.standard_cases(config, sizes)
        if case.name in AUDITED
    ]
    results = []
    for dtype in ("float32", "bfloat16"):
        numerics = measured(config, dtype, batch=sizes.prompts * sizes.samples, longest=longest)
        how = {"numerics": [numerics], "cases": found, "sizes": sizes, "prompts": prompts}
        for one in auditing.audit(params, config, **how):
            results.append((dtype, one))
            print(dtype, one.name, one.compared_tokens, one.unequal_tokens, flush=True)
    held = [one for _, one in results if not one.control]
    compared = sum(one.compared_tokens for one in held)
    unequal = sum(one.unequal_tokens for one in held)
    lines = [
        f"{compared:,} tokens compared, {unequal} unequal; {machine()}.",
        "",
        "| case | dtype | tokens | unequal |",
        "|---|---|--:|--:|",
    ]
    for dtype, one in results:
        name = f"{one.name} (control: must differ)" if one.control else one.name
        lines.append(f"| {name} | {dtype} | {one.compared_tokens:,} | {one.unequal_tokens:,} |")
    return "\n".join(lines)


def sources(
    model: Path, dtype: str, entries: Sequence[dict[str, Any]], samples: int, kept: Path
) -> None:
    """The table of docs/mismatch.md on chat prompts, without what this learner cannot have."""
    config, rows = hf.load_config(model), prompt_ids(model)
    longest = max(map(len, rows)) + RESPONSE
    kept.parent.mkdir(parents=True, exist_ok=True)
    file = kept.with_name(f"calibration_{dtype}.json")
    numerics = measured(config, dtype, batch=len(rows) * samples, longest=longest, file=file)
    sampling = Sampling(RESPONSE, stop_tokens=config.eos_token_ids)
    execution = Execution(config, numerics, sampling)
    params = jax.tree.map(jnp.asarray, hf.load_params(model, config, dtype=dtype))
    weights = jax.jit(execution.prepare)(params)
    made = {row["case"]: row for row in read_rows(kept)}
    left = [arm for arm in cases(entries) if arm.name not in made and fits(arm, execution)]
    about = f"Learner: {describe(numerics)}; temperature 1; {machine()}."
    for result in ablation.ablate(
        weights, padded(rows), left, execution=execution, samples=samples
    ):
        (row,) = ablation.to_record([result], model="SmolLM2", about={})["cases"]
        keep(kept, row)
        made[result.case] = row
        print(result.case, result.metrics["log_ratio_abs_mean"], flush=True)
        order = {arm.name: number for number, arm in enumerate(cases(SOURCES))}
        record = {"cases": sorted(made.values(), key=lambda one: order[one["case"]])}
        table = ablation.to_markdown(record, whole=False)
        write(f"sources {dtype}", f"{about}\n\n{table.rstrip()}")


def fits(arm: ablation.Arm, execution: Execution) -> bool:
    """Whether a sampler of this learner can differ so."""
    try:
        mismatch.check(arm.mismatch, execution)
    except InputError as error:
        print(f"left out: {error}", flush=True)
        return False
    return True


# Of the standard cases those that compare many tokens for their time on a CPU.
AUDITED = (
    "learner, whole batch",
    "learner, rows in reverse",
    "learner, one row at a time",
    "sampler, batches of one sequence",
    "top-k, top-p, T 0.7: learner",
    "learner, longer padding",
    "forward without cache or gradient",
    "sampler, other order, padding and group",
)
ENGINES = tuple(
    (dtype, attention)
    for dtype in ("float32", "bfloat16", "float16")
    for attention in ("eager", "sdpa")
)


def drawn(
    model: Path, dtype: str, attention: str, *, samples: int = SAMPLES, **sampling: float
) -> list[Row]:
    """What transformers' generate draws after the questions."""
    import torch
    from transformers import AutoModelForCausalLM

    engine = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    torch.manual_seed(0)
    sampling = {"temperature": 1.0, "top_p": 1.0, **sampling}
    how = {"stops": [engine.generation_config.eos_token_id], "max_new_tokens": RESPONSE}
    rows = generated(engine, prompt_ids(model), samples=samples, **how, **sampling)
    return [row | sampling for row in rows]


def rollouts(model: Path, folder: Path, dtype: str, attention: str, **how: float) -> list[Row]:
    """`drawn`, made once and then read from `folder`."""
    name = "_".join([dtype, attention, *(f"{key}_{value}" for key, value in how.items())])
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        rows = drawn(model, dtype, attention, **how)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_rows(path)


def engines(model: Path, folder: Path, every: int) -> Iterator[tuple[str, list[Row]]]:
    """Name -> every n-th rollout of transformers."""
    for dtype, attention in ENGINES:
        yield f"{dtype}, {attention}", rollouts(model, folder, dtype, attention)[::every]


def faults(
    model: Path, folder: Path, every: int, *, trained: bool
) -> Iterator[tuple[str, list[Row]]]:
    """Name of a mistake -> rollouts of transformers in bfloat16, with sdpa, that have it."""
    whole = rollouts(model, folder, "bfloat16", "sdpa")
    rows, end = whole[::every], hf.load_config(model).eos_token_ids[0]
    ended = [row for row in whole if row["response_token_ids"][-1] == end]
    yield from reported(rows).items()
    yield from of_context(rows).items()
    yield "end token stripped, where there was one", [without(row, slice(-1)) for row in ended]
    cold = rollouts(model, folder, "bfloat16", "sdpa", samples=1, temperature=0.6)
    yield "temperature 0.6, not declared", [row | {"temperature": 1.0} for row in cold]
    yield "log-probs of temperature 1 under 0.6", [row | {"logprobs": row["raw"]} for row in cold]
    cut = rollouts(model, folder, "bfloat16", "sdpa", samples=1, top_p=0.8)
    yield "top-p 0.8, not declared", [row | {"top_p": 1.0} for row in cut]
    yield "log-probs over all under top-p 0.8", [row | {"logprobs": row["raw"]} for row in cut]
    alone = [row | {"logprobs": row["raw"], "top_p": 1.0} for row in cut]
    yield "top-p 0.8 in the draws alone", alone
    if trained:
        yield STALE, rows


def reported(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Mistakes in log-probs alone."""
    rng = np.random.default_rng(0)

    def in_a_tenth(change: Callable[[float], float]) -> list[Row]:
        def maybe(log_prob: float) -> float:
            return change(log_prob) if rng.random() < 0.1 else log_prob

        return [row | {"logprobs": [maybe(x) for x in row["logprobs"]]} for row in rows]

    others = [*rows[1:], rows[0]]
    pairs = list(zip(rows, others, strict=True))
    sizes = [(len(one["logprobs"]), len(other["logprobs"])) for one, other in pairs]
    alike = [i for i, (own, its) in enumerate(sizes) if own == its][:2]
    return {
        "shifted by one": [shifted(row) for row in rows],
        "sentinel -9999 in 10% of the tokens": in_a_tenth(lambda _: -9999.0),
        "0 in 10% of the tokens": in_a_tenth(lambda _: 0.0),
        "3 to 9 nats off in 10% of the tokens": in_a_tenth(lambda x: x - rng.uniform(3, 9)),
        "another row's log-probs, in 2 rows": [
            row | {"logprobs": other["logprobs"]} if i in alike else row
            for i, (row, other) in enumerate(pairs)
        ],
    }


def of_context(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Mistakes in what stands before the log-probs."""

    def longer(ids: list[int]) -> list[int]:
        return [*ids, LINE_BREAK]

    return {
        "first token stripped": [without(row, slice(1, None)) for row in rows],
        "prompt without its first token, the BOS": [with_prompt(r, lambda x: x[1:]) for r in rows],
        "a line break more in the prompt": [with_prompt(row, longer) for row in rows],
    }


def diagnosed(
    part: str,
    model: Path,
    each: Iterator[tuple[str, list[Row]]],
    every: int,
    kept: Path,
    trained: Path | None,
) -> None:
    """A table of what `tim-jax diagnose` says of every n-th row."""
    ours = tim.load(str(model))
    some = f", of every {every}th row" if every > 1 else ""
    lines = [
        f"By `tim_jax.diagnose`, float32{some}; {machine(transformers=version('transformers'))}.",
        "",
        f"| {HEADINGS[part]} | tokens | mean \\|d\\| | max \\|d\\| | K3 | called | named first |",
        "|---|--:|--:|--:|--:|---|---|",
    ]
    made = {(row["name"], row["every"]): row["line"] for row in read_rows(kept)}
    for name, rows in each:
        if (name, every) not in made:
            stale = trained if name == STALE else None
            found = tim.diagnose(ours, rows) if stale is None else of_stale(ours, rows, stale)
            line = judged(name, found, rows)
            keep(kept, {"name": name, "every": every, "line": line})
            made[name, every] = line
        lines.append(made[name, every])
        print(lines[-1], flush=True)
        write(part, "\n".join(lines))


def of_stale(ours: tim.Model, rows: Sequence[Row], run: Path) -> Diagnosis:
    """Rows that are said to be of the weights after a run, and are of those before it."""
    params = folders.read_params(run, ours.params, config=ours.config).state["params"]
    after = replace(ours, params=jax.tree.map(jnp.asarray, params))
    return tim.diagnose(after, rows, weights={"before the run": ours})


def judged(name: str, found: Diagnosis, rows: Sequence[Row]) -> str:
    """A line of the table."""
    sizes, best, half = found.verdict.sizes, found.verdict.best, found.verdict.half
    named = "none" if half is None else f"none; as large as `{half.explanation.name}`"
    named = named if best is None else f"`{best.explanation.name}`"
    count = sum(len(row["response_token_ids"]) for row in rows)
    return (
        f"| {name} | {count:,} | {sizes['mean']:.2g} | {sizes['largest']:.2g} |"
        f" {sizes['k3']:.2g} | {found.verdict.state} | {named} |"
    )


def ties(model: Path, run: Path) -> str:
    """What half precision makes of a run's step from these weights: how far its weights go, and its
    log-probs of the right answers to the first problems."""
    config = hf.load_config(model)
    before = hf.load_params(model, config)
    after = folders.read_params(run, before, config=config).state["params"]
    tokenizer = load_tokenizer(model, vocab_size=config.vocab_size)

    def row(problem: Example) -> Line:
        texts = {"prompt": problem.prompt, "response": f"{problem.answer}\n"}
        ids = {
            f"{name}_token_ids": encode_text(tokenizer, str(text), where=name)
            for name, text in texts.items()
        }
        return Line(ids | {"logprobs": [0.0] * len(ids["response_token_ids"])}, "")

    asked = [row(one) for one in addition().train[:PROBLEMS]]
    given = collect(asked, limits=Limits.of(config)).responses
    execution = Execution(config, EXACT_F32)
    prepare = jax.jit(execution.prepare)
    gaps: dict[str, list[float]] = {name: [] for name in HALF}
    for params in (before, after):
        weights = prepare(jax.tree.map(jnp.asarray, params))
        plain = Forward(weights, execution, config.vocab_size, ())
        exact = log_probs(plain, given)
        for variant in of_numerics(plain, [mismatch.compute(dtype=name) for name in HALF]):
            made = log_probs(variant.forward, given)
            gaps[variant.name.partition("(")[2][:-1]].append(float(np.abs(made - exact).mean()))
    lines = [
        f"{machine()}.",
        "",
        "| | weights half way between two numbers | rounded weights move, in steps |"
        " mean \\|d\\| before the step | after |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, (old, new) in gaps.items():
        share, move = rounded_step(before["layers"], after["layers"], name)
        lines.append(f"| {name} | {share:.1%} | {move:.1f} | {old:.3f} | {new:.3f} |")
    return "\n".join(lines)


def rounded_step(before: Any, after: Any, dtype: str) -> tuple[float, float]:
    """The share of ties among matrices, and how far rounded weights go for a step of 1."""
    count = tied = 0
    moved = whole = 0.0
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        for one, other in zip(np.asarray(before[name]), np.asarray(after[name]), strict=True):
            low, high = (x.astype(dtype).astype(np.float32) for x in (one, other))
            beyond = 2 * one - low  # as far from the weight as `low`, on the other side
            tied += int(((beyond != low) & (beyond.astype(dtype) == beyond)).sum())
            count += one.size
            step = other - one
            moved += float((np.sign(step) * (high - low)).sum(dtype=np.float64))
            whole += float(np.abs(step).sum(dtype=np.float64))
    return tied / count, moved / whole


def runs(paths: Sequence[Path]) -> str:
    """Held-out accuracy before and after, with 95% intervals, and what the steps earned.

    The gain's interval takes the two evaluations as independent, which makes it too wide rather
    than too narrow: their problems are the same.
    """
    lines = [
        f"{machine()}.",
        "",
        "| seed | steps | held-out accuracy before | after | gain | tokens compared | unequal |"
        " a step, median |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    curves, gains = [], []
    for folder in paths:
        seed = int(toml.load(folder / "config.toml").seed)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        held = [(row[HELD], int(row["eval/prompts"])) for row in rows if HELD in row]
        steps = [row for row in rows if "reward" in row]
        seconds = [json.loads(line).get("seconds") for line in (folder / "timing.jsonl").open()]
        taken = np.median([value for value in seconds if value])
        tokens = int(sum(row["compared_tokens"] for row in steps))
        unequal = int(sum(row["unequal_tokens"] for row in steps))
        (before, count), (after, _) = held[0], held[-1]
        gain = "not there yet"
        if len(held) > 1:
            gains.append(after - before)
            error = np.sqrt((before * (1 - before) + after * (1 - after)) / count)
            gain = f"{after - before:+.3f} ± {1.96 * error:.3f}"
        lines.append(
            f"| {seed} | {len(steps)} | {before:.3f} ± {half(before, count):.3f} |"
            f" {f'{after:.3f} ± {half(after, count):.3f}' if len(held) > 1 else ''} | {gain} |"
            f" {tokens:,} | {unequal} | {taken:.0f} s |"
        )
        rewards = np.asarray([row["reward"] for row in steps])
        tenths = [rewards[i : i + 10].mean() for i in range(0, len(rewards), 10)]
        curves.append(f"| {seed} | {' | '.join(f'{value:.3f}' for value in tenths)} |")
    if len(gains) > 1:
        spread = stats.t.ppf(0.975, len(gains) - 1) * np.std(gains, ddof=1) / np.sqrt(len(gains))
        lines += ["", f"Mean gain over {len(gains)} seeds: {np.mean(gains):+.3f} ± {spread:.3f}"]
        lines[-1] += " (95%, Student's t between the seeds)."
    widest = max(curve.count("|") - 2 for curve in curves)
    head = " | ".join(f"{10 * i + 1} to {10 * i + 10}" for i in range(widest))
    lines += ["", "Mean reward of the training samples, by steps:", "", f"| seed | {head} |"]
    return "\n".join([*lines, f"|--:|{'--:|' * widest}", *curves])


def half(share: float, count: int) -> float:
    """Half of the 95% interval of a share of this many, by the normal approximation."""
    return 1.96 * float(np.sqrt(share * (1 - share) / count))


PARTS = ("logits", "audit", "sources", "engines", "faults", "runs", "ties")
HEADINGS = {"engines": "transformers' generate", "faults": "mistake"}


def write(part: str, text: str) -> None:
    """Puts a part of the page between its markers."""
    page = between_marks(PAGE.read_text(encoding="utf-8"), text, part)
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("paths", nargs="*", type=Path, help="runs, or the folder of rows")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chat", action="store_true", help="chat prompts in the audit")
    parser.add_argument("--only", nargs="+", help="names of the entries of `sources`")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of `sources`, per question")
    parser.add_argument("--every", type=int, default=1, help="diagnose every n-th row")
    parser.add_argument("--trained", type=Path, help="a run, for a mistake with its weights")
    given = parser.parse_args()
    if given.chat and given.part != "audit":
        parser.error("--chat goes with audit alone")
    folder = next(iter(given.paths), Path("runs/smollm2_table"))
    entries = [one for one in SOURCES if not given.only or one["name"] in given.only]
    if given.part in HEADINGS:
        if given.part == "engines":
            each = engines(given.model, folder, given.every)
        else:
            each = faults(given.model, folder, given.every, trained=given.trained is not None)
        kept = folder / "verdicts.jsonl"
        diagnosed(given.part, given.model, each, given.every, kept, given.trained)
    elif given.part == "sources":
        kept = folder / f"sources_{given.dtype}_{given.samples}.jsonl"
        sources(given.model, given.dtype, entries, given.samples, kept)
    else:
        text = {
            "logits": lambda: logits(given.model),
            "audit": lambda: audited(given.model, given.chat),
            "runs": lambda: runs(given.paths),
            "ties": lambda: ties(given.model, folder),
        }[given.part]()
        print(text)
        write(f"{given.part} chat" if given.chat else given.part, text)


if __name__ == "__main__":
    main()
