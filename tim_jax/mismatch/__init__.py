"""The dial: a sampler that differs from the learner in named ways, everything else equal.

    dial = mismatch.build([{"name": "kv_cache", "dtype": "float8_e4m3fn"}])
    programs.build(policy, learning, optimizer, mismatch=dial)

Each entry is a small frozen value that edits the sampler's execution (dtypes, kernels, orders of
sums, weights) or its outputs. Entries combine; their list is the description of the experiment.
docs/mismatch.md has what each imitates and how large the mismatch is that it causes.
"""

from tim_jax.mismatch.arithmetic import (
    AttentionSoftmax,
    Compute,
    Head,
    KVCache,
    Logits,
    NativeKernels,
    PallasAttention,
    Softmax,
    SplitK,
    SplitKV,
    SumOrder,
    TensorParallel,
    TileSizes,
    TritonAttention,
)
from tim_jax.mismatch.base import Entry, Names
from tim_jax.mismatch.dial import EXACT, Mismatch, check, describe, difference, label, refuse_stale
from tim_jax.mismatch.named import ENTRIES, GROUPS, build
from tim_jax.mismatch.reporting import (
    DroppedEnd,
    IgnoredTruncation,
    LogitNoise,
    LogProbNoise,
    PadMask,
    RawLogProbs,
)
from tim_jax.mismatch.weights import QuantisedWeights, StaleWeights

__all__ = [
    "ENTRIES",
    "EXACT",
    "GROUPS",
    "AttentionSoftmax",
    "Compute",
    "DroppedEnd",
    "Entry",
    "Head",
    "IgnoredTruncation",
    "KVCache",
    "LogProbNoise",
    "LogitNoise",
    "Logits",
    "Mismatch",
    "Names",
    "NativeKernels",
    "PadMask",
    "PallasAttention",
    "QuantisedWeights",
    "RawLogProbs",
    "Softmax",
    "SplitK",
    "SplitKV",
    "StaleWeights",
    "SumOrder",
    "TensorParallel",
    "TileSizes",
    "TritonAttention",
    "build",
    "check",
    "describe",
    "difference",
    "label",
    "refuse_stale",
]
