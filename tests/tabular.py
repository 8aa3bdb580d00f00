"""A policy small enough to write out: every sequence it can say, and the gradient of any loss.

Sequences of up to three tokens of a vocabulary of three; token 0 ends a sequence. The policy is a
table of logits by position and last token. A batch of all sequences, each weighted by the chance
that the sampler says it, gives the expectation of a gradient and not an estimate of it.

The float64 side is `definition` of the modules that use it: losses, corrections and denominators
written from their definitions, without the library's functions, and differentiated by central
differences.
"""

import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax.common.types import Rollout
from tim_jax.policy.scoring import Scores
from tim_jax.rl.learner import gradient_rows, score_rows
from tim_jax.rl.types import Learning, Policy

WORDS, LONGEST, ROWS = 3, 3, 16


def policy(learning: Learning) -> Policy:
    """The policy of a table of logits, which are its parameters and its weights."""
    return Policy(
        prepare=lambda params: params,
        to_masters=lambda gradient, params: gradient,
        score=partial(score_rows, score, micro_batch=learning.micro_batch),
        gradient=partial(gradient_rows, score, learning=learning),
        norm=optax.tree.norm,
    )


def score(weights, rollout, *, energy=False, entropy_gradient=False, remat=False) -> Scores:
    """As `scoring.score`: log-probs, entropies and energies from a table of logits."""
    del remat
    rows = jax.nn.log_softmax(weights["table"][jnp.arange(LONGEST)[None, :], before(rollout)])
    log_probs = jnp.take_along_axis(rows, rollout.responses[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(rows) * rows, axis=-1)
    if not entropy_gradient:
        entropy = jax.lax.stop_gradient(entropy)
    square = jnp.sum(jnp.exp(2 * rows), axis=-1)
    energies = 1 - 2 * jnp.exp(log_probs) + square if energy else None
    return Scores(log_probs, entropy, energies)


def before(rollout):
    """i32[B, R], the token before each: position 0 has none, and takes row 0 of the table."""
    return jnp.pad(rollout.responses[:, :-1], ((0, 0), (1, 0)))


def sentences() -> list[tuple[int, ...]]:
    """Every sequence, in an order in which mini-batches of neighbours hold some of all lengths."""
    full = [
        words
        for length in range(1, LONGEST + 1)
        for words in itertools.product(range(WORDS), repeat=length)
        if 0 not in words[:-1] and (words[-1] == 0 or length == LONGEST)
    ]
    order = np.random.default_rng(0).permutation(len(full))
    return [full[i] for i in order]


_ROWS = [*sentences(), *[()] * (ROWS - len(sentences()))]
_LENGTHS = np.array([len(words) for words in _ROWS])
_TOKENS = np.array([[*words, *[0] * (LONGEST - len(words))] for words in _ROWS], np.int32)
_BEFORE = np.pad(_TOKENS[:, :-1], ((0, 0), (1, 0)))  # position 0 has none, and takes row 0


def table(seed: int) -> np.ndarray:
    """f32 logits [position, last token, word]."""
    return np.random.default_rng(seed).standard_normal((LONGEST, WORDS, WORDS)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64, over the last axis."""
    rows = logits.astype(np.float64)
    return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))


def log_probs_of(logits: np.ndarray) -> np.ndarray:
    """f64[B, R] of all sentences (and a filler, which never counts) under a table of logits."""
    return np.where(mask(), log_softmax(logits)[np.arange(LONGEST), _BEFORE, _TOKENS], 0.0)


def entropies_of(logits: np.ndarray) -> np.ndarray:
    """f64[B, R], the entropy at each of the tokens' places."""
    rows = log_softmax(logits)
    by_context = -(np.exp(rows) * rows).sum(axis=-1)
    return np.where(mask(), by_context[np.arange(LONGEST), _BEFORE], 0.0)


def energies_of(logits: np.ndarray) -> np.ndarray:
    """f64[B, R], 1 - 2 pi + sum pi^2 of the tokens."""
    squares = np.exp(2 * log_softmax(logits)).sum(axis=-1)[np.arange(LONGEST), _BEFORE]
    return 1 - 2 * np.exp(log_probs_of(logits)) + np.where(mask(), squares, 0.0)


def mask() -> np.ndarray:
    return np.arange(LONGEST)[None, :] < _LENGTHS[:, None]


def chances(log_probs: np.ndarray) -> np.ndarray:
    """f64[B], of each sentence; 0 for the filler."""
    found = np.exp(np.where(mask(), log_probs, 0.0).sum(axis=1))
    return np.where(mask().any(axis=1), found, 0.0)


def rollout(sampler: np.ndarray) -> Rollout:
    """All sentences as if drawn, one each, with the sampler's log-probs."""
    return Rollout(
        prompts=jnp.zeros((ROWS, 1), jnp.int32),
        prompt_lengths=jnp.ones(ROWS, jnp.int32),
        responses=jnp.asarray(_TOKENS),
        lengths=jnp.asarray(mask().sum(axis=1), jnp.int32),
        log_probs=jnp.asarray(np.where(mask(), log_probs_of(sampler), 0.0), jnp.float32),
        finished=jnp.ones(ROWS, bool),
    )


def held(x):
    return np.clip(x, -20.0, 20.0)


@dataclass(frozen=True)
class Batch:
    """An update's rows in float64. `now` are the log-probs at the weights of the update."""

    mask: np.ndarray  # bool[B, R]
    now: np.ndarray
    old: np.ndarray  # what the loss's ratio is taken against
    rollout: np.ndarray
    advantages: np.ndarray  # [B], or [B, R]

    @property
    def per_token(self) -> np.ndarray:
        """The advantages [B, 1] or [B, R]."""
        return self.advantages[:, None] if self.advantages.ndim == 1 else self.advantages

    def rows(self, chosen) -> "Batch":
        return Batch(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def means(self, x):
        total = np.where(self.mask, x, 0.0).sum(axis=1)
        return (total / np.maximum(self.mask.sum(axis=1), 1))[:, None]


# Losses: (log-probs, batch, chosen) -> [B, R]. What no gradient flows through is of `batch.now`.


def reinforce(x, b, _):
    return -b.per_token * x


def clip(x, b, _, low=0.2, high=0.2):
    ratio, a = np.exp(held(x - b.old)), b.per_token
    return -np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)


def gspo(x, b, _):
    ratio, a = np.exp(held(b.means(b.now - b.old))) * np.exp(x - b.now), b.per_token
    return -np.minimum(ratio * a, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * a)


def cispo(x, b, _):
    return -np.clip(np.exp(held(b.now - b.old)), 0.0, 1.3) * b.per_token * x


def sapo(x, b, _):
    a = b.per_token
    tau = np.where(a > 0, 1.0, 1.05)
    return -a / (1 + np.exp(-tau * (np.exp(held(x - b.old)) - 1))) * 4 / tau


def gmpo(x, b, _):
    a = np.sign(b.per_token)

    def kept(x):
        d = held(x - b.old)
        return a * np.minimum(a * d, a * np.clip(d, -0.4, 0.4))

    return -b.per_token * np.exp(b.means(kept(b.now))) * np.exp(kept(x) - kept(b.now))


def _dppo(x, b, divergence, bound):
    p, q = np.exp(b.now), np.exp(b.old)
    far = divergence(p, q) > bound
    positive = b.per_token > 0
    outside = far & np.where(positive, p > q, p < q)
    weight = np.minimum(np.exp(held(b.now - b.old)), 20.0)
    return np.where(outside, 0.0, -weight * b.per_token * x)


def dppo_tv(x, b, _):
    return _dppo(x, b, lambda p, q: np.abs(p - q), 0.15)


def dppo_kl(x, b, _):
    def divergence(p, q):
        with np.errstate(divide="ignore", invalid="ignore"):
            return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))

    return _dppo(x, b, divergence, 0.05)


