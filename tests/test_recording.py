"""What another engine draws, written down in its process and read by the diagnosis."""

import errno
import fcntl
import importlib
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import tim_jax as tim
from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis import readers
from tim_jax.instruments.diagnosis.declared import Shaping
from tim_jax.instruments.diagnosis.rollouts import Limits, collect
from tim_jax.model import hf

ROOT = Path(__file__).parent.parent
EXAMPLE = "<!-- example: run by tests/test_recording.py -->\n```python\n"
LIMITS = Limits(vocabulary=50, positions=16, routes=(2, 1, 4))
ROW = {"prompt_token_ids": [5, 6], "response_token_ids": [8, 9], "logprobs": [-0.5, -1.25]}


def test_what_is_written_is_what_is_read(tmp_path):
    file = tmp_path / "rollouts.jsonl"
    with tim.capture(file) as rows:
        rows.write(**ROW, weights_version="3")
    with tim.capture(file) as rows:  # a second process, or a second time
        rows.write(
            prompt_token_ids=np.asarray([5, 6], np.int32),
            response_token_ids=(8, 4, 9),
            logprobs=np.asarray([-0.5, np.nan, -1.25], np.float32),
            mask=np.asarray([True, False, True]),
            finish_reason="stop",
            stop_reason=9,
            weights_version=3,
            sampling={"temperature": np.float32(0.5), "repetition_penalty": 1.5, "top_k": 7},
            supports=[[8, 1], (), np.asarray([9])],
            routes=np.zeros((4, 2, 1), np.int32),
        )
        rows.write(**ROW, kept_log_mass=np.asarray([-0.25, 0.0], np.float32))
        rows.write(**ROW, mask=[1, 0], kept_log_mass=[-0.25, math.nan])
        rows.write(**ROW, episode=7, turn=1)
        rows.write(**ROW, turn_token_ids=[np.asarray([8]), (9,)])
    first, second, third, masked, turn, whole = collect(readers.read(file), limits=LIMITS).responses
    assert (first.prompt, first.tokens) == ((5, 6), (8, 9))
    assert first.log_probs.tolist() == [-0.5, -1.25]
    assert second.mask is not None
    assert second.mask.tolist() == [True, False, True]
    assert second.log_probs.tolist()[::2] == [-0.5, -1.25]
    assert (second.ended, second.end, second.version) == ("token", 9, "3")
    assert (second.declared.temperature, second.declared.top_k) == (0.5, 7)
    assert second.declared.shaping == Shaping(repetition=1.5)
    assert second.supports is not None
    assert second.supports.tolist() == [[8, 1], [-1, -1], [9, -1]]
    assert second.routes is not None
    assert second.routes.shape == (5, 2, 1)
    assert third.kept_log_mass is not None
    assert third.kept_log_mass.tolist() == [-0.25, 0.0]
    assert masked.kept_log_mass is not None
    assert masked.kept_log_mass.tolist() == [-0.25, 0.0]
    assert (turn.episode, turn.turn) == ("7", 1)
    assert whole.turns == ((8,), (9,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-1.0]}, "2 response tokens, but 1 logprobs and 2 places of the mask"),
        ({"mask": [1]}, "2 response tokens, but 2 logprobs and 1 places of the mask"),
        ({"logprobs": [-1.0, None]}, r"logprobs\[1\] is no finite number; mask it or mend it"),
        ({"logprobs": None}, "logprobs must be a list, got None"),
        ({"prompt_token_ids": np.array([[5, 6]])}, r"must be a list of whole numbers, got array"),
        ({"response_token_ids": [8.7, 9]}, r"must be a list of whole numbers, got \[8\.7, 9\]"),
        ({"mask": [2, -1]}, r"mask must be of 0 and 1, got \[2, -1\]"),
        ({"supports": [None]}, r"supports\[0\] must be a list, got None"),
        ({"turn_token_ids": [8, 9]}, r"turn_token_ids\[0\] must be a list, got 8"),
        ({"sampling": {"temperature": math.nan}}, "the row cannot be written as JSON: "),
        ({"sampling": object()}, 'sampling must be a mapping, such as {"temperature": 0.7}, got'),
        ({"sampling": {"temperature": -1}}, "temperature must be 0 or more, got -1"),
        ({"sampling": {"temperature": "0.7"}}, "temperature must be a number, got '0.7'"),
        ({"supports": [[8]]}, "2 response tokens, but 1 places of supports"),
        ({"kept_log_mass": [-0.1]}, "2 response tokens, but 1 places of kept_log_mass"),
        ({"kept_log_mass": [-0.1, None]}, r"kept_log_mass\[1\] is no finite number"),
        ({"logprobs": [-0.5, 0.5]}, r"logprobs\[1\] = 0\.5 is positive"),
        ({"turn": "1"}, "turn must be a whole number, got '1'"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be token ids, "),
        ({"response_token_ids": [8, -1]}, "response_token_ids must be token ids, "),
        ({"response_token_ids": [True, False]}, "response_token_ids must be token ids, "),
        ({"supports": [[8], [9]], "kept_log_mass": [-0.1, -0.1]}, "leave the latter out"),
        ({"supports": [[], [8]]}, r"response_token_ids\[1\] = 9 was drawn, but is not in supports"),
    ],
)
def test_rows_that_could_not_be_read_are_not_written(tmp_path, change, message):
    file = tmp_path / "rollouts.jsonl"
    with tim.capture(file) as rows, pytest.raises(InputError, match=message):
        rows.write(**(ROW | change))
    assert not file.read_text()
    with pytest.raises(InputError, match="capture: cannot write"):
        tim.capture(tmp_path / "no" / "x.jsonl")
    with pytest.raises(InputError, match=r"rollouts\.jsonl is closed; write within"):
        rows.write(**ROW)


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tim.capture("~/rows.jsonl").close()
    assert (tmp_path / "rows.jsonl").exists()
    for wrong, message in ((5, "path must be text"), ("gs://bucket/rows.jsonl", "is a URL")):
        with pytest.raises(InputError, match=message):
            tim.capture(wrong)  # pyright: ignore[reportArgumentType]


