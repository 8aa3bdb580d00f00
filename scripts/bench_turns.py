"""Tokens per second of episodes of several turns, beside single turns of the same length.

    python scripts/bench_turns.py                  # 8 turns of 16 drawn and 16 replied tokens

The environment replies at once. Both draw 8 prompts x 8 samples from the quickstart's model with
random weights, in float32, and both count all tokens, drawn and replied. Without end tokens, so
that lengths are equal.
"""

import argparse
import time

import bench_common as common
import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.types import Prompts
from tim_jax.instruments.auditing import random_params
from tim_jax.model.calibration import calibrate
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.numerics import EXACT_F32
from tim_jax.rl import episodes
from tim_jax.rl.programs import sampling_program
from tim_jax.rl.rules import Turns
from tim_jax.tasks.episodes import Outcome

CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    max_positions=2048,
    tied_embeddings=True,
    qk_norm=True,
)
PROMPTS, SAMPLES, LENGTH = 8, 8, 16


class Replying:
    """The same reply to every turn."""

    def __init__(self, size: int):
        self.reply = np.full(size, 5, np.int32)

    def outcomes(self, turns):
        for index, _ in enumerate(turns):
            yield index, Outcome(None, self.reply)


def best(draw, repeats: int) -> float:
    """Tokens per second of the fastest of some draws, after one that compiles."""
    jax.block_until_ready(draw())
    rates = []
    for _ in range(repeats):
        with common.warm("a rollout"):
            start = time.perf_counter()
            rollout = jax.block_until_ready(draw())
            seconds = time.perf_counter() - start
        rates.append(int(rollout.lengths.sum()) / seconds)
    return max(rates)


def main():
    parser = argparse.ArgumentParser(description="Episodes beside single turns.")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--drawn", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--reply", type=int, default=16, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    room = args.turns * (args.drawn + args.reply)
    numerics = calibrate(CONFIG, EXACT_F32, batch=PROMPTS * SAMPLES, longest=LENGTH + room)
    execution = Execution(CONFIG, numerics, Sampling(room))
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, 0))
    weights, key = jax.jit(execution.prepare)(params), jax.random.key(0)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (PROMPTS, LENGTH))
    prompts = Prompts(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.full(PROMPTS, LENGTH, jnp.int32),
        ids=jnp.arange(PROMPTS, dtype=jnp.int32),
    )
    single = sampling_program(execution, samples=SAMPLES)
    alone = best(lambda: single(weights, prompts, key), args.repeats)
    print(f"single turn of {room} tokens: {alone:,.0f} tokens/s")
    for batching in (Batching(), Batching(slots=PROMPTS * SAMPLES)):
        compiled = episodes.build(
            execution, turns=Turns(args.turns, args.drawn), samples=SAMPLES, batching=batching
        )

        def play(compiled=compiled):
            return episodes.play(
                weights,
                prompts,
                key,
                programs=compiled,
                environment=Replying(args.reply),
                states=[None] * PROMPTS,
                text=lambda tokens: "",
            ).rollout

        rate = best(play, args.repeats)
        how = "pages" if compiled.paged else "rows"
        print(
            f"{args.turns} turns, {how}: {rate:,.0f} tokens/s, time per token x {alone / rate:.2f}"
        )


if __name__ == "__main__":
    main()
