"""Ceilings of this device, then decoding, updates and whole GRPO steps against them.

Each side is a case of its own, and the most important come first: time may run out.
"""

import time
from collections.abc import Callable, Iterator
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

SHORT = 16  # new tokens of the shorter of two calls, whose difference is decoding alone
_FIRST = "first call, s"


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("ceiling: copy", partial(_copies, setting.smoke))
    yield Case("ceiling: bfloat16 matmul", lambda: {"TF/s": matmul_rate(setting.smoke) / 1e12})
    for timed in plan(setting):
        yield Case(timed.name, timed.run)


def programs(setting: Setting) -> Iterator[Case]:
    """Compiles the exact whole programs, in the order in which they are timed, into the cache.

    Native ones are not among them: XLA chooses their kernels by time, and must be alone for it.
    """
    seen = set()
    for timed in plan(setting):
        for name, whole, program in timed.compiled():
            if whole.side != "native" and (whole, program) not in seen:
                seen.add((whole, program))
                yield Case(f"compile {name}", partial(_compile, whole, program))


def _compile(whole: Whole, program: str) -> dict[str, Any]:
    made = getattr(whole, program)
    made.function.lower(*made.arguments).compile()
    return {}


@dataclass(frozen=True)
class Kind:
    """What is timed of a model on one side."""

    title: Callable[[Whole], str]
    run: Callable[[Whole], dict[str, Any]]
    # What takes long to compile: further words of a name, and of what it is which program.
    programs: Callable[[Whole], list[tuple[str, Whole, str]]]


@dataclass(frozen=True)
class Timed:
    """A case: a kind, and of what model, side and amount."""

    kind: Kind
    whole: Whole

    @property
    def name(self) -> str:
        return self.kind.title(self.whole)

    def run(self) -> dict[str, Any]:
        return self.kind.run(self.whole)

    def compiled(self) -> Iterator[tuple[str, Whole, str]]:
        """The programs that take long to compile: name, and of what they are which."""
        for more, whole, program in self.kind.programs(self.whole):
            yield f"{self.name}{more}", whole, program

    def with_side(self, side: str) -> "Timed":
        return replace(self, whole=replace(self.whole, side=side))


def _subject(whole: Whole) -> str:
    return f"{whole.model} {whole.side}"


def _decode_title(whole: Whole) -> str:
    return f"sampler {_subject(whole)}, batch {whole.amount.rows}, {whole.amount.new:,} new tokens"


def _decode(whole: Whole) -> dict[str, Any]:
    """Prefill of short prompts and decoding, one program."""
    amount = whole.amount
    first, took = _sampled(whole)
    return {**_of_step(whole, took / amount.new, amount.prompt + amount.new / 2), _FIRST: first}


def _of_step(whole: Whole, step: float, context: float) -> dict[str, float]:
    return {
        "tokens/s": whole.amount.rows / step,
        "ms/step": step * 1e3,
        "share of memory roofline": decode_bound(whole, context) / step,
    }


def _between_title(whole: Whole) -> str:
    amount = whole.amount
    ends = f"from {amount.prompt:,} to {amount.prompt + amount.new:,} tokens"
    return f"sampler {_subject(whole)}, batch {amount.rows}, {ends}"


def _between(whole: Whole) -> dict[str, Any]:
    """Decoding after long prompts: the difference of a longer and a shorter call."""
    amount = whole.amount
    (_, less), (first, more) = map(_sampled, (_shorter(whole), whole))
    step = (more - less) / (amount.new - SHORT)
    values = _of_step(whole, step, amount.prompt + (amount.new + SHORT) / 2)
    return {**values, _FIRST: first, "prefill and the first tokens, s": less}


def _shorter(whole: Whole) -> Whole:
    return replace(whole, amount=replace(whole.amount, new=SHORT))


def _update_title(whole: Whole) -> str:
    amount = whole.amount
    size = f"{amount.prompt:,} + {amount.new:,}"
    return f"learner {_subject(whole)}, {amount.rows} sequences of {size} tokens"


