"""What a study at fixed weights measures, source by source.

The policy is trained as the base says, by an exact run. Every pair of a horizon and a source is one
line of measured.jsonl; what is there is not measured again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from tim_jax import corrections, mismatch
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.run import assembly, folders, sources
from tim_jax.app.run.loggers import JsonLines, read_lines
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError
from tim_jax.instruments.study.definition import EXACT, WHOLE, GradientStudy, merged
from tim_jax.instruments.study.gradient import (
    BYPASS,
    RECOMPUTE,
    Batches,
    Bench,
    Measuring,
    bound_constants,
)
from tim_jax.model.execution import Execution
from tim_jax.objectives import advantages
from tim_jax.placement import SINGLE
from tim_jax.rl.types import Learning


class Estimate(NamedTuple):
    """A number with its standard error."""

    value: float
    error: float

    @property
    def seen(self) -> bool:
        """Whether the number is more than two standard errors above 0."""
        return self.value > 2.0 * self.error


class Compared(NamedTuple):
    """A gradient estimator against the exact one, in squares of the exact gradient's norm.

    Attributes:
        bias: |E m - E p|^2 / |E p|^2, of the other estimates m and the exact ones p.
        cosine: of the angle between E m and E p.
        variance: tr Cov(m) / |E p|^2, of one batch.
        exact_variance: tr Cov(p) / |E p|^2.
        signal: |E p|, the norm of the exact gradient.
    """

    bias: Estimate
    cosine: Estimate
    variance: Estimate
    exact_variance: Estimate
    signal: Estimate


def compare(exact: np.ndarray, other: np.ndarray) -> Compared:
    """Compares estimates f32[K, N] with exact ones f32[K, N]; row k of both has the same noise.

    The closer the noise of a pair, the smaller the error of the bias: common random numbers.
    """
    products = inner_products(np.concatenate([exact, other]))
    count = len(exact)
    one, both = slice(0, count), slice(count, 2 * count)
    pp, mm, mp = products[one, one], products[both, both], products[both, one]
    dd = mm - mp - mp.T + pp

    def statistics(kept: np.ndarray) -> list[float]:
        of_p, of_m, of_mp, of_d = (_square(of, kept) for of in (pp, mm, mp, dd))
        pairs = ((mm, of_m), (pp, of_p))
        variances = [_share(float(np.mean(np.diag(x)[kept])) - own, of_p) for x, own in pairs]
        size = of_m * of_p
        cosine = float(of_mp / np.sqrt(size)) if size > 0 else np.nan
        return [_share(of_d, of_p), cosine, *variances, float(np.sqrt(max(of_p, 0.0)))]

    return Compared(*jackknife(statistics, count))


def inner_products(vectors: np.ndarray) -> np.ndarray:
    """f64[K, K] of f32[K, N], in blocks so that no float64 copy of all is made."""
    total = np.zeros((len(vectors), len(vectors)))
    for start in range(0, vectors.shape[1], 1 << 16):
        block = vectors[:, start : start + (1 << 16)].astype(np.float64)
        total += block @ block.T
    return total


def _square(products: np.ndarray, kept: np.ndarray) -> float:
    """The mean of the products of different estimates, f64[], of the rows that are kept."""
    inside = products[np.ix_(kept, kept)]
    count = len(kept)
    return float((inside.sum() - np.trace(inside)) / (count * (count - 1)))


def _share(part: float, whole: float) -> float:
    """NaN of nothing: without a baseline, say, no token has a negative advantage."""
    return part / whole if whole else np.nan


def jackknife(statistics: Callable[[np.ndarray], list[float]], count: int) -> list[Estimate]:
    """Statistics of rows 0..count-1 with their standard errors (Quenouille, Tukey)."""
    every = np.arange(count)
    without = np.array([statistics(np.delete(every, k)) for k in every])
    # Each column a row: a sum's last bit follows how its terms lie.
    spreads = [np.sum((x - x.mean()) ** 2) * (count - 1) / count for x in without.T.copy()]
    pairs = zip(statistics(every), spreads, strict=True)
    return [Estimate(float(value), float(np.sqrt(spread))) for value, spread in pairs]


def mean(values: np.ndarray) -> Estimate:
    """The mean of f64[K] independent values with its standard error."""
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))


class Trained(NamedTuple):
    """The policy that is measured."""

    config: RunConfig
    model: Model
    params: Any


def trained(config: RunConfig) -> Trained:
    """The newest checkpoint of a run's folder."""
    model = sources.make_model(config)
    read = folders.read_params(
        config.run.folder, model.params, config=model.config, lora=model.lora
    )
    return Trained(config, model, jax.tree.map(jnp.asarray, read.state["params"]))


