"""What a configuration's task is: its rows, and who says what they are worth."""

import json
from pathlib import Path

from tim_jax.app.config import toml
from tim_jax.app.run import grading

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
    task = grading.make_task(toml.load(CONFIG, [f"{k}={v}" for k, v in changes.items()]))
    try:
        assert [example.answer for example in task.train] == [words]
    finally:
        task.close()