def _update(whole: Whole) -> dict[str, Any]:
    """Forward, backward and AdamW. Model operations are 6 per weight and token."""
    call, amount = _updating(whole), whole.amount
    first = once(call)
    with common.warm(_update_title(whole)):
        took = once(call)
    tokens = amount.rows * (amount.prompt + amount.new)
    done = 6 * parameters(whole.config) * tokens / took
    share = done / matmul_rate(whole.setting.smoke)
    return {"tokens/s": tokens / took, "share of matmul peak": share, _FIRST: first}


def _step_title(whole: Whole) -> str:
    amount = whole.amount
    size = f"{amount.prompts} x {amount.samples}"
    return f"GRPO step {_subject(whole)}, {size} sequences of {amount.prompt + amount.new:,} tokens"


def _step(whole: Whole) -> dict[str, Any]:
    """Sampling, advantages and an update, with the comparison of all log-probs."""
    steps, amount = _steps(whole), whole.amount
    next(steps)
    with common.warm(_step_title(whole)):
        found = next(steps)
    verdict = {"passed": found["unequal"] == 0 < found["compared"]}
    rate = amount.rows * amount.new / (found["s sampling"] + found["s learning"])
    return {**(verdict if whole.side != "native" else {}), "tokens/s": rate, **found}


DECODE = Kind(_decode_title, _decode, lambda whole: [("", whole, "sampling")])
BETWEEN = Kind(
    _between_title,
    _between,
    lambda whole: [
        (f", {one.amount.new} new tokens", one, "sampling") for one in (_shorter(whole), whole)
    ],
)
UPDATE = Kind(_update_title, _update, lambda whole: [("", whole, "updating")])
STEP = Kind(
    _step_title,
    _step,
    lambda whole: [(f": {name}", whole, name) for name in ("sampling", "scoring", "updating")],
)


def _profile(kind: Kind, make: Callable[[Whole], Callable]) -> Kind:
    """Kernels of the one program of a kind."""

    def title(whole: Whole) -> str:
        return f"profile of {kind.title(whole)}"

    return replace(kind, title=title, run=lambda whole: profiles.by_kernel(make(whole)))


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
    def exact(kind: Kind, model: str, *amount: Any) -> Timed:
        return Timed(kind, Whole(setting, model, "exact", Amount(*amount)))

    decode, update = exact(DECODE, "1.7B", 64, 64, 1024), exact(UPDATE, "1.7B", 1, 2048, 2048, 4, 1)
    return [
        decode,
        decode.with_side("native"),
        update,
        update.with_side("native"),
        exact(STEP, "0.6B", 64, 64, 200, 8, 32),
        exact(STEP, "1.7B", 16, 64, 448, 8, 16),
        exact(_profile(DECODE, _sampling), "1.7B", 64, 512, 32),
        exact(_profile(UPDATE, _updating), "1.7B", 1, 2048, 2048, 2, 1),
        exact(DECODE, "1.7B", 256, 64, 1024),
        exact(BETWEEN, "1.7B", 64, 3840, 256),
        exact(UPDATE, "1.7B", 1, 512, 512, 16, 4),
        exact(DECODE, "4B", 64, 64, 1024),
        exact(UPDATE, "4B", 1, 2048, 2048, 4, 1),
        exact(DECODE, "1.7B", 1, 64, 1024),
        exact(DECODE, "1.7B", 16, 64, 1024),
        exact(DECODE, "0.6B", 64, 64, 1024),
        exact(UPDATE, "0.6B", 1, 2048, 2048, 4, 1),
        exact(BETWEEN, "1.7B", 128, 3840, 256),  # 256 have 120 GB of keys and values
    ]


def _small(setting: Setting) -> list[Timed]:
    """One of each kind, all of a step's programs, so that there are three of them to compile.

    Decoding after long prompts is by plain XLA alone, which compiles sooner.
    """

    def exact(kind: Kind, *amount: Any) -> Timed:
        return Timed(kind, Whole(setting, "1.7B", "exact", Amount(*amount)))

    step = exact(STEP, 1, 4, 6, 4, 2)
    kinds = DECODE, UPDATE, STEP, _profile(DECODE, _sampling), _profile(UPDATE, _updating)
    between = exact(BETWEEN, 2, 4, SHORT + 4).with_side("native")
    return [*(replace(step, kind=kind) for kind in kinds), between]


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
