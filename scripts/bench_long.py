"""One very long response beside short ones, and writes docs/results/long.md.

    JAX_PLATFORMS=cpu python scripts/bench_long.py      # a response of 32,768 tokens
    python scripts/bench_long.py --smoke

One sequence of a batch goes on for 32,768 tokens and all others end early, so that their slots
wait. Memory and time for a token should not grow with the number of these slots: pages hold what is
in use, and slots become half as many while none waits for them. Calls are timed without pages,
which on a CPU are for memory alone (docs/sharding.md).
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import bench_common as common
import bench_exactness_cost as exactness_cost
import jax
import jax.numpy as jnp
import numpy as np
from bench_slots import forced

from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing import random_params
from tim_jax.model.execution import Batching, Execution, Sampling, jit
from tim_jax.policy import sampler

PAGE = common.RESULTS / "long.md"
SIZES = common.Sizes(
    layers=4, hidden=128, intermediate=384, heads=4, kv_heads=2, vocabulary=1024, response=32_768
)
SMOKE = dataclasses.replace(common.SMOKE, response=96)
SHORT = 64  # tokens of all other responses
COUNTS = (1, 16)  # of sequences, each with a slot of its own
_SEED = 0


class Case(NamedTuple):
    """A batch of which one response is long."""

    sequences: int
    call: Callable[[], Rollout]  # without pages
    memory: int  # bytes of the program's results and temporary buffers
    memory_with_pages: int  # of which there are as many as the responses need


def prepared(sizes: common.Sizes, sequences: int) -> Case:
    """The compiled program without pages, and what one with pages would need."""
    config = exactness_cost.model_config(sizes)
    numerics = exactness_cost.calibrated(config, "float32", sizes, batch=max(COUNTS))
    stop = (config.vocab_size - 1,)
    execution = Execution(config, numerics, Sampling(sizes.response, stop_tokens=stop))
    weights = jax.jit(execution.prepare)(jax.tree.map(jnp.asarray, random_params(config, _SEED)))
    prompts = exactness_cost.make_prompts(config, sizes, sequences)
    lengths = np.full(sequences, SHORT, np.int32)
    lengths[0] = sizes.response
    pages = sum(-(-(sizes.prompt + int(length)) // numerics.kv_block) for length in lengths)

    def compiled(pages: int | None):
        sample = partial(
            sampler.sample,
            execution=execution,
            samples=1,
            batching=Batching(sequences, sequences.bit_length() - 1, pages),
            draw=partial(forced, lengths=jnp.asarray(lengths), execution=execution),
        )
        return jit(sample, numerics).lower(weights, prompts, key).compile()

    def memory(program) -> int:
        analysis = program.memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    key = jax.random.key(_SEED)
    program = compiled(None)
    call = partial(program, weights, prompts, key)
    return Case(sequences, call, memory(program), memory(compiled(pages)))


def page(cases: list[Case], times: Mapping[int, tuple[float, ...]], options, load) -> list[str]:
    sizes = SMOKE if options.smoke else SIZES
    lines = [
        "# One very long response",
        "",
        f"Written by `python scripts/bench_long.py`. One response has {sizes.response:,} tokens,"
        f" and all others of its batch {SHORT}; every sequence has a slot of its own, and the slots"
        " become half as many once no more than half of them work. Exact sampler (tiles,"
        " calibrated, float32); the long response had the same tokens and log-probs, to the bit,"
        " in every batch. Memory is that of the compiled program's results and temporary buffers;"
        " with pages the program was compiled only. Seconds are medians of"
        f" {options.repeats}, taken in turns.",
        "",
        sizes.text(),
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        "| sequences | seconds | ms for a token of the long one | against one alone | MB | with"
        " pages, MB |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    alone = times[cases[0].sequences]
    for case in cases:
        seconds = statistics.median(times[case.sequences])
        ratio, _ = common.ratios(times[case.sequences], alone)
        lines.append(
            f"| {case.sequences} | {seconds:.1f} | {1e3 * seconds / sizes.response:.2f} |"
            f" {ratio:.2f} | {case.memory / 1e6:,.0f} | {case.memory_with_pages / 1e6:,.0f} |"
        )
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser(__doc__.splitlines()[0], PAGE).parse_args()
    load = common.load_average()
    sizes = SMOKE if options.smoke else SIZES
    cases = [prepared(sizes, count) for count in COUNTS]
    calls, log_probs = {}, {}
    for case in cases:
        rollout = jax.device_get(case.call())
        assert rollout.lengths[0] == sizes.response
        log_probs[case.sequences] = rollout.log_probs[0].tobytes(), rollout.responses[0].tobytes()
        calls[case.sequences] = partial(exactness_cost.seconds, case.call)
        print(f"{case.sequences} sequences: drawn once", file=sys.stderr, flush=True)
    assert len(set(log_probs.values())) == 1, "the batch changed a bit"
    times = common.interleaved(calls, options.repeats)
    common.publish(page(cases, times, options, load), options, PAGE)


if __name__ == "__main__":
    main()
