"""Proves on the machine at hand that sampler and learner give every token the same log-prob bits.

One set of sequences is drawn per distribution; its log-probs are then computed again by learners
and samplers in other batches, micro-batches, paddings and orders, and compared as raw bits over all
response tokens. What draws and what computes are the programs of a training run: the sampler's, and
the value-and-gradient program of the learner. Native numerics run as a control: the comparison must
be able to see a difference. `check_gradients` looks at the compiler, on whose errors sampler and
learner may agree.

    results = list(audit(params, config))
    print(summarise(results, gradients=check_gradients(of_backward(EXACT_F32))))
"""

import html
import io
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from rich import box
from rich.console import Console
from rich.table import Table

from tim_jax import placement
from tim_jax.common import pages
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts, Rollout, make_key
from tim_jax.instruments.auditing.cases import (
    PRESETS as PRESETS,
    Again as Again,
    Case as Case,
    Episodes as Episodes,
    Replies as Replies,
    Score as Score,
    Sizes as Sizes,
    learner_log_probs as learner_log_probs,
    placed_cases as placed_cases,
    placed_episodes as placed_episodes,
    placements as placements,
    plain_sampling as plain_sampling,
    random_params as random_params,
    standard_cases as standard_cases,
)
from tim_jax.instruments.auditing.compiler import (
    GradientResult as GradientResult,
    check_gradients as check_gradients,
    of_backward as of_backward,
)
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling, forget_programs
from tim_jax.model.weights import Params, Weights, weight_axes
from tim_jax.numerics import EXACT_BF16, EXACT_F32, Numerics, describe
from tim_jax.numerics.strict import unequal_bits
from tim_jax.placement import Placement
from tim_jax.rl import episodes, programs
from tim_jax.rl.rules import Turns


class Unequal(NamedTuple):
    """The first token whose two log-probs are unequal, in order of sequences and positions."""

    sequence: int
    position: int  # of the response
    tokens: tuple[int, int]  # drawn, and drawn again
    values: tuple[float, float]  # their log-probs


@dataclass(frozen=True)
class CaseResult:
    """The result of a case."""

    name: str
    numerics: str
    compared_tokens: int
    unequal_tokens: int
    max_abs_diff: float
    first_unequal: Unequal | None
    control: bool = False  # unequal tokens are expected, and no failure
    seconds: float = 0.0  # compilation included

    @property
    def passed(self) -> bool:
        """Zero compared tokens is a failure."""
        return self.control or (self.compared_tokens > 0 and self.unequal_tokens == 0)


@dataclass(frozen=True, repr=False)
class Audit:
    """What an audit found; `print` shows its cases. Counts leave out the controls."""

    passed: bool
    """Whether every token of every case was equal, some were compared, and all gradients right."""
    compared_tokens: int
    unequal_tokens: int
    max_abs_diff: float
    control_unequal_tokens: int | None
    """None if no control ran; above 0 it saw a difference."""
    cases: tuple[CaseResult, ...]
    """Case by case, with the first unequal token of each, if there is one."""
    model: str
    versions: dict[str, str]
    platform: str
    device_kind: str
    kernels: dict[str, list[str]]
    """Of each numerics, the Pallas kernels in its forward and head."""
    gradients: tuple[GradientResult, ...]
    """How far the compiler's gradients are from float64, unit by unit; () if not checked."""

    @property
    def text(self) -> str:
        """A table for people, and two lines on the whole."""
        out = io.StringIO()
        Console(file=out, width=140, force_terminal=False).print(table(self.cases))
        return f"{out.getvalue()}{verdict(self)}"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """The two lines, and the first cases that failed."""
        failed = [case for case in self.cases if not case.passed]
        lines = (f"unequal: {x.name}, {x.unequal_tokens:,} tokens" for x in failed[:6])
        return "\n".join([f"Audit of {len(self.cases)} cases", verdict(self), *lines])

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.1; overflow-x: auto">{html.escape(self.text)}</pre>'


class _Bench(NamedTuple):
    """What is audited: a model, its numerics, and how much is drawn."""

    weights: Weights
    config: ModelConfig
    numerics: Numerics
    sizes: Sizes
    prompts: Prompts

    def execution(self, sampling: Sampling, where: Placement) -> Execution:
        return Execution(self.config, self.numerics, sampling, where)

    def placed(self, where: Placement) -> Weights:
        leaf_axes = weight_axes(self.config, self.numerics)
        on = placement.mesh(where, jax.devices())
        return jax.device_put(self.weights, placement.shardings(leaf_axes, on))


