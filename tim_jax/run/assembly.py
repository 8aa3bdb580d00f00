"""From a run's configuration to the values that the loops take: model, task, policy, programs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import optax

from tim_jax import corrections, mismatch, optimizers, placement
from tim_jax.config.model import Architecture
from tim_jax.config.optimization import Optimizer
from tim_jax.config.run import RunConfig
from tim_jax.config.sections import (
    BuiltinTask,
    CustomTask,
    DatasetTask,
    FamilyChoice,
    GymTask,
    part,
)
from tim_jax.errors import InputError
from tim_jax.kernels import pallas
from tim_jax.mismatch import Mismatch
from tim_jax.model import calibration, fitting, hf, parameters
from tim_jax.model.config import ModelConfig, check_stop_tokens
from tim_jax.model.execution import Execution, Sampling, check_compiler_options
from tim_jax.model.lora import Lora
from tim_jax.model.parameters import init_params
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F32,
    TPU_EXACT_BF16,
    TPU_EXACT_F32,
    Family,
    Numerics,
)
from tim_jax.placement import Devices, Placement
from tim_jax.rl import programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.programs import Programs
from tim_jax.rl.types import Learning
from tim_jax.run.adapting import adapted, make_lora
from tim_jax.tasks import builtin, custom
from tim_jax.tasks.base import Grader, Task
from tim_jax.tasks.dataset import DatasetSource, dataset_task
from tim_jax.tasks.guard import Limits
from tim_jax.tasks.gym import gym_task
from tim_jax.tasks.isolated import IsolatedReward, isolated_task
from tim_jax.tasks.math import MathGrader
from tim_jax.tasks.text import character_tokenizer

_ACCELERATED = {
    "pallas_gpu": {"float32": GPU_EXACT_F32, "bfloat16": GPU_EXACT_BF16},
    "pallas_tpu": {"float32": TPU_EXACT_F32, "bfloat16": TPU_EXACT_BF16},
}
# Platform -> the exact kernels made for it.
_OF_PLATFORM: Mapping[str, Family] = MappingProxyType(
    {"cpu": "tiles", "gpu": "pallas_gpu", "tpu": "pallas_tpu"}
)
_LONG = 1024  # from this many positions on, larger key blocks cost less


@dataclass(frozen=True)
class Model:
    """A model as it stands in a folder or is initialised: what to compute, and from what."""

    config: ModelConfig
    params: Any  # master weights, on the host; None until they are read
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    lora: Lora | None = None  # if adapters are trained; they are among the parameters then


def load_model(source: str) -> Model:
    """A checkpoint folder or hub name."""
    model = open_model(source)
    return replace(model, params=hf.load_params(source, model.config))


def open_model(source: str) -> Model:
    """The same without its weights, for all that can be said before they are read.

    Raises:
      InputError: as the functions of `model.hf`, or nothing would ever end a response.
    """
    folder = hf.resolve(source)
    config = hf.load_config(folder)
    tokenizer = hf.load_tokenizer(folder, config)
    generation = hf.load_generation_config(folder).get("eos_token_id")
    found = generation if isinstance(generation, list) else [generation]
    stops = {tokenizer.eos_token_id, *config.eos_token_ids, *found} - {None}
    try:
        check_stop_tokens(sorted(stops), config.vocab_size)
    except InputError as error:
        raise InputError(f"{folder / 'generation_config.json'}: {error}") from None
    if not stops:
        raise InputError(
            f"model {source!r}: no token ends a response: its tokenizer has no eos token, and"
            " config.json and generation_config.json have no eos_token_id"
        )
    return Model(config, None, tokenizer, tuple(sorted(stops)))


def random_model(architecture: Architecture, *, seed: int) -> Model:
    """A Qwen3 with random weights and the built-in tasks' character tokenizer."""
    model = _unmade_model(architecture)
    return replace(model, params=init_params(model.config, seed))


def _unmade_model(architecture: Architecture) -> Model:
    tokenizer: Any = character_tokenizer(builtin.ALPHABET)
    return Model(random_config(architecture), None, tokenizer, (tokenizer.eos_token_id,))


