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
from tim_jax.mismatch.dial import (
    EXACT,
    Mismatch,
    check,
    describe,
    difference,
    label,
    merging,
    refuse_ahead,
    refuse_merge,
    refuse_stale,
)
from tim_jax.mismatch.mixtures import ExpertCapacity, ExpertChoice, ExpertOrder, Router
from tim_jax.mismatch.registry import ENTRIES, GROUPS, build
from tim_jax.mismatch.reporting import (
    DroppedEnd,
    IgnoredTruncation,
    LogitNoise,
    LogProbNoise,
    PadMask,
    RawLogProbs,
)
from tim_jax.mismatch.weights import InFlightUpdates, LoraMerge, QuantisedWeights, StaleWeights

# Every entry by its name in configurations too: `mismatch.kv_cache(dtype="float8_e4m3fn")`.
attention_softmax = AttentionSoftmax
compute = Compute
dropped_end = DroppedEnd
expert_capacity = ExpertCapacity
expert_choice = ExpertChoice
expert_order = ExpertOrder
ignored_truncation = IgnoredTruncation
in_flight_updates = InFlightUpdates
kv_cache = KVCache
lm_head = Head
log_prob_noise = LogProbNoise
lora_merge = LoraMerge
logit_noise = LogitNoise
logits = Logits
native_kernels = NativeKernels
pad_mask = PadMask
pallas_attention = PallasAttention
quantised_weights = QuantisedWeights
raw_log_probs = RawLogProbs
router = Router
softmax = Softmax
split_k = SplitK
split_kv = SplitKV
stale_weights = StaleWeights
sum_order = SumOrder
tensor_parallel = TensorParallel
tile_sizes = TileSizes
triton_attention = TritonAttention

__all__ = [
    "ENTRIES",
    "EXACT",
    "GROUPS",
    "AttentionSoftmax",
    "Compute",
    "DroppedEnd",
    "Entry",
    "ExpertCapacity",
    "ExpertChoice",
    "ExpertOrder",
    "Head",
    "IgnoredTruncation",
    "InFlightUpdates",
    "KVCache",
    "LogProbNoise",
    "LogitNoise",
    "Logits",
    "LoraMerge",
    "Mismatch",
    "Names",
    "NativeKernels",
    "PadMask",
    "PallasAttention",
    "QuantisedWeights",
    "RawLogProbs",
    "Router",
    "Softmax",
    "SplitK",
    "SplitKV",
    "StaleWeights",
    "SumOrder",
    "TensorParallel",
    "TileSizes",
    "TritonAttention",
    "attention_softmax",
    "build",
    "check",
    "compute",
    "describe",
    "difference",
    "dropped_end",
    "expert_capacity",
    "expert_choice",
    "expert_order",
    "ignored_truncation",
    "in_flight_updates",
    "kv_cache",
    "label",
    "lm_head",
    "log_prob_noise",
    "logit_noise",
    "logits",
    "lora_merge",
    "merging",
    "native_kernels",
    "pad_mask",
    "pallas_attention",
    "quantised_weights",
    "raw_log_probs",
    "refuse_ahead",
    "refuse_merge",
    "refuse_stale",
    "router",
    "softmax",
    "split_k",
    "split_kv",
    "stale_weights",
    "sum_order",
    "tensor_parallel",
    "tile_sizes",
    "triton_attention",
]
