"""What, how, from which distribution and where: one value that sampler and learner share.

Two executions that are equal give every token the same log-prob bits; the fields in which two of
them differ describe an experiment with mismatch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

import jax

from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import changes, shown
from tim_jax.model import adapters, parameters
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import Params, Weights
from tim_jax.numerics import Numerics
from tim_jax.placement import SINGLE, Placement

_COLDEST = 1e-30  # below, logits over the temperature are not finite in float32
_MAPPINGS = 30_000
_LEAN_ON_CPU = {
    "xla_disable_hlo_passes": (
        "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    ),
}


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from, and when a response ends.

    Order of operations: logits / temperature, then top-k, then top-p of what top-k left, then
    renormalisation. Recorded log-probs are those of this final distribution.
    """

    max_tokens: int = 64
    temperature: float = 1.0  # 0 means greedy: argmax, log-prob 0
    top_k: int = 0  # 0 means off
    top_p: float = 1.0  # 1 means off
    stop_tokens: tuple[int, ...] = ()

    __repr__ = changes

    def __post_init__(self):
        for name, kind in (
            ("max_tokens", Integral),
            ("temperature", Real),
            ("top_k", Integral),
            ("top_p", Real),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                what = "a whole number" if kind is Integral else "a number"
                raise InputError(f"Sampling: {name} must be {what}, got {value!r}")
        if self.max_tokens < 1:
            raise InputError(f"Sampling: max_tokens must be positive, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise InputError(
                f"Sampling: temperature must be >= 0 and finite, got {self.temperature}"
            )
        if 0 < self.temperature < _COLDEST:
            raise InputError(
                f"Sampling: temperature must be 0, or at least {_COLDEST:g}, got {self.temperature}"
            )
        if self.top_k < 0:
            raise InputError(f"Sampling: top_k must be >= 0 (0 is off), got {self.top_k}")
        stops = self.stop_tokens
        if not isinstance(stops, tuple) or not all(isinstance(stop, Integral) for stop in stops):
            raise InputError(
                "Sampling: stop_tokens must be a tuple of token ids, such as (7,), got"
                f" {shown(stops)}"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"Sampling: top_p must be in (0, 1] (1 is off), got {self.top_p}")

    @property
    def truncated(self) -> bool:
        """True if top-k or top-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1


# Which experts of a mixture the learner takes: its own; its own, and they are compared with the
# sampler's, which are recorded; or the sampler's (rollout routing replay, R3, arXiv 2510.11370).
Routing = Literal["own", "compared", "replayed"]


class Edit(Protocol):
    """Another form of the compute weights, such as quantised ones; a value that can be hashed."""

    def weights(self, weights: Weights) -> Weights:
        """The weights in that form."""
        ...


@dataclass(frozen=True)
class Execution:
    """Everything that turns weights into tokens and log-probs, but for the weights."""

    config: ModelConfig  # what is computed
    numerics: Numerics  # how numbers are computed
    sampling: Sampling = Sampling()  # the distribution that tokens are drawn from
    placement: Placement = SINGLE  # where
    # What becomes of the weights before anything is computed with them, in sampler and learner. The
    # gradient passes through as if nothing had (straight-through).
    edits: tuple[Edit, ...] = ()
    lora: Lora | None = None  # the adapters that are trained in place of all weights, if so
    routing: Routing = "own"

    __repr__ = changes

    def __post_init__(self):
        check_choice("learner: routing", self.routing, get_args(Routing))
        if self.routing != "own" and not self.config.num_experts:
            raise InputError(
                f"learner: routing = {self.routing!r} needs a mixture of experts, and a"
                f" {self.config.model_type} model has none; leave it out"
            )
        if self.sampling.top_k > self.config.vocab_size:
            raise InputError(
                f"Sampling: top_k must be at most the vocabulary's {self.config.vocab_size} tokens"
                f" (0 is off), got {self.sampling.top_k}"
            )

    def prepare(self, params: Params) -> Weights:
        """Compute weights of the master weights, edited; see `parameters.prepare`.

        Adapters among the parameters are merged first, by the rule of `adapters`.
        """
        if self.lora is not None and adapters.of(params) is not None:
            params = adapters.merged(
                params, config=self.config, lora=self.lora, numerics=self.numerics
            )
        weights = parameters.prepare(params, config=self.config, numerics=self.numerics)
        for edit in self.edits:
            weights = edit.weights(weights)
        return weights


def check_compiler_options(options: Mapping[str, str | bool | int]) -> None:
    """Compiles next to nothing with XLA's options, so that a wrong one is said at once.

    Raises:
      InputError: XLA does not know an option on this platform, or its value has another type.
    """
    for name, value in options.items():
        try:
            jax.jit(lambda x: x, compiler_options={name: value}).lower(0).compile()
        except Exception as error:  # jaxlib raises several kinds
            reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")
            raise InputError(
                f"numerics.compiler_options: {name} = {shown(value)}: XLA on"
                f" {jax.default_backend()} refuses it: {reason[:200]}"
            ) from None


@dataclass(frozen=True)
class Batching:
    """How a rollout's sequences are decoded together; changes no bit."""

    slots: int | None = None  # sequences decoded at a time, which bounds memory; None: all
    # How often the slots become half as many, once the queue is empty and no more than half of them
    # work. Each compiles the decode step once more.
    halvings: int = 0
    # Pages of `numerics.kv_block` positions for the keys and values of responses; None: every slot
    # has room for the longest response.
    pages: int | None = None

    __repr__ = changes

    def __post_init__(self):
        for name, least in (("slots", 1), ("halvings", 0), ("pages", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"sampler: {name} must be at least {least}, got {value}")

    def of_device(self, where: Placement) -> "Batching":
        """The part of each device that rows are split over; all have as many slots and pages.

        Raises:
          InputError: they do not divide.
        """
        parts, shards = {}, where.shards
        for name in ("slots", "pages"):
            value = getattr(self, name)
            if value is not None and value % shards:
                raise InputError(
                    f"sampler: {name} = {value} must be a multiple of {where.shards_text}, so that"
                    " every device has as many"
                )
            parts[name] = value and value // shards
        return replace(self, **parts)

    def rounded(self, shards: int) -> "Batching":
        """With as many more slots and pages that every one of `shards` devices has as many."""
        parts = {name: getattr(self, name) for name in ("slots", "pages")}
        return replace(self, **{name: n and n + -n % shards for name, n in parts.items()})


ALL_AT_ONCE = Batching()


def jit(function: Callable, numerics: Numerics, **options: Any) -> Callable:
    """`jax.jit(function, **options)`; XLA's own options are part of how numbers are computed.

    An option that this version of XLA does not know is refused by XLA, by name, when it compiles.
    """
    return jax.jit(function, compiler_options=dict(numerics.compiler_options) or None, **options)


def forget_programs() -> None:
    """Forgets all compiled programs once they hold 30,000 memory mappings of the process.

    Linux allows a process 65,530, and a compilation that gets no more crashes it. A program of a
    CPU takes hundreds. For loops over many programs, none of which comes again.
    """
    try:
        with open("/proc/self/maps", "rb") as file:
            mappings = sum(1 for _ in file)
    except OSError:  # no Linux
        return
    if mappings > _MAPPINGS:
        jax.clear_caches()


def lean(numerics: Numerics) -> Numerics:
    """The same numerics, compiled for less memory: an update is the program that needs most of it.

    On a CPU, XLA widens bfloat16 factors of products to float32, and would do so before the loops
    over micro-batches and layers: a copy of all weights, of twice their size. Barriers do not keep
    it from that, as it removes them earlier.
    """
    if jax.default_backend() != "cpu":
        return numerics
    return numerics.with_options(_LEAN_ON_CPU)
