"""Experts on a mesh axis: the bits of one device, gradients, lockstep, and what is refused."""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from jax.sharding import PartitionSpec

from tim_jax import kernels, objectives, optimizers, placement
from tim_jax.app import cli
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.instruments.auditing.cases import placements
from tim_jax.kernels import experts
from tim_jax.model import hf, parameters
from tim_jax.model.config import LatentConfig
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, Routing
from tim_jax.numerics import Numerics
from tim_jax.placement import SINGLE, Placement, collectives
from tim_jax.rl import loop, programs, sharded
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning
from tim_jax.tasks import builtin
from tim_jax.tasks.text import character_tokenizer

E, K, D, WIDTH = 8, 3, 16, 8
QWEN = replace(
    tiny.UNTIED,
    model_type="qwen3_moe",
    num_experts=E,
    num_experts_per_tok=K,
    moe_intermediate_size=WIDTH,
    norm_topk_prob=True,
)
PROMPTS = 4
EVERYWHERE, OF_EXPERT = PartitionSpec(), PartitionSpec("expert")


def chosen(kind: str, rows: int) -> np.ndarray:
    """i32[rows, K]: drawn, or of all rows the same experts, which lie on one device or two."""
    if kind == "one":
        return np.broadcast_to(np.array([6, 7, 5], np.int32), (rows, K))
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(E)[:K] for _ in range(rows)]).astype(np.int32)


def made_on(where: Placement, on, numerics: Numerics):
    """What experts make of rows on a mesh, and the gradients for a cotangent of it, by function."""

    def local(x, gate_up, down, choice, cotangent):
        call = partial(
            experts.outputs,
            experts=choice,
            ops=kernels.family(numerics),
            numerics=numerics,
            exchange=collectives.exchange(where, count=E),
        )
        found, transpose = jax.vjp(call, x, gate_up, down)
        return found, transpose(cotangent)

    return jax.shard_map(
        local, mesh=on, in_specs=(OF_EXPERT,) * 5, out_specs=OF_EXPERT, check_vma=False
    )


