"""From a run's configuration to the values that the loops take: model, task, policy, programs."""

from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from tim_jax import corrections, mismatch, optimizers, placement
from tim_jax.app.config.model import Architecture
from tim_jax.app.config.optimization import Optimizer
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import (
    BuiltinTask,
    CustomTask,
    DatasetTask,
    GymTask,
    Section,
    part,
)
from tim_jax.app.run import started
from tim_jax.app.run.adapting import adapted, make_lora
from tim_jax.app.run.numerics import make_numerics
from tim_jax.common.errors import InputError
from tim_jax.model import hf, parameters
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig, check_stop_tokens
from tim_jax.model.execution import Execution, Sampling, check_compiler_options
from tim_jax.model.files import load_tokenizer
from tim_jax.model.parameters import init_params
from tim_jax.numerics import (
    Numerics,
)
from tim_jax.placement import Devices, Placement, processes
from tim_jax.rl.drawing import Text
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning
from tim_jax.tasks import builtin, custom
from tim_jax.tasks.base import Grader, Task
from tim_jax.tasks.dataset import DatasetSource, dataset_task
from tim_jax.tasks.guard import Limits
from tim_jax.tasks.libraries import MathGrader, gym_task
from tim_jax.tasks.text import character_tokenizer


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
    tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size)
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
        params = hf.load_params(path, model.config, dtype=config.numerics.dtype)
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
    return custom.isolated_task(
        section.factory, section.parameters, seconds=section.reward_time_limit
    )


def _reward(section: BuiltinTask | GymTask | DatasetTask | CustomTask) -> Grader | None:
    if section.reward is None:
        return None
    if section.reward_in_process:
        return custom.load_reward(section.reward)
    return custom.IsolatedReward(section.reward, seconds=section.reward_time_limit)


def make_text(config: RunConfig, model: Model, *, run: Path | None = None) -> Text:
    """Returns how prompts become tokens: tokenizer, chat template, its clock and longest prompt.

    `run`: the folder that says when the run began; None: that of the config.
    """
    folder = Path(config.run.folder) if run is None else run
    began = processes.led(partial(started.time_of, folder))
    template = {"on": True, "off": False, "auto": "auto"}[config.model.chat_template]
    return Text(
        tokenizer=model.tokenizer,
        max_prompt_length=config.sampling.max_prompt_length,
        chat_template=template,
        template_options=tuple(config.model.template_options.items()),
        now=datetime.now() if began is None else datetime.fromisoformat(began),
    )


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
    shared = config.sampler.shared_dial
    numerics = make_numerics(
        config.numerics.family,
        config.numerics.dtype,
        model.config,
        length=length,
        batch=batch if devices is None else None,
        column_tiles=config.column_tiles,
        measured=measured,
        shared=shared,
        several_tiles=config.numerics.several_tiles,
    )
    if devices is None:
        check_compiler_options(config.numerics.compiler_options)
    sampling = part(Sampling, section, stop_tokens=stop_tokens(config, model))
    numerics = numerics.with_options(config.numerics.compiler_options)
    execution = Execution(model.config, numerics, sampling, where, shared.edits, model.lora)
    before = Numerics(family=numerics.family, compute_dtype=config.numerics.dtype)
    mismatch.check(shared, replace(execution, numerics=before))
    return execution


def stop_tokens(config: RunConfig, model: Model) -> tuple[int, ...]:
    """The tokens that end a response of a run: those of its model and those of its config."""
    return tuple(sorted({*model.stop_tokens, *config.sampling.stop_tokens}))


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
    chain = own.transform(section.length_decay.value(max_response_length))
    return chain if section.loss_scale is None else section.loss_scale.transform(chain)


def make_learning(config: RunConfig) -> Learning:
    """Returns how rollouts become gradients: objective, mode, corrections, micro-batches."""
    own = _shared(config.learner, Learning) | {
        "objective": config.objective,
        "group_size": config.sampling.samples_per_prompt,
        "correction": corrections.build(config.learner.corrections),
    }
    return Learning(**own)


def _shared(section: Section, kind: type) -> dict[str, Any]:
    """The keys of a section that are fields of the dataclass `kind` by the same name."""
    names = [field.name for field in fields(kind) if field.name in type(section).model_fields]
    return {name: getattr(section, name) for name in names}


def make_training(config: RunConfig, execution: Execution) -> Training:
    """Returns the run of a config, as one value, by the policy of `make_execution`."""
    section, where = config.learner, config.placement
    placement = None if where.for_sampler == execution.placement else where.for_sampler
    return Training(
        execution=execution,
        learning=make_learning(config),
        optimizer=make_optimizer(
            config.optimizer,
            steps=config.updates,
            max_response_length=config.sampling.max_response_length,
        ),
        **_shared(section, Training),
        sampler=Sampler(
            placement=placement,
            own_devices=where.split,
            batching=config.sampler.batching,
            mismatch=config.sampler.own_dial,
            max_staleness=config.sampler.max_staleness,
        ),
        exact=config.exact == "required",
    )