def audit(
    params: Params,
    config: ModelConfig,
    *,
    numerics: Sequence[Numerics] = (EXACT_F32, EXACT_BF16),
    cases: Sequence[Case] | None = None,
    sizes: Sizes | None = None,
    prompts: Prompts | None = None,
    quick: bool = False,
    control: bool = True,
) -> Iterator[CaseResult]:
    """Runs the cases for each of `numerics`, and yields a result as soon as it is there.

    Args:
      params: master weights, float32.
      cases: `standard_cases` by default. Compiling takes seconds a case, running takes little.
      sizes: how much is drawn; by default 4 prompts x 4 samples, up to 24 + 48 tokens.
      prompts: prompts of these sizes; random ones by default.
      quick: fewer of the standard cases.
      control: run native numerics too, once per dtype, where unequal tokens are expected.

    Raises:
      InputError: if the model has too few positions for `sizes`, the prompts have other sizes, or
        the numerics cannot run it.
    """
    sizes = Sizes.fitting(config) if sizes is None else sizes
    sizes.check(config)
    prompts = draw_prompts(config, sizes) if prompts is None else prompts
    wanted = sizes.prompts, sizes.prompt_length
    if prompts.tokens.shape != wanted:
        raise InputError(f"audit: prompts have shape {prompts.tokens.shape}, sizes want {wanted}")
    for exact in numerics:
        fitting.check(config, exact)
    cases = standard_cases(config, sizes, quick=quick) if cases is None else cases
    params = jax.tree.map(jnp.asarray, params)
    seen: set[Numerics] = set()
    for exact in numerics:
        weights = programs.weights_program(Execution(config, exact))(params)
        yield from _run(cases, _Bench(weights, config, exact, sizes, prompts), control=False)
        native = Numerics(family="native", compute_dtype=exact.compute_dtype)
        if control and exact.family != "native" and native not in seen:
            seen.add(native)
            some = [case for case in cases if isinstance(case.against, Score)][:1]
            yield from _run(some, _Bench(weights, config, native, sizes, prompts), control=True)


def draw_prompts(config: ModelConfig, sizes: Sizes) -> Prompts:
    """Random prompts of ragged lengths: the first is one token long, the last `prompt_length`."""
    rng = np.random.default_rng(sizes.seed)
    lengths = rng.integers(1, sizes.prompt_length + 1, sizes.prompts)
    lengths[0], lengths[-1] = 1, sizes.prompt_length
    tokens = rng.integers(0, config.vocab_size, (sizes.prompts, sizes.prompt_length))
    return Prompts(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        ids=jnp.asarray(rng.permutation(1000 + sizes.prompts)[: sizes.prompts], jnp.int32),
    )


def _run(cases: Sequence[Case], bench: _Bench, *, control: bool) -> Iterator[CaseResult]:
    drawn: dict[Sampling, Rollout] = {}
    for case in cases:
        sampling, against, start = case.sampling, case.against, time.perf_counter()
        if isinstance(against, Episodes):
            recorded = _play(against, sampling, bench)
        else:
            if sampling not in drawn:
                drawn[sampling] = _sample_again(Again(samples=bench.sizes.samples), sampling, bench)
            recorded = drawn[sampling]
        if isinstance(against, Again):
            other = _sample_again(against, sampling, bench)
            recorded, arrays = _in_common(recorded, other, against, bench.sizes)
        else:
            score = against.score if isinstance(against, Episodes) else against
            log_probs = _score_again(recorded, score, sampling, bench)
            arrays = np.asarray(recorded.responses), np.asarray(recorded.mask), log_probs
        yield CaseResult(
            case.name,
            describe(bench.numerics),
            *compare(recorded, *arrays),
            control=control,
            seconds=time.perf_counter() - start,
        )
        forget_programs()


