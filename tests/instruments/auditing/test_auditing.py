"""An audit passes where sampler and learner agree, and finds one token that is off by one ulp."""

import io
import json
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rich.console import Console

from tim_jax.app.jobs import audit as audit_job
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout, make_key
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import Again, Case, CaseResult, Score, Sizes, plain_sampling
from tim_jax.model.parameters import check_params
from tim_jax.numerics import NATIVE_F32, TPU_FEW_ROWS
from tim_jax.placement import Placement
from tim_jax.policy import scoring
from tim_jax.rl import sharded

SIZES = Sizes(prompts=3, samples=2, prompt_length=7, response_length=11)
PLAIN = plain_sampling(tiny.CONFIG, SIZES)
ONE_LAYER, FEW = replace(tiny.CONFIG, num_layers=1), Sizes(2, 2, 4, 8)
NO_PARAMS = cast(Any, None)  # where none is read


# --- cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_standard_cases_have_names_of_their_own(quick):
    cases = auditing.standard_cases(tiny.CONFIG, Sizes(), quick=quick)
    assert len({case.name for case in cases}) == len(cases)
    assert len({(case.sampling, case.against) for case in cases}) == len(cases)
    assert any(isinstance(case.against, Again) for case in cases)
    assert any(case.sampling.truncated for case in cases)
    if not quick:
        assert set(auditing.standard_cases(tiny.CONFIG, Sizes(), quick=True)) <= set(cases)
        scores = [case.against for case in cases if isinstance(case.against, Score)]
        assert any(not score.gradient for score in scores)
        assert any(score.remat for score in scores)
        assert any(score.loop for score in scores)
        assert {case.sampling.temperature for case in cases} == {1.0, 0.7, 1.4}


