"""verl's configurations translated: whole steps equal its formulas, and what differs is named.

The expected values are those of `scripts/verl_formulas.py`, written from verl's source in float64;
it names the files. A step is that of the learner on the tabular policy of `tabular`.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tabular

from tim_jax import corrections
from tim_jax.app import cli
from tim_jax.app.config import toml, verl, verl_keys
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.rl import learner
from tim_jax.rl.learner import experience
from tim_jax.rl.types import Learning, TrainState, mini_batch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import verl_formulas as formulas

GROUP, ROWS, UPDATES, STEP = 4, 16, 2, 0.5
SAMPLER, REFERENCE = tabular.table(0), tabular.table(3)
TRAINER = (SAMPLER + 0.08 * tabular.table(1)).astype(np.float32)
# Bounds that reject some of these rollouts and not all.
BOUNDS = {"seq_mean_k1": "0.96_1.04", "seq_sum_k1": "0.95_1.1", "seq_mean_k3": 0.002}
ACTOR = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.07, "clip_ratio_c": 1.2}


def sequences():
    """16 rollouts: i32[B, R] tokens and bool[B, R], among which some are alike."""
    every = tabular.sentences()
    drawn = [every[i] for i in np.random.default_rng(7).integers(0, len(every), ROWS)]
    tokens = np.zeros((ROWS, tabular.LONGEST), np.int32)
    for row, words in enumerate(drawn):
        tokens[row, : len(words)] = words
    lengths = np.array([len(words) for words in drawn])
    return tokens, np.arange(tabular.LONGEST)[None, :] < lengths[:, None]


TOKENS, MASK = sequences()
BEFORE = np.pad(TOKENS[:, :-1], ((0, 0), (1, 0)))
REWARDS = np.float32(np.random.default_rng(2).integers(-4, 5, ROWS) / 4)
GREEDY = np.asarray([0.25, -0.5, 0.0, 1.0], np.float32)


def rows_of(logits):
    """f64[B, R, V], the log-distributions of all places."""
    rows = logits.astype(np.float64)
    rows = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows[np.arange(tabular.LONGEST)[None, :], BEFORE]


def log_probs_of(logits):
    found = np.take_along_axis(rows_of(logits), TOKENS[..., None], axis=-1)[..., 0]
    return np.where(MASK, found, 0.0)


def entropies_of(logits):
    rows = rows_of(logits)
    return np.where(MASK, -(np.exp(rows) * rows).sum(axis=-1), 0.0)


def energies_of(logits):
    rows = rows_of(logits)
    return 1 - 2 * np.exp(log_probs_of(logits)) + np.exp(2 * rows).sum(axis=-1)


ROLLOUT = Rollout(
    prompts=jnp.zeros((ROWS, 1), jnp.int32),
    prompt_lengths=jnp.ones(ROWS, jnp.int32),
    responses=jnp.asarray(TOKENS),
    lengths=jnp.asarray(MASK.sum(axis=1), jnp.int32),
    log_probs=jnp.asarray(log_probs_of(SAMPLER), jnp.float32),
    finished=jnp.ones(ROWS, bool),
)


def configuration(
    correction, *, estimator="grpo", kl=0.0, entropy=0.0, v1=None, **actor
) -> dict[str, Any]:
    actor = {**ACTOR, "ppo_mini_batch_size": 2, "use_kl_loss": kl > 0, "kl_loss_coef": kl, **actor}
    data = {
        "algorithm": {"adv_estimator": estimator, "rollout_correction": correction},
        "actor_rollout_ref": {"actor": actor | {"entropy_coeff": entropy}, "rollout": {"n": GROUP}},
        "data": {"train_batch_size": ROWS // GROUP, "max_tokens": tabular.LONGEST},
    }
    return data if v1 is None else data | {"trainer": {"use_v1": v1}}


def of_preset(name):
    """A preset's section, with bounds that matter here."""
    section = dict(formulas.PRESETS[name])
    if "rollout_rs" in section:
        section["rollout_rs_threshold"] = BOUNDS[section["rollout_rs"]]
    if section.get("rollout_is_threshold") == "0.5_5.0":
        section["rollout_is_threshold"] = "0.95_1.1"
    elif "rollout_is" in section:
        section["rollout_is_threshold"] = 1.02
    return section