def _sample_again(again: Again, sampling: Sampling, bench: _Bench) -> Rollout:
    """The rollout of the chosen prompts, in one batch or one by one, in NumPy's arrays."""
    prompts = jax.device_get(bench.prompts)
    rows = again.rows or tuple(range(bench.sizes.prompts))
    batches = [(row,) for row in rows] if again.one_by_one else [rows]
    limit = sampling.max_tokens + again.padding
    execution = bench.execution(replace(sampling, max_tokens=limit), again.placement)
    weights = bench.placed(again.placement)
    sample = _sampler(execution, samples=again.samples, batching=again.batching)
    parts = []
    for batch in batches:
        chosen = jax.tree.map(lambda x, b=batch: x[np.asarray(b)], prompts)
        chosen = replace(chosen, tokens=_filled(chosen.tokens, again.padding, bench.config))
        rollout = sample(weights, chosen, make_key(bench.sizes.seed))
        parts.append(jax.device_get(rollout))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def _play(wanted: Episodes, sampling: Sampling, bench: _Bench) -> Rollout:
    compiled = episodes.build(
        bench.execution(sampling, wanted.placement),
        turns=Turns(wanted.turns, min(wanted.max_tokens, sampling.max_tokens)),
        samples=bench.sizes.samples,
        batching=wanted.batching,
    )
    played = episodes.play(
        bench.placed(wanted.placement),
        bench.prompts,
        make_key(bench.sizes.seed),
        programs=compiled,
        environment=Replies(wanted.reply, bench.config.vocab_size),
        states=[None] * bench.sizes.prompts,
        text=lambda tokens: "",
    )
    return jax.device_get(played.rollout)


def _in_common(recorded: Rollout, other: Rollout, again: Again, sizes: Sizes):
    """The sequences and positions that `other` has, of both."""
    rows = np.asarray(again.rows or range(sizes.prompts))
    rows = (rows[:, None] * sizes.samples + np.arange(again.samples)[None, :]).reshape(-1)
    limit = recorded.responses.shape[1]
    recorded = jax.tree.map(lambda x: x[rows], recorded)
    arrays = other.responses, np.asarray(other.mask), other.log_probs
    return recorded, tuple(x[:, :limit] for x in arrays)


def _score_again(recorded: Rollout, score: Score, sampling: Sampling, bench: _Bench) -> np.ndarray:
    """Log-probs f32[B, R] of the recorded sequences, as `score` says."""
    order = np.arange(recorded.lengths.shape[0])
    order = order[::-1] if score.reverse else order
    size = len(order) if score.micro_batch is None or score.loop else score.micro_batch
    log_probs = np.zeros(recorded.log_probs.shape, np.float32)
    weights = bench.placed(score.placement)
    # The fields of `score` that change the program; the others only change its arrays.
    looped = score.micro_batch if score.loop else None
    program = Score(looped, score.tokens, gradient=score.gradient, remat=score.remat)
    learn = learner_log_probs(bench.execution(sampling, score.placement), program)
    more = ((0, 0), (0, score.padding))
    for start in range(0, len(order), size):
        # The last batch is filled up with its own rows, so that there is one program.
        rows = np.resize(order[start : start + size], size)
        part = jax.tree.map(lambda x, r=rows: x[r], recorded)
        part = replace(
            part,
            prompts=_filled(part.prompts, score.padding, bench.config),
            responses=_filled(part.responses, score.padding, bench.config),
            log_probs=np.pad(part.log_probs, more),
            drawn=None if part.drawn is None else np.pad(part.drawn, more),
        )
        log_probs[rows] = np.asarray(learn(weights, part)[0])[:, : log_probs.shape[1]]
    return log_probs


def _filled(tokens: Any, more: int, config: ModelConfig) -> Any:
    """Tokens [B, T] with `more` columns of other tokens appended."""
    extra = np.arange(1, more + 1, dtype=np.int32) % config.vocab_size
    return np.concatenate([tokens, np.broadcast_to(extra, (len(tokens), more))], axis=1)


# Cases share compiled programs.
_sampler = cache(programs.sampling_program)


def compare(
    recorded: Rollout, tokens: ArrayLike, mask: ArrayLike, log_probs: ArrayLike
) -> tuple[int, int, float, Unequal | None]:
    """(tokens compared, unequal, largest |difference|, first unequal) against arrays [B, R].

    Compared are all places that are a response token on either side. Unequal are those that are
    one on one side only, hold another token, or whose log-probs are not the same finite bits.
    """
    drawn, ours = np.asarray(recorded.responses), np.asarray(recorded.log_probs)
    tokens, mask, log_probs = (np.asarray(x) for x in (tokens, mask, log_probs))
    theirs = np.asarray(recorded.mask)
    either, both = theirs | mask, theirs & mask
    differ = np.asarray(jax.jit(unequal_bits)(ours, log_probs))
    unequal = either & ~(both & (drawn == tokens) & ~differ)
    with np.errstate(invalid="ignore"):
        difference = np.abs(ours.astype(np.float64) - log_probs)
    largest = float(np.max(difference, where=both, initial=0.0))
    if not unequal.any():
        return int(either.sum()), 0, largest, None
    row, column = (int(i) for i in np.argwhere(unequal)[0])
    pair = int(drawn[row, column]), int(tokens[row, column])
    values = float(ours[row, column]), float(log_probs[row, column])
    first = Unequal(row, column, pair, values)
    return int(either.sum()), int(unequal.sum()), largest, first


