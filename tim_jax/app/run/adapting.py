"""From a run's section on adapters to their sizes, and to the parameters that it begins with."""

from typing import Any

from tim_jax.app.config.model import LoraSection
from tim_jax.app.config.sections import part
from tim_jax.model import adapters, peft
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig


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
