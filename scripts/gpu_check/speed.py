"""Part 4: ceilings of this device, then sampler, learner and whole GRPO steps against them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from records import Case
from setting import Setting, device_params, normal, parameters, seconds

from tim_jax import objectives
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.rl import programs
from tim_jax.rl.types import Experience, Learning, TrainState
from tim_jax.types import Prompts, Rollout

_GROUP = 8
_PARTS = ("sampling", "learning")


@dataclass(frozen=True)
class Amounts:
    """How much is sampled and learnt from."""

    batches: tuple[int, ...]
    prompt: int
    new: int
    train: tuple[int, int]  # sequences, tokens of each
    step: tuple[int, int, int]  # prompts, response tokens, micro-batch of a GRPO step


FULL = Amounts((64, 256, 16, 1), 64, 1024, (4, 4096), (16, 448, 16))
SMOKE = Amounts((2,), 4, 6, (2, 12), (1, 6, 4))


def cases(setting: Setting) -> Iterator[Case]:
    amounts = SMOKE if setting.smoke else FULL
    yield Case("ceiling: copy", lambda: {"TB/s": copy_rate(setting.smoke) / 1e12})
    yield Case("ceiling: bfloat16 matmul", lambda: {"TF/s": matmul_rate(setting.smoke) / 1e12})
    sides = {
        "exact": setting.exact("bfloat16", tuned=True),
        "native": setting.native("bfloat16"),
    }
    for name in ("1.7B",) if setting.smoke else ("1.7B", "0.6B"):
        config = setting.model(name)
        first, *others = amounts.batches
        for batch in (first,):
            yield from _samplers(setting, name, config, sides, amounts, batch)
        for side, numerics in sides.items():
            run = partial(_learner, setting, config, numerics, amounts)
            yield Case(f"learner {name} {side}, {_times(amounts.train)} tokens", run)
        yield Case(
            f"GRPO step {name}, {amounts.step[0]} x {_GROUP} sequences of"
            f" {amounts.prompt + amounts.step[1]} tokens",
            partial(_grpo, setting, config, sides, amounts),
        )
        for batch in others:
            yield from _samplers(setting, name, config, sides, amounts, batch)
    if not setting.smoke:
        config, one = setting.model("1.7B"), {"exact, one tile": setting.exact("bfloat16")}
        yield from _samplers(setting, "1.7B", config, one, amounts, 64)
        if not setting.without_mosaic:
            name, numerics = "exact, Mosaic's products", setting.mosaic(tuned=True)
            yield from _samplers(setting, "1.7B", config, {name: numerics}, amounts, 64)
            run = partial(_learner, setting, config, numerics, amounts)
            yield Case(f"learner 1.7B {name}, {_times(amounts.train)} tokens", run)


def _times(pair: tuple[int, int]) -> str:
    return f"{pair[0]} x {pair[1]:,}"


@cache
def copy_rate(smoke: bool) -> float:
    """Bytes per second, read and written, of a large elementwise operation."""
    count = 2**16 if smoke else 2**30
    x = jnp.zeros((count,), jnp.bfloat16)
    return 4 * count / seconds(partial(jax.jit(lambda x: x + 1), x))


@cache
def matmul_rate(smoke: bool) -> float:
    """Operations per second of a large bfloat16 product by XLA, random data."""
    size = 64 if smoke else 8192
    a, b = normal(0, size, size, dtype=jnp.bfloat16), normal(1, size, size, dtype=jnp.bfloat16)
    return 2 * size**3 / seconds(partial(jax.jit(jnp.dot), a, b))


def _execution(setting: Setting, config: ModelConfig, numerics: Numerics, new: int) -> Execution:
    return Execution(config, setting.fitted(config, numerics), Sampling(new))


def _prompts(config: ModelConfig, count: int, length: int) -> Prompts:
    return Prompts(
        tokens=jax.random.randint(jax.random.key(1), (count, length), 0, config.vocab_size),
        lengths=jnp.full((count,), length, jnp.int32),
        ids=jnp.arange(count, dtype=jnp.int32),
    )


def _weights(execution: Execution):
    """Compute weights; the masters are let go."""
    return jit(execution.prepare, execution.numerics)(
        device_params(jax.random.key(0), execution.config)
    )


def _samplers(setting, name, config, sides, amounts: Amounts, batch: int) -> Iterator[Case]:
    for side, numerics in sides.items():
        run = partial(_sampler, setting, config, numerics, amounts, batch)
        yield Case(f"sampler {name} {side}, batch {batch}, {amounts.new:,} new tokens", run)


def _sampler(setting, config, numerics, amounts: Amounts, batch: int):
    execution = _execution(setting, config, numerics, amounts.new)
    program = programs.sampling_program(execution, samples=1)
    prompts = _prompts(config, batch, amounts.prompt)
    call = partial(program, _weights(execution), prompts, jax.random.key(2))
    first, took = _timed(call), _timed(call)
    step = took / amounts.new
    bound = _decode_bound(setting, config, batch, amounts)
    return {
        "tokens/s": batch / step,
        "ms/step": step * 1e3,
        "share of memory roofline": bound / step,
        "first call, s": first,
    }


def _decode_bound(setting, config: ModelConfig, batch: int, amounts: Amounts) -> float:
    """Seconds that a step must take: weights and cache read once, or the products' operations."""
    kept = 4 * config.num_layers * config.num_kv_heads * config.head_dim  # bytes, keys and values
    cached = batch * (amounts.prompt + amounts.new / 2) * kept
    moved = (2 * parameters(config) + cached) / copy_rate(setting.smoke)
    return max(moved, 2 * parameters(config) * batch / matmul_rate(setting.smoke))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _training(
    execution: Execution, micro_batch: int | None
) -> tuple[programs.Programs, TrainState]:
    learning = Learning(
        objectives.grpo(kl_coefficient=0.0), group_size=_GROUP, micro_batch=micro_batch
    )
    optimizer = optax.with_extra_args_support(optax.adamw(1e-6))
    built = programs.build(execution, learning, optimizer)
    return built, built.init(device_params(jax.random.key(0), execution.config))


