"""Learner steps from rows of another engine."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import tim_jax as tim
from tim_jax import corrections, metrics, objectives
from tim_jax.api import learning, rollouts
from tim_jax.common.errors import InputError, MismatchError
from tim_jax.instruments.auditing import random_params
from tim_jax.model import hf
from tim_jax.model.execution import Sampling
from tim_jax.policy import scoring
from tim_jax.rl import loop, programs
from tim_jax.tasks.text import character_tokenizer

pytestmark = pytest.mark.usefixtures("traced_once")

PROMPTS = ["2 + 2", "3 + 1"]
REWARDS = np.random.default_rng(0).standard_normal(8)
SGD = optax.sgd(0.1)
bits = tiny.bits


def made(folder, **sizes):
    """A model that can read; many stop tokens, so that responses are of any length."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 +")
    stops = (tokenizer.eos_token_id, *range(5, len(tokenizer), 8))
    sizes = {"vocab_size": len(tokenizer), "max_positions": 32, "eos_token_ids": stops} | sizes
    config = replace(tiny.UNTIED, num_layers=1, **sizes)
    return tim.load(hf.save(folder, random_params(config, 0), config, tokenizer=tokenizer))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("models") / "plain")


def rows_of(rollout, **more):
    """A rollout as an engine would have written it down."""
    arrays = rollout.arrays
    return [
        {
            "prompt_token_ids": arrays.prompts[i, : arrays.prompt_lengths[i]].tolist(),
            "response_token_ids": rollout.tokens[i, :length].tolist(),
            "logprobs": rollout.log_probs[i, :length].tolist(),
            "finish_reason": "stop" if rollout.finished[i] else "length",
            "temperature": rollout.sampling.temperature,
            **more,
        }
        for i, length in enumerate(rollout.lengths)
    ]


@pytest.fixture(scope="module")
def rollout(model):
    """As long as `learn` pads its rows, so that both of them are learnt from by one program."""
    return tim.sample(model, PROMPTS, samples=4, max_tokens=16, seed=3)


@pytest.fixture(scope="module")
def rows(rollout):
    return rows_of(rollout)


def off(rows, size=0.1):
    """What an engine that computes otherwise would have recorded."""
    rng = np.random.default_rng(1)

    def moved(x):
        return np.minimum(x + size * rng.standard_normal(len(x)), 0.0).tolist()

    return [row | {"logprobs": moved(row["logprobs"])} for row in rows]


def test_a_step_from_own_rows_is_the_step_of_the_loop(model, rollout, rows):
    step = tim.learn(model, rows, REWARDS, optimizer=SGD)
    assert (step.number, step.metrics["exact_share"], step.metrics["mismatch/kl_k3"]) == (1, 1.0, 0)
    assert step.samples[0].completion == rollout.text[0]
    run = model.training(samples=4, prompts_per_step=2, optimizer=SGD)
    built = programs.build(run)
    state = built.init(jax.tree.map(jnp.array, model.params))
    weights = built.prepare(state.params)
    state, *_ = loop.learn(state, weights, rollout.arrays, jnp.float32(REWARDS), programs=built)
    assert bits(step.model.params) == bits(state.params)
    assert bits(step.model.params) != bits(model.params)
    assert rows == rows_of(rollout)


@pytest.mark.slow
def test_a_state_that_waits_in_the_hosts_memory_is_learnt_with(model, rows):
    """Of a model, whose state is on the devices at first, and of a step."""
    found = []
    for offload in (False, True):
        training = model.training(samples=4, prompts_per_step=2, offload=offload)
        step = tim.learn(model, rows, REWARDS, optimizer=SGD, training=training)
        first = bits(step.model.params)
        found.append((first, bits(tim.learn(step, rows, REWARDS).model.params)))
        assert first != bits(model.params)
    assert found[0] == found[1]


