"""Measures every entry of the dial on a small trained model and writes docs/mismatch.md's table.

    python scripts/mismatch_table.py                        # trains the model first; minutes
    python scripts/mismatch_table.py --run runs/mismatch    # the model of an earlier call
    python scripts/mismatch_table.py --dtypes               # float16 against bfloat16 alone
    python scripts/mismatch_table.py --draw                 # from docs/results/mismatch.json

Writes docs/results/mismatch.{md,json,png} and the part of docs/mismatch.md between its markers.
With --dtypes, of a smaller model, docs/results/mismatch_dtypes.json and the part that is its own.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_common import between_marks, cpu_model

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.jobs import audit, train
from tim_jax.app.run import charts
from tim_jax.instruments.auditing import ablation
from tim_jax.instruments.auditing.ablation import BASELINE, TOGETHER, Arm

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# The quickstart up to step 75; its checkpoint of step 50 has the stale weights.
CHANGES = ("steps=75", "eval.every=0", "run.folder=runs/mismatch")
# For --dtypes: `configs/small.toml` after its warm start and 5 steps, on sums of 4 to 8 digits.
SMALL_CHANGES = (
    "steps=5",
    "task.parameters.digits=[4, 8]",
    "sampling.max_prompt_length=16",
    "sampling.max_tokens=20",
    "run.folder=runs/dtypes",
)
MODEL = "the quickstart's model after 75 steps"
PLAIN: tuple[dict[str, Any], ...] = (
    {"name": "compute", "dtype": "bfloat16"},
    {"name": "compute", "dtype": "float16"},
    {"name": "lm_head", "dtype": "bfloat16"},
    {"name": "logits", "dtype": "bfloat16"},
    {"name": "softmax", "dtype": "bfloat16"},
    {"name": "attention_softmax", "dtype": "bfloat16"},
    {"name": "kv_cache", "dtype": "bfloat16"},
    {"name": "kv_cache", "dtype": "float8_e4m3fn"},
    {"name": "kv_cache", "dtype": "float8_e5m2"},
    {"name": "kv_cache", "dtype": "int8"},
    {"name": "quantised_weights", "dtype": "int8"},
    {"name": "quantised_weights", "dtype": "float8_e4m3fn"},
    {"name": "quantised_weights", "dtype": "int4", "group": 32},
    {"name": "quantised_weights", "dtype": "int4"},
    {"name": "stale_weights", "updates": 25},
    {"name": "native_kernels"},
    {"name": "tile_sizes", "rows": 4, "attention_rows": 4, "kv_block": 8},
    {"name": "sum_order", "lanes": 8},
    {"name": "split_k", "pieces": 4},
    {"name": "split_kv", "programs": 1024},  # two pieces at 512 (sequence, head) pairs
    {"name": "tensor_parallel", "ranks": 2},
    {"name": "pallas_attention", "interpret": True},
    {"name": "logit_noise", "std": 0.01},
    {"name": "log_prob_noise", "std": 0.01, "by": "probability"},
    {"name": "log_prob_noise", "std": 0.01, "distribution": "student"},
)
# What a real engine might do at one time.
ENGINE: tuple[dict[str, Any], ...] = (
    {"name": "compute", "dtype": "bfloat16"},
    {"name": "logits", "dtype": "bfloat16"},
    {"name": "kv_cache", "dtype": "float8_e4m3fn"},
    {"name": "quantised_weights", "dtype": "float8_e4m3fn"},
    {"name": "native_kernels"},
    {"name": "split_kv", "programs": 1024},
)
# Mistakes that show only under a temperature and a truncation, or at an end token.
SEMANTIC: tuple[dict[str, Any], ...] = (
    {"name": "raw_log_probs"},
    {"name": "ignored_truncation"},
    {"name": "dropped_end"},
    {"name": "dropped_end", "replacement": 0},
    {"name": "pad_mask", "pad": 0},
)


# Other kernels than the learner's, in its dtype: plain XLA, two ranks, a cut contraction.
KERNELS: tuple[dict[str, Any], ...] = (
    {"name": "native_kernels"},
    {"name": "tensor_parallel", "ranks": 2},
    {"name": "split_k", "pieces": 4},
)
ONE_SIDE = tuple({"name": "compute", "dtype": dtype} for dtype in ("bfloat16", "float16"))


SHORT = """\
**In short.** The learner computes in float32, and the sampler differs from it in one thing. The two
log-probs of a token then differ in the mean by 1e-7 nats if sums are taken in another order, by
2e-4 to 2e-3 in bfloat16, by 0.01 to 0.03 with a KV cache of 8-bit floats, by 0.03 with 4-bit
weights, and by 0.2 with weights that are 25 updates old. If nothing differs, all figures are
exactly 0.

In the tables d is the log-prob of the learner minus the one that was recorded, r is `exp(d)`, and p
is a probability. Below the first table of each temperature the others are folded.
"""


def cases(tables: Sequence[dict[str, Any]]) -> list[Arm]:
    dials = [mismatch.build([table]) for table in tables]
    alone = [Arm(mismatch.label(dial.entries[0]), dial) for dial in dials]
    return [Arm(BASELINE, mismatch.EXACT), *alone]


def measure(folder: str, prompts: int, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records at temperature 1, and at temperature 0.6 with top_p 0.8."""
    bench = audit.make_bench(folder, prompts=prompts, samples=samples)
    # Of up to 24 tokens, so that a sequence has one block of keys: half the compiling.
    sampling = replace(bench.execution.sampling, max_tokens=24)
    bench = replace(bench, name=MODEL, execution=replace(bench.execution, sampling=sampling))
    together = Arm(f"{TOGETHER}, as an engine", mismatch.build(ENGINE))
    plain = audit.report(bench, [*cases(PLAIN), together]).record
    sampling = replace(sampling, temperature=0.6, top_p=0.8)
    stop = sampling.stop_tokens[0]
    tables = [*SEMANTIC[:-1], {"name": "pad_mask", "pad": stop}]
    execution = replace(bench.execution, sampling=sampling)
    return plain, audit.report(replace(bench, execution=execution), cases(tables)).record


