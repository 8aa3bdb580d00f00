"""What a diagnosis costs, in forwards of the same tokens, and writes docs/results/diagnose_cost.md.

    JAX_PLATFORMS=cpu python scripts/diagnose_cost.py --repeats 3   # on an idle machine
    python scripts/diagnose_cost.py --smoke

The forward is `tim_jax.score` of all the sequences; forwards and diagnoses are taken in turns.
"""

import time
from functools import partial
from typing import NamedTuple

import bench_common as common
import bench_exactness_cost as exactness_cost
import diagnose_faults
import jax
import jax.numpy as jnp
import numpy as np

import tim_jax
from tim_jax.api.rollouts import Rollout
from tim_jax.instruments.auditing import random_params
from tim_jax.numerics import Numerics

PAGE = common.RESULTS / "diagnose_cost.md"
NOISE = 0.005  # standard deviation of what is added to the log-probs, as sound engines differ
_SEED = 0


# A layer of Qwen3-0.6B. Its vocabulary of 151,936 is divided by its 28 layers, so that the head's
# share of the work is that of the whole model.
SIZES = common.Sizes(
    layers=1,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936 // 28,
    prompt=64,
    response=800,
)
SEQUENCES = 128
SCORED_TOGETHER = 8


def model(sizes: common.Sizes) -> tim_jax.Model:
    """Random weights and a tokenizer that knows the first few tokens."""
    config = exactness_cost.model_config(sizes)
    params = jax.tree.map(jnp.asarray, random_params(config, _SEED))
    return tim_jax.Model(config, params, diagnose_faults.TOKENIZER, (), Numerics())


def drawn(subject: tim_jax.Model, sizes: common.Sizes) -> Rollout:
    """Sequences of full length."""
    letters = np.random.default_rng(_SEED).choice(list("abcdef"), (SEQUENCES, sizes.prompt))
    prompts = ["".join(row) for row in letters]
    return tim_jax.sample(subject, prompts, max_tokens=sizes.response, seed=_SEED)


def rows(rollout: Rollout, log_probs: np.ndarray) -> list[dict]:
    """What an engine with a little noise would have written."""
    noise = np.random.default_rng(_SEED + 1).normal(scale=NOISE, size=log_probs.shape)
    prompts, lengths = rollout.arrays.prompts, rollout.arrays.prompt_lengths
    noisy = np.minimum(log_probs + noise, 0.0)
    return [
        {
            "prompt_token_ids": prompts[i, : lengths[i]].tolist(),
            "response_token_ids": rollout.tokens[i].tolist(),
            "logprobs": noisy[i].tolist(),
            "finish_reason": "length",
        }
        for i in range(len(rollout))
    ]


class Measured(NamedTuple):
    """Seconds; the first call of each compiles."""

    first: dict[str, float]
    times: dict[str, tuple[float, ...]]
    verdict: str


def measure(sizes: common.Sizes, repeats: int) -> Measured:
    """Times the forward and the diagnosis of the same tokens in turns."""
    subject = model(sizes)
    rollout = drawn(subject, sizes)
    score = partial(tim_jax.score, subject, rollout, micro_batch=SCORED_TOGETHER)
    start = time.perf_counter()
    log_probs = score()
    first = {"forward": time.perf_counter() - start}
    diagnose = partial(tim_jax.diagnose, subject, rows(rollout, log_probs))
    start = time.perf_counter()
    found = diagnose()
    first["diagnosis"] = time.perf_counter() - start
    print(found, first, flush=True)
    both = {"forward": score, "diagnosis": diagnose}
    calls = {name: partial(exactness_cost.seconds, call) for name, call in both.items()}
    times = common.interleaved(calls, repeats)
    return Measured(first, times, str(found).splitlines()[0])


def page(sizes: common.Sizes, found: Measured, repeats: int, load: float) -> list[str]:
    ratio, best = common.ratios(found.times["diagnosis"], found.times["forward"])
    lines = [
        "# What a diagnosis costs",
        "",
        f"Written by `python scripts/diagnose_cost.py --repeats {repeats}`."
        f" {SEQUENCES * sizes.response:,} response tokens in {SEQUENCES} sequences of"
        f" {sizes.prompt} + {sizes.response}, under {sizes.layers} layer of Qwen3-0.6B with a"
        f" vocabulary of {sizes.vocabulary:,}, which is the whole model's divided by its 28 layers."
        " So the shares of attention, SwiGLU and head are those of the whole model, and work that"
        " is the same for any model weighs 28 times as much as it would there. float32. The"
        f" log-probs are exact ones with normal noise of {NOISE}, so that low precision is tried"
        " too. The forward is `tim_jax.score`.",
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        "| | first call, with compiling, s | later, s |",
        "|---|--:|--:|",
    ]
    for name, seconds in found.times.items():
        middle = sorted(seconds)[len(seconds) // 2]
        lines.append(f"| {name} | {found.first[name]:.0f} | {middle:.1f} |")
    lines += [
        "",
        f"A diagnosis takes {ratio:.2f} forwards: the median of the ratios of neighbours,"
        f" {repeats} of each; best to best {best:.2f}. It said: {found.verdict}",
    ]
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser((__doc__ or "").splitlines()[0], PAGE).parse_args()
    load = common.load_average()
    sizes = common.SMOKE if options.smoke else SIZES
    found = measure(sizes, options.repeats)
    common.publish(page(sizes, found, options.repeats, load), options, PAGE)


if __name__ == "__main__":
    main()
