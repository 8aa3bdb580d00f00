"""Mixtures of experts beside a dense model of their active size; writes docs/results/experts.md.

    JAX_PLATFORMS=cpu python scripts/bench_experts.py        # on an idle machine

All sides, a mixture, one with latent attention, and the dense model, exact and native, are in one
process and timed in turns.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import bench_common as common
import jax
from bench_exactness_cost import Times, exact_and_native, model_config, timed, tokens_of

from tim_jax.model.config import LatentConfig, ModelConfig

PAGE = common.RESULTS / "experts.md"
EXPERTS, CHOSEN = 16, 2
MODELS = ("mixture", "latent", "dense")
GOALS = {"sampler": 0.6, "learner": 0.5}  # mixture over dense, tokens per second
EXACT_GOAL = 1.10  # exact over native, time of the mixture


class Row(NamedTuple):
    """Times of one dtype."""

    dtype: str
    times: Times
    tokens: Mapping[str, int]  # program -> tokens per call


def mixture_of(config: ModelConfig) -> ModelConfig:
    """Experts of which as many as a token goes through are as wide as the dense SwiGLU."""
    return replace(
        config,
        model_type="qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=config.intermediate_size // CHOSEN,
        norm_topk_prob=True,
    )


def latent_of(mixture: ModelConfig) -> ModelConfig:
    """The mixture with latent attention; a token's second expert is shared."""
    half = mixture.head_dim // 2
    return replace(
        mixture,
        model_type="deepseek_v3",
        qk_norm=False,
        num_kv_heads=mixture.num_heads,
        head_dim=half,
        num_shared_experts=1,
        num_experts_per_tok=CHOSEN - 1,
        latent=LatentConfig(
            kv_lora_rank=mixture.hidden_size // 2,
            qk_nope_head_dim=half,
            qk_rope_head_dim=half,
            v_head_dim=mixture.head_dim,
        ),
    )


def measure(sizes: common.Sizes, batch: int, dtype: str, repeats: int) -> Row:
    """Times one dtype; raises if an exact side is not exact."""
    dense = model_config(sizes)
    mixture = mixture_of(dense)
    sides = {}
    for model, config in zip(MODELS, (mixture, latent_of(mixture), dense), strict=True):
        own, _ = exact_and_native(config, sizes, batch, dtype)
        sides |= {f"{model}, {name}": side for name, side in own.items()}
    return Row(dtype, timed(sides, repeats), tokens_of(sizes, batch))


def speeds(rows: list[Row]) -> list[str]:
    lines = [
        "| program | dtype | numerics | mixture tok/s | with latent attention | dense tok/s |"
        " mixture / dense | goal |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for program, goal in GOALS.items():
        for row in rows:
            for name in ("exact", "native"):
                times = [row.times[program][f"{model}, {name}"] for model in MODELS]
                median, _ = common.ratios(times[-1], times[0])
                each = [f"{row.tokens[program] / statistics.median(t):,.0f}" for t in times]
                lines.append(
                    f"| {program} | {row.dtype} | {name} | {' | '.join(each)}"
                    f" | {median:.2f} | >= {goal} |"
                )
    return lines


def costs(rows: list[Row]) -> list[str]:
    lines = [
        "| program | dtype | mixture: time exact / native | with latent attention | goal |"
        " dense: time exact / native |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for program in GOALS:
        for row in rows:
            of = row.times[program]
            medians = [
                common.ratios(of[f"{model}, exact"], of[f"{model}, native"])[0] for model in MODELS
            ]
            lines.append(
                f"| {program} | {row.dtype} | {medians[0]:.3f} | {medians[1]:.3f}"
                f" | <= {EXACT_GOAL:.2f} | {medians[2]:.3f} |"
            )
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser("Measures a mixture beside a dense model.", PAGE).parse_args()
    load = common.load_average()
    sizes, batch = (common.SMOKE, 8) if options.smoke else (common.SMALL, 32)
    rows = []
    for dtype in common.DTYPES:
        rows.append(measure(sizes, batch, dtype, options.repeats))
        print("\n".join([*speeds(rows[-1:]), "", *costs(rows[-1:])]), flush=True)
        jax.clear_caches()
    width = sizes.intermediate // CHOSEN
    compared = len(MODELS) * sum(row.tokens["sampler"] for row in rows)
    lines = [
        "# Mixtures of experts beside a dense model",
        "",
        f"Written by `python scripts/bench_experts.py`. The mixture has {EXPERTS} experts of width"
        f" {width} in every layer, {CHOSEN} a token; the dense model has one SwiGLU as wide as"
        f" these {CHOSEN} together. The one with latent attention has one chosen and one shared"
        " expert for each token, and a compressed state of half the hidden size. Exact (tiles,"
        " calibrated for the batch) and native numerics; all six in one process, calls in turns,"
        f" {options.repeats} of each. Speeds are medians,"
        " a ratio is the median of the ratios of neighbours. Tokens per second are as of this"
        " machine: new tokens for the sampler, all tokens of the sequences for the learner, which"
        f" is value and gradient of a GRPO loss. Batch {batch}.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        *speeds(rows),
        "",
        *costs(rows),
        "",
        f"Of the {compared:,} tokens of the exact sides, 0 had unequal log-probs in sampler and"
        " learner.",
    ]
    common.publish(lines, options, PAGE)


if __name__ == "__main__":
    main()