def our_step(found):
    """(weights, gradient, metrics) of every update of a translated configuration."""
    section = toml.build(found.config | {"sampling": {"samples": GROUP}}).learner
    objective = section.objective.value(tabular.LONGEST)
    correction = corrections.build(section.corrections)
    learning = Learning(objective, GROUP, mode=section.mode, correction=correction)
    params, optimizer = {"table": jnp.asarray(TRAINER)}, tabular.keeping(STEP)
    first = jnp.int32(0)
    state = TrainState(params, optimizer.init(params), correction.init(params), first, first)
    policy = tabular.policy(learning)
    known = {"table": jnp.asarray(REFERENCE)} if objective.has_reference else None
    ready = experience(
        params,
        known,
        state.carried,
        ROLLOUT,
        jnp.asarray(REWARDS),
        jnp.asarray(GREEDY) if learning.objective.needs_greedy else None,
        score=policy.score,
        learning=learning,
    )
    state, updates = replace(state, **ready.carried._asdict()), []
    assert section.mini_batches == UPDATES
    for index in range(UPDATES):
        part = mini_batch(ready.experience, jnp.int32(index), count=UPDATES)
        before = np.asarray(state.params["table"])
        state, _, report = learner.update(
            state,
            state.params,
            part,
            jnp.float32(1.0),
            policy=policy,
            learning=learning,
            optimizer=optimizer,
        )
        updates.append((before, np.asarray(state.optimizer["table"]), report.metrics))
    return updates


def verl_gradient(data, logits, index):
    """The gradient of verl's loss of an update at `logits`, and how many tokens it rejects."""
    algorithm, actor = data["algorithm"], data["actor_rollout_ref"]["actor"]
    section = algorithm["rollout_correction"]
    bypass = section.get("bypass_mode", False)
    rollout = np.where(MASK, np.float64(ROLLOUT.log_probs), 0.0)
    old = rollout if bypass else log_probs_of(TRAINER)
    weights, kept, _ = formulas.correction(old - rollout, MASK, {} if bypass else section)
    name = algorithm["adv_estimator"]
    if name == "grpo" and not algorithm.get("norm_adv_by_std_in_grpo", True):
        name = "dr_grpo"
    a = formulas.advantages(
        name,
        REWARDS.astype(np.float64),
        kept,
        GROUP,
        response=MASK,
        greedy=GREEDY.astype(np.float64),
        energies=energies_of(TRAINER),
        weights=weights,
    )
    rows = slice(index * ROWS // UPDATES, (index + 1) * ROWS // UPDATES)
    options = {
        "bypass": bypass,
        "v1": data.get("trainer", {}).get("use_v1", False),
        "loss": actor.get("policy_loss", {}).get("loss_mode", "vanilla"),
        "correction": section,
        "aggregation": actor.get("loss_agg_mode", "token-mean"),
        "kl": actor["kl_loss_coef"] if actor["use_kl_loss"] else 0.0,
        "entropy": actor["entropy_coeff"],
        "low": actor["clip_ratio_low"],
        "high": actor["clip_ratio_high"],
        "dual": actor["clip_ratio_c"],
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    }
    arrays = {"old": old, "rollout": rollout, "advantages": a, "mask": kept, "response": MASK}
    arrays |= {"weights": weights, "reference": log_probs_of(REFERENCE)}
    ready = {k: None if x is None else x[rows] for k, x in arrays.items()}
    at = log_probs_of(logits)[rows]
    _, rejected, _ = formulas.correction(
        at - ready["rollout"], ready["mask"], section if bypass else {}
    )

    def loss(moved):
        part = ready | {"entropy": entropies_of(moved)[rows]}
        return formulas.loss_of_update(log_probs_of(moved)[rows], at, part, options)

    return tabular.derivative(loss, logits), (MASK[rows] & ~rejected).sum()


def check(data, *, differs=()):
    found = verl.translate(data)
    assert found.differs == differs
    assert not found.unknown
    rejected = []
    for index, (logits, gradient, _) in enumerate(our_step(found)):
        expected, number = verl_gradient(data, logits, index)
        scale = np.abs(expected).max()
        assert scale > 1e-3
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * scale)
        rejected.append(number)
    if data["algorithm"]["rollout_correction"].get("rollout_rs"):
        assert 0 < sum(rejected) < MASK.sum(), "the case must keep some and reject some"
    return found


@pytest.mark.parametrize("name", quick.some(list(formulas.PRESETS), 4, 12, 17))
def test_a_step_of_every_preset_is_verls(name):
    check(configuration(of_preset(name)))