def summarise(
    results: Sequence[CaseResult],
    *,
    model: str = "",
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    gradients: Sequence[GradientResult] = (),
) -> Audit:
    """Sums the results up, with the versions, the device and the kernels that they hold for."""
    checks = [result for result in results if not result.control]
    controls = [result for result in results if result.control]
    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "jaxlib": version("jaxlib")}
    return Audit(
        passed=bool(checks) and all(result.passed for result in (*checks, *gradients)),
        compared_tokens=sum(result.compared_tokens for result in checks),
        unequal_tokens=sum(result.unequal_tokens for result in checks),
        max_abs_diff=max((result.max_abs_diff for result in checks), default=0.0),
        control_unequal_tokens=sum(c.unequal_tokens for c in controls) if controls else None,
        cases=tuple(results),
        model=model,
        versions=versions | {"python": platform.python_version()},
        platform=device.platform,
        device_kind=device.device_kind,
        kernels={name: list(names) for name, names in kernels.items()},
        gradients=tuple(gradients),
    )


def verdict(found: Audit) -> str:
    """A line on the tokens, and one on the compiler's gradients if they were checked."""
    exact = found.compared_tokens and all(case.passed for case in found.cases)
    tokens = (
        f"{'exact' if exact else 'NOT EXACT'}: {found.unequal_tokens} of"
        f" {found.compared_tokens} response tokens unequal"
    )
    if not found.gradients:
        return tokens
    count, wrong = len(found.gradients), [one for one in found.gradients if not one.passed]
    compiler = f"compiled by jaxlib {found.versions['jaxlib']} on {found.platform}"
    if not wrong:
        return f"{tokens}\nright gradients: all {count} agree with float64, {compiler}"
    errors = ", ".join(
        f"{x.unit} by {x.way} in {x.numerics.split()[-1]} is off by {x.error:.1g} of its size"
        for x in wrong
    )
    return f"{tokens}\nWRONG GRADIENTS: {len(wrong)} of {count}, {compiler}: {errors}"


def to_json(found: Audit) -> str:
    """An audit as a JSON object; a difference that is not a number becomes null."""
    values = asdict(found)
    for case, result in zip(values["cases"], found.cases, strict=True):
        first = result.first_unequal
        case["first_unequal"] = None if first is None else first._asdict()
        case["passed"] = result.passed
    for gradient, result in zip(values["gradients"], found.gradients, strict=True):
        gradient["passed"] = result.passed
    return pages.as_json(values)


def table(results: Sequence[CaseResult]) -> Table:
    """The results for a terminal, one case a row; of 80 columns, without a broken word."""
    title = "Log-probs of the sampler against those of ..."
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "tokens", "unequal", "max |diff|", "seconds", ""):
        drawn.add_column(name, justify="left" if name in ("case", "") else "right")
    said = ""
    for result in results:
        # The family and dtype; a line below says all.
        numerics = " ".join(result.numerics.split()[:2])
        if numerics != said:
            said = numerics
            drawn.add_row(f"[bold]{numerics}")
        verdict = "[green]equal" if result.passed else "[red]UNEQUAL"
        if result.control:
            verdict = "[dim]control"
        elif not result.compared_tokens:
            verdict = "[red]NOTHING COMPARED"
        drawn.add_row(
            result.name + _where(result),
            f"{result.compared_tokens:,}",
            f"{result.unequal_tokens:,}",
            f"{result.max_abs_diff:.1e}" if result.max_abs_diff else "0",
            f"{result.seconds:.1f}",
            verdict,
        )
    return drawn


def _where(result: CaseResult) -> str:
    """The first unequal token of a failed case, on a line of its own."""
    first = result.first_unequal
    if first is None or result.control:
        return ""
    (drawn, other), (recorded, computed) = first.tokens, first.values
    values = f"{recorded!r} and {computed!r}" if drawn == other else f"token {drawn} and {other}"
    return f"\n  first at sequence {first.sequence}, position {first.position}: {values}"
