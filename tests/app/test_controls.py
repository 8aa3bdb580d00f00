"""Matched controls: a sampler's differences on both sides, where no token's log-prob differs."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.jobs import planning, train
from tim_jax.app.run import assembly, sources
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.rl import drawing

# What both sides can have, together with what changes nothing but a report.
SHARED = {
    "kv_cache": {"dtype": "float8_e4m3fn"},
    "quantised_weights": {"dtype": "int4"},
    "compute": {"dtype": "float16"},
    "split_k": {"pieces": 2},
}
# Two in a run: a learner without either would differ. Row ranges are measured for the dtype of
# `compute`, and not at all where `split_k` cuts contractions.
TOGETHER = (("compute", "kv_cache"), ("quantised_weights", "split_k"))
IMPOSSIBLE = {
    "native_kernels": {},
    "split_kv": {"programs": 64},
    "expert_capacity": {"factor": 1.0},
    "pallas_attention": {"interpret": True},
    "dropped_end": {},
    "logit_noise": {"std": 0.1},
    "stale_weights": {"updates": 1},
    "in_flight_updates": {"updates": 1, "every": 2},
}


def config(tmp_path, *changes):
    path = tmp_path / "run.toml"
    path.write_text(tiny.RUN)
    own = [f"run.folder={tmp_path / 'run'}", "run.export=false", "warmup.steps=0", "eval.every=0"]
    return toml.load(path, [*own, *changes])


def both(**entries):
    """The keys by which both sides have these entries, name -> arguments."""
    tables = [{"name": name, **arguments} for name, arguments in entries.items()]
    return f"sampler.mismatch={toml._inline(tables)}", "sampler.both_sides=true"


def first_rollout(config):
    """The weights that the sampler is given, and what it draws first."""
    job = train.assemble(config)
    weights = job.programs.prepare(jax.tree.map(jax.numpy.asarray, job.model.params))
    how = {"programs": job.programs, "seed": 0, "step": 1}
    drawn = drawing.finish(drawing.begin(weights, job.task, job.text, **how))
    return weights, drawn.rollout


@pytest.mark.slow
def test_a_control_samples_as_its_run_does_and_has_no_mismatch(tmp_path, unmeasured):
    """The strictest rule, `exact = required`, holds, though the tokens are the divergent ones.

    The divergent sampler rounds the weights of its own; the control is given them rounded.
    """
    change, control = both(quantised_weights=SHARED["quantised_weights"])
    weights, divergent = first_rollout(config(tmp_path, change, "exact=report"))
    rounded, shared = first_rollout(config(tmp_path, change, control))
    assert tiny.bits(rounded) != tiny.bits(weights)
    assert int(shared.lengths.sum()) > shared.lengths.size
    assert np.array_equal(shared.responses, divergent.responses)
    assert np.array_equal(shared.log_probs, divergent.log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_every_step_of_a_control_is_exact(tmp_path, names):
    check_control(tmp_path, *both(**{name: SHARED[name] for name in names}))


@pytest.mark.slow
def test_a_head_of_another_dtype_than_the_rest_is_exact(tmp_path):
    """Row ranges are measured for products of the compute dtype, and are not the head's."""
    check_control(tmp_path, 'numerics.dtype="bfloat16"', *both(lm_head={"dtype": "float32"}))


def check_control(tmp_path, *changes):
    folder = train.train_run(config(tmp_path, *changes))
    steps = [line for line in read_lines(folder / "metrics.jsonl") if line["step"]]
    assert len(steps) == 2
    assert all(line["unequal_tokens"] == 0 < line["compared_tokens"] for line in steps)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_a_learner_cannot_have_has_no_control(tmp_path, name):
    with pytest.raises(InputError, match=rf"sampler.both_sides = true: .*{name}.*both sides"):
        config(tmp_path, *both(**{name: IMPOSSIBLE[name]}))


def test_a_report_is_no_part_of_what_both_sides_have(tmp_path):
    with pytest.raises(InputError, match=r"'raw_log_probs': changes no token"):
        config(tmp_path, *both(raw_log_probs={}))
    dial = mismatch.build([{"name": "raw_log_probs"}, {"name": "logits", "dtype": "bfloat16"}])
    assert [entry.name for entry in dial.shared.entries] == ["logits"]


def test_every_entry_says_whether_it_has_a_control():
    names = {name for name, kind in mismatch.ENTRIES.items() if kind.no_control}
    assert names == {*IMPOSSIBLE, "triton_attention", "pad_mask"}


def test_a_control_is_planned_with_its_entries_once(tmp_path, unmeasured):
    """As the run has them: in the execution of both sides, and nothing in the sampler alone.

    A warm start is without them: it begins as that of the run which is controlled.
    """
    control = config(tmp_path, *both(quantised_weights=SHARED["quantised_weights"]))
    model = sources.make_model(control)
    planned = planning.workload_of(control, model.config, jax.devices()[:1])
    assert planned.sampler.mismatch == mismatch.EXACT
    execution = assembly.make_execution(control, model)
    assert planned.execution.edits == execution.edits != ()
    job: Any = SimpleNamespace(config=control, model=model, execution=execution)
    assert train._warm_execution(job).edits == ()
