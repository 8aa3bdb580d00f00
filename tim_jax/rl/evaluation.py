"""Held-out evaluation: samples of a task's evaluation prompts, graded; mean@k and pass@k."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.rl import drawing, episodes
from tim_jax.rl.drawing import Sample, Text, graded
from tim_jax.tasks.base import Task
from tim_jax.tasks.episodes import Environment

SAMPLING = "sampling for the evaluation"  # as `drawing.SAMPLING`


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Returns the unbiased estimate of P(at least one of k samples is right), f64 like `correct`.

    With c right ones among n samples, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, eq. 1), computed as 1 - prod_{i = n - c + 1}^{n} (1 - k / i), which neither
    overflows nor cancels.

    Args:
      correct: integers [...], right samples per prompt, each in 0..samples.
      samples: n.
      k: 1..samples.

    Raises:
      InputError: if k or a count is out of range.
    """
    correct = np.asarray(correct)
    if not 1 <= k <= samples:
        raise InputError(f"pass@k: k must be in 1..{samples} (samples per prompt), got {k}")
    if correct.size and not (correct.min() >= 0 and correct.max() <= samples):
        raise InputError(
            f"pass@k: counts must be in 0..{samples}, got {correct.min()}..{correct.max()}"
        )
    i = np.arange(1, samples + 1)
    # A factor below 0 belongs to i < k, which is reached only if n - c < k: the product is 0 there.
    factors = np.maximum(1.0 - k / i, 0.0)
    taken = i > (samples - correct)[..., None]
    return 1.0 - np.prod(np.where(taken, factors, 1.0), axis=-1)


def standard_error(rewards: np.ndarray) -> float:
    """Returns the standard error of the mean reward over prompts, whose samples count as one each.

    For [P, n] rewards; 0 for a single prompt, of which nothing is known.
    """
    means = _checked(rewards).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0


def mean_and_pass(
    rewards: np.ndarray, ks: Sequence[int] | None = None, *, solved: float = 1.0
) -> dict[str, float]:
    """Returns mean@n, the mean over prompts of pass@k for every k, and how many were counted.

    Args:
      rewards: [P, n], n samples for each of P prompts.
      ks: the k of pass@k; by default the powers of 2 up to n, and n.
      solved: a sample counts as right from this reward on.

    Raises:
      InputError: if `rewards` is empty, not of rank 2 or not finite, or some k is out of range.
    """
    rewards = _checked(rewards)
    prompts, samples = rewards.shape
    if ks is None:
        ks = [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
    correct = np.sum(rewards >= solved, axis=1)
    passes = {f"pass@{k}": float(np.mean(pass_at_k(correct, samples, k))) for k in ks}
    return {f"mean@{samples}": float(rewards.mean()), **passes, "prompts": float(prompts)}


def pass_errors(rewards: np.ndarray, ks: Sequence[int], *, solved: float = 1.0) -> dict[str, float]:
    """Returns the standard error over prompts of each pass@k, as `pass@k_error`.

    For [P, n] rewards; 0 for a single prompt, of which nothing is known.
    """
    correct, samples = np.sum(_checked(rewards) >= solved, axis=1), rewards.shape[1]
    each = {k: pass_at_k(correct, samples, k)[:, None] for k in ks}
    return {f"pass@{k}_error": standard_error(values) for k, values in each.items()}


def _checked(rewards: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.size == 0:
        raise InputError(
            f"rewards must be [prompts, samples] and not empty, got shape {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        value = rewards[prompt, sample]
        raise InputError(f"rewards must be finite: prompt {prompt}, sample {sample} has {value}")
    return rewards


def evaluate(
    weights: Any,
    task: Task,
    text: Text,
    *,
    sample: Callable[..., Rollout] | episodes.Programs,
    environment: Environment | None = None,
    key: jax.Array,
    prompts: int,
    samples: int,
    batch: int,
    ks: Sequence[int],
    solved: float = 1.0,
) -> tuple[dict[str, float], list[Sample]]:
    """Evaluates the first `prompts` held-out problems with `samples` responses each.

    `sample` is a program for `batch` prompts at a time (programs.sampling_program), or programs of
    episodes with an `environment`; the last batch is filled up with prompts that are not counted. A
    response is right from the reward `solved` on.

    Returns:
      mean@n, pass@k, the number of prompts, the mean reward, the mean response length, the
      standard errors of the reward (`reward_error`, of mean@n too) and of pass@k, how many answers
      could not be graded; and all samples.

    Raises:
      InputError: the task has no held-out problems, or as the training loop.
    """
    count = min(prompts, len(task.evaluation))
    if not count:
        raise InputError(f"task {task.name} has no held-out problems to evaluate on")
    rows: list[Sample] = []
    lengths: list[np.ndarray] = []
    failed: dict[str, float] = {}
    for start in range(0, count, batch):
        indices = [min(i, count - 1) for i in range(start, start + batch)]
        examples = [task.evaluation[i] for i in indices]
        encoded = text.prompts(examples, indices)
        wanted = min(batch, count - start)
        if isinstance(sample, episodes.Programs):
            with waiting.during(SAMPLING, about=waiting.COMPILES):
                played = drawing.play(
                    weights, text, examples, encoded, key, programs=sample, environment=environment
                )
            found = drawing.of_episodes(examples, played, text)[: wanted * samples]
            faults = drawing.environment_faults(played.failed[: wanted * samples])
            drawn = np.asarray(played.rollout.drawn_lengths)[: wanted * samples]
        else:
            with waiting.during(SAMPLING, about=waiting.COMPILES):
                rollout = jax.device_get(sample(weights, encoded, key))
            kept = jax.tree.map(lambda x, n=wanted: x[: n * samples], rollout)
            found, faults = graded(task, text, examples[:wanted], kept, samples)
            drawn = kept.lengths
        rows += found
        failed = {name: failed.get(name, 0.0) + number for name, number in faults.items()}
        lengths.append(drawn)
    rewards = np.array([row.reward for row in rows]).reshape(count, samples)
    metrics = mean_and_pass(rewards, ks, solved=solved)
    metrics |= {"reward": float(rewards.mean()), "length": float(np.concatenate(lengths).mean())}
    metrics["reward_error"] = standard_error(rewards)
    metrics |= pass_errors(rewards, ks, solved=solved)
    return metrics | failed, rows
