"""What exactness costs: exact over native numerics, and writes docs/results/exactness_cost.md.

    JAX_PLATFORMS=cpu python scripts/bench_exactness_cost.py        # on an idle machine

Both sides are the same functions with another `Numerics`, in one process, timed in turns.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import bench_common as common
import jax
import jax.numpy as jnp

from tim_jax.app.run.assembly import fixed_numerics
from tim_jax.common.types import Prompts, Rollout
from tim_jax.instruments.auditing.cases import random_params
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.objectives import Objective
from tim_jax.policy import scoring
from tim_jax.rl import programs
from tim_jax.rl.types import Exactness, exactness

PAGE = common.RESULTS / "exactness_cost.md"
GOALS = {"sampler": 1.10, "learner": 1.00}
_SEED = 0


Times = Mapping[str, Mapping[str, tuple[float, ...]]]  # program -> side -> seconds


class Side(NamedTuple):
    """One numerics' timed calls."""

    sample: Callable[[], float]
    gradient: Callable[[], float]


class Row(NamedTuple):
    """Times of one batch size and dtype."""

    batch: int
    dtype: str
    times: Times
    tokens: Mapping[str, int]  # program -> tokens per call
    unequal_native: int


def model_config(sizes: common.Sizes) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        max_positions=sizes.prompt + sizes.response,
        qk_norm=True,
        tied_embeddings=True,
    )


def make_prompts(config: ModelConfig, sizes: common.Sizes, batch: int) -> Prompts:
    shape = batch, sizes.prompt
    return Prompts(
        tokens=jax.random.randint(jax.random.key(_SEED), shape, 0, config.vocab_size),
        lengths=jnp.full((batch,), sizes.prompt, jnp.int32),
        ids=jnp.arange(batch, dtype=jnp.int32),
    )


def loss(weights: Any, rollout: Rollout, advantages: jax.Array, execution: Execution):
    """The GRPO loss in bypass mode, and the exactness of its log-probs."""
    objective = Objective()
    log_probs = scoring.score(weights, rollout, execution=execution).log_probs
    mask = rollout.mask
    losses = objective.token_losses(log_probs, rollout.log_probs, advantages, mask=mask).loss
    total = jnp.sum(objective.token_weights(mask) * losses)
    return total, exactness(log_probs, rollout)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def make_side(execution: Execution, params: Any, prompts: Prompts) -> tuple[Side, Exactness]:
    """Compiled programs with their data, warm, and how exact they were."""
    weights = jax.jit(execution.prepare)(params)
    sample = partial(
        programs.sampling_program(execution, samples=1), weights, prompts, jax.random.key(_SEED)
    )
    rollout = sample()
    advantages = jnp.where(jnp.arange(prompts.ids.size) % 2 == 0, 1.0, -1.0)
    gradient_of = jax.value_and_grad(partial(loss, execution=execution), has_aux=True)
    program = jit(gradient_of, execution.numerics)
    gradient = partial(program, weights, rollout, advantages)
    (_, found), _ = jax.block_until_ready(gradient())
    return Side(partial(seconds, sample), partial(seconds, gradient)), jax.device_get(found)


def calibrated(config: ModelConfig, dtype: str, sizes: common.Sizes, *, batch: int) -> Numerics:
    """The numerics of a run of such sizes, with what this machine was measured to keep."""
    longest = sizes.prompt + max(sizes.response, sizes.longest)
    fixed = fixed_numerics("tiles", dtype, length=longest)
    return fitting.calibrate(config, fixed, batch=batch, longest=longest)


def exact_and_native(
    config: ModelConfig, sizes: common.Sizes, batch: int, dtype: str
) -> tuple[dict[str, Side], int]:
    """The sides "exact" and "native", and the tokens that are unequal in native numerics.

    Raises if the exact side is not exact.
    """
    params = jax.tree.map(jnp.asarray, random_params(config, _SEED))
    prompts = make_prompts(config, sizes, batch)
    both = {
        "exact": calibrated(config, dtype, sizes, batch=batch),
        "native": fixed_numerics("native", dtype, length=config.max_positions),
    }
    sides, found = {}, {}
    for name, numerics in both.items():
        execution = Execution(config, numerics, Sampling(sizes.response))
        sides[name], found[name] = make_side(execution, params, prompts)
    compared, unequal = int(found["exact"].compared), int(found["exact"].unequal)
    if unequal or compared != batch * sizes.response:
        raise SystemExit(
            f"{config.model_type}, batch {batch}, {dtype}: {unequal} of {compared} tokens are"
            " unequal"
        )
    return sides, int(found["native"].unequal)


def timed(sides: Mapping[str, Side], repeats: int) -> Times:
    """Seconds of both programs of all sides, which take turns."""
    return {
        "sampler": common.interleaved({n: s.sample for n, s in sides.items()}, repeats),
        "learner": common.interleaved({n: s.gradient for n, s in sides.items()}, repeats),
    }


def tokens_of(sizes: common.Sizes, batch: int) -> dict[str, int]:
    """Tokens of a call of both programs."""
    return {
        "sampler": batch * sizes.response,
        "learner": batch * (sizes.prompt + sizes.response),
    }


def measure(sizes: common.Sizes, batch: int, dtype: str, repeats: int) -> Row:
    """Times one cell of the table; raises if the exact side is not exact."""
    sides, unequal = exact_and_native(model_config(sizes), sizes, batch, dtype)
    return Row(batch, dtype, timed(sides, repeats), tokens_of(sizes, batch), unequal)


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| program | batch | dtype | exact tok/s | native tok/s | time exact / native, median"
        " | of the best times | goal | unequal tokens: exact, native |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for program, goal in GOALS.items():
        for row in rows:
            exact, native = (row.times[program][side] for side in ("exact", "native"))
            median, best = common.ratios(exact, native)
            speeds = [f"{row.tokens[program] / statistics.median(t):,.0f}" for t in (exact, native)]
            lines.append(
                f"| {program} | {row.batch} | {row.dtype} | {speeds[0]} | {speeds[1]}"
                f" | {median:.3f} | {best:.3f} | <= {goal:.2f}"
                f" | 0, {row.unequal_native} of {row.tokens['sampler']:,} |"
            )
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser("Measures what exactness costs.", PAGE).parse_args()
    load = common.load_average()
    sizes = common.SMOKE if options.smoke else common.SMALL
    rows = []
    for batch, dtype in common.cases("smoke" if options.smoke else "small"):
        rows.append(measure(sizes, batch, dtype, options.repeats))
        print("\n".join(table(rows[-1:])), flush=True)
        jax.clear_caches()
    lines = [
        "# What exactness costs",
        "",
        "Written by `python scripts/bench_exactness_cost.py`. Exact (tiles, calibrated for the"
        " batch) over native numerics: same code, same process, calls in turns (A B B A),"
        f" {options.repeats} of each; the ratio is the median of the ratios of neighbours. Tokens"
        " per second are as of this machine: new tokens for the sampler, all tokens of the"
        " sequences for the learner, which is value and gradient of a GRPO loss.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        *table(rows),
    ]
    common.publish(lines, options, PAGE)


if __name__ == "__main__":
    main()
