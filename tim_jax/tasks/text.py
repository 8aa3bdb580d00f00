"""Tokenizers, and prompts as token ids. Tokenizers are `transformers`' `PreTrainedTokenizerFast`.

`character_tokenizer` makes a small one for the built-in tasks, with one token per character; it is
saved, loaded and used like any other.
"""

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from types import FrameType, MappingProxyType
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import EOS, Message, first_line

PAD = "<pad>"
MOST_LINES = 3_000_000  # of a chat template's program, for one prompt: some seconds
SHOWN = 60  # characters of a prompt quoted in an error
_CLOCK = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])((?:(?!\1).)*)\1\s*\)""")
_AT_A_TIME = 1024  # prompts that are encoded together


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character: pad is 0, eos is 1, then the alphabet.

    A character outside the alphabet cannot be encoded (`encode_prompt` says which).

    Raises:
      InputError: if the alphabet is empty or has a character twice.
    """
    if not alphabet:
        raise InputError("alphabet must have at least one character")
    twice = sorted({letter for letter in alphabet if alphabet.count(letter) > 1})
    if twice:
        raise InputError(f"alphabet must have each character once; twice: {''.join(twice)!r}")
    # The unknown token is named but not in the vocabulary: so the library refuses an unknown
    # character, where it would drop it otherwise.
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def uses_template(
    tokenizer: PreTrainedTokenizerFast, chat_template: bool | Literal["auto"]
) -> bool:
    """Whether prompts go through the chat template; `auto`: if the tokenizer has one."""
    return bool(tokenizer.chat_template) if chat_template == "auto" else chat_template


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Sequence[Message],
    *,
    chat_template: bool | Literal["auto"] = "auto",
    template_options: Mapping[str, Any] = MappingProxyType({}),
    max_length: int | None = None,
    where: str = "prompt",
) -> list[int]:
    """Returns the token ids of a prompt, ready for a response to follow.

    Args:
      prompt: text or chat messages.
      chat_template: True puts the prompt, text as a user's message, through the tokenizer's chat
        template with the opening of the assistant's turn. False takes it as plain text, messages
        joined by blank lines, after the bos token if the tokenizer has its texts begin with one.
        `auto` is True if the tokenizer has a template.
      template_options: variables of the template, such as {"enable_thinking": False}; see `dated`.
      max_length: most tokens allowed.
      where: what the prompt is called in errors, such as `train prompt 17`.

    Raises:
      InputError: if the prompt is empty or too long, if the tokenizer has no chat template or
        cannot fill it, or cannot encode a character.
    """
    templated = uses_template(tokenizer, chat_template)
    text = _as_text(tokenizer, prompt, templated, template_options, where)
    opening = [] if templated else _opening(tokenizer)
    ids = opening + encode_text(tokenizer, text, where=where)
    if not ids:
        raise InputError(f"{where} is empty")
    if max_length is not None and len(ids) > max_length:
        raise InputError(
            f"{where} has {len(ids)} tokens, at most {max_length} are allowed: {_quoted(prompt)}"
        )
    return ids


def dated(
    tokenizer: PreTrainedTokenizerFast, options: Mapping[str, Any], now: datetime
) -> Mapping[str, Any]:
    """Template options with which a chat template that prints the date prints that of `now`.

    Templates ask `strftime_now`, whose answers change from day to day. They are put into the
    template as text.

    Raises:
      InputError: the template computes what it asks.
    """
    given = options.get("chat_template")
    if given is None and not tokenizer.chat_template:
        return options
    try:
        template = tokenizer.get_chat_template(given, options.get("tools"))
    except ValueError:  # several, and no default: as `encode_prompt` says
        return options

    def answer(call: re.Match[str]) -> str:
        return f"{call[1]}{now.strftime(call[2])}{call[1]}"

    answered = _CLOCK.sub(answer, template)
    if "strftime_now(" in answered:
        raise InputError(
            "the chat template computes the format of a date for strftime_now; only one that it"
            " names as text can be the same in all of a run"
        )
    return options if answered == template else {**options, "chat_template": answered}