def test_a_step_of_a_loop_with_refills_is_gone_on_from(model, rows):
    step = tim.learn(model, rows, REWARDS, optimizer=SGD)
    run = step.started.programs.training

    def of_run(**changes):
        built = replace(step.started.programs, training=run.varied(**changes))
        return replace(step, started=step.started._replace(programs=built))

    with pytest.raises(InputError, match=r"drawn elsewhere; start anew from step\.model"):
        tim.learn(of_run(max_staleness=1), rows, REWARDS)
    assert tim.learn(of_run(refills=1), rows, REWARDS).number == 2


@pytest.mark.slow
def test_state_goes_in_and_comes_out(model, rows):
    """That of adapters and of a reference too."""
    how = {"training": model.training(lora=tim.Lora(2)), "objective": objectives.grpo()}
    first = tim.learn(model, off(rows), REWARDS, optimizer=optax.adam(1e-2), **how)
    after = first.model
    assert bits(after.params) != bits(model.params)
    second = tim.learn(first, rows[:4], REWARDS[:4])
    assert second.number == 2
    assert int(second.state.step) == 2
    assert int(second.state.optimizer[0].count) == 2  # Adam's moments went on
    assert second.adapter.lora == tim.Lora(2)
    assert second.metrics["loss/reference_kl"] > 0  # the first step's weights have moved
    assert second.metrics["mismatch/kl_k3"] > 1e-6  # the rows are of the weights before
    scored = tim.score(after, rows[:4])
    recorded = tim.score(model, rows[:4])
    with pytest.raises(InputError, match="micro_batch is for a rollout of `sample`"):
        tim.score(model, rows[:4], micro_batch=2)
    mask = np.arange(scored.shape[1]) < [[len(r["logprobs"])] for r in rows[:4]]
    expected = metrics.mismatch_metrics(*map(jnp.asarray, (scored, recorded, mask)))
    np.testing.assert_allclose(second.metrics["mismatch/kl_k3"], expected["kl_k3"], rtol=1e-4)
    with pytest.raises(InputError, match="the model of step 1 is gone"):
        tim.learn(first, rows, REWARDS)
    with pytest.raises(InputError, match="seed is that of the first step"):
        tim.learn(second, rows, REWARDS, seed=1)
    with pytest.raises(InputError, match="optimizer is that of the first step"):
        tim.learn(second, rows, REWARDS, optimizer=SGD)


@pytest.mark.slow
def test_the_recorded_log_probs_are_the_behaviour_policy(model, rows):
    """In bypass mode in the loss's ratio, in recompute mode in the correction."""
    seen = off(rows)
    exact = tim.score(model, rows)
    kept = [np.asarray(exact[i, : len(r["logprobs"])]) for i, r in enumerate(rows)]
    recorded = [np.asarray(r["logprobs"]) for r in seen]
    ratios = np.concatenate([np.exp(a - b) for a, b in zip(kept, recorded, strict=True)])
    bypass = tim.learn(model, seen, REWARDS, optimizer=SGD)
    np.testing.assert_allclose(bypass.metrics["loss/ppo_ratio_max"], ratios.max(), rtol=1e-5)
    assert bypass.metrics["exact_share"] < 0.1
    how = {"correction": corrections.token_tis(cap=1.05), "optimizer": SGD}
    step = tim.learn(model, seen, REWARDS, **how)
    assert step.started.programs.training.learning.mode == "recompute"
    assert step.metrics["loss/ppo_ratio_max"] == 1.0
    capped = np.minimum(ratios, 1.05)
    found = step.metrics["correction/coefficient_mean"]
    np.testing.assert_allclose(found, capped.mean(), rtol=1e-4)


def test_what_sample_returns_is_as_good_as_rows(model, rollout, rows):
    training = model.training()
    found = learning.learnable(model, rollout, "auto", training)
    expected = learning.learnable(model, rows, "auto", training)
    arrays = [rollouts.lay_out(responses, training.execution) for responses in (found, expected)]
    assert bits(arrays[0]) == bits(arrays[1])
    greedy = replace(rollout, sampling=replace(rollout.sampling, temperature=0.0))
    with pytest.raises(InputError, match="learn: the rollout is greedy"):
        tim.learn(model, greedy, REWARDS)


