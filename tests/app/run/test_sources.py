"""A run's task, with who says what its answers are worth, and its final model."""

import json
from pathlib import Path

import pytest

from tim_jax.app.config import toml
from tim_jax.app.run import sources
from tim_jax.common.errors import InputError

CONFIG = Path(__file__).parents[3] / "configs" / "gsm8k_qwen3_0.6b.toml"


def test_an_environment_s_states_begin_as_lists_where_answers_are_lists(tmp_path):
    rows, game = tmp_path / "rows.jsonl", tmp_path / "words_game.py"
    words = '["crane", "slate"]'
    rows.write_text(json.dumps({"prompt": "Guess the words.", "answer": words}))
    game.write_text("def respond(state, completion): ...")
    changes = {
        "sampling.max_turns": 2,
        "sampling.max_tokens": 16,
        "sampling.max_episode_tokens": 64,
        "task.path": rows,
        "task.environment": f"{game}:respond",
        "task.eval_split": "none",
        "task.eval_share": 0,
    }
    task = sources.make_task(toml.load(CONFIG, [f"{k}={v}" for k, v in changes.items()]))
    try:
        assert [example.answer for example in task.train] == [words]
    finally:
        task.close()


def made_run(folder, *, model, checkpoints, steps=4):
    """A run folder with these checkpoints, and a final model of a step ("?": it does not say)."""
    (folder / "config.toml").write_text(f"steps = {steps}\n")
    for step in checkpoints:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    (folder / "model").mkdir()
    if model != "?":
        (folder / "model" / "training_step.json").write_text(json.dumps({"step": model}))
    return folder


@pytest.mark.parametrize(
    "run",
    [
        {"model": 4, "checkpoints": [3, 4]},
        {"model": 4, "checkpoints": [2, 3]},  # killed between the model and its checkpoint
        {"model": 4, "checkpoints": []},
        {"model": 4, "checkpoints": [3, 4], "steps": 9},
        {"model": "?", "checkpoints": [3, 4]},
        {"model": "?", "checkpoints": []},
    ],
)
def test_a_model_of_the_end_of_a_run_is_taken(tmp_path, run):
    folder = made_run(tmp_path, **run)
    assert sources.final_model(folder) == folder / "model"
    assert sources.final_step(folder) == (None if run["model"] == "?" else 4)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"model": 2, "checkpoints": [3, 4]}, "went on to step 4, its final model is of step 2;"),
        ({"model": 2, "checkpoints": [3]}, "went on to step 3, its final model is of step 2;"),
        ({"model": "?", "checkpoints": [3]}, "on to step 3, its final model is of an earlier end"),
    ],
)
def test_a_model_that_its_run_left_behind_is_not_taken(tmp_path, run, words):
    with pytest.raises(InputError, match=words):
        sources.final_model(made_run(tmp_path, **run))


def test_what_is_no_run_is_left_as_it_is(tmp_path):
    assert sources.final_model("some/name") == "some/name"
    assert sources.final_model(tmp_path) == tmp_path
    assert sources.final_step(tmp_path) is None
    (tmp_path / "model").mkdir()
    (tmp_path / "config.json").touch()  # of a model that lies beside another one
    assert sources.final_model(tmp_path) == tmp_path