def made(where: Placement, given, numerics: Numerics):
    """(outputs, gradients) on a placement."""
    on = placement.mesh(where, jax.devices())
    return jax.device_get(jax.jit(made_on(where, on, numerics))(*given))


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`jax.lax.ragged_all_to_all` as its documentation has it, by gathers: XLA:CPU has none."""
    operands, *sent = (
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    device = jax.lax.axis_index(axis_name)
    at = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        first, size, start = (x[source, device] for x in sent)
        inside = (at >= start) & (at < start + recv_sizes[source])
        rows = operands[source, jnp.where(inside, first + at - start, 0)]
        output = jnp.where(inside[:, None] & (size == recv_sizes[source]), rows, output)
    return output


def arguments(kind, numerics, rows=40):
    """Of `made`."""
    rng = np.random.default_rng(1)
    shapes = (rows, D), (E, D, 2 * WIDTH), (E, WIDTH, D)
    inputs = [jnp.asarray(rng.standard_normal(s, np.float32), numerics.dtype) for s in shapes]
    cotangent = rng.standard_normal((rows, K, D), np.float32)
    return (*inputs, jnp.asarray(chosen(kind, rows)), jnp.asarray(cotangent))


def check(where, kind, numerics):
    """Outputs are those of one device to the bit, gradients nearly."""
    given = arguments(kind, numerics)
    (alone, expected), (found, gradients) = (
        made(place, given, numerics) for place in (SINGLE, where)
    )
    assert np.abs(alone).max(axis=2).min() > 0
    assert tiny.bits(found) == tiny.bits(alone)
    near = 1e-5 if numerics == tiny.NUMERICS else 1e-2
    for ours, theirs in zip(gradients, expected, strict=True):
        ours, theirs = (x.astype(np.float32) for x in (ours, theirs))
        scale = float(np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near * scale)


@pytest.mark.parametrize("kind", quick.some(["drawn", "one"], 0))
def test_outputs_have_the_bits_of_one_device(kind):
    for size in (2, 8):
        check(Placement(expert=size), kind, tiny.NUMERICS)


@pytest.mark.slow
def test_outputs_in_bfloat16_have_the_bits_of_one_device():
    for size in (2, 4, 8):
        check(Placement(expert=size), "drawn", tiny.BF16)


@pytest.mark.parametrize("kind", ["drawn", "one"])
def test_what_tpus_and_gpus_move_is_the_same(monkeypatch, kind):
    def ragged(x, counts, *, most, block):
        del block
        return collectives._ragged(x, counts, most=most)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(collectives, "_dense", ragged)
    check(Placement(expert=4), kind, tiny.NUMERICS)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_tpus_and_gpus_move_no_more_than_is_needed(platform):
    where = Placement(data=2, expert=4)
    on = placement.mesh(where, jax.devices())
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments("drawn", tiny.NUMERICS)]
    lowered = jax.jit(made_on(where, on, tiny.NUMERICS)).trace(*given)
    text = lowered.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@ragged_all_to_all") == 2  # of the forward and of the backward
    assert "all_to_all" in text.replace("ragged_all_to_all", "")  # sums of gradients of rows


# 8 experts in 4 groups and a shared one, after a layer that has none.
DEEPSEEK = replace(
    tiny.UNTIED,
    model_type="deepseek_v3",
    num_layers=3,
    num_kv_heads=2,
    head_dim=4,
    qk_norm=False,
    latent=LatentConfig(
        kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=8
    ),
    num_experts=E,
    num_experts_per_tok=K,
    moe_intermediate_size=WIDTH,
    norm_topk_prob=True,
    num_shared_experts=1,
    first_dense_layers=1,
    router_groups=4,
    router_groups_per_tok=2,
    routed_scaling_factor=1.5,
)
SHARDED = Placement(fsdp=2, expert=2, decode="sharded")


def execution(where=SINGLE, config=QWEN, numerics=tiny.NUMERICS, routing: Routing = "compared"):
    return Execution(config, numerics, tiny.SAMPLING, where, routing=routing)


@cache
def weights(what: Execution):
    return programs.weights_program(what)(tiny.params(what.config))


@cache
def drawn(what: Execution, batching=ALL_AT_ONCE):
    run = programs.sampling_program(what, samples=tiny.GROUP, batching=batching)
    return jax.device_get(run(weights(what), tiny.prompts(count=PROMPTS), jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "config", "numerics"),
    [
        (Placement(expert=8), QWEN, tiny.NUMERICS),
        (Placement(data=2, expert=4), QWEN, tiny.NUMERICS),
        (SHARDED, DEEPSEEK, tiny.BF16),
    ],
    ids=lambda case: getattr(case, "model_type", None) or getattr(case, "compute_dtype", str(case)),
)
def test_sampler_and_learner_have_the_bits_of_one_device(where, config, numerics):
    """Tokens, log-probs and the experts of every token; and the learner's, replaying them.

    Groups of two devices step together in slots and learn in an update, below.
    """
    what = execution(where, config, numerics)
    rollout = drawn(what)
    assert int(rollout.lengths.sum()) > 50
    assert tiny.bits(rollout) == tiny.bits(drawn(replace(what, placement=SINGLE)))
    on = placement.mesh(where, jax.devices())
    learner = replace(what, routing="replayed")
    score = jax.jit(
        sharded.scoring(learner, on, micro_batch=None, micro_batch_tokens=40 * where.shards)
    )
    compiled = score.lower(weights(what), rollout).compile()
    # Values are moved, and nothing is added up.
    text = compiled.as_text()
    assert text is not None
    assert "all-to-all" in text
    assert not re.search("all-reduce|reduce-scatter", text)
    found = jax.device_get(compiled(weights(what), rollout)[0])
    assert tiny.bits(found[rollout.mask]) == tiny.bits(rollout.log_probs[rollout.mask])


@pytest.mark.slow
def test_slots_of_an_expert_group_step_together():
    """Two slots a device, refilled when any of its group is free; groups go on by themselves."""
    what = execution(Placement(data=2, expert=2))
    assert tiny.bits(drawn(what, Batching(8, 1, 24))) == tiny.bits(drawn(execution()))


@pytest.mark.slow
def test_an_update_moves_parts_of_experts_as_one_device_moves_them_whole():
    learning = Learning(
        objectives.rloo(balance_coefficient=0.01),
        tiny.GROUP,
        routing="compared",
        micro_batch=8,
        noise_scale=True,
    )
    rewards = tiny.rewards(rows=PROMPTS * tiny.GROUP)
    results = []
    for where in (SINGLE, Placement(data=2, fsdp=2, expert=2)):
        what = execution(where)
        run = programs.build(Training(what, learning, optimizers.adamw(optimizers.Rate(1e-2))))
        state = run.init(tiny.params(QWEN))
        own = state.params["layers"]["expert_up"].addressable_shards[0].data.shape
        assert own == (2, E // where.expert, D // where.fsdp, WIDTH)
        now = run.prepare(state.params)
        results.append(loop.learn(state, now, drawn(what), rewards, programs=run))
    (alone, _, _, expected), (state, _, found, metrics) = results
    assert int(found.compared) == int(drawn(execution()).lengths.sum()) > 50
    assert int(found.unequal) == 0
    assert metrics["routing/agreement"] == 1
    for name in ("gradient_norm", "loss", "routing/balance"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3), name
    moments = state.optimizer[1][0].mu, alone.optimizer[1][0].mu
    for ours, theirs in zip(*map(jax.tree.leaves, moments), strict=True):
        scale = float(np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize(
    ("config", "where", "message"),
    [
        (tiny.CONFIG, Placement(expert=2), "expert = 2 needs a mixture of experts, and a qwen3"),
        (QWEN, Placement(expert=3), "expert = 3 must divide the model's num_experts = 8"),
        (QWEN, Placement(expert=2, tensor=2), "takes no tensor axis.*; use fsdp, data and expert"),
    ],
)
def test_what_an_expert_axis_cannot_be_is_refused(config, where, message):
    with pytest.raises(InputError, match=message):
        parameters.check(config, Numerics(column_tiles=where.tensor), where)


def test_rows_are_split_over_the_expert_axis_too():
    with pytest.raises(InputError, match="data x fsdp x expert = 8 must divide the 4 sequences"):
        sharded.check_rows(4, Placement(data=2, expert=4), "of the learner")
    with pytest.raises(InputError, match="slots = 6 must be a multiple of data x fsdp x expert"):
        Batching(6).of_device(Placement(expert=4))


def test_an_audit_tries_expert_axes():
    found = placements(QWEN, 8)
    assert {p.expert for p in found} == {1, 2, 4, 8}
    assert any(p.expert > 1 and p.decode == "sharded" for p in found)
    assert {p.expert for p in placements(tiny.CONFIG, 8)} == {1}


@pytest.mark.slow
def test_a_run_on_an_expert_axis_goes_on_on_another_mesh(tmp_path, capsys):
    """Trains, resumes, evaluates, and samples; and what cannot be is refused in one line."""
    alphabet = character_tokenizer(builtin.ALPHABET)
    model = replace(QWEN, vocab_size=len(alphabet), eos_token_ids=(alphabet.eos_token_id,))
    hf.save(tmp_path / "model", tiny.params(model), model, tokenizer=alphabet)
    config, folder = tmp_path / "run.toml", tmp_path / "run"
    own = tiny.RUN[tiny.RUN.index("[sampling]") :]
    path = f'[model]\npath = "{tmp_path / "model"}"'
    config.write_text(f'steps = 1\n{path}\n{own}\n[run]\nfolder = "{folder}"\n')
    assert cli.main(["train", str(config), "placement.expert=4"]) == 0
    assert cli.main(["train", str(config), "placement={fsdp=2, expert=2}", "steps=2"]) == 0
    assert cli.main(["train", str(config), "placement.sampler.expert=2", "steps=3"]) == 0
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["exact_share"] == 1.0 and line["compared_tokens"] > 0 for line in lines)
    capsys.readouterr()
    outputs = []
    for axes in ([], ["--expert", "2"]):
        assert cli.main(["generate", str(folder), "12>", "3>", "--max-tokens", "8", *axes]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""
    assert cli.main(["train", str(config), "placement.expert=3", "steps=4"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
