"""The sampler, prompts -> `Rollout`: prefill once per prompt, then slots that decode a queue.

A step's sequences are all known before it begins, so their queue lies on the device. S slots decode
S sequences together; when one ends, its slot takes the next of the queue, inside the same program.
A sequence's bits depend neither on its slot, nor on what is decoded beside it, nor on when it is
drawn: its random numbers are keyed by its name, and the forward's bits do not depend on the batch.

A response may also be drawn in parts, each by other weights (`prompts_so_far`, `join_parts`). A
part's keys and values are all made by the weights that draw it, of every token before it too, as in
AReaL (arXiv 2505.24298). So its log-probs are those of a forward over the whole sequence, to the
bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax.common.types import Prompts, Rollout, route_dtype
from tim_jax.model import parameters, transformer
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, Sampling
from tim_jax.model.weights import Weights, weight_axes
from tim_jax.placement import Placement, collectives
from tim_jax.policy import distribution
from tim_jax.policy import slots as slotting
from tim_jax.policy.slots import Pool, Queue, Results, Slots

# (logits f32[B, V], uniform f32[B], positions i32[B] in the responses, sequences i32[B]) -> tokens
# i32[B], the log-probs f32[B] to record, and those that the tokens were drawn with where they are
# others, else None. `sequences` are rows of the rollout.
Draw = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]
]

STEPS = 32  # tokens that a slot draws before they are stored among the results


@struct.dataclass
class Begun:
    """Responses of which some tokens were drawn before."""

    tokens: int = struct.field(pytree_node=False)  # of every response that is not over
    over: jax.Array  # bool[N], responses to which nothing is added; what is drawn here is no use


def sample(
    weights: Weights,
    prompts: Prompts,
    key: jax.Array,
    *,
    execution: Execution,
    samples: int,
    batching: Batching = ALL_AT_ONCE,
    first: jax.Array | None = None,
    order: jax.Array | None = None,
    draw: Draw | None = None,
    begun: Begun | None = None,
) -> Rollout:
    """Draws `samples` responses to each prompt; rows are prompts major.

    Row p * samples + s uses only random numbers keyed by (key, prompts.ids[p], s, position), so a
    response does not depend on the batch it was drawn in. `key` carries seed and step.

    Args:
      weights: compute weights, from `parameters.prepare`.
      prompts: P prompts, padded to Tp tokens.
      execution: with a placement of more than one device this runs inside `shard_map`, on this
        device's parts of weights and prompts, see `transformer.forward`.
      batching: on this device.
      first: i32[] or i32[P], number of each group's first sample here, where a group is split over
        devices or its samples have prompts of their own.
      order: i32[N], the order in which the rows are given to slots; None: ascending.
      draw: in place of `distribution.draw`, for a sampler that differs on purpose.
      begun: the prompts end with tokens that were drawn before, and the responses go on from there;
        `log_probs` and `lengths` are of what is drawn here.

    `batching` and `order` change no bit.

    Raises:
      InputError: the pages do not hold one sequence.
    """
    count = prompts.tokens.shape[0] * samples
    numerics, limit = execution.numerics, execution.sampling.max_tokens
    weights = whole_weights(weights, execution)
    streams = _streams(key, prompts.ids, samples, first)
    decoding = Decoding.of(execution, streams, draw=draw, begun=begun)
    width = min(batching.slots or count, count)
    cache, results = decoding.prefill(weights, prompts, samples=samples, at_a_time=width)
    starts = jnp.repeat(prompts.lengths, samples)
    if limit > 1:
        pool = None
        if batching.pages:
            blocks = -(-prompts.tokens.shape[1] // numerics.kv_block)
            own = prompts.tokens.shape[0] * blocks
            pool = Pool(own, blocks, batching.pages, numerics.kv_block)
        order = jnp.arange(count, dtype=jnp.int32) if order is None else order
        queue = Queue(
            order=order,
            waiting=~results.ended[order],  # some may be over after one token
            prompt_lengths=starts,
            prompts=cache,
            samples=samples,
            longest=limit,
            pool=pool,
        )
        slots = slotting.empty(queue, width, numerics=numerics)
        state = _State(slots, results, queue.waiting)
        unstacked = by_layer(weights, execution)
        for narrower in [*widths(width, batching.halvings), 0]:
            state = decoding.run(unstacked, queue, state, until=narrower)
            if narrower:
                state = replace(state, slots=slotting.narrow(state.slots, narrower))
        results = state.results
    return Rollout(
        prompts=jnp.repeat(prompts.tokens, samples, axis=0),
        prompt_lengths=starts,
        responses=results.tokens,
        lengths=results.lengths,
        log_probs=results.log_probs,
        finished=results.ended,
        drawn_log_probs=results.drawn,
        routes=results.routes,
    )


def in_loop(execution: Execution) -> tuple[Execution, Placement]:
    """The execution with a decode loop's weights, and the placement of what steps together."""
    placement = execution.placement
    if placement.decode == "sharded" and placement.shards > 1:
        return execution, placement
    return replace(execution, placement=placement.gathered), Placement(expert=placement.expert)