def folded(table: str) -> str:
    """The table of an ablation with everything below its first part folded."""
    first, *rest = re.split(r"\n(?=Mean \|d\||Every metric)", table)
    parts = (part.partition("\n\n") for part in rest)

    def plain(title: str) -> str:
        return re.sub(r"[\\`]", "", title).rstrip(":")

    lines = [
        f'\n<details markdown="1"><summary>{plain(title)}</summary>\n\n{body.rstrip()}'
        "\n\n</details>"
        for title, _, body in parts
    ]
    return "\n".join([first.rstrip(), *lines, ""])


def table(title: str, record: dict[str, Any]) -> list[str]:
    """The main table of a record, folded."""
    body = ablation.to_markdown(record, whole=False).rstrip()
    return [f'<details markdown="1"><summary>{title}</summary>', "", body, "", "</details>"]


def write(plain: dict[str, Any], semantic: dict[str, Any]) -> None:
    results = DOCS / "results"
    charts.source_chart(
        plain,
        results / "mismatch.png",
        title=f"Mismatch by source: {MODEL}, float32 learner, temperature 1",
        command="python scripts/mismatch_table.py",
    )
    both = {"temperature_1": plain, "temperature_0.6_top_p_0.8": semantic}
    (results / "mismatch.json").write_text(json.dumps(both, indent=1) + "\n")
    device = "a CPU" if plain["device"] == "cpu cpu" else plain["device"]
    where = f"jax {plain['jax']}, Python {plain['python']}, {device}"
    full = [
        "# Mismatch by source: all figures",
        "",
        f"Made by `python scripts/mismatch_table.py`: {where}. Learner: {plain['learner']}. What"
        " the entries are, and what is normal elsewhere: [mismatch](../mismatch.md).",
        "",
        SHORT,
        "## Temperature 1",
        "",
        folded(ablation.to_markdown(plain)),
        "## Temperature 0.6, top_p 0.8",
        "",
        folded(ablation.to_markdown(semantic)),
    ]
    (results / "mismatch.md").write_text("\n".join(full))
    middle = [
        f"Made by `python scripts/mismatch_table.py` with {where}. All metrics and profiles:"
        " [results](results/mismatch.md).",
        "",
        "![mismatch by source](results/mismatch.png)",
        "",
        *table("The table, at temperature 1", plain),
        "",
        *table("Mistakes that show at temperature 0.6 and top_p 0.8", semantic),
        "",
        f"Learner: {plain['learner']}.",
    ]
    write_between("measured", middle)


def write_between(mark: str, lines: Sequence[str]) -> None:
    """Puts the lines between a mark's two ends in docs/mismatch.md."""
    page = DOCS / "mismatch.md"
    page.write_text(between_marks(page.read_text(), "\n".join(lines), mark))


def measure_dtypes(folder: str, prompts: int, samples: int) -> dict[str, dict[str, Any]]:
    """Learner's dtype -> its record: with other kernels, and of float32 with another dtype."""
    records = {}
    for dtype in ("float32", "bfloat16", "float16"):
        bench = audit.make_bench(folder, prompts=prompts, samples=samples, dtype=dtype)
        tables = (*ONE_SIDE, *KERNELS) if dtype == "float32" else KERNELS
        records[dtype] = audit.report(bench, cases(tables)).record
    return records


def write_dtypes(records: dict[str, dict[str, Any]]) -> None:
    """The records as JSON, and a table of them in docs/mismatch.md."""
    (DOCS / "results" / "mismatch_dtypes.json").write_text(json.dumps(records, indent=1) + "\n")
    first = records["float32"]
    where = f"jax {first['jax']}, Python {first['python']}, {first['device']}: {cpu_model()}"
    lines = [
        f"Made by `python scripts/mismatch_table.py --dtypes` with {where}.",
        "",
        "| learner | sampler | tokens | unequal | mean \\|d\\| | max \\|d\\| | k3 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for dtype, record in records.items():
        for case in record["cases"]:
            values = case["metrics"]
            sizes = (values[k] for k in ("log_ratio_abs_mean", "log_ratio_abs_max", "kl_k3"))
            counts = (f"{int(values[k]):,}" for k in ("tokens", "unequal_tokens"))
            name = case["case"] if case["case"] == BASELINE else f"`{case['case']}`"
            cells = [dtype, name, *counts, *(f"{x:.2e}" if x else "0" for x in sizes)]
            lines.append(f"| {' | '.join(cells)} |")
    write_between("dtypes", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", action="store_true", help="float16 and bfloat16 alone")
    parser.add_argument("--draw", action="store_true", help="what was measured before, again")
    parser.add_argument("--run", help="a run folder to measure instead of training one")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    arguments = parser.parse_args()
    folder, sizes = arguments.run, (arguments.prompts, arguments.samples)
    if folder is None and not arguments.draw:
        small = ("configs/small.toml", SMALL_CHANGES)
        config, changes = small if arguments.dtypes else ("configs/quickstart.toml", CHANGES)
        folder = str(train.train_run(toml.load(ROOT / config, changes)))
    if arguments.draw:
        write(*json.loads((DOCS / "results" / "mismatch.json").read_text()).values())
    elif arguments.dtypes:
        write_dtypes(measure_dtypes(folder, *sizes))
    else:
        write(*measure(folder, *sizes))


if __name__ == "__main__":
    main()
