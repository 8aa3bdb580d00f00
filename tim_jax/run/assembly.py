"""From a run's configuration to the values that the loops take: model, task, policy, programs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import optax

from tim_jax import audit, corrections, optimizers, placement
from tim_jax.config.model import Architecture
from tim_jax.config.optimization import Optimizer
from tim_jax.config.run import RunConfig
from tim_jax.config.sections import CustomTask
from tim_jax.errors import InputError, did_you_mean
from tim_jax.model import calibration, fitting, hf, parameters
from tim_jax.model.config import ModelConfig
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
from tim_jax.policy.distribution import Sampling
from tim_jax.rl import programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.learning import Learning, Policy
from tim_jax.rl.programs import Programs
from tim_jax.tasks import builtin, custom
from tim_jax.tasks.base import Task
from tim_jax.tasks.dataset import DatasetSource, dataset_task
from tim_jax.tasks.guard import Limits
from tim_jax.tasks.gym import gym_task
from tim_jax.tasks.math import MathGrader
from tim_jax.tasks.text import character_tokenizer

_ACCELERATED = {
    "pallas_gpu": {"float32": GPU_EXACT_F32, "bfloat16": GPU_EXACT_BF16},
    "pallas_tpu": {"float32": TPU_EXACT_F32, "bfloat16": TPU_EXACT_BF16},
}
_LONG = 1024  # from this many positions on, larger key blocks cost less


@dataclass(frozen=True)
class Model:
    """A model as it stands in a folder or is initialised: what to compute, and from what."""

    config: ModelConfig
    params: Any  # float32 master weights, on the host
    tokenizer: Any
    stop_tokens: tuple[int, ...]


def load_model(source: str) -> Model:
    """A checkpoint folder or hub name."""
    folder = hf.resolve(source)
    config = hf.load_config(folder)
    tokenizer = hf.load_tokenizer(folder, config)
    generation = hf.load_generation_config(folder).get("eos_token_id")
    found = generation if isinstance(generation, list) else [generation]
    stops = {tokenizer.eos_token_id, *config.eos_token_ids, *found} - {None}
    return Model(config, hf.load_params(folder, config), tokenizer, tuple(sorted(stops)))


def audited(source: str) -> tuple[ModelConfig, Any]:
    """Config and parameters of what an audit names: a preset, a folder, a hub name or a run."""
    if source in audit.PRESETS:
        config = audit.PRESETS[source]
        return config, audit.random_params(config, 0)
    folder = Path(source) / "model"
    source = str(folder) if folder.is_dir() else source
    if not Path(source).exists() and "/" not in source:
        hint = did_you_mean(source, audit.PRESETS)
        raise InputError(f"audit: {source!r} is neither a folder nor a preset{hint}")
    config = hf.load_config(source)
    return config, hf.load_params(source, config)


def random_model(architecture: Architecture, *, seed: int) -> Model:
    """A Qwen3 with random weights and the built-in tasks' character tokenizer."""
    tokenizer: Any = character_tokenizer(builtin.ALPHABET)
    config = random_config(architecture)
    return Model(config, init_params(config, seed), tokenizer, (tokenizer.eos_token_id,))


