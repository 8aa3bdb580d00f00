"""The compiled learner's memory at a vocabulary of 151,936, and writes docs/results/memory.md.

    JAX_PLATFORMS=cpu python scripts/memory_table.py
    JAX_PLATFORMS=cpu python scripts/memory_table.py --updates   # the first table alone, printed

Nothing runs: programs are compiled for shapes, and the compiler says what they will need.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import bench_common as common
import jax
import jax.numpy as jnp
from bench_exactness_cost import model_config

from tim_jax import optimizers
from tim_jax.common.types import Rollout
from tim_jax.instruments.plan import budget, workload
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import Numerics
from tim_jax.objectives import Objective
from tim_jax.policy import scoring
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

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


def small_model(vocabulary: int) -> ModelConfig:
    """Small but for its vocabulary, so that logits would outweigh everything else."""
    sizes = {"layers": 2, "hidden": 64, "intermediate": 192, "heads": 4, "kv_heads": 2}
    lengths = {"prompt": _PROMPT, "response": max(LENGTHS) - _PROMPT}
    return model_config(common.Sizes(**sizes, head_dim=16, vocabulary=vocabulary, **lengths))


class Model(NamedTuple):
    """A model of Qwen3-0.6B's proportions whose update is compiled."""

    name: str
    hidden: int
    layers: int
    vocabulary: int


# The first is that of the tables of speed; the others differ in the share that the embedding has.
MODELS = (
    Model("8 layers of Qwen3-0.6B", 1024, 8, VOCABULARY),
    Model("Qwen3-0.6B", 1024, 28, VOCABULARY),
    Model("0.1B, small vocabulary", 512, 28, 32_000),
)
SMALL = (Model("small", 64, 2, 4096),)


class Needed(NamedTuple):
    """What the compiler says of a whole update."""

    parameters: int  # of the model
    arguments: int  # bytes: masters, moments, compute weights, batch
    temporary: int  # bytes
    estimate: int  # bytes, as `tim-jax train` estimates before it starts


class UpdateRow(NamedTuple):
    """An update, and what it needs."""

    model: Model
    dtype: str
    micro_batch: int | None
    needed: Needed


