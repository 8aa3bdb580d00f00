"""Rows that another engine drew and recorded: read, scored, and as a step learns from them."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tim_jax.api.data import padded
from tim_jax.api.model import Model
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.instruments.diagnosis import evidence, readers
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.evidence import Forward
from tim_jax.instruments.diagnosis.rollouts import Collected, Limits, Response, collect
from tim_jax.model.execution import Execution, Sampling
from tim_jax.rl.drawing import Sample
from tim_jax.rl.training import Training

_LOG = logging.getLogger("tim_jax")


def read(who: str, model: Model, rows: Any, *, form: str, **how: Any) -> Collected:
    """What another engine drew, as `diagnosis.rollouts.collect` gives it, for this model.

    Raises:
      InputError: it is neither a file nor rows, or they cannot be read.
    """
    if not isinstance(rows, str | Path | Iterable) or isinstance(rows, Mapping):
        raise InputError(
            f"{who}: give what tim_jax.sample returns, a file, or rows of another engine, got"
            f" {type(rows).__name__}"
        )
    return collect(
        readers.read(rows, form=form, pad=model.tokenizer.pad_token_id),
        limits=Limits.of(model.config),
        tokenizer=model.tokenizer,
        **how,
    )


def forward_of(who: str, model: Model) -> Forward:
    """The exact forward of a model on one device, for rows of other engines.

    Raises:
      InputError: the model lies on a mesh.
    """
    if not model.placement.single:
        raise InputError(f"{who}: load the model on one device, not on a mesh")
    execution = model.execution(Sampling(1))
    size = min(len(model.tokenizer), model.config.vocab_size)
    return Forward(model.weights, execution, size, execution.sampling.stop_tokens)


def scored(model: Model, rows: Any, form: str) -> np.ndarray:
    """Log-probs f32[B, R] of rows by the exact forward, 0 off their masks.

    A warning says how many rows do not say their temperature.
    """
    collected = read("score", model, rows, form=form)
    responses, silent = collected.responses, collected.silent.get("temperature", 0)
    if silent:
        _LOG.warning(
            "tim_jax: score: %d of %d rows do not say their temperature; they are scored at 1",
            silent,
            len(responses),
        )
    with waiting.during("scoring", about=waiting.COMPILES):
        found = evidence.log_probs(forward_of("score", model), responses)
    size = max(len(response) for response in responses)
    scored = np.zeros((len(responses), size), np.float32)
    ends = np.cumsum([len(response) for response in responses])[:-1]
    for row, response, own in zip(scored, responses, np.split(found, ends), strict=True):
        kept = np.ones(len(own), bool) if response.mask is None else response.mask
        row[: len(own)] = np.where(kept, own, np.float32(0.0))
    return scored


def learnable(model: Model, rows: Any, form: str, training: Training) -> tuple[Response, ...]:
    """The rows for `learn`, if all of them can be learnt from as they are."""
    default = Distribution.of(training.execution.sampling)
    collected = read("learn", model, rows, form=form, default=default)
    responses = tuple(map(_whole_vocabulary, collected.responses))
    for response in responses:
        _check(response, responses[0], routed=training.learning.routing != "own")
    return responses


def _whole_vocabulary(response: Response) -> Response:
    """A response whose truncation is recorded as a mass, with log-probs over the whole vocabulary.

    Both policies of a ratio are renormalised by the recorded mass, so that it cancels.
    """
    mass = response.kept_log_mass
    if mass is None:
        return response
    declared = replace(response.declared, top_k=0, top_p=1.0)
    return replace(response, log_probs=response.log_probs + mass, declared=declared)


def _check(response: Response, first: Response, *, routed: bool) -> None:
    asked, where = response.declared, f"learn: {response.where}"
    if asked.shaped:
        raise InputError(
            f"{where}: drawn with {asked.shaping}, which the learner's forward does not apply; ask"
            " the engine without it"
        )
    if asked.raw:
        raise InputError(
            f"{where}: has raw log-probs, but was drawn with {asked}; record processed ones, which"
            " vLLM does with logprobs_mode='processed_logprobs'"
        )
    if asked.temperature == 0:
        raise InputError(f"{where}: is greedy; it has no log-probs to learn from")
    if asked != first.declared:
        raise InputError(
            f"{where}: drawn with {asked}, but {first.where} with {first.declared}; a step is of"
            " one distribution"
        )
    for name, needed in (("supports", first.supports is not None), ("routes", routed)):
        if needed and getattr(response, name) is None:
            raise InputError(f"{where}: has no {name}, which all rows of this step must have")
    if first.supports is None and response.supports is not None:
        raise InputError(f"{where}: has supports, but {first.where} has none")
    if response.mask is not None and not response.mask.any():
        raise InputError(f"{where}: mask is 0 at all tokens; leave its group out")


def check_distribution(response: Response, sampling: Sampling) -> None:
    """Refuses a response that was drawn from another distribution than the steps before."""
    asked, known = response.declared, Distribution.of(sampling)
    if asked != known:
        raise InputError(
            f"learn: {response.where}: drawn with {asked}, but the steps before with {known}"
        )


def check_groups(responses: Sequence[Response], samples: int) -> None:
    """Refuses rows that are no whole groups of samples of one prompt."""
    if len(responses) % samples:
        raise InputError(
            f"learn: {len(responses)} rows are no whole groups of {samples} samples a prompt"
        )
    for number, response in enumerate(responses):
        first = responses[number - number % samples]
        if response.prompt != first.prompt:
            raise InputError(
                f"learn: {response.where}: has another prompt than {first.where}, but should be of"
                f" its group of {samples} samples; give the samples of a prompt one after the other"
            )


def arrays(execution: Execution, responses: Sequence[Response]) -> Rollout:
    """The responses in few shapes, so that few programs are compiled. Padding changes no bit."""
    longest = max(len(r) for r in responses)
    prompts = max(len(r.prompt) for r in responses)
    most, stops = execution.config.most_positions, execution.sampling.stop_tokens
    prompts = max(prompts, min(padded(prompts), most - longest))
    size = max(longest, min(padded(longest), most - prompts))
    # How a response ended that does not say it, its last token shows.
    said = [
        replace(r, ended=r.ended or ("token" if r.tokens[-1] in stops else "cut"))
        for r in responses
    ]
    rollout = evidence.side_by_side(said, prompts, size)
    # What a mask leaves out, such as a tool's reply, is context: no length counts it.
    drawn = None if rollout.hidden is None else ~rollout.hidden
    return replace(rollout, hidden=None, drawn=drawn)


def samples(model: Model, responses: Sequence[Response], rewards: np.ndarray) -> list[Sample]:
    """The responses as text, with their rewards."""
    decode = model.tokenizer.decode
    return [
        Sample(decode(r.prompt), decode(r.tokens, skip_special_tokens=True), "", float(reward))
        for r, reward in zip(responses, rewards, strict=True)
    ]