REJECTING = ("decoupled_geo_rs_token_tis", "bypass_ppo_clip_k3_rs", "bypass_pg_geo_rs_seq_tis")


@pytest.mark.parametrize(
    ("mode", "name"),
    quick.some(
        list(
            itertools.product(
                ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
                REJECTING,
            )
        ),
        1,
    ),
)
def test_with_kl_and_entropy_terms_and_every_aggregation(name, mode):
    check(configuration(of_preset(name), kl=0.3, entropy=0.2, loss_agg_mode=mode))


@pytest.mark.parametrize("name", quick.some(REJECTING, 1))
def test_means_of_means_divide_by_what_is_kept(name):
    check(configuration(of_preset(name), loss_agg_mode="seq-mean-token-mean"))


@pytest.mark.slow
def test_the_denominator_of_the_other_trainer():
    section = of_preset("decoupled_geo_rs_token_tis")
    for v1, denominator in ((False, "verl"), (True, "response")):
        found = check(configuration(section, v1=v1, kl=0.3))
        assert found.config["learner"]["objective"]["denominator"] == denominator


GEO_MEAN = (
    "the loss is divided by a mini-batch's responses; verl's geo_mean by a micro-batch's, so there"
    " it grows with their number",
)


@pytest.mark.parametrize(
    "loss", quick.some(["gspo", "sapo", "gpg", "cispo", "geo_mean", "dppo_tv", "dppo_kl"], 4)
)
def test_every_loss_is_verls(loss):
    section = of_preset("decoupled_geo_rs")
    actor: dict[str, Any] = {"policy_loss": {"loss_mode": loss}}
    if "dppo" in loss:
        actor |= {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01}
    # The reference takes a mini-batch in one micro-batch, where even geo_mean is the same.
    check(configuration(section, **actor), differs=GEO_MEAN if loss == "geo_mean" else ())


@pytest.mark.parametrize(("loss", "high"), [("cispo", 0.2), ("vanilla", 1000.0), ("gspo", 1000.0)])
def test_bounds_that_cut_nothing_off_are_verls(loss, high):
    actor = {"clip_ratio_low": 10, "clip_ratio_high": high, "policy_loss": {"loss_mode": loss}}
    found = check(configuration(of_preset("decoupled_geo_rs"), **actor))
    assert found.config["learner"]["objective"]["clip_low"] == 1.0


@pytest.mark.parametrize(
    "estimator",
    quick.some(
        [
            "rloo",
            "grpo_passk",
            "gpg",
            "opo",
            "reinforce_plus_plus",
            "remax",
            "grpo without deviation",
        ],
        3,
    ),
)
def test_every_estimator_is_verls(estimator):
    data = configuration(of_preset("decoupled_geo_rs"), estimator=estimator.split(" ")[0])
    data["algorithm"]["norm_adv_by_std_in_grpo"] = "without" not in estimator
    found = check(data)
    early = found.config["learner"]["objective"].get("reject_before_advantages", False)
    assert early == (estimator in ("opo", "reinforce_plus_plus"))


def test_normalised_weights_and_several_rejections():
    section = {
        "rollout_is": "token",
        "rollout_is_threshold": 1.05,
        "rollout_rs": "token_k2,seq_max_k3",
    }
    section |= {"rollout_rs_threshold": "0.004,0.01", "rollout_is_batch_normalize": True}
    check(configuration(section))


def test_what_differs_is_named():
    section = of_preset("decoupled_geo_rs")
    found = verl.translate(configuration(section, estimator="reinforce_plus_plus_baseline"))
    assert "rejected responses leave the group's mean" in found.differs[0]
    bypass = of_preset("bypass_ppo_clip_geo_rs")
    found = verl.translate(configuration(bypass, kl=0.1, loss_agg_mode="seq-mean-token-mean"))
    assert found.differs == ("rejected tokens leave the KL and entropy terms, not so in verl",)
    found = verl.translate(configuration(bypass, v1=True))
    assert "trainer v1 takes no notice of rollout_rs" in found.notes[0]
    assert found.config["learner"]["corrections"] == []
    data = configuration(section, shuffle=True, use_torch_compile=False, puzzle=1)
    data["algorithm"]["surprise"] = "x"
    found = verl.translate(data)
    actor = "actor_rollout_ref.actor"
    assert found.unknown == (
        "algorithm.surprise = 'x'",
        f"{actor}.shuffle = True",
        f"{actor}.puzzle = 1",
    )
    assert found.idle == (f"{actor}.use_torch_compile",)


