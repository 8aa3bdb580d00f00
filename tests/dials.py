"""Every entry of the dial once, and a model on which a sampler compiles in a moment."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import tiny

from tim_jax import mismatch
from tim_jax.mismatch import EXACT, Mismatch, Names
from tim_jax.model.execution import Execution, Sampling
from tim_jax.policy import scoring
from tim_jax.rl.programs import sampling_program

CONFIG = replace(tiny.CONFIG, num_layers=1)
SAMPLING = Sampling(8, temperature=0.8, top_p=0.9, stop_tokens=(3, 5, 7))
EXECUTION = Execution(CONFIG, tiny.NUMERICS, SAMPLING)
LEARNER = tiny.NUMERICS

# A table per entry; what it changes of the numerics; one that names the learner's own, or None.
ENTRIES = {
    "compute": ({"dtype": "bfloat16"}, {"compute_dtype"}, {"dtype": "float32"}),
    "lm_head": ({"dtype": "bfloat16"}, {"precision.head"}, {"dtype": "float32"}),
    "router": ({"dtype": "bfloat16"}, {"precision.router"}, None),
    "expert_choice": ({"dtype": "bfloat16"}, {"precision.choice"}, None),
    "logits": ({"dtype": "bfloat16"}, {"precision.logits"}, {"dtype": "float32"}),
    "softmax": ({"dtype": "bfloat16"}, {"precision.softmax"}, {"dtype": "float32"}),
    "attention_softmax": (
        {"dtype": "bfloat16"},
        {"precision.attention_softmax"},
        {"dtype": "float32"},
    ),
    "kv_cache": ({"dtype": "float8_e4m3fn"}, {"precision.cache"}, {"dtype": "float32"}),
    "quantised_weights": ({"dtype": "int8"}, set(), None),
    "lora_merge": ({"dtype": "bfloat16"}, {"precision.lora"}, {"dtype": "float32"}),
    "stale_weights": ({"updates": 2}, set(), {"updates": 0}),
    "in_flight_updates": ({"updates": 2, "every": 3}, set(), {"updates": 0, "every": 3}),
    "native_kernels": ({}, {"family"}, None),
    "tile_sizes": (
        {"rows": 4, "kv_block": 4},
        {"rows", "kv_block"},
        {"rows": 8, "attention_rows": 8, "kv_block": 16},
    ),
    "sum_order": ({"lanes": 2}, {"order.lanes"}, {"lanes": 128}),
    "split_k": ({"pieces": 3}, {"order.split_k"}, {"pieces": 1}),
    "tensor_parallel": ({"ranks": 2}, {"order.ranks"}, {"ranks": 1}),
    "expert_order": ({"order": "index"}, {"order.experts"}, None),
    "expert_capacity": ({"factor": 1.0}, {"expert_capacity"}, None),
    "split_kv": ({"programs": 132}, {"order.split_kv"}, {"programs": 0}),
    "pallas_attention": ({"interpret": True}, {"attention"}, None),
    "triton_attention": ({}, {"attention"}, None),
    "raw_log_probs": ({}, set(), None),
    "ignored_truncation": ({}, set(), None),
    "dropped_end": ({"replacement": 0}, set(), {"share": 0.0}),
    "pad_mask": ({"pad": 3}, set(), None),
    "logit_noise": ({"std": 0.1, "bias": 0.1}, set(), {}),
    "log_prob_noise": ({"std": 0.1, "by": "probability"}, set(), {}),
}


def entry(name, **arguments) -> Any:  # each name has a class of its own
    return mismatch.build([{"name": name, **arguments}]).entries[0]


def dial(*tables):
    return mismatch.build(tables)


def standard(name):
    """The entry of the table above, as a dial."""
    return dial({"name": name, **ENTRIES[name][0]})


@cache
def weights(config=CONFIG):
    return jax.jit(replace(EXECUTION, config=config).prepare)(tiny.params(config))


@cache
def rollout(dial: Mismatch = EXACT, execution=EXECUTION):
    program = sampling_program(execution, samples=tiny.GROUP, mismatch=dial)
    return program(weights(execution.config), tiny.prompts(), jax.random.key(0))


@cache
def _scorer(execution):
    return jax.jit(lambda *args: scoring.score(*args, execution=execution).log_probs)


def scored(rollout, execution=EXECUTION, dial: Mismatch = EXACT):
    """The learner's log-probs, of weights that the dial has changed."""
    plain = replace(rollout, drawn_log_probs=None, hidden=None)
    return _scorer(execution)(dial.weights(weights(execution.config)), plain)


def names(rows=6, seed=0):
    """Names of rows, as of three prompts with two samples each."""
    index = jax.numpy.arange(rows, dtype=jax.numpy.int32)
    return Names(jax.random.key(seed), 40 + index // 2, index % 2)
