"""The constants of a bound on how far mismatch can turn the gradient.

They are those of Theorem 3.1 of Beyond Precision (arXiv 2602.01826). For rewards in [0, 1] the
gradient under a sampler mu differs from that under the policy pi by at most 2 B D T^2: T is the
longest response, B the largest norm of a token's score, and D the largest total variation between
the two distributions of a next token. The largest over all states cannot be measured; taken here
are the largest over states that were visited.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.types import Rollout
from tim_jax.instruments.study.gradient import Measuring
from tim_jax.mismatch import Mismatch
from tim_jax.model import transformer
from tim_jax.model.execution import Execution, jit
from tim_jax.model.weights import Weights
from tim_jax.policy import layout, scoring


def constants(measuring: Measuring, dial: Mismatch, *, states: int) -> dict[str, float]:
    """T, B, D, the mean total variation, and the bound, on the first batch of the exact sampler.

    A sampler that adds noise to logits has another distribution at every draw; for those D is
    left out, as is the bound.
    """
    bench = measuring.bench
    rollout = measuring.rollouts(Mismatch(), 1)
    scores = score_norms(bench.weights, bench.params, rollout, bench.execution, states=states)
    longest = int(np.max(np.asarray(rollout.lengths)))
    measured = {"longest": float(longest), "score_norm": float(np.max(scores))}
    if any(entry.no_control or entry.only_reports for entry in dial.active):
        return measured
    other = replace(bench.execution, numerics=dial.numerics(bench.execution.numerics))
    edited = jax.jit(dial.weights)(bench.weights)
    varied = total_variation(bench.weights, edited, rollout, bench.execution, other)
    largest, mean = float(np.max(varied)), float(np.mean(varied))
    bound = 2.0 * measured["score_norm"] * largest * longest**2
    return measured | {"variation_largest": largest, "variation_mean": mean, "bound": bound}


def total_variation(
    weights: Weights, edited: Weights, rollout: Rollout, execution: Execution, other: Execution
) -> np.ndarray:
    """f32[N], half the L1 distance of the two next-token distributions at N visited states."""
    # Sequence by sequence, because a whole batch's distributions are large: R V numbers each.
    policies = [
        (jit(lambda w, r, e=e: _distributions(w, r, e), e.numerics), w)
        for w, e in ((weights, execution), (edited, other))
    ]
    distances = []
    for index in range(rollout.mask.shape[0]):
        sequence = jax.tree.map(lambda leaf, i=index: leaf[i : i + 1], rollout)
        one, two = (np.asarray(distribution(w, sequence)) for distribution, w in policies)
        distances.append(0.5 * np.abs(one - two).sum(axis=-1))
    return np.concatenate(distances)[np.asarray(rollout.mask)]


def _distributions(weights: Weights, rollout: Rollout, execution: Execution) -> jax.Array:
    """f32[B, R, V], of every response token, at the execution's temperature, not truncated."""
    tokens = layout.sequences(rollout)
    rows, size = rollout.responses.shape
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden, _, _ = transformer.forward(weights, tokens, positions, execution=execution)
    index = rollout.prompt_lengths[:, None] - 1 + jnp.arange(size)[None, :]
    before = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    logits = transformer.logits(weights, before.reshape(rows * size, -1), execution=execution)
    return jax.nn.softmax(logits / execution.sampling.temperature).reshape(rows, size, -1)


def score_norms(
    weights: Weights, params: Any, rollout: Rollout, execution: Execution, *, states: int
) -> np.ndarray:
    """f32[`states`], norms of the gradient of a token's log-prob, at states spread over a batch."""
    at = np.argwhere(np.asarray(rollout.mask))
    chosen = at[np.linspace(0, len(at) - 1, min(states, len(at))).astype(int)]

    def log_prob(params, row, column):
        one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), rollout)
        scores = scoring.score(execution.prepare(params), one, execution=execution)
        return scores.log_probs[0, column]

    def norm(place):
        gradient = jax.grad(log_prob)(params, place[0], place[1])
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]
        return jnp.sqrt(sum(squares, start=jnp.float32(0.0)))

    each = jit(lambda places: jax.lax.map(norm, places), execution.numerics)
    return np.asarray(each(jnp.asarray(chosen, jnp.int32)))
