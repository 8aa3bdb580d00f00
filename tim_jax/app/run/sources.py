"""The model of a run, read or initialised and written at its end; its task, grader and prompts."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tim_jax.app.config.run import Architecture, LoraSection, RunConfig
from tim_jax.app.run import folders
from tim_jax.common.errors import InputError, writing
from tim_jax.common.inputs import expanded
from tim_jax.model import adapters, hf
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig, check_stop_tokens
from tim_jax.model.files import load_tokenizer, read_json, write_json
from tim_jax.model.parameters import init_params
from tim_jax.rl.drawing import Text
from tim_jax.tasks import builtin, custom
from tim_jax.tasks.base import Grader, Task, in_turns
from tim_jax.tasks.dataset import MathGrader, dataset_task, gym_task, state_text
from tim_jax.tasks.text import character_tokenizer


@dataclass(frozen=True)
class Model:
    """A model as it stands in a folder or is initialised: what to compute, and from what."""

    config: ModelConfig
    params: Any  # master weights, on the host; None until they are read
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    lora: Lora | None = None  # if adapters are trained; they are among the parameters then
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json as read


def open_model(source: str) -> Model:
    """A checkpoint folder or hub name, without its weights: what can be said before they are read.

    Raises:
      InputError: as the functions of `model.hf`, or nothing would ever end a response.
    """
    folder = hf.resolve(source)
    config = hf.load_config(folder)
    tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size)
    generation = hf.load_generation_config(folder)
    ends = generation.get("eos_token_id")
    found = ends if isinstance(ends, list) else [ends]
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
    return Model(config, None, tokenizer, tuple(sorted(stops)), generation=generation)


def random_model(architecture: Architecture, *, seed: int | None) -> Model:
    """A Qwen3 with random weights, without a seed before it has any, and a character tokenizer."""
    config = random_config(architecture)
    params = None if seed is None else init_params(config, seed)
    return Model(config, params, character_tokenizer(builtin.ALPHABET), config.eos_token_ids)


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
        model = random_model(architecture, seed=None)
    else:
        assert config.model.path is not None  # the section has exactly one source
        model = open_model(config.model.path)
    return replace(model, lora=make_lora(config.lora, model.config))


def with_params(model: Model, config: RunConfig) -> Model:
    """The model that was begun, with its weights drawn or read, and its adapters if it has some.

    Raises:
      InputError: the adapters to start from do not fit the model.
    """
    path = config.model.path
    if path is None:
        params = init_params(model.config, config.seed)
    else:
        params = hf.load_params(path, model.config, dtype=config.numerics.dtype)
    if config.lora is not None and model.lora is not None:
        if config.lora.path is None:
            trained = adapters.init(model.config, model.lora, config.seed)
        else:
            trained = adapters.load(config.lora.path, model.config).arrays
        params = adapters.whole(trained, adapters.narrowed(params))
    return replace(model, params=params)


def make_lora(section: LoraSection | None, model: ModelConfig) -> Lora | None:
    """The adapters that a section asks for, if there is one.

    Raises:
      InputError: the model has no such matrix, or there is no adapter to start from.
    """
    if section is None:
        return None
    lora = section.value if section.path is None else adapters.load_config(section.path)
    adapters.targets(model, lora)
    return lora


def make_task(config: RunConfig) -> Task:
    """Returns the task of a config, with the user's own environment or reward if it names one."""
    environment = config.task.open_environment()
    if environment is None:
        return _make_graded(config)
    try:
        return replace(_make_graded(config), environment=environment)
    except BaseException:
        environment.close()
        raise


def _make_graded(config: RunConfig) -> Task:
    section = config.task
    if section.kind == "dataset":
        if section.environment is not None:
            return dataset_task(section.rows, in_turns, state_text)
        return dataset_task(section.rows, _load_reward(config) or MathGrader(section.limits))
    if section.kind == "builtin":
        task = builtin.builtin_task(section.name, {"seed": config.seed, **section.parameters})
    elif section.kind == "gym":
        task = gym_task(
            section.name,
            section.parameters,
            seed=section.seed,
            train_size=section.train_size,
            eval_size=section.eval_size,
            limits=section.limits,
        )
    elif section.reward_in_process:
        task = custom.make_task(section.factory, section.parameters)
    else:
        limit = section.reward_time_limit
        task = custom.isolated_task(section.factory, section.parameters, seconds=limit)
    grade = _load_reward(config)
    return replace(task, grade=grade) if grade else task