def step_of(model: Model, dtype: str, micro_batch: int | None) -> Workload:
    """8 sequences of up to 320 tokens; AdamW over float32 masters."""
    sizes = {"layers": model.layers, "hidden": model.hidden, "intermediate": 3 * model.hidden}
    heads = {"heads": 16, "kv_heads": 8, "head_dim": model.hidden // 8}
    config = model_config(
        common.Sizes(**sizes, **heads, vocabulary=model.vocabulary, prompt=64, response=448)
    )
    numerics = Numerics(compute_dtype=dtype, kv_block=32, cache_write="rows")
    training = Training(
        Execution(config, numerics, Sampling(256)),
        Learning(Objective(), 4, micro_batch=micro_batch, remat=True),
        optimizers.AdamW(1e-6).transform(),
        prompts_per_step=2,
    )
    return Workload(training, prompt_length=64)


def analysed(lowered: Any) -> Any:
    """The memory of a program, as XLA analyses it."""
    found = lowered.compile().memory_analysis()
    if found is None:
        raise SystemExit("this backend has no memory analysis")
    return found


def numbers(shapes: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def measure_update(step: Workload) -> Needed:
    """Compiles an update of a step."""
    devices = tuple(jax.devices()[:1])
    program = workload.updating(step, devices)
    found = analysed(program.function.lower(*program.arguments))
    return Needed(
        numbers(parameter_shapes(step.execution.config)),
        found.argument_size_in_bytes,
        found.temp_size_in_bytes,
        budget.needs(step, devices)[1].total,
    )


def update_table(rows: list[UpdateRow]) -> list[str]:
    lines = [
        "| model | parameters, million | dtype | micro-batch | arguments | temporary"
        " | both | estimated |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        count, arguments, temporary, estimate = row.needed
        sizes = arguments, temporary, arguments + temporary, estimate
        shown = " | ".join(f"{size / count:.1f}" for size in sizes)
        lines.append(
            f"| {row.model.name} | {count / 1e6:,.0f} | {row.dtype}"
            f" | {row.micro_batch or 'all 8'} | {shown} |"
        )
    return lines


def update_rows(models: tuple[Model, ...]) -> list[UpdateRow]:
    rows = []
    for model in models:
        for dtype, micro in (("bfloat16", 2), ("bfloat16", None), ("float32", 2)):
            needed = measure_update(step_of(model, dtype, micro))
            rows.append(UpdateRow(model, dtype, micro, needed))
            print("\n".join(update_table(rows[-1:])[2:]), flush=True)
    return rows


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
    scores = scoring.score(weights, rollout, execution=execution, remat=True)
    log_probs, entropy = scores.log_probs, scores.entropy
    mask = rollout.mask
    losses = objective.token_losses(log_probs, rollout.log_probs, advantages, mask=mask).loss
    return jnp.sum(objective.token_weights(mask) * losses), (log_probs, entropy)


def measure(length: int, vocabulary: int, numerics: Numerics) -> Row:
    """Compiles value and gradient for one sequence of `length` tokens."""
    config = small_model(vocabulary)
    execution = Execution(config, numerics, Sampling(length - _PROMPT))
    weights = jax.eval_shape(execution.prepare, parameter_shapes(config))
    advantages = jax.ShapeDtypeStruct((1,), jnp.float32)
    start = time.perf_counter()
    program = jax.jit(jax.value_and_grad(partial(loss, execution=execution), has_aux=True))
    found = analysed(program.lower(weights, rollout_shapes(length), advantages))
    return Row(length, numerics, found.temp_size_in_bytes, time.perf_counter() - start)


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


def page(updates: list[UpdateRow], rows: list[Row], vocabulary: int, load: float) -> list[str]:
    config = small_model(vocabulary)
    tile = HEAD_ROWS * vocabulary * 4 / _MIB
    head = config.hidden_size * vocabulary * 4 / _MIB
    return [
        "# The learner's memory",
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib"), timed=False),
        "## Bytes a parameter of an update",
        "",
        "Written by `python scripts/memory_table.py`: arguments and temporary memory of the"
        " compiled update, as XLA's memory analysis states them, divided by the parameters. GRPO"
        " with AdamW over float32 masters, 8 sequences of 64 + 256 tokens, recomputation on."
        " Masters and the two moments are 12 bytes, compute weights 2 or 4, and as much again for"
        " the transposed copy of a tied head; results take the place of arguments. The gradient is"
        " 4. The last column is what `tim-jax train` estimates before it starts.",
        "",
        *update_table(updates),
        "",
        "## Memory that grows with the tokens",
        "",
        "Temporary memory of the compiled value and"
        f" gradient of a GRPO loss, as XLA's memory analysis states it: one sequence, {_PROMPT}"
        f" tokens of prompt, vocabulary {vocabulary:,}, hidden size {config.hidden_size},"
        f" {config.num_layers} layers, recomputation on. Logits exist for {HEAD_ROWS} rows at a"
        f" time, {tile:.0f} MiB in float32; the head and its float32 gradient take {head:.0f} MiB"
        " each. What grows with the tokens is the activations, and it does not know the"
        " vocabulary.",
        "",
        *table(rows, vocabulary),
    ]


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    parser = common.parser("Tabulates the learner's memory.", PAGE)
    parser.add_argument("--updates", action="store_true", help="only print the first table")
    options = parser.parse_args()
    load = common.load_average()
    updates = update_rows(SMALL if options.smoke else MODELS)
    if options.updates:
        return
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
    common.publish(page(updates, rows, vocabulary, load), options, PAGE)


if __name__ == "__main__":
    main()
