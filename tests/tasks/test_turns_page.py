"""The example of docs/turns.md, with a tiny model in place of a large one."""

import re
import string
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import CONFIG, NUMERICS, params

import tim_jax as tim
from tim_jax.tasks.text import character_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "turns.md"


@pytest.mark.slow
def test_the_example_of_the_page_runs(monkeypatch, capsys):
    first, _, training, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    tokenizer = character_tokenizer(string.printable)
    config = replace(CONFIG, vocab_size=len(tokenizer), max_positions=256)
    model = tim.Model(config, params(config), tokenizer, (1,), NUMERICS)
    monkeypatch.setattr(tim, "load", lambda *args, **kwargs: model, raising=False)
    for shown, used in {
        "max_turns=8": "max_turns=3",
        "max_tokens=64": "max_tokens=4",
        "steps=100": "steps=2, samples=2, prompts_per_step=2",
    }.items():
        assert training.count(shown) == 1, shown
        training = training.replace(shown, used)
    names = {}
    exec(compile(first + training, str(PAGE), "exec"), names)
    lines = [tuple(map(float, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert all(1 <= turns <= 3 for _, turns in lines)
