"""A run as one value: configuration, API and plan make the same one; its rules are said once."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import optax
import pytest
import tiny

import tim_jax as tim
from tim_jax import mismatch, objectives
from tim_jax.app.config import toml
from tim_jax.app.jobs import planning
from tim_jax.app.run import assembly, sources
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Batching
from tim_jax.placement import Placement
from tim_jax.rl import training
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
# What few configurations set, so that the run has it from elsewhere than a default.
CHANGES = (
    "learner.mini_batches=2",
    "learner.micro_batch=16",
    "learner.noise_scale=true",
    "learner.length_buckets=2",
    "sampler.slots=16",
    "sampler.pages=64",
    "learner.offload=true",
    "learner.refills=1",
    "sampling.top_k=5",
    "placement.sampler.data=2",
)
NO_OPTIMIZER = optax.identity()
RUN = Training(tiny.EXECUTION, Learning(objectives.rloo(), tiny.GROUP), optax.sgd(1e-2), 3)


def said(run: Training) -> Training:
    """Without the optimizer, whose functions are made anew."""
    return replace(run, optimizer=NO_OPTIMIZER)


def value_of(run, name):
    """What a run has in a field, wherever it is nested."""
    path, own = training._PLACES[name]
    for part in path:
        run = getattr(run, part)
    return getattr(run, own)


# A folder that a script makes; its architecture is known by the hub's name too.
BY_NAME = {"smollm2": ("model.path=HuggingFaceTB/SmolLM2-135M-Instruct",)}
CASES = [pytest.param(path, BY_NAME.get(path.stem, ()), id=path.name) for path in CONFIGS]
CASES += [
    pytest.param(path, changes, id=name)
    for path in CONFIGS
    if path.stem == "quickstart"
    for name, changes in {
        "with what few set": CHANGES,
        "without padding": ("learner.micro_batch_tokens=2048",),
    }.items()
]


@pytest.mark.parametrize(("path", "changes"), CASES)
def test_configuration_plan_and_api_make_the_same_run(path, changes):
    config = toml.load(path, changes)
    devices = tuple(jax.devices()) * 64  # planned for: nothing is made
    model = planning.model_config(config, None)
    planned = planning.workload_of(config, model, devices)
    bare = sources.Model(model, None, None, model.eos_token_ids)
    run = assembly.make_training(config, assembly.make_execution(config, bare, devices=devices))
    assert said(planned.training) == said(run)
    assert planned.prompt_length == config.sampling.max_prompt_length
    ours = tim.Model(
        model, None, None, model.eos_token_ids, run.execution.numerics, run.execution.placement
    )
    fields = set(training._PLACES) - {"sampler", "batching", "execution", "learning", "sampling"}
    api = ours.training(**{name: value_of(run, name) for name in fields})
    assert said(api) == said(run)


def test_a_field_is_changed_wherever_it_is_nested():
    found = RUN.varied(micro_batch=2, slots=4, temperature=0.5, epochs=3, max_staleness=1)
    assert found.learning == replace(RUN.learning, micro_batch=2)
    assert found.sampler == Sampler(batching=Batching(4), max_staleness=1)
    assert found.execution.sampling == replace(RUN.execution.sampling, temperature=0.5)
    assert found.epochs == 3
    apart = RUN.varied(placement=Placement(fsdp=2), sampler_placement=Placement(tensor=2))
    assert apart.execution.placement == Placement(fsdp=2)
    assert apart.drawing.placement == Placement(tensor=2)
    assert RUN.varied(slots=4, batching=Batching(8)).sampler.batching == Batching(4)
    with pytest.raises(InputError, match="no field 'microbatch'; did you mean 'micro_batch'"):
        RUN.varied(microbatch=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mini_batches": 0}, "mini_batches = 0: must be 1 or more"),
        ({"max_skipped": 0}, "max_skipped = 0: must be 1 or more"),
        ({"mini_batches": 5}, "mini_batches = 5: must divide the 12 sequences of a step"),
        ({"micro_batch": 5}, "micro_batch = 5: must divide the 12 sequences of a mini-batch"),
        ({"placement": Placement(fsdp=8)}, "must divide the 12 sequences of a step"),
        ({"sampler_placement": Placement(data=5)}, "must divide the 12 sequences of a step"),
        ({"max_staleness": 1, "offload": True}, "must be 0 with offload"),
        ({"max_staleness": -1}, "max_staleness = -1: must be 0 or more"),
        ({"micro_batch": 24}, "micro_batch = 24: must divide the 12 sequences of a mini-batch"),
        ({"refills": 1, "samples": 1, "objective": objectives.reinforce()}, "refills = 1"),
        ({"objective": objectives.dr_grpo()}, "max_length = None: must be given"),
        ({"noise_scale": True}, "needs a micro_batch below the 12 sequences"),
        (
            {
                "max_staleness": 1,
                "mismatch": mismatch.build([{"name": "stale_weights", "updates": 1}]),
            },
            "contradicts max_staleness",
        ),
        ({"top_k": 3, "objective": objectives.rloo(entropy_coefficient=0.1)}, "top_k"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        RUN.varied(**changes).check()


def test_a_run_is_exact_unless_its_sampler_differs_or_it_says_so():
    noise = mismatch.build([{"name": "log_prob_noise", "std": 0.1}])
    assert RUN.stops_unless_exact
    assert not RUN.varied(mismatch=noise).stops_unless_exact
    assert RUN.varied(mismatch=noise, exact=True).stops_unless_exact
    assert not RUN.varied(exact=False).stops_unless_exact