@pytest.mark.parametrize(
    ("size", "epochs", "updates", "differs"),
    [(64, 2, 160, "rises with every update, in verl once a step"), (512, 1, 10, "a step ahead")],
)
def test_the_warm_up_has_as_many_steps_as_in_verl(size, epochs, updates, differs):
    actor = {"ppo_mini_batch_size": size, "ppo_epochs": epochs, "optim": {"lr_warmup_steps": 10}}
    data = {"data": {"train_batch_size": 512}, "actor_rollout_ref": {"actor": actor}}
    found = verl.translate(data | {"algorithm": {"adv_estimator": "grpo"}})
    assert found.config["optimizer"]["warmup_steps"] == updates
    assert differs in " ".join(found.differs)


def test_the_first_step_of_a_warm_up_is_named_where_it_differs():
    ahead = "the warm-up is a step ahead: in verl the first step's learning rate is 0"
    optim = {"lr_warmup_steps": 10, "zero_indexed_step": False}
    assert ahead in of_actor(optim=optim).differs
    found = " ".join(of_actor(optim=optim | {"lr_scheduler_type": "cosine"}).differs)
    assert "falls a step later" in found
    assert ahead not in found


def in_bypass(where, *, v1=False, asked=True, **settings):
    """The loss bypass_mode, with its settings in `algorithm` or in `policy_loss`."""
    whole = {"bypass_mode": asked} | (settings if where == "algorithm" else {})
    policy_loss: dict[str, Any] = {"loss_mode": "bypass_mode"}
    if where == "policy_loss":
        policy_loss["rollout_correction"] = settings
    return configuration(whole, v1=v1, policy_loss=policy_loss)


REINFORCE: dict[str, Any] = {
    "loss_type": "reinforce",
    "rollout_is": "sequence",
    "rollout_rs": "seq_mean_k3",
}
REINFORCE |= {"rollout_rs_threshold": "0.01"}


@pytest.mark.parametrize("v1", [False, True])
def test_the_loss_bypass_mode_reads_its_own_section(v1):
    found = verl.translate(in_bypass("policy_loss", v1=v1, **REINFORCE))
    assert (found.differs, found.notes, found.unknown) == ((), (), ())
    assert [x["name"] for x in found.config["learner"]["corrections"]] == ["sequence_tis", "reject"]
    assert found.config["learner"]["objective"]["loss"] == "reinforce"
    found = verl.translate(in_bypass("algorithm", v1=v1, **REINFORCE))
    (note,) = found.notes
    assert note.startswith("loss_type, rollout_is, rollout_rs of algorithm.rollout_correction have")
    assert found.config["learner"]["corrections"] == []
    assert found.config["learner"]["objective"]["loss"] == "clip"
    with pytest.raises(InputError, match=r"rollout_correction.bypass_mode = False: must be true"):
        verl.translate(in_bypass("policy_loss", v1=v1, asked=False, **REINFORCE))


def test_what_verl_does_not_hand_to_its_workers_is_named():
    (note,) = verl.translate(configuration(of_preset("bypass_pg_is"))).notes
    assert "issue 4912" in note


def test_a_threshold_of_null_switches_weights_off():
    section = {"rollout_is": "token", "rollout_is_threshold": None}
    found = verl.translate(configuration(section | {"rollout_is_batch_normalize": True}))
    assert found.config["learner"]["corrections"] == []
    assert found.notes == ("rollout_is has no effect in verl where rollout_is_threshold is null",)


@pytest.mark.parametrize("v1", [False, True])
def test_a_length_that_only_one_trainer_divides_by_is_named(v1):
    data = configuration({}, loss_agg_mode="seq-mean-token-sum-norm", v1=v1)
    assert (
        any("longest response of each micro-batch" in x for x in verl.translate(data).differs) == v1
    )


def test_kl_losses_with_the_gradient_of_k2_are_k2():
    for name in ("k2+", "mse+"):
        found = of_actor(use_kl_loss=True, kl_loss_type=name)
        assert found.config["learner"]["objective"]["kl_estimator"] == "k2"
    with pytest.raises(InputError, match=r"kl_loss_type = 'abs\+': has no counterpart"):
        of_actor(use_kl_loss=True, kl_loss_type="abs+")


