"""What engines record beside log-probs: supports, experts, versions of weights; and more faults."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import quick
import tiny
from recorded import (
    LIMITS,
    STOPS,
    best_of,
    by,
    decode,
    diagnosed,
    drawn,
    exact_log_probs,
    forward,
    logits_of,
    sampled,
    weights,
)

from tim_jax import mismatch
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis import evidence, readers, records, variants, verdict
from tim_jax.instruments.diagnosis.evidence import Forward
from tim_jax.instruments.diagnosis.rollouts import Limits, RolloutsError, collect
from tim_jax.mismatch import Mismatch
from tim_jax.model.execution import Execution
from tim_jax.rl.programs import sampling_program

KEPT = 5


def shown(found):
    return records.text(records.as_record(found, decode))


# Supports.


def supported(rows, how="token_ids") -> Iterator[dict[str, Any]]:
    """Rows that were drawn among the likeliest, with what was kept, but not the option."""
    for row, z in zip(rows, logits_of(rows), strict=True):
        ids = np.argsort(-z, axis=1, kind="stable")[:, :KEPT]
        inside = np.logaddexp.reduce(np.take_along_axis(z, ids, axis=1), axis=1)
        kept = inside - np.logaddexp.reduce(z, axis=1)
        offsets, counts = np.arange(len(ids) + 1) * KEPT, [KEPT] * len(ids)
        yield (
            row
            | {
                "token_ids": {"sampling_mask": {"token_ids": ids.reshape(-1), "offsets": offsets}},
                "ids": {"sampling_mask": {"ids": ids.reshape(-1).tolist(), "counts": counts}},
                "lists": {"supports": ids.tolist()},
                "mass": {"kept_log_mass": kept.tolist()},
            }[how]
        )


@pytest.mark.parametrize("how", quick.some(["token_ids", "ids", "lists", "mass"], 0))
def test_what_was_kept_is_scored_under(how):
    rows = drawn(top_k=KEPT)
    declared = by(forward(), [row | {"top_k": KEPT} for row in rows])
    gap = np.concatenate(by(forward(), supported(rows, how))) - np.concatenate(declared)
    assert np.abs(gap).max() <= (1e-6 if how == "mass" else 0)


@pytest.mark.slow
def test_supports_are_no_fault_and_without_them_the_truncation_is_named():
    rows = sampled(top_k=KEPT)
    assert diagnosed(supported(rows)).state == "exact"
    assert diagnosed(supported(rows, "mass")).state in ("exact", "numerics")
    found = diagnosed(rows)
    best = best_of(found).explanation
    assert (best.name, best.parameters) == ("top_k", {"top_k": KEPT})
    plain = exact_log_probs(rows)  # over the whole vocabulary
    rows = [
        r | {"logprobs": x.tolist()}
        for r, x in zip(supported(sampled(top_k=KEPT)), plain, strict=True)
    ]
    found = diagnosed(rows)
    assert best_of(found).explanation.name == "ignored_truncation"
    assert "which is recorded" in records.sentence(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"supports": [[1]]}, "row 1: supports must be of the 3 response tokens, got 1"),
        ({"supports": [[4], [1], [5]]}, r"\[1\] = 6 was drawn, but is not among the 1 tokens of"),
        ({"supports": [4, 6, 5]}, "row 1: supports must be a list of ids a token, got"),
        ({"supports": [[4], [99], []]}, r"supports\[1\] must be ids of the model's 23 tokens"),
        ({"kept_log_mass": [0.5, 0, 0]}, r"kept_log_mass\[0\] = 0.5 is positive"),
        ({"supports": [[4], [6], [5]], "kept_log_mass": [0, 0, 0]}, "leave the latter out"),
        (
            {"supports": [[4], [6], [5]], "temperature": 0.5, "logprobs_mode": "raw_logprobs"},
            "has raw log-probs, which no support is for",
        ),
        ({"routes": [[[0]]]}, "has routes, but the model is no mixture of experts"),
    ],
)
def test_what_cannot_be_replayed(change, message):
    row = {"prompt_token_ids": [1, 2], "response_token_ids": [4, 6, 5], "logprobs": [-1, -1, -1]}
    with pytest.raises(RolloutsError, match=message):
        collect(readers.read([row | change]), limits=LIMITS)


# Experts.


def routed():
    """Rows of a mixture's own sampler with its experts, and its forward."""
    execution = Execution(tiny.MIXTURE, tiny.NUMERICS, tiny.SAMPLING, routing="compared")
    own = jax.jit(execution.prepare)(tiny.params(tiny.MIXTURE))
    program = sampling_program(execution, samples=tiny.GROUP)
    found = jax.device_get(program(own, tiny.prompts(), jax.random.key(0)))
    rows = []
    for i, (before, after) in enumerate(zip(found.prompt_lengths, found.lengths, strict=True)):
        rows.append(
            {
                "prompt_token_ids": found.prompts[i, :before].tolist(),
                "response_token_ids": found.responses[i, :after].tolist(),
                "logprobs": found.log_probs[i, :after].tolist(),
                "routed_experts": found.routes[i, : before + after - 1],
            }
        )
    return rows, Forward(
        own, Execution(tiny.MIXTURE, tiny.NUMERICS), tiny.MIXTURE.vocab_size, STOPS
    )


