"""The figures that are 1 or 0 by definition where trainer and rollout agree to the bit.

For tests, which emulate a device that rounds quotients, and for `scripts/gpu_check`, on a real one.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import corrections, metrics, schedules
from tim_jax.numerics import strict
from tim_jax.objectives import Objective

LARGEST = 4096
# n times the rounded 1 / n is below 1.
ROUNDED = [n for n in range(1, LARGEST + 1) if np.float32(n) * (np.float32(1) / np.float32(n)) != 1]
# Rows, tokens of a row, and so all tokens and numbers of experts: each of them is `ROUNDED`.
SHAPE = (41, 83)

# The column "exact" of docs/health.md: of the other metrics it is 0, or there is none.
ONES = {"exact_share", "mult_error", "ratio_mean", "ess_token", "ess_sequence", "prob_correlation"}
ONES |= {"ppl_ratio"}
ONES |= {f"ratio_{name}" for name in ("min", "max", "p01", "p25", "p50", "p75", "p99", "p999")}
FREE = {
    "tokens",
    "log_ppl_train",
    "log_ppl_rollout",
    "ppl_train",
    "ppl_rollout",
    "entropy_estimate",
}

CHAINS = {
    "token": corrections.chain(corrections.token_tis(), corrections.normalise()),
    "sequence": corrections.normalise("sequence", among="survivors"),
    "running": corrections.normalise_by_running_mean("sequence"),
    "mixed": corrections.ais(),
    "at the bound": corrections.reject("ratio", over="mean", lower=1.0, upper=1.0),
    "error": corrections.error_rejection(bound=1.0),
}


def deviating(wrap=lambda function: function, parts=None):
    """Returns how many figures were computed, and a line for each that is not what it should be.

    `wrap` changes every function before it is compiled; `parts` are some of `PARTS`.
    """
    log_probs = -np.random.default_rng(0).exponential(size=SHAPE).astype(np.float32)
    arguments = log_probs, np.ones(SHAPE, bool)
    number, wrong = 0, []
    for part in parts or PARTS:
        values = jax.jit(partial(part, wrap))(*arguments)
        for expected, figures in zip((1.0, 0.0), values, strict=True):
            number += len(figures)
            for name, value in jax.tree.map(np.asarray, figures).items():
                for bad in value[value != expected].ravel()[:1]:
                    wrong.append(f"{part.__name__}, {name}: {bad} for {expected}")
    return number, wrong


def of_every_size(wrap, *_):
    """Shares, means and effective sample sizes of 1 to `LARGEST` numbers."""

    def of_size(size):
        mask = jnp.arange(LARGEST) < size
        ones = {
            "share": strict.share(mask, mask),
            "mean": strict.mean(jnp.ones(mask.shape), mask),
            **{f"effective sample size of {x}": ess_of(x, mask) for x in (0.0, 0.7, -3.1, 25.0)},
        }
        return ones, {"share of none": strict.share(mask & ~mask, mask)}

    return jax.lax.map(wrap(of_size), jnp.arange(1, LARGEST + 1), batch_size=64)


def ess_of(log_weight, mask):
    return schedules.effective_sample_size(jnp.full(mask.shape, log_weight), mask)


def of_mismatch(wrap, log_probs, mask):
    found = wrap(lambda *x: metrics.mismatch_metrics(*x))(log_probs, log_probs, mask)
    zeros = {name: value for name, value in found.items() if name not in ONES | FREE}
    return {name: found[name] for name in ONES}, zeros


def of_corrections(wrap, log_probs, mask):
    def run(log_ratio, mask):
        return {
            n: corrections.correct(x, log_ratio=log_ratio, mask=mask) for n, x in CHAINS.items()
        }

    ones, zeros = {}, {}
    for name, found in wrap(run)(log_probs - log_probs, mask).items():
        ones |= {
            f"{name}: {figure}": found.metrics[figure] for figure in ("coefficient_mean", "ess")
        }
        ones[name] = found.coefficients
        zeros[name] = found.metrics["rejected_share"]
    return ones, zeros


def of_losses_and_routing(wrap, log_probs, mask):
    def run(log_probs, mask):
        ones, even = jnp.ones(mask.shape), jnp.full(mask.shape, 3, jnp.int32)
        losses = Objective().token_losses(log_probs, log_probs, ones, mask=mask)
        idle = metrics.routing_metrics(ones, ones, mask, even - 3)["idle_share"]
        return (
            metrics.loss_metrics(losses, mask),
            metrics.routing_metrics(ones, ones, mask, even),
            idle,
        )

    losses, routing, idle = wrap(run)(log_probs, mask)
    ones = {name: routing[name] for name in ("agreement", "load_max")} | {"idle_share": idle}
    ones |= {name: value for name, value in losses.items() if name.startswith("ppo_ratio")}
    zeros = {name: value for name, value in losses.items() if name not in ones}
    return ones, zeros | {"idle_share": routing["idle_share"]}


def of_steps(wrap, *_):
    """A step of `scale_by_root_ess` with the reference as its effective sample size."""

    def step(reference):
        def run(share):
            transform = schedules.scale_by_root_ess(reference=reference)
            state = transform.init(jnp.ones(2))
            return transform.update(jnp.ones(2), state, effective_sample_size=share)[0]

        return wrap(run)(jnp.float32(reference))

    return {str(reference): step(reference) for reference in (1.0, 0.55, 0.3)}, {}


PARTS = (of_every_size, of_mismatch, of_corrections, of_losses_and_routing, of_steps)
