"""Tokens per second of episodes of several turns, beside single turns of the same length.

Writes a section of docs/results/turns.md.

    python scripts/bench_turns.py                  # 8 turns of 16 drawn and 16 replied tokens

The environment replies at once. Both draw 8 prompts x 8 samples from the quickstart's model with
random weights, in float32, and both count all tokens, drawn and replied. Without end tokens, so
that lengths are equal.
"""

import argparse
import pathlib
import platform
import statistics
import time
from functools import partial

import bench_common as common
import jax
import jax.numpy as jnp
import numpy as np
from bench_exactness_cost import make_prompts, model_config

from tim_jax.instruments.auditing import random_params
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.numerics import EXACT_F32
from tim_jax.rl import episodes
from tim_jax.rl.programs import sampling_program
from tim_jax.rl.rules import Turns
from tim_jax.tasks.base import Outcome

OUT = common.RESULTS / "turns.md"
PROMPTS, SAMPLES, LENGTH = 8, 8, 16
SIZES = common.Sizes(
    layers=4,
    hidden=128,
    intermediate=384,
    heads=4,
    kv_heads=2,
    vocabulary=64,
    prompt=LENGTH,
    response=2048 - LENGTH,
)
CONFIG = model_config(SIZES)
TITLE = "## Speed beside a single turn of the same length"


class Replying:
    """The same reply to every turn."""

    def __init__(self, size: int):
        self.reply = np.full(size, 5, np.int32)

    def outcomes(self, turns):
        for index, _ in enumerate(turns):
            yield index, Outcome(None, self.reply)


def timed(draw) -> tuple[float, float]:
    """Seconds for each token that is drawn or replied: all, and without waiting for replies."""
    start = time.perf_counter()
    rollout, waited = jax.block_until_ready(draw())
    took = time.perf_counter() - start
    tokens = int(rollout.lengths.sum())
    return took / tokens, (took - waited) / tokens


def section(found: dict[str, list[tuple[float, float]]], args, shape: str) -> str:
    """The part of the page: medians, and those of ratios to the single turn of the same round."""
    single = [whole for whole, _ in found["a single turn"]]
    lines = [
        TITLE,
        "",
        f"Made by `python scripts/bench_turns.py` (jax {jax.__version__}, Python"
        f" {platform.python_version()}; {jax.default_backend()}: {common.cpu_model()}; load average"
        f" at the end {common.load_average():.1f}).",
        "",
        f"{PROMPTS} prompts x {SAMPLES} samples of the quickstart's model in float32 with random",
        f"weights and plain tiles; {shape}. The environment replies at once.",
        f"Medians of {args.repeats} rounds in which each has its turn; ratios are to the single",
        "turn of the same round.",
        "",
        "| | tokens/s | time a token, against a single turn | without waiting for replies |",
        "|---|---:|---:|---:|",
    ]
    for name, times in found.items():
        rate = 1 / statistics.median(whole for whole, _ in times)
        ratios = [
            statistics.median(x / one for x, one in zip(column, single, strict=True))
            for column in zip(*times, strict=True)
        ]
        lines.append(f"| {name} | {rate:,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Episodes beside single turns.")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--drawn", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--reply", type=int, default=16, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    room = args.turns * (args.drawn + args.reply)
    execution = Execution(CONFIG, EXACT_F32, Sampling(room))
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, 0))
    weights, key = jax.jit(execution.prepare)(params), jax.random.key(0)
    prompts = make_prompts(CONFIG, SIZES, PROMPTS)
    single = sampling_program(execution, samples=SAMPLES)

    def play(compiled):
        played = episodes.play(
            weights,
            prompts,
            key,
            programs=compiled,
            environment=Replying(args.reply),
            states=[None] * PROMPTS,
            text=lambda tokens: "",
        )
        return played.rollout, played.seconds

    draws = {"a single turn": lambda: (single(weights, prompts, key), 0.0)}
    turns = Turns(args.turns, args.drawn)
    for how, batching in (("rows", Batching()), ("pages", Batching(slots=PROMPTS * SAMPLES))):
        compiled = episodes.build(execution, turns=turns, samples=SAMPLES, batching=batching)
        draws[f"{args.turns} turns, {how}"] = partial(play, compiled)
    for draw in draws.values():  # compiles
        timed(draw)
    with common.warm("a rollout"):
        rounds = [{name: timed(draw) for name, draw in draws.items()} for _ in range(args.repeats)]
    found = {name: [one[name] for one in rounds] for name in draws}
    shape = f"{args.turns} turns of {args.drawn} drawn and {args.reply} replied tokens against a"
    common.put_section(args.out, section(found, args, f"{shape} single turn of {room}"))


if __name__ == "__main__":
    main()
