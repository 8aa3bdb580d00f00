"""Entries that make the mistakes of real stacks: in what is reported, not in what is computed."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from tim_jax import policy
from tim_jax.mismatch.base import Entry, Names, Setting
from tim_jax.numerics import Numerics
from tim_jax.policy import Sampling
from tim_jax.types import Rollout

_DROPS = 0x0E5D  # names the random numbers of `DroppedEnd`


@dataclass(frozen=True)
class RawLogProbs(Entry):
    """Reports log-probs of the raw logits, though drawn under temperature, top-k and top-p."""

    name: ClassVar[str] = "raw_log_probs"
    imitates: ClassVar[str] = (
        "vLLM's logprobs_mode raw_logprobs, its default (TRL issue 4159: ratios near 2 at"
        " temperature 0.6)"
    )
    reports: ClassVar[bool] = True

    def reported(
        self, logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
    ) -> jax.Array:
        raw = replace(sampling, temperature=1.0, top_k=0, top_p=1.0)
        return policy.log_prob(logits, tokens, sampling=raw, numerics=numerics)


@dataclass(frozen=True)
class IgnoredTruncation(Entry):
    """Reports log-probs under the temperature, not renormalised over what top-k and top-p keep.

    They are too small by minus the log of the kept mass.
    """

    name: ClassVar[str] = "ignored_truncation"
    imitates: ClassVar[str] = (
        "log-probs over the whole vocabulary of tokens drawn from a truncated one (vLLM RFC 42259:"
        " a mean ratio of 0.896 at top_p 0.8)"
    )
    reports: ClassVar[bool] = True

    def reported(
        self, logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
    ) -> jax.Array:
        whole = replace(sampling, top_k=0, top_p=1.0)
        return policy.log_prob(logits, tokens, sampling=whole, numerics=numerics)


@dataclass(frozen=True)
class DroppedEnd(Entry):
    """The token that ended a response is lost, in this share of the responses that ended.

    Without a replacement the response is a token shorter. With one, that token stands where the
    end token stood, under the end token's log-prob.
    """

    share: float = 1.0
    replacement: int | None = None

    name: ClassVar[str] = "dropped_end"
    imitates: ClassVar[str] = (
        "engines that strip the end token from what they return, after which the trainer scores"
        " another in its place (tunix: differences above 30 nats)"
    )

    def __post_init__(self):
        self.need_number("share", least=0.0, most=1.0)
        if self.replacement is not None:
            self.need_number("replacement", least=0)

    @property
    def inert(self) -> bool:
        return self.share == 0

    def check(self, setting: Setting) -> None:
        size = setting.config.vocab_size
        if self.replacement is not None and self.replacement >= size:
            raise self.refuse(
                f"replacement = {self.replacement} is outside the model's vocabulary of {size}"
            )
        if not setting.sampling.stop_tokens:
            raise self.refuse("no token ends a response here; set sampling.stop_tokens")

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        chance = jax.vmap(jax.random.uniform)(names.keys(_DROPS))
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

    name: ClassVar[str] = "pad_mask"
    imitates: ClassVar[str] = (
        "masks made as `token != pad`; where the pad token is the end token, responses then have"
        " no end"
    )

    def __post_init__(self):
        self.need_number("pad", least=0)

    def check(self, setting: Setting) -> None:
        if self.pad >= setting.config.vocab_size:
            raise self.refuse(
                f"pad = {self.pad} is outside the model's vocabulary of {setting.config.vocab_size}"
            )

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        del names
        return replace(rollout, hidden=rollout.responses == self.pad)
