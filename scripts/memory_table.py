"""The compiled learner's memory at a vocabulary of 151,936, and writes docs/results/memory.md.

    JAX_PLATFORMS=cpu python scripts/memory_table.py

Nothing runs: programs are compiled for shapes, and the compiler says what they will need.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import bench_common as common
import jax
import jax.numpy as jnp

from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import Numerics
from tim_jax.objectives import Objective
from tim_jax.policy import scoring
from tim_jax.types import Rollout

PAGE = common.RESULTS / "memory.md"
VOCABULARY = 151_936
LENGTHS = (1024, 2048, 4096, 8192)
HEAD_ROWS = 256
_PROMPT = 128
_MIB = 2**20


class Row(NamedTuple):
    """What the compiler says of one program."""

    length: int
    numerics: Numerics
    temporary: int  # bytes beyond arguments and results
    seconds: float  # to trace and compile


def model_config(vocabulary: int) -> ModelConfig:
    """Small but for its vocabulary, so that logits would outweigh everything else."""
    return ModelConfig(
        model_type="qwen3",
        vocab_size=vocabulary,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=192,
        max_positions=max(LENGTHS),
        qk_norm=True,
        tied_embeddings=True,
    )


def rollout_shapes(length: int) -> Rollout:
    """One sequence of `length` tokens."""

    def of(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    response = length - _PROMPT
    return Rollout(
        prompts=of(1, _PROMPT),
        prompt_lengths=of(1),
        responses=of(1, response),
        lengths=of(1),
        log_probs=of(1, response, dtype=jnp.float32),
        finished=of(1, dtype=jnp.bool_),
    )


def loss(weights, rollout: Rollout, advantages: jax.Array, execution: Execution):
    """The GRPO loss, and the log-probs and entropies that a step reports."""
    objective = Objective()
    log_probs, entropy, _ = scoring.score(weights, rollout, execution=execution, remat=True)
    mask = rollout.mask
    losses = objective.token_losses(log_probs, rollout.log_probs, advantages, mask=mask).loss
    return jnp.sum(objective.token_weights(mask) * losses), (log_probs, entropy)


def measure(length: int, vocabulary: int, numerics: Numerics) -> Row:
    """Compiles value and gradient for one sequence of `length` tokens."""
    config = model_config(vocabulary)
    execution = Execution(config, numerics, Sampling(length - _PROMPT))
    weights = jax.eval_shape(execution.prepare, parameter_shapes(config))
    advantages = jax.ShapeDtypeStruct((1,), jnp.float32)
    start = time.perf_counter()
    program = jax.jit(jax.value_and_grad(partial(loss, execution=execution), has_aux=True))
    compiled = program.lower(weights, rollout_shapes(length), advantages).compile()
    seconds = time.perf_counter() - start
    found = compiled.memory_analysis()
    if found is None:
        raise SystemExit("this backend has no memory analysis")
    return Row(length, numerics, found.temp_size_in_bytes, seconds)


def table(rows: list[Row], vocabulary: int) -> list[str]:
    lines = [
        "| numerics | dtype | tokens | temporary, MiB | growth since the row above, MiB"
        " | float32 [tokens, vocabulary], MiB | compiled in, s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for before, row in zip([None, *rows], rows, strict=False):
        growth = ""
        if before is not None and before.numerics == row.numerics:
            growth = f"{(row.temporary - before.temporary) / _MIB:.1f}"
        name, dtype = row.numerics.family, row.numerics.compute_dtype
        logits = row.length * vocabulary * 4 / _MIB
        lines.append(
            f"| {name} | {dtype} | {row.length:,} | {row.temporary / _MIB:.1f} | {growth}"
            f" | {logits:,.0f} | {row.seconds:.0f} |"
        )
    return lines


def page(rows: list[Row], vocabulary: int, load: float) -> list[str]:
    config = model_config(vocabulary)
    tile = HEAD_ROWS * vocabulary * 4 / _MIB
    head = config.hidden_size * vocabulary * 4 / _MIB
    return [
        "# The learner's memory",
        "",
        "Written by `python scripts/memory_table.py`. Temporary memory of the compiled value and"
        f" gradient of a GRPO loss, as XLA's memory analysis states it: one sequence, {_PROMPT}"
        f" tokens of prompt, vocabulary {vocabulary:,}, hidden size {config.hidden_size},"
        f" {config.num_layers} layers, recomputation on. Logits exist for {HEAD_ROWS} rows at a"
        f" time, {tile:.0f} MiB in float32; the head and its float32 gradient take {head:.0f} MiB"
        " each. What grows with the tokens is the activations, and it does not know the"
        " vocabulary.",
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib"), timed=False),
        *table(rows, vocabulary),
    ]


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser("Tabulates the learner's memory.", PAGE).parse_args()
    load = common.load_average()
    lengths, vocabulary = ((256, 512), 4096) if options.smoke else (LENGTHS, VOCABULARY)
    rows = []
    for family in ("tiles", "native"):
        for dtype in common.DTYPES:
            numerics = Numerics(
                family=family, compute_dtype=dtype, kv_block=128, head_rows=HEAD_ROWS
            )
            for length in lengths:
                rows.append(measure(length, vocabulary, numerics))
                print("\n".join(table(rows[-1:], vocabulary)[2:]), flush=True)
    common.publish(page(rows, vocabulary, load), options, PAGE)


if __name__ == "__main__":
    main()
