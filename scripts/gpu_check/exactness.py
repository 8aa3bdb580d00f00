"""Part 1: sampler against learner, raw bits of every response token, for each kernel family."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from records import Case
from setting import Setting

from tim_jax import auditing
from tim_jax.auditing.cases import plain_sampling
from tim_jax.model import fitting
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.policy import scoring
from tim_jax.types import Rollout


def cases(setting: Setting) -> Iterator[Case]:
    """The most important first: time may run out."""
    config = setting.small_model()
    sizes = auditing.Sizes(2, 2, 6, 8) if setting.smoke else auditing.Sizes(8, 8, 100, 160)
    params = jax.tree.map(jnp.asarray, auditing.random_params(config, 0))
    standard = auditing.standard_cases(config, sizes)
    quick = auditing.standard_cases(config, sizes, quick=True)
    rest = tuple(case for case in standard if case not in quick)
    if setting.smoke:
        quick, rest = quick[:1], quick[3:4]

    def one(label: str, numerics: Numerics, case: auditing.Case, *, must: bool = True) -> Case:
        def run():
            values = _compare(setting, params, config, numerics, case=case, sizes=sizes)
            return values if must else {k: v for k, v in values.items() if k != "passed"}

        return Case(f"{label}: {case.name}", run)

    bf16, f32 = setting.exact("bfloat16"), setting.exact("float32")
    tuned = setting.exact("bfloat16", tuned=True)
    yield from (one("pallas_gpu bfloat16", bf16, case) for case in quick)
    yield from (one("pallas_gpu float32", f32, case) for case in quick)
    yield from (one("pallas_gpu bfloat16, several tiles", tuned, case) for case in quick[:3])
    yield from _of_mosaic(setting, sizes, quick[:2])
    yield _long_sequence(setting)
    yield from (_repeated_gradient(setting, dtype) for dtype in ("bfloat16", "float32"))
    for dtype in ("bfloat16", "float32"):
        native = setting.native(dtype)
        yield one(f"native {dtype} (control)", native, quick[0], must=False)
        if not setting.smoke:
            pinned = setting.native(dtype, pinned=True)
            yield from (
                one(f"native {dtype}, pinned options", pinned, c, must=False) for c in quick[:3]
            )
        # XLA's products on a GPU are chosen by time: nothing is promised of their bits.
        tiles = setting.tiles(dtype)
        yield from (one(f"tiles {dtype}", tiles, case, must=setting.smoke) for case in quick[:2])
    yield from (one("pallas_gpu bfloat16", bf16, case) for case in rest)
    yield from (one("pallas_gpu float32", f32, case) for case in rest)


def _compare(setting: Setting, params, config, numerics, *, case, sizes):
    fitted = setting.fitted(config, numerics)
    options = {"numerics": (fitted,), "cases": (case,), "sizes": sizes, "control": False}
    (result,) = auditing.audit(params, config, **options)
    return {
        "tokens": result.compared_tokens,
        "unequal": result.unequal_tokens,
        "max diff": result.max_abs_diff,
        "kernels": ", ".join(fitting.kernels_used(config, fitted)) or "XLA",
        "passed": result.passed,
    }


def _of_mosaic(setting: Setting, sizes: auditing.Sizes, cases) -> Iterator[Case]:
    label = "pallas_mosaic_gpu bfloat16"
    if setting.without_mosaic:
        yield Case(label, lambda: {"left out": setting.without_mosaic})
        return
    config = setting.mosaic_model()
    params = jax.tree.map(jnp.asarray, auditing.random_params(config, 0))
    for case in cases:
        run = partial(_compare, setting, params, config, case=case, sizes=sizes)
        yield Case(f"{label}: {case.name}", partial(run, setting.mosaic()))
    if not setting.smoke:
        several = partial(_compare, setting, params, config, case=cases[0], sizes=sizes)
        name = f"{label}, several tiles: {cases[0].name}"
        yield Case(name, partial(several, setting.mosaic(tuned=True)))


def _long_sequence(setting: Setting) -> Case:
    """Prefill and decode of one sequence of 8,192 tokens against the learner's forward."""
    config = setting.small_model()
    sizes = auditing.Sizes(1, 1, 40, 8) if setting.smoke else auditing.Sizes(1, 1, 8000, 192)

    def run():
        params = jax.tree.map(jnp.asarray, auditing.random_params(config, 1))
        sampling = replace(plain_sampling(config, sizes), stop_tokens=())
        case = auditing.Case("long", sampling, auditing.Score())
        exact = setting.exact("bfloat16")
        return _compare(setting, params, config, exact, case=case, sizes=sizes)

    length = sizes.prompt_length + sizes.response_length
    return Case(f"pallas_gpu bfloat16: one sequence of {length:,} tokens", run)


def _repeated_gradient(setting: Setting, dtype: str) -> Case:
    """The same gradient five times: every number of it must have the same bits every time."""
    config = setting.small_model()
    prompts, length = (2, 8) if setting.smoke else (32, 160)
    numerics = setting.fitted(config, setting.exact(dtype))
    execution = Execution(config, numerics, Sampling(length))

    def gradient(weights, rollout):
        def loss(weights):
            log_probs = scoring.score(weights, rollout, execution=execution).log_probs
            return jnp.sum(jnp.where(rollout.mask, log_probs, 0.0))

        return jax.grad(loss)(weights)

    def run():
        weights = jax.jit(execution.prepare)(auditing.random_params(config, 2))
        tokens = jax.random.randint(jax.random.key(0), (prompts, 2 * length), 1, 99)
        whole = jnp.full((prompts,), length, jnp.int32)
        rollout = Rollout(
            prompts=tokens[:, :length],
            prompt_lengths=whole,
            responses=tokens[:, length:],
            lengths=whole,
            log_probs=jnp.zeros((prompts, length)),
            finished=jnp.ones(prompts, bool),
        )
        step = jit(gradient, numerics)
        first, *again = (jax.device_get(step(weights, rollout)) for _ in range(5))
        pairs = [zip(*map(jax.tree.leaves, (first, other)), strict=True) for other in again]
        unequal = sum(int((bits(a) != bits(b)).sum()) for pair in pairs for a, b in pair)
        count = sum(leaf.size for leaf in jax.tree.leaves(first))
        nonzero = sum(int((leaf != 0).sum()) for leaf in jax.tree.leaves(first))
        passed = unequal == 0 and nonzero > count // 2
        return {"passed": passed, "numbers": count, "not zero": nonzero, "unequal": unequal}

    return Case(f"pallas_gpu {dtype}: one gradient, five times", run)


def bits(x: np.ndarray) -> np.ndarray:
    """The raw bits of an array of floating point numbers."""
    return np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)
