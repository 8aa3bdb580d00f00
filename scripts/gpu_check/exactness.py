"""Part 1: sampler against learner, raw bits of every response token, for each kernel family."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from records import Case
from setting import Setting

from tim_jax.common.types import Rollout
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing.cases import plain_sampling
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.policy import scoring


@dataclass(frozen=True)
class Side:
    """A model under the audit's cases, by the kernels of some numerics."""

    setting: Setting
    label: str
    config: ModelConfig
    numerics: Numerics
    must: bool = True  # be exact; if not, it is for information

    @property
    def sizes(self) -> auditing.Sizes:
        return auditing.Sizes(2, 2, 6, 8) if self.setting.smoke else auditing.Sizes(8, 8, 100, 160)

    def cases(self, first: int = 0, stop: int | None = None) -> Iterator[Case]:
        """The audit's standard cases from `first` to `stop`, which share a sampler."""
        for case in auditing.standard_cases(self.config, self.sizes)[first:stop]:
            yield Case(f"{self.label}: {case.name}", partial(self._run, case), group=self.label)

    def _run(self, case: auditing.Case) -> dict[str, Any]:
        params = _params(self.config)
        found = _compare(
            self.setting, params, self.config, self.numerics, case=case, sizes=self.sizes
        )
        return found if self.must else {k: v for k, v in found.items() if k != "passed"}


@lru_cache(maxsize=2)
def _params(config: ModelConfig):
    return jax.tree.map(jnp.asarray, auditing.random_params(config, 0))


def cases(setting: Setting) -> Iterator[Case]:
    """What must be exact, the most important first: dense models, then the other families."""
    side = partial(Side, setting)
    config, families = setting.small_model(), setting.families()
    bf16, f32 = setting.exact("bfloat16"), setting.exact("float32")
    tuned = setting.exact("bfloat16", tuned=True)
    quick, few = (1, 1) if setting.smoke else (5, 3)
    yield from side("pallas_gpu bfloat16", config, bf16).cases(stop=quick)
    yield from side("pallas_gpu bfloat16, several tiles", config, tuned).cases(stop=few)
    yield from side("pallas_gpu float32", config, f32).cases(stop=quick)
    yield from _of_mosaic(setting, few)
    yield _long_sequence(setting)
    yield from (_repeated_gradient(setting, dtype) for dtype in ("bfloat16", "float32"))
    for name, family in families.items():
        yield from side(f"pallas_gpu bfloat16, {name}", family, bf16).cases(stop=few)
        if setting.smoke:
            return  # one of them: interpreted kernels compile slowly
    for name, family in families.items():
        label = f"pallas_gpu bfloat16, several tiles, {name}"
        yield from side(label, family, tuned).cases(stop=few)
        yield from side(f"pallas_gpu float32, {name}", family, f32).cases(stop=few)
    yield from side("pallas_gpu bfloat16", config, bf16).cases(first=quick)
    yield from side("pallas_gpu float32", config, f32).cases(first=quick)
    mixture = families["Qwen3-MoE"]
    yield from side("pallas_gpu bfloat16, Qwen3-MoE", mixture, bf16).cases(few)


def controls(setting: Setting) -> Iterator[Case]:
    """Plain XLA, of which nothing is promised: that the comparison can fail, and what pins it."""
    config = setting.small_model()
    count = 1 if setting.smoke else 2
    for dtype in ("bfloat16", "float32"):
        native = setting.native(dtype)
        yield from Side(setting, f"native {dtype} (control)", config, native, must=False).cases(
            stop=1
        )
    for dtype in ("bfloat16", "float32"):
        if not setting.smoke:
            pinned = setting.native(dtype, pinned=True)
            label = f"native {dtype}, pinned options"
            yield from Side(setting, label, config, pinned, must=False).cases(stop=3)
        # XLA's products on a GPU are chosen by time: nothing is promised of their bits.
        tiles = setting.tiles(dtype)
        yield from Side(setting, f"tiles {dtype}", config, tiles, must=setting.smoke).cases(
            stop=count
        )


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


def _of_mosaic(setting: Setting, count: int) -> Iterator[Case]:
    label = "pallas_mosaic_gpu bfloat16"
    if setting.without_mosaic:
        yield Case(label, lambda: {"left out": setting.without_mosaic})
        return
    config = setting.mosaic_model()
    yield from Side(setting, label, config, setting.mosaic()).cases(stop=count)
    if not setting.smoke:
        several = setting.mosaic(tuned=True)
        yield from Side(setting, f"{label}, several tiles", config, several).cases(stop=1)


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