def test_prompts_are_ragged():
    prompts = auditing.draw_prompts(tiny.CONFIG, Sizes(prompts=9))
    assert prompts.lengths[0] == 1
    assert prompts.lengths[-1] == prompts.tokens.shape[1] == 24
    assert len(set(prompts.lengths.tolist())) > 3
    assert len(set(prompts.ids.tolist())) == 9


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompts": 0}, "prompts"),
        ({"response_length": 0}, "response_length"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        Sizes(**sizes)


def test_sizes_beyond_the_models_positions_are_refused():
    with pytest.raises(InputError, match="72 tokens exceed the model's 64 positions"):
        next(auditing.audit({}, tiny.CONFIG, sizes=Sizes()))


@pytest.mark.parametrize(
    ("placements", "prompts"),
    [
        ([], 4),
        ([Placement(fsdp=16)], 4),
        ([Placement(data=3)], 6),
        ([Placement(fsdp=2), Placement(data=8, fsdp=2, expert=2), Placement(tensor=64)], 8),
    ],
)
def test_prompts_are_as_many_as_placements_can_split(placements, prompts):
    sizes = Sizes().rounded(placements)
    assert sizes == Sizes(prompts=prompts)
    assert not [p for p in placements if sizes.prompts * sizes.samples % p.shards]


def test_prompts_of_other_sizes_are_refused():
    sizes = Sizes(prompt_length=8, response_length=8)
    prompts = auditing.draw_prompts(tiny.CONFIG, replace(sizes, prompts=3))
    with pytest.raises(InputError, match=r"shape \(3, 8\), sizes want \(4, 8\)"):
        next(auditing.audit({}, tiny.CONFIG, sizes=sizes, prompts=prompts))


@pytest.mark.parametrize("positions", [2, 3, 50, 72, 4_096])
def test_default_sizes_fit_the_model(positions):
    config = replace(tiny.CONFIG, max_positions=positions)
    sizes = Sizes.fitting(config)
    sizes.check(config)
    assert sizes.prompt_length + sizes.response_length == min(positions, 72)


@pytest.mark.parametrize("name", auditing.PRESETS)
def test_presets_have_parameters_with_everything_at_work(name):
    config = auditing.PRESETS[name]
    params = auditing.random_params(config, 0)
    check_params(params, config)
    assert all(np.std(leaf) > 0 for leaf in jax.tree.leaves(params))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    again = auditing.random_params(config, 0)
    assert tiny.bits(params) == tiny.bits(again) != tiny.bits(auditing.random_params(config, 1))


# --- auditing --------------------------------------------------------------------------------

CASES = (
    Case("learner", PLAIN, Score()),
    Case("learner, rows one by one", PLAIN, Score(micro_batch=1, reverse=True, padding=3)),
    Case("sampler, reversed", PLAIN, Again(rows=(2, 0), samples=2, padding=2)),
)


def run(cases=CASES, numerics=(tiny.NUMERICS,), config=tiny.CONFIG, sizes=SIZES, **options):
    how = {"numerics": numerics, "cases": cases, "sizes": sizes}
    return list(auditing.audit(tiny.params(config), config, **how, **options))


@pytest.mark.slow
def test_an_audit_of_exact_numerics_passes_and_its_control_differs():
    results = run()
    assert [result.name for result in results] == [*(case.name for case in CASES), "learner"]
    assert [result.control for result in results] == [False, False, False, True]
    for result in results[:3]:
        assert result.passed
        assert result.unequal_tokens == 0
        assert result.max_abs_diff == 0
        assert result.first_unequal is None
    whole, by_row, reverse, control = (result.compared_tokens for result in results)
    assert whole == by_row > reverse > 0
    assert control > 0
    assert results[3].unequal_tokens > 0
    assert results[3].passed
    summary = auditing.summarise(results, model="tiny")
    assert summary.passed
    assert summary.compared_tokens == whole + by_row + reverse
    assert summary.control_unequal_tokens == results[3].unequal_tokens


ALONE = (Case("one by one", plain_sampling(ONE_LAYER, FEW), Again(one_by_one=True)),)


@pytest.mark.slow
def test_an_audit_passes_whatever_jax_s_default_generator_is():
    with jax.default_prng_impl("rbg"):
        results = run(ALONE, config=ONE_LAYER, sizes=FEW, control=False)
    assert [result.passed for result in results] == [True]


def test_an_audit_draws_by_keys_of_one_kind_whatever_jax_s_default_generator_is(monkeypatch):
    """By others a draw may depend on the batch, see `make_key`."""
    keys = []

    def sampler(execution, *, samples, batching):
        def sample(weights, prompts, key):
            keys.append(key)
            return rollout([8] * samples * len(prompts.lengths), 8)

        return sample

    monkeypatch.setattr(auditing, "_sampler", sampler)
    with jax.default_prng_impl("rbg"):
        run(ALONE, config=ONE_LAYER, sizes=FEW, control=False)
    assert len(keys) == 1 + FEW.prompts
    assert {key.dtype for key in keys} == {make_key(0).dtype}


@pytest.mark.slow
def test_a_learner_and_a_sampler_on_a_mesh_have_the_bits_of_episodes():
    cases = auditing.placed_episodes(ONE_LAYER, SIZES, Placement(fsdp=2))
    results = run(cases, config=ONE_LAYER, control=False)
    assert [r.name for r in results] == [
        f"episodes: {who}, fsdp=2" for who in ("learner", "sampler")
    ]
    assert all(result.passed for result in results)
    assert results[0].compared_tokens == results[1].compared_tokens > 10


def test_native_numerics_themselves_fail(monkeypatch):
    looked = []
    monkeypatch.setattr(auditing, "forget_programs", lambda: looked.append(True))
    sizes = Sizes(prompts=3, samples=4, prompt_length=5, response_length=11)
    cases = (Case("learner", plain_sampling(ONE_LAYER, sizes), Score()),)
    results = run(cases, (NATIVE_F32,), config=ONE_LAYER, sizes=sizes)
    assert len(results) == len(looked) == 1  # programs are counted after every case
    assert not results[0].passed
    assert not auditing.summarise(results).passed
    first = results[0].first_unequal
    assert first is not None
    assert first.tokens[0] == first.tokens[1]
    assert abs(first.values[0] - first.values[1]) < 1e-4


@pytest.mark.slow
def test_a_fault_of_one_ulp_at_one_token_is_found(monkeypatch):
    honest = scoring.score

    def faulty(weights, rollout, **options):
        found = honest(weights, rollout, **options)
        log_probs = found.log_probs
        # Without a gradient: nextafter has none.
        moved = jnp.nextafter(jax.lax.stop_gradient(log_probs), jnp.float32(0))
        place = (jnp.arange(log_probs.shape[0]) == 4)[:, None]
        place &= (jnp.arange(log_probs.shape[1]) == 0)[None, :]
        return found._replace(log_probs=jnp.where(place, moved, log_probs))

    monkeypatch.setattr(sharded, "score", faulty)
    # The audit's programs may have been compiled with the honest one, and are kept.
    auditing.learner_log_probs.cache_clear()
    result = run(CASES[:1], control=False)[0]
    auditing.learner_log_probs.cache_clear()
    assert (result.unequal_tokens, result.passed) == (1, False)
    assert result.first_unequal is not None
    assert result.first_unequal[:2] == (4, 0)
    assert 0 < result.max_abs_diff < 1e-6


def test_placements_whose_column_tiles_no_kernel_takes_are_left_out_aloud(monkeypatch, capsys):
    """On a TPU a column tile has 192 columns of gate and of up, and a kernel's block 128."""
    config = replace(auditing.PRESETS["qwen3-blocks"], intermediate_size=384)
    compared = []

    def audited(params, config, *, cases, **options):
        compared.extend(case.name for case in cases)
        return iter(())

    monkeypatch.setattr(auditing, "audit", audited)
    sizes = Sizes.fitting(config)
    asked = audit_job._Audited(NO_PARAMS, config, sizes, "pallas_tpu", True, ("float32",), False)
    assert list(audit_job._audit_placements(asked, False)) == []
    assert compared
    assert not any("tensor" in name for name in compared)
    said = capsys.readouterr().out
    assert "placements with a tensor axis. numerics: " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("devices", "most", "prompts"), [(6, 4, 4), (64, 64, 16)])