@pytest.mark.parametrize("steps", [None, -1, 0])
def test_no_warm_up_is_written_where_verl_has_none(steps):
    found = of_actor(optim={"lr_warmup_steps": steps})
    assert "warmup_steps" not in found.config["optimizer"]
    assert not found.differs


@pytest.mark.parametrize(
    ("optim", "shape"),
    [
        ({"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}, "cosine"),
        (
            {"lr_scheduler_type": "constant", "warmup_style": "cosine", "min_lr_ratio": 0.1},
            "cosine",
        ),
        ({"lr_decay_style": "cosine", "min_lr": 1e-7}, "cosine"),
        ({"lr_decay_style": "linear", "min_lr": 1e-7, "lr_decay_steps": 20}, "linear"),
    ],
)
@pytest.mark.parametrize("updates", [1, 2])
def test_the_schedule_is_verls(optim, shape, updates):
    actor = {
        "ppo_mini_batch_size": 64 // updates,
        "optim": {"lr": 1e-6, "lr_warmup_steps": 4, **optim},
    }
    data = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": actor, "rollout": {"n": GROUP}},
        "data": {"train_batch_size": 64},
        "trainer": {"total_training_steps": 20},
    }
    found = verl.translate(data)
    assert not found.unknown
    assert not found.notes
    assert any("schedule's learning rate falls" in line for line in found.differs) == (updates > 1)
    run = toml.build(found.config | {"sampling": {"samples": GROUP}})
    assert run.steps == 20
    rate = replace(run.optimizer, total_steps=run.optimizer.total_steps or run.updates)
    for step in (4, 9, 15, 20):
        progress = (step - 4) / 16
        left = {"cosine": (1 + np.cos(np.pi * progress)) / 2, "linear": 1 - progress}[shape]
        at_step = np.asarray(rate.schedule_fn()(step * updates))
        np.testing.assert_allclose(at_step, 1e-6 * (0.1 + 0.9 * left), rtol=1e-5)


def test_a_schedule_without_an_end_or_a_counterpart_is_named():
    found = of_actor(optim={"lr_scheduler_type": "cosine", "lr_warmup_steps": 200})
    assert found.notes == (
        "the cosine schedule ends with the run: set steps to as many as in verl",
    )
    assert "steps" not in found.config
    found = of_actor(optim={"lr_decay_style": "inverse_square_root"})
    assert found.differs == (
        "the learning rate stays constant, its schedule in verl is inverse_square_root",
    )
    assert "schedule" not in found.config["optimizer"]


@pytest.mark.parametrize(
    "optim",
    [
        {"override_optimizer_config": {"eps": "1e-15"}},
        {"override_optimizer_config": {"adam_eps": 1e-15}},
        {"eps": 1e-15},
    ],
)
def test_the_epsilon_of_adam_is_verls(optim):
    found = of_actor(optim=optim)
    assert found.config["optimizer"]["eps"] == 1e-15
    assert not found.unknown


def test_verls_defaults_are_not_called_without_counterpart():
    qat = {"mode": "w4a16", "group_size": 16, "ignore_patterns": ["lm_head"]}
    optim = {"optimizer": "AdamW", "optimizer_impl": "torch.optim", "clip_grad": 1.0}
    optim |= {"lr_scheduler_type": "constant", "num_cycles": 0.5, "zero_indexed_step": True}
    optim |= {"min_lr_ratio": 0.0, "muon_momentum": 0.95, "lr_wsd_decay_style": "exponential"}
    data = {
        "algorithm": {"pf_ppo": {"reweight_method": "pow"}, "adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": {"optim": optim, "qat": {"enable": False, **qat}}},
    }
    assert not verl.translate(data).unknown
    data["actor_rollout_ref"]["actor"]["optim"] = {"optimizer": "muon", "muon_momentum": 0.95}
    data["actor_rollout_ref"]["actor"]["qat"] = {"enable": True, "mode": "w4a16"}
    actor = "actor_rollout_ref.actor"
    assert verl.translate(data).unknown == (
        f"{actor}.optim.optimizer = 'muon'",
        f"{actor}.optim.muon_momentum = 0.95",
        f"{actor}.qat.enable = True",
        f"{actor}.qat.mode = 'w4a16'",
    )


def with_key(path, value):
    """A configuration with this key, among what it needs."""
    data: dict[str, Any] = {"algorithm": {"adv_estimator": "grpo"}}
    section, (*above, last) = data, path.split(".")
    for part in above:
        section = section.setdefault(part, {})
    section[last] = value
    return data


def of_actor(**actor):
    """The translation of a configuration that sets these keys of the actor alone."""
    data = {"actor_rollout_ref": {"actor": actor, "rollout": {"n": GROUP}}}
    return verl.translate(data | {"algorithm": {"adv_estimator": "grpo"}})


@pytest.mark.parametrize(
    ("actor", "norm", "note"),
    [
        ({}, 1.0, None),
        ({"optim": {"clip_grad": 0.3}}, 0.3, None),
        ({"optim": {"clip_grad": 0.3, "grad_clip": 0.1}}, 0.1, None),
        ({"optim": {"clip_grad": 0.3, "grad_clip": None}, "grad_clip": None}, 0.3, None),
        ({"grad_clip": 0.5}, 1.0, "actor.grad_clip = 0.5 has no effect in verl"),
        ({"grad_clip": 1, "optim": {"clip_grad": 0.3}}, 0.3, "actor.grad_clip = 1.0 has no effect"),
    ],
)
def test_gradients_are_clipped_to_what_verls_engines_read(actor, norm, note):
    found = of_actor(**actor)
    assert found.config["optimizer"]["max_grad_norm"] == norm
    assert not found.unknown
    assert bool(found.notes) == bool(note)
    assert (note or "") in "".join(found.notes)


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_experts_are_replayed_where_verl_replays_them(engine):
    found = of_actor(**{engine: {"router_replay": {"mode": "R3", "record_file": None}}})
    assert found.config["learner"]["routing"] == "replayed"
    assert not found.differs
    found = of_actor(**{engine: {"router_replay": {"mode": "R2"}}})
    assert "routing" not in found.config["learner"]
    assert "chooses experts anew in every update" in found.differs[0]
    found = of_actor(**{engine: {"router_replay": {"mode": "disabled"}}})
    assert "routing" not in found.config["learner"]
    assert not found.differs


def test_what_changes_a_step_among_keys_of_the_engines_is_named():
    path, override = "actor_rollout_ref.actor", "override_transformer_config"
    coefficients = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.0, "moe_router_dtype": "fp32"}
    found = of_actor(
        megatron={override: coefficients, "qat": {"enable": False}},
        fsdp_config={"qat": {"enable": True}, "router_replay": {"mode": "disabled"}},
    )
    assert found.unknown == (
        f"{path}.megatron.{override}.moe_aux_loss_coeff = 0.01",
        f"{path}.fsdp_config.qat.enable = True",
    )
    assert found.idle == (
        f"{path}.megatron.{override}.moe_z_loss_coeff",
        f"{path}.megatron.{override}.moe_router_dtype",
        f"{path}.megatron.qat.enable",
        f"{path}.fsdp_config.router_replay.mode",
    )


