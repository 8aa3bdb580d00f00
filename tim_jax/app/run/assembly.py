"""From a configuration to the run as one value: numerics, policy, learning, optimizer.

Its numerics are the family of kernels, tiles that fit the model, and what was measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from tim_jax import mismatch
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import part
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError, writing
from tim_jax.kernels import pallas
from tim_jax.mismatch import Mismatch
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Batching, Execution, Sampling, check_compiler_options
from tim_jax.model.files import read_json, write_json
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F16,
    GPU_EXACT_F32,
    GPU_FAMILIES,
    MOSAIC_GPU_BF16_SEVERAL_TILES,
    MOSAIC_GPU_EXACT_BF16,
    TPU_EXACT_BF16,
    TPU_EXACT_F32,
    TPU_FEW_ROWS,
    Family,
    FamilyChoice,
    Numerics,
    describe,
)
from tim_jax.placement import Devices, Placement
from tim_jax.rl import programs
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning

_ACCELERATED = {
    "pallas_gpu": (GPU_EXACT_F32, GPU_EXACT_BF16, GPU_EXACT_F16),
    "pallas_mosaic_gpu": (MOSAIC_GPU_EXACT_BF16,),
    "pallas_tpu": (TPU_EXACT_F32, TPU_EXACT_BF16),
}
# Platform -> the exact kernels made for it.
_OF_PLATFORM: Mapping[str, Family] = MappingProxyType(
    {"cpu": "tiles", "gpu": "pallas_gpu", "tpu": "pallas_tpu"}
)
# Before JAX 0.11.2, XLA:CPU has no update of a bfloat16 array in place: for every row that is
# written it widens the whole cache to float32 and rounds it back. So a step's cost grows with the
# square of the batch, a hundred times by 64 rows. Without this pass, XLA makes code for bfloat16 as
# it stands, which gives the same bits.
_UPDATES_IN_PLACE = {"xla_disable_hlo_passes": "float-normalization-bf16"}
# Those versions remove optimisation barriers before they fuse. In bfloat16 that has attention's
# exponential computed twice, once in the sum over its lanes, four times as slowly, and programs
# with many attentions take twice as long to compile. Without this pass the barriers hold, as they
# do in newer versions, and the bits are the same.
_BARRIERS_HOLD = {"xla_disable_hlo_passes": "cse_barrier_expander"}
_LONG = 1024  # from this many positions on, larger key blocks cost less
_NUMERICS = "numerics.json"
_EVAL_ROUNDS = 4  # times as many sequences as slots are queued at a time


def family_here(family: FamilyChoice) -> Family:
    """The family that "auto" stands for on the devices that programs are traced for.

    Raises:
      InputError: there are no exact kernels made for them.
    """
    if family != "auto":
        return family
    platform = pallas.platform()
    amd = platform == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower()
    if amd or platform not in _OF_PLATFORM:
        raise InputError(
            f'kernel family "auto": there are no kernels for {"AMD GPUs" if amd else platform};'
            ' set the family to "tiles" (numerics.family, or --family), which works everywhere'
        )
    return _OF_PLATFORM[platform]


def fixed_numerics(
    family: FamilyChoice, dtype: str, *, length: int, column_tiles: int = 1
) -> Numerics:
    """Numerics for sequences of up to `length` tokens that need no fact about the model.

    Raises:
      InputError: the family cannot have column tiles, or there is none for this platform.
    """
    family = family_here(family)
    if family in _ACCELERATED:
        known = {one.compute_dtype: one for one in _ACCELERATED[family]}
        # Dtypes that a family lacks are refused, by name, where its kernels are fitted to a model.
        own = known.get(dtype, replace(known["bfloat16"], compute_dtype=dtype))
        return replace(own, column_tiles=column_tiles)
    block, platform = 32 if length < _LONG else 128, pallas.platform()
    widens = platform == "cpu" and jax.__version_info__ < (0, 11, 2)
    numerics = Numerics(
        family=family,
        compute_dtype=dtype,
        kv_block=block,
        column_tiles=column_tiles,
        cache_write="rows" if platform == "cpu" else "scatter",
        row_sums="sorted" if platform == "gpu" else "scatter",
        head_gradient_columns=None if platform == "gpu" else Numerics.head_gradient_columns,
    )
    if not widens:
        return numerics
    numerics = numerics.with_options(_UPDATES_IN_PLACE)
    return numerics.with_options(_BARRIERS_HOLD) if dtype == "bfloat16" else numerics


def fitted_numerics(
    family: FamilyChoice,
    dtype: str,
    model: ModelConfig,
    *,
    length: int,
    column_tiles: int = 1,
    interpret: bool = False,
) -> Numerics:
    """The same with tiles that fit the model. `interpret`: run Pallas kernels without their device.

    Raises:
      InputError: the family cannot run this model, or not on this device. Where "auto" chose it,
        the line says so: to fall back to slow kernels without a word would be worse.
    """
    chosen = family_here(family)
    try:
        fixed = fixed_numerics(chosen, dtype, length=length, column_tiles=column_tiles)
        fixed = fitting.fitted(model, replace(fixed, interpret=interpret))
        fitting.check(model, fixed)
    except InputError as error:
        if family != "auto" or chosen == "tiles":
            raise
        reason = str(error).partition(": ")[2] or str(error)
        raise InputError(
            f'kernel family "auto" is {chosen!r} on this {pallas.platform().upper()}: {reason};'
            ' set the family to "tiles" (numerics.family, or --family), which is slower'
        ) from error
    return fixed


def make_numerics(
    family: FamilyChoice,
    dtype: str,
    model: ModelConfig,
    *,
    length: int,
    batch: int | None,
    column_tiles: int = 1,
    measured: Path | None = None,
    shared: Mismatch = mismatch.EXACT,
    several_tiles: bool = False,
    interpret: bool = False,
    options: Mapping[str, str | bool | int] = MappingProxyType({}),
) -> Numerics:
    """The same, and on a CPU with row ranges measured for decode batches of about `batch` rows;
    None: without. `measured` is the file that keeps these, if any. `shared` are differences of the
    dial that sampler and learner both have. `several_tiles`: see `with_several_tiles`.
    `options` are XLA's for every program, those that measure included.

    Raises:
      InputError: as `fitted_numerics` and `with_several_tiles`.
    """
    fixed = fitted_numerics(
        family, dtype, model, length=length, column_tiles=column_tiles, interpret=interpret
    )
    if several_tiles:
        fixed = with_several_tiles(fixed)
    fixed = fixed.with_options(options)
    both = shared.numerics(fixed)
    # Ranges are measured of whole contractions; those of parts of one are not known.
    cut = (both.order.split_k, both.order.ranks) != (1, 1)
    if batch is None or cut:
        return both
    # What is measured is of one dtype.
    own = both if both.compute_dtype != fixed.compute_dtype else fixed
    found = fitting.calibrate_once(model, own, batch=batch, longest=length, file=measured)
    # In the order of a divergent sampler, so that the entries decide where both say something.
    return shared.numerics(found)


def with_several_tiles(numerics: Numerics) -> Numerics:
    """These numerics with tiles of products that follow from a product's size.

    `pallas_gpu` has them in bfloat16 without being asked: a device has compared such tiles, though
    not all of today's (docs/kernels.md).

    Raises:
      InputError: there are no such tiles of the family and the dtype.
    """
    if numerics.family == "pallas_tpu":
        return replace(numerics, tpu=replace(numerics.tpu, few_rows=TPU_FEW_ROWS))
    if numerics.family not in GPU_FAMILIES or numerics.compute_dtype != "bfloat16":
        raise InputError(
            "numerics.several_tiles: only the families of kernels for TPUs, and those for GPUs in"
            f' bfloat16, have several tiles, got "{numerics.family}" in {numerics.compute_dtype}'
        )
    if numerics.family == "pallas_gpu":
        return numerics
    return replace(numerics, gpu=replace(numerics.gpu, matmul=MOSAIC_GPU_BF16_SEVERAL_TILES.matmul))


def kernels_used(model: ModelConfig, numerics: Iterable[Numerics]) -> dict[str, tuple[str, ...]]:
    """The names of the kernels that a model has under each of these, by `describe`."""
    return {describe(one): fitting.kernels_used(model, one) for one in numerics}


def read_numerics(folder: Path) -> dict[str, Any]:
    """What `write_numerics` wrote in a run's folder; nothing if it is not there or damaged."""
    try:
        return read_json(folder / _NUMERICS)
    except InputError:
        return {}


