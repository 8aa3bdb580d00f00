"""Options of a run crossed with each other: a combination is refused, or trains exactly.

Other tests have one option at a time.
"""

import random
from contextlib import suppress

import pytest

from tim_jax.app.config import toml
from tim_jax.app.jobs import train
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError

RUN = (
    "steps=2",
    "model={architecture={hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,"
    " intermediate_size=24, max_positions=24}}",
    "sampling={samples=4, max_prompt_length=8, max_tokens=8}",
    "learner.prompts_per_step=4",
    'task={kind="builtin", name="running_sums", parameters={digits=[1, 3], eval_size=16}}',
    "eval.every=0",
)
# For each run one of a line: overrides, of which "" is the default, drawn half of the time.
OPTIONS = (
    ("placement.fsdp=2", "placement.tensor=2", "placement={fsdp=2, tensor=2}", "placement.data=4"),
    ("placement.sampler={fsdp=2, tensor=2}", "placement.sampler={data=2}"),
    ("placement.split=true", 'placement.decode="sharded"', "numerics.column_tiles=2"),
    ('numerics.dtype="bfloat16"', 'numerics.dtype="float16"'),
    ("lora={rank=2, alpha=4.0}",),
    ("learner.micro_batch=4", "learner.micro_batch_tokens=64", "learner.length_buckets=2"),
    ("learner.remat=true", "learner.offload=true"),
    ("learner.mini_batches=2", "learner.epochs=2", "learner.refills=1"),
    ('learner.mode="recompute"',),
    (
        'learner.objective={preset="gspo", kl_coefficient=0.1}',
        'learner.objective={preset="rloo", aggregation="token_mean"}',
        'learner.objective={preset="grpo", estimator="remax"}',
        'learner.objective={preset="cispo", drop_uninformative=true}',
    ),
    (
        'learner.corrections=[{name="token_tis"}]',
        'learner.corrections=[{name="sequence_mis"}]',
        'learner.corrections=[{name="geometric_rejection"}, {name="normalise"}]',
    ),
    ("sampler.slots=4", "sampler.pages=16", "sampler.halvings=1"),
    ("sampler.max_staleness=1",),
    ("sampling.top_k=5", "sampling.top_p=0.9", "sampling.temperature=0.7"),
    ('optimizer.length_decay={kind="fixed", period=1}', "optimizer.max_grad_norm=0.1"),
)
EPISODES = (
    'task={kind="builtin", name="guessing", parameters={numbers=[4, 7], guesses=2}}',
    "sampling={samples=4, max_prompt_length=8, max_tokens=5, max_turns=2, max_episode_tokens=16}",
)


# With these all options but one occur, and most pairs of them.
NUMBERS = (5, 28, 38, 42, 119, 191)


def drawn(number: int) -> list[str]:
    """The first accepted overrides of those that a number stands for."""
    dice = random.Random(number)
    while True:
        found = [dice.choice(values) for values in OPTIONS if dice.random() < 0.5]
        found += [*EPISODES] * (dice.random() < 0.25)
        with suppress(InputError):
            toml.load(None, [*RUN, *found])
            return found


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_run_of_crossed_options_is_exact(tmp_path, number):
    folder = tmp_path / "run"
    train.train_run(toml.load(None, [*RUN, *drawn(number), f"run.folder={folder}"]))
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["step"]]
    assert [line["exact_share"] for line in lines] == [1.0, 1.0]
    assert min(line["mismatch/tokens"] for line in lines) > 0
