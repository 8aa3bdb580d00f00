"""The learner at a few widths where lengths are skewed, and writes docs/results/widths.md.

    JAX_PLATFORMS=cpu python scripts/bench_widths.py           # on an idle machine
    python scripts/bench_widths.py --smoke

The rollouts are forced to their lengths, as in bench_slots.py. Updates are taken in turns.
"""

import dataclasses
import time
from functools import partial

import bench_common as common
import bench_exactness_cost as exactness_cost
import jax
import jax.numpy as jnp
import numpy as np
from bench_slots import forced

from tim_jax import objectives, optimizers
from tim_jax.instruments.auditing import random_params
from tim_jax.model.execution import Execution, Sampling
from tim_jax.policy import sampler, scoring
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

PAGE = common.RESULTS / "widths.md"
SIZES = dataclasses.replace(common.SMALL, layers=4, response=256)
SEQUENCES = 32
MICRO_BATCH = 4
COUNTS = (1, 2, 4, 8)
_SEED = 0


class Side:
    """A learner with this many widths."""

    def __init__(self, execution: Execution, params, rollout, widths: int):
        learning = Learning(objectives.rloo(), common.GROUP, micro_batch=MICRO_BATCH, widths=widths)
        self.rollout, self.params = rollout, params
        self.rewards = jnp.asarray(np.random.default_rng(0).random(SEQUENCES, np.float32))
        optimizer = optimizers.adamw(optimizers.Rate(1e-5))
        prompts = SEQUENCES // common.GROUP
        self.run = programs.build(
            Training(execution, learning, optimizer, prompts_per_step=prompts)
        )
        start = time.perf_counter()
        self.update()
        self.first = time.perf_counter() - start  # compiling, for the most part

    def update(self) -> float:
        """Seconds of an update; all log-probs must be the rollout's."""
        state = self.run.init(jax.tree.map(jnp.copy, self.params))
        weights = jax.block_until_ready(self.run.prepare(state.params))
        start = time.perf_counter()
        state, _, found, _ = loop.learn(
            state, weights, self.rollout, self.rewards, programs=self.run
        )
        jax.block_until_ready(state.params)
        assert int(found.unequal) == 0 < int(found.compared)
        return time.perf_counter() - start


def rollout_of(execution: Execution, params, sizes: common.Sizes):
    """A rollout of skewed lengths, with the log-probs of a forward over the padded rows.

    Those that the sampler records are not of the tokens that are forced.
    """
    lengths = common.skewed(SEQUENCES, sizes.response)
    draw = partial(forced, lengths=jnp.asarray(lengths), execution=execution)
    program = jax.jit(partial(sampler.sample, execution=execution, samples=1, draw=draw))
    prompts = exactness_cost.make_prompts(execution.config, sizes, SEQUENCES)
    weights = jax.jit(execution.prepare)(params)
    rollout = jax.device_get(program(weights, prompts, jax.random.key(_SEED)))
    assert (rollout.lengths == lengths).all()
    score = jax.jit(partial(scoring.score, execution=execution))
    log_probs = jax.device_get(score(weights, rollout).log_probs)
    return dataclasses.replace(rollout, log_probs=np.where(rollout.mask, log_probs, 0.0))


def measure(sizes: common.Sizes, dtype: str, repeats: int):
    """(seconds by number of widths, seconds of the first updates, response tokens)."""
    config = exactness_cost.model_config(sizes)
    params = jax.tree.map(jnp.asarray, random_params(config, _SEED))
    numerics = exactness_cost.calibrated(config, dtype, sizes, batch=SEQUENCES)
    sampling = Sampling(sizes.response, stop_tokens=(config.vocab_size - 1,))
    execution = Execution(config, numerics, sampling)
    rollout = rollout_of(execution, params, sizes)
    sides = {count: Side(execution, params, rollout, count) for count in COUNTS}
    times = common.interleaved({str(n): side.update for n, side in sides.items()}, repeats)
    return times, {str(n): side.first for n, side in sides.items()}, int(rollout.lengths.sum())


def main() -> None:
    options = common.parser(__doc__.splitlines()[0], PAGE).parse_args()
    load = common.load_average()
    sizes = common.SMOKE if options.smoke else SIZES
    lines = [
        "# The learner at a few widths",
        "",
        f"Written by `python scripts/bench_widths.py --repeats {options.repeats}`. An update of"
        f" {SEQUENCES} sequences whose lengths are log-normal with a mean of a quarter of the"
        f" longest, {sizes.response}, in micro-batches of {MICRO_BATCH} (`learner.widths`). Updates"
        f" are taken in turns, {options.repeats} of each; the ratio is the median of the ratios of"
        " neighbours. Every response token's log-prob was compared with that of a forward over the"
        " padded rows, and none was unequal.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        "| dtype | response tokens | widths | an update, s | of that at one width | first update,"
        " with compiling, s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for dtype in common.DTYPES:
        times, first, tokens = measure(sizes, dtype, options.repeats)
        for count, seconds in times.items():
            ratio, _ = common.ratios(seconds, times["1"])
            middle = sorted(seconds)[len(seconds) // 2]
            lines.append(
                f"| {dtype} | {tokens:,} | {count} | {middle:.2f} | {ratio:.2f}"
                f" | {first[count]:.0f} |"
            )
    common.publish(lines, options, PAGE)


if __name__ == "__main__":
    main()
