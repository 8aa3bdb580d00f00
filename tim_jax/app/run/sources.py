"""The model of a run: initialised at random, or read from a folder or the hub."""

from dataclasses import dataclass, replace
from typing import Any

from tim_jax.app.config.model import Architecture, LoraSection
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import (
    part,
)
from tim_jax.common.errors import InputError
from tim_jax.model import adapters, hf, peft
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig, check_stop_tokens
from tim_jax.model.files import load_tokenizer
from tim_jax.model.parameters import init_params
from tim_jax.tasks import builtin
from tim_jax.tasks.text import character_tokenizer


@dataclass(frozen=True)
class Model:
    """A model as it stands in a folder or is initialised: what to compute, and from what."""

    config: ModelConfig
    params: Any  # master weights, on the host; None until they are read
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    lora: Lora | None = None  # if adapters are trained; they are among the parameters then


def load_model(source: str) -> Model:
    """A checkpoint folder or hub name."""
    model = open_model(source)
    return replace(model, params=hf.load_params(source, model.config))


def open_model(source: str) -> Model:
    """The same without its weights, for all that can be said before they are read.

    Raises:
      InputError: as the functions of `model.hf`, or nothing would ever end a response.
    """
    folder = hf.resolve(source)
    config = hf.load_config(folder)
    tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size)
    generation = hf.load_generation_config(folder).get("eos_token_id")
    found = generation if isinstance(generation, list) else [generation]
    stops = {tokenizer.eos_token_id, *config.eos_token_ids, *found} - {None}
    try:
        check_stop_tokens(sorted(stops), config.vocab_size)
    except InputError as error:
        raise InputError(f"{folder / 'generation_config.json'}: {error}") from None
    if not stops:
        raise InputError(
            f"model {source!r}: no token ends a response: its tokenizer has no eos token, and"
            " config.json and generation_config.json have no eos_token_id"
        )
    return Model(config, None, tokenizer, tuple(sorted(stops)))


def random_model(architecture: Architecture, *, seed: int) -> Model:
    """A Qwen3 with random weights and the built-in tasks' character tokenizer."""
    model = _unmade_model(architecture)
    return replace(model, params=init_params(model.config, seed))


def _unmade_model(architecture: Architecture) -> Model:
    tokenizer: Any = character_tokenizer(builtin.ALPHABET)
    return Model(random_config(architecture), None, tokenizer, (tokenizer.eos_token_id,))


def random_config(architecture: Architecture) -> ModelConfig:
    """What `random_model` computes."""
    tokenizer: Any = character_tokenizer(builtin.ALPHABET)
    return ModelConfig(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        **architecture.model_dump(exclude={"tied"}),
        tied_embeddings=architecture.tied,
        qk_norm=True,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(config: RunConfig) -> Model:
    """Returns the model of a config: initialised at random, or read from a folder or the hub."""
    return with_params(begin_model(config), config)


def begin_model(config: RunConfig) -> Model:
    """The same without its weights."""
    architecture = config.model.random_architecture
    if architecture is not None:
        model = _unmade_model(architecture)
    else:
        assert config.model.path is not None  # the section has exactly one source
        model = open_model(config.model.path)
    return replace(model, lora=make_lora(config.lora, model.config))


def with_params(model: Model, config: RunConfig) -> Model:
    """The model that was begun, with its weights drawn or read."""
    path = config.model.path
    if path is None:
        params = init_params(model.config, config.seed)
    else:
        params = hf.load_params(path, model.config, dtype=config.numerics.dtype)
    params = adapted(params, config.lora, model.lora, model.config, config.seed)
    return replace(model, params=params)


def make_lora(section: LoraSection | None, model: ModelConfig) -> Lora | None:
    """The adapters that a section asks for, if there is one.

    Raises:
      InputError: the model has no such matrix, or there is no adapter to start from.
    """
    if section is None:
        return None
    lora = part(Lora, section) if section.path is None else peft.load_config(section.path)
    adapters.targets(model, lora)
    return lora


def adapted(
    params: Any, section: LoraSection | None, lora: Lora | None, model: ModelConfig, seed: int
) -> Any:
    """Parameters on the host with adapters: new ones, or those that the section says to start from.

    Without a section, the parameters as they are.

    Raises:
      InputError: these do not fit the model.
    """
    if section is None or lora is None:
        return params
    if section.path is None:
        trained = adapters.init(model, lora, seed)
    else:
        trained = peft.load(section.path, model).arrays
    return adapters.whole(trained, adapters.narrowed(params))
