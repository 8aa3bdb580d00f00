"""Ceilings of this device, then decoding, updates and whole GRPO steps against them.

Each side is a case of its own, and the most important come first: time may run out.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import bench_common as common
import jax
import jax.numpy as jnp
import profiles
from records import Case
from setting import Setting, normal, once, parameters, seconds
from whole import Amount, Whole, placed

_SHORT = 16  # new tokens of the shorter of two calls, whose difference is decoding alone


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("ceiling: copy", partial(_copies, setting.smoke))
    yield Case("ceiling: bfloat16 matmul", lambda: {"TF/s": matmul_rate(setting.smoke) / 1e12})
    for timed in plan(setting):
        yield Case(timed.name, timed.run)


@dataclass(frozen=True)
class Timed:
    """What is timed of a model on one side."""

    whole: Whole

    @property
    def name(self) -> str:
        raise NotImplementedError

    def run(self) -> dict[str, Any]:
        raise NotImplementedError

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        """The programs that take long to compile: name, and of what they are which."""
        yield from ()

    def with_side(self, side: str) -> "Timed":
        return replace(self, whole=replace(self.whole, side=side))

    @property
    def subject(self) -> str:
        return f"{self.whole.model} {self.whole.side}"


@dataclass(frozen=True)
class Decode(Timed):
    """Prefill of short prompts and decoding, one program."""

    @property
    def name(self) -> str:
        amount = self.whole.amount
        return f"sampler {self.subject}, batch {amount.rows}, {amount.new:,} new tokens"

    def run(self) -> dict[str, Any]:
        amount = self.whole.amount
        first, took = _sampled(self.whole)
        step = took / amount.new
        bound = decode_bound(self.whole, amount.prompt + amount.new / 2)
        return {
            "tokens/s": amount.rows / step,
            "ms/step": step * 1e3,
            "share of memory roofline": bound / step,
            "first call, s": first,
        }

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        yield self.name, self.whole, "sampling"


@dataclass(frozen=True)
class Between(Timed):
    """Decoding after long prompts: the difference of a longer and a shorter call."""

    @property
    def name(self) -> str:
        amount = self.whole.amount
        ends = f"from {amount.prompt:,} to {amount.prompt + amount.new:,} tokens"
        return f"sampler {self.subject}, batch {amount.rows}, {ends}"

    @property
    def _both(self) -> tuple[Whole, Whole]:
        return replace(self.whole, amount=replace(self.whole.amount, new=_SHORT)), self.whole

    def run(self) -> dict[str, Any]:
        amount = self.whole.amount
        (_, less), (first, more) = map(_sampled, self._both)
        step = (more - less) / (amount.new - _SHORT)
        bound = decode_bound(self.whole, amount.prompt + (amount.new + _SHORT) / 2)
        return {
            "tokens/s": amount.rows / step,
            "ms/step": step * 1e3,
            "share of memory roofline": bound / step,
            "first call, s": first,
            "prefill and the first tokens, s": less,
        }

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        for whole in self._both:
            yield f"{self.name}, {whole.amount.new} new tokens", whole, "sampling"


@dataclass(frozen=True)
class Update(Timed):
    """Forward, backward and AdamW. Model operations are 6 per weight and token."""

    @property
    def name(self) -> str:
        amount = self.whole.amount
        length = amount.prompt + amount.new
        return f"learner {self.subject}, {amount.rows} x {length:,} tokens"

    def run(self) -> dict[str, Any]:
        call, amount = _updating(self.whole), self.whole.amount
        first = once(call)
        with common.warm(self.name):
            took = once(call)
        tokens = amount.rows * (amount.prompt + amount.new)
        done = 6 * parameters(self.whole.config) * tokens / took
        return {
            "tokens/s": tokens / took,
            "share of matmul peak": done / matmul_rate(self.whole.setting.smoke),
            "first call, s": first,
        }

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        yield self.name, self.whole, "updating"


@dataclass(frozen=True)
class Step(Timed):
    """Sampling, advantages and an update, with the comparison of all log-probs."""

    @property
    def name(self) -> str:
        amount = self.whole.amount
        size = f"{amount.prompts} x {amount.samples}"
        length = amount.prompt + amount.new
        return f"GRPO step {self.subject}, {size} sequences of {length:,} tokens"

    def run(self) -> dict[str, Any]:
        steps = _steps(self.whole)
        next(steps)
        with common.warm(self.name):
            found = next(steps)
        verdict = {"passed": found["unequal"] == 0 < found["compared"]}
        amount = self.whole.amount
        rate = amount.rows * amount.new / (found["s sampling"] + found["s learning"])
        return {**(verdict if self.whole.side != "native" else {}), "tokens/s": rate, **found}

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        for program in ("sampling", "scoring", "updating"):
            yield f"{self.name}: {program}", self.whole, program


@dataclass(frozen=True)
class Profile(Timed):
    """Kernels of a program, `sampling` or `updating`."""

    program: str

    @property
    def _timed(self) -> Timed:
        return {"sampling": Decode, "updating": Update}[self.program](self.whole)

    @property
    def name(self) -> str:
        return f"profile of {self._timed.name}"

    def run(self) -> dict[str, Any]:
        make = {"sampling": _sampling, "updating": _updating}[self.program]
        return profiles.by_kernel(make(self.whole))

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        return self._timed.compiled()


def plan(setting: Setting) -> Iterator[Timed]:
    """What is timed, by value: of the most important both sides, then exact ones, then native."""
    exact = _small(setting) if setting.smoke else _plan(setting)
    every = [*exact, *(timed.with_side("native") for timed in exact)]
    if not setting.smoke:
        decode, update = exact[0], exact[2]
        every.append(decode.with_side("exact, one tile"))
        if not setting.without_mosaic:
            every += [timed.with_side("exact, Mosaic's products") for timed in (decode, update)]
    yield from {timed.name: timed for timed in every}.values()


def _plan(setting: Setting) -> list[Timed]:
    def exact(model: str, *amount: Any) -> Whole:
        return Whole(setting, model, "exact", Amount(*amount))

    decode, update = Decode(exact("1.7B", 64, 64, 1024)), Update(exact("1.7B", 1, 2048, 2048, 4, 1))
    return [
        decode,
        decode.with_side("native"),
        update,
        update.with_side("native"),
        Step(exact("0.6B", 64, 64, 200, 8, 32)),
        Step(exact("1.7B", 16, 64, 448, 8, 16)),
        Profile(exact("1.7B", 64, 512, 32), "sampling"),
        Profile(exact("1.7B", 1, 2048, 2048, 2, 1), "updating"),
        Decode(exact("1.7B", 256, 64, 1024)),
        Between(exact("1.7B", 64, 3840, 256)),
        Update(exact("1.7B", 1, 512, 512, 16, 4)),
        Decode(exact("4B", 64, 64, 1024)),
        Update(exact("4B", 1, 2048, 2048, 4, 1)),
        Decode(exact("1.7B", 1, 64, 1024)),
        Decode(exact("1.7B", 16, 64, 1024)),
        Decode(exact("0.6B", 64, 64, 1024)),
        Update(exact("0.6B", 1, 2048, 2048, 4, 1)),
        Between(exact("1.7B", 128, 3840, 256)),  # 256 have 120 GB of keys and values
    ]


def _small(setting: Setting) -> list[Timed]:
    """One of each kind; decoding after long prompts by plain XLA alone, which compiles sooner."""

    def exact(*amount: Any) -> Whole:
        return Whole(setting, "1.7B", "exact", Amount(*amount))

    decode, update = Decode(exact(2, 4, 6)), Update(exact(1, 4, 8, 2, 1))
    between = Between(exact(2, 4, _SHORT + 4)).with_side("native")
    profiled = Profile(decode.whole, "sampling"), Profile(update.whole, "updating")
    return [decode, update, Step(exact(1, 4, 6, 4, 4)), *profiled, between]


def _sampling(whole: Whole):
    """A call of the sampler."""
    program = whole.sampling
    given = whole.weights(), whole.prompts(), jax.random.key(2)
    return partial(program.function, *placed(given, program.arguments))


def _sampled(whole: Whole) -> tuple[float, float]:
    """Seconds of a first call of the sampler, and of another."""
    call = _sampling(whole)
    first = once(call)
    with common.warm("a sampler"):
        return first, once(call)


def _updating(whole: Whole):
    """A call of the update, which goes on from the state of the one before."""
    built, program = whole.build(), whole.updating
    state = whole.state(built)
    held = [state, built.prepare(state.params)]
    del state
    last = jnp.int32(0), jnp.float32(whole.amount.new)
    rest = placed((whole.experience(), *last), program.arguments[2:5])

    def call():
        held[:] = program.function(*held, *rest, None)[:2]
        return held

    return call


def _steps(whole: Whole) -> Iterator[dict[str, Any]]:
    """GRPO steps: seconds of each part, and tokens whose log-probs were compared and differ."""
    sampling, scoring, updating = whole.step
    built = whole.build()
    state = whole.state(built)
    weights = built.prepare(state.params)
    rewards = placed(normal(6, whole.amount.rows), scoring.arguments[4])
    last = placed((jnp.int32(0), jnp.float32(whole.amount.new)), updating.arguments[3:5])
    prompts, seeds = whole.prompts(), [jax.random.key(number) for number in range(2)]
    for seed in seeds:
        given = placed((prompts, seed), sampling.arguments[1:])
        start = time.perf_counter()
        rollout = jax.block_until_ready(sampling.function(weights, *given))
        sampled = time.perf_counter()
        batch = scoring.function(weights, None, state.carried, rollout, rewards).experience
        state, weights, report = updating.function(state, weights, batch, *last, None)[:3]
        jax.block_until_ready(weights)
        yield {
            "s sampling": sampled - start,
            "s learning": time.perf_counter() - sampled,
            "unequal": int(report.exactness.unequal),
            "compared": int(report.exactness.compared),
        }


def decode_bound(whole: Whole, context: float) -> float:
    """Seconds that a step must take: weights and cache read once, or the products' operations."""
    config, rows, smoke = whole.config, whole.amount.rows, whole.setting.smoke
    kept = 4 * config.num_layers * config.num_kv_heads * config.head_dim  # bytes, keys and values
    moved = (2 * parameters(config) + rows * context * kept) / max(copy_rates(smoke).values())
    return max(moved, 2 * parameters(config) * rows / matmul_rate(smoke))


