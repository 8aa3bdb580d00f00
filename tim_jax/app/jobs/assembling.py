"""A run's job, assembled from its configuration: for training and for evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import checks
from tim_jax.app.run import assembly, grading, sources
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Execution
from tim_jax.rl import drawing, episodes, evaluation, programs
from tim_jax.rl.drawing import Sample, Text
from tim_jax.tasks.base import Task
from tim_jax.tasks.episodes import Environment

_EVAL_KEY = 0
SHOWN = 4  # completions that are shown before and after


@dataclass(frozen=True)
class Job:
    """Everything a training job was assembled from."""

    config: RunConfig
    model: Model
    task: Task
    text: Text
    execution: Execution
    programs: programs.Programs
    evaluate: Any  # (weights) -> (metrics, samples), or None
    environment: Environment | None = None  # of episodes of several turns


def assemble(config: RunConfig, *, measured: Path | None = None, training: bool = True) -> Job:
    """Assembles a run, or with `training` off what its evaluation needs of it.

    `measured` is the file for measurements of this machine, if there is one.
    """
    folder = Path(config.run.folder).absolute()  # code of a task may change the current one
    model = sources.begin_model(config)
    task = drawing.shared(grading.make_task(config))
    try:
        text = grading.make_text(config, model, run=folder).declaring(task.environment)
        checks.check_prompts(task, text, training=training)
        if training and config.warmup.steps:
            checks.check_warm_start(config, task, text)
        return _assembled(config, model, task, text, measured)
    except BaseException:
        task.close()
        raise


def _assembled(
    config: RunConfig, model: Model, task: Task, text: Text, measured: Path | None
) -> Job:
    execution = assembly.make_execution(config, model, measured=measured)
    model = sources.with_params(model, config)
    wanted = config.eval.every and len(task.evaluation)
    environment = _environment(config, execution, task, text)
    evaluate = evaluator(config, execution, task, text, environment) if wanted else None
    built = programs.build(assembly.make_training(config, execution))
    return Job(config, model, task, text, execution, built, evaluate, environment)


def _environment(
    config: RunConfig, execution: Execution, task: Task, text: Text
) -> Environment | None:
    """The task's environment in tokens, if episodes have several turns."""
    if task.environment is None and config.sampling.max_turns is None:
        return None
    if task.environment is None:
        raise InputError(
            f"sampling.max_turns = {config.sampling.max_turns}: the task {task.name} has no"
            " environment; name one in task.environment, or leave max_turns out"
        )
    if config.sampling.max_turns is None:
        raise InputError(
            f"the task {task.name} has episodes of several turns; set sampling.max_turns"
        )
    history = config.task.history
    return text.bridged(task.environment, execution.sampling.stop_tokens, history)


def evaluator(
    config: RunConfig,
    execution: Execution,
    task: Task,
    text: Text,
    environment: Environment | None,
) -> Callable[[Any], tuple[dict[str, float], list[Sample]]]:
    """(weights) -> metrics and samples of the held-out problems, as `config.eval` asks for."""
    section = config.eval
    batch, batching = assembly.batch_evaluation(config, execution.placement)
    sampling = replace(execution.sampling, temperature=section.temperature, top_k=0, top_p=1.0)
    own = replace(execution, sampling=sampling)
    how: Any = {"samples": section.samples, "batching": batching}
    if (turns := config.turns) is not None:
        sample = episodes.build(own, turns=turns, **how)
    else:
        sample = programs.sampling_program(own, **how)

    def run(weights) -> tuple[dict[str, float], list[Sample]]:
        return evaluation.evaluate(
            weights,
            task,
            text,
            sample=sample,
            environment=environment,
            key=drawing.step_key(config.seed, _EVAL_KEY),
            prompts=section.prompts,
            samples=section.samples,
            batch=batch,
            ks=section.k,
            solved=section.solved,
        )

    return run
