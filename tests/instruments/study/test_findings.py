"""How a mismatch changes along runs, from tables whose answers are known."""

import numpy as np
import pytest

from tim_jax.instruments.study import findings

STEPS = 200


def run(arm, seed, k3, **metrics):
    """A run's columns, in the order of steps."""
    count = len(k3)
    names = {"arm": [arm] * count, "seed": [seed] * count, "step": range(1, count + 1)}
    return {**names, "mismatch/kl_k3": k3, **metrics}


def joined(*runs):
    return {name: np.concatenate([np.asarray(one[name]) for one in runs]) for name in runs[0]}


def rising(seed, factor):
    """K3 that ends `factor` times as large, and wanders on the way."""
    trend = np.geomspace(1e-3, factor * 1e-3, STEPS)
    return trend * np.exp(0.3 * np.random.default_rng(seed).standard_normal(STEPS))


def row(table, *first):
    return next(found for found in table.rows if found[: len(first)] == list(first))


def test_what_only_rises_too_is_told_from_what_moves_together():
    runs = []
    for seed, factor in ((3, 50.0), (4, 100.0)):
        k3 = rising(seed, factor)
        noise = np.exp(0.3 * np.random.default_rng(seed + 10).standard_normal(STEPS))
        runs.append(
            run("fp8", seed, k3, noise_scale=7 * k3, entropy=-np.geomspace(1, 9, STEPS) * noise)
        )
    _, together = findings.dynamics(joined(*runs))
    assert row(together, "fp8", "gradient noise scale")[2:] == ["1.00 (1.00 to 1.00)"] * 2
    assert float(row(together, "fp8", "entropy")[2].split()[0]) < -0.9
    assert abs(float(row(together, "fp8", "entropy")[3].split()[0])) < 0.4


def test_a_change_is_that_of_the_first_and_the_last_tenth():
    """Steps stand in any order; each seed's own ratio counts, and the highest group."""
    k3 = np.r_[np.full(40, 2e-3), np.full(120, 5e-2), np.full(40, 6e-3)]
    table = joined(run("a", 0, k3), run("a", 1, 2 * k3[::-1]))
    order = np.random.default_rng(0).permutation(2 * STEPS)
    changed, together = findings.dynamics({name: column[order] for name, column in table.items()})
    assert changed.rows == [
        ["a", "2", "0.007", "0.005", "1.67 (0.33 to 3.00)", "16.67 (8.33 to 25.00)"]
    ]
    assert together.rows == []


@pytest.mark.parametrize("k3", [np.zeros(STEPS), np.full(STEPS, np.nan), np.full(49, 1e-3)])
def test_without_a_mismatch_or_enough_steps_there_is_no_table(k3):
    assert findings.dynamics(run_as_arrays(k3)) == []
    other = joined(run("b", 0, k3), run("fp8", 0, rising(0, 3.0)))
    assert [found[0] for found in findings.dynamics(other)[0].rows] == ["fp8"]


def run_as_arrays(k3):
    return joined(run("a", 0, k3))


def test_steps_without_a_number_are_left_out():
    k3, entropy = rising(1, 4.0), np.linspace(1, 2, STEPS)
    k3[[5, 60]], entropy[[7, 9]] = np.nan, np.inf
    changed, together = findings.dynamics(joined(run("a", 0, k3, entropy=entropy)))
    assert "nan" not in str([*changed.rows, *together.rows])
    assert row(together, "a", "entropy")
    assert findings.dynamics({"arm": np.array(["a"]), "step": np.array([1])}) == []
