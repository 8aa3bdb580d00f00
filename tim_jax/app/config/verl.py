"""A verl configuration as one of this library: the TOML of a run, and what would differ.

Read are the sections `algorithm` (with `rollout_correction`, which may also stand by itself) and
`actor_rollout_ref.actor`; of others only what a step's size and sampling and the number of steps
need. A key that is left out has verl's default. verl has two trainers: v0 (`ray_trainer.py`) is
meant unless `trainer.use_v1` is true. The formulas are those of verl at commit 1dda039
(2026-08-22).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tomli_w

from tim_jax.app.config import toml
from tim_jax.app.config.verl_keys import ACTOR, Keys, rejections, weights
from tim_jax.common.errors import InputError
from tim_jax.objectives.objective import Aggregation, counts_kept

_MOST_STEPS = 2**31 - 1
_OF_THE_LOSS = ("loss_type", "rollout_is", "rollout_rs")  # of a rollout_correction
_POLICY_LOSS = f"{ACTOR}.policy_loss"
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
_COMPOSED = (
    "the files of its defaults list are not read: give the whole configuration, as --cfg job"
    " --resolve prints it"
)
SECTIONS = ("algorithm", ACTOR, "rollout_correction")
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "pass_at_k",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "gpg": "gpg",
    "optimal_token_baseline": "optimal_token_baseline",
}
# What they compute depends on the mask, and so on rejections before them.
_READ_THE_MASK = ("opo", "optimal_token_baseline", "reinforce_plus_plus")
# A rejected end takes the reward away from these in verl.
_READ_THE_END = ("optimal_token_baseline", "reinforce_plus_plus", "remax")
LOSSES = {
    "vanilla": "clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "reinforce",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
KL_LOSSES = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), "k2"),  # k2's own gradient is that of "+"
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **dict.fromkeys(("kl+", "k1+"), "k1+"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3+"),
    "abs": "abs",
}


class Translation(NamedTuple):
    """A verl configuration as a run's."""

    config: dict[str, Any]  # as TOML has it
    differs: tuple[str, ...]  # what the run does otherwise than verl
    notes: tuple[str, ...]  # what verl does with these keys that one may not expect
    idle: tuple[str, ...]  # keys that were given and change no step
    unknown: tuple[str, ...]  # "key = value" that has no counterpart here
    sections: tuple[str, ...]  # that were not read


def translate(data: Mapping[str, Any], *, source: str = "verl") -> Translation:
    """Returns the run of a nested dict of verl's keys; `source` is named in errors.

    Raises:
      InputError: no section that it reads, a value that verl does not have, one that has no
        counterpart here without which a step has no meaning (such as a critic), or a combination
        that this library refuses.
    """
    given = Keys(data, source)
    if not any(given.has(section) for section in SECTIONS):
        hint = f"; {_COMPOSED}" if data.get("defaults") else ""
        raise InputError(f"{source}: has none of the sections {', '.join(SECTIONS)}{hint}")
    step = _Step(given)
    config = step.config()
    if data.get("defaults"):
        step.notes.append(_COMPOSED)
    # The lengths are for a model, which is not known yet, as the run's length may be.
    sampling = {k: v for k, v in config.get("sampling", {}).items() if not k.startswith("max_")}
    toml.build(
        {"steps": _MOST_STEPS, **config, "sampling": sampling}, source=f"{source}, translated"
    )
    idle, unknown = given.rest()
    return Translation(
        config, tuple(step.differs), tuple(step.notes), idle, unknown, given.others()
    )


def text(translation: Translation, *, source: str) -> str:
    """Returns the TOML, with what differs in comments above it."""
    lines = [f"From {source}. A run also needs a model and a task."]
    for title, items in (
        ("What this does otherwise than verl:", translation.differs),
        ("To know:", translation.notes),
        ("No counterpart here, left out:", translation.unknown),
        ("Change no step, left out:", translation.idle),
        ("Sections of which a few keys are read at most:", translation.sections),
    ):
        lines += [title, *(f"- {item}" for item in items)] if items else []
    comments = "\n".join(f"# {' '.join(line.split())}" for line in lines)
    return f"{comments}\n\n{tomli_w.dumps(translation.config)}"