def test_refills_are_said_to_come_from_another_order_of_the_prompts():
    data = {"algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": True}}}
    (line,) = verl.translate(data).differs
    assert line.startswith("the prompts that replace groups of equal rewards come from a second")


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("actor_rollout_ref.rollout.top_k", 50, "log-probs are over what top-k and top-p keep"),
        ("actor_rollout_ref.rollout.top_p", 0.95, "log-probs are over what top-k and top-p keep"),
        ("actor_rollout_ref.model.lora_rank", 32, "all weights are trained, in verl adapters"),
        ("actor_rollout_ref.model.lora.rank", 32, "all weights are trained, in verl adapters"),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, "set sampling.max_turns"),
        ("reward_model.overlong_buffer.enable", True, "set learner.objective.overlong_cache"),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable", True, "objective.overlong_cache"),
    ],
)
def test_what_other_sections_do_to_a_step_is_named(path, value, line):
    (found,) = verl.translate(with_key(path, value)).differs
    assert line in found
    off = {"top_k": -1, "top_p": 1.0}.get(path.rpartition(".")[2], 0 if value == 32 else False)
    assert not verl.translate(with_key(path, off)).differs


def test_files_of_a_defaults_list_are_said_not_to_be_read():
    data: dict[str, Any] = {"defaults": ["ppo_trainer", "_self_"]}
    with pytest.raises(InputError, match=r"has none of the sections .*; the files of its defaults"):
        verl.translate(data | {"data": {}})
    notes = verl.translate(data | {"algorithm": {"adv_estimator": "grpo"}}).notes
    assert "the files of its defaults list are not read" in notes[-1]