@pytest.mark.slow
def test_experts_are_compared_layer_by_layer_and_replayed():
    rows, own = routed()
    limits = Limits.of(tiny.MIXTURE)
    layers, _, experts = limits.routes
    plain = collect(readers.read(rows), limits=limits).responses
    found = verdict.diagnose(plain, own, sources=())
    assert found.state == "exact"
    assert found.agreement is not None
    assert found.agreement.tolist() == [1.0] * layers
    # An engine whose second layer takes other experts, and records what that makes.
    other = [row | {"routed_experts": row["routed_experts"].copy()} for row in rows]
    for row in other:
        row["routed_experts"][:, 1] = (row["routed_experts"][:, 1] + 1) % experts
    moved = collect(readers.read(other), limits=limits).responses
    replayed = own._replace(execution=replace(own.execution, routing="replayed"))
    made = evidence.log_probs(replayed, moved)
    parts = np.split(made, np.cumsum([len(r) for r in moved])[:-1])
    seen = [replace(r, log_probs=np.minimum(x, 0.0)) for r, x in zip(moved, parts, strict=True)]
    found = verdict.diagnose(seen, own, sources=())
    assert found.agreement is not None
    assert found.agreement[0] == 1.0
    assert found.agreement[1] < 0.9
    assert best_of(found).explanation.name == "routing"
    assert best_of(found).share > 0.99
    text = shown(found)
    assert "least in mixture layer 1" in text
    assert "100.0% of the gap are gone" in text


