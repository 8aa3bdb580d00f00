"""Real checkpoints on real data formats. Minutes, not seconds."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.run import sources
from tim_jax.app.run.loggers import read_lines
from tim_jax.model import fitting, hf, transformer
from tim_jax.model.execution import Execution
from tim_jax.numerics import EXACT_F32
from tim_jax.tasks.text import character_tokenizer

pytestmark = pytest.mark.slow

LETTERS = "0123456789 abcdefghijklmnopqrstuvwxyz.?+=\n#"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}.{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant.{% endif %}"
)
SIZES = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 36,
    "max_position_embeddings": 96,
}
MODELS = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}, TEMPLATE),
    "mistral": (transformers.MistralConfig, {"hidden_size": 24, "sliding_window": 21}, None),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_hidden_layers": 1,
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
        TEMPLATE,
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 3,
            "q_lora_rank": 10,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
        },
        TEMPLATE,
    ),
}
MIXTURES = ("qwen3_moe", "deepseek_v3")
# What the run of a model has besides. Each is compiled for one model: none needs the others.
OF_MIXTURES = ('learner.routing="replayed"', "learner.objective.balance_coefficient=0.01")
CHANGES = {
    "qwen3": ("eval.every=3",),
    "mistral": (),
    "qwen3_moe": (
        *OF_MIXTURES,
        "learner.objective.kl_coefficient=0.01",
        'numerics.dtype="bfloat16"',
    ),
    "deepseek_v3": OF_MIXTURES,
}


def make_checkpoint(folder, name):
    """A checkpoint as `transformers` writes it, with random weights, tokenizer and template."""
    torch = pytest.importorskip("torch")
    make, changes, template = MODELS[name]
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.chat_template = template
    config = make(
        **{**SIZES, **changes},
        vocab_size=len(tokenizer) + 3,  # as real ones, padded beyond the tokenizer
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_gsm8k(path):
    """Sums in GSM8K's layout: question, and an answer that ends in `#### number`."""
    rows = [
        {
            "question": f"tom has {a} pens and gets {b}. how many?",
            "answer": f"{a}+{b}={a + b}\n#### {a + b}",
        }
        for a in range(1, 5)
        for b in range(1, 5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_config_of_gsm8k_takes_files_as_the_readme_says(tmp_path):
    files = {name: make_gsm8k(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    rows = [{"question": f"what is {i}?", "answer": f"#### {i}"} for i in range(300)]
    files["test"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = Path(__file__).parents[2] / "configs" / "gsm8k_qwen3_0.6b.toml"
    overrides = [f"task.path={files['train']}", f"task.eval_path={files['test']}"]
    task = sources.make_task(toml.load(path, overrides))
    try:
        assert (len(task.train), len(task.evaluation)) == (16, 256)
    finally:
        task.close()


def make_config(path, *, model, data, folder):
    path.write_text(
        f"""
steps = 3
exact = "required"
[model]
path = {json.dumps(str(model))}
[sampling]
samples = 8
max_prompt_length = 72
max_tokens = 10
[learner]
prompts_per_step = 4
micro_batch = 8
[learner.objective]
preset = "dapo"
[optimizer]
learning_rate = 0.002
weight_decay = 0.1
[task]
kind = "dataset"
path = {json.dumps(str(data))}
template = "{{prompt}} say a digit."
eval_share = 0.3
# As many as a step draws: an evaluation is then the same program as a step's sampler.
[eval]
every = 0
prompts = 4
samples = 8
[run]
folder = {json.dumps(str(folder))}
"""
    )
    return path


def our_logits(folder, tokens):
    config = hf.load_config(folder)
    params = jax.tree.map(jnp.asarray, hf.load_params(folder, config))
    execution = Execution(config, EXACT_F32)
    weights = execution.prepare(params)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None, :]
    hidden, _, _ = transformer.forward(
        weights, jnp.asarray(tokens, jnp.int32)[None], positions, execution=execution
    )
    return np.asarray(transformer.logits(weights, hidden[0], execution=execution))


def torch_logits(folder, tokens):
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.as_tensor(tokens)[None]).logits[0].numpy()


def unmeasured(config, numerics, **_):
    """In place of `fitting.calibrate`: the fixed tiles."""
    del config
    return numerics


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_transformers_learns_gsm8k_and_goes_back(
    name, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("math_verify")
    # The machine is measured for the first model alone, and once for both commands.
    measure = cache(fitting.calibrate) if name == "qwen3" else unmeasured
    monkeypatch.setattr(fitting, "calibrate", measure)
    source = make_checkpoint(tmp_path / "source", name)
    data = make_gsm8k(tmp_path / "train.jsonl")
    run, mixture = tmp_path / "run", name in MIXTURES
    config = make_config(tmp_path / "job.toml", model=source, data=data, folder=run)
    status = cli.main(["train", str(config), *CHANGES[name]])
    assert status == 0, capsys.readouterr()
    lines = list(read_lines(run / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["exact_share"] == 1 and line["compared_tokens"] >= 32 for line in lines[1:])
    assert all(line["grader/error"] == line["grader/timeout"] == 0 for line in lines[1:])
    assert all(line["routing/agreement"] == 1 for line in lines[1:] if mixture)
    learnt = [line for line in lines[1:] if mixture and line["tokens"]]
    assert all(1.9 < line["routing/balance"] < 5 for line in learnt)
    # Some guesses are right, some wrong: there was something to learn from.
    assert all(line["reward"] < 1 for line in lines[1:])
    assert any(line["reward"] > 0 < line["gradient_norm"] for line in lines[1:])
    sample = next(iter(read_lines(run / "samples.jsonl")))
    assert sample["prompt"].endswith("how many? say a digit.")
    assert sample["answer"].isdigit()
    tokens = np.random.default_rng(0).integers(0, 40, 30)
    theirs = torch_logits(run / "model", tokens)
    np.testing.assert_allclose(
        our_logits(run / "model", tokens), theirs, rtol=0, atol=1e-4 * np.abs(theirs).max()
    )
    assert np.abs(theirs - torch_logits(source, tokens)).max() > 1e-2 * np.abs(theirs).max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.chat_template == MODELS[name][2]
    assert tokenizer.decode(tokenizer.encode("tom has 3 pens")) == "tom has 3 pens"
    if mixture:
        assert cli.main(["export", str(run), str(tmp_path / "exported")]) == 0
        np.testing.assert_array_equal(theirs, torch_logits(tmp_path / "exported", tokens))
    if "eval.every=3" in CHANGES[name]:
        scores = tmp_path / "scores.json"
        assert cli.main(["eval", str(config), *CHANGES[name], "--json", str(scores)]) == 0
        assert json.loads(scores.read_text())["reward"] == lines[-1]["eval/reward"]
