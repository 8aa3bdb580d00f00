"""Every public function of arrays, in every float dtype: what it computes with, and its values.

The quick tests look at the programs of two dtypes: no sum, product or function of 16 bits, none of
float32 where an array is float64, none of float64 elsewhere. The slow ones look at the other two,
and at values, against float64's.
Those of the batches are numbers that bfloat16 has, so that all dtypes are given the same ones.
"""

import importlib
import inspect
import math
import pkgutil
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quick
from ml_dtypes import bfloat16

import tim_jax
from tim_jax import corrections, metrics, schedules
from tim_jax.corrections import applying, base, ratios
from tim_jax.model.execution import Sampling
from tim_jax.numerics import Numerics
from tim_jax.objectives import (
    KL,
    PRESETS,
    Objective,
    TokenLosses,
    kl_estimate,
    losses,
    objective,
)
from tim_jax.objectives.advantages import (
    GROUP_BASELINES,
    AdaptiveKL,
    advantages,
    informative_groups,
    kl_penalty,
    needs,
    overlong_penalty,
)
from tim_jax.policy import distribution

ROOMS = ("corrections", "metrics", "objectives", "schedules", "policy")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SHAPES = {"usual": (4, 6), "one row": (1, 6), "one token": (2, 1)}
SMALL = ("one row", "one token")
KINDS = ("usual", "empty", "rejected", "infinities", *SMALL)
SAMPLING = Sampling(temperature=0.75, top_k=5, top_p=0.9)
NUMERICS = Numerics()