def test_experts_are_read_from_lists_and_from_bytes():
    import base64

    limits = Limits(23, 64, (2, 3, 7))
    row = {"prompt_token_ids": [1, 2], "response_token_ids": [4, 6], "logprobs": [-1, -1]}
    routes = np.random.default_rng(0).integers(0, 7, (3, 2, 3)).astype(np.int32)
    verl = {
        "prompts": [0, 1, 2],
        "responses": [4, 6, 0],
        "attention_mask": [0, 1, 1, 1, 1, 0],
        "rollout_log_probs": [-1, -1, 0],
        "routed_experts": np.concatenate([routes[:1], routes, routes[:2]]),
    }
    sglang = {
        "prompt_token_ids": [1, 2],
        "meta_info": {
            "output_token_logprobs": [[-1, 4, ""], [-1, 6, ""]],
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        },
    }
    coded = {"data": base64.b85encode(routes.tobytes()).decode(), "shape": routes.shape}
    for given in (
        row | {"routes": routes.tolist()},
        row | {"routed_experts": routes},
        row | {"routed_experts": coded},
        sglang,
        verl,
    ):
        (found,) = collect(readers.read([given]), limits=limits).responses
        assert found.routes is not None
        assert found.routes[:3].tolist() == routes.tolist()
        assert found.routes.shape == (4, 2, 3)
        assert found.routes.dtype == np.uint8
    for wrong, message in (
        (routes[:2], r"routes have the shape \(2, 2, 3\); they must have one of \(3, 2, 3\)"),
        (routes + 7, "but a layer has 7 experts, numbered from 0"),
        ("???", "routes cannot be read"),
        ((routes + 0.5).tolist(), "routes cannot be read: .they must be whole numbers"),
        ([[[2**40] * 3] * 2] * 3, "routes cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            collect(readers.read([row | {"routes": wrong}]), limits=limits)


# Other weights.


def moved_weights():
    return jax.jit(tiny.EXECUTION.prepare)(tiny.moved(tiny.params(), 0.05))


@pytest.mark.slow
def test_weights_that_were_replaced_in_flight_are_named_with_their_rows():
    other = forward()._replace(weights=moved_weights())
    rows = [dict(row) for row in sampled()]
    swapped = list(range(0, 96, 3))
    for i in swapped:
        made = by(other, [rows[i]])[0].tolist()
        rows[i]["logprobs"] = [*made[:5], *rows[i]["logprobs"][5:]]
    found = diagnosed(rows, others=[variants.Candidate("before", moved_weights())])
    best = best_of(found).explanation
    assert best.name == "weights of before"
    assert "up to some token of" in best.text
    assert best.rows is not None
    assert set(best.rows) <= {*swapped}
    whole = [row | {"logprobs": x.tolist()} for row, x in zip(rows, by(other, rows), strict=True)]
    found = diagnosed(whole, others=[variants.Candidate("before", moved_weights())])
    assert "up to" not in best_of(found).explanation.text


def adapted(seed=0):
    """The parameters less a change of rank 2 in one kind of matrix: the base of an adapter."""
    layers = dict(tiny.params()["layers"])
    name = next(name for name, x in sorted(layers.items()) if x.ndim == 3 and min(x.shape[1:]) > 8)
    rng, (count, rows, columns) = np.random.default_rng(seed), layers[name].shape
    down, up = rng.normal(size=(count, rows, 2)), rng.normal(size=(count, 2, columns))
    layers[name] = layers[name] - (0.05 * layers[name].std() * (down @ up)).astype(np.float32)
    return tiny.params() | {"layers": layers}


def test_the_rank_of_an_adapter_is_told_from_weights():
    params = tiny.params()
    assert variants.adapter_rank(params, adapted()) == 2
    assert variants.adapter_rank(params, params) == 0
    assert variants.adapter_rank(params, tiny.moved(params, 0.05)) == 0
    other = next(name for name in params if name != "layers")
    moved = jax.tree.map(lambda x: x + 1, params[other])
    assert variants.adapter_rank(params, adapted() | {other: moved}) == 0


LORA = ["lora_half_scale", "lora_merged(bfloat16)", "lora_not_applied", "lora_twice"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LORA)
def test_an_adapter_that_was_not_applied_or_was_merged_on_a_coarse_grid_has_its_name(name):
    base = variants.Candidate("base", jax.jit(tiny.EXECUTION.prepare)(adapted()), 2)
    made = {one.name: one.forward for one in variants.of_weights(forward(), [base])}
    assert sorted(made) == LORA
    recorded = by(made[name], sampled())
    rows = [r | {"logprobs": x.tolist()} for r, x in zip(sampled(), recorded, strict=True)]
    found = diagnosed(rows, others=[base])
    assert best_of(found).explanation.name == name
    assert best_of(found).share > 0.99
    assert "rank 2 by which the model differs from base" in best_of(found).explanation.text


@pytest.mark.slow
def test_rows_of_another_version_are_grouped_and_named():
    rows = sampled()
    other = by(forward()._replace(weights=moved_weights()), rows)
    mixed = [
        row | {"weights_version": 7 - old} | ({"logprobs": x.tolist()} if old else {})
        for row, x, old in zip(rows, other, [i % 3 == 0 for i in range(96)], strict=True)
    ]
    found = diagnosed(mixed)
    assert best_of(found).explanation.name == "other_version"
    assert "weights_version '6' are of other weights than those of '7'" in records.sentence(found)
    text = shown(found)
    assert "By weights_version: 6 (32 rows)" in text
    assert "7 (64 rows): mean |d| 0," in text
    same = [row | {"weights_version": i % 2} for i, row in enumerate(rows)]
    assert diagnosed(same).state == "exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "chosen", "hidden"),
    [("int8", [1], False), ("int8", [0, 2, 3], False), ("int4", [2], True)],
)
def test_layers_that_one_side_quantised_are_named(monkeypatch, kind, chosen, hidden):
    """`hidden`: what the rounding of all layers makes does not go with what is recorded."""
    if hidden:
        monkeypatch.setattr(variants, "goes_with", lambda *given: 0.0)
    config = replace(tiny.CONFIG, num_layers=4)
    execution = Execution(config, tiny.NUMERICS, tiny.SAMPLING)
    own = jax.jit(execution.prepare)(tiny.params(config))
    rounded = Mismatch((mismatch.quantised_weights(dtype=kind),)).weights(own)
    some = variants.mixed_layers(own, rounded, np.isin(np.arange(4), chosen))
    plain = Forward(own, Execution(config, tiny.NUMERICS), config.vocab_size, STOPS)
    made = by(plain._replace(weights=some), sampled())
    rows = [r | {"logprobs": x.tolist()} for r, x in zip(sampled(), made, strict=True)]
    responses = collect(readers.read(rows), limits=LIMITS).responses
    kinds, waits, each = ("int8", "float8_e4m3fn", "int4"), {}, waiting.each

    def noted(items, doing, **how):
        waits[doing] = how
        return each(items, doing, **how)

    monkeypatch.setattr(waiting, "each", noted)
    found = verdict.diagnose(
        responses, plain, sources=[mismatch.quantised_weights(dtype=one) for one in kinds]
    )
    assert waits["looking for the layers whose weights are quantised"] == {"total": 4}
    assert best_of(found).explanation.name == f"quantised_weights({kind}) in some layers"
    assert best_of(found).explanation.text.endswith(f"alone: {', '.join(map(str, chosen))}")


# Ends.


@pytest.mark.slow
def test_another_end_token_is_named():
    """The engine's end token is none of the model's."""
    sampling = replace(tiny.SAMPLING, stop_tokens=(9,))
    program = sampling_program(Execution(tiny.CONFIG, tiny.NUMERICS, sampling), samples=64)
    found = jax.device_get(program(weights(), tiny.prompts(), jax.random.key(5)))
    rows = [
        {
            "prompt_token_ids": found.prompts[i, : found.prompt_lengths[i]].tolist(),
            "response_token_ids": found.responses[i, :length].tolist(),
            "logprobs": found.log_probs[i, :length].tolist(),
        }
        for i, length in enumerate(found.lengths)
    ]
    seen = diagnosed(rows)
    assert best_of(seen).explanation.name == "other_end_token"
    assert "ends responses at token 9" in records.sentence(seen)
    asked_for = [row | {"stop_token_ids": [9]} for row in rows]
    assert diagnosed(asked_for).state == "exact"
