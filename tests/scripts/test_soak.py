"""scripts/soak.py: a short run of it, and what it calls growth."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def soak():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import soak

        yield soak


def rows(soak, **last):
    """Ten rows that do not grow, but for what is said of the last two."""
    row = soak.Row(1, 100, 900.0, 14, 35, 2, 8.0, 12.0)
    return [row._replace(megabytes=700.0, threads=20)] + [row] * 7 + [row._replace(**last)] * 2


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({}, None),
        ({"megabytes": 930.0, "threads": 38, "best": 9.0, "median": 40.0}, None),
        ({"megabytes": 990.0}, "memory grows: 900 to 990 MiB"),
        ({"files": 54}, "files grow: 14 to 54"),
        ({"threads": 67}, "threads grow: 35 to 67"),
        ({"processes": 3}, "processes grow: 2 to 3"),
        ({"best": 11.0}, "a step takes longer: 8.0 to 11.0 ms"),
    ],
)
def test_growth_is_named(soak, last, words):
    assert soak.growth(rows(soak, **last)) == ([words] if words else [])


# Kernels that compile in a moment and need no measurement, with which no step is exact; and a
# sampler of the evaluation that is that of a step. What runs between the programs is the same.
QUICK = ("numerics.family=native", "exact=report", "eval.prompts=2", "eval.samples=2")


@pytest.mark.slow
def test_a_run_of_some_hundred_steps_grows_nowhere(soak, tmp_path):
    found, wrong = soak.soak(tmp_path, 400, parts=4, saves=20, changes=QUICK)
    assert [row.last for row in found] == [100, 200, 300, 400]
    # The time of a step is not judged: so few steps say too little on a machine that does more.
    assert [line for line in wrong if "takes longer" not in line] == []
