"""Token ids of prompts and responses that were recorded as text or chat messages alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.instruments.diagnosis.lines import Row
from tim_jax.tasks.base import Message
from tim_jax.tasks.text import encode_prompt, encode_text

# Of a request of chat messages: what makes another prompt of them.
_MAKES_ANOTHER = ("tools", "documents", "continue_final_message", "chat_template")
SHAPING = (
    *("chat_template_kwargs", "add_generation_prompt", *_MAKES_ANOTHER),
    *("add_special_tokens", "truncate_prompt_tokens"),  # of text too
)


def with_ids(row: Row, tokenizer: Any) -> tuple[Any, bool]:
    """The values with token ids made of text where only text is there, and whether any were."""
    values = row.values
    if not isinstance(values, Mapping):
        raise InputError(f"{row.where}: must be an object with keys, got {shown(values)}")
    made: dict[str, Any] = {}
    for ids, text in (("prompt_token_ids", "prompt"), ("response_token_ids", "text")):
        if values.get(ids) is not None or not values.get(text):
            continue
        if tokenizer is None:
            raise InputError(f"{row.where}: has {text} but no {ids}, and there is no tokenizer")
        if ids == "prompt_token_ids":
            _check_messages(row, values[text])
        prompt = prompt_text(values[text])
        if ids == "prompt_token_ids" and prompt is not None:
            # Text is taken as the engine was given it; messages went through the template there.
            plain = isinstance(prompt, str)
            _check_text(row.values, row.where, plain=plain)
            made[ids] = encode_prompt(
                tokenizer,
                prompt,
                chat_template=not plain,
                template_options={} if plain else _template_options(row),
                where=f"{row.where}: prompt",
            )
        elif isinstance(values[text], str):
            made[ids] = encode_text(tokenizer, values[text], where=f"{row.where}: {text}")
    return {**values, **made}, bool(made)


def _check_messages(row: Row, prompt: Any) -> None:
    """Refuses chat messages with more than a role and content, which a template may also write."""
    for number, message in enumerate(prompt if isinstance(prompt, list) else ()):
        more = {**message} if isinstance(message, Mapping) else {}
        for key, value in more.items():
            if value and key not in ("role", "content"):
                raise InputError(
                    f"{row.where}: message {number} of the prompt has {key} = {shown(value)}, but a"
                    " prompt is made again of role and content alone; give prompt_token_ids"
                )


def _check_text(asked: Mapping[str, Any], where: str, *, plain: bool) -> None:
    """Refuses what makes other tokens of a prompt than are made here."""
    names = ["truncate_prompt_tokens"] if asked.get("truncate_prompt_tokens") is not None else []
    names += ["add_special_tokens"] if plain and asked.get("add_special_tokens") is False else []
    if names:
        raise InputError(
            f"{where}: {names[0]} = {shown(asked[names[0]])} shaped the prompt, which is not"
            " tokenised again with it; give prompt_token_ids"
        )


def _template_options(row: Row) -> Mapping[str, Any]:
    """What the request of chat messages says of the template."""
    asked = row.values
    shapes = [name for name in _MAKES_ANOTHER if asked.get(name)]
    shapes += ["add_generation_prompt"] if asked.get("add_generation_prompt") is False else []
    if shapes:
        raise InputError(
            f"{row.where}: {shapes[0]} shaped the prompt, which is not made again from its messages"
            " with it; give prompt_token_ids"
        )
    options = asked.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise InputError(
            f"{row.where}: chat_template_kwargs must be a mapping, got {shown(options)}"
        )
    return options


def prompt_text(value: Any) -> str | tuple[Message, ...] | None:
    """A prompt that is text or chat messages of text; None if it is neither."""
    if isinstance(value, str):
        return value or None
    messages = value if isinstance(value, Sequence) else ()
    try:
        return tuple(Message(str(m["role"]), _content(m["content"])) for m in messages) or None
    except (KeyError, TypeError):
        return None


def _content(value: Any) -> str:
    """The text of a chat message, of its parts if it has some; TypeError for another part."""
    if isinstance(value, str):
        return value
    if any(part["type"] != "text" for part in value):
        raise TypeError
    return "".join(part["text"] for part in value)