class _Step:
    """The parts of a step, each as our keys; `differs` collects what is not the same."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.differs: list[str] = []
        self.notes: list[str] = []
        self.mode_of_loss = keys.choice(
            f"{_POLICY_LOSS}.loss_mode", "vanilla", (*LOSSES, "bypass_mode")
        )
        self.v1 = keys.get("trainer.use_v1", False)
        self.has_kl = self.actor("use_kl_loss", False)
        self.entropy = self.actor("entropy_coeff", 0.0)
        self.path, self.bypass = self._bypass()
        self.estimator = self._estimator()
        # verl's trainer v1 leaves all corrections out then.
        self.corrects = not (self.bypass and self.v1 and self.mode_of_loss != "bypass_mode")
        self.loss = self._loss()
        self.rejections = rejections(keys, self.path) if self.corrects else []
        self.weights = weights(keys, self.path)  # its keys are known, even without an effect

    def actor(self, key: str, default: Any, *, nullable: bool = False) -> Any:
        """The value of a key of the actor."""
        return self.keys.get(f"{ACTOR}.{key}", default, nullable=nullable)

    def config(self) -> dict[str, Any]:
        """The run's keys."""
        learner = {
            "mode": "bypass" if self.bypass else "recompute",
            **self._updates(),
            **self._routing(),
            "corrections": self._corrections(),
            "objective": self._objective(),
        }
        optimizer = self._optimizer(learner["mini_batches"] * learner["epochs"])
        found = {"sampling": self._sampling(), "learner": learner, "optimizer": optimizer}
        self._filter(learner)
        self._beside()
        return self._length() | {name: section for name, section in found.items() if section}

    def _bypass(self) -> tuple[str, bool]:
        """The section with the corrections, and whether old log-probs are the rollout's."""
        keys, whole = self.keys, "algorithm.rollout_correction"
        asked = keys.get(f"{whole}.bypass_mode", False)
        if self.mode_of_loss != "bypass_mode":
            if asked and not self.v1:
                self.notes.append(
                    "verl at 1dda039 does not hand bypass mode's loss_type, rollout_is and"
                    " rollout_rs to its workers (its issue 4912) unless policy_loss has them; here"
                    " they have the effect that verl documents"
                )
            return whole, asked
        if not asked:
            raise keys.wrong(
                f"{whole}.bypass_mode",
                asked,
                "must be true if policy_loss.loss_mode is bypass_mode: without it verl rejects by"
                " pi / pi_old, which has no counterpart",
            )
        unread = [name for name in _OF_THE_LOSS if keys.get(f"{whole}.{name}", None) is not None]
        if unread:
            self.notes.append(
                f"{', '.join(unread)} of {whole} have no effect in verl: the loss bypass_mode reads"
                " those of policy_loss.rollout_correction"
            )
        path = f"{_POLICY_LOSS}.rollout_correction"
        keys.get(f"{path}.bypass_mode", True)  # not read by verl's loss
        return path, True

    def _estimator(self) -> str:
        keys, path = self.keys, "algorithm.adv_estimator"
        divided = "algorithm.norm_adv_by_std_in_grpo"
        name = keys.get(path, "gae")
        if name in ("gae", "gdpo", "tir_optimal_token_baseline"):
            verb = "has" if path in keys else "is verl's default and has"
            rule = f"{verb} no counterpart, as {', '.join(ESTIMATORS)} do"
            raise keys.wrong(path, name, rule)
        found = ESTIMATORS[keys.choice(path, "gae", ESTIMATORS)]
        gamma = keys.get("algorithm.gamma", 1.0)
        if gamma != 1.0 and found == "reinforce_plus_plus":
            raise keys.wrong("algorithm.gamma", gamma, "must be 1: nothing is discounted")
        keys.get("algorithm.lam", 1.0)  # of gae
        if keys.get(divided, True):
            return found
        if found == "pass_at_k":
            raise keys.wrong(divided, False, "grpo_passk is divided by it here")
        return "dr_grpo" if found == "grpo" else found

    def _loss(self) -> str:
        kind = self.keys.choice(f"{self.path}.loss_type", "ppo_clip", ("ppo_clip", "reinforce"))
        asked = LOSSES.get(self.mode_of_loss, "clip")
        if not self.bypass:
            return asked
        if not self.corrects:
            self.notes.append(
                "verl's trainer v1 takes no notice of rollout_rs, rollout_is and loss_type in"
                " bypass mode unless policy_loss.loss_mode is bypass_mode, so they are left out"
            )
            return asked
        if self.mode_of_loss not in ("vanilla", "bypass_mode"):
            self.notes.append(f"bypass mode takes the loss {kind} in place of {self.mode_of_loss}")
        return "clip" if kind == "ppo_clip" else "reinforce"

    def _corrections(self) -> list[dict[str, Any]]:
        if not self.corrects:
            return []
        complete = self.bypass and self.loss == "clip"
        weight = [] if complete else self.weights
        if not weight and self.keys.get(f"{self.path}.rollout_is", None) is not None:
            why = "where rollout_is_threshold is null"
            if complete:
                why = "beside PPO's loss in bypass mode, whose ratio is complete"
            self.notes.append(f"rollout_is has no effect in verl {why}")
        if self.bypass and any(entry["name"] == "normalise" for entry in weight):
            self.differs.append("a batch's mean weight is of a mini-batch, verl's of a micro-batch")
        if self.loss == "gmpo":
            self.differs.append(
                "the loss is divided by a mini-batch's responses; verl's geo_mean by a"
                " micro-batch's, so there it grows with their number"
            )
            if weight:
                self.differs.append("each token has its own weight; in verl's geo_mean their mean")
        return weight + self.rejections

    def _objective(self) -> dict[str, Any]:
        objective: dict[str, Any] = {
            "preset": "grpo",
            "estimator": self.estimator,
            "loss": self.loss,
            **self._loss_options(),
            **self._aggregation(),
            **self._terms(),
            **self._reward_kl(),
        }
        return objective | (self._rejected(objective["aggregation"]) if self.rejections else {})

    def _loss_options(self) -> dict[str, Any]:
        clip, cap = self.actor("clip_ratio", 0.2), self.actor("clip_ratio_c", 3.0)
        low = self.actor("clip_ratio_low", 0.2, nullable=True)
        high = self.actor("clip_ratio_high", 0.2, nullable=True)
        bounds = {
            "clip_low": clip if low is None else low,
            "clip_high": clip if high is None else high,
        }
        if clip != 0.2 and clip not in bounds.values():
            self.notes.append(
                f"clip_ratio = {clip} has no effect in verl, where clip_ratio_low and"
                " clip_ratio_high are not null"
            )
        if self.loss in ("clip", "gspo", "cispo", "clip_cov") and bounds["clip_low"] > 1.0:
            bounds["clip_low"] = 1.0  # the same loss: no ratio is below 0
        options = {
            "sapo": {
                "temperature_positive": self.actor("tau_pos", 1.0),
                "temperature_negative": self.actor("tau_neg", 1.05),
            },
            "clip_cov": {
                "share": self.actor("policy_loss.clip_cov_ratio", 2e-4),
                "lower": self.actor("policy_loss.clip_cov_lb", 1.0),
                "upper": self.actor("policy_loss.clip_cov_ub", 5.0),
            },
            "kl_cov": {
                "share": self.actor("policy_loss.kl_cov_ratio", 2e-4),
                "coefficient": self.actor("policy_loss.ppo_kl_coef", 0.1),
            },
            **{name: {"ratio_cap": cap} for name in ("dppo_tv", "dppo_kl")},
        }
        if self.loss in ("clip_cov", "kl_cov"):
            drawn = "; which tokens are dropped is drawn otherwise"
            self.differs.append(
                "the covariance is of a mini-batch, and verl's of a micro-batch"
                f"{drawn if self.loss == 'clip_cov' else ''}"
            )
        found: dict[str, Any] = {} if self.loss in ("reinforce", "sapo", "kl_cov") else bounds
        if self.loss in options:
            return found | {"loss_options": options[self.loss]}
        return found | ({"dual_clip": cap} if self.loss == "clip" else {})

    def _aggregation(self) -> dict[str, Any]:
        asked = self.keys.choice(f"{ACTOR}.loss_agg_mode", "token-mean", AGGREGATIONS)
        factor = self.actor("loss_scale_factor", None)
        found = AGGREGATIONS[asked]
        if self.loss in ("gspo", "sapo", "gmpo"):
            found = "sequence_mean_token_mean"
            if asked != "seq-mean-token-mean" and (self.has_kl or self.entropy):
                self.differs.append(
                    f"KL and entropy terms are added up as the loss is ({found}), and in verl by"
                    f" {asked}"
                )
        if found == "constant_length":
            longest = self.keys.get("data.max_response_length", 512)
            if factor is None and self.v1:
                self.differs.append(
                    "sums are divided by sampling.max_tokens, in verl's trainer v1 by the longest"
                    " response of each micro-batch"
                )
            elif factor not in (None, longest):
                self.differs.append(f"sums are divided by sampling.max_tokens, in verl by {factor}")
        return {"aggregation": found}

    def _terms(self) -> dict[str, Any]:
        coefficient = self.actor("kl_loss_coef", 0.001)
        path = f"{ACTOR}.kl_loss_type"
        if self.keys.get(path, "low_var_kl") == "abs+":
            raise self.keys.wrong(path, "abs+", "has no counterpart, as abs and k2 have")
        kind = KL_LOSSES[self.keys.choice(path, "low_var_kl", KL_LOSSES)]
        found: dict[str, Any] = {"kl_coefficient": coefficient if self.has_kl else 0.0}
        if self.has_kl:
            found["kl_estimator"] = kind
            if kind.startswith("k3"):
                found["kl_cap"] = 10.0
        if self.entropy:
            found["entropy_coefficient"] = self.entropy
        return found

    def _reward_kl(self) -> dict[str, Any]:
        keys, path = self.keys, "algorithm.kl_ctrl"
        estimator = keys.get("algorithm.kl_penalty", "kl")
        coefficient = keys.get(f"{path}.kl_coef", 0.001)
        kind = keys.choice(f"{path}.type", "fixed", ("fixed", "adaptive"))
        target = keys.get(f"{path}.target_kl", 0.1)
        horizon = keys.get(f"{path}.horizon", 10_000)
        if not keys.get("algorithm.use_kl_in_reward", False):
            return {}
        if estimator not in ("kl", "k1"):
            raise keys.wrong("algorithm.kl_penalty", estimator, "must be kl: the reward's is k1")
        if kind == "fixed":
            return {"reward_kl_coefficient": coefficient}
        self.differs.append("reward_kl_target is of a whole response, verl's target_kl of a token")
        return {
            "reward_kl_coefficient": coefficient,
            "reward_kl_target": target,
            "reward_kl_horizon": horizon,
        }

    def _rejected(self, aggregation: Aggregation) -> dict[str, Any]:
        """What rejections do to denominators, to other terms and to advantages."""
        found: dict[str, Any] = {}
        if aggregation == "sequence_mean_token_mean":
            found["denominator"] = "verl"
        elif aggregation == "token_mean":
            all_count = self.bypass or self.v1
            found["denominator"] = "response" if all_count else "verl"
            if not self.bypass:
                self.notes.append(
                    f"as verl's trainer v{int(self.v1)}; with v{int(not self.v1)} set"
                    f' denominator = "{"verl" if all_count else "response"}"'
                )
        if not self.bypass:
            return found | self._rejected_advantages()
        if not (self.has_kl or self.entropy):
            return found
        if counts_kept(aggregation, found.get("denominator", "response")):
            self.differs.append("rejected tokens leave the KL and entropy terms, not so in verl")
            return found
        return found | {"regularise_rejected": True}

    def _rejected_advantages(self) -> dict[str, Any]:
        of_tokens = any(entry["over"] == "token" for entry in self.rejections)
        if of_tokens and self.estimator in _READ_THE_END:
            self.differs.append(
                "a response keeps its reward, which in verl goes with a rejected end"
            )
        if self.estimator == "reinforce_plus_plus_baseline":
            self.differs.append(
                "rejected responses leave the group's mean as well as the whitening; in verl the"
                " whitening alone"
            )
        elif self.estimator not in _READ_THE_MASK:
            return {}
        return {"reject_before_advantages": True}

    def _updates(self) -> dict[str, Any]:
        prompts = self.keys.get("data.train_batch_size", 1024)
        size = self.actor("ppo_mini_batch_size", 256)
        if size < 1 or prompts % size:
            rule = f"must divide data.train_batch_size, {prompts}"
            raise self.keys.wrong(f"{ACTOR}.ppo_mini_batch_size", size, rule)
        if self.estimator == "optimal_token_baseline":
            self.differs.append(
                "energies are weighted by pi_old / mu; in verl by the truncated weights, if any"
            )
        return {
            "epochs": self.actor("ppo_epochs", 1),
            "prompts_per_step": prompts,
            "mini_batches": prompts // size,
        }

    def _routing(self) -> dict[str, Any]:
        """Whose experts the learner uses; verl reads it of the engine."""
        for engine in ("megatron", "veomni"):
            mode = self.actor(f"{engine}.router_replay.mode", "disabled")
            if mode == "R3":
                return {"routing": "replayed"}
            if mode == "R2":
                self.differs.append(
                    "the learner chooses experts anew in every update, in verl (R2) as before the"
                    " step"
                )
        return {}

    def _sampling(self) -> dict[str, Any]:
        path, keys = "actor_rollout_ref.rollout", self.keys
        found = {
            "max_prompt_length": keys.get("data.max_prompt_length", 512),
            "max_tokens": keys.get("data.max_response_length", 512),
        }
        for ours, theirs, default in (
            ("samples", f"{path}.n", 1),
            ("temperature", f"{path}.temperature", 1.0),
            ("top_p", f"{path}.top_p", 1.0),
            ("top_k", f"{path}.top_k", -1),
        ):
            if theirs in keys:
                value = keys.get(theirs, default)
                found[ours] = max(value, 0) if ours == "top_k" else value
        if "samples" not in found:
            self.notes.append(f"{path}.n is not given: set sampling.samples")
        if found.get("top_k", 0) or found.get("top_p", 1.0) < 1:
            self.differs.append(
                "the learner's log-probs are over what top-k and top-p keep, in verl over the whole"
                " vocabulary"
            )
        return found

    def _beside(self) -> None:
        """Names what sections that are not translated do to a step."""
        model, turns = "actor_rollout_ref.model", "actor_rollout_ref.rollout.multi_turn.enable"
        ranks = [self.keys.get(f"{model}.{key}", None) for key in ("lora_rank", "lora.rank")]
        if any(ranks):
            self.differs.append("all weights are trained, in verl adapters: set lora.rank")
        if self.keys.get(turns, None):
            self.differs.append(
                "a response is one turn, in verl an episode: set sampling.max_turns"
            )
        if any(self.keys.get(f"{buffer}.enable", None) for buffer in _OVERLONG):
            self.differs.append(
                "overlong responses keep their reward, in verl they lose some: set"
                " learner.objective.overlong_cache"
            )

    def _optimizer(self, updates: int) -> dict[str, Any]:
        """The optimizer's keys, for a step of this many updates."""
        path = f"{ACTOR}.optim"
        found: dict[str, Any] = {
            "learning_rate": self.actor("optim.lr", 1e-6),
            "weight_decay": self.actor("optim.weight_decay", 0.01),
            "max_grad_norm": self._max_grad_norm(),
        }
        betas = self.actor("optim.betas", None) or [0.9, 0.999]
        if not isinstance(betas, list) or len(betas) != 2:
            raise self.keys.wrong(f"{path}.betas", betas, "must be a list of two numbers")
        found["b1"], found["b2"] = (self.keys.number(f"{path}.betas", b) for b in betas)
        for key in ("eps", "override_optimizer_config.eps", "override_optimizer_config.adam_eps"):
            if (eps := self.actor(f"optim.{key}", None)) is not None:
                found["eps"] = self.keys.number(f"{path}.{key}", eps)
        warmup = self.actor("optim.lr_warmup_steps", -1, nullable=True) or 0
        if warmup > 0 and updates > 1:
            self.differs.append(
                "the warm-up's learning rate rises with every update, in verl once a step"
            )
        found |= {"warmup_steps": warmup * updates} if warmup > 0 else {}
        found |= self._schedule(found["learning_rate"], updates)
        from_one = not self.actor("optim.zero_indexed_step", True)
        if from_one and found.get("schedule") == "cosine":
            self.differs.append("the cosine falls a step later than by zero_indexed_step = false")
        elif warmup > 0:
            self.differs.append(
                "the warm-up is a step ahead: in verl the first step's learning rate is 0"
            )
        return found

    def _schedule(self, rate: float, updates: int) -> dict[str, Any]:
        """The learning rate after the warm-up, for a step of this many updates."""
        names = ("warmup_style", "lr_scheduler_type", "lr_decay_style")  # the first is deprecated
        given = [self.actor(f"optim.{name}", None) for name in names]
        name = next((name for name in given if name is not None), "constant")
        lowest = max(self.actor(f"optim.{key}", 0.0) for key in ("min_lr", "lr_min"))
        share = self.actor("optim.min_lr_ratio", 0.0, nullable=True) or (rate and lowest / rate)
        total = self.actor("optim.lr_decay_steps", None)
        if name == "constant":
            return {}
        if name not in ("cosine", "linear"):
            self.differs.append(f"the learning rate stays constant, its schedule in verl is {name}")
            return {}
        if updates > 1:
            self.differs.append(
                f"the {name} schedule's learning rate falls with every update, in verl once a step"
            )
        found = {"schedule": name, "final_share": share}
        if total is not None:
            total = self.keys.number(f"{ACTOR}.optim.lr_decay_steps", total, whole=True)
            return found | {"total_steps": total * updates}
        if "steps" not in self._length():
            self.notes.append(
                f"the {name} schedule ends with the run: set steps to as many as in verl"
            )
        return found

    def _length(self) -> dict[str, Any]:
        """How many steps the run has, if that is given."""
        path = "trainer.total_training_steps"
        steps = self.keys.get(path, None)
        return {} if steps is None else {"steps": self.keys.number(path, steps, whole=True)}

    def _max_grad_norm(self) -> float:
        found = self.actor("optim.clip_grad", 1.0)
        if (given := self.actor("optim.grad_clip", None)) is not None:  # deprecated
            found = self.keys.number(f"{ACTOR}.optim.grad_clip", given)
        unread = self.actor("grad_clip", found, nullable=True)
        if unread not in (None, found):
            self.notes.append(
                f"actor.grad_clip = {unread} has no effect in verl, whose engines read"
                f" actor.optim.clip_grad: {found}"
            )
        return found

    def _filter(self, learner: dict[str, Any]) -> None:
        """Dynamic sampling, as DAPO's trainer in verl has it."""
        path = "algorithm.filter_groups"
        most = self.keys.get(f"{path}.max_num_gen_batches", 0)
        self.keys.get(f"{path}.metric", None)
        if self.keys.get(f"{path}.enable", False):
            learner["refills"] = most - 1 if most > 0 else 1000
            learner["objective"]["drop_uninformative"] = True
            self.differs.append(
                "the prompts that replace groups of equal rewards come from a second order of the"
                " training set, in verl they are the next ones"
            )
