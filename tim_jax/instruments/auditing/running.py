"""An audit: draws sequences, computes their log-probs again, compares raw bits.

What draws and what computes are the programs of a training run: the sampler's, and the functions
that the learner differentiates with.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import placement
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts, Rollout, make_key
from tim_jax.instruments.auditing.cases import (
    Again,
    Case,
    Episodes,
    Replies,
    Score,
    Sizes,
    standard_cases,
)
from tim_jax.instruments.auditing.results import CaseResult, compare
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Batching, Execution, Sampling, forget_programs, jit
from tim_jax.model.weights import Params, Weights, weight_axes
from tim_jax.numerics import EXACT_BF16, EXACT_F32, Numerics, describe
from tim_jax.objectives import Objective
from tim_jax.placement import Placement
from tim_jax.rl import episodes, programs
from tim_jax.rl.experience import experience
from tim_jax.rl.rules import Turns
from tim_jax.rl.types import Carried, Learning


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
    prompts = bench.prompts
    drawn: dict[Sampling, Rollout] = {}
    for case in cases:
        start = time.perf_counter()
        if isinstance(case.against, Episodes):
            recorded = _play(prompts, case.against, case.sampling, bench)
        elif (found := drawn.get(case.sampling)) is not None:
            recorded = found
        else:
            everything = Again(samples=bench.sizes.samples)
            recorded = _sample_again(prompts, everything, case.sampling, bench)
            drawn[case.sampling] = recorded
        if isinstance(case.against, Again):
            other = _sample_again(prompts, case.against, case.sampling, bench)
            recorded, arrays = _in_common(recorded, other, case.against, bench.sizes)
        else:
            score = case.against.score if isinstance(case.against, Episodes) else case.against
            log_probs = _score_again(recorded, score, case.sampling, bench)
            arrays = np.asarray(recorded.responses), np.asarray(recorded.mask), log_probs
        yield CaseResult(
            case.name,
            describe(bench.numerics),
            *compare(recorded, *arrays),
            control=control,
            seconds=time.perf_counter() - start,
        )
        forget_programs()


def _sample_again(prompts: Prompts, again: Again, sampling: Sampling, bench: _Bench) -> Rollout:
    """The rollout of the chosen prompts, in one batch or one by one."""
    rows = again.rows or tuple(range(bench.sizes.prompts))
    batches = [(row,) for row in rows] if again.one_by_one else [rows]
    limit = sampling.max_tokens + again.padding
    execution = bench.execution(replace(sampling, max_tokens=limit), again.placement)
    weights = bench.placed(again.placement)
    sample = _sampler(execution, again.samples, again.batching)
    parts = []
    for batch in batches:
        chosen = jax.tree.map(lambda x, b=batch: x[jnp.asarray(b)], prompts)
        chosen = replace(chosen, tokens=_filled(chosen.tokens, again.padding, bench.config))
        rollout = sample(weights, chosen, make_key(bench.sizes.seed))
        parts.append(jax.device_get(rollout))
    return jax.tree.map(lambda *xs: jnp.asarray(np.concatenate(xs)), *parts)


def _play(prompts: Prompts, wanted: Episodes, sampling: Sampling, bench: _Bench) -> Rollout:
    compiled = episodes.build(
        bench.execution(sampling, wanted.placement),
        turns=Turns(wanted.turns, min(wanted.max_tokens, sampling.max_tokens)),
        samples=bench.sizes.samples,
        batching=wanted.batching,
    )
    played = episodes.play(
        bench.placed(wanted.placement),
        prompts,
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
    arrays = other.responses[:, :limit], other.mask[:, :limit], other.log_probs[:, :limit]
    return recorded, tuple(np.asarray(x) for x in arrays)


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
    for start in range(0, len(order), size):
        # The last batch is filled up with its own rows, so that there is one program.
        rows = np.resize(order[start : start + size], size)
        part = jax.tree.map(lambda x, r=rows: x[r], recorded)
        part = replace(
            part,
            prompts=_filled(part.prompts, score.padding, bench.config),
            responses=_filled(part.responses, score.padding, bench.config),
            log_probs=jnp.pad(part.log_probs, ((0, 0), (0, score.padding))),
            drawn=None if part.drawn is None else jnp.pad(part.drawn, ((0, 0), (0, score.padding))),
        )
        log_probs[rows] = np.asarray(learn(weights, part)[0])[:, : log_probs.shape[1]]
    return log_probs


def _filled(tokens: jax.Array, more: int, config: ModelConfig) -> jax.Array:
    """Tokens [B, T] with `more` columns of other tokens appended."""
    extra = jnp.arange(1, more + 1, dtype=jnp.int32)[None, :] % config.vocab_size
    return jnp.concatenate([tokens, jnp.broadcast_to(extra, (len(tokens), more))], axis=1)


@cache
def _sampler(execution: Execution, samples: int, batching: Batching) -> Callable[..., Rollout]:
    return programs.sampling_program(execution, samples=samples, batching=batching)


@cache
def learner_log_probs(execution: Execution, score: Score) -> Callable[..., Any]:
    """Jitted (weights, rollout) -> (log-probs [B, R], gradient) by the learner's own functions.

    The gradient is returned, so that XLA cannot leave it out. Without `score.gradient` it is the
    learner's forward for scoring.
    """
    objective = Objective(estimator="reinforce")
    learning = Learning(
        objective,
        samples=1,
        micro_batch=score.micro_batch,
        micro_batch_tokens=score.tokens,
        remat=score.remat,
    )
    policy = programs.policy(execution, learning)

    def log_probs(weights, rollout: Rollout):
        if not score.gradient:
            return policy.score(weights, rollout)[0], None
        rewards = jnp.arange(rollout.lengths.shape[0], dtype=jnp.float32)
        batch = experience(
            weights, None, Carried(()), rollout, rewards, score=policy.score, learning=learning
        ).experience
        token_weights = learning.objective.token_weights(batch.mask, batch.kept)
        gradient, tokens = policy.gradient(weights, batch, token_weights)
        return tokens["log_prob"], gradient

    return jit(log_probs, execution.numerics)
