"""Rows as they stand in a file or in memory, with token ids made of text, and how they ended."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import DEEPEST, expanded, json_value, shown
from tim_jax.tasks.base import Message
from tim_jax.tasks.text import encode_prompt, encode_text

_SUFFIXES = (".jsonl", ".json", ".parquet")
# Of a request of chat messages: what makes another prompt of them.
_MAKES_ANOTHER = ("tools", "documents", "continue_final_message", "chat_template")
SHAPING = (
    *("chat_template_kwargs", "add_generation_prompt", *_MAKES_ANOTHER),
    *("add_special_tokens", "truncate_prompt_tokens"),  # of text too
)
# How a response ended: by an end token, by something else (a stop string, a tool call, an abort),
# or it was cut at the longest length.
Ended = Literal["token", "other", "cut"]
_CUT = ("length", "limit", "max_tokens", "max_length", "max_new_tokens")
_STOPPED = ("stop", "eos", "eos_token", "end_turn", "stop_token")


class Row(NamedTuple):
    """One row of a file, and its place, such as `rollouts.jsonl, line 3`."""

    values: Any
    where: str


def read_lines(source: Any) -> Iterator[Row | InputError]:
    """Yields what a file or a sequence of mappings holds, line by line, as it stands there.

    A line that is no JSON is yielded as the `InputError` that says so.

    Raises:
      InputError: there is no such file, or it cannot be read at all.
    """
    if not isinstance(source, str | Path):
        yield from (Row(values, f"row {i}") for i, values in enumerate(source, 1))
        return
    path = expanded(source)
    if path.suffix not in _SUFFIXES:
        raise InputError(f"rollouts {path}: unknown file type; known: {', '.join(_SUFFIXES)}")
    if not path.is_file():
        raise InputError(f"rollouts {path}: no such file")
    yield from _parquet(path) if path.suffix == ".parquet" else _json(path)


def _json(path: Path) -> Iterator[Row | InputError]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"rollouts {path}: cannot be read: {error}") from error
    if path.suffix == ".json":
        values = json_value(text, f"rollouts {path}")
        several = isinstance(values, list)
        for number, value in enumerate(values if several else [values], 1):
            yield Row(value, f"{path}, row {number}" if several else f"{path}")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield Row(json_value(line, where), where)
            except InputError as error:
                yield error


def _parquet(path: Path) -> Iterator[Row]:
    if find_spec("pyarrow") is None:
        raise InputError(f"rollouts {path}: Parquet needs pyarrow: pip install 'tim-jax[math]'")
    from pyarrow import ArrowException, parquet  # an extra

    try:
        values = parquet.read_table(path).to_pylist(maps_as_pydicts="strict")
    except (OSError, ArrowException, KeyError) as error:  # KeyError: a map has a key twice
        reason = shown(f"{error}")
        raise InputError(f"rollouts {path}: not readable as Parquet: {reason}") from error
    yield from (Row(row, f"{path}, row {number}") for number, row in enumerate(values, 1))


def plain_values(values: Mapping[str, Any], *, whole: Collection[str]) -> dict[str, Any]:
    """The values of a row, arrays as lists, and None where a table has a gap.

    Args:
      values: of a line, or of a row in memory.
      whole: the keys of whole numbers: a table's column of them with gaps is one of floats.
    """
    return {key: _without_gap(x, whole=key in whole) for key, x in _listed(values).items()}


def _without_gap(value: Any, *, whole: bool) -> Any:
    """A value; None for a gap."""
    if is_gap(value):
        return None
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def is_gap(value: Any) -> bool:
    """Whether there is nothing: None, or pandas' NaN, which tables have in its place."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def _listed(value: Any, depth: int = DEEPEST) -> Any:
    """Arrays and tensors as lists, wherever they stand in a row."""
    if not depth or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _listed(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(inner, depth - 1) for inner in value]
    return _listed(value.tolist(), depth - 1) if hasattr(value, "tolist") else value


