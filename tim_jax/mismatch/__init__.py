"""The dial: a sampler that differs from the learner in named ways, everything else equal.

    dial = mismatch.build([{"name": "kv_cache", "dtype": "float8_e4m3fn"}])
    programs.build(policy, learning, optimizer, mismatch=dial)

Each entry is a small frozen value that edits the sampler's execution (dtypes, kernels, orders of
sums, weights) or its outputs. Entries combine; their list is the description of the experiment.
docs/mismatch.md has what each imitates and how large the mismatch is that it causes.
"""

from tim_jax.common import inputs
from tim_jax.mismatch.arithmetic import (
    AttentionSoftmax as AttentionSoftmax,
    Compute as Compute,
    ExpertCapacity as ExpertCapacity,
    ExpertChoice as ExpertChoice,
    ExpertOrder as ExpertOrder,
    Head as Head,
    KVCache as KVCache,
    Logits as Logits,
    NativeKernels as NativeKernels,
    PallasAttention as PallasAttention,
    Router as Router,
    Softmax as Softmax,
    SplitK as SplitK,
    SplitKV as SplitKV,
    SumOrder as SumOrder,
    TensorParallel as TensorParallel,
    TileSizes as TileSizes,
    TritonAttention as TritonAttention,
)
from tim_jax.mismatch.base import (
    Entry as Entry,
    Names as Names,
)
from tim_jax.mismatch.dial import (
    ENTRIES as ENTRIES,
    EXACT as EXACT,
    GROUPS as GROUPS,
    Mismatch as Mismatch,
    build as build,
    check as check,
    describe as describe,
    difference as difference,
    label as label,
    merging as merging,
    refuse_ahead as refuse_ahead,
    refuse_merge as refuse_merge,
    refuse_stale as refuse_stale,
)
from tim_jax.mismatch.reporting import (
    DroppedEnd as DroppedEnd,
    IgnoredTruncation as IgnoredTruncation,
    LogProbNoise as LogProbNoise,
    LogitNoise as LogitNoise,
    PadMask as PadMask,
    RawLogProbs as RawLogProbs,
)
from tim_jax.mismatch.weights import (
    InFlightUpdates as InFlightUpdates,
    LoraMerge as LoraMerge,
    QuantisedWeights as QuantisedWeights,
    StaleWeights as StaleWeights,
)

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


def __dir__() -> list[str]:
    return inputs.public(globals())
