"""The job behind `tim-jax plan`: which workload of which model, on which slice or GPU."""

from dataclasses import replace
from pathlib import Path

from tim_jax.app.config.run import RunConfig
from tim_jax.app.run import assembly, sources
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded, json_value
from tim_jax.instruments.plan import planning, topology
from tim_jax.instruments.plan.known_models import PUBLISHED
from tim_jax.instruments.plan.planning import Layers, Plan, Say
from tim_jax.instruments.plan.topology import Generation
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import from_hf
from tim_jax.numerics import GPU_FAMILIES
from tim_jax.placement import Devices


def plan_run(
    config: RunConfig,
    slice_name: str,
    *,
    architecture: Path | None = None,
    layers: Layers = (4, 8),
    mean_tokens: int | None = None,
    searching: bool = True,
    say: Say = lambda text: None,
) -> Plan:
    """Plans a run's step on a TPU slice or GPUs, which need not be here; no weights are made.

    Args:
      slice_name: such as "v5e:4x4" or "h200:1".
      architecture: a config.json to take in place of the config's model.
      layers: see `planning.make`.
      mean_tokens: of the responses that are learnt from; None: all are the longest.

    Raises:
      InputError: the slice, the model or the placement is not possible, the compiler for it is
        missing, episodes have several turns, or `mean_tokens` cannot be a mean; before anything is
        compiled.
    """
    _check_mean(mean_tokens, config)
    if config.sampling.max_turns is not None:
        raise InputError(
            f"plan: sampling.max_turns = {config.sampling.max_turns}: the programs of several turns"
            " are not planned; a single turn of an episode's length has as large a cache and the"
            " same update: sampling.max_turns=none sampling.max_episode_tokens=none"
            f" task.environment=none sampling.max_tokens={config.sampling.longest}"
        )
    generation, _ = topology.check(slice_name)
    topology.check_devices(slice_name, config.placement.all_devices)
    _check_family(config.numerics.family, generation)
    model = model_config(config, architecture)
    target = topology.target(slice_name)
    with target.tracing():
        workload = workload_of(config, model, target.devices)
    workload = replace(workload, mean_tokens=mean_tokens)
    return planning.make(workload, target, layers=layers, searching=searching, say=say)


def _check_mean(mean: int | None, config: RunConfig) -> None:
    limit, tokens = config.sampling.max_tokens, config.learner.micro_batch_tokens
    if mean is None:
        return
    if tokens is None:
        raise InputError(
            f"--mean-tokens {mean} needs learner.micro_batch_tokens: rows are padded to the longest"
        )
    if not 1 <= mean <= limit:
        raise InputError(
            f"--mean-tokens {mean}: must be from 1 to sampling.max_tokens, which is {limit}"
        )


def _check_family(family: str, generation: Generation) -> None:
    here = GPU_FAMILIES if generation.platform == "cuda" else ("pallas_tpu",)
    if family.startswith("pallas") and family not in here:
        raise InputError(
            f'plan: numerics.family = "{family}" has no kernels for {generation.text};'
            f' there it can be "{here[0]}"'
        )


def parse_layers(text: str) -> Layers:
    """ "all", or two numbers of layers such as "4,8".

    Raises:
      InputError: anything else.
    """
    if text == "all":
        return None
    parts = text.split(",")
    if len(parts) == 2 and all(part.isdecimal() and len(part) < 10 for part in parts):
        low, high = (int(part) for part in parts)
        if 0 < low < high:
            return low, high
    raise InputError(f'--layers {text!r}: write "all", or two rising numbers such as 4,8')


def workload_of(config: RunConfig, model: ModelConfig, devices: Devices) -> Workload:
    """A step of a run on these devices; nothing is measured or made.

    Raises:
      InputError: as `assembly.make_execution`.
    """
    bare = Model(model, None, None, model.eos_token_ids, sources.make_lora(config.lora, model))
    execution = assembly.make_execution(config, bare, devices=devices)
    training = assembly.make_training(config, execution)
    return Workload(training, prompt_length=config.sampling.max_prompt_length)


def model_config(config: RunConfig, architecture: Path | None) -> ModelConfig:
    """The architecture alone: of a file, of the config's sizes, of a published model, or of the
    config.json of another one.

    Raises:
      InputError: there is none, or it is not supported.
    """
    if architecture is not None:
        return from_hf(_read(architecture), where=str(architecture))
    random = config.model.random_architecture
    if random is not None:
        return sources.random_config(random)
    path = config.model.path
    assert path is not None  # the section has exactly one source
    if expanded(path).exists():
        return hf.load_config(path)
    if path in PUBLISHED:
        return from_hf(PUBLISHED[path], where=path)
    try:
        return hf.load_config(path, config_only=True)
    except InputError as error:
        names = ", ".join(PUBLISHED)
        raise InputError(f"{error}; known without the hub are {names}") from error


def _read(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--architecture {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--architecture {path}: not UTF-8 text (byte {error.start})") from error
    values = json_value(text, f"--architecture {path}", checked=True)
    if not isinstance(values, dict):
        raise InputError(f"--architecture {path}: must be an object, as in a config.json")
    return values