def test_lengths_count_what_the_model_drew(model, rows):
    """As those of an episode: a tool's reply makes no response overlong."""
    mask = [1, 1, 0, 0, 0, 1]
    tokens = (rows[0]["response_token_ids"] * 6)[:6]
    row = rows[0] | {"response_token_ids": tokens, "logprobs": [-1.0] * 6, "mask": mask}
    training = model.training()
    responses = learning.learnable(model, [row], "auto", training)
    rollout = rollouts.lay_out(responses, training.execution)
    assert (rollout.drawn_lengths.tolist(), rollout.lengths.tolist()) == ([3], [6])
    assert rollout.mask[0, :6].astype(int).tolist() == mask


def test_a_row_that_ends_with_a_stop_token_of_the_training_is_not_cut(model, rows):
    """Where the row does not say how it ended."""
    end = next(t for t in range(model.config.vocab_size) if t not in model.stop_tokens)
    rows = [
        {k: v for k, v in row.items() if k != "finish_reason"}
        | {"response_token_ids": [*row["response_token_ids"][:-1], end]}
        for row in rows
    ]
    how = {"optimizer": SGD, "objective": objectives.Objective(drop_cut=True)}
    stopped = tim.learn(model, rows, REWARDS, training=model.training(stop_tokens=(end,)), **how)
    assert stopped.metrics["cut_share"] == 0.0
    assert stopped.metrics["tokens"] == sum(len(row["response_token_ids"]) for row in rows)


@pytest.mark.parametrize("between", [[], [7]], ids=["", "a newline of the template"])
def test_padding_behind_a_response_is_not_where_it_ended(model, rows, between):
    """Rows that do not say how they ended, of a batch that is filled up to one width."""
    changed, execution = [], model.execution(Sampling(1))
    for row in rows:
        count, more = len(row["logprobs"]), 20 - len(row["logprobs"])
        behind = [*between, *[model.tokenizer.pad_token_id] * more][:more]
        filled = {
            "response_token_ids": row["response_token_ids"] + behind,
            "logprobs": row["logprobs"] + [0.0] * more,
            "mask": [1] * count + [0] * more,
        }
        changed.append(row | filled | {"finish_reason": None})
    found, expected = (
        rollouts.lay_out(learning.learnable(model, x, "auto", model.training()), execution)
        for x in (changed, rows)
    )
    assert expected.finished.any()
    assert not expected.finished.all()
    np.testing.assert_array_equal(found.finished, expected.finished)


def test_end_tokens_of_a_request_end_its_rows(model, rows):
    """Where a row does not say how it ended."""
    changed = [
        {key: value for key, value in row.items() if key != "finish_reason"}
        | {"sampling_params": {"stop_token_ids": [row["response_token_ids"][-1]]}}
        for row in rows
    ]
    learnable = learning.learnable(model, changed, "auto", model.training())
    assert rollouts.lay_out(learnable, model.execution(Sampling(1))).finished.all()


@pytest.mark.slow
def test_a_buffer_of_the_longest_row_suffices(model, rows):
    """Whatever widths its arrays are padded to."""
    longest = max(len(row["prompt_token_ids"] + row["response_token_ids"]) for row in rows)
    step = tim.learn(
        model, rows, REWARDS, optimizer=SGD, training=model.training(micro_batch_tokens=longest)
    )
    assert step.metrics["exact_share"] == 1.0
    expected = tim.learn(model, rows, REWARDS, optimizer=SGD)
    pairs = step.model.params, expected.model.params
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), *pairs)


@pytest.mark.slow
def test_a_step_that_must_be_exact_refuses_other_log_probs(model, rows):
    how = {"optimizer": SGD, "training": model.training(exact=True)}
    assert tim.learn(model, rows, REWARDS, **how).metrics["exact_share"] == 1.0
    with pytest.raises(MismatchError, match="response tokens have unequal log-probs"):
        tim.learn(model, off(rows), REWARDS, **how)