def test_a_key_that_is_left_out_has_verls_default():
    objective = verl.translate({"algorithm": {"adv_estimator": "grpo"}}).config["learner"][
        "objective"
    ]
    expected = {"loss": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert {name: objective[name] for name in expected} == expected
    assert objective["aggregation"] == "token_mean"
    assert objective["kl_coefficient"] == 0.0
    found = of_actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=512)
    assert found.config["sampling"]["max_prompt_length"] == 512
    assert found.config["sampling"]["max_tokens"] == 512
    assert not found.differs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adv_estimator": "gae"}, "adv_estimator = 'gae': has no counterpart"),
        ({"adv_estimator": "grop"}, "'grop' is unknown; did you mean 'grpo'"),
        (
            {"rollout_correction": {"rollout_rs": "seq_max_k1"}},
            "rollout_rs = 'seq_max_k1': must be",
        ),
        (
            {"rollout_correction": {"rollout_rs": "token_k2"}},
            "rollout_rs_threshold = None: must be",
        ),
        ({"rollout_correction": {"rollout_is": "tokens"}}, "did you mean 'token'"),
        (
            {"rollout_correction": {"bypass_mode": "yes"}},
            "bypass_mode = 'yes': must be true or false",
        ),
        ({"gamma": "${x.y}"}, "gamma = .*: is an interpolation"),
        ({"gamma": 0.9, "adv_estimator": "reinforce_plus_plus"}, "gamma = 0.9: must be 1"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message) as refused:
        verl.translate({"algorithm": {"adv_estimator": "grpo", **changes}}, source="verl.yaml")
    assert "\n" not in str(refused.value)
    assert "unicode string" not in str(refused.value)
    assert str(refused.value).startswith("verl.yaml: ")


@pytest.mark.parametrize(
    "path",
    [
        "data.train_batch_size",
        "data.max_response_length",
        "actor_rollout_ref.rollout.top_k",
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.actor.clip_ratio_c",
        "algorithm.filter_groups.max_num_gen_batches",
    ],
)
def test_null_where_verl_has_a_value_is_one_line(path):
    with pytest.raises(InputError) as refused:
        verl.translate(with_key(path, None))
    assert str(refused.value) == f"verl: {path} = None: must not be null; leave the key out"


@pytest.mark.parametrize("betas", [0.9, [0.9], "0.9"])
def test_betas_that_are_not_two_numbers_are_refused(betas):
    with pytest.raises(InputError, match=r"optim.betas = .*: must be a list of two numbers"):
        of_actor(optim={"betas": betas})


def test_an_estimator_that_nobody_wrote_is_called_verls_default():
    with pytest.raises(InputError, match="adv_estimator = 'gae': is verl's default and"):
        verl.translate({"rollout_correction": {"rollout_is": "token"}})


def test_the_command_prints_toml_that_loads(tmp_path, capsys):
    file, out = tmp_path / "verl.yaml", tmp_path / "ours.toml"
    file.write_text(
        "algorithm: {adv_estimator: rloo}\n"
        "rollout_correction: {rollout_is: token, rollout_is_threshold: 3}\n"
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6}, entropy_coeff: 1e-3}}\n"
    )
    assert cli.main(["translate", str(file), "--out", str(out)]) == 0
    assert capsys.readouterr().out == out.read_text()
    config = toml.load(out, ["model.path=/models/some"])
    assert config.optimizer.learning_rate == 1e-6
    assert config.learner.corrections == ({"name": "token_tis", "cap": 3.0},)
    assert config.objective.entropy_coefficient == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"verl.yaml: not YAML: while parsing .* at line 1, column 5"),
        ("[1, 2]", "must be a mapping"),
        ("x: {}", "has none of the sections"),
        ("algorithm: {x: 1}\nactor: {}\nalgorithm: {x: 2}", "'algorithm' stands there twice"),
        ("algorithm: {x: 1, y: 2, x: 3}", "'x' stands there twice; leave one out.* column 25"),
    ],
)
def test_files_that_are_none_are_one_line(tmp_path, text, message):
    file = tmp_path / "verl.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as refused:
        verl.translate(verl_keys.read_yaml(file))
    assert "\n" not in str(refused.value)
