"""A model as one value: loaded from a folder or the hub, and written again."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike

from tim_jax import mismatch, placement
from tim_jax.app.run import assembly, sources
from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import check_whole, refuse_unknown, shown
from tim_jax.mismatch import Entry, Mismatch
from tim_jax.model import adapters, fitting, hf
from tim_jax.model.adapters import Adapter
from tim_jax.model.config import ModelConfig, check_stop_tokens
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import COMPUTE_DTYPES, FAMILIES, FamilyChoice, Numerics
from tim_jax.placement import SINGLE, Placement, check_all_used
from tim_jax.rl import programs
from tim_jax.rl.training import Training


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A language model, and how its numbers are computed: by the sampler and by the learner alike.

    A value: nothing here changes it, and training gives new ones. `dataclasses.replace` makes one
    with another tokenizer, placement, or numerics of your own.
    """

    config: ModelConfig
    """The architecture."""
    params: Any
    """The float32 master weights, a tree of arrays."""
    tokenizer: Any
    """Of `transformers`, with its chat template."""
    stop_tokens: tuple[int, ...]
    """Token ids that end a response."""
    numerics: Numerics
    """Kernels, dtypes and orders of sums: fixed here, so that `sample`, `score` and `grpo` of one
    model give the same bits whatever their batches."""
    placement: Placement = SINGLE
    """The devices that it is spread over."""
    chat_template: bool | Literal["auto"] = "auto"
    """Whether prompts go through the tokenizer's template; "auto": if there is one."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as {"enable_thinking": False}."""
    adapter: Adapter | None = None
    """Low-rank adapters on top of the weights, of `load_adapter` or of a step. What is computed has
    them merged; `grpo` and `learn` go on to train them, and them alone."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json as it was read, such as the defaults that an engine samples with.
    `save` writes it again; nothing here samples by it."""

    @property
    def dtype(self) -> str:
        """The dtype that weights and activations have while they are computed with."""
        return self.numerics.compute_dtype

    @cached_property
    def weights(self) -> Any:
        """The parameters as they are computed with, on the devices: made once, then kept."""
        return _preparation(self.execution(Sampling(1)))(self._all_params)

    @property
    def merged_params(self) -> Any:
        """The parameters, float32, with the adapters merged, if there are any."""
        if self.adapter is None:
            return self.params
        return programs.merged_program(self.execution(Sampling(1)))(self._all_params)

    @property
    def _all_params(self) -> Any:
        adapter = self.adapter
        return self.params if adapter is None else adapters.whole(adapter.arrays, self.params)

    @property
    def most_tokens(self) -> int:
        """Of a response if nothing else is said: 256, or half of the model's positions if less."""
        return min(256, self.config.most_positions // 2)

    def execution(self, sampling: Sampling) -> Execution:
        """All that turns these weights into tokens and log-probs of a distribution."""
        stops = tuple(sorted({*self.stop_tokens, *sampling.stop_tokens}))
        lora = None if self.adapter is None else self.adapter.lora
        sampling = replace(sampling, stop_tokens=stops)
        return Execution(self.config, self.numerics, sampling, self.placement, lora=lora)

    def training(self, **changes: Any) -> Training:
        """How `grpo` trains this model if nothing else is said, with fields changed by name.

        `model.training(micro_batch=4, epochs=2, slots=64)`; see `Training.varied`. `mismatch` may
        be a list of entries, such as `[tim_jax.mismatch.kv_cache(dtype="float8_e4m3fn")]`.
        `stop_tokens` are besides the model's own.

        Raises:
          InputError: there is no such field, or a value is refused.
        """
        execution = self.execution(Sampling(self.most_tokens))
        if "mismatch" in changes:
            changes["mismatch"] = _dial(changes["mismatch"])
        run = Training(execution).varied(**changes)
        stops = {*self.stop_tokens, *run.execution.sampling.stop_tokens}
        check_stop_tokens(sorted(stops), self.config.vocab_size, name="training: stop token")
        return run.varied(stop_tokens=tuple(sorted(stops)))

    def __repr__(self) -> str:
        size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.params))
        return (
            f"Model({self.config.model_type}, {size:,} parameters, {self.numerics.family}"
            f" {self.dtype}, {self.placement})"
        )


