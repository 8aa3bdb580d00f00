"""What an execution's helpers do with compiled programs."""

import jax
import pytest

from tim_jax.model import execution


@pytest.mark.parametrize(("most", "times"), [(0, 2), (10**9, 1)])
def test_programs_are_forgotten_once_they_have_too_many_mappings(most, times, monkeypatch):
    monkeypatch.setattr(execution, "_MAPPINGS", most)
    traced = []

    @jax.jit
    def program(x):
        traced.append(x)
        return x + 1

    program(1)
    execution.forget_programs()
    program(1)
    assert len(traced) == times