def worked_solutions(
    config: RunConfig, task: Task, *, start: int, count: int
) -> list[tuple[str, str]]:
    """Prompts with completions that the warm start of a run learns from, from number `start` on."""
    return builtin.supervised(
        task, config.warmup.quality, seed=config.seed, start=start, count=count
    )


def _load_reward(config: RunConfig) -> Grader | None:
    section = config.task
    if section.reward is None:
        return None
    if section.reward_in_process:
        return custom.load_reward(section.reward)
    return custom.IsolatedReward(section.reward, seconds=section.reward_time_limit)


def make_text(config: RunConfig, model: Model, *, run: Path) -> Text:
    """Returns how prompts become tokens: tokenizer, chat template, its clock and longest prompt.

    `run`: the folder that says when the run began.
    """
    template = {"on": True, "off": False, "auto": "auto"}[config.model.chat_template]
    return Text(
        tokenizer=model.tokenizer,
        max_prompt_length=config.sampling.max_prompt_length,
        chat_template=template,
        template_options=tuple(config.model.template_options.items()),
        now=folders.start_time(run),
    )


def write(
    folder: str | Path, model: Model, stops: Iterable[int], *, dtype: str = "float32"
) -> None:
    """Writes a model, whose weights are on the host, and these tokens as those that end a response.

    Raises:
      InputError: it cannot be written.
    """
    tokenizer = model.tokenizer
    made = hf.generation_config(model.config, tokenizer, stops, model.generation)
    hf.save(folder, model.params, model.config, tokenizer=tokenizer, generation=made, dtype=dtype)


_FOLDER, _STEP = "model", "training_step.json"  # the second beside the model's own files


def write_final(run: Path, model: Model, stops: Iterable[int], *, step: int) -> Path:
    """Writes the final model, and then removes that of an earlier end of the run.

    Args:
      model: its weights are on the host.
      stops: tokens that end a response.
      step: that the weights are of.

    Raises:
      InputError: it cannot be written.
    """
    final, new, old = run / _FOLDER, run / ".model.new", run / ".model.old"
    for left in (new, old, *run.glob(f".{new.name}.*")):  # the last: of a save that was killed
        shutil.rmtree(left, ignore_errors=True)
    write(new, model, stops)
    with writing(final):
        write_json(new / _STEP, {"step": step})
        if final.exists():
            final.rename(old)
        new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final


def final_step(run: str | os.PathLike[str]) -> int | None:
    """The step that the final model is of; None if there is none, or it does not say."""
    try:
        step = read_json(Path(run, _FOLDER, _STEP)).get("step")
    except InputError:
        return None
    return step if isinstance(step, int) else None


def final_model(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a run's final model, if `source` is a run; else, as of a model, `source`.

    Raises:
      InputError: the run has none yet, or went on since, so that a checkpoint is newer.
    """
    run = expanded(source)
    if (run / "config.json").is_file():
        return source
    model, steps = run / _FOLDER, folders.list_steps(run)
    if not model.is_dir():
        if (run / "config.toml").is_file() and (run / "checkpoints").is_dir():
            raise InputError(
                f"the run {str(source)!r} has no final model yet; `tim-jax export` writes that of"
                " a checkpoint"
            )
        return source
    step = final_step(run)
    if _is_left_behind(run, step, steps):
        of = "an earlier end" if step is None else f"step {step}"
        raise InputError(
            f"the run {str(source)!r} went on to step {steps[-1]}, its final model is of {of};"
            f" `tim-jax export` writes that of a checkpoint, and {str(model)!r} names the old one"
        )
    return model


def _is_left_behind(run: Path, step: int | None, steps: Sequence[int]) -> bool:
    """Whether a run has a checkpoint that is newer than its final model."""
    if step is not None:
        return step < max(steps, default=step)
    # Runs of before models said their step: their model is that of the end, once they are there.
    return bool(steps) and (run / "config.toml").is_file() and not folders.finished(run)