def whole_weights(weights: Weights, execution: Execution) -> Weights:
    """The weights of a decode loop: gathered over fsdp unless they stay sharded, norms whole."""
    inside, _ = in_loop(execution)
    if inside.placement != execution.placement:
        axes = weight_axes(execution.config, execution.numerics)
        weights = collectives.gather_fsdp(weights, axes, execution.placement)
    return transformer.whole_norms(weights, execution=inside)


def by_layer(weights: Weights, execution: Execution) -> Weights:
    """`whole_weights` as a decode step takes them: by layer, the head cut as `numerics` says."""
    columns = execution.numerics.of_head.decode_head_columns
    return parameters.unstacked(weights, head_columns=columns)


def widths(slots: int, halvings: int) -> list[int]:
    """Numbers of slots after each halving."""
    most = min(halvings, slots.bit_length() - 1)
    return [slots >> halving for halving in range(1, most + 1)]


def trips(sequences: int, sampling: Sampling, batching: Batching) -> tuple[int, ...]:
    """Most iterations of a device's loops, if every response is the longest.

    In the order of the program, each loop before those inside it: the searches of the first draw;
    runs of steps, prompts copied into slots before a run, steps of a run, and the searches of its
    draw; then the same for the slots after each halving.
    """
    limit, searches = sampling.max_tokens, distribution.search_trips(sampling)
    if limit == 1:
        return searches
    runs = -(-(limit - 1) // STEPS)
    slots = min(batching.slots or sequences, sequences)
    rounds = -(-sequences // slots)
    whole = runs * rounds, -(-sequences // (runs * rounds)), -(-(limit - 1) // runs)
    narrowed = (0, 0, 0, *searches) * len(widths(slots, batching.halvings))
    return (*searches, *whole, *searches, *narrowed)


def draw_exactly(logits, uniform, positions, sequences, *, sampling, numerics):
    """The `Draw` of a sampler that differs in nothing."""
    del positions, sequences
    return (*distribution.draw(logits, uniform, sampling=sampling, numerics=numerics), None)


@struct.dataclass
class _State:
    """Between two runs of steps."""

    slots: Slots
    results: Results
    waiting: jax.Array  # bool[N], places of the queue


@struct.dataclass
class Steps:
    """Within a run of steps."""

    count: jax.Array  # i32[]
    slots: Slots
    tokens: jax.Array  # i32[STEPS, S]
    log_probs: jax.Array  # f32[STEPS, S]
    drawn: jax.Array | None  # f32[STEPS, S]
    routes: jax.Array | None  # [STEPS, S, L, k], of the tokens that went in


@dataclass(frozen=True)
class Decoding:
    """What prefill and all decode steps share."""

    execution: Execution
    rows: Placement  # whose devices step together
    streams: jax.Array  # PRNG keys [N] of the sequences
    draw: Draw
    begun: Begun
    stops: jax.Array  # i32[n]

    @classmethod
    def of(
        cls,
        execution: Execution,
        streams: jax.Array,
        *,
        draw: Draw | None = None,
        begun: Begun | None = None,
    ) -> "Decoding":
        """By the weights of `whole_weights`; `draw` and `begun` as in `sample`."""
        plain = partial(draw_exactly, sampling=execution.sampling, numerics=execution.numerics)
        inside, rows = in_loop(execution)
        begun = begun or Begun(0, jnp.zeros(streams.shape, bool))
        stops = jnp.asarray(execution.sampling.stop_tokens, jnp.int32)
        return cls(inside, rows, streams, draw or plain, begun, stops)

    def prefill(
        self, weights: Weights, prompts: Prompts, *, samples: int, at_a_time: int
    ) -> tuple[transformer.LayerCache, Results]:
        """The prompts' cache, in chunks [P / k, L, k, ...], and every sequence's first token.

        A chunk has as many prompts as give `at_a_time` sequences, or fewer, but at least one.
        """
        count, length = prompts.tokens.shape
        most = min(at_a_time // samples, count)
        chunk = next((size for size in range(most, 0, -1) if count % size == 0), 1)

        def one(part):
            tokens, lengths, sequences = part
            positions = jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape)
            hidden, cache, routed = transformer.forward(
                weights, tokens, positions, execution=self.execution
            )
            last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
            logits = transformer.logits(weights, last, execution=self.execution)
            beginning = jnp.full(sequences.shape, self.begun.tokens, jnp.int32)
            uniform = jax.vmap(_uniform)(self.streams[sequences], beginning)
            drawn = self.draw(jnp.repeat(logits, samples, axis=0), uniform, beginning, sequences)
            return cache, drawn, self._recorded(routed)

        sequences = jnp.arange(count * samples, dtype=jnp.int32)
        parts = prompts.tokens, prompts.lengths, sequences
        parts = jax.tree.map(lambda x: x.reshape(count // chunk, -1, *x.shape[1:]), parts)
        if chunk == count:
            made = jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], parts)))
        else:
            made = jax.lax.map(one, parts)
        cache, drawn, routes = made
        first = self._first(*jax.tree.map(lambda x: x.reshape(-1), drawn))
        if routes is None:  # they are not asked for
            return cache, first
        routes = jnp.repeat(routes.reshape(count, length, *routes.shape[3:]), samples, axis=0)
        limit = self.execution.sampling.max_tokens
        return cache, replace(first, routes=jnp.pad(routes, ((0, 0), (0, limit), (0, 0), (0, 0))))

    def _recorded(self, routed: transformer.Routed | None) -> jax.Array | None:
        """The experts [B, T, L, k] as a rollout has them."""
        dtype = route_dtype(self.execution.config.num_experts)
        return None if routed is None else routed.experts.astype(dtype)

    def _first(self, tokens, log_probs, drawn) -> Results:
        """Results of one token each."""
        limit = self.execution.sampling.max_tokens

        def wide(x: jax.Array) -> jax.Array:
            return jnp.pad(x[:, None], ((0, 0), (0, limit - 1)))

        ended = jnp.any(tokens[:, None] == self.stops[None, :], axis=1)
        return Results(
            tokens=wide(tokens),
            log_probs=wide(log_probs),
            lengths=jnp.ones(tokens.shape, jnp.int32),
            ended=ended | self.begun.over,
            drawn=None if drawn is None else wide(drawn),
            routes=None,
        )

    def run(self, weights: Weights, queue: Queue, state: _State, *, until: int) -> _State:
        """Decodes until the queue is empty and no more than `until` slots work."""
        limit = self.execution.sampling.max_tokens

        def busy(slots: Slots, some_wait: jax.Array) -> jax.Array:
            return some_wait | (jnp.sum(slots.working) > until)

        def unfinished(state: _State) -> jax.Array:
            return collectives.any_row(busy(state.slots, jnp.any(state.waiting)), self.rows)

        def steps(state: _State) -> _State:
            slots, waiting = slotting.refill(
                state.slots, state.waiting, queue, state.results, steps=STEPS
            )
            some_wait = jnp.any(waiting)
            starts, uniforms = queue.prompt_lengths[slots.sequences], self.uniforms(slots)

            def going_on(now: Steps) -> jax.Array:
                # A slot that falls idle while sequences wait ends the run for all of `rows`.
                free = some_wait & jnp.any(slots.working & ~now.slots.working)
                flags = jnp.stack([busy(now.slots, some_wait), free])
                some_busy, some_free = collectives.any_row(flags, self.rows)
                return (now.count < STEPS) & some_busy & ~some_free

            recorded = state.results
            begin = begin_steps(slots, recorded.drawn is not None, recorded.routes)
            step = partial(self.step, weights, starts, uniforms, limit)
            end = jax.lax.while_loop(going_on, step, begin)
            names = "tokens", "log_probs", "drawn", "routes"
            found = {name: getattr(end, name) for name in names}
            results = slotting.store(recorded, slots, end.slots, starts=starts, **found)
            return _State(end.slots, results, waiting)

        return jax.lax.while_loop(unfinished, steps, state)

    def step(
        self, weights: Weights, starts, uniforms, limits: int | jax.Array, now: Steps
    ) -> Steps:
        """Runs the forward on the newest token of every slot, and draws the next.

        `starts` i32[S] are lengths of prompts, `limits` the lengths at which responses are cut.
        A slot that does not work is computed all the same: nothing of it is stored, its writes to
        the cache stay in its own row, and no other row sees them.
        """
        weights = tied(weights, now.count, self.execution)
        slots = now.slots
        cache = slotting.readable_cache(slots)
        positions = jnp.minimum(starts + slots.lengths - 1, cache[0].span - 1)
        forward: Any = partial(transformer.forward, execution=self.execution)
        hidden, cache, routed = forward(weights, slots.newest[:, None], positions[:, None], cache)
        routes = self._recorded(routed)
        logits = transformer.logits(weights, hidden[:, 0], execution=self.execution)
        tokens, log_probs, drawn_with = self.draw(
            logits, uniforms[now.count], self.begun.tokens + slots.lengths, slots.sequences
        )

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[now.count].set(new)

        return Steps(
            count=now.count + 1,
            slots=slotting.advance(slots, cache, tokens, self.stops, limits),
            tokens=put(now.tokens, tokens),
            log_probs=put(now.log_probs, log_probs),
            drawn=None if now.drawn is None or drawn_with is None else put(now.drawn, drawn_with),
            routes=None if now.routes is None or routes is None else put(now.routes, routes[:, 0]),
        )

    def uniforms(self, slots: Slots) -> jax.Array:
        """f32[STEPS, S], the random numbers of the slots' next tokens."""
        positions = self.begun.tokens + slots.lengths[None, :] + jnp.arange(STEPS)[:, None]
        of_slots = jax.vmap(_uniform)
        return jax.vmap(of_slots, in_axes=(None, 0))(self.streams[slots.sequences], positions)


def tied(weights: Weights, count: jax.Array, execution: Execution) -> Weights:
    """The weights, tied to a step's number i32[].

    Else XLA could gather sharded ones before a loop and keep them.
    """
    if execution.placement.fsdp == 1:
        return weights
    return jax.lax.optimization_barrier((weights, count))[0]


def begin_steps(slots: Slots, reports: bool, routes: jax.Array | None) -> Steps:
    """Nothing drawn yet; `reports` if other log-probs are recorded than tokens are drawn with."""
    shape = (STEPS, slots.working.shape[0])
    return Steps(
        count=jnp.int32(0),
        slots=slots,
        tokens=jnp.zeros(shape, jnp.int32),
        log_probs=jnp.zeros(shape, jnp.float32),
        drawn=jnp.zeros(shape, jnp.float32) if reports else None,
        routes=None if routes is None else jnp.zeros((*shape, *routes.shape[2:]), routes.dtype),
    )


def _uniform(stream: jax.Array, position: jax.Array) -> jax.Array:
    """f32[] in [0, 1), the random number of a sequence's position."""
    return jax.random.uniform(jax.random.fold_in(stream, position))


def _streams(key: jax.Array, ids: jax.Array, samples: int, first: jax.Array | None) -> jax.Array:
    """PRNG keys [P * samples], by (key, prompt id, number of the sample)."""
    numbers = jnp.broadcast_to(jnp.arange(samples), (ids.shape[0], samples))
    if first is not None:
        numbers = numbers + jnp.reshape(first, (-1, 1))

    def stream(prompt, sample):
        return jax.random.fold_in(jax.random.fold_in(key, prompt), sample)

    of_group = jax.vmap(jax.vmap(stream, in_axes=(None, 0)))
    return of_group(ids, numbers).reshape(-1)


def prompts_so_far(rollout: Rollout, ids: jax.Array) -> Prompts:
    """A rollout's B sequences as prompts for their next part, names i32[B] and all.

    A prompt's tokens are followed by the response's at once, so the paddings of both come after.
    """
    width, more = rollout.prompts.shape[1], rollout.responses.shape[1]
    position = jnp.arange(width + more)[None, :]
    length = rollout.prompt_lengths[:, None]
    prompt = jnp.pad(rollout.prompts, ((0, 0), (0, more)))
    place = jnp.clip(position - length, 0, more - 1)
    response = jnp.take_along_axis(rollout.responses, place, axis=1)
    tokens = jnp.where(position < length, prompt, response)
    return Prompts(tokens, rollout.prompt_lengths + rollout.lengths, ids)


def join_parts(first: Rollout, second: Rollout) -> Rollout:
    """`first`, and where it did not finish the tokens that `second` drew after it.

    All responses of `first` that did not finish are as long as the rollout is wide.
    """
    goes_on = ~first.finished

    def both(one: jax.Array, other: jax.Array) -> jax.Array:
        other = jnp.where(goes_on[:, None], other, jnp.zeros_like(other))
        return jnp.concatenate([one, other], axis=1)

    drawn = None
    if first.drawn_log_probs is not None and second.drawn_log_probs is not None:
        drawn = both(first.drawn_log_probs, second.drawn_log_probs)
    return replace(
        first,
        responses=both(first.responses, second.responses),
        lengths=first.lengths + jnp.where(goes_on, second.lengths, 0),
        log_probs=both(first.log_probs, second.log_probs),
        finished=first.finished | second.finished,
        drawn_log_probs=drawn,
    )