def with_ids(values: Mapping[str, Any], tokenizer: Any) -> tuple[dict[str, Any], bool]:
    """A row with token ids made of text where only text is there, and whether any were.

    Raises:
      InputError: they cannot be made as the engine had them.
    """
    made: dict[str, Any] = {}
    for ids, text in (("prompt_token_ids", "prompt"), ("response_token_ids", "text")):
        if values.get(ids) is not None or not values.get(text):
            continue
        if tokenizer is None:
            raise InputError(f"has {text} but no {ids}, and there is no tokenizer")
        if text == "prompt":
            made[ids] = _prompt_ids(values, tokenizer)
        elif isinstance(values[text], str):
            made[ids] = encode_text(tokenizer, values[text], where=text)
    made = {ids: found for ids, found in made.items() if found is not None}
    return {**values, **made}, bool(made)


def _prompt_ids(values: Mapping[str, Any], tokenizer: Any) -> list[int] | None:
    """The token ids of a prompt that is text or messages; None if it is neither.

    Text is taken as the engine was given it; messages went through the template there.
    """
    _check_messages(values["prompt"])
    prompt = prompt_text(values["prompt"])
    if prompt is None:
        return None
    plain = isinstance(prompt, str)
    shapes = [x for x in ("truncate_prompt_tokens",) if values.get(x) is not None]
    shapes += [x for x in ("add_special_tokens",) if plain and values.get(x) is False]
    if shapes:
        raise InputError(
            f"{shapes[0]} = {shown(values[shapes[0]])} shaped the prompt, which is not tokenised"
            " again with it; give prompt_token_ids"
        )
    options = {} if plain else _template_options(values)
    return encode_prompt(tokenizer, prompt, chat_template=not plain, template_options=options)


def _check_messages(prompt: Any) -> None:
    """Refuses chat messages with more than a role and content, which a template may also write."""
    for number, message in enumerate(prompt if isinstance(prompt, list) else ()):
        more = {**message} if isinstance(message, Mapping) else {}
        for key, value in more.items():
            if value and key not in ("role", "content"):
                raise InputError(
                    f"message {number} of the prompt has {key} = {shown(value)}, but a prompt is"
                    " made again of role and content alone; give prompt_token_ids"
                )


def _template_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the request of chat messages says of the template."""
    shapes = [name for name in _MAKES_ANOTHER if values.get(name)]
    shapes += [x for x in ("add_generation_prompt",) if values.get(x) is False]
    if shapes:
        raise InputError(
            f"{shapes[0]} shaped the prompt, which is not made again from its messages with it;"
            " give prompt_token_ids"
        )
    options = values.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise InputError(f"chat_template_kwargs must be a mapping, got {shown(options)}")
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


def how_ended(values: Mapping[str, Any]) -> tuple[Ended | None, int | None]:
    """How a response ended, and the end token by which, as far as the row says it.

    vLLM's `stop_reason` is the stop string or the end token, or null for the model's own; SGLang's
    `matched` is one of the two. Tinker's `stop_reason` is what others call `finish_reason`.
    """
    reason, by = values.get("finish_reason"), values.get("stop_reason")
    if reason is None and isinstance(by, str) and by.lower() in (*_CUT, *_STOPPED):
        return how_ended({"finish_reason": by, "stop": values.get("stop")})
    if isinstance(reason, Mapping):
        reason, by = reason.get("type"), reason.get("matched", by)
    word = None if reason is None else str(reason).lower()
    if word in _CUT:
        return "cut", None
    if word is not None and word not in _STOPPED:
        return "other", None
    if isinstance(by, int) and not isinstance(by, bool):
        return "token", by
    if isinstance(by, str) and by:
        return "other", None
    if word == "stop" and values.get("stop") and "stop_reason" not in values:
        return None, None  # by one of the stop strings, or by an end token
    return (None if word is None else "token"), None
