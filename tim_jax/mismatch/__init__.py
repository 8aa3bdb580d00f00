"""The dial: a sampler that differs from the learner in named ways, everything else equal.

    dial = mismatch.build([{"name": "kv_cache", "dtype": "float8_e4m3fn"}])
    programs.build(policy, learning, optimizer, mismatch=dial)

Each entry is a small frozen value that edits the sampler's execution (dtypes, kernels, orders of
sums, weights) or its outputs. Entries combine; their list is the description of the experiment.
docs/mismatch.md has what each imitates and how large the mismatch is that it causes.
"""

from tim_jax.common import inputs
from tim_jax.mismatch import arithmetic, transfer
from tim_jax.mismatch.base import Entry as Entry, Names as Names
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

# Every entry by its name in configurations too: `mismatch.kv_cache(dtype="float8_e4m3fn")`.
attention_softmax = AttentionSoftmax = arithmetic.AttentionSoftmax
compute = Compute = arithmetic.Compute
dropped_end = DroppedEnd = transfer.DroppedEnd
expert_capacity = ExpertCapacity = arithmetic.ExpertCapacity
expert_choice = ExpertChoice = arithmetic.ExpertChoice
expert_order = ExpertOrder = arithmetic.ExpertOrder
ignored_truncation = IgnoredTruncation = transfer.IgnoredTruncation
in_flight_updates = InFlightUpdates = transfer.InFlightUpdates
kv_cache = KVCache = arithmetic.KVCache
lm_head = Head = arithmetic.Head
log_prob_noise = LogProbNoise = transfer.LogProbNoise
lora_merge = LoraMerge = transfer.LoraMerge
logit_noise = LogitNoise = transfer.LogitNoise
logits = Logits = arithmetic.Logits
native_kernels = NativeKernels = arithmetic.NativeKernels
pad_mask = PadMask = transfer.PadMask
pallas_attention = PallasAttention = arithmetic.PallasAttention
quantised_weights = QuantisedWeights = transfer.QuantisedWeights
raw_log_probs = RawLogProbs = transfer.RawLogProbs
router = Router = arithmetic.Router
softmax = Softmax = arithmetic.Softmax
split_k = SplitK = arithmetic.SplitK
split_kv = SplitKV = arithmetic.SplitKV
stale_weights = StaleWeights = transfer.StaleWeights
sum_order = SumOrder = arithmetic.SumOrder
tensor_parallel = TensorParallel = arithmetic.TensorParallel
tile_sizes = TileSizes = arithmetic.TileSizes
triton_attention = TritonAttention = arithmetic.TritonAttention


def __dir__() -> list[str]:
    return inputs.public(globals())