def test_placements_are_audited_as_far_as_devices_are_a_power_of_two(
    monkeypatch, capsys, devices, most, prompts
):
    config = auditing.PRESETS["qwen3"]
    given = []
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(audit_job, "_numerics", lambda *_, **__: [])
    monkeypatch.setattr(auditing, "audit", lambda *_, **options: given.append(options) or iter(()))
    asked = audit_job._Audited(NO_PARAMS, config, Sizes(), "tiles", False, ("float32",), False)
    assert list(audit_job._audit_placements(asked, True)) == []
    assert {options["sizes"].prompts for options in given} == {prompts}
    tried = [case.against.placement for one in given for case in one["cases"][:2]]
    assert {where.devices for where in tried} == {most}
    said = capsys.readouterr().out
    left_out = "left out: placements over all 6 devices, which are no power of two; tim.audit"
    assert said.startswith(left_out) == (devices == 6)
    assert said.count("\n") == (devices == 6)


def test_several_tiles_are_audited_where_they_are_asked_for():
    config = auditing.PRESETS["qwen3-blocks"]
    sizes = Sizes.fitting(config)
    one = audit_job._Audited(NO_PARAMS, config, sizes, "pallas_tpu", True, ("bfloat16",), False)
    (plain,) = audit_job._numerics(one)
    (several,) = audit_job._numerics(replace(one, several_tiles=True))
    assert (plain.tpu.few_rows, several.tpu.few_rows) == (0, TPU_FEW_ROWS)
    with pytest.raises(InputError, match="several_tiles: only the families"):
        audit_job._numerics(replace(one, family="tiles", interpret=False, several_tiles=True))


# --- what is found ---------------------------------------------------------------------------


def rollout(lengths=(3, 1), size=4):
    rng = np.random.default_rng(0)
    count = len(lengths)
    arrays: dict[str, Any] = {  # of NumPy, which stands for JAX's
        "prompts": np.zeros((count, 2), np.int32),
        "prompt_lengths": np.ones(count, np.int32),
        "responses": rng.integers(0, 9, (count, size)).astype(np.int32),
        "lengths": np.asarray(lengths, np.int32),
        "log_probs": -rng.random((count, size), np.float32),
        "finished": np.ones(count, bool),
    }
    return Rollout(**arrays)


def compared(recorded, *, tokens=None, mask=None, log_probs=None):
    return auditing.compare(
        recorded,
        np.asarray(recorded.responses) if tokens is None else tokens,
        np.asarray(recorded.mask) if mask is None else mask,
        np.asarray(recorded.log_probs) if log_probs is None else log_probs,
    )


def changed(array, place, value):
    array = np.array(array)
    array[place] = value
    return array


def test_equal_arrays_have_no_unequal_token():
    assert compared(rollout()) == (4, 0, 0.0, None)


def test_one_ulp_is_seen_and_placed():
    recorded = rollout()
    value = recorded.log_probs[0, 2]
    moved = np.nextafter(value, np.float32(0))
    found = compared(recorded, log_probs=changed(recorded.log_probs, (0, 2), moved))
    token = int(recorded.responses[0, 2])
    place = auditing.Unequal(0, 2, (token, token), (float(value), float(moved)))
    assert found == (4, 1, float(moved) - float(value), place)