def _copies(smoke: bool) -> dict[str, float]:
    rates = {form: rate / 1e12 for form, rate in copy_rates(smoke).items()}
    return {"TB/s": max(rates.values()), **rates}


@cache
def copy_rates(smoke: bool) -> dict[str, float]:
    """Bytes per second, read and written, of large arrays in several forms."""
    count = 2**16 if smoke else 2**29
    x = jnp.zeros((count,), jnp.float32)
    forms = {
        "a copy": (jnp.copy, 8),
        "x + 1, float32": (lambda x: x + 1, 8),
        "x + 1, bfloat16": (lambda x: x + 1, 4),
        "a sum, float32": (jnp.sum, 4),
        "halves added, float32": (lambda x: x[: count // 2] + x[count // 2 :], 6),
    }
    found = {}
    for form, (function, moved) in forms.items():
        given = x.astype(jnp.bfloat16) if "bfloat16" in form else x
        found[form] = moved * count / seconds(partial(jax.jit(function), given))
    return found


@cache
def matmul_rate(smoke: bool) -> float:
    """Operations per second of a large bfloat16 product by XLA, random data."""
    size = 64 if smoke else 8192
    a, b = normal(0, size, size, dtype=jnp.bfloat16), normal(1, size, size, dtype=jnp.bfloat16)
    return 2 * size**3 / seconds(partial(jax.jit(jnp.dot), a, b))
