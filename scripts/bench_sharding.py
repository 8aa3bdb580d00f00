"""What sharding costs: a step on 8 virtual CPU devices over one on a single device.

    JAX_PLATFORMS=cpu python scripts/bench_sharding.py        # on an idle machine

Writes docs/results/sharding.md. The same global batch, model and numerics on both sides, one
process, steps taken in turns. Virtual devices share the machine's cores, so that the ratio shows
what is done more than once, gathered and waited for; it says nothing of a real network.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import bench_common as common
import jax
import jax.numpy as jnp
from bench_exactness_cost import make_prompts, model_config, seconds

from tim_jax import objectives, optimizers
from tim_jax.instruments.auditing.cases import random_params
from tim_jax.model import fitting
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import Numerics
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

PAGE = common.RESULTS / "sharding.md"
GOAL = 1.3
DEVICES = 8
BATCH = 64  # sequences
SIZES = replace(common.SMALL, layers=4, response=64)
PLACEMENTS = (
    Placement(data=8),
    Placement(fsdp=8),
    Placement(data=2, fsdp=4),
    Placement(fsdp=4, tensor=2),
    Placement(data=2, tensor=4),
    Placement(fsdp=8, decode="sharded"),
)
_SEED = 0


class Row(NamedTuple):
    """Times of one placement and dtype, and of a single device next to them."""

    placement: Placement
    dtype: str
    column_tiles: int
    times: dict[str, dict[str, tuple[float, ...]]]  # part of the step -> side -> seconds
    compared: int


def make_side(execution: Execution, params, prompts) -> tuple[dict[str, Callable[[], float]], int]:
    """Timed sampling and learning, compiled and warm; raises if they are not exact."""
    learning = Learning(objectives.rloo(), common.GROUP)
    optimizer = optimizers.adamw(optimizers.Rate(1e-5))
    count = prompts.ids.shape[0]
    run = programs.build(Training(execution, learning, optimizer, prompts_per_step=count))
    state = run.init(params)
    weights = run.prepare(state.params)
    key = jax.random.key(_SEED)
    published = run.publish(state.params, weights)
    rollout = jax.block_until_ready(run.sample(published, prompts, key))
    rewards = jnp.arange(rollout.lengths.size, dtype=jnp.float32)

    def learn() -> float:
        # The update takes its state's buffers, so it is given a new one, outside the clock.
        fresh = jax.block_until_ready(run.init(params))
        cast = jax.block_until_ready(run.prepare(fresh.params))
        start = time.perf_counter()
        jax.block_until_ready(loop.learn(fresh, cast, rollout, rewards, programs=run)[:2])
        return time.perf_counter() - start

    learn()
    _, _, found, _ = loop.learn(state, weights, rollout, rewards, programs=run)
    unequal, compared = int(found.unequal), int(found.compared)
    if unequal or compared != int(rollout.lengths.sum()):
        raise SystemExit(f"{execution.placement}: {unequal} of {compared} tokens are unequal")
    held = run.prepare(run.init(params).params)
    return {"sample": lambda: seconds(lambda: run.sample(held, prompts, key)), "learn": learn}, (
        compared
    )


def measure(sizes: common.Sizes, where: Placement, dtype: str, *, batch: int, repeats: int) -> Row:
    config = model_config(sizes)
    params = random_params(config, _SEED)
    prompts = make_prompts(config, sizes, batch // common.GROUP)
    fixed = Numerics(compute_dtype=dtype, column_tiles=where.tensor)
    numerics = fitting.calibrate(
        config, fixed, batch=batch // where.shards, longest=sizes.prompt + sizes.response
    )
    sides, compared = {}, 0
    for name, at in (("sharded", where), ("single", SINGLE)):
        execution = Execution(config, numerics, Sampling(sizes.response), at)
        sides[name], compared = make_side(execution, params, prompts)
    times = {
        part: common.interleaved({name: side[part] for name, side in sides.items()}, repeats)
        for part in ("sample", "learn")
    }
    return Row(where, dtype, where.tensor, times, compared)


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| placement | dtype | column tiles | step, one device, s | step, sharded, s | ratio"
        " | sampling | learning | goal | unequal tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        step = {
            side: [sum(pair) for pair in zip(*(row.times[p][side] for p in row.times), strict=True)]
            for side in ("sharded", "single")
        }
        ratio = common.ratios(step["sharded"], step["single"])[0]
        parts = [common.ratios(t["sharded"], t["single"])[0] for t in row.times.values()]
        single, sharded = (statistics.median(step[side]) for side in ("single", "sharded"))
        lines.append(
            f"| {row.placement} | {row.dtype} | {row.column_tiles} | {single:.3f} | {sharded:.3f}"
            f" | {ratio:.2f} | {parts[0]:.2f} | {parts[1]:.2f} | <= {GOAL}"
            f" | 0 of {row.compared:,} |"
        )
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser("Measures what sharding costs.", PAGE).parse_args()
    load = common.load_average()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sizes = common.SMOKE if options.smoke else SIZES
    dtypes = common.DTYPES[:1] if options.smoke else common.DTYPES
    rows = []
    for where in PLACEMENTS[3:4] if options.smoke else PLACEMENTS:
        if sizes.kv_heads % where.tensor:
            continue
        for dtype in dtypes:
            rows.append(measure(sizes, where, dtype, batch=BATCH, repeats=options.repeats))
            jax.clear_caches()
            # After every row: the last ones take long, as virtual devices meet at every token.
            common.publish(page(rows, sizes, options.repeats, load), options, PAGE)


def page(rows: list[Row], sizes: common.Sizes, repeats: int, load: float) -> list[str]:
    return [
        "# What sharding costs",
        "",
        f"Written by `python scripts/bench_sharding.py`. A step (sampling {BATCH} sequences and one"
        f" update on them) on {DEVICES} virtual CPU devices over the same step, of the same global"
        " batch and with the same numerics, on one device. One process, calls in turns (A B B A),"
        f" {repeats} of each; ratios are medians of the ratios of neighbours.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        *table(rows),
    ]


if __name__ == "__main__":
    main()
