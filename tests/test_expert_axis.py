"""Experts on a mesh axis: the bits of one device, gradients, lockstep, what is refused."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import objectives, optimizers, placement
from tim_jax.model.execution import Batching, Execution
from tim_jax.placement import SINGLE, Placement
from tim_jax.policy import scoring
from tim_jax.rl import programs, sharded
from tim_jax.rl.types import Learning

CONFIG = replace(
    tiny.UNTIED,
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)
PROMPTS = 4
ROWS = PROMPTS * tiny.GROUP


def execution(where=SINGLE, config=CONFIG, numerics=tiny.NUMERICS, **options):
    return Execution(config, numerics, tiny.SAMPLING, where, **options)


@cache
def weights(what: Execution):
    run = programs.build(what, Learning(objectives.rloo(), tiny.GROUP), optimizers.adamw(optimizers.Rate(1e-2)))
    return run.prepare(tiny.params(what.config))


@cache
def drawn(what: Execution, batching=Batching()):
    run = programs.sampling_program(what, samples=tiny.GROUP, batching=batching)
    return jax.device_get(run(weights(what), tiny.prompts(count=PROMPTS), jax.random.key(0)))


@pytest.mark.parametrize("where", [Placement(expert=2), Placement(expert=4), Placement(expert=8), Placement(data=2, expert=2), Placement(fsdp=2, expert=2, decode="sharded")], ids=str)
def test_x(where):
    a, b = drawn(execution()), drawn(execution(where))
    assert a.lengths.sum() > 50
    print(a.lengths)
    assert tiny.bits(a) == tiny.bits(b)