_OF_TRAINING = frozenset({"steps", "lora", "optimizer", "warmup", "eval", "exact", "run"}) | {
    f"model.{key}" for key in ("path", "preset", "architecture")
}


def horizons(study: GradientStudy, run: Mapping[str, Any]) -> dict[str, RunConfig]:
    """Name -> the run's configuration with the horizon's changes.

    Raises:
      InputError: a change is of what trains the policy, of which there is one.
    """
    changes = study.horizon or {WHOLE: {}}
    for name, change in changes.items():
        of_model = {f"model.{key}" for key in change.get("model", {})}
        if of_training := sorted(_OF_TRAINING & {*change, *of_model}):
            raise InputError(
                f"{study.name}: horizon.{name}.{of_training[0]}: all horizons measure one policy,"
                " which the base trains; put it into [common]"
            )
    return {
        name: toml.build(merged(run, change), source=f"horizon.{name}")
        for name, change in changes.items()
    }


def check(study: GradientStudy, configs: Mapping[str, RunConfig]) -> None:
    """Refuses what cannot be measured before a policy is trained for it.

    That is an objective or a remedy that needs what a measurement does not have, a task that cannot
    be made, or a source that this model's sampler cannot have.
    """
    for config in configs.values():
        _check_base(study, config)
        _make_learnings(config, study)
        task, prompts = sources.make_task(config), config.learner.prompts_per_step
        task.close()
        if len(task.train) < prompts:
            raise InputError(
                f"{study.name}: learner.prompts_per_step = {prompts}: a measurement needs as many"
                f" different prompts, and the task has {len(task.train)}"
            )
        model = sources.make_model(config)
        execution = assembly.make_execution(config, model, devices=tuple(jax.devices()))
        _check_sources(study, replace(execution, placement=SINGLE))


def _check_base(study: GradientStudy, config: RunConfig) -> None:
    """Refuses what a run may have, and a measurement at fixed weights has not."""
    learner, sampler, objective = config.learner, config.sampler, config.objective
    one = "takes the gradient of a step's one update; set it to 1"
    exact = "trains its policy in an exact run, and has its sources in [source.NAME]; leave it out"
    one_turn = "draws responses of one turn; leave it out"
    own_experts = 'records no experts; set it to "own"'
    no_reference = "has no reference policy; set it to 0"
    both_modes = "takes gradients in bypass mode too, which cannot have it; leave it out"
    no_updates = "has no updates, of which this loss selects tokens; take another loss"
    no_input = (
        "has neither greedy responses nor sizes of scores, and this needs one of them; take another"
        " estimator"
    )
    lacks = advantages.needs(objective.estimator) & {"greedy_rewards", "energies"}
    of_learner = {
        **{name: (count > 1 and count, one) for name, count in config.update_counts.items()},
        "routing": (learner.routing != "own" and learner.routing, own_experts),
        "refills": (learner.refills, "draws every batch once; set it to 0"),
        "objective.kl_coefficient": (objective.kl_coefficient, no_reference),
        "objective.reward_kl_coefficient": (objective.reward_kl_coefficient, no_reference),
        "objective.reject_before_advantages": (objective.reject_before_advantages, both_modes),
        "objective.estimator": (lacks and objective.estimator, no_input),
        "objective.loss": (objective.selects and objective.loss, no_updates),
    }
    refused = {
        "sampler.mismatch": (sampler.own_dial.active and [*sampler.mismatch], exact),
        "sampling.max_turns": (config.sampling.max_turns, one_turn),
    } | {f"learner.{name}": of for name, of in of_learner.items()}
    for key, (value, rule) in refused.items():
        if value:
            raise InputError(f"{study.name}: {key} = {value!r}: a measurement {rule}")


def _check_sources(study: GradientStudy, execution: Execution) -> None:
    for name in study.source:
        dial = study.dial(name)
        mismatch.refuse_stale(dial, "a measurement at fixed weights has no older ones")
        mismatch.check(dial, execution)
        rule = "a measurement at fixed weights has merged them already"
        mismatch.refuse_merge(dial, execution, rule)