def random_config(architecture: Architecture) -> ModelConfig:
    """What `random_model` computes."""
    tokenizer: Any = character_tokenizer(builtin.ALPHABET)
    return ModelConfig(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden_size,
        num_layers=architecture.num_layers,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        intermediate_size=architecture.intermediate_size,
        max_positions=architecture.max_positions,
        tied_embeddings=architecture.tied,
        qk_norm=True,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(config: RunConfig) -> Model:
    architecture = config.model.random_architecture
    if architecture is not None:
        return random_model(architecture, seed=config.seed)
    assert config.model.path is not None  # the section has exactly one source
    return load_model(config.model.path)


def make_task(config: RunConfig) -> Task:
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
        names = DatasetSource.__dataclass_fields__
        source = DatasetSource(**{k: v for k, v in section.model_dump().items() if k in names})
        limits = Limits(seconds=section.time_limit)
        grade = custom.load_reward(section.reward) if section.reward else MathGrader(limits)
        return dataset_task(source, grade)
    else:
        task = _custom_task(section)
    return replace(task, grade=custom.load_reward(section.reward)) if section.reward else task


def _custom_task(section: CustomTask) -> Task:
    make = custom.load_function(section.factory)
    try:
        task = make(**section.parameters)
    except InputError:
        raise
    except Exception as error:  # whatever a user's code raises
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"task.factory {section.factory} raised {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(task, Task):
        raise InputError(
            f"task.factory {section.factory} must return a tim_jax.tasks.base.Task, got"
            f" {type(task).__name__}"
        )
    return task


def make_text(config: RunConfig, model: Model) -> Text:
    template = {"on": True, "off": False, "auto": "auto"}[config.model.chat_template]
    return Text(
        tokenizer=model.tokenizer,
        max_prompt_length=config.sampling.max_prompt_length,
        chat_template=template,
        template_options=tuple(config.model.template_options.items()),
    )


def fixed_numerics(family: Family, dtype: str, *, length: int, column_tiles: int = 1) -> Numerics:
    """Numerics for sequences of up to `length` tokens that need no fact about the backend."""
    if family in _ACCELERATED:
        return _ACCELERATED[family][dtype]
    block = 32 if length < _LONG else 128
    return Numerics(
        family=family,
        compute_dtype=dtype,
        kv_block=block,
        column_tiles=column_tiles,
        cache_write="rows" if jax.default_backend() == "cpu" else "scatter",
    )


def make_numerics(
    family: Family,
    dtype: str,
    model: ModelConfig,
    *,
    length: int,
    batch: int | None,
    column_tiles: int = 1,
    measured: Path | None = None,
) -> Numerics:
    """The same with tiles that fit the model, and on a CPU with row ranges measured for decode
    batches of about `batch` rows; None: without. `measured` is the file that keeps these, if any.

    Raises:
      InputError: the family cannot run this model, or not on this device.
    """
    fixed = fixed_numerics(family, dtype, length=length, column_tiles=column_tiles)
    fixed = fitting.fitted(model, fixed)
    fitting.check(model, fixed)
    if batch is None:
        return fixed
    return calibration.calibrate_once(model, fixed, batch=batch, file=measured)


def make_policy(
    config: RunConfig,
    model: Model,
    *,
    devices: Devices | None = None,
    measured: Path | None = None,
) -> Policy:
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
    numerics = make_numerics(
        config.numerics.family,
        config.numerics.dtype,
        model.config,
        length=length,
        batch=batch if devices is None else None,
        column_tiles=config.column_tiles,
        measured=measured,
    )
    if devices is not None:  # none of them is the CPU at hand
        numerics = replace(numerics, cache_write="scatter")
    options = tuple(sorted(config.numerics.compiler_options.items()))
    return Policy(
        config=model.config,
        numerics=replace(numerics, compiler_options=options),
        placement=where,
        sampling=Sampling(
            max_response_length=section.max_response_length,
            temperature=section.temperature,
            top_k=section.top_k,
            top_p=section.top_p,
            stop_tokens=tuple(sorted({*model.stop_tokens, *section.stop_tokens})),
        ),
    )


def generating_policy(
    model: Model, sampling: Sampling, where: Placement, dtype: str, *, length: int, rows: int
) -> Policy:
    """The policy that samples `rows` sequences of up to `length` tokens outside of a run."""
    check_placement(where, model.config, where.tensor)
    numerics = make_numerics(
        "tiles",
        dtype,
        model.config,
        length=length,
        batch=max(1, rows // where.shards),
        column_tiles=where.tensor,
    )
    stops = tuple(sorted({*model.stop_tokens, *sampling.stop_tokens}))
    return Policy(model.config, numerics, replace(sampling, stop_tokens=stops), where)


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
    kind, decay = section.length_decay, None
    if kind.kind == "fixed":
        decay = optimizers.Decay(period=kind.period, floor=kind.floor)
    elif kind.kind == "reactive":
        detector = kind.detector(max_response_length)
        decay = optimizers.Decay(multiple=kind.multiplier, floor=kind.floor, detector=detector)
    rate = optimizers.Rate(
        peak=section.learning_rate,
        warmup_steps=section.warmup_steps,
        schedule=section.schedule,
        total_steps=section.total_steps or steps,
        final_share=section.final_share,
    )
    return optimizers.adamw(
        rate,
        b1=section.b1,
        b2=section.b2,
        eps=section.eps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        decay=decay,
        ess_reference=section.ess_reference,
    )


def make_learning(config: RunConfig) -> Learning:
    section = config.learner
    return Learning(
        objective=config.objective,
        group_size=config.sampling.samples_per_prompt,
        mode=section.mode,
        correction=corrections.build(section.corrections),
        micro_batch=section.micro_batch,
        remat=section.remat,
        noise_scale=section.noise_scale,
        max_skipped=section.max_skipped,
    )


def make_programs(config: RunConfig, policy: Policy) -> Programs:
    section = config.learner
    return programs.build(
        policy,
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
        sampler_micro_batch=config.sampler.micro_batch,
        mismatch=config.sampler.dial,
    )
