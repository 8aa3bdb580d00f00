"""What is 1 without mismatch is exactly 1, also where a device rounds its quotients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from neutral import LARGEST, PARTS, ROUNDED, SHAPE, deviating
from rounded_division import with_rounded_division

from tim_jax.numerics import strict
from tim_jax.numerics.strict import count


@pytest.mark.parametrize("part", quick.some(PARTS, 0, 1, 3, 4))
def test_every_figure_of_an_exact_step_has_its_exact_value(part):
    number, wrong = deviating(with_rounded_division, (part,))
    assert number >= 3
    assert not wrong


def test_the_emulated_device_rounds():
    def share(size):
        mask = jnp.arange(LARGEST) < size
        return jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32) / count(mask)

    sizes = jnp.arange(1, LARGEST + 1)
    run = jax.jit(lambda: jax.lax.map(with_rounded_division(share), sizes, batch_size=64))
    assert (np.flatnonzero(np.asarray(run()) != 1.0) + 1).tolist() == ROUNDED
    assert len(ROUNDED) > 400
    assert {*SHAPE, SHAPE[0] * SHAPE[1]} <= set(ROUNDED)


@pytest.mark.slow
def test_without_the_exact_quotient_it_would_be_seen(monkeypatch):
    monkeypatch.setattr(strict, "quotient", lambda part, whole: part / whole)
    _, wrong = deviating(with_rounded_division)
    names = " ".join(wrong)
    for figure in (
        "exact_share",
        "mult_error",
        "coefficient_mean",
        "ppo_ratio_mean",
        "at the bound",
    ):
        assert figure in names, names
