"""The keys of a verl configuration: read from YAML, asked for by dotted path, and counted."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tim_jax.common import inputs
from tim_jax.common.errors import InputError, check_choice

ACTOR = "actor_rollout_ref.actor"
# Of the actor: they change speed, memory or what is reported, and no step.
_SYSTEM = """
strategy ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_infer_micro_batch_size_per_gpu
use_dynamic_bsz ppo_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu use_torch_compile
use_fused_kernels fsdp_config megatron veomni torchtitan engine checkpoint profiler load_weight
use_remove_padding ulysses_sequence_parallel_size entropy_from_logits_with_chunking pad_to_length
entropy_from_logits_chunk_size entropy_checkpointing calculate_entropy calculate_sum_pi_squared
sum_pi_squared_checkpointing use_prefix_grouper rollout_n data_loader_seed
"""
# Of the system's keys, those that change a step unless they are off.
_OF_A_STEP = re.compile(
    r"\.(router_replay\.mode|qat\.enable|override_transformer_config\.moe_\w+_coeff)"
)
_OFF = (False, 0, "disabled", None)
# Keys of which these values change nothing.
_NEUTRAL = {
    "algorithm.use_pf_ppo": (False,),
    "algorithm.filter_groups.max_inflight_gen_batches": (1,),
    f"{ACTOR}.shuffle": (False,),
    f"{ACTOR}.freeze_vision_tower": (False,),
    f"{ACTOR}.router_replay.mode": ("disabled",),
    f"{ACTOR}.qat.enable": (False,),
    f"{ACTOR}.optim.total_training_steps": (-1,),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": (0.0,),
    f"{ACTOR}.optim.lr_warmup_init": (0.0,),
    f"{ACTOR}.optim.lr_start": (0.0,),
    f"{ACTOR}.optim.lr_decay_ratio": (1.0,),
    f"{ACTOR}.optim.num_cycles": (0.5,),
    f"{ACTOR}.optim.zero_indexed_step": (True,),
    f"{ACTOR}.optim.name": ("AdamW",),
    f"{ACTOR}.optim.optimizer": ("AdamW", "adamw", "adam"),
    f"{ACTOR}.optim.optimizer_impl": ("torch.optim",),
    f"{ACTOR}.optim.weight_decay_incr_style": ("constant",),
    f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler": (False,),
    f"{ACTOR}.optim.use_precision_aware_optimizer": (False,),
    f"{ACTOR}.optim.main_grads_dtype": ("fp32",),
    f"{ACTOR}.optim.exp_avg_dtype": ("fp32",),
    f"{ACTOR}.optim.exp_avg_sq_dtype": ("fp32",),
    f"{ACTOR}.optim.lr_wsd_decay_style": ("exponential",),
    f"{ACTOR}.optim.use_layer_wise_distributed_optimizer": (False,),
}
# Keys that begin so have an effect only if another one is not neutral.
_DETAILS = {
    "algorithm.pf_ppo.": "algorithm.use_pf_ppo",
    f"{ACTOR}.qat.": f"{ACTOR}.qat.enable",
    f"{ACTOR}.optim.muon_": f"{ACTOR}.optim.optimizer",
}


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML would take the last without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"{key.value!r} stands there twice; leave one out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the nested dict of a YAML file.

    Raises:
      InputError: it cannot be read, is no YAML mapping, or has a key twice.
    """
    path = inputs.expanded(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>",', "at")
        raise InputError(f"{path}: not YAML: {reason}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: must be a mapping of sections, such as algorithm")
    return data


class Keys:
    """The keys of a verl configuration by dotted path. Remembers which were asked for."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        alone = data.get("rollout_correction")
        algorithm = data.get("algorithm") or {}
        if alone is not None and algorithm.get("rollout_correction") is not None:
            raise InputError(f"{source}: rollout_correction is given twice")
        self._sections = data
        self._source = source
        self._leaves = dict(inputs.leaves(data))
        if alone is not None:
            self._leaves = {
                f"algorithm.{k}" if k.startswith("rollout_correction.") else k: value
                for k, value in self._leaves.items()
            }
        self._asked: set[str] = set()

    def has(self, path: str) -> bool:
        """True if there is a section of this dotted path."""
        found = self._sections
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return isinstance(found, Mapping)

    def __contains__(self, path: str) -> bool:
        return path in self._leaves

    def get(self, path: str, default: Any, *, nullable: bool = False) -> Any:
        """The value of a key, of the kind of its default (None: of any), or the default."""
        self._asked.add(path)
        value = self._leaves.get(path, default)
        if isinstance(value, str) and "${" in value:
            raise self.wrong(path, value, "is an interpolation; resolve the configuration first")
        if value is None and default is not None and not nullable:
            raise self.wrong(path, value, "must not be null; leave the key out")
        if value is None or default is None:
            return value
        if isinstance(default, bool | str):
            if not isinstance(value, type(default)):
                kind = "true or false" if isinstance(default, bool) else "text"
                raise self.wrong(path, value, f"must be {kind}")
            return value
        return self.number(path, value, whole=isinstance(default, int))

    def number(self, path: str, value: Any, *, whole: bool = False) -> Any:
        """A number, which YAML 1.1 takes for text where it is written 1e-6."""
        try:
            found = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError):
            found = None
        if found is None or found != found or (whole and not found.is_integer()):
            raise self.wrong(path, value, f"must be a {'whole ' if whole else ''}number")
        return int(found) if whole else found

    def choice(self, path: str, default: str, known: Any) -> Any:
        """The value of a key that must be one of the known ones."""
        value = self.get(path, default)
        try:
            check_choice(path, value, tuple(known))
        except InputError as error:
            raise InputError(f"{self._source}: {error}") from error
        return value

    def wrong(self, path: str, value: Any, rule: str) -> InputError:
        """The error about a key."""
        return InputError(f"{self._source}: {path} = {value!r}: {rule}")

    def rest(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The keys of the sections that nobody asked for: those without effect, and the others."""
        idle, unknown = [], []
        for path, value in self._leaves.items():
            known = path.startswith(("algorithm.", f"{ACTOR}."))
            if not known or path in self._asked or path.endswith("._target_"):
                continue
            of_actor = path.removeprefix(f"{ACTOR}.").split(".")[0]
            neutral = value is None or value in _NEUTRAL.get(path, ()) or self._is_detail(path)
            system = path.startswith(ACTOR) and of_actor in _SYSTEM.split()
            system &= value in _OFF or not _OF_A_STEP.search(path)
            if neutral or system:
                idle.append(path)
            else:
                unknown.append(f"{path} = {value!r}")
        return tuple(idle), tuple(unknown)

    def _is_detail(self, path: str) -> bool:
        """True if another key would give this one an effect, and does not."""
        switches = [key for start, key in _DETAILS.items() if path.startswith(start)]
        return any(
            key not in self._leaves or self._leaves[key] in _NEUTRAL[key]
            for key in switches
            if key != path
        )

    def others(self) -> tuple[str, ...]:
        """The sections that are there beside those that are read."""
        own = {"algorithm", "rollout_correction", "actor_rollout_ref", "defaults", "hydra"}
        found = [name for name in self._sections if name not in own]
        inner = self._sections.get("actor_rollout_ref")
        inner = inner if isinstance(inner, Mapping) else {}
        return (*found, *(f"actor_rollout_ref.{name}" for name in inner if name != "actor"))


REJECTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


def rejections(keys: Keys, path: str) -> list[dict[str, Any]]:
    """The entries of `rollout_rs`, each option once, with its bounds."""
    given = keys.get(f"{path}.rollout_rs", None)
    threshold = keys.get(f"{path}.rollout_rs_threshold", None)
    if given is None:
        return []
    options = list(dict.fromkeys(part.strip() for part in str(given).split(",") if part.strip()))
    for option in options:
        if option not in REJECTIONS:
            rule = f"must be one of {', '.join(REJECTIONS)}"
            raise keys.wrong(f"{path}.rollout_rs", option, rule)
    path = f"{path}.rollout_rs_threshold"
    bounds = [part.strip() for part in str(threshold).split(",")]
    if threshold is None or len(bounds) not in (1, len(options)):
        raise keys.wrong(path, threshold, f"must be one bound for all, or {len(options)}")
    bounds *= len(options) // len(bounds)
    return [_rejection(keys, path, *each) for each in zip(options, bounds, strict=True)]


def _rejection(keys: Keys, path: str, option: str, text: str) -> dict[str, Any]:
    over, statistic = option.rsplit("_", 1)
    entry = {"name": "reject", "statistic": statistic, "over": over.removeprefix("seq_")}
    lower, upper = _bounds(keys, path, text)
    if upper <= 0 or (lower is not None and lower <= 0):
        raise keys.wrong(path, text, "must be above 0")
    if statistic != "k1":
        if lower is not None:
            raise keys.wrong(path, text, f"{option} has an upper bound alone")
        return entry | {"upper": upper}
    # verl's bounds are on 1 / r.
    return entry | {"lower": 1.0 / upper, "upper": upper if lower is None else 1.0 / lower}


def weights(keys: Keys, path: str) -> list[dict[str, Any]]:
    """The entries of `rollout_is`; none if it or its threshold is null, as in verl."""
    bound = f"{path}.rollout_is_threshold"
    threshold = keys.get(bound, None) if bound in keys else "2.0"
    divided = keys.get(f"{path}.rollout_is_batch_normalize", False)
    if keys.get(f"{path}.rollout_is", None) is None or threshold is None:
        return []
    level = keys.choice(f"{path}.rollout_is", "token", ("token", "sequence"))
    lower, upper = _bounds(keys, bound, threshold)
    entries: list[dict[str, Any]] = [{"name": f"{level}_tis", "cap": upper}]
    if lower is not None:  # IcePop
        entries = [{"name": "scale_by_ratio", "level": level}]
        entries += [{"name": "mask_outside", "level": level, "lower": lower, "upper": upper}]
    return [*entries, {"name": "normalise", "unit": level}] if divided else entries


def _bounds(keys: Keys, path: str, text: Any) -> tuple[float | None, float]:
    """Of "upper" or "lower_upper"."""
    lower, given, upper = str(text).rpartition("_")
    return keys.number(path, lower) if given else None, keys.number(path, upper)
