"""Slots with skewed lengths beside equal ones, and writes docs/results/slots.md.

    python scripts/bench_slots.py     # 64 sequences of up to 512 tokens; about 12 minutes
    python scripts/bench_slots.py --smoke

Random weights end no response where a trained model would, so each sequence is told its length: its
last token is replaced by the stop token. Lengths are drawn log-normally with a mean of a quarter of
the longest, and cut there.
"""

import dataclasses
import sys
from functools import partial

import bench_common as common
import bench_exactness_cost as exactness_cost
import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.instruments.auditing import random_params
from tim_jax.model.execution import Batching, Execution, Sampling, jit
from tim_jax.policy import distribution, sampler

PAGE = common.RESULTS / "slots.md"
SIZES = dataclasses.replace(common.SMALL, response=common.SMALL.longest)
SEQUENCES = 64
_SEED = 0


def forced(logits, uniform, positions, sequences, *, lengths, execution: Execution):
    """A draw that ends each sequence at its length and nowhere else."""
    (stop,) = execution.sampling.stop_tokens
    token, log_prob = distribution.draw(
        logits, uniform, sampling=execution.sampling, numerics=execution.numerics
    )
    token = jnp.where(token == stop, 0, token)
    return jnp.where(positions + 1 >= lengths[sequences], stop, token), log_prob, None


def measure(sizes: common.Sizes, dtype: str, schedules, repeats: int):
    """Seconds by schedule, and the tokens of each: (lengths' name, slots, halvings)."""
    config = exactness_cost.model_config(sizes)
    params = jax.tree.map(jnp.asarray, random_params(config, _SEED))
    prompts = exactness_cost.make_prompts(config, sizes, SEQUENCES)
    numerics = exactness_cost.calibrated(config, dtype, sizes, batch=SEQUENCES)
    sampling = Sampling(sizes.response, stop_tokens=(config.vocab_size - 1,))
    execution = Execution(config, numerics, sampling)
    weights = jax.jit(execution.prepare)(params)
    lengths = {
        "equal": np.full(SEQUENCES, sizes.response, np.int32),
        "skewed": common.skewed(SEQUENCES, sizes.response),
    }
    calls, tokens, drawn = {}, {}, {}
    for name, slots, halvings in schedules:
        draw = partial(forced, lengths=jnp.asarray(lengths[name]), execution=execution)
        one = partial(sampler.sample, execution=execution, samples=1, draw=draw)
        program = jit(partial(one, batching=Batching(slots, halvings)), numerics)
        call = partial(program, weights, prompts, jax.random.key(_SEED))
        rollout = jax.device_get(call())
        assert (rollout.lengths == lengths[name]).all()
        same = drawn.setdefault(name, rollout.log_probs)
        assert same.tobytes() == rollout.log_probs.tobytes(), "the schedule changed a bit"
        key = name, slots, halvings
        calls[key] = partial(exactness_cost.seconds, call)
        taken = calls[key]()
        print(
            f"{dtype}, {name} lengths, {slots} slots, {halvings} halvings: {taken:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        tokens[key] = int(rollout.lengths.sum())
    return common.interleaved(calls, repeats), tokens


def main() -> None:
    options = common.parser(__doc__.splitlines()[0], PAGE).parse_args()
    load = common.load_average()
    sizes = common.SMOKE if options.smoke else SIZES
    schedules = [("equal", SEQUENCES, 0), ("skewed", SEQUENCES, 0), ("skewed", SEQUENCES, 2)]
    schedules += [("skewed", SEQUENCES, 4), ("equal", 16, 0), ("skewed", 16, 0), ("skewed", 16, 2)]
    lines = [
        "# Slots with skewed lengths",
        "",
        "Written by `python scripts/bench_slots.py`. The exact sampler (tiles, calibrated) draws"
        f" {SEQUENCES} sequences of up to {sizes.response} tokens in S slots; a slot whose sequence"
        " has ended takes the next. Equal lengths are the longest; skewed ones are log-normal with"
        " a mean of a quarter of it, and are forced (random weights end nothing by themselves)."
        " `halvings`: how often the slots become half as many once none waits. The last column"
        " holds tokens per second against equal lengths in as many slots, the median of the ratios"
        " of neighbouring calls. All schedules of the same lengths gave the same bits.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        "| dtype | lengths | slots | halvings | tokens | tok/s | against equal lengths |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for dtype in common.DTYPES:
        times, tokens = measure(sizes, dtype, schedules, options.repeats)
        for key, seconds in times.items():
            name, slots, halvings = key
            equal = "equal", slots, 0
            ratio, _ = common.ratios(times[equal], seconds)
            rate = tokens[key] / sorted(seconds)[len(seconds) // 2]
            share = ratio * tokens[key] / tokens[equal]
            lines.append(
                f"| {dtype} | {name} | {slots} | {halvings} | {tokens[key]:,} | {rate:,.0f} |"
                f" {share:.2f} |"
            )
    common.publish(lines, options, PAGE)


if __name__ == "__main__":
    main()
