"""Rollouts of the tiny model as another system would have recorded them, and their diagnosis."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import tiny

from tim_jax.instruments.diagnosis import evidence, readers, verdict
from tim_jax.instruments.diagnosis.declared import PLAIN
from tim_jax.instruments.diagnosis.evidence import Forward
from tim_jax.instruments.diagnosis.rollouts import Limits, collect
from tim_jax.model.execution import Execution
from tim_jax.rl.programs import sampling_program

STOPS = tiny.SAMPLING.stop_tokens
LIMITS = Limits(tiny.CONFIG.vocab_size, tiny.CONFIG.max_positions)
SAMPLES = 32


@cache
def weights():
    return jax.jit(tiny.EXECUTION.prepare)(tiny.params())


@cache
def sampled(temperature=1.0, top_k=0):
    """Rows of 96 responses, some 700 tokens."""
    sampling = replace(tiny.SAMPLING, temperature=temperature, top_k=top_k)
    program = sampling_program(Execution(tiny.CONFIG, tiny.NUMERICS, sampling), samples=SAMPLES)
    found = jax.device_get(program(weights(), tiny.prompts(), jax.random.key(3)))
    return [
        {
            "prompt_token_ids": found.prompts[i, : found.prompt_lengths[i]].tolist(),
            "response_token_ids": found.responses[i, :length].tolist(),
            "logprobs": found.log_probs[i, :length].tolist(),
            "finish_reason": "stop" if found.finished[i] else "length",
        }
        for i, length in enumerate(found.lengths)
    ]


def forward():
    return Forward(weights(), tiny.EXECUTION, tiny.CONFIG.vocab_size, STOPS)


def diagnosed(rows, sources=(), default=PLAIN, **options):
    found = collect(readers.read(rows), limits=LIMITS, default=default)
    return verdict.diagnose(found.responses, forward(), sources=sources, **options)


def best_of(found: verdict.Verdict) -> verdict.Judged:
    """The explanation that is taken, which there is."""
    assert found.best is not None
    return found.best


def with_log_probs(rows, change):
    """The rows with `change(log-probs f64[n])` in place of their log-probs."""
    changed = [np.minimum(change(np.asarray(row["logprobs"])), 0.0).tolist() for row in rows]
    return [row | {"logprobs": x} for row, x in zip(rows, changed, strict=True)]


def exact_log_probs(rows):
    """Those of each row's tokens by the exact forward, f32[n] each."""
    found = collect(readers.read(rows), limits=LIMITS).responses
    exact = evidence.gather(forward(), found).exact
    return np.split(exact, np.cumsum([len(r) for r in found])[:-1])
