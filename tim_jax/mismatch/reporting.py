"""Entries that change what the sampler reports, and entries that add noise.

The first make mistakes of real systems: not in what is computed, but in what is recorded. The
second add keyed noise, a mismatch of any size and shape that is reproducible to the bit: like the
sampler's, a random number is keyed by (seed, step of the run, prompt, sample, position), and does
not depend on the batch that its row is in.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from tim_jax.common.types import Names, Rollout
from tim_jax.kernels import tiles
from tim_jax.mismatch.base import Entry
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import Numerics, strict
from tim_jax.policy import distribution

_DROPS = 0x0E5D  # salt of the random numbers of `DroppedEnd`


@dataclass(frozen=True)
class RawLogProbs(Entry):
    """Reports log-probs of the raw logits, though drawn under temperature, top-k and top-p."""

    name, kind = "raw_log_probs", "semantics"
    imitates = (
        "vLLM's logprobs_mode raw_logprobs, its default (TRL issue 4159: ratios near 2 at"
        " temperature 0.6)"
    )
    reports = True
    only_reports = True

    def reported(
        self, logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
    ) -> jax.Array:
        raw = replace(sampling, temperature=1.0, top_k=0, top_p=1.0)
        return distribution.log_prob(logits, tokens, sampling=raw, numerics=numerics)


@dataclass(frozen=True)
class IgnoredTruncation(Entry):
    """Reports log-probs under the temperature, not renormalised over what top-k and top-p keep.

    They are too small by minus the log of the kept mass.
    """

    name, kind = "ignored_truncation", "semantics"
    imitates = (
        "log-probs over the whole vocabulary of tokens drawn from a truncated one (vLLM RFC 42259:"
        " a mean ratio of 0.896 at top_p 0.8)"
    )
    reports = True
    only_reports = True

    def reported(
        self, logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
    ) -> jax.Array:
        whole = replace(sampling, top_k=0, top_p=1.0)
        return distribution.log_prob(logits, tokens, sampling=whole, numerics=numerics)


@dataclass(frozen=True)
class DroppedEnd(Entry):
    """The token that ended a response is lost, in this share of the responses that ended.

    Without a replacement the response is a token shorter. With one, that token stands where the
    end token stood, under the end token's log-prob.
    """

    share: float = 1.0
    replacement: int | None = None

    name, kind = "dropped_end", "semantics"
    imitates = (
        "engines that strip the end token from what they return, after which the trainer scores"
        " another in its place (tunix: differences above 30 nats)"
    )
    no_control = "what was drawn is not what the learner is given"

    def __post_init__(self):
        self.need_number("share", least=0.0, most=1.0)
        if self.replacement is not None:
            self.need_number("replacement", least=0)

    @property
    def inert(self) -> bool:
        return self.share == 0

    def check(self, execution: Execution) -> None:
        size = execution.config.vocab_size
        if self.replacement is not None and self.replacement >= size:
            raise self.refuse(
                f"replacement = {self.replacement} is outside the model's vocabulary of {size}"
            )
        if not execution.sampling.stop_tokens:
            raise self.refuse("no token ends a response here; set sampling.stop_tokens")

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        chance = jax.vmap(jax.random.uniform)(names.salted(_DROPS).streams)
        chosen = rollout.finished & (chance < self.share)
        at = jnp.arange(rollout.responses.shape[1])[None, :] == (rollout.lengths - 1)[:, None]
        at &= chosen[:, None]
        if self.replacement is not None:
            responses = jnp.where(at, jnp.int32(self.replacement), rollout.responses)
            return replace(rollout, responses=responses)
        drawn = rollout.drawn_log_probs
        return replace(
            rollout,
            lengths=rollout.lengths - chosen.astype(jnp.int32),
            responses=jnp.where(at, 0, rollout.responses),
            log_probs=jnp.where(at, 0.0, rollout.log_probs),
            drawn_log_probs=None if drawn is None else jnp.where(at, 0.0, drawn),
        )


@dataclass(frozen=True)
class PadMask(Entry):
    """Response tokens equal to the pad token are masked out, wherever they were drawn.

    Masks and the loss leave them out; they stay in the context of the tokens after them.
    """

    pad: int

    name, kind = "pad_mask", "semantics"
    imitates = (
        "masks made as `token != pad`; where the pad token is the end token, responses then have"
        " no end"
    )
    no_control = "what was drawn is not what the learner is given"

    def __post_init__(self):
        self.need_number("pad", least=0)

    def check(self, execution: Execution) -> None:
        size = execution.config.vocab_size
        if self.pad >= size:
            raise self.refuse(f"pad = {self.pad} is outside the model's vocabulary of {size}")

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        del names
        return replace(rollout, hidden=rollout.responses == self.pad)


_LOGITS, _TOKENS, _LOG_PROBS = 0x1061, 0x70CE, 0x1096  # salts of the random numbers
Distribution = Literal["gaussian", "student"]


@dataclass(frozen=True)
class LogitNoise(Entry):
    """Adds noise of standard deviation `std` to every logit of every position, before the draw.

    `bias` is the standard deviation of a part that is the same at every position of every sequence
    of a step: a function of the vocabulary entry alone. The recorded log-prob is that of the noisy
    distribution, from which the token was drawn.
    """

    std: float = 0.0
    bias: float = 0.0
    distribution: Distribution = "gaussian"
    seed: int = 0

    name, kind = "logit_noise", "synthetic"
    imitates = "no system: the effect of any numerical noise in the forward"
    repeatable = True
    no_control = "a learner does not draw the sampler's noise again"

    def __post_init__(self):
        self.need_number("std", least=0.0)
        self.need_number("bias", least=0.0)
        self.need_number("seed", least=0, most=2**31 - 1)
        self.need_choice("distribution", ("gaussian", "student"))

    @property
    def inert(self) -> bool:
        return self.std == 0 and self.bias == 0

    def logits(self, logits: jax.Array, positions: jax.Array, names: Names) -> jax.Array:
        size = logits.shape[1]
        names = names.salted(self.seed)
        if self.std:

            def at(key, position):
                return draw(jax.random.fold_in(key, position), (size,), self.distribution)

            noise = tiles.fence(jax.vmap(at)(names.salted(_LOGITS).streams, positions))
            logits = tiles.fence(logits + tiles.fence(noise * self.std))
        if self.bias:
            shared = draw(jax.random.fold_in(names.key, _TOKENS), (size,), self.distribution)
            shared = tiles.fence(tiles.fence(shared) * self.bias)
            logits = tiles.fence(logits + jnp.broadcast_to(shared, logits.shape))
        return logits


@dataclass(frozen=True)
class LogProbNoise(Entry):
    """Adds noise to the log-probs that are reported; those drawn with are kept as well.

    The added value is s * (std * n + bias), n of standard deviation 1. s is 1 (by "flat"), or one
    minus the token's probability (by "probability": rare tokens differ most), or grows with the
    response position and is 1 at the position `reach` (by "position"). Reported log-probs may be
    above 0.
    """

    std: float = 0.0
    bias: float = 0.0
    by: Literal["flat", "probability", "position"] = "flat"
    reach: int = 100
    distribution: Distribution = "gaussian"
    seed: int = 0

    name, kind = "log_prob_noise", "synthetic"
    imitates = (
        "no system; by probability, the error of a perturbed softmax, which grows as 1 - p (arXiv"
        " 2512.23087)"
    )
    repeatable = True
    only_reports = True

    def __post_init__(self):
        self.need_number("std", least=0.0)
        self.need_number("bias", least=-1e3, most=1e3)
        self.need_choice("by", ("flat", "probability", "position"))
        self.need_number("reach", least=1)
        self.need_number("seed", least=0, most=2**31 - 1)
        self.need_choice("distribution", ("gaussian", "student"))

    @property
    def inert(self) -> bool:
        return self.std == 0 and self.bias == 0

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        recorded = rollout.log_probs
        drawn = recorded if rollout.drawn_log_probs is None else rollout.drawn_log_probs
        error = jnp.full(recorded.shape, self.bias, jnp.float32)
        if self.std:
            error = tiles.fence(error + tiles.fence(self._noise(recorded.shape[1], names)))
        error = tiles.fence(error * tiles.fence(self._scale(drawn)))
        noisy = jnp.where(rollout.mask, tiles.fence(recorded + error), 0.0)
        return replace(rollout, log_probs=noisy, drawn_log_probs=drawn)

    def _noise(self, length: int, names: Names) -> jax.Array:
        def at(key, position):
            return draw(jax.random.fold_in(key, position), (), self.distribution)

        keys = names.salted(self.seed).salted(_LOG_PROBS).streams
        each = jax.vmap(jax.vmap(at, in_axes=(None, 0)), in_axes=(0, None))
        return tiles.fence(each(keys, jnp.arange(length))) * self.std

    def _scale(self, drawn: jax.Array) -> jax.Array:
        if self.by == "probability":
            return 1.0 - tiles.fence(strict.exp(tiles.fence(jnp.minimum(drawn, 0.0))))
        if self.by == "position":
            position = jnp.arange(1, drawn.shape[1] + 1, dtype=jnp.float32) * (1.0 / self.reach)
            return jnp.broadcast_to(position[None, :], drawn.shape)
        return jnp.ones(drawn.shape, jnp.float32)


def draw(key: jax.Array, shape: tuple[int, ...], distribution: Distribution) -> jax.Array:
    """float32 numbers of mean 0 and standard deviation 1.

    "student" is Student's t with 4 degrees of freedom, scaled: its fourth moment is infinite. It is
    n / sqrt(c / 4) of a normal n and c = -2 (ln u + ln v), chi-squared with 4 degrees of freedom,
    over its standard deviation, sqrt 2. By strict functions, the root's reciprocal too (XLA makes
    x / sqrt(y) its own rsqrt): XLA's own would make a number depend on how many are drawn with it.
    """
    first, second, third = jax.random.split(key, 3)
    normal = strict.normal_quantile(tiles.fence(_uniform(first, shape)))
    if distribution == "gaussian":
        return normal
    parts = [strict.log(tiles.fence(_uniform(k, shape))) for k in (second, third)]
    return tiles.fence(normal) * strict.inverse_root(-tiles.fence(sum(parts)))


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Odd multiples of 2^-24 in (0, 1), computed without rounding."""
    bits = jax.random.bits(key, shape, jnp.uint32) >> 9
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-23
