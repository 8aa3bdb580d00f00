"""The cases of an audit and their learners, small architectures, and random parameters."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.model import parameters
from tim_jax.model.config import LatentConfig, ModelConfig
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, Sampling, jit
from tim_jax.model.parameters import init_params
from tim_jax.model.rope import RopeConfig
from tim_jax.model.weights import Kind, Params, tree
from tim_jax.numerics import Numerics
from tim_jax.objectives import Objective
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl import programs
from tim_jax.rl.learner import experience
from tim_jax.rl.types import Carried, Learning
from tim_jax.tasks.base import Outcome, Turn

_STOPS = 24  # one token in this many of the vocabulary ends a response


@dataclass(frozen=True)
class Sizes:
    """How much an audit draws: `prompts` x `samples` sequences after prompts of ragged lengths."""

    prompts: int = 4
    samples: int = 4
    prompt_length: int = 24
    response_length: int = 48
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "seed" else 1
            if value < least:
                raise InputError(f"audit: {field.name} must be at least {least}, got {value}")

    @classmethod
    def fitting(cls, config: ModelConfig) -> "Sizes":
        """The default sizes, less where the model has few positions."""
        prompt = min(cls.prompt_length, max(1, config.most_positions // 3))
        response = min(cls.response_length, config.most_positions - prompt)
        return cls(prompt_length=prompt, response_length=response)

    def rounded(self, placements: Iterable[Placement]) -> "Sizes":
        """With as many more prompts that all devices of each placement have as many sequences."""
        multiple = math.lcm(*(where.prompts_multiple(self.samples) for where in placements))
        return replace(self, prompts=self.prompts + -self.prompts % multiple)

    def check(self, config: ModelConfig) -> None:
        """Raises `InputError` if the model has too few positions."""
        longest = self.prompt_length + self.response_length
        if longest > config.most_positions:
            raise InputError(
                f"audit: prompt and response of {longest} tokens exceed the model's "
                f"{config.most_positions} positions"
            )


@dataclass(frozen=True)
class Again:
    """Samples prompts once more, in another batch; the tokens must be the same too."""

    rows: tuple[int, ...] = ()  # of the prompts, in order; () is all of them
    samples: int = 1  # at most `Sizes.samples`
    one_by_one: bool = False  # a batch per prompt
    padding: int = 0  # added to the padded prompt length and to the longest response
    batching: Batching = ALL_AT_ONCE
    placement: Placement = SINGLE


@dataclass(frozen=True)
class Score:
    """Computes the log-probs of the drawn sequences in a learner."""

    micro_batch: int | None = None  # rows per forward; None: all at once
    tokens: int | None = None  # in place of rows: tokens per forward, without padding
    loop: bool = False  # micro-batches in one program, as one accumulated gradient
    reverse: bool = False  # rows in reverse order
    padding: int = 0  # added to the padded prompt and response lengths, filled with other tokens
    gradient: bool = True  # False: a forward of whole sequences, without cache or gradient
    remat: bool = False
    placement: Placement = SINGLE


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


@dataclass(frozen=True)
class Episodes:
    """Draws episodes of several turns, and computes their log-probs in a learner, in one pass.

    Random replies of 0 to `reply` tokens; after one turn in ten the episode ends. An episode has
    the room of the longest response.
    """

    turns: int = 8
    max_tokens: int = 5  # of a turn, and at most those of the case's sampling
    reply: int = 10
    batching: Batching = ALL_AT_ONCE
    placement: Placement = SINGLE
    score: Score = Score()


@dataclass(frozen=True)
class Replies:
    """An environment in tokens: random replies of 0 to `longest` tokens, by the turn's key.

    After a turn the episode ends with the chance `ending`.
    """

    longest: int
    vocabulary: int
    ending: float = 0.1

    def outcomes(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
        """Yields (index, outcome) for each, in their order."""
        return enumerate(map(self.outcome, turns))

    def outcome(self, turn: Turn) -> Outcome:
        """The outcome of a turn, with its state and a reward below 1."""
        rng = np.random.default_rng([int(part) for part in turn.key])
        tokens = rng.integers(0, self.vocabulary, rng.integers(0, self.longest + 1))
        done = bool(rng.random() < self.ending)
        return Outcome(turn.state, tokens.astype(np.int32), float(rng.random()), done)


@dataclass(frozen=True)
class Case:
    """One comparison with the drawn sequences of `sampling`."""

    name: str
    sampling: Sampling
    against: Again | Score | Episodes


def plain_sampling(config: ModelConfig, sizes: Sizes) -> Sampling:
    """Temperature 1; one token in 24 of the vocabulary stops, so that responses end anywhere."""
    stops = tuple(range(min(3, config.vocab_size - 1), config.vocab_size, _STOPS))
    return Sampling(sizes.response_length, stop_tokens=stops)


def standard_cases(config: ModelConfig, sizes: Sizes, *, quick: bool = False) -> tuple[Case, ...]:
    """The cases of an audit: the learner's side, the sampler's side, other distributions."""
    plain = plain_sampling(config, sizes)
    most = min(40, config.vocab_size)
    truncated = replace(plain, temperature=0.7, top_k=most, top_p=0.9)
    group, longest = sizes.samples, sizes.prompt_length + sizes.response_length
    cases = (
        Case("learner, whole batch", plain, Score()),
        Case("learner, rows in reverse", plain, Score(reverse=True)),
        Case("learner, one row at a time", plain, Score(micro_batch=1)),
        Case("sampler, batches of one sequence", plain, Again(one_by_one=True)),
        Case("top-k, top-p, T 0.7: learner", truncated, Score()),
        Case("learner, without padding", plain, Score(tokens=3 * longest)),
    )
    if quick:
        return cases
    backwards = tuple(reversed(range(sizes.prompts)))[: max(1, sizes.prompts - 1)]
    return (
        *cases,
        Case(f"learner, micro-batches of {group} in a loop", plain, Score(group, loop=True)),
        Case("learner, longer padding", plain, Score(padding=21)),
        Case("learner, layers recomputed", plain, Score(remat=True)),
        Case("forward without cache or gradient", plain, Score(gradient=False)),
        Case(
            "sampler, other order, padding and group",
            plain,
            Again(rows=backwards, samples=max(1, group - 1), padding=5),
        ),
        Case(
            "sampler, 3 slots, halved once",
            plain,
            Again(samples=group, batching=Batching(slots=3, halvings=1)),
        ),
        Case("top-k, top-p, T 0.7: batches of one", truncated, Again(one_by_one=True)),
        Case("T 1.4: learner", replace(plain, temperature=1.4), Score()),
        Case("forward without padding", plain, Score(tokens=2 * longest, gradient=False)),
        Case("episodes of 8 turns: learner", plain, Episodes()),
        Case(
            "episodes of 8 turns in 3 slots of pages: one row at a time",
            plain,
            Episodes(batching=Batching(slots=3), score=Score(micro_batch=1)),
        ),
        Case("T 0.7, top-k, top-p: episodes", truncated, Episodes(turns=2, reply=40)),
    )


def placements(config: ModelConfig, devices: int) -> tuple[Placement, ...]:
    """Placements for an audit: over 2, 4, 8, ... devices, as far as the model allows."""
    counts = [2**i for i in range(1, devices.bit_length()) if 2**i <= devices]
    tried = [Placement(fsdp=n) for n in counts]
    tried += [Placement(data=n // 2, fsdp=2) for n in counts[1:]]
    tried += [Placement(fsdp=n, decode="sharded") for n in counts[-1:]]
    tried += [Placement(tensor=n) for n in counts]
    tried += [Placement(fsdp=n // 2, tensor=2) for n in counts[1:]]
    tried += [Placement(data=2, fsdp=n // 8, tensor=4) for n in counts[2:]]
    tried += [Placement(expert=n) for n in counts]
    tried += [Placement(data=n // 4, fsdp=2, expert=2) for n in counts[1:]]
    tried += [Placement(fsdp=n // 4, expert=4, decode="sharded") for n in counts[2:]]

    def fits(placement: Placement) -> bool:
        try:
            parameters.check(config, Numerics(column_tiles=placement.tensor), placement)
        except InputError:
            return False
        return True

    return tuple(filter(fits, tried))


def placed_cases(
    config: ModelConfig, sizes: Sizes, placements: Iterable[Placement]
) -> tuple[Case, ...]:
    """Learner and sampler under each placement, against the sampler on one device."""
    plain = plain_sampling(config, sizes)
    return tuple(
        case
        for where in placements
        for case in (
            Case(f"learner, {where}", plain, Score(placement=where)),
            Case(f"sampler, {where}", plain, Again(samples=sizes.samples, placement=where)),
        )
    )


def placed_episodes(config: ModelConfig, sizes: Sizes, where: Placement) -> tuple[Case, ...]:
    """Episodes that one device draws, in a learner under a placement, and the other way round.

    Under the placement they are drawn in slots, with pages.
    """
    plain, learner = plain_sampling(config, sizes), Episodes(score=Score(placement=where))
    sampler = Episodes(batching=Batching(slots=2).rounded(where.shards), placement=where)
    return (
        Case(f"episodes: learner, {where}", plain, learner),
        Case(f"episodes: sampler, {where}", plain, sampler),
    )


_SMALL = ModelConfig(
    model_type="qwen3",
    vocab_size=101,
    hidden_size=52,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=20,
    intermediate_size=76,
    max_positions=512,
    qk_norm=True,
)
_EVEN = replace(_SMALL, num_heads=4, num_kv_heads=2, head_dim=32, tied_embeddings=True)
_EXPERTS = replace(
    _SMALL,
    model_type="qwen3_moe",
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=28,
    norm_topk_prob=True,
)
PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "qwen3": replace(_EVEN, vocab_size=1000, hidden_size=64, intermediate_size=160),
        # 3 key heads, groups of 5, heads of 20, a prime vocabulary
        "qwen3-awkward": replace(_SMALL, num_heads=15),
        # as many key heads as query heads
        "llama": ModelConfig(
            model_type="llama",
            vocab_size=1000,
            hidden_size=60,
            num_layers=2,
            num_heads=5,
            num_kv_heads=5,
            head_dim=12,
            intermediate_size=100,
            max_positions=512,
            rope=RopeConfig(
                kind="llama3",
                theta=500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_positions=32,
            ),
        ),
        # one key head for all queries, biases
        "qwen2": ModelConfig(
            model_type="qwen2",
            vocab_size=257,
            hidden_size=48,
            num_layers=3,
            num_heads=6,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=90,
            max_positions=512,
            attention_bias=True,
            tied_embeddings=True,
        ),
        # 7 experts of width 28, of which each token goes through 3
        "qwen3-moe-awkward": _EXPERTS,
        # latent attention of odd sizes; a dense layer, then 9 experts in 3 groups, and 2 for all
        "mla-awkward": replace(
            _EXPERTS,
            model_type="deepseek_v3",
            qk_norm=False,
            num_layers=3,
            num_heads=5,
            num_kv_heads=5,
            head_dim=6,
            num_experts=9,
            num_shared_experts=2,
            first_dense_layers=1,
            router_groups=3,
            router_groups_per_tok=2,
            routed_scaling_factor=2.5,
            latent=LatentConfig(
                kv_lora_rank=22,
                qk_nope_head_dim=10,
                qk_rope_head_dim=6,
                v_head_dim=14,
                q_lora_rank=18,
            ),
        ),
        # 5 experts, of which each token goes through 2, and one shared of another width
        "qwen2-moe-awkward": replace(
            _EXPERTS,
            model_type="qwen2_moe",
            qk_norm=False,
            norm_topk_prob=False,
            attention_bias=True,
            num_experts=5,
            num_experts_per_tok=2,
            shared_expert_width=44,
        ),
        # a window of 13 tokens, less than any block of keys, in the first layer and the last
        "windowed-awkward": replace(
            _SMALL, num_layers=3, sliding_window=13, window_layers=(True, False, True)
        ),
        # whole tiles everywhere: what the Pallas families can take
        "qwen3-blocks": replace(
            _EVEN, vocab_size=256, hidden_size=128, num_layers=1, intermediate_size=128
        ),
    }
)


def random_params(config: ModelConfig, seed: int) -> Params:
    """Random parameters, float32, in which every part of the model has an effect.

    `init_params`, but with matrices wide enough that the logits spread as a trained model's do
    (a standard deviation of about 2), and norm weights and biases that are not all ones and zeros.
    """
    rng = np.random.default_rng(seed)
    widening = np.float32(2 / (config.initializer_range * config.hidden_size**0.5))

    def stirred(kind: Kind, leaf: np.ndarray) -> np.ndarray:
        noise = np.float32(0.2) * rng.standard_normal(leaf.shape, np.float32)
        if kind == "norm":
            return leaf + noise
        return noise if kind in ("bias", "buffer") else leaf * widening

    kinds = tree(config, lambda weight: weight.kind)
    return jax.tree.map(stirred, kinds, init_params(config, seed))
