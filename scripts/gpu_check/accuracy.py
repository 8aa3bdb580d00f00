"""Log-probs against a float64 forward in NumPy, gradients against native float32, exact metrics."""

import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from records import Case
from setting import Setting, same_bits

from tim_jax.common.types import Rollout
from tim_jax.instruments import auditing
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.policy import scoring

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import neutral
import reference

_F32_ERROR, _F32_GRADIENT = 1e-4, 1e-3
_OVER_NATIVE = 1.25  # rounding to bfloat16 costs native numerics as much
_OVER_NATIVE_SMOKE = 2.5  # of 46 tokens, and a processor may keep float32 between operations


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("metrics without mismatch", _neutral_metrics)
    config = setting.small_model()
    length = 24 if setting.smoke else 128
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, length))
    rollout = _rollout(tokens)

    @cache
    def drawn():
        return jax.tree.map(jnp.asarray, auditing.random_params(config, 3))

    @cache
    def exact_values() -> np.ndarray:
        host = jax.device_get(drawn())
        return np.stack([reference.reference_log_probs(host, row, config) for row in tokens])

    @cache
    def computed(numerics: Numerics):
        """Log-probs, the gradient of their sum, and whether a second run gives the same bits."""
        numerics = setting.fitted(config, numerics)
        execution = Execution(config, numerics, Sampling(length - 1))

        def loss(params):
            weights = execution.prepare(params)
            log_probs = scoring.score(weights, rollout, execution=execution).log_probs
            return jnp.sum(log_probs), log_probs

        run = jit(jax.value_and_grad(loss, has_aux=True), numerics)
        ((_, log_probs), gradient), again = run(drawn()), run(drawn())
        same = map(same_bits, jax.tree.leaves(gradient), jax.tree.leaves(again[1]))
        flat = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(gradient)]
        return np.asarray(log_probs, np.float64), np.concatenate(flat), all(same)

    def check(numerics: Numerics):
        dtype = numerics.compute_dtype
        values, gradient, repeats = computed(numerics)
        error = np.abs(values - exact_values())
        native = computed(setting.native(dtype))[0]
        best = computed(setting.native("float32"))[1]
        own, theirs = error.mean(), np.abs(native - exact_values()).mean()
        slope = np.linalg.norm(gradient - best) / np.linalg.norm(best)
        good = own <= (_OVER_NATIVE_SMOKE if setting.smoke else _OVER_NATIVE) * theirs + 1e-7
        if dtype == "float32":
            good = error.max() < _F32_ERROR and slope < _F32_GRADIENT
        return {
            "passed": bool(good and np.isfinite(slope)),
            "mean error": float(own),
            "of native": float(theirs),
            "max error": float(error.max()),
            "gradient off by": float(slope),
            "same gradient twice": repeats,
        }

    for dtype in ("float32", "bfloat16"):
        yield Case(f"pallas_gpu {dtype}", partial(check, setting.exact(dtype)))
    if not setting.smoke:
        for dtype in ("float32", "bfloat16"):
            yield Case(f"tiles {dtype}", partial(check, setting.tiles(dtype)))


def _neutral_metrics():
    """A device may round the quotient n / n: what is 1 or 0 by definition must be so exactly."""
    number, wrong = neutral.deviating()
    return {"passed": not wrong, "figures": number, "not exact": "; ".join(wrong) or "none"}


def _rollout(tokens: np.ndarray) -> Rollout:
    """Prompts of one token, responses of all the others."""
    rows, length = tokens.shape
    return Rollout(
        prompts=jnp.asarray(tokens[:, :1], jnp.int32),
        prompt_lengths=jnp.ones((rows,), jnp.int32),
        responses=jnp.asarray(tokens[:, 1:], jnp.int32),
        lengths=jnp.full((rows,), length - 1, jnp.int32),
        log_probs=jnp.zeros((rows, length - 1)),
        finished=jnp.ones((rows,), bool),
    )
