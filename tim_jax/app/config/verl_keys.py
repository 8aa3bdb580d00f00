"""The keys of a verl configuration: read from YAML, asked for by dotted path, and counted."""

from collections.abc import Iterator, Mapping
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
# Keys of which one value changes nothing.
_NEUTRAL = {
    "algorithm.use_pf_ppo": False,
    f"{ACTOR}.shuffle": False,
    f"{ACTOR}.freeze_vision_tower": False,
    f"{ACTOR}.router_replay.mode": "disabled",
    f"{ACTOR}.qat.enable": False,
    f"{ACTOR}.optim.total_training_steps": -1,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the nested dict of a YAML file.

    Raises:
      InputError: it cannot be read, or is no YAML mapping.
    """
    path = inputs.expanded(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
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
        self._leaves = dict(_leaves(data))
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

    def get(self, path: str, default: Any) -> Any:
        """The value of a key, of the kind of its default (None: of any), or the default."""
        self._asked.add(path)
        value = self._leaves.get(path, default)
        if isinstance(value, str) and "${" in value:
            raise self.wrong(path, value, "is an interpolation; resolve the configuration first")
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
            neutral = path in _NEUTRAL and _NEUTRAL[path] == value
            system = path.startswith(ACTOR) and of_actor in _SYSTEM.split()
            if neutral or system or value is None:
                idle.append(path)
            else:
                unknown.append(f"{path} = {value!r}")
        return tuple(idle), tuple(unknown)

    def others(self) -> tuple[str, ...]:
        """The sections that are there beside those that are read."""
        own = {"algorithm", "rollout_correction", "actor_rollout_ref", "defaults", "hydra"}
        found = [name for name in self._sections if name not in own]
        inner = self._sections.get("actor_rollout_ref")
        inner = inner if isinstance(inner, Mapping) else {}
        return (*found, *(f"actor_rollout_ref.{name}" for name in inner if name != "actor"))


def _leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from _leaves(value, here)
        else:
            yield here, value
