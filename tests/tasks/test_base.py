import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Example, Generated, Grade, Task, faults, order

SIZES = st.integers(1, 40)


@given(st.integers(0, 2**70), st.integers(1, 30), SIZES)
def test_order_visits_every_row_once_per_epoch(seed, batch, size):
    steps = -(-3 * size // batch)
    visited = np.concatenate([order(seed, step, batch, size) for step in range(steps)])
    for epoch in range(3):
        assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(0, 100), st.integers(0, 50), st.integers(1, 20), SIZES)
def test_order_does_not_depend_on_the_batch_size(seed, step, batch, size):
    whole = order(seed, step, 2 * batch, size)
    halves = [order(seed, 2 * step + half, batch, size) for half in (0, 1)]
    np.testing.assert_array_equal(whole, np.concatenate(halves))


def test_order_differs_between_epochs_and_seeds():
    first = order(1, 0, 100, 100)
    assert not np.array_equal(first, order(1, 1, 100, 100))
    assert not np.array_equal(first, order(2, 0, 100, 100))
    assert not np.array_equal(first, np.arange(100))


def test_order_is_frozen():
    """A resumed run on other versions must see the data that the first one would have seen."""
    assert order(7, 3, 5, 11).tolist() == [2, 0, 9, 7, 1]


def test_order_shuffles_evenly():
    """Each row is first in an epoch about as often as any other (chi-squared, 9 d.o.f.)."""
    first = [order(seed, 0, 1, 10)[0] for seed in range(2000)]
    counts = np.bincount(first, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # p = 0.001


@pytest.mark.parametrize(("step", "batch", "size"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_order_refuses(step, batch, size):
    with pytest.raises(InputError, match="step must be >= 0"):
        order(0, step, batch, size)


def test_generated_is_a_sequence():
    items = Generated(lambda i: Example(str(i), str(i)), 5)
    assert [e.prompt for e in items] == list("01234")
    assert items[-1].prompt == "4"
    assert [e.prompt for e in items[1:4:2]] == ["1", "3"]
    assert len(items) == 5
    with pytest.raises(IndexError):
        items[5]
    with pytest.raises(IndexError):
        items[-6]


def test_examples_are_values():
    assert Example("a", "1", {"n": 2}) == Example("a", "1", {"n": 2})
    assert Example("a", "1", {"n": 2}) != Example("a", "1", {"n": 3})
    assert len({Example("a", "1"), Example("a", "1"), Example("b", "1")}) == 2


def test_faults_are_counted():
    grades = [
        Grade(1.0),
        Grade(0.0, "timeout"),
        Grade(0.5),
        Grade(0.0, "timeout"),
        Grade(0, "error"),
    ]
    assert faults(grades) == {"timeout": 2, "error": 1}


def test_close_reaches_the_grader():
    class Closing:
        closed = False

        def __call__(self, examples, completions):
            return [Grade(0.0) for _ in completions]

        def close(self):
            self.closed = True

    grade = Closing()
    Task("t", (), (), grade).close()
    assert grade.closed
    Task("t", (), (), lambda examples, completions: []).close()
