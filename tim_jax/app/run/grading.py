"""The task of a run, its grader, and how its prompts become tokens."""

from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import (
    BuiltinTask,
    CustomTask,
    DatasetTask,
    GymTask,
    part,
)
from tim_jax.app.run import folders
from tim_jax.app.run.sources import Model
from tim_jax.placement import processes
from tim_jax.rl.drawing import Text
from tim_jax.tasks import builtin, custom
from tim_jax.tasks.base import Grader, Task, in_turns
from tim_jax.tasks.dataset import DatasetSource, dataset_task, state_text
from tim_jax.tasks.environments import Guarded
from tim_jax.tasks.guard import Limits
from tim_jax.tasks.libraries import MathGrader, gym_task


def make_task(config: RunConfig) -> Task:
    """Returns the task of a config, with the user's own environment or reward if it names one."""
    section = config.task
    if section.environment is None:
        return _graded(config, section)
    environment = Guarded(
        section.environment,
        seconds=section.environment_time_limit,
        workers=section.environment_workers,
        memory=section.environment_memory,
    )
    try:
        return replace(_graded(config, section), environment=environment)
    except BaseException:
        environment.close()
        raise


def _graded(config: RunConfig, section: BuiltinTask | GymTask | DatasetTask | CustomTask) -> Task:
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
        source = part(DatasetSource, section)
        if section.environment is not None:
            return dataset_task(source, in_turns, state_text)
        return dataset_task(source, _reward(section) or MathGrader(limits))
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
    began = processes.led(partial(folders.read_start, folder))
    template = {"on": True, "off": False, "auto": "auto"}[config.model.chat_template]
    return Text(
        tokenizer=model.tokenizer,
        max_prompt_length=config.sampling.max_prompt_length,
        chat_template=template,
        template_options=tuple(config.model.template_options.items()),
        now=datetime.now() if began is None else datetime.fromisoformat(began),
    )
