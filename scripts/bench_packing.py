"""The learner without padding where lengths are skewed, and writes docs/results/packing.md.

    JAX_PLATFORMS=cpu python scripts/bench_packing.py           # on an idle machine
    python scripts/bench_packing.py --smoke

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
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.policy import sampler, scoring
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning, fill, whole_lengths

PAGE = common.RESULTS / "packing.md"
# Sequences begin at multiples of a block, which costs long ones a smaller share than short ones.
SHAPES = (
    dataclasses.replace(common.SMALL, layers=4, response=256),
    dataclasses.replace(
        common.SMALL, layers=4, hidden=512, intermediate=1536, head_dim=64, response=1024
    ),
)
SEQUENCES = 64
MICRO_BATCH = 4
_SEED = 0


def micro_batch_tokens(sizes: common.Sizes, rows: int = MICRO_BATCH) -> int:
    """As many as this many padded rows have."""
    return rows * (sizes.prompt + sizes.response)


class Side:
    """A learner of a rollout in micro-batches, of rows or of tokens."""

    def __init__(self, execution: Execution, params, rollout, **sizes: int):
        learning = Learning(objectives.rloo(), common.GROUP, **sizes)
        self.rollout, self.params = rollout, params
        self.filled = filled(rollout, learning)
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


def filled(rollout, learning: Learning) -> float:
    """The share of what an update computes that are tokens of prompts and responses."""
    wholes = whole_lengths(rollout)
    tokens = learning.micro_batch_tokens
    if tokens is None:
        computed = len(wholes) * (rollout.prompts.shape[1] + rollout.responses.shape[1])
    else:
        parts = fill(wholes, tokens=tokens, rows=len(wholes))
        computed = (int(parts.max()) + 1) * tokens
    return float(wholes.sum()) / computed


def rollout_of(execution: Execution, params, sizes: common.Sizes, lengths: np.ndarray):
    """A rollout of these lengths, with the log-probs of a forward over the padded rows.

    Those that the sampler records are not of the tokens that are forced.
    """
    draw = partial(forced, lengths=jnp.asarray(lengths), execution=execution)
    draw_all = partial(sampler.sample, execution=execution, samples=1, draw=draw)
    program = jit(draw_all, execution.numerics)
    prompts = exactness_cost.make_prompts(execution.config, sizes, SEQUENCES)
    weights = jax.jit(execution.prepare)(params)
    rollout = jax.device_get(program(weights, prompts, jax.random.key(_SEED)))
    assert (rollout.lengths == lengths).all()
    score = jit(partial(scoring.score, execution=execution), execution.numerics)
    log_probs = jax.device_get(score(weights, rollout).log_probs)
    return dataclasses.replace(rollout, log_probs=np.where(rollout.mask, log_probs, 0.0))


def measure(sizes: common.Sizes, dtype: str, repeats: int):
    """(sides by name, seconds of their updates, response tokens)."""
    config = exactness_cost.model_config(sizes)
    params = jax.tree.map(jnp.asarray, random_params(config, _SEED))
    numerics = exactness_cost.calibrated(config, dtype, sizes, batch=SEQUENCES)
    sampling = Sampling(sizes.response, stop_tokens=(config.vocab_size - 1,))
    execution = Execution(config, numerics, sampling)
    lengths = common.skewed(SEQUENCES, sizes.response)
    rollout = rollout_of(execution, params, sizes, lengths)
    # As many tokens in rows that are all equally long: nothing to leave out.
    mean = round(int(lengths.sum()) / SEQUENCES)
    even_execution = dataclasses.replace(
        execution, sampling=dataclasses.replace(sampling, max_tokens=mean)
    )
    even = rollout_of(even_execution, params, sizes, np.full(SEQUENCES, mean))
    tokens = micro_batch_tokens(sizes)
    even_rows = max(size for size in (4, 8, 16, 32) if size * (sizes.prompt + mean) <= tokens)
    half = micro_batch_tokens(sizes, MICRO_BATCH // 2)
    sides = {
        "rows": Side(execution, params, rollout, micro_batch=MICRO_BATCH),
        "tokens": Side(execution, params, rollout, micro_batch_tokens=tokens),
        "half": Side(execution, params, rollout, micro_batch_tokens=half),
        "even": Side(even_execution, params, even, micro_batch=even_rows),
    }
    times = common.interleaved({name: side.update for name, side in sides.items()}, repeats)
    return sides, times, int(lengths.sum())


def rows_of(sizes: common.Sizes, repeats: int) -> list[str]:
    """The table's rows of a model and its lengths."""
    more, fewer = (micro_batch_tokens(sizes, rows) for rows in (MICRO_BATCH, MICRO_BATCH // 2))
    names = {
        "rows": f"padded rows, `micro_batch = {MICRO_BATCH}`",
        "tokens": f"no padding, `micro_batch_tokens = {more:,}`",
        "half": f"no padding, `micro_batch_tokens = {fewer:,}`",
        "even": "as many tokens in rows of one length",
    }
    lines = []
    for dtype in common.DTYPES:
        sides, times, count = measure(sizes, dtype, repeats)
        for name, seconds in times.items():
            padded, even = (common.ratios(seconds, times[one])[0] for one in ("rows", "even"))
            middle = sorted(seconds)[len(seconds) // 2]
            lines.append(
                f"| {sizes.hidden} | {sizes.response:,} | {dtype} | {count:,} | {names[name]}"
                f" | {sides[name].filled:.2f} | {middle:.2f} | {padded:.2f} | {even:.2f}"
                f" | {sides[name].first:.0f} |"
            )
    return lines


def main() -> None:
    options = common.parser(__doc__.splitlines()[0], PAGE).parse_args()
    load = common.load_average()
    shapes = (common.SMOKE,) if options.smoke else SHAPES
    longest = " and ".join(f"{sizes.response:,}" for sizes in shapes)
    lines = [
        "# The learner without padding",
        "",
        f"Written by `python scripts/bench_packing.py --repeats {options.repeats}`. The time of an"
        f" update of {SEQUENCES} sequences, of log-normal lengths with a mean of a quarter of the"
        f" longest, {longest}; for comparison, of sequences that are all as long as their"
        f" mean. Updates take turns, {options.repeats} of each; a ratio is the median of the"
        " ratios of neighbours. Filled is the share of tokens in what is computed. No response"
        " token's log-prob differed from that of a forward over the padded rows.",
        "",
        *(sizes.text() for sizes in shapes),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        "| hidden size | longest | dtype | response tokens | micro-batches | filled | an update, s"
        " | of padded rows | of rows of one length | first update, with compiling, s |",
        "|--:|--:|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for sizes in shapes:
        lines += rows_of(sizes, options.repeats)
    common.publish(lines, options, PAGE)


if __name__ == "__main__":
    main()
