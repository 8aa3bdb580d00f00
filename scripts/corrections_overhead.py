"""Times every recipe and all metrics against a learner step; writes docs/results/corrections.md.

    python scripts/corrections_overhead.py --config configs/quickstart.toml

The learner step is the update program of that configuration (forward, gradient, optimiser) on a
full batch of random tokens; recipes and metrics are compiled on their own and run on arrays of the
batch's shape. They take turns; figures are medians.
"""

import argparse
import platform
from functools import partial

import bench_common as common
import jax
import jax.numpy as jnp
import numpy as np
from bench_exactness_cost import seconds

from tim_jax import corrections, metrics, objectives, placement
from tim_jax.app.config import toml
from tim_jax.app.run import assembly, sources
from tim_jax.common.types import Rollout
from tim_jax.rl import programs, sharded
from tim_jax.rl.types import Experience

OUT = common.RESULTS / "corrections.md"
REQUIRED = {"trust_region_masking": {"bound": 0.05}}
LIMIT = 0.01


def entries():
    """Every recipe, with a normalisation on top."""
    for name in corrections.RECIPES:
        yield name, [{"name": name, **REQUIRED.get(name, {})}, {"name": "normalise"}]


def make_batch(config, vocabulary: int) -> Rollout:
    """A full batch of the configuration's shape, with random tokens and lengths."""
    rng = np.random.default_rng(0)
    rows, longest = config.sequences_per_step, config.sampling.max_tokens
    prompt = config.sampling.max_prompt_length
    return Rollout(
        prompts=jnp.asarray(rng.integers(0, vocabulary, (rows, prompt)), jnp.int32),
        prompt_lengths=jnp.full(rows, prompt, jnp.int32),
        responses=jnp.asarray(rng.integers(0, vocabulary, (rows, longest)), jnp.int32),
        lengths=jnp.asarray(rng.integers(longest // 2, longest + 1, rows), jnp.int32),
        log_probs=jnp.asarray(-rng.exponential(size=(rows, longest)), jnp.float32),
        finished=jnp.ones(rows, bool),
    )


def all_metrics(train, rollout, mask, coefficients, advantages):
    """Everything that a step with a correction logs of its log-probs."""
    d = train - rollout
    ratio = jnp.exp(jnp.clip(d, -20.0, 20.0))
    never = jnp.zeros(mask.shape, bool)
    losses = objectives.TokenLosses(ratio, ratio, never, never, never, ratio)
    tis = corrections.scale_by_truncated_ratio("token", lower=0.5, upper=2.0)
    return (
        metrics.mismatch_metrics(train, rollout, mask),
        metrics.loss_metrics(losses, mask),
        metrics.update_skew(ratio, advantages, mask),
        metrics.update_skew(2.0 * ratio, advantages, mask),
        corrections.correction_metrics(coefficients, mask, kept=mask),
        corrections.bound_metrics(tis, {"old": d, "current": d}, mask),
    )


def correction_programs(batch: Rollout):
    """Name -> a call without arguments that runs the compiled program once."""
    rng = np.random.default_rng(1)
    shape = batch.log_probs.shape
    arrays = {
        "log_ratio": jnp.asarray(1e-2 * rng.standard_normal(shape), jnp.float32),
        "mask": batch.mask,
        "log_probs": batch.log_probs,
        "advantages": jnp.asarray(rng.standard_normal(shape[0]), jnp.float32),
    }
    train, rollout = batch.log_probs, batch.log_probs - arrays["log_ratio"]
    measured = (train, rollout, batch.mask, jnp.exp(arrays["log_ratio"]), arrays["advantages"])
    calls = {"all metrics": partial(jax.jit(all_metrics), *measured)}
    for name, chain in entries():
        program = jax.jit(partial(corrections.coefficients, corrections.build(chain)))
        calls[name] = partial(program, **arrays)
    return calls


class LearnerStep:
    """The update program of a configuration, called again and again; its buffers are donated."""

    def __init__(self, config):
        model = sources.make_model(config)
        execution = assembly.make_execution(config, model)
        built = programs.build(assembly.make_training(config, execution))
        self.batch = make_batch(config, execution.config.vocab_size)
        self.update = built.update
        self.state = built.init(model.params)
        self.weights = built.prepare(self.state.params)
        on = placement.mesh(execution.placement, jax.devices())
        self.score = jax.jit(sharded.scoring(execution, on, micro_batch=config.learner.micro_batch))
        self.experience = Experience(
            rollout=self.batch,
            advantages=jnp.linspace(-1.0, 1.0, config.sequences_per_step),
            mask=self.batch.mask,
            old_log_probs=self.batch.log_probs,
            coefficients=self.batch.mask.astype(jnp.float32),
            kept=self.batch.mask,
        )

    def __call__(self):
        self.state, self.weights, report = self.update(
            self.state, self.weights, self.experience, jnp.int32(0), jnp.float32(10.0)
        )
        return self.state.params, report.metrics

    def forward(self):
        """The trainer's log-probs of all rows, without a gradient."""
        return self.score(self.weights, self.batch)


def measure(config, repeats: int) -> tuple[dict[str, float], tuple[int, int]]:
    """Name -> median seconds, "learner step" among them; and the batch's shape [B, R]."""
    step = LearnerStep(config)
    calls = {"learner step": step, "forward": step.forward}
    for name, noise in (("in parts", False), ("in parts, noise", True)):
        parts = {"micro_batch": config.sequences_per_step // 4, "noise_scale": noise}
        learner = config.learner.model_copy(update=parts)
        calls[name] = LearnerStep(config.model_copy(update={"learner": learner}))
    calls |= correction_programs(step.batch)
    for call in calls.values():
        seconds(call)
    times = common.interleaved({n: partial(seconds, call) for n, call in calls.items()}, repeats)
    rows, longest = step.batch.log_probs.shape
    return {name: float(np.median(x)) for name, x in times.items()}, (rows, longest)


def table(config_name: str, seconds: dict[str, float], shape: tuple[int, int]) -> str:
    """The page."""
    step, everything = seconds["learner step"], seconds["all metrics"]
    others = ("learner step", "all metrics", "forward", "in parts", "in parts, noise")
    recipes = {k: v for k, v in seconds.items() if k not in others}
    worst = max(recipes, key=lambda name: recipes[name])
    share = (recipes[worst] + everything) / step
    device = jax.devices()[0].device_kind
    lines = [
        "# Cost of corrections and metrics",
        "",
        f"Written by `python scripts/corrections_overhead.py`. Learner step of `{config_name}`,"
        f" batch of {shape[0]} x {shape[1]} response tokens, {device}, jax {jax.__version__},"
        f" Python {platform.python_version()}. Medians of runs that take turns.",
        "",
        "A forward is needed once a step in recompute mode, and before an update whose correction,",
        "loss or denominator needs a statistic of all its rows at its own weights (`normalise` in",
        "bypass mode, `clip_cov`, `kl_cov`). All other corrections in bypass mode need none.",
        "",
        f"The most expensive recipe (`{worst}`) with all metrics takes **{100 * share:.2f}%** of a"
        f" learner step; the aim is below {100 * LIMIT:.0f}%.",
        "",
        "| what | ms | share of the step |",
        "|---|--:|--:|",
        f"| learner step | {1e3 * step:.1f} | 100% |",
        f"| all metrics | {1e3 * everything:.2f} | {100 * everything / step:.3f}% |",
        f"| a forward of all rows | {1e3 * seconds['forward']:.1f}"
        f" | {100 * seconds['forward'] / step:.0f}% |",
        f"| learner step in 4 micro-batches | {1e3 * seconds['in parts']:.1f}"
        f" | {100 * seconds['in parts'] / step:.0f}% |",
        f"| the same with `noise_scale` | {1e3 * seconds['in parts, noise']:.1f}"
        f" | {100 * seconds['in parts, noise'] / step:.0f}% |",
    ]
    for name, value in sorted(recipes.items(), key=lambda item: -item[1]):
        lines.append(
            f"| `{name}` and `normalise` | {1e3 * value:.2f} | {100 * value / step:.3f}% |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description="Times corrections against a learner step.")
    parser.add_argument("--config", default="configs/quickstart.toml")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    text = table(options.config, *measure(toml.load(options.config), options.repeats))
    OUT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
