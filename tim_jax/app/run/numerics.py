"""The numerics of a run: the family of kernels, tiles that fit the model, and what was measured."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jax

from tim_jax import mismatch
from tim_jax.common.errors import InputError, writing
from tim_jax.kernels import pallas
from tim_jax.mismatch import Mismatch
from tim_jax.model import calibration, fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution
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

_ACCELERATED = {
    "pallas_gpu": {
        "float32": GPU_EXACT_F32,
        "bfloat16": GPU_EXACT_BF16,
        "float16": GPU_EXACT_F16,
    },
    # Dtypes that a family lacks are refused, by name, where its kernels are fitted to a model.
    "pallas_mosaic_gpu": {
        "float32": replace(MOSAIC_GPU_EXACT_BF16, compute_dtype="float32"),
        "bfloat16": MOSAIC_GPU_EXACT_BF16,
        "float16": replace(MOSAIC_GPU_EXACT_BF16, compute_dtype="float16"),
    },
    "pallas_tpu": {
        "float32": TPU_EXACT_F32,
        "bfloat16": TPU_EXACT_BF16,
        "float16": replace(TPU_EXACT_BF16, compute_dtype="float16"),
    },
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
        return replace(_ACCELERATED[family][dtype], column_tiles=column_tiles)
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
) -> Numerics:
    """The same, and on a CPU with row ranges measured for decode batches of about `batch` rows;
    None: without. `measured` is the file that keeps these, if any. `shared` are differences of the
    dial that sampler and learner both have. `several_tiles`: see `with_several_tiles`.

    Raises:
      InputError: as `fitted_numerics` and `with_several_tiles`.
    """
    fixed = fitted_numerics(family, dtype, model, length=length, column_tiles=column_tiles)
    if several_tiles:
        fixed = with_several_tiles(fixed)
    both = shared.numerics(fixed)
    # Ranges are measured of whole contractions; those of parts of one are not known.
    cut = (both.order.split_k, both.order.ranks) != (1, 1)
    if batch is None or cut:
        return both
    options = {"batch": batch, "longest": length, "file": measured}
    if both.compute_dtype != fixed.compute_dtype:  # what is measured is of one dtype
        return calibration.calibrate_once(model, both, **options)
    # In the order of a divergent sampler, so that the entries decide where both say something.
    return shared.numerics(calibration.calibrate_once(model, fixed, **options))


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


def write_numerics(path: Path, execution: Execution, drawing: Numerics) -> None:
    """Writes how a run's numbers are computed, by which kernels and on what, as JSON.

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
    with writing(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
