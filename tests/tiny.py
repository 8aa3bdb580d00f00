"""A model that compiles in a moment, and rollouts of ragged lengths drawn from it."""

import logging
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import objectives
from tim_jax.common.types import Prompts, Rollout
from tim_jax.instruments.auditing import random_params
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import ALL_AT_ONCE, Execution, Sampling
from tim_jax.numerics import Numerics, Rows
from tim_jax.policy import scoring
from tim_jax.rl import programs
from tim_jax.rl.types import Learning, Policy

CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=23,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_positions=64,
    tied_embeddings=True,
    qk_norm=True,
)
UNTIED = replace(CONFIG, tied_embeddings=False)
MIXTURE = replace(
    UNTIED,
    model_type="qwen3_moe",
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)
NUMERICS = Numerics(rows=Rows(8, 8), attention_rows=Rows(8, 8), kv_block=16, head_rows=16)
BF16 = replace(NUMERICS, compute_dtype="bfloat16")
F16 = replace(NUMERICS, compute_dtype="float16")
SAMPLING = Sampling(max_tokens=10, stop_tokens=(3, 5))
EXECUTION = Execution(CONFIG, NUMERICS, SAMPLING)
GROUP = 4
PROMPTS = 3
ROWS = PROMPTS * GROUP
LEARNING = Learning(objectives.grpo(), GROUP)

# A run that compiles in a moment, on up to four devices.
RUN = """
steps = 2

[model.architecture]
hidden_size = 16
num_layers = 2
num_heads = 2
num_kv_heads = 2
head_dim = 8
intermediate_size = 24
max_positions = 24

[sampling]
samples = 4
max_prompt_length = 8
max_tokens = 8

[learner]
prompts_per_step = 2

[task]
kind = "builtin"
name = "running_sums"
parameters = { digits = [1, 3], eval_size = 16 }

[warmup]
steps = 2
batch = 4

[eval]
every = 2
prompts = 5
"""


@cache
def params(config=CONFIG, seed=0):
    """Master weights, JAX arrays; not to be donated."""
    return jax.tree.map(jnp.asarray, random_params(config, seed))


def moved(tree, scale=0.03, seed=1):
    """Parameters a little way off."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + scale * jnp.asarray(rng.standard_normal(x.shape, np.float32)), tree
    )


def prompts(seed=0, count=PROMPTS):
    """Prompts of 1 to 6 tokens."""
    rng = np.random.default_rng(seed)
    return Prompts(
        tokens=jnp.asarray(rng.integers(0, CONFIG.vocab_size, (count, 6)), jnp.int32),
        lengths=jnp.asarray(rng.permutation(6)[:count] + 1, jnp.int32),
        ids=jnp.asarray(rng.permutation(100)[:count], jnp.int32),
    )


@cache
def weights(execution=EXECUTION):
    """Compute weights of `params(execution.config)`."""
    return jax.jit(execution.prepare)(params(execution.config))


@cache
def rollout(execution=EXECUTION, seed=0, batching=ALL_AT_ONCE) -> Rollout:
    """`ROWS` sequences of `weights(execution)`, in groups of `GROUP`."""
    program = programs.sampling_program(execution, samples=GROUP, batching=batching)
    return program(weights(execution), prompts(), jax.random.key(seed))


@cache
def learner(execution=EXECUTION):
    """(weights, rollout) -> log-probs as they are inside a program that takes their gradient."""

    @jax.jit
    def learn(weights, rollout):
        def loss(weights):
            log_probs = scoring.score(weights, rollout, execution=execution).log_probs
            return jnp.sum(jnp.where(rollout.mask, jnp.exp(log_probs), 0.0)), log_probs

        return jax.grad(loss, has_aux=True)(weights)

    # The program returns the gradient too: XLA leaves out what nobody asks for.
    return lambda weights, rollout: learn(weights, rollout)[1]


@cache
def policy(execution=EXECUTION, learning=LEARNING) -> Policy:
    """What the learner takes: the policy that an execution computes, on its mesh."""
    return programs.policy(execution, learning)


def rewards(seed=0, rows=ROWS):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(rows), jnp.float32)


def bits(tree):
    """Every array's bytes, for comparisons of trees."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def check_near(found, expected, share, *, rtol=0.0):
    """Asserts that leaves differ by at most this share of the largest number that is in theirs."""
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        largest = np.abs(theirs).max()
        assert largest > 0
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=share * largest)


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@contextmanager
def compilations():
    """A counter of what XLA compiles inside: program name -> times."""
    counted, messages = Counter(), _Messages()
    logger = logging.getLogger("jax")
    logger.addHandler(messages)
    try:
        with jax.log_compiles():
            yield counted
    finally:
        logger.removeHandler(messages)
        for text in messages.texts:
            if found := re.match(r"Finished XLA compilation of (?:jit\()?(\w+)", text):
                counted[found[1]] += 1


def varied(run, **changes):
    """The programs with another value for what the loop and the draws read of their training."""
    return replace(run, training=run.training.varied(**changes))