def test_beyond_the_lengths_nothing_is_compared():
    recorded = rollout()
    for place in ((0, 3), (1, 1)):
        assert compared(recorded, log_probs=changed(recorded.log_probs, place, 9.0))[1] == 0
        assert compared(recorded, tokens=changed(recorded.responses, place, 99))[1] == 0


def test_other_tokens_and_lengths_are_unequal():
    recorded = rollout()
    assert compared(recorded, tokens=changed(recorded.responses, (1, 0), 99))[:2] == (4, 1)
    longer = compared(recorded, mask=changed(recorded.mask, (1, 1), True))
    assert longer[:2] == (5, 1)
    assert longer[3] is not None
    assert longer[3][:2] == (1, 1)
    assert compared(recorded, mask=changed(recorded.mask, (0, 2), False))[:2] == (4, 1)


def test_zeros_of_either_sign_are_not_the_same_bits():
    recorded = rollout()
    recorded = replace(recorded, log_probs=changed(recorded.log_probs, (0, 0), 0.0))
    found = compared(recorded, log_probs=changed(recorded.log_probs, (0, 0), -0.0))
    assert found[1:3] == (1, 0.0)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_unequal_even_to_itself(value):
    recorded = rollout()
    recorded = replace(recorded, log_probs=changed(recorded.log_probs, (0, 1), value))
    assert compared(recorded)[1] == 1


EQUAL = CaseResult("equal", "tiles float32", 10, 0, 0.0, None, seconds=1.25)
PLACE = auditing.Unequal(3, 5, (8, 8), (-1.5, -1.25))
UNEQUAL = CaseResult("unequal", "tiles float32", 20, 2, 0.25, PLACE)
EMPTY = CaseResult("empty", "tiles float32", 0, 0, 0.0, None)
CONTROL = CaseResult("control", "native float32", 7, 6, 1e-6, PLACE, control=True)


@pytest.mark.parametrize(
    ("results", "passed"),
    [
        ([EQUAL], True),
        ([EQUAL, CONTROL], True),
        ([EQUAL, UNEQUAL], False),
        ([EQUAL, EMPTY], False),
        ([CONTROL], False),
        ([], False),
    ],
)
def test_a_summary_passes_only_if_something_was_compared_and_all_of_it_equal(results, passed):
    assert auditing.summarise(results).passed is passed


def test_json_has_the_counts_without_the_controls():
    text = auditing.to_json(auditing.summarise([EQUAL, UNEQUAL, CONTROL], model="some/folder"))
    values = json.loads(text)
    assert values["compared_tokens"] == 30
    assert values["unequal_tokens"] == 2
    assert values["max_abs_diff"] == 0.25
    assert values["control_unequal_tokens"] == 6
    assert values["passed"] is False
    assert values["model"] == "some/folder"
    assert set(values["versions"]) == {"jax", "jaxlib", "python"}
    assert values["platform"] == jax.devices()[0].platform
    assert values["device_kind"]
    assert [case["name"] for case in values["cases"]] == ["equal", "unequal", "control"]
    assert [case["passed"] for case in values["cases"]] == [True, False, True]
    assert values["cases"][1]["first_unequal"] == {
        "sequence": 3,
        "position": 5,
        "tokens": [8, 8],
        "values": [-1.5, -1.25],
    }


def test_json_stays_json_where_a_log_prob_is_not_a_number():
    place = PLACE._replace(values=(float("nan"), -1.0))
    broken = replace(UNEQUAL, max_abs_diff=float("nan"), first_unequal=place)
    values = json.loads(auditing.to_json(auditing.summarise([broken])))
    assert values["cases"][0]["max_abs_diff"] is None
    assert values["cases"][0]["first_unequal"]["values"] == [None, -1.0]


def test_the_table_shows_verdicts_and_places():
    other = replace(UNEQUAL, first_unequal=PLACE._replace(tokens=(8, 2)))
    file = io.StringIO()
    Console(file=file, width=160).print(auditing.table([EQUAL, UNEQUAL, other, EMPTY, CONTROL]))
    text = file.getvalue()
    for part in (
        "UNEQUAL",
        "NOTHING COMPARED",
        "control",
        "sequence 3, position 5: -1.5 and -1.25",
    ):
        assert part in text
    assert "token 8 and 2" in text