def batch(kind):
    """Arrays of one batch, of float64 values that bfloat16 and float16 have too."""
    rows, width = shape = SHAPES.get(kind, SHAPES["usual"])
    rng = np.random.default_rng(KINDS.index(kind))
    lengths = np.maximum(rng.integers(1, width + 1, rows), 1)
    lengths[0] = width
    difference = np.full(shape, 4.0) if kind == "rejected" else rng.normal(0, 0.25, shape)
    train = -rng.exponential(1.0, shape) - 0.125
    found = {
        "mask": np.arange(width)[None, :] < lengths[:, None],
        "train": train,
        "rollout": train - difference,
        "log_ratio": difference,
        "advantages": rng.normal(size=shape),
        "rewards": rng.integers(0, 3, rows) + rng.normal(0, 0.125, rows),
        "greedy_rewards": rng.normal(size=max(rows // 2, 1)),
        "energies": rng.uniform(0.125, 1.5, shape),
        "coefficients": rng.uniform(0.5, 2.0, shape),
        "logits": rng.normal(0, 2, (rows, 20)),
        "scalar": np.array(0.4375),
        "length": np.array(28.0),
    }
    found["divergence"] = np.abs(difference)
    found["distribution"] = found["logits"] - np.log(np.exp(found["logits"]).sum(1, keepdims=True))
    found["weights"] = np.exp(found["logits"] - found["logits"].max(1, keepdims=True))
    if kind == "empty":
        found["mask"] = np.zeros(shape, bool)
    if kind == "infinities":  # an impossible token, and one that the sampler never draws
        found["train"][1, 0] = found["log_ratio"][1, 0] = found["logits"][2, 3:9] = -np.inf
        found["distribution"][2, 3:9], found["weights"][2, 3:9] = -np.inf, 0.0
        found["log_ratio"][2, 0] = np.inf
        found["scalar"] = found["length"] = np.array(np.inf)
    exact = {
        k: v if v.dtype == bool else v.astype(bfloat16).astype(float) for k, v in found.items()
    }
    assert all(np.array_equal(v, v.astype(np.float16)) for v in exact.values())
    return exact


def changed(function, **arguments):
    """What a block or recipe makes of a batch's coefficients."""

    def of(b):
        correction = corrections.chain(function(**arguments))
        extra = {"divergence": b["divergence"], "log_probs": b["train"]}
        extra |= {name: b[name] for name in ("mask", "log_ratio", "advantages")}
        start = b["coefficients"]
        return correction.update(start, correction.init(start), **extra)

    return of


def scheduled(b):
    cap = optax.constant_schedule(1.25)
    coefficients, _ = changed(corrections.scheduled, make=corrections.token_tis, cap=cap)(b)
    return coefficients  # the state is optax's


def corrected(b):
    correction = corrections.chain(corrections.vexact(), corrections.normalise())
    return corrections.correct(correction, log_ratio=b["log_ratio"], mask=b["mask"])


def packed(b):
    """The batch's first row as two sequences."""
    row, ids = b["log_ratio"][0], jnp.arange(b["mask"].shape[1], dtype=jnp.int32) // 3
    given = {"log_ratio": row, "mask": b["mask"][0], "segment_ids": ids, "segments": 2}
    return corrections.coefficients(corrections.sequence_tis(), **given)


def stateful(b):
    correction = corrections.chain(corrections.normalise_by_running_mean(), corrections.token_tis())
    start = b["coefficients"]
    extra = {"log_ratio": b["log_ratio"], "mask": b["mask"]}
    return corrections.apply(correction, start, correction.init(start), **extra)


def of_estimators(b, function):
    """An estimator's advantages of the batch, for all that one row or more of a prompt has."""
    rows = b["rewards"].shape[0]
    given = {name: b[name] for name in ("mask", "energies", "log_ratio")}
    greedy = {"greedy_rewards": b["greedy_rewards"]}
    return {
        name: function(name, b["rewards"], samples=min(rows, 2), **given, **greedy)
        for name in sorted((*GROUP_BASELINES, "reinforce", "reinforce_batch", "remax"))
        if rows > 1 or name not in GROUP_BASELINES
    }


def direct(name, rewards, **given):
    return advantages(rewards, estimator=name, **given)


def by_objective(name, rewards, **given):
    kept = {k: v for k, v in given.items() if k in (*needs(name), "samples", "mask")}
    return Objective(estimator=name).advantages(rewards, **kept)


def loss(name):
    return lambda b: losses.policy_loss(
        name, b["train"], b["rollout"], b["advantages"], b["mask"], {}, selected=b["mask"]
    )


def selected(function):
    return lambda b: function(b["train"], b["rollout"], b["advantages"], b["mask"])


def token_losses(b):
    terms: dict[str, Any] = {
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.5,
        "balance_coefficient": 0.25,
    }
    arrays = {"coefficients": b["coefficients"], "reference_log_probs": b["rollout"]}
    arrays |= {"entropy": b["energies"], "balance": b["energies"], "mask": b["mask"]}
    given = b["train"], b["rollout"], b["advantages"]
    return [Objective(**terms, loss=x).token_losses(*given, **arrays) for x in ("clip", "gmpo")]


def choice(b):
    selection = Objective(loss="clip_cov").select
    return selection(b["train"], b["rollout"], b["advantages"][:, 0], mask=b["mask"])


def scaled(transform, **extra):
    """What a transform of updates makes of them, twice; `extra` as functions of the batch."""

    def of(b):
        given = {name: function(b) for name, function in extra.items()}
        updates, state = b["coefficients"], transform.init(b["coefficients"])
        updates, state = transform.update(updates, state, **given)
        return transform.update(updates, state, **given)

    return of


def surge(b):
    detector = schedules.SurgeDetector(window=40, minimum=3)
    return detector.update(detector.init(), b["length"])


def routed(b):
    loads = jnp.asarray([[2, 0, 1, 1], [1, 1, 1, 1]], jnp.int32)
    return metrics.routing_metrics(b["energies"], b["energies"], b["mask"], loads)


def loss_metrics(b):
    flags = dict.fromkeys(("clipped_low", "clipped_high", "clipped_dual"), b["mask"])
    figures = {"loss": b["advantages"], "ratio": b["coefficients"], "kl": b["log_ratio"]}
    return metrics.loss_metrics(TokenLosses(**flags, **figures), b["mask"])


def divergence(b):
    side = b["distribution"]
    return metrics.jensen_shannon(side, side[::-1]), metrics.entropy(side)


def truncated(b):
    peak = jnp.max(b["logits"], axis=1)
    return distribution.kept_tokens(
        b["logits"], peak, b["weights"], sampling=SAMPLING, numerics=NUMERICS
    )


def of_logits(function, **options):
    tokens = lambda b: jnp.zeros(b["logits"].shape[0], jnp.int32)  # noqa: E731
    return lambda b: function(b["logits"], tokens(b), sampling=SAMPLING, **options)


def drawn(b):
    uniform = jnp.broadcast_to(b["scalar"], b["logits"].shape[:1])
    return distribution.draw(b["logits"], uniform, sampling=SAMPLING, numerics=NUMERICS)


def schedule(b):
    return schedules.length_decay_schedule(0.5, 3)(jnp.sum(b["mask"], dtype=jnp.int32))


ratio_of = {
    "aggregate": lambda b: [
        ratios.aggregate(b["log_ratio"], b["mask"], x) for x in ("sum", "mean")
    ],
    "k3": lambda b: ratios.k3(b["advantages"]),
    "probabilities": lambda b: ratios.probabilities(b["train"], b["log_ratio"]),
    "ratio": lambda b: [
        ratios.ratio(b["log_ratio"], b["mask"], x) for x in ("token", "sequence", "geometric")
    ],
    "token_statistic": lambda b: [
        ratios.token_statistic(x, b["log_ratio"], log_probs=b["train"], divergence=b["energies"])
        for x in ("ratio", "k1", "k2", "k3", "error", "binary_kl", "divergence")
    ],
}
FLAGS = corrections.Bounds("geometric", 0.5, 2.0)
ARGUMENTS = {
    "trust_region_masking": {"bound": 0.5},
    "scale_by_truncated_ratio": {"upper": 1.25},
    "mask_outside": {"level": "geometric", "upper": 1.25},
    "reject": {"statistic": "binary_kl", "over": "max", "upper": 0.25},
    "mask_probability_difference": {"upper": 0.125},
    "mix_in_adaptively": {"upper": 2.0},
    "normalise": {"unit": "sequence", "among": "survivors"},
}
CASES = {
    **{
        f"corrections.recipes.{n}": changed(f, **ARGUMENTS.get(n, {}))
        for n, f in corrections.RECIPES.items()
    },
    **{
        f"{f.__module__.removeprefix('tim_jax.')}.{n}": changed(f, **ARGUMENTS.get(n, {}))
        for n, f in corrections.BLOCKS.items()
    },
    "corrections.blocks.where_advantage": changed(
        lambda: corrections.where_advantage("negative", corrections.sequence_tis())
    ),
    "corrections.base.scheduled": scheduled,
    "corrections.blocks.batch_mean": lambda b: corrections.batch_mean(b["coefficients"], b["mask"]),
    **{f"corrections.ratios.{name}": function for name, function in ratio_of.items()},
    "corrections.applying.correct": corrected,
    "corrections.applying.coefficients": packed,
    "corrections.applying.apply": stateful,
    "corrections.applying.correction_metrics": lambda b: corrections.correction_metrics(
        b["coefficients"], b["mask"], kept=b["mask"]
    ),
    "corrections.applying.clipped_shares": lambda b: applying.clipped_shares(
        FLAGS, b["log_ratio"], b["mask"]
    ),
    "corrections.applying.bound_metrics": lambda b: corrections.bound_metrics(
        corrections.token_tis(), {"old": b["log_ratio"], "current": b["log_ratio"]}, b["mask"]
    ),
    "corrections.applying.block_metrics": lambda b: applying.block_metrics(
        corrections.chain(
            corrections.token_tis(), corrections.reject("k3", over="mean", upper=1.0)
        ),
        {"old": b["log_ratio"], "current": b["log_ratio"]},
        b["mask"],
    ),
    "corrections.applying.sequence_weight_metrics": lambda b: applying.sequence_weight_metrics(
        corrections.token_tis(), {"old": b["log_ratio"], "current": b["log_ratio"]}, b["mask"]
    ),
    "corrections.base.map_coefficients": changed(
        lambda: corrections.map_coefficients("own", lambda c, m, x: c * x, needs=("advantages",))
    ),
    "corrections.base.map_leaves": lambda b: base.map_leaves(
        lambda c, m, log_ratio: c + log_ratio,
        b["coefficients"],
        b["mask"],
        log_ratio=b["log_ratio"],
    ),
    "metrics.mismatch_metrics": lambda b: metrics.mismatch_metrics(
        b["train"], b["rollout"], b["mask"]
    ),
    "metrics.mismatch_profiles": lambda b: metrics.mismatch_profiles(
        b["train"], b["rollout"], b["mask"], bins=4
    ),
    "metrics.loss_metrics": loss_metrics,
    "metrics.routing_metrics": routed,
    "metrics.update_skew": lambda b: metrics.update_skew(
        b["coefficients"], b["advantages"][:, 0], b["mask"]
    ),
    "metrics.entropy": divergence,
    "metrics.jensen_shannon": divergence,
    "metrics.gradient_noise_scale": lambda b: metrics.gradient_noise_scale(
        b["length"], b["scalar"], small=2, big=8
    ),
    "metrics.expert_loads": lambda b: metrics.expert_loads(
        jnp.ones((*b["mask"].shape, 2, 1), jnp.int16), b["mask"], experts=4
    ),
    "objectives.advantages.advantages": lambda b: of_estimators(b, direct),
    "objectives.objective.Objective.advantages": lambda b: of_estimators(b, by_objective),
    "objectives.advantages.informative_groups": lambda b: informative_groups(b["rewards"], 1),
    "objectives.objective.token_weights": lambda b: objective.token_weights(
        b["mask"], aggregation="sequence_mean_token_mean", kept=b["coefficients"] > 1.0
    ),
    "objectives.objective.Objective.token_weights": lambda b: Objective().token_weights(b["mask"]),
    "objectives.objective.Objective.token_losses": token_losses,
    "objectives.objective.Objective.select": choice,
    "objectives.advantages.kl_estimate": lambda b: [
        kl_estimate(b["train"], b["rollout"], estimator=x, cap=c)
        for x in KL.__args__
        for c in (None, 0.25)
    ],
    **{
        f"objectives.losses.{n}": loss(n)
        for n in losses.LOSSES
        if "cov" not in n and n != "gspo_token"
    },
    **{f"objectives.losses.{n}": loss(n) for n in losses.SELECTIONS},
    **{f"objectives.losses.select_{n}": selected(f) for n, f in losses.SELECTIONS.items()},
    "objectives.losses.policy_loss": loss("gspo_token"),
    "objectives.advantages.kl_penalty": lambda b: kl_penalty(
        b["train"], b["rollout"], b["mask"], coefficient=0.125
    ),
    "objectives.advantages.overlong_penalty": lambda b: overlong_penalty(
        jnp.sum(b["mask"], axis=1, dtype=jnp.int32), longest=6, cache=3
    ),
    "objectives.advantages.AdaptiveKL.update": lambda b: AdaptiveKL(0.25, 64).update(
        b["scalar"], b["scalar"], sequences=4
    ),
    "schedules.effective_sample_size": lambda b: schedules.effective_sample_size(
        b["log_ratio"][:, 0], jnp.any(b["mask"], axis=1)
    ),
    "schedules.length_decay": scaled(schedules.length_decay(2, floor=0.3, factor=0.3)),
    "schedules.length_decay_schedule": schedule,
    "schedules.length_triggered_decay": scaled(
        schedules.length_triggered_decay(), response_length=lambda b: b["length"]
    ),
    "schedules.scale_by_root_ess": scaled(
        schedules.scale_by_root_ess(), effective_sample_size=lambda b: b["scalar"]
    ),
    "schedules.SurgeDetector.update": surge,
    "policy.distribution.log_prob": of_logits(distribution.log_prob, numerics=NUMERICS),
    "policy.distribution.entropy": lambda b: distribution.entropy(b["logits"], sampling=SAMPLING),
    "policy.distribution.score_energy": of_logits(distribution.score_energy),
    "policy.distribution.draw": drawn,
    "policy.distribution.kept_tokens": truncated,
}
# What is no computation with floats of the caller's, and why.
WITHOUT = {
    "makes or checks a value": """
        corrections.base.chain corrections.base.check corrections.base.check_shape
        corrections.base.declared corrections.base.is_masked_node corrections.base.join_state
        corrections.base.checked_number corrections.base.known_number corrections.base.matching
        corrections.base.outside
        corrections.base.plain_number
        corrections.base.rejections corrections.base.check_rejecting_first
        corrections.base.split_state
        corrections.base.stages corrections.base.take_extra corrections.blocks.checked_bounds
        corrections.recipes.build objectives.advantages.check_samples objectives.advantages.needs
        objectives.objective.check_aggregation
        objectives.objective.check_tokens objectives.objective.counts_kept
        objectives.losses.check_options objectives.losses.options
        objectives.losses.uses_ratio objectives.advantages.absolute
        objectives.objective.Objective.check_whole_distribution
        objectives.objective.Objective.with_length
        schedules.decay_report schedules.SurgeDetector.init policy.sampler.trips
        policy.distribution.search_trips policy.scoring.shares_gradient policy.slots.Pool.check
    """,
    "moves values, or computes with whole numbers": """
        corrections.applying.layout_of corrections.applying.normaliser_metrics
        corrections.applying.pack corrections.applying.unpack
        policy.sampler.join_parts policy.sampler.prompts_so_far policy.slots.provide_pages
        policy.slots.slots_that_fit policy.slots.Pool.filled policy.sampler.widths
        policy.slots.Pool.empty policy.scoring.sequences policy.scoring.padded policy.scoring.packed
        policy.scoring.Padded.by_response policy.scoring.Padded.predicting
        policy.scoring.Packed.by_response policy.scoring.Packed.predicting
        policy.sampler.Decoding.uniforms policy.sampler.begin_steps policy.sampler.in_loop
        policy.sampler.tied policy.sampler.by_layer policy.sampler.whole_weights
        policy.scoring.chosen_alike policy.slots.copy_pages policy.slots.with_prompts
        policy.turns.turn_keys policy.turns.Pages.copied
        policy.turns.Pages.free policy.turns.Pages.provide policy.slots.advance policy.slots.empty
        policy.slots.narrow policy.slots.readable_cache policy.slots.refill policy.slots.store
    """,
    "a forward, whose dtypes are those of its numerics": """
        policy.sampler.Decoding.prefill policy.sampler.Decoding.run policy.sampler.Decoding.step
        policy.sampler.draw_exactly policy.turns.Turning.begin policy.turns.Turning.decode
        policy.turns.Turning.extend
        policy.sampler.sample policy.scoring.distributions policy.scoring.gradient_sums
        policy.scoring.of_logits
        policy.scoring.score
    """,
}
EXCEPTED = {name for names in WITHOUT.values() for name in names.split()}
EXCEPTED |= {f"objectives.objective.{name}" for name in PRESETS}
# Compared by bits, or kept in one dtype for a run's whole length.
ALWAYS_FLOAT32 = {
    "policy.distribution.log_prob",
    "policy.distribution.draw",
    "policy.distribution.kept_tokens",
    "schedules.length_triggered_decay",
    "schedules.SurgeDetector.update",
}
# A choice by the bits of the numbers, or between equal ones by their bits: float64 has others.
BY_BITS = {f"objectives.losses.select_{name}" for name in losses.SELECTIONS}
BY_BITS |= {"objectives.objective.Objective.select"}
# A transform of updates, which keep their dtype, and one that changes nothing.
OWN_DTYPE = {
    "corrections.recipes.none",
    "schedules.length_decay",
    "schedules.length_triggered_decay",
    "schedules.scale_by_root_ess",
}


def public_names():
    """Every public function of the rooms and every public method, by its module and name."""
    for room in ROOMS:
        top = importlib.import_module(f"tim_jax.{room}")
        inner = pkgutil.walk_packages(getattr(top, "__path__", ()), f"{top.__name__}.")
        for module in [top, *(importlib.import_module(found.name) for found in inner)]:
            place = module.__name__.removeprefix(f"{tim_jax.__name__}.")
            for name, value in vars(module).items():
                if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                    continue
                if inspect.isfunction(value):
                    yield f"{place}.{name}"
                elif inspect.isclass(value):
                    yield from (f"{place}.{name}.{method}" for method in methods(value))


def methods(kind):
    return [
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and name[0] != "_" and value.__module__ == kind.__module__
    ]


def test_every_public_function_is_in_the_table():
    names = set(public_names())
    assert not names - set(CASES) - EXCEPTED, "new here: add a case, or say why it needs none"
    assert not (set(CASES) | EXCEPTED) - names, "gone"
    assert not set(CASES) & EXCEPTED
    assert set(CASES) >= ALWAYS_FLOAT32 | OWN_DTYPE


def of_dtype(b, dtype):
    return {k: jnp.asarray(v, bool if v.dtype == bool else dtype) for k, v in b.items()}


def equations(jaxpr):
    """All equations of a jaxpr, those of its inner ones in place of what calls them."""
    for equation in jaxpr.eqns:
        inner = [x for value in equation.params.values() for x in inner_jaxprs(value)]
        for one in inner:
            yield from equations(one)
        if not inner:
            yield equation


def inner_jaxprs(value):
    if isinstance(value, jax.extend.core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, jax.extend.core.Jaxpr):
        return [value]
    return [x for part in value for x in inner_jaxprs(part)] if isinstance(value, tuple) else []


def floats(variables):
    """The float dtypes of the variables; of Python's numbers JAX decides where they are used."""
    kinds = {x.aval.dtype for x in variables if not getattr(x.aval, "weak_type", False)}
    return {str(kind) for kind in kinds if jnp.issubdtype(kind, jnp.floating)}


# Compares values, or moves them from place to place: nothing is rounded.
EXACT = {
    "abs", "and", "argmax", "clamp", "eq", "ge", "gt", "is_finite", "le", "lt", "max", "min", "ne",
    "neg", "or", "reduce_max", "reduce_min", "sign", "sort",
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "gather",
    "pad", "rev", "reshape", "scatter", "select_n", "slice", "split", "squeeze", "stop_gradient",
    "transpose",
}  # fmt: skip


def check_arithmetic(name, dtype):
    """No sum, product or function of 16 bits, and nothing narrower than the dtype asks for."""
    arrays = of_dtype(batch("usual"), dtype)
    narrow = {"float16", "bfloat16"}
    for equation in equations(jax.make_jaxpr(CASES[name])(arrays).jaxpr):
        primitive, read = equation.primitive.name, floats(equation.invars)
        written = floats(equation.outvars)
        converts = primitive == "convert_element_type"
        if converts and getattr(equation.invars[0].aval, "weak_type", False):
            continue
        if primitive in EXACT and not (converts and read != written):
            continue
        what = f"{name}, {dtype}: {equation}"
        assert not read & narrow or converts, what
        assert dtype == "float64" or "float64" not in read | written, what
        if name not in OWN_DTYPE:
            assert not written & narrow, what
            if dtype == "float64" and name not in ALWAYS_FLOAT32:
                assert "float64" not in read or "float32" not in written, what


@pytest.mark.parametrize("dtype", quick.some(DTYPES, 1, 2))
def test_what_every_function_computes_with(dtype):
    modes = (True,) if dtype == "float64" else (False, True)
    for x64 in modes:
        with jax.enable_x64(x64):
            for name in CASES:
                check_arithmetic(name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_one_and_three_are_worth_four_fifths(dtype):
    with jax.enable_x64(dtype == "float64"):
        log_weights = jnp.asarray(np.log([1.0, 3.0]), dtype)
        share = schedules.effective_sample_size(log_weights, jnp.ones(2, bool))
        weights = np.exp(np.asarray(log_weights, np.float64))
        right = weights.sum() ** 2 / (2 * np.square(weights).sum())
        precision = float(jnp.finfo(share.dtype).eps)
        assert float(share) == pytest.approx(right, rel=4 * precision)
        assert right == pytest.approx(0.8, rel=1e-3)


def test_k3_keeps_float64s_precision():
    difference = np.array([1e-9, 1e-3, 0.4, -0.99])
    # d^2 (1 / 2! + d / 3! + ...), from the smallest term.
    right = [sum(d**n / math.factorial(n) for n in range(30, 1, -1)) for d in difference]
    with jax.enable_x64(True):
        np.testing.assert_allclose(ratios.k3(jnp.asarray(difference)), right, rtol=1e-14)


@pytest.fixture(scope="module")
def compiled():
    """All cases as one program: LLVM's passes, which change no rule of IEEE 754, are left out."""
    return jax.jit(
        everything, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0}
    )


def everything(b, names):
    return {name: CASES[name](b) for name in names}


def values(function, kind, dtype, *, x64):
    # A recipe is a chain of blocks. Those are tried in the small shapes and without `jit` as well.
    whole = function is not everything and kind not in SMALL
    names = tuple(n for n in CASES if whole or not n.startswith("corrections.recipes"))
    with jax.enable_x64(x64):
        return jax.tree.map(np.asarray, function(of_dtype(batch(kind), dtype), names))


def check_values(found, expected, given):
    """Each result against float64's, to the accuracy of the dtype that it has."""
    for name, ours in found.items():
        own = given if name in OWN_DTYPE else "float32"
        right = jax.tree.leaves(expected[name])
        for (path, a), b in zip(jax.tree.leaves_with_path(ours), right, strict=True):
            what = f"{name}{jax.tree_util.keystr(path)}, {given}"
            if not jnp.issubdtype(a.dtype, jnp.floating):
                assert name in BY_BITS or np.array_equal(a, b), what
                continue
            assert a.dtype in ("float32", own), what
            check_close(a.astype(np.float64), b.astype(np.float64), jnp.finfo(a.dtype).eps, what)


def check_close(ours, right, precision, what):
    # A sum with an infinity is the largest number of its dtype, and may be divided by a count.
    huge = np.abs(right) > 1e36
    assert np.all((np.abs(ours) > 1e36)[huge] & (np.sign(ours) == np.sign(right))[huge]), what
    ours, right = (np.where(huge, 0.0, x) for x in (ours, right))
    bound = 30 * float(precision) * (1.0 + np.nan_to_num(np.abs(right)).max(initial=0.0))
    np.testing.assert_allclose(ours, right, rtol=0, atol=bound, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_against_float64(compiled, kind):
    expected = values(compiled, kind, "float64", x64=True)
    found = values(compiled, kind, "float16", x64=True)
    check_values(found, expected, "float16")
    if kind == "usual":
        for dtype in ("float32", "bfloat16"):
            check_values(values(everything, kind, dtype, x64=False), expected, dtype)