def write_numerics(folder: Path, execution: Execution, drawing: Numerics) -> None:
    """Writes how a run's numbers are computed, by which kernels and on what, into its folder.

    `execution` is the learner's, `drawing` the sampler's numerics.
    """
    learning, device = execution.numerics, jax.devices()[0]
    record = {
        "family": learning.family,
        "numerics": describe(learning),
        "kernels": fitting.kernels_used(execution.config, learning),
        "sampler_numerics": describe(drawing),
        "sampler_kernels": fitting.kernels_used(execution.config, drawing),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "processes": jax.process_count(),
        "jax": jax.__version__,
    }
    path = folder / _NUMERICS
    with writing(path):
        write_json(path, record)


def make_execution(
    config: RunConfig,
    model: Model,
    *,
    devices: Devices | None = None,
    measured: Path | None = None,
) -> Execution:
    """The one policy of sampler and learner.

    `devices`: those that are planned for; nothing is measured then. Left out: those at hand.
    `measured`: see `make_numerics`.
    """
    section = config.sampling
    length = section.max_prompt_length + section.longest
    if length > model.config.most_positions:
        raise InputError(
            f"sampling.{section.limit}: {section.longest} after a prompt of"
            f" {section.max_prompt_length} is {length} tokens, more than the model's"
            f" {model.config.most_positions} positions"
        )
    beyond = [t for t in section.stop_tokens if t >= model.config.vocab_size]
    if beyond:
        raise InputError(
            f"sampling.stop_tokens: {beyond[0]} is outside the model's vocabulary of"
            f" {model.config.vocab_size}"
        )
    where = config.placement.value
    tiles = Numerics(column_tiles=config.column_tiles)
    programs.check_placement(Execution(model.config, tiles, placement=where), devices)
    batch = max(1, config.sequences_per_step // where.shards)
    shared = config.sampler.shared_dial
    if devices is None:
        check_compiler_options(config.numerics.compiler_options)
    numerics = make_numerics(
        config.numerics.family,
        config.numerics.dtype,
        model.config,
        length=length,
        batch=batch if devices is None else None,
        column_tiles=config.column_tiles,
        measured=measured,
        shared=shared,
        several_tiles=config.numerics.several_tiles,
        options=config.numerics.compiler_options,
    )
    ends = stop_tokens(config, model)
    sampling = part(Sampling, section, stop_tokens=ends, max_tokens=section.longest)
    execution = Execution(model.config, numerics, sampling, where, shared.edits, model.lora)
    before = Numerics(family=numerics.family, compute_dtype=config.numerics.dtype)
    mismatch.check(shared, replace(execution, numerics=before))
    return execution


def on_one_device(config: RunConfig) -> RunConfig:
    """The config of the same numerics without its meshes, for which there may be no devices."""
    numerics = config.numerics.model_copy(update={"column_tiles": config.column_tiles})
    return config.model_copy(update={"numerics": numerics, "placement": type(config.placement)()})


def stop_tokens(config: RunConfig, model: Model) -> tuple[int, ...]:
    """The tokens that end a response of a run: those of its model and those of its config."""
    return tuple(sorted({*model.stop_tokens, *config.sampling.stop_tokens}))


def batch_evaluation(config: RunConfig, where: Placement) -> tuple[int, Batching]:
    """How many held-out problems are sampled at a time, and how their sequences are decoded."""
    section = config.eval
    slots = config.sampler.batching.slots or config.sequences_per_step
    # The prompts' keys and values of a whole batch are kept, so it is not the whole evaluation.
    batch = min(section.prompts, max(1, _EVAL_ROUNDS * slots // section.samples))
    # Whole rows for every device; the evaluation fills up with prompts that are not counted.
    batch += -batch % where.prompts_multiple(section.samples)
    return batch, replace(config.sampler.batching, slots=slots).rounded(where.shards)


def make_learning(config: RunConfig) -> Learning:
    """Returns how rollouts become gradients: objective, mode, corrections, micro-batches."""
    return part(
        Learning,
        config.learner,
        objective=config.objective,
        samples=config.sampling.samples,
        correction=config.correction,
    )


def make_training(config: RunConfig, execution: Execution) -> Training:
    """Returns the run of a config, as one value, by the policy of `make_execution`."""
    where, longest = config.placement, config.sampling.longest
    sampler = part(
        Sampler,
        config.sampler,
        placement=None if where.for_sampler == execution.placement else where.for_sampler,
        own_devices=where.split,
        mismatch=config.sampler.own_dial,
    )
    return part(
        Training,
        config.learner,
        execution=execution,
        learning=make_learning(config),
        optimizer=config.optimizer.chain(steps=config.updates, max_tokens=longest),
        turns=config.turns,
        sampler=sampler,
        exact=config.exact == "required",
    )
