"""Memory and time of a step with adapters, and writes docs/results/lora.md.

    JAX_PLATFORMS=cpu python scripts/lora_table.py           # on an idle machine
    python scripts/lora_table.py --smoke

Memory is what the compiler says of the update's program, for shapes alone. Time is measured on a
smaller model, all sides in turns.
"""

import time
from dataclasses import replace
from typing import NamedTuple

import bench_common as common
import bench_exactness_cost as exactness_cost
import jax
import jax.numpy as jnp
import memory_table

from tim_jax import objectives, optimizers
from tim_jax.instruments.auditing import random_params
from tim_jax.model import adapters
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

PAGE = common.RESULTS / "lora.md"
SIDES: tuple[Lora | None, ...] = (None, Lora(rank=8), Lora(rank=64))
BATCH = 32
_SEED = 0


def named(lora: Lora | None) -> str:
    return "all weights" if lora is None else f"adapters of rank {lora.rank}"


class Memory(NamedTuple):
    """The update of one side, and what it needs."""

    model: memory_table.Model
    lora: Lora | None
    trained: int  # numbers that are trained
    needed: memory_table.Needed


def memory(model: memory_table.Model, lora: Lora | None) -> Memory:
    """Compiles an update in bfloat16 over a float32 or, under adapters, a bfloat16 base."""
    step = memory_table.step_of(model, "bfloat16", 2)
    step = step.varied(execution=replace(step.execution, lora=lora))
    trained = memory_table.numbers(adapters.trained_shapes(step.execution.config, lora))
    return Memory(model, lora, trained, memory_table.measure_update(step))


class Side:
    """A learner of all weights or of adapters, with a rollout of its own weights."""

    def __init__(self, execution: Execution, params, prompts):
        self.execution, self.params = execution, params
        learning = Learning(objectives.rloo(), common.GROUP)
        optimizer = optimizers.adamw(optimizers.Rate(1e-5))
        self.run = programs.build(Training(execution, learning, optimizer))
        state, base = self.start()
        weights = self.run.prepare(adapters.whole(state.params, base))
        given = self.run.publish(adapters.whole(state.params, base), weights)
        self.rollout = jax.block_until_ready(self.run.sample(given, prompts, jax.random.key(_SEED)))
        self.rewards = jnp.arange(self.rollout.lengths.size, dtype=jnp.float32)
        self.step()

    def start(self):
        """(state, base) before the first update."""
        lora = self.execution.lora
        if lora is None:
            return self.run.init(jax.tree.map(jnp.copy, self.params)), None
        drawn = adapters.init(self.execution.config, lora, _SEED)
        return self.run.init(drawn), self.run.place(adapters.narrowed(self.params))

    def step(self) -> float:
        """Seconds of an update and of making its weights ready; all log-probs must be equal."""
        state, base = jax.block_until_ready(self.start())
        weights = jax.block_until_ready(self.run.prepare(adapters.whole(state.params, base)))
        start = time.perf_counter()
        state, weights, found, _ = loop.learn(
            state, weights, self.rollout, self.rewards, programs=self.run, base=base
        )
        jax.block_until_ready((state.params, weights))
        taken = time.perf_counter() - start
        assert int(found.unequal) == 0 < int(found.compared)
        return taken

    def prepare(self) -> float:
        """Seconds of making weights ready: for adapters, of the merge."""
        state, base = jax.block_until_ready(self.start())
        whole = adapters.whole(state.params, base)
        return exactness_cost.seconds(lambda: self.run.prepare(whole))


class Times(NamedTuple):
    """Seconds of each side, by what it trains."""

    dtype: str
    step: dict[str, tuple[float, ...]]
    prepare: dict[str, tuple[float, ...]]
    tokens: int  # compared in each step


def times(sizes: common.Sizes, dtype: str, repeats: int) -> Times:
    """Times all sides of a model in turns."""
    config: ModelConfig = exactness_cost.model_config(sizes)
    params = jax.tree.map(jnp.asarray, random_params(config, _SEED))
    numerics = exactness_cost.calibrated(config, dtype, sizes, batch=BATCH)
    execution = Execution(config, numerics, Sampling(sizes.response))
    prompts = exactness_cost.make_prompts(config, sizes, BATCH // common.GROUP)
    sides = {named(lora): Side(replace(execution, lora=lora), params, prompts) for lora in SIDES}
    tokens = {int(side.rollout.lengths.sum()) for side in sides.values()}
    assert len(tokens) == 1  # adapters that change nothing yet draw what the base draws
    step = common.interleaved({name: side.step for name, side in sides.items()}, repeats)
    prepare = common.interleaved({name: side.prepare for name, side in sides.items()}, repeats)
    return Times(dtype, step, prepare, tokens.pop())


def memory_lines(rows: list[Memory]) -> list[str]:
    lines = [
        "| model | trained | numbers trained, million | arguments, MiB | temporary, MiB | both, MiB"
        " | bytes a parameter of the model | estimated |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        count, arguments, temporary, estimate = row.needed
        both = arguments + temporary
        shown = " | ".join(f"{x / 2**20:,.0f}" for x in (arguments, temporary, both))
        lines.append(
            f"| {row.model.name} | {named(row.lora)} | {row.trained / 1e6:,.1f} | {shown}"
            f" | {both / count:.1f} | {estimate / count:.1f} |"
        )
    return lines


def time_lines(rows: list[Times]) -> list[str]:
    whole = named(None)
    lines = [
        "| dtype | trained | learner's step, s | of that of all weights | weights made ready, s |",
        "|---|---|--:|--:|--:|",
    ]
    for row in rows:
        for name, seconds in row.step.items():
            ratio, _ = common.ratios(seconds, row.step[whole])
            middle, ready = (sorted(x)[len(x) // 2] for x in (seconds, row.prepare[name]))
            lines.append(f"| {row.dtype} | {name} | {middle:.2f} | {ratio:.2f} | {ready:.3f} |")
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    options = common.parser(__doc__.splitlines()[0], PAGE).parse_args()
    load = common.load_average()
    sizes = common.SMOKE if options.smoke else common.SMALL
    timed = [times(sizes, dtype, options.repeats) for dtype in common.DTYPES]
    models = memory_table.SMALL if options.smoke else memory_table.MODELS[:2]
    compiled = [memory(model, lora) for model in models for lora in SIDES]
    lines = [
        "# Adapters: memory and time",
        "",
        f"Written by `python scripts/lora_table.py --repeats {options.repeats}`.",
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib")),
        "## Memory of an update",
        "",
        "Arguments and temporary memory of the compiled update, as XLA's memory analysis states"
        " them. GRPO with AdamW, bfloat16, 8 sequences of 64 + 256 tokens in micro-batches of 2,"
        " recomputation on; adapters of all seven matrices. The base under adapters is bfloat16,"
        " as checkpoints mostly are; master weights without adapters are float32. The part of the"
        " base that has no adapters, above all the embedding, is not read by the update and lies"
        " beside it: it is in the estimate, and not in the other columns.",
        "",
        *memory_lines(compiled),
        "",
        "## Time of the learner",
        "",
        f"{sizes.text()} {BATCH} sequences. A step is the update of all sequences and making the"
        f" weights ready for the next forward, which merges the adapters; {options.repeats} of"
        " each, in turns; the ratio is the median of the ratios of neighbours. In every step all"
        f" {timed[0].tokens:,} response tokens were compared with the sampler's log-probs, and none"
        " was unequal.",
        "",
        *time_lines(timed),
    ]
    common.publish(lines, options, PAGE)


if __name__ == "__main__":
    main()
