"""The table of the learner's memory: what it compiles can be traced."""

from pathlib import Path

import jax
import jax.numpy as jnp

from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import Numerics

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_its_loss_has_the_log_probs_and_entropies_of_a_step(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import memory_table as table

    rollout, config = table.rollout_shapes(table._PROMPT + 4), table.small_model(64)
    execution = Execution(config, Numerics(), Sampling(4))
    loss, found = jax.eval_shape(
        lambda *given: table.loss(*given, execution=execution),
        jax.eval_shape(execution.prepare, parameter_shapes(config)),
        rollout,
        jax.ShapeDtypeStruct((1,), jnp.float32),
    )
    assert (loss.shape, *(x.shape for x in found)) == ((), (1, 4), (1, 4))
