"""A coefficient scales the gradient with respect to the log-probs, and carries none itself.

Also runs the example of docs/corrections.md, as it stands, without the rest of the library.
"""

import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick

from tim_jax import corrections, schedules
from tim_jax.objectives import Objective

REQUIRED = {"trust_region_masking": {"bound": 0.05}}
CASES = {
    name: corrections.build([{"name": name, **REQUIRED.get(name, {})}])
    for name in corrections.RECIPES
}
CASES["normalised"] = corrections.chain(CASES["token_tis"], corrections.normalise())
CASES["wide"] = corrections.vexact(bound=0.05)
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "corrections.md"
WHOLE_LOOP = DOCS.with_name("correct.md")

ROWS, WIDTH, WORDS = 6, 7, 5


def policy(params, tokens):
    """Log-probs f32[B, R] of tokens i32[B, R] under one categorical per position."""
    table = jax.nn.log_softmax(params)
    return jnp.take_along_axis(table[None], tokens[..., None], axis=-1)[..., 0]


def problem(seed=0, spread=0.05):
    rng = np.random.default_rng(seed)
    params = jnp.asarray(rng.standard_normal((WIDTH, WORDS)), jnp.float32)
    sampler = params + spread * rng.standard_normal(params.shape).astype(np.float32)
    tokens = jnp.asarray(rng.integers(0, WORDS, (ROWS, WIDTH)), jnp.int32)
    lengths = rng.integers(2, WIDTH + 1, ROWS)
    return params, {
        "tokens": tokens,
        "rollout_log_probs": policy(sampler, tokens),
        "mask": jnp.asarray(np.arange(WIDTH)[None, :] < lengths[:, None]),
        "advantages": jnp.asarray(rng.standard_normal(ROWS), jnp.float32),
        "lengths": jnp.asarray(lengths, jnp.int32),
    }


def coefficients_of(case, log_probs, batch):
    return corrections.coefficients(
        CASES[case],
        log_ratio=log_probs - batch["rollout_log_probs"],
        mask=batch["mask"],
        log_probs=log_probs,
        advantages=batch["advantages"],
    )


def token_losses(log_probs, batch, coefficients, old=None):
    old = batch["rollout_log_probs"] if old is None else old
    losses = Objective().token_losses(
        log_probs, old, batch["advantages"], mask=batch["mask"], coefficients=coefficients
    )
    return jnp.sum(losses.loss)


SOME = pytest.mark.parametrize(
    "cases", quick.some([list(CASES)[i::3] for i in range(3)], 0), ids=["first", "second", "third"]
)


@SOME
def test_a_correction_scales_the_cotangent_of_the_log_probs(cases):
    params, batch = problem()

    @jax.jit
    def both(params):
        log_probs, pull_back = jax.vjp(lambda p: policy(p, batch["tokens"]), params)
        plain, found = jax.grad(token_losses)(log_probs, batch, None), {}
        for case in cases:
            coefficients = coefficients_of(case, log_probs, batch)
            (scaled,) = pull_back(coefficients * plain)
            whole = jax.grad(
                lambda p, c=coefficients: token_losses(policy(p, batch["tokens"]), batch, c)
            )(params)
            found[case] = whole, scaled
        return found

    for case, (whole, scaled) in both(params).items():
        np.testing.assert_allclose(whole, scaled, rtol=1e-5, atol=1e-7, err_msg=case)


@SOME
def test_no_gradient_flows_through_a_coefficient_in_bypass_mode(cases):
    params, batch = problem()

    @jax.jit
    def gradients(params):
        constants = {c: coefficients_of(c, policy(params, batch["tokens"]), batch) for c in cases}

        def losses(params, fixed):
            log_probs = policy(params, batch["tokens"])
            found = {c: fixed.get(c, coefficients_of(c, log_probs, batch)) for c in cases}
            # Without Objective's own stop_gradient: the transform alone must stop it.
            return {
                c: (jnp.sum(x * jnp.where(batch["mask"], log_probs, 0.0)), jnp.sum(x))
                for c, x in found.items()
            }

        return jax.jacrev(losses)(params, {}), jax.jacrev(losses)(params, constants)

    bypass, frozen = gradients(params)
    for case in cases:
        np.testing.assert_allclose(bypass[case][0], frozen[case][0], 1e-5, 1e-6, err_msg=case)
        assert not np.any(np.asarray(bypass[case][1])), case


