"""Runs GRPO steps of a model of Qwen3-0.6B's shape and prints resident memory, stage by stage.

    JAX_PLATFORMS=cpu python scripts/memory_of_a_run.py     # 28 layers, 596 million parameters
    JAX_PLATFORMS=cpu python scripts/memory_of_a_run.py --layers 8 --steps 2

Weights are random; 8 sequences in micro-batches of 2, bfloat16 compute over float32 masters, AdamW.
The figures are of the whole process (Linux): Python, compilation and compiled programs included.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from tim_jax import objectives, optimizers
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.parameters import init_params
from tim_jax.numerics import EXACT_BF16
from tim_jax.rl import loop, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning
from tim_jax.tasks import builtin
from tim_jax.tasks.text import character_tokenizer

PROMPT, RESPONSE, GROUP, PROMPTS = 32, 24, 4, 2


def model_config(layers: int) -> ModelConfig:
    """Qwen3-0.6B, but for the number of layers."""
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_positions=4096,
        qk_norm=True,
        tied_embeddings=True,
    )


def report(stage: str, parameters: int) -> None:
    """Prints the process's resident memory, now and at its highest."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    print(
        f"{stage:28s} {now / 1e9:6.2f} GB  {now / parameters:5.1f} bytes a parameter;"
        f"  peak {peak / 1e9:6.2f} GB  {peak / parameters:5.1f}",
        flush=True,
    )


def reported(program: Callable[..., Any], stage: str, parameters: int) -> Callable[..., Any]:
    """The program, with a report after each call."""

    def call(*args: Any) -> Any:
        result = jax.block_until_ready(program(*args))
        report(stage, parameters)
        return result

    return call


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--layers", type=int, default=28)
    options.add_argument("--steps", type=int, default=1)
    chosen = options.parse_args()
    config = model_config(chosen.layers)
    execution = Execution(config, EXACT_BF16, Sampling(RESPONSE))
    learning = Learning(objectives.Objective(), GROUP, micro_batch=2, remat=True)
    optimizer = optimizers.AdamW(1e-6).transform()
    built = programs.build(Training(execution, learning, optimizer, prompts_per_step=PROMPTS))
    params = init_params(config, 0)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    report(f"{count / 1e6:.0f} million parameters", count)
    state = jax.block_until_ready(built.init(params))
    del params  # the host's copy
    report("state", count)
    stages = ("prepare", "sample", "experience", "update")
    built = replace(built, **{s: reported(getattr(built, s), s, count) for s in stages})
    steps = loop.train(
        state,
        builtin.builtin_task("running_sums", {"seed": 0, "digits": [1, 3], "eval_size": 16}),
        Text(character_tokenizer(builtin.ALPHABET), PROMPT),
        programs=built,
        seed=0,
        steps=chosen.steps,
    )
    del state  # its buffers are the loop's
    for step in steps:
        report(f"step {step.number}", count)
        unequal, compared = (int(step.metrics[f"{n}_tokens"]) for n in ("unequal", "compared"))
        print(f"{unequal} of {compared} tokens unequal")
        del step


if __name__ == "__main__":
    main()