def random_config(architecture: Architecture) -> ModelConfig:
    """What `random_model` computes."""
    tokenizer: Any = character_tokenizer(builtin.ALPHABET)
    return ModelConfig(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        **architecture.model_dump(exclude={"tied"}),
        tied_embeddings=architecture.tied,
        qk_norm=True,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(config: RunConfig) -> Model:
    """Returns the model of a config: initialised at random, or read from a folder or the hub."""
    return with_params(begin_model(config), config)


def begin_model(config: RunConfig) -> Model:
    """The same without its weights."""
    architecture = config.model.random_architecture
    if architecture is not None:
        model = _unmade_model(architecture)
    else:
        assert config.model.path is not None  # the section has exactly one source
        model = open_model(config.model.path)
    return replace(model, lora=make_lora(config.lora, model.config))


def with_params(model: Model, config: RunConfig) -> Model:
    """The model that was begun, with its weights drawn or read."""
    path = config.model.path
    if path is None:
        params = init_params(model.config, config.seed)
    else:
        params = hf.load_params(path, model.config)
    params = adapted(params, config.lora, model.lora, model.config, config.seed)
    return replace(model, params=params)


def make_task(config: RunConfig) -> Task:
    """Returns the task of a config, with the user's own reward if it names one."""
    section = config.task
    if section.kind == "builtin":
        task = builtin.builtin_task(section.name, {"seed": config.seed, **section.parameters})
    elif section.kind == "gym":
        task = gym_task(
            section.name,
            section.parameters,
            seed=section.seed,
            train_size=section.train_size,
            eval_size=section.eval_size,
            limits=Limits(seconds=section.time_limit),
        )
    elif section.kind == "dataset":
        limits = Limits(seconds=section.time_limit)
        grade = _reward(section) or MathGrader(limits)
        return dataset_task(part(DatasetSource, section), grade)
    else:
        task = _custom_task(section)
    grade = _reward(section)
    return replace(task, grade=grade) if grade else task


def _custom_task(section: CustomTask) -> Task:
    if section.reward_in_process:
        return custom.make_task(section.factory, section.parameters)
    return isolated_task(section.factory, section.parameters, seconds=section.reward_time_limit)


def _reward(section: BuiltinTask | GymTask | DatasetTask | CustomTask) -> Grader | None:
    if section.reward is None:
        return None
    if section.reward_in_process:
        return custom.load_reward(section.reward)
    return IsolatedReward(section.reward, seconds=section.reward_time_limit)


def make_text(config: RunConfig, model: Model) -> Text:
    """Returns how prompts become tokens: tokenizer, chat template and longest prompt."""
    template = {"on": True, "off": False, "auto": "auto"}[config.model.chat_template]
    return Text(
        tokenizer=model.tokenizer,
        max_prompt_length=config.sampling.max_prompt_length,
        chat_template=template,
        template_options=tuple(config.model.template_options.items()),
    )


def family_here(family: FamilyChoice) -> Family:
    """The family that "auto" stands for on the devices that programs are traced for.

    Raises:
      InputError: there are no exact kernels made for them.
    """
    if family != "auto":
        return family
    platform = pallas.platform()
    amd = platform == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower()
    if amd or platform not in _OF_PLATFORM:
        raise InputError(
            f'kernel family "auto": there are no kernels for {"AMD GPUs" if amd else platform};'
            ' set the family to "tiles" (numerics.family, or --family), which works everywhere'
        )
    return _OF_PLATFORM[platform]


def fixed_numerics(
    family: FamilyChoice, dtype: str, *, length: int, column_tiles: int = 1
) -> Numerics:
    """Numerics for sequences of up to `length` tokens that need no fact about the model.

    Raises:
      InputError: the family cannot have column tiles, or there is none for this platform.
    """
    family = family_here(family)
    if family in _ACCELERATED:
        return replace(_ACCELERATED[family][dtype], column_tiles=column_tiles)
    block, backend = 32 if length < _LONG else 128, jax.default_backend()
    return Numerics(
        family=family,
        compute_dtype=dtype,
        kv_block=block,
        column_tiles=column_tiles,
        cache_write="rows" if backend == "cpu" else "scatter",
        row_sums="sorted" if backend == "gpu" else "scatter",
    )


def fitted_numerics(
    family: FamilyChoice,
    dtype: str,
    model: ModelConfig,
    *,
    length: int,
    column_tiles: int = 1,
    interpret: bool = False,
) -> Numerics:
    """The same with tiles that fit the model. `interpret`: run Pallas kernels without their device.

    Raises:
      InputError: the family cannot run this model, or not on this device. Where "auto" chose it,
        the line says so: to fall back to slow kernels without a word would be worse.
    """
    chosen = family_here(family)
    try:
        fixed = fixed_numerics(chosen, dtype, length=length, column_tiles=column_tiles)
        fixed = fitting.fitted(model, replace(fixed, interpret=interpret))
        fitting.check(model, fixed)
    except InputError as error:
        if family != "auto" or chosen == "tiles":
            raise
        reason = str(error).partition(": ")[2] or str(error)
        raise InputError(
            f'kernel family "auto" is {chosen!r} on this {pallas.platform().upper()}: {reason};'
            ' set the family to "tiles" (numerics.family, or --family), which is slower'
        ) from error
    return fixed


def make_numerics(
    family: FamilyChoice,
    dtype: str,
    model: ModelConfig,
    *,
    length: int,
    batch: int | None,
    column_tiles: int = 1,
    measured: Path | None = None,
    shared: Mismatch = mismatch.EXACT,
) -> Numerics:
    """The same, and on a CPU with row ranges measured for decode batches of about `batch` rows;
    None: without. `measured` is the file that keeps these, if any. `shared` are differences of the
    dial that sampler and learner both have.

    Raises:
      InputError: as `fitted_numerics`.
    """
    fixed = fitted_numerics(family, dtype, model, length=length, column_tiles=column_tiles)
    fixed = shared.numerics(fixed)
    # Ranges are measured of whole contractions; those of parts of one are not known.
    cut = (fixed.order.split_k, fixed.order.ranks) != (1, 1)
    if batch is None or cut:
        return fixed
    return calibration.calibrate_once(model, fixed, batch=batch, file=measured)


def make_execution(
    config: RunConfig,
    model: Model,
    *,
    devices: Devices | None = None,
    measured: Path | None = None,
) -> Execution:
    """The one policy of sampler and learner.

    `devices`: those that are planned for; nothing is measured then. Left out: those at hand.
    `measured`: see `make_numerics`.
    """
    section = config.sampling
    length = section.max_prompt_length + section.max_response_length
    if length > model.config.max_positions:
        raise InputError(
            f"sampling.max_response_length: {section.max_response_length} after a prompt of"
            f" {section.max_prompt_length} is {length} tokens, more than the model's"
            f" {model.config.max_positions} positions"
        )
    beyond = [t for t in section.stop_tokens if t >= model.config.vocab_size]
    if beyond:
        raise InputError(
            f"sampling.stop_tokens: {beyond[0]} is outside the model's vocabulary of"
            f" {model.config.vocab_size}"
        )
    where = config.placement.value
    check_placement(where, model.config, config.column_tiles, devices)
    batch = max(1, config.sequences_per_step // where.shards)
    shared = config.sampler.dial if config.sampler.both_sides else mismatch.EXACT
    numerics = make_numerics(
        config.numerics.family,
        config.numerics.dtype,
        model.config,
        length=length,
        batch=batch if devices is None else None,
        column_tiles=config.column_tiles,
        measured=measured,
        shared=shared,
    )
    if devices is not None:  # none of them is the CPU at hand
        accelerated = numerics.cache_write == "blocks"
        numerics = numerics if accelerated else replace(numerics, cache_write="scatter")
    else:
        check_compiler_options(config.numerics.compiler_options)
    stops = tuple(sorted({*model.stop_tokens, *section.stop_tokens}))
    sampling = part(Sampling, section, stop_tokens=stops)
    numerics = numerics.with_options(config.numerics.compiler_options)
    execution = Execution(model.config, numerics, sampling, where, shared.edits, model.lora)
    before = Numerics(family=numerics.family, compute_dtype=config.numerics.dtype)
    mismatch.check(shared, replace(execution, numerics=before))
    return execution


def check_placement(
    where: Placement, model: ModelConfig, column_tiles: int, devices: Devices | None = None
) -> None:
    """Raises `InputError` if the model cannot lie so, or there are too few devices."""
    parameters.check(model, Numerics(column_tiles=column_tiles), where)
    placement.mesh(where, jax.devices() if devices is None else devices)


def make_optimizer(
    section: Optimizer, *, steps: int, max_response_length: int
) -> optax.GradientTransformationExtraArgs:
    """The chain of a run with so many updates and so long responses."""
    own = part(optimizers.AdamW, section, total_steps=section.total_steps or steps)
    return own.transform(section.length_decay.value(max_response_length))


def make_learning(config: RunConfig) -> Learning:
    """Returns how rollouts become gradients: objective, mode, corrections, micro-batches."""
    section = config.learner
    return Learning(
        objective=config.objective,
        group_size=config.sampling.samples_per_prompt,
        mode=section.mode,
        correction=corrections.build(section.corrections),
        micro_batch=section.micro_batch,
        widths=section.widths,
        remat=section.remat,
        routing=section.routing,
        noise_scale=section.noise_scale,
        max_skipped=section.max_skipped,
    )


def make_programs(config: RunConfig, execution: Execution) -> Programs:
    """Returns the compiled programs of a run, with its optimizer and its sampler's dial."""
    section = config.learner
    return programs.build(
        execution,
        make_learning(config),
        make_optimizer(
            config.optimizer,
            steps=config.updates,
            max_response_length=config.sampling.max_response_length,
        ),
        mini_batches=section.mini_batches,
        epochs=section.epochs,
        length_buckets=section.length_buckets,
        sampler_placement=config.placement.for_sampler,
        sampler_devices=config.placement.of_sampler(jax.devices()),
        batching=config.sampler.batching,
        mismatch=mismatch.EXACT if config.sampler.both_sides else config.sampler.dial,
        offload=section.offload,
        max_staleness=config.sampler.max_staleness,
    )
