"""Held-out evaluation: samples of a task's evaluation prompts, graded; mean@k and pass@k."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tim_jax.drawing import Sample, Text, graded
from tim_jax.errors import InputError
from tim_jax.tasks import evaluate as scores
from tim_jax.tasks.base import Task
from tim_jax.types import Rollout


def evaluate(
    weights: Any,
    task: Task,
    text: Text,
    *,
    sample: Callable[..., Rollout],
    key: jax.Array,
    prompts: int,
    samples: int,
    batch: int,
    ks: Sequence[int],
) -> tuple[dict[str, float], list[Sample]]:
    """Evaluates the first `prompts` held-out problems with `samples` responses each.

    `sample` is a program for `batch` prompts at a time (programs.sampling_program); the last batch
    is filled up with prompts that are not counted.

    Returns:
      mean@n, pass@k, the number of prompts and the mean response length, and all samples.

    Raises:
      InputError: the task has no held-out problems, or as the training loop.
    """
    count = min(prompts, len(task.evaluation))
    if not count:
        raise InputError(f"task {task.name} has no held-out problems to evaluate on")
    rows: list[Sample] = []
    lengths: list[np.ndarray] = []
    for start in range(0, count, batch):
        indices = [min(i, count - 1) for i in range(start, start + batch)]
        examples = [task.evaluation[i] for i in indices]
        rollout = sample(weights, text.prompts(examples, indices), key)
        wanted = min(batch, count - start) * samples
        kept = jax.tree.map(lambda x, n=wanted: x[:n], jax.device_get(rollout))
        rows += graded(task, text, examples[: min(batch, count - start)], kept, samples)[0]
        lengths.append(kept.lengths)
    rewards = np.array([row.reward for row in rows]).reshape(count, samples)
    metrics = scores.evaluate(rewards, ks)
    metrics |= {"reward": float(rewards.mean()), "length": float(np.concatenate(lengths).mean())}
    return metrics, rows