def _dial(entries: Any) -> Mismatch:
    """Entries as values or as a configuration's tables."""
    if isinstance(entries, Mismatch):
        return entries
    if isinstance(entries, Entry | Mapping | str) or not isinstance(entries, Iterable):
        raise InputError(
            "training: mismatch must be a list of entries, such as"
            f' [tim_jax.mismatch.kv_cache(dtype="float8_e4m3fn")], got {shown(entries)}'
        )
    values: list[Entry] = []
    for entry in entries:
        values += [entry] if isinstance(entry, Entry) else mismatch.build([entry]).entries
    return Mismatch(tuple(values))


_preparation = lru_cache(maxsize=16)(programs.weights_program)


def check_model(where: str, model: object) -> None:
    """Refuses what is no model, such as the path of one."""
    if not isinstance(model, Model):
        raise InputError(f"{where}: model must be what tim_jax.load returns, got {shown(model)}")


def check_jax(where: str) -> None:
    """Refuses settings of JAX under which models are not computed."""
    if jax.numpy.result_type(float) != np.float32:
        raise InputError(
            f"{where}: jax_enable_x64 is True, and models are computed in 32 bits; call it within"
            " `with jax.enable_x64(False):`"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        raise InputError(
            f"{where}: is called within jax.set_mesh of {dict(mesh.shape)}, but a model has a mesh"
            " of its own, tim_jax.load(placement=...); call it outside"
        )


@refuse_unknown
def load(
    source: str | Path,
    *,
    dtype: DTypeLike = "float32",
    family: FamilyChoice = "auto",
    placement: Placement | None = None,
    decode_batch: int | None = None,
) -> Model:
    """Loads a model with its tokenizer.

    Args:
      source: a folder as `transformers` writes it, a name on the Hugging Face hub, the folder of a
        finished run of `tim-jax train`, or "tiny": a model of 0.4M parameters that comes with the
        package and sorts digits, such as "3120>", right in two cases of three.
      dtype: what it computes with, "float32", "bfloat16" or "float16", or a dtype of that name such
        as `jnp.bfloat16`; master weights are always float32.
      family: the kernels; "auto" takes the exact ones for the device at hand.
      placement: the devices that it is spread over. None: one device, and under several processes
        all of theirs, on the fsdp axis.
      decode_batch: sequences that are to be decoded together, a hint for speed on CPUs. With it,
        loading takes some seconds longer, to measure which tile sizes keep the bits on this
        machine; sampling hundreds of sequences is then up to twice as fast. None: tiles that need
        no measurement. Exact either way.

    Raises:
      InputError: there is no such model, it is not supported, or it cannot be placed so; the run
        has no final model yet, or one that its checkpoints have left behind.
    """
    dtype = dtype_name("load: dtype", dtype)
    check_choice("load: family", family, ("auto", *FAMILIES))
    if not isinstance(source, str | Path):
        raise InputError(f"load: source must be a folder or a name, got {shown(source)}")
    if decode_batch is not None:
        decode_batch = check_whole("load: decode_batch", decode_batch, least=1)
    model = begin(source, dtype=dtype, family=family, placement=placement)
    return complete(model, source, decode_batch=decode_batch)


def dtype_name(what: str, dtype: DTypeLike) -> str:
    """The name of a dtype that a model can compute with: "bfloat16" of `jnp.bfloat16`.

    Raises:
      InputError: it is another one, or none.
    """
    try:
        if dtype is None:  # NumPy's float64
            raise TypeError
        name = dtype if isinstance(dtype, str) else jax.numpy.dtype(dtype).name
    except TypeError:
        name = shown(dtype)
    check_choice(what, name, COMPUTE_DTYPES)
    return name


def begin(
    source: str | Path, *, dtype: str, family: FamilyChoice, placement: Placement | None
) -> Model:
    """What `load` knows before it measures the machine and reads weights: `params` are None."""
    found = sources.open_model(str(sources.final_model(source)))
    if not isinstance(placement, Placement | None):
        raise InputError(f"load: placement must be a tim_jax.Placement, got {shown(placement)}")
    where = placement
    if where is None:
        where = SINGLE if jax.process_count() == 1 else Placement(fsdp=jax.device_count())
    check_all_used(where)
    tiles = Numerics(column_tiles=where.tensor)
    programs.check_placement(Execution(found.config, tiles, placement=where))
    if family == "auto" and str(source) in hf.SHIPPED:
        family = "tiles"  # its vocabulary is too small for the kernels of GPUs
    numerics = assembly.fitted_numerics(
        family,
        dtype,
        found.config,
        length=found.config.most_positions,
        column_tiles=where.tensor,
    )
    return Model(
        found.config,
        None,
        found.tokenizer,
        found.stop_tokens,
        numerics,
        where,
        generation=found.generation,
    )


def complete(
    model: Model, source: str | Path, *, decode_batch: int | None, file: Path | None = None
) -> Model:
    """A model that was begun, as `load` gives it. `file` keeps what is measured of the machine."""
    numerics = model.numerics
    if decode_batch is not None:
        batch = max(1, decode_batch // model.placement.shards)
        longest = model.config.most_positions
        numerics = fitting.calibrate_once(
            model.config, numerics, batch=batch, longest=longest, file=file
        )
    placement.agree(repr(numerics), "what was measured of its machine")
    params = hf.load_params(sources.final_model(source), model.config, dtype=model.dtype)
    return replace(model, params=params, numerics=numerics)


@refuse_unknown
def save(model: Model, folder: str | Path, *, dtype: DTypeLike = "float32") -> Path:
    """Writes a model and its tokenizer as `transformers` loads them: all of it, or nothing.

    Under several processes all must call this, and process 0 writes.

    Args:
      model: of `load` or of a step of `grpo`.
      folder: a new or empty one; nothing is ever overwritten.
      dtype: of the weights in the files, "float32", "bfloat16" or "float16". float32 keeps every
        bit.

    Raises:
      InputError: the folder exists and is not empty, or cannot be written.
    """
    check_model("save", model)
    stored = dtype_name("save: dtype", dtype)
    made = hf.generation_config(model.config, model.tokenizer, model.stop_tokens, model.generation)
    how: Any = {"tokenizer": model.tokenizer, "generation": made, "dtype": stored}
    params = placement.whole(model.merged_params)
    return Path(placement.led(lambda: str(hf.save(folder, params, model.config, **how))))


def named_arrays(model: Model, *, dtype: DTypeLike = "float32") -> Iterator[tuple[str, np.ndarray]]:
    """The weights as `save` would write them, for the update call of a running engine.

        engine.load_weights((name, torch.from_numpy(x)) for name, x in tim_jax.named_arrays(model))

    One tensor at a time is on the host. Adapters of a step are merged in `step.model`. NumPy has no
    bfloat16 of its own: arrays of "bfloat16" have the dtype of `ml_dtypes`.

    Args:
      model: of `load`, or of a step of `grpo` or `learn`.
      dtype: of the arrays, as in `save`.

    Yields:
      (name in `transformers`' layout, array).

    Raises:
      InputError: another dtype, or a value beyond its range.
    """
    check_model("named_arrays", model)
    own = dtype_name("named_arrays: dtype", dtype)
    return hf.named_arrays(placement.whole(model.merged_params), model.config, dtype=own)


def load_adapter(folder: str | Path, model: Model) -> Adapter:
    """Reads an adapter as PEFT writes it; `dataclasses.replace(model, adapter=...)` adds it.

    Raises:
      InputError: it is not there, not of this model, or has what is not supported.
    """
    check_model("load_adapter", model)
    return adapters.load(folder, model.config)


def save_adapter(adapter: Adapter, folder: str | Path, model: Model) -> Path:
    """Writes an adapter of `step.adapter` as PEFT loads it, float32: all of it, or nothing.

    Under several processes all must call this, and process 0 writes.

    Args:
      adapter: what was trained.
      folder: a new or empty one; nothing is ever overwritten.
      model: that it was trained on.

    Raises:
      InputError: the folder exists and is not empty, or cannot be written.
    """
    check_model("save_adapter", model)
    if not isinstance(adapter, Adapter):
        raise InputError(f"save_adapter: adapter must be that of a step, got {shown(adapter)}")
    whole = replace(adapter, arrays=placement.whole(adapter.arrays))
    return Path(placement.led(lambda: str(adapters.save(folder, whole, model.config))))