@pytest.mark.slow
def test_a_mask_leaves_out_what_the_model_did_not_draw(model, rows):
    """A tool's tokens have no log-prob, and change nothing but the context."""
    long = max(range(8), key=lambda i: len(rows[i]["logprobs"]))
    count = len(rows[long]["logprobs"])
    changed = [dict(row) for row in rows]
    changed[long] |= {
        "logprobs": [None, *rows[long]["logprobs"][1:]],
        "mask": [0] + [1] * (count - 1),
    }
    step = tim.learn(model, changed, REWARDS, optimizer=SGD)
    whole = sum(len(row["logprobs"]) for row in rows)
    assert (step.metrics["tokens"], step.metrics["exact_share"]) == (whole - 1, 1.0)


def kept_of(model, rollout, count):
    """i32[B, R, count], the likeliest tokens, and their log-mass f32[B, R]."""

    def likeliest(logits, tokens):
        values, ids = jax.lax.top_k(logits, count)
        mass = jax.nn.logsumexp(values, axis=1) - jax.nn.logsumexp(logits, axis=1)
        return ids, mass

    execution = model.execution(Sampling(6))
    run = jax.jit(lambda w, r: scoring.of_logits(w, r, likeliest, execution=execution))
    arrays = jax.tree.map(jnp.asarray, rollout.arrays)
    return jax.device_get(run(model.weights, arrays))


