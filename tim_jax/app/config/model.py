"""The sections of a run's configuration about its model: where it comes from, what is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tim_jax.app.config.sections import Count, Section, part, refusal
from tim_jax.common.errors import InputError
from tim_jax.model.adapters import Lora


class Architecture(Section):
    """A Qwen3 to be initialised at random; its vocabulary is that of the task's tokenizer."""

    hidden_size: Count = 128
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: Count = 2
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    intermediate_size: Count = 512
    max_positions: Count = 256
    """Longest prompt and response together, in tokens."""
    tied: bool = True
    """The head is the transpose of the embedding."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise refusal(
                "num_kv_heads", self.num_kv_heads, f"must divide num_heads = {self.num_heads}"
            )
        return self


PRESETS: Mapping[str, Architecture] = {
    "tiny": Architecture(),  # about 1M parameters
    "small": Architecture(
        hidden_size=256,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=768,
        max_positions=1024,
    ),
}


@dataclass(frozen=True, kw_only=True)
class LoraSection(Lora):
    """Adapters are trained in place of all weights, which stay as they are."""

    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of matrices such as "q_proj"; left out: all of attention and MLP."""
    path: str | None = None
    """A folder with an adapter of PEFT to start from, which says rank, alpha and targets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and part(Lora, self) != Lora():
            raise InputError("Lora: path has a rank, alpha and targets of its own; leave them out")


class Model(Section):
    """Where the model comes from: exactly one of `path`, `preset` and `architecture`."""

    path: str | None = None
    """Checkpoint folder, or a name on the Hugging Face hub."""
    preset: Literal["tiny", "small"] | None = None
    """A random-initialised architecture by name."""
    architecture: Architecture | None = None
    """A random-initialised architecture, spelt out."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Whether text prompts are put into the tokenizer's chat template; auto: if it has one."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, such as `enable_thinking = false` for Qwen3."""

    @property
    def random_architecture(self) -> Architecture | None:
        """The architecture to initialise at random; None if the model comes from `path`."""
        return PRESETS[self.preset] if self.preset else self.architecture

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("path", "preset", "architecture") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise refusal("", None, f"needs exactly one of path, preset, architecture; has {found}")
        return self