def test_recompute_mode_at_the_old_weights_corrects_as_reinforce_does():
    """In recompute mode the coefficients come from the old policy, before the gradient program."""
    params, batch = problem(spread=0.01)
    cases = ["token_tis", "sequence_tis", "wide", "ais", "dppo"]

    @jax.jit
    def both(params):
        old, found = policy(params, batch["tokens"]), {}
        for case in cases:
            coefficients = coefficients_of(case, old, batch)

            def recompute(params, c=coefficients):
                return token_losses(policy(params, batch["tokens"]), batch, c, old=old)

            def reinforce(params, case=case):
                log_probs = policy(params, batch["tokens"])
                c = coefficients_of(case, log_probs, batch) * batch["advantages"][:, None]
                return -jnp.sum(c * jnp.where(batch["mask"], log_probs, 0.0))

            found[case] = coefficients, jax.grad(recompute)(params), jax.grad(reinforce)(params)
        return found

    for case, (coefficients, ours, expected) in both(params).items():
        assert np.any(np.asarray(coefficients)), case
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7, err_msg=case)


def test_exact_sequence_weights_make_the_gradient_unbiased():
    """Over all sequences, weighted by the sampler: the policy gradient under the policy itself."""
    params, _ = problem(1)
    params = params[:3]
    sampler = params + 0.3
    sampler = sampler.at[0, 1].add(0.5)
    grid = np.indices((WORDS,) * 3).reshape(3, -1).T
    tokens = jnp.asarray(grid, jnp.int32)
    rewards = jnp.asarray(np.random.default_rng(2).random(len(grid)), jnp.float32)
    mask = jnp.ones(tokens.shape, bool)
    rollout = policy(sampler, tokens)

    def corrected(params):
        log_probs = policy(params, tokens)
        c = corrections.coefficients(
            corrections.scale_by_ratio("sequence"), log_ratio=log_probs - rollout, mask=mask
        )
        chance = jnp.exp(jnp.sum(rollout, axis=1))
        return jnp.sum((chance * rewards)[:, None] * c * log_probs)

    def expected_reward(params):
        return jnp.sum(jnp.exp(jnp.sum(policy(params, tokens), axis=1)) * rewards)

    both = jax.jit(lambda x: (jax.grad(corrected)(x), jax.grad(expected_reward)(x)))
    np.testing.assert_allclose(*both(params), rtol=1e-4, atol=1e-6)


def example(page=DOCS) -> str:
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_example_of_the_docs_trains():
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    params, batch = problem(3, spread=1e-4)
    names = {"policy": policy, "params": params, "batches": [batch] * 5}
    # optax's Adam promotes dtypes implicitly; so does whoever writes fifteen lines.
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(code, str(DOCS), "exec"), names)

    def objective(params):
        chosen = jnp.where(batch["mask"], policy(params, batch["tokens"]), 0.0)
        return float(jnp.sum(batch["advantages"][:, None] * chosen))

    assert objective(names["params"]) > objective(params)
    report = schedules.decay_report(names["state"])
    assert float(report["lr_scale"]) == 1.0
    expected = float(np.mean(np.asarray(batch["lengths"])))
    assert float(report["response_length_recent"]) == pytest.approx(expected)


