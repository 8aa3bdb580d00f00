"""Rollouts of the tiny model as another system would have recorded them, and their diagnosis."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from scipy.special import log_softmax

from tim_jax.instruments.diagnosis import evidence, readers, verdict
from tim_jax.instruments.diagnosis.declared import PLAIN
from tim_jax.instruments.diagnosis.evidence import Forward
from tim_jax.instruments.diagnosis.explanations import Tokens
from tim_jax.instruments.diagnosis.rollouts import Limits, Response, collect
from tim_jax.model.execution import Execution
from tim_jax.policy import scoring
from tim_jax.rl.programs import sampling_program

STOPS = tiny.SAMPLING.stop_tokens
LIMITS = Limits(tiny.CONFIG.vocab_size, tiny.CONFIG.max_positions)
SAMPLES = 32
PROMPT, LONGEST = 6, tiny.SAMPLING.max_tokens


@cache
def weights():
    return jax.jit(tiny.EXECUTION.prepare)(tiny.params())


@cache
def sampled(top_k=0):
    """Rows of 96 responses, some 700 tokens."""
    sampling = replace(tiny.SAMPLING, top_k=top_k)
    program = sampling_program(Execution(tiny.CONFIG, tiny.NUMERICS, sampling), samples=SAMPLES)
    found = jax.device_get(program(weights(), tiny.prompts(), jax.random.key(3)))
    return [
        {
            "prompt_token_ids": found.prompts[i, : found.prompt_lengths[i]].tolist(),
            "response_token_ids": found.responses[i, :length].tolist(),
            "logprobs": found.log_probs[i, :length].tolist(),
            "finish_reason": "stop" if found.finished[i] else "length",
        }
        for i, length in enumerate(found.lengths)
    ]


@cache
def _logits():
    """(weights, rollout) -> f32[B, R, V]."""

    def run(weights, rollout):
        return scoring.of_logits(weights, rollout, lambda z, _: z, execution=tiny.EXECUTION)

    return jax.jit(run)


def _arrays(rows):
    responses = collect(readers.read(rows), limits=LIMITS).responses
    return evidence.side_by_side(responses, PROMPT, LONGEST)


def logits_of(rows):
    """f64[n, V] of each row's tokens."""
    whole = np.asarray(_logits()(weights(), _arrays(rows)), np.float64)
    return [z[: len(row["response_token_ids"])] for z, row in zip(whole, rows, strict=True)]


@cache
def drawn(temperature=1.0, top_k=0):
    """Rows of as many responses to the same prompts, drawn on the host from the model's logits."""
    rng, prompts = np.random.default_rng(3), [row["prompt_token_ids"] for row in sampled()]
    ids = np.zeros((len(prompts), LONGEST), np.int32)
    log_probs = np.zeros(ids.shape)
    empty = {"response_token_ids": ids[0], "logprobs": log_probs[0]}
    rollout = _arrays([{"prompt_token_ids": prompt} | empty for prompt in prompts])
    rows = np.arange(len(ids))
    for place in range(LONGEST):
        found = _logits()(weights(), replace(rollout, responses=jax.numpy.asarray(ids)))
        z = np.asarray(found, np.float64)[:, place] / temperature
        z[z < np.sort(z, axis=1)[:, -top_k, None]] = -np.inf  # 0: the smallest
        ids[:, place] = np.argmax(z + rng.gumbel(size=z.shape), axis=1)
        log_probs[:, place] = log_softmax(z, axis=1)[rows, ids[:, place]]
    ended = np.isin(ids, STOPS)
    lengths = np.where(ended.any(axis=1), np.argmax(ended, axis=1) + 1, LONGEST)
    return [
        {
            "prompt_token_ids": prompts[i],
            "response_token_ids": ids[i, :length].tolist(),
            "logprobs": log_probs[i, :length].tolist(),
            "finish_reason": "stop" if ended[i].any() else "length",
        }
        for i, length in enumerate(lengths)
    ]


def forward():
    return Forward(weights(), tiny.EXECUTION, tiny.CONFIG.vocab_size, STOPS)


def diagnosed(rows, sources=(), default=PLAIN, **options):
    found = collect(readers.read(rows), limits=LIMITS, default=default)
    return verdict.diagnose(found.responses, forward(), sources=sources, **options)


def tokens_of(rows):
    """The rows as a diagnosis has them, before it looks for anything."""
    found = collect(readers.read(rows), limits=LIMITS).responses
    vocabulary = tiny.CONFIG.vocab_size
    return Tokens(found, evidence.gather(forward(), found), STOPS, vocabulary, vocabulary)


def best_of(found: verdict.Verdict) -> verdict.Judged:
    """The explanation that is taken, which there is."""
    assert found.best is not None
    return found.best


def with_log_probs(rows, change):
    """The rows with `change(log-probs f64[n])` in place of their log-probs."""
    changed = [np.minimum(change(np.asarray(row["logprobs"])), 0.0).tolist() for row in rows]
    return [row | {"logprobs": x} for row, x in zip(rows, changed, strict=True)]


def exact_log_probs(rows):
    """Those of each row's tokens by the exact forward, f32[n] each."""
    tokens = tokens_of(rows)
    return tokens.by_response(tokens.evidence.exact)


def by(forward, rows):
    """The log-probs of each row's tokens by another forward, f32[n] each."""
    responses = collect(readers.read(rows), limits=LIMITS).responses
    made = evidence.log_probs(forward, responses)
    return np.split(made, np.cumsum([len(r) for r in responses])[:-1])


SUMMARY = jax.jit(evidence._summary, static_argnums=(2, 3))


def evidence_of(logits, tokens, size=None):
    """Without a model: of logits [N, V] and drawn tokens. Its tokenizer has `size`, or all."""
    size = logits.shape[1] if size is None else size
    given = jnp.asarray(logits, jnp.float32), jnp.asarray(tokens)
    found = jax.device_get(SUMMARY(*given, size, (1, 2)))
    found["exact"] = found["raw"] = found["logit"]
    found["raw_stops"] = found["stops"]
    stop = found.pop("stop")
    return evidence.Evidence(**found, end_stop=stop)


def in_tens(ids, recorded, seen, size, declared=PLAIN):
    """Tokens of responses of ten each, of a tokenizer of that size."""
    lasts = np.arange(10, len(ids) + 1, 10) - 1
    pairs = zip(*(np.split(np.asarray(x), lasts[:-1] + 1) for x in (ids, recorded)), strict=True)
    responses = tuple(Response("row", (1,), tuple(own), x, declared) for own, x in pairs)
    seen = seen._replace(end_stop=np.zeros(len(lasts)))
    return Tokens(responses, seen, (1, 2), 64, size)


def decode(ids):
    return "".join(chr(97 + i) for i in ids)
