"""Part 1: sampler against learner, raw bits of every response token, for each kernel family."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from records import Case
from setting import Setting

from tim_jax import auditing
from tim_jax.auditing.cases import plain_sampling
from tim_jax.model import fitting
from tim_jax.numerics import Numerics


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
        return Case(f"{label}: {case.name}", lambda: _compare(params, config, numerics, case, must))

    def _compare(params, config, numerics, case, must):
        fitted = setting.fitted(config, numerics)
        options = {"numerics": (fitted,), "cases": (case,), "sizes": sizes, "control": False}
        (result,) = auditing.audit(params, config, **options)
        values = {
            "tokens": result.compared_tokens,
            "unequal": result.unequal_tokens,
            "max diff": result.max_abs_diff,
            "kernels": ", ".join(fitting.kernels_used(config, fitted)) or "XLA",
        }
        return values | ({"passed": result.passed} if must else {})

    bf16, f32 = setting.exact("bfloat16"), setting.exact("float32")
    tuned = setting.exact("bfloat16", tuned=True)
    yield from (one("pallas_gpu bfloat16", bf16, case) for case in quick)
    yield from (one("pallas_gpu float32", f32, case) for case in quick)
    yield from (one("pallas_gpu bfloat16, tiles by rows", tuned, case) for case in quick[:3])
    yield _long_sequence(setting)
    for dtype in ("bfloat16", "float32"):
        native = setting.native(dtype)
        yield one(f"native {dtype} (control)", native, quick[0], must=False)
        if not setting.smoke:
            pinned = setting.native(dtype, pinned=True)
            yield from (
                one(f"native {dtype}, pinned options", pinned, c, must=False) for c in quick[:3]
            )
        yield from (one(f"tiles {dtype}", setting.tiles(dtype), case) for case in quick[:2])
    yield from (one("pallas_gpu bfloat16", bf16, case) for case in rest)
    yield from (one("pallas_gpu float32", f32, case) for case in rest)


def _long_sequence(setting: Setting) -> Case:
    """Prefill and decode of one sequence of 8,192 tokens against the learner's forward."""
    config = setting.small_model()
    sizes = auditing.Sizes(1, 1, 40, 8) if setting.smoke else auditing.Sizes(1, 1, 8000, 192)

    def run():
        params = jax.tree.map(jnp.asarray, auditing.random_params(config, 1))
        sampling = replace(plain_sampling(config, sizes), stop_tokens=())
        case = auditing.Case("long", sampling, auditing.Score())
        numerics = setting.fitted(config, setting.exact("bfloat16"))
        options = {"numerics": (numerics,), "cases": (case,), "sizes": sizes, "control": False}
        (result,) = auditing.audit(params, config, **options)
        return {
            "passed": result.passed,
            "tokens": result.compared_tokens,
            "unequal": result.unequal_tokens,
        }

    length = sizes.prompt_length + sizes.response_length
    return Case(f"pallas_gpu bfloat16: one sequence of {length:,} tokens", run)