def _learner(setting, config, numerics, amounts: Amounts):
    """One update: forward, backward, AdamW. Model operations are 6 per weight and token."""
    rows, length = amounts.train
    new = length - amounts.prompt
    execution = _execution(setting, config, numerics, new)
    built, state = _training(execution, micro_batch=1 if rows > 1 else None)
    batch = _experience(config, rows, amounts.prompt, new)
    weights = built.prepare(state.params)

    def update(state, weights):
        return built.update(state, weights, batch, jnp.int32(0), jnp.float32(new))[:2]

    state, weights = jax.block_until_ready(update(state, weights))
    start = time.perf_counter()
    jax.block_until_ready(update(state, weights))
    took = time.perf_counter() - start
    done = 6 * parameters(config) * rows * length / took
    return {
        "tokens/s": rows * length / took,
        "share of matmul peak": done / matmul_rate(setting.smoke),
    }


def _experience(config: ModelConfig, rows: int, prompt: int, new: int) -> Experience:
    draw = partial(jax.random.randint, minval=0, maxval=config.vocab_size)
    rollout = Rollout(
        prompts=draw(jax.random.key(3), (rows, prompt)),
        prompt_lengths=jnp.full((rows,), prompt, jnp.int32),
        responses=draw(jax.random.key(4), (rows, new)),
        lengths=jnp.full((rows,), new, jnp.int32),
        log_probs=jnp.full((rows, new), -10.0),
        finished=jnp.ones((rows,), bool),
    )
    return Experience(
        rollout=rollout,
        advantages=normal(5, rows),
        mask=rollout.mask,
        old_log_probs=rollout.log_probs,
        coefficients=jnp.ones((rows, new)),
        kept=rollout.mask,
    )


def _grpo(setting, config, sides, amounts: Amounts):
    """Sampling, advantages, update: the whole step, exact over native.

    What the exact side found is kept if the native one cannot run.
    """
    found = _whole_step(setting, config, sides["exact"], amounts)
    values = {f"exact: {name}": value for name, value in found.items()}
    values["passed"] = found["unequal"] == 0 < found["compared"]
    try:
        native = _whole_step(setting, config, sides["native"], amounts)
    except Exception as error:  # such as too little memory
        return {**values, "native": f"{type(error).__name__}: {str(error)[:200]}"}
    values |= {f"native: {name}": value for name, value in native.items()}
    spent = [sum(side[f"s {part}"] for part in _PARTS) for side in (found, native)]
    return {**values, "exact over native": spent[0] / spent[1]}


def _whole_step(setting, config, numerics, amounts: Amounts) -> dict[str, Any]:
    prompts_count, new, micro_batch = amounts.step
    execution = _execution(setting, config, numerics, new)
    built, state = _training(execution, micro_batch)
    prompts = _prompts(config, prompts_count, amounts.prompt)
    rewards = normal(6, prompts_count * _GROUP)
    weights = built.prepare(state.params)
    found: dict[str, Any] = {}
    for number in range(2):  # the first compiles
        start = time.perf_counter()
        rollout = jax.block_until_ready(built.sample(weights, prompts, jax.random.key(number)))
        sampled = time.perf_counter()
        batch = built.experience(weights, None, state.carried, rollout, rewards).experience
        state, weights, report = built.update(state, weights, batch, jnp.int32(0), jnp.float32(new))
        jax.block_until_ready(weights)
        took = sampled - start, time.perf_counter() - sampled
        found = {f"s {part}": value for part, value in zip(_PARTS, took, strict=True)}
        found["unequal"] = int(report.exactness.unequal)
        found["compared"] = int(report.exactness.compared)
    return found