def measure(
    study: GradientStudy, policy: Trained, configs: Mapping[str, RunConfig], folder: Path
) -> Iterator[dict[str, Any]]:
    """Measures what measured.jsonl does not have yet; yields each new record.

    A record is a function of the study and the policy alone, so that a study that was cut short
    goes on to the same lines. Where gradients are projected, and so are small and of a large model,
    each batch is kept in the folder as well.

    Raises:
      InputError: another process measures in this folder.
    """
    path, lock = folder / "measured.jsonl", folders.Lock(folder)
    with ExitStack() as stack:
        stack.callback(lock.release)
        done = {(r["horizon"], r["source"]) for r in records(folder)}
        whole = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        lines = JsonLines(path, offset=whole)
        stack.callback(lines.close)
        for name, config in configs.items():
            left = [s for s in study.source if (name, s) not in done]
            if not left:
                continue
            bench = _bench(study, policy, config)
            measuring = Measuring(bench)
            kept = folder / "batches" / name if study.projected else None
            # With no mismatch all estimators agree.
            exact = measuring.batches(mismatch.EXACT, (RECOMPUTE,), kept=kept and kept / EXACT)
            for source in left:
                other = measuring.batches(study.dial(source), kept=kept and kept / source)
                record = {"horizon": name, "source": source} | _record(exact, other)
                if study.horizon:
                    record |= bound_constants(measuring, study.dial(source), states=study.states)
                lines.write(0, record)
                yield record


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of measured.jsonl, if it is there; refuses one that `measure` does not write."""
    path, found = folder / "measured.jsonl", []
    for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            found.append(dict(_RECORD.validate_python(line)))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            where = f"{path}, line {number}: not what a study writes"
            raise InputError(f"{where}: {key}: {first['msg']}") from error
    return found


_Pair = tuple[float, float]  # an estimate and its standard error; "nan" is read as the number
_Parts = dict[str, dict[str, _Pair]]


class _Record(TypedDict):
    horizon: str
    source: str
    estimators: _Parts
    signs: _Parts
    metrics: dict[str, _Pair]
    exact_metrics: dict[str, _Pair]
    reward_difference: _Pair
    longest: NotRequired[float]
    score_norm: NotRequired[float]
    variation_largest: NotRequired[float]
    variation_mean: NotRequired[float]
    bound: NotRequired[float]


_RECORD = TypeAdapter(_Record)


def _bench(study: GradientStudy, policy: Trained, config: RunConfig) -> Bench:
    """The first problems of the horizon's task, as many as a step of the run has prompts.

    Gradients are taken on one device, whatever mesh the policy was trained on.
    """
    config = assembly.on_one_device(config)
    run = Path(policy.config.run.folder)
    # A horizon may have longer sequences than the run measured its tiles for.
    measured = None if study.horizon else run / "calibration.json"
    execution = assembly.make_execution(config, policy.model, measured=measured)
    _check_sources(study, execution)
    task = sources.make_task(config)
    examples = tuple(task.train[i] for i in range(config.learner.prompts_per_step))
    return Bench(
        execution=execution,
        learnings=_make_learnings(config, study),
        params=policy.params,
        task=task,
        text=sources.make_text(config, policy.model, run=run),
        examples=examples,
        batches=study.batches,
        seed=config.seed,
        projected=study.projected,
    )


def _make_learnings(config: RunConfig, study: GradientStudy) -> dict[str, Learning]:
    """Returns how each estimator makes a gradient of a batch.

    Raises:
        InputError: a remedy contradicts the objective, or reads the policy of each update.
    """
    plain = Learning(
        config.objective,
        config.sampling.samples,
        micro_batch=config.learner.micro_batch,
        remat=config.learner.remat,
    )
    found = {BYPASS: plain, RECOMPUTE: replace(plain, mode="recompute")}
    for name, remedy in study.remedy.items():
        try:
            built = corrections.build(remedy.corrections)
            found[name] = replace(found[RECOMPUTE], correction=built)
        except InputError as error:
            raise InputError(f"remedy {name!r}: {error}") from error
        if found[name].stages.update.blocks or found[name].needs_whole_update:
            raise InputError(
                f"remedy {name!r}: reads the policy of each update, of which a measurement at"
                " fixed weights has none; leave it out"
            )
    return found


def _record(exact: Batches, other: Batches) -> dict[str, Any]:
    """Everything about one source, as plain numbers: each an [estimate, standard error]."""
    truth = exact.gradients[RECOMPUTE]

    def compared(exact: Any, other: Any) -> dict[str, list[float]]:
        return {k: list(v) for k, v in compare(exact, other)._asdict().items()}

    def means(batches: Batches) -> dict[str, list[float]]:
        return {name: list(mean(values)) for name, values in batches.metrics.items()}

    reward = mean(other.metrics["reward"] - exact.metrics["reward"])
    return {
        "estimators": {name: compared(truth, of) for name, of in other.gradients.items()},
        "signs": {name: compared(exact.signs[name], of) for name, of in other.signs.items()},
        "metrics": means(other),
        "exact_metrics": means(exact),
        "reward_difference": list(reward),
    }


def estimate(record: Mapping[str, Any], estimator: str, name: str) -> Estimate:
    """One estimate of a record."""
    return Estimate(*(float(x) for x in record["estimators"][estimator][name]))


def estimators(record: Mapping[str, Any]) -> list[str]:
    """The estimators of a record: the two modes without a correction, then the remedies."""
    return [BYPASS, RECOMPUTE, *(n for n in record["estimators"] if n not in (BYPASS, RECOMPUTE))]