def clip_cov(x, b, chosen):
    return np.where(chosen, 0.0, clip(x, b, None))


def kl_cov(x, b, chosen):
    d = held(x - b.old)
    return -b.per_token * np.exp(d) + np.where(chosen, np.abs(d), 0.0)


LOSSES = {
    "reinforce": reinforce,
    "clip": clip,
    "gspo": gspo,
    "gspo_token": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


# Corrections: (log-ratio d, log-probs of its numerator, batch) -> (coefficients, kept), [B, R].


def _k3(d):
    return np.exp(held(d)) - 1 - held(d)


def _sum(d, b):
    return np.where(b.mask, d, 0.0).sum(axis=1)[:, None]


def _everyone(b):
    return np.ones(b.mask.shape), b.mask


def _rejecting(good, b, weight=1.0):
    good = np.broadcast_to(good, b.mask.shape)
    return np.where(good, weight, 0.0), b.mask & good


def _geometric(d, b):
    mean = np.exp(b.means(held(d)))
    return (mean >= 0.9) & (mean <= 1.1)


def _normalised(coefficients, b):
    mean = np.where(b.mask, coefficients, 0.0).sum() / b.mask.sum()
    return coefficients / mean if mean else coefficients


def _binary_kl(d, p):
    ours, theirs = (np.clip(np.exp(x), 1e-6, 1 - 1e-6) for x in (p, p - d))
    odds = np.log(ours / theirs), np.log((1 - ours) / (1 - theirs))
    one = ours * odds[0] + (1 - ours) * odds[1]
    return np.maximum(one, -(theirs * odds[0] + (1 - theirs) * odds[1]))


def _mixed(d, b):
    """AIS, as `mix_in_adaptively` documents it."""
    weights = np.minimum(np.exp(held(d)), 1.5)
    w = weights[b.mask]
    reliability, spread = w.mean() ** 2 / (w**2).mean(), w.std() / w.mean()
    severity = 1 - np.exp(-_k3(d)[b.mask].mean() / 0.05)
    return 1 + reliability * max(severity, spread / (1 + spread)) * (weights - 1)


def _dppo_mask(d, p, b):
    gap, a = np.exp(p) - np.exp(p - d), b.per_token
    return np.where(((a > 0) & (gap > 0.1)) | ((a < 0) & (gap < -0.1)), 0.0, 1.0), b.mask


def _off_policy(d, p, b):
    bad = (b.per_token < 0) & (-b.means(held(d)) > 0.1)
    return np.broadcast_to(np.where(bad, 0.0, 1.0), b.mask.shape), b.mask


CORRECTIONS = {
    "none": ([], lambda d, p, b: _everyone(b)),
    "token_tis": (
        [{"name": "token_tis", "cap": 1.5}],
        lambda d, p, b: (np.minimum(np.exp(held(d)), 1.5), b.mask),
    ),
    "sequence_tis": (
        [{"name": "sequence_tis", "cap": 1.5}],
        lambda d, p, b: (np.minimum(np.exp(held(_sum(d, b))), 1.5) * np.ones(d.shape), b.mask),
    ),
    "icepop": (
        [{"name": "icepop", "lower": 0.5, "upper": 2.0}],
        lambda d, p, b: (np.exp(d) * ((np.exp(d) >= 0.5) & (np.exp(d) <= 2.0)), b.mask),
    ),
    "geometric_rejection": (
        [{"name": "geometric_rejection", "lower": 0.9, "upper": 1.1}],
        lambda d, p, b: _rejecting(_geometric(d, b), b),
    ),
    "token_k3": (
        [{"name": "reject", "statistic": "k3", "over": "token", "upper": 0.1}],
        lambda d, p, b: _rejecting(_k3(d) <= 0.1, b),
    ),
    "vexact": (
        [{"name": "vexact", "cap": 1.5, "bound": 0.1}],
        lambda d, p, b: _rejecting(_geometric(d, b), b, np.minimum(np.exp(held(d)), 1.5)),
    ),
    "sequence_mis": (
        [{"name": "sequence_mis", "cap": 2.0}],
        lambda d, p, b: (
            np.exp(held(_sum(d, b))) * (np.exp(held(_sum(d, b))) <= 2.0) * np.ones(d.shape),
            b.mask,
        ),
    ),
    "kpop": (
        [{"name": "kpop", "bound": 0.05}],
        lambda d, p, b: _rejecting(_binary_kl(d, p) <= 0.05, b, np.exp(held(d))),
    ),
    "veto": (
        [{"name": "veto", "threshold": 0.8}],
        lambda d, p, b: _rejecting(np.all(~b.mask | (d >= np.log(0.8)), axis=1, keepdims=True), b),
    ),
    "trust_region_masking": (
        [{"name": "trust_region_masking", "bound": 0.1}],
        lambda d, p, b: _rejecting(np.all(~b.mask | (_k3(d) <= 0.1), axis=1, keepdims=True), b),
    ),
    "ais": (
        [{"name": "ais", "cap": 1.5, "kl_scale": 0.05}],
        lambda d, p, b: (_mixed(d, b), b.mask),
    ),
    "dppo": ([{"name": "dppo", "bound": 0.1}], _dppo_mask),
    "off_policy_sequence_mask": (
        [{"name": "off_policy_sequence_mask", "bound": 0.1}],
        _off_policy,
    ),
    "token_tis, normalise": (
        [{"name": "token_tis", "cap": 1.5}, {"name": "normalise"}],
        lambda d, p, b: (_normalised(np.minimum(np.exp(held(d)), 1.5), b), b.mask),
    ),
    "reject, normalise": (
        [{"name": "geometric_rejection", "lower": 0.9, "upper": 1.1}, {"name": "normalise"}],
        lambda d, p, b: (
            _normalised(np.where(_geometric(d, b), 1.0, 0.0) * np.ones(d.shape), b),
            b.mask & _geometric(d, b),
        ),
    ),
}


def token_weights(b: Batch, kept, aggregation: str, denominator: str):
    """[B, R] of an update's rows, from the definitions of `objectives.objective.token_weights`."""
    kept = kept & b.mask
    counted = b.mask if denominator == "response" else kept
    alive = (kept if denominator == "survivors" else b.mask).any(axis=1)
    lengths, sequences = counted.sum(axis=1), max(alive.sum(), 1)
    per_row = {
        "token_mean": np.full(len(lengths), 1 / max(counted.sum(), 1)),
        "token_sum": np.ones(len(lengths)),
        "sequence_mean_token_mean": 1 / (sequences * np.maximum(lengths, 1)),
        "sequence_mean_token_sum": np.full(len(lengths), 1 / sequences),
        "constant_length": np.full(len(lengths), 1 / (sequences * LONGEST)),
    }[aggregation]
    return np.where(b.mask, per_row[:, None], 0.0)


def derivative(function, logits: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Of a scalar of a table of logits, by central differences in float64."""
    logits = logits.astype(np.float64)
    found = np.zeros(logits.shape)
    for place in np.ndindex(*logits.shape):
        for sign in (1.0, -1.0):
            moved = logits.copy()
            moved[place] += sign * step
            found[place] += sign * function(moved)
    return found / (2 * step)


def keeping(rate):
    """Gradient descent whose state is the last gradient."""

    def update(updates, state, params=None, **extra):
        del state, params, extra
        return jax.tree.map(lambda g: -rate * g, updates), updates

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return optax.GradientTransformationExtraArgs(zeros, update)


REFERENCE, SAMPLER, TRAINER = (table(seed) for seed in (3, 0, 1))
TRAINER = (SAMPLER + 0.5 * TRAINER).astype(np.float32)
