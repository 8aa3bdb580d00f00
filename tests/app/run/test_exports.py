"""What is exported means the same to `transformers` 5, which is installed, and to version 4.57.

The environment variable TRANSFORMERS_4 names a folder that holds version 4.57 with what it needs
beside the rest of this environment, made by

    pip install --target FOLDER --no-deps transformers==4.57.6 tokenizers==0.22.2 \
        huggingface-hub==0.36.2 requests urllib3 certifi idna charset-normalizer

Without it the test of that version is skipped.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import CASES, make_model, torch_logits

from tim_jax.model import hf
from tim_jax.tasks.text import character_tokenizer

LETTERS = "abc 123"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
PROMPT = "1 2 ab"
TOKENS = np.random.default_rng(3).integers(0, 101, 40)

# Reads every folder in one, and writes what it computes of it, or why it does not read it.
READ = """
import json, sys
from pathlib import Path
import numpy as np, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
found = {"version": transformers.__version__}
for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    # AutoTokenizer of version 5 makes every Qwen2's tokenizer anew, whatever its files say.
    rebuilt = transformers.__version__ > "5" and model.config.model_type == "qwen2"
    tokenizer = (PreTrainedTokenizerFast if rebuilt else AutoTokenizer).from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], tokenize=False)
    with torch.no_grad():
        logits = model(torch.tensor([json.loads(sys.argv[3])])).logits[0]
    found[folder.name] = {
        "dtype": str(model.dtype),
        "logits": logits.float().tolist(),
        "ids": tokenizer.encode(chat),
        "eos": tokenizer.eos_token_id,
    }
print(json.dumps(found))
"""


def read_back(folder, tokens, version):
    """Of every folder in one, what a version of `transformers` makes of it."""
    where = os.environ.get("TRANSFORMERS_4", "")
    if version == "4.57" and not where:
        pytest.skip("transformers 4.57 is not here: TRANSFORMERS_4 names no folder with it")
    paths = [where] if version == "4.57" else []
    found = subprocess.run(
        [sys.executable, "-c", READ, str(folder), PROMPT, json.dumps(np.asarray(tokens).tolist())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    models = json.loads(found.stdout.splitlines()[-1])
    assert models.pop("version").startswith(version)
    return models


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with one of every case, as we write it, and their logits by torch."""
    theirs, ours = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("ours")
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.chat_template = TEMPLATE
    expected = {}
    for name in CASES:
        model = make_model(name)
        model.save_pretrained(theirs / name)
        expected[name] = torch_logits(model, TOKENS)
        config = hf.load_config(theirs / name)
        params = hf.load_params(theirs / name, config)
        hf.save(ours / name, params, config, tokenizer=tokenizer)
    return ours, expected, tokenizer.encode(f"{PROMPT} ")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.", "4.57"])
def test_every_family_and_rope_is_read_back(exported, version):
    folder, expected, ids = exported
    found = read_back(folder, TOKENS, version)
    assert found.keys() == expected.keys()
    for name, one in found.items():
        error = np.abs(np.asarray(one["logits"]) - expected[name]).max()
        assert error < 1e-5 * np.abs(expected[name]).max(), name
        assert (one["dtype"], one["ids"], one["eos"]) == ("torch.float32", ids, 1), name