def test_the_example_of_the_docs_trains_a_policy_in_half_precision(monkeypatch):
    """bfloat16 parameters and log-probs; and the coefficients stay float32."""
    params, batch = problem(3, spread=1e-4)
    seen = []

    def half(params, tokens):
        log_probs = policy(params, tokens)
        assert log_probs.dtype == jnp.bfloat16
        return log_probs

    def noted(function):
        def call(correction, **arrays):
            found = function(correction, **arrays)
            of_tokens = found if function is coefficients else found.coefficients
            seen.append((arrays["log_ratio"].dtype, of_tokens.dtype))
            return found

        return call

    coefficients = corrections.coefficients
    for name in ("coefficients", "correct"):
        monkeypatch.setattr(corrections, name, noted(getattr(corrections, name)))
    params = params.astype(jnp.bfloat16)
    batch["rollout_log_probs"] = half(params, batch["tokens"])
    names = {"policy": half, "params": params, "batches": [batch] * 5}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(example(), str(DOCS), "exec"), names)
    assert set(seen) == {(jnp.dtype("bfloat16"), jnp.dtype("float32"))}
    assert names["params"].dtype == jnp.bfloat16
    change = np.float32(names["params"]) - np.float32(params)
    assert np.all(np.isfinite(change))
    assert np.any(change != 0.0)


def grad_with_loss(loss):
    """`jax.grad(loss)`, but NaN if the loss is: a user sees both."""

    def gradient(*given):
        value, found = jax.value_and_grad(loss)(*given)
        return found + 0.0 * value

    return gradient


# The columns that the mask leaves out; the last has infinite log-probs.
OFF = {"last column": slice(-1, None), "all columns": slice(None)}


@pytest.mark.parametrize("columns", OFF)
def test_the_example_takes_infinity_off_the_mask_and_an_empty_batch(columns, monkeypatch):
    params, batch = problem(3, spread=1e-4)
    batch["mask"] = jnp.ones((ROWS, WIDTH), bool).at[:, OFF[columns]].set(False)
    names = {"params": params, "batches": [batch] * 2}
    names["policy"] = lambda *given: policy(*given).at[:, -1].set(-jnp.inf)
    monkeypatch.setattr(jax, "grad", grad_with_loss)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(example(), str(DOCS), "exec"), names)
    assert bool(jnp.all(jnp.isfinite(names["params"])))


@pytest.mark.parametrize("columns", OFF)
def test_the_whole_loop_takes_infinity_off_the_mask_and_an_empty_batch(columns, monkeypatch):
    code, _ = example(WHOLE_LOOP).split("\nlogits = ")
    mask = "jnp.ones((BATCH, LENGTH), bool)"
    assert code.count(mask) == 1
    code = code.replace(mask, f"{mask}.at[:, OFF].set(False)")
    names: dict[str, Any] = {"OFF": OFF[columns]}
    exec(compile(code, str(WHOLE_LOOP), "exec"), names)
    finite, logits = names["token_log_probs"], jnp.zeros((names["LENGTH"], names["VOCABULARY"]))
    names["token_log_probs"] = lambda *given: finite(*given).at[:, -1].set(-jnp.inf)
    monkeypatch.setattr(jax, "grad", grad_with_loss)
    with jax.numpy_dtype_promotion("standard"):
        logits, _, _ = names["step"](logits, names["optimizer"].init(logits), jax.random.key(0))
    assert bool(jnp.all(jnp.isfinite(logits)))


def test_the_docs_name_every_recipe_and_block_and_their_configuration_builds():
    text = DOCS.read_text()
    for name in (*corrections.RECIPES, *corrections.BLOCKS):
        assert f"`{name}" in text, name
    table = re.search(r"```toml\n(\[learner\]\n.*?)```", text, re.DOTALL)
    assert table is not None
    entries = tomllib.loads(table.group(1))["learner"]["corrections"]
    assert [entry["name"] for entry in entries] == ["reject", "token_tis"]
    corrections.build(entries)


def test_corrections_and_schedules_load_without_the_rest():
    code = (
        "import sys; from tim_jax import corrections, schedules, metrics;"
        "heavy = ('tim_jax.model', 'tim_jax.kernels', 'tim_jax.rl', 'tim_jax.policy',"
        " 'transformers', 'flax', 'torch');"
        "print([m for m in sys.modules if m.startswith(heavy)])"
    )
    root = pathlib.Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert result.stdout.strip() == "[]"