@pytest.mark.slow
def test_what_a_truncation_kept_is_scored_and_learnt_under(model):
    drawn = tim.sample(model, PROMPTS, samples=4, max_tokens=6, top_k=5, seed=1)
    ids, mass = kept_of(model, drawn, 5)
    plain = rows_of(drawn)
    supported, massed = [], []
    for row, own, log_mass in zip(plain, ids.tolist(), mass.tolist(), strict=True):
        count = len(row["logprobs"])
        flat = [token for ids in own[:count] for token in ids]
        mask = {"token_ids": flat, "offsets": list(range(0, len(flat) + 1, 5))}  # as vLLM has it
        supported.append(row | {"sampling_mask": mask})
        massed.append(row | {"kept_log_mass": log_mass[:count]})
    assert np.array_equal(tim.score(model, supported), drawn.log_probs)
    np.testing.assert_allclose(tim.score(model, massed), drawn.log_probs, atol=1e-5)
    step = tim.learn(model, supported, REWARDS, optimizer=SGD)
    assert step.metrics["exact_share"] == 1.0
    # Without padding, and in recompute mode.
    how = {"correction": corrections.token_tis(cap=1.05), "optimizer": SGD}
    packed = model.training(micro_batch_tokens=64)
    step = tim.learn(model, supported, REWARDS, training=packed, **how)
    assert step.started.programs.training.learning.mode == "recompute"
    assert step.metrics["exact_share"] == step.metrics["correction/coefficient_mean"] == 1.0
    near = tim.learn(model, massed, REWARDS, optimizer=SGD)
    assert near.metrics["mismatch/log_ratio_abs_max"] < 1e-5
    entropy = replace(objectives.grpo(), entropy_coefficient=0.1)
    without = tim.learn(model, plain, REWARDS, optimizer=SGD, objective=entropy)
    assert without.metrics["mismatch/ratio_mean"] < 0.95  # as TRL 7269 has it at top-p 0.8
    for rows in (supported, massed, [*plain[:7], massed[7]]):
        with pytest.raises(InputError, match="is about the whole distribution"):
            tim.learn(model, rows, REWARDS, objective=entropy)
    with pytest.raises(InputError, match="is about the whole distribution"):
        tim.learn(without, supported, REWARDS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    sizes = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
    folder = tmp_path_factory.mktemp("models") / "mixture"
    return made(folder, model_type="qwen3_moe", norm_topk_prob=True, **sizes)


def routed(model):
    """Rows with the experts that the sampler took."""
    execution = replace(model.execution(Sampling(6)), routing="compared")
    program = programs.sampling_program(execution, samples=4)
    found = jax.device_get(program(model.weights, tiny.prompts(count=2), jax.random.key(0)))
    for i, (before, after) in enumerate(zip(found.prompt_lengths, found.lengths, strict=True)):
        yield {
            "prompt_token_ids": found.prompts[i, :before].tolist(),
            "response_token_ids": found.responses[i, :after].tolist(),
            "logprobs": found.log_probs[i, :after].tolist(),
            "routed_experts": found.routes[i, : before + after - 1].tolist(),
        }


@pytest.mark.slow
def test_experts_of_another_engine_are_replayed_and_compared(mixture):
    rows = list(routed(mixture))
    # So that the second step begins where the first did.
    how: dict[str, Any] = {"optimizer": optax.sgd(0.0)}
    replaying = mixture.training(routing="replayed")
    step = tim.learn(mixture, rows, REWARDS, training=replaying, **how)
    assert (step.metrics["exact_share"], step.metrics["routing/agreement"]) == (1.0, 1.0)
    experts = mixture.config.num_experts
    other = [r | {"routed_experts": (np.array(r["routed_experts"]) + 1) % experts} for r in rows]
    moved = tim.learn(step, other, REWARDS)
    assert moved.metrics["exact_share"] < 0.5
    assert moved.metrics["routing/agreement"] < 0.9
    compared = mixture.training(routing="compared")
    step = tim.learn(mixture, other, REWARDS, training=compared, **how)
    assert step.metrics["exact_share"] == 1.0
    assert step.metrics["replayed/kl_k3"] > 1e-4
    bare = [{k: x for k, x in r.items() if k != "routed_experts"} for r in rows]
    with pytest.raises(InputError, match="row 1: has no routes, which all rows of this step must"):
        tim.learn(mixture, bare, REWARDS, training=compared)


@pytest.mark.slow
def test_the_loop_of_the_page_runs(model, rows, tmp_path, monkeypatch):
    """docs/learn.md, with an engine that stands in for a real one."""
    text = (Path(__file__).parents[2] / "docs" / "learn.md").read_text()
    _, code, verl = (part.partition("```\n")[0] for part in text.split(RUN_HERE))
    monkeypatch.setattr(tim, "load", lambda *_, **__: model, raising=False)
    monkeypatch.chdir(tmp_path)
    loaded = []
    engine = SimpleNamespace(load_weights=lambda arrays: loaded.append(dict(arrays)))
    given = {"engine": engine, "engine_draws": lambda: [(off(rows), REWARDS)] * 2}
    exec(code, given)
    assert given["step"].number == 2
    assert len(loaded) == 2
    assert (tmp_path / "trained" / "config.json").is_file()
    Path("rollouts.jsonl").write_text(f"{json.dumps(verl_batch(off(rows)))}\n" * 2)
    Path("rewards.jsonl").write_text(f"{json.dumps(list(map(float, REWARDS)))}\n" * 2)
    exec(verl, given)
    assert given["step"].number == 4
    assert given["step"].metrics["tokens"] == sum(len(row["logprobs"]) for row in rows)


RUN_HERE = "<!-- example: run by tests/api/test_learning.py -->\n```python\n"


def verl_batch(rows):
    """As docs/diagnose.md writes a batch of verl's trainer: prompts filled up on their left."""
    longest = [
        max(len(row[key]) for row in rows) for key in ("prompt_token_ids", "response_token_ids")
    ]
    batch = {"prompts": [], "responses": [], "response_mask": [], "rollout_log_probs": []}
    batch["attention_mask"] = []
    for row in rows:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        before, after = (size - len(x) for size, x in zip(longest, (prompt, response), strict=True))
        batch["prompts"].append([0] * before + prompt)
        batch["responses"].append(response + [0] * after)
        batch["response_mask"].append([1] * len(response) + [0] * after)
        batch["rollout_log_probs"].append(row["logprobs"] + [0.0] * after)
        here = [1] * (len(prompt) + len(response))
        batch["attention_mask"].append([0] * before + here + [0] * after)
    return batch | {"temperature": 1.0}


def test_rows_without_a_temperature_are_scored_at_1_with_a_warning(model, rows, caplog):
    expected = tim.score(model, rows)
    assert not caplog.messages
    silent = [{k: v for k, v in row.items() if k != "temperature"} for row in rows[:3]]
    assert tim.score(model, [*silent, *rows[3:]]).tobytes() == expected.tobytes()
    (line,) = caplog.messages
    assert line.startswith("tim_jax: score: 3 of 8 rows do not say their temperature")


def test_weights_go_out_by_their_names(model, tmp_path):
    folder = tim.save(model, tmp_path / "saved", dtype="bfloat16")
    again = hf.load_params(folder, model.config)
    given = dict(tim.named_arrays(model, dtype="bfloat16"))
    assert "model.layers.0.self_attn.q_proj.weight" in given
    views = dict(hf._views(again, model.config))
    assert given.keys() == views.keys()
    for name, array in given.items():
        assert array.dtype.name == "bfloat16"
        assert np.array_equal(array.astype("f4"), views[name])
    with pytest.raises(InputError, match="dtype 'int8' is unknown"):
        tim.named_arrays(model, dtype="int8").__next__()


def test_rewards_may_be_what_a_reward_model_returns():
    """A tensor that has a gradient, or is in bfloat16."""
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True)
        found = learning._read_rewards("rewards", given, 2, "rows")
        assert found.dtype == np.float32
        assert found.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": REWARDS[:3]}, r"rewards has the shape \(3,\), but there are 8 rows"),
        ({"rewards": [np.nan] * 8}, r"rewards\[0\] is nan; it must be finite"),
        ({"rewards": [0, -1e20] * 4}, r"rewards\[1\] is -1e\+20; it must be at most 1e\+15"),
        ({"rewards": ["good"] * 8}, r"rewards must be a list or array of 8 numbers, got \['good"),
        ({"rewards": (x for x in REWARDS)}, "rewards must be a list or array of 8 numbers, got <g"),
        ({"samples": 3}, "8 rows are no whole groups of 3 samples"),
        ({"samples": 8}, "row 5: has another prompt than row 1, but should be of its group of 8"),
        ({"each": {"temperature": 0}}, "row 1: is greedy"),
        ({"each": {"repetition_penalty": 1.2}}, "row 1: drawn with repetition penalty 1.2, which"),
        (
            {"each": {"temperature": 0.5, "logprobs_mode": "raw_logprobs"}},
            "row 1: has raw log-probs, but was drawn with temperature 0.5",
        ),
        ({"last": {"temperature": 0.5}}, "row 8: drawn with temperature 0.5, but row 1 with"),
        ({"last": {"kept_tokens": [[1]]}}, "row 8: supports must be of the"),
        ({"hidden": True}, "row 8: mask is 0 at all tokens; leave its group out"),
        ({"sampler": {"max_staleness": 1}}, "training has settings of a sampler"),
        (
            {"sampler": {"turns": tim.Turns()}},
            "training has turns = Turns.* but rows have no turns",
        ),
        ({"sampler": {"micro_batch_tokens": 2}}, "learn: micro_batch_tokens = 2: must be at least"),
        ({"objective": tim.objectives.dr_grpo()}, "which rows do not say; give it max_length"),
        ({"objective": tim.objectives.dapo(overlong_cache=9)}, "give it max_length"),
        ({"seed": -1}, "learn: seed must be at least 0, got -1"),
        ({"seed": 0.5}, "learn: seed must be a whole number, got 0.5"),
        ({"first": "model"}, "learn: model must be what tim_jax.load returns"),
    ],
)
def test_what_cannot_be_learnt_from(model, rows, change, message):
    rows = [row | change.get("each", {}) for row in rows]
    rows[-1] = rows[-1] | change.get("last", {})
    if "hidden" in change:
        rows[-1]["mask"] = [0] * len(rows[-1]["logprobs"])
    training = model.training(**change["sampler"]) if "sampler" in change else None
    with pytest.raises(InputError, match=message):
        tim.learn(
            change.get("first", model),
            rows,
            change.get("rewards", REWARDS),
            samples=change.get("samples"),
            objective=change.get("objective"),
            training=training,
            seed=change.get("seed"),
        )