def test_a_row_without_room_is_refused_and_leaves_nothing(tmp_path):
    """Once room has been made, the next row is a line of its own."""
    file, limits = tmp_path / "rollouts.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with tim.capture(file) as rows:
        rows.write(**ROW)
        size = file.stat().st_size
        try:
            for room in (size // 2, 0):  # a part of the row fits, or nothing of it
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
                with pytest.raises(InputError, match=r"^capture: cannot write .*rollouts\.jsonl: "):
                    rows.write(**ROW)
                assert file.stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        rows.write(**ROW)
    assert len(collect(readers.read(file), limits=LIMITS).responses) == 2


def test_a_file_system_without_locks_takes_rows(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with tim.capture(tmp_path / "rollouts.jsonl") as rows:
        rows.write(**ROW)
        rows.write(**ROW)
    assert len(collect(readers.read(tmp_path / "rollouts.jsonl"), limits=LIMITS).responses) == 2


def test_the_writer_imports_the_standard_library_alone(tmp_path):
    program = (
        "import json, sys\nbefore = set(sys.modules)\nimport tim_jax\n"
        "with tim_jax.capture(sys.argv[1]) as rows:\n"
        "    rows.write(prompt_token_ids=[1], response_token_ids=[2], logprobs=[-1.0])\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before} - {'tim_jax'}\n"
        "print(json.dumps(sorted(tops - set(sys.stdlib_module_names))))\n"
    )
    file = tmp_path / "rollouts.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
    assert json.loads(file.read_text())["logprobs"] == [-1.0]


def recipe(start):
    """The recipe of docs/capture.md that begins so."""
    _, *found = (ROOT / "docs" / "capture.md").read_text().split(EXAMPLE)
    (code,) = (one.partition("```")[0] for one in found if one.startswith(start))
    return code


def stand_ins():
    """What vLLM, SGLang, TRL and tunix answer, as far as the recipes look at it."""
    prompt, tokens, log_probs = ROW.values()
    steps = [{t: SimpleNamespace(logprob=x)} for t, x in zip(tokens, log_probs, strict=True)]
    output = SimpleNamespace(
        token_ids=tokens, logprobs=steps, finish_reason="stop", stop_reason=None
    )
    request = SimpleNamespace(prompt_token_ids=prompt, outputs=[output])
    triples = [(x, t, None) for t, x in zip(tokens, log_probs, strict=True)]
    meta = {"output_token_logprobs": triples, "finish_reason": {"type": "stop", "matched": 9}}
    padded = SimpleNamespace(
        left_padded_prompt_tokens=np.asarray([[0, *prompt]]),
        tokens=np.asarray([[*tokens, 0]]),
        logprobs=[np.asarray(log_probs)],
    )
    return {
        "for output in llm": {
            "llm": SimpleNamespace(generate=lambda *given: [request]),
            "params": SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0),
            "prompts": ["ab"],
        },
        "answers = engine": {
            "engine": SimpleNamespace(generate=lambda **given: [{"meta_info": meta}]),
            "prompts": [prompt],
        },
        "for prompt, tokens": {
            "made": {"prompt_ids": [prompt], "completion_ids": [tokens], "logprobs": [log_probs]}
        },
        "made = rollout": {
            "rollout": SimpleNamespace(generate=lambda *given: padded),
            "prompts": ["ab"],
            "config": None,
            "pad_id": 0,
        },
    }


@pytest.mark.parametrize("start", stand_ins())
def test_recipes_write_what_engines_answer(tmp_path, start):
    file = tmp_path / "rollouts.jsonl"
    with tim.capture(file) as rows:
        exec(recipe(start), stand_ins()[start] | {"rows": rows})
    (response,) = collect(readers.read(file), limits=LIMITS).responses
    assert (response.prompt, response.tokens) == ((5, 6), (8, 9))
    assert response.log_probs.tolist() == [-0.5, -1.25]


@pytest.mark.slow
def test_the_recipe_for_transformers_is_read_and_found_sound(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    table = importlib.import_module("diagnose_table")
    folder = tmp_path / "model"
    generation = {"eos_token_id": list(table.STOPS)}
    params = jax.device_get(table.params())
    hf.save(folder, params, table.CONFIG, tokenizer=table.TOKENIZER, generation=generation)
    names = {}
    exec(recipe("import torch"), names)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    file = tmp_path / "r.jsonl"
    names["draw"](model, table.TOKENIZER, ["abc", "xyz+"] * 8, file, temperature=0.7)
    found = tim.diagnose(tim.load(folder), file)
    assert found.verdict.state == "numerics"
    assert found.record["sizes"]["largest"] < 1e-4
    assert found.verdict.tokens.responses[0].declared.temperature == 0.7