def check_prompts(
    tokenizer: PreTrainedTokenizerFast,
    prompts: Iterable[tuple[str, str | Sequence[Message]]],
    *,
    chat_template: bool | Literal["auto"],
    template_options: Mapping[str, Any],
    max_length: int,
) -> None:
    """Refuses prompts one of which `encode_prompt` refuses, with its error, and keeps no tokens.

    They are encoded in batches, on all cores, and equal ones once. A million different ones take
    about a minute, and three more if they go through a chat template.

    Args:
      prompts: what each is called in errors, and the prompt.
    """
    templated = uses_template(tokenizer, chat_template)
    opening = 0 if templated else len(_opening(tokenizer))
    rest = _different(prompts)
    while batch := list(islice(rest, _AT_A_TIME)):
        texts = [_as_text(tokenizer, one, templated, template_options, name) for name, one in batch]
        if _all_fit(tokenizer, texts, max_length - opening, allow_empty=opening > 0):
            continue
        for name, prompt in batch:
            encode_prompt(
                tokenizer,
                prompt,
                chat_template=templated,
                template_options=template_options,
                max_length=max_length,
                where=name,
            )


def _different(
    prompts: Iterable[tuple[str, str | Sequence[Message]]],
) -> Iterator[tuple[str, str | Sequence[Message]]]:
    seen = set()
    for name, prompt in prompts:
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        if key not in seen:
            seen.add(key)
            yield name, prompt


def _all_fit(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], most: int, *, allow_empty: bool
) -> bool:
    try:
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception:  # a bare one of the Rust side, which does not say of which text
        return False
    return all(len(ids) <= most and (ids or allow_empty) for ids in encoded)


def _as_text(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Sequence[Message],
    templated: bool,
    options: Mapping[str, Any],
    where: str,
) -> str:
    """The text that becomes a prompt's tokens."""
    if templated:
        return _through_template(tokenizer, prompt, options, where)
    return prompt if isinstance(prompt, str) else "\n\n".join(m.content for m in prompt)


def _through_template(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Sequence[Message],
    options: Mapping[str, Any],
    where: str,
) -> str:
    if not tokenizer.chat_template:
        raise InputError(f"{where}: the tokenizer has no chat template; set chat_template to false")
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    text = render_chat(tokenizer, list(map(asdict, messages)), options, where=where)
    _check_kept(messages, text, where)
    return text


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    chat: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    where: str,
) -> str:
    """Returns messages and the opening of the assistant's turn, as the chat template writes them.

    Raises:
      InputError: the template refuses them, or does not end.
    """
    try:
        with _ending(MOST_LINES), _drawing(repr(chat)):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in chat],
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
    except ImportError as error:
        raise InputError("chat templates need jinja2: pip install jinja2") from error
    except Exception as error:  # templates raise what their authors chose
        last = chat[-1].get("content")
        quoted = _quoted(last if isinstance(last, str) else repr(last))
        raise InputError(
            f"{where}: the chat template refused it: {first_line(error)}: {quoted}"
        ) from error
    return str(text)


def _check_kept(messages: Sequence[Message], text: str, where: str) -> None:
    """Refuses messages that a template passes over: some know the user's and assistant's alone."""
    for message in messages:
        if message.role not in ("user", "assistant") and not has_content(text, message.content):
            raise InputError(
                f"{where}: the chat template leaves out the message of the role {message.role!r}:"
                f" {_quoted(message.content)}"
            )


def has_content(text: str, content: str) -> bool:
    """Whether a template's text has a message's content in it, as it is or as JSON writes it."""
    plain = content.strip()
    # Jinja's filter `tojson`, as `transformers` has it. Llama's templates write a tool's result so.
    written = (json.dumps(plain, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return plain in text or any(form in text for form in written)


@contextmanager
def _drawing(seed: str) -> Iterator[None]:
    """A context in which Python's random numbers follow from `seed`.

    Jinja draws from them for its filter `random` and for `lipsum`. So a prompt has the same tokens
    in every run and process.
    """
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _ending(most: int) -> Iterator[None]:
    """A context in which this thread runs at most `most` lines of Python.

    A template's sandbox limits a range, but not ranges in one another. Lines and not seconds, so
    that a template is refused everywhere or nowhere.
    """
    left = most

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"it runs without an end (more than {most:,} lines of its program)")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str, *, where: str) -> list[int]:
    """Returns the token ids of plain text as it is, without a bos token.

    Raises:
      InputError: the tokenizer cannot encode a character.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the Rust side raises bare Exceptions
        unknown = sorted(set(text) - set(tokenizer.get_vocab()))
        raise InputError(
            f"{where} has characters without a token, {''.join(unknown[:10])!r}: {_quoted(text)}"
        ) from error


def _opening(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The bos token, if the tokenizer begins its texts with one. An eos it may add is left out."""
    return [
        i for i in tokenizer.encode("", add_special_tokens=True)[:1] if i == tokenizer.bos_token_id
    ]


def _quoted(prompt: str | Sequence[Message]) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1].content if prompt else ""
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
