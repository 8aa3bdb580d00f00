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
from inspect import signature
from itertools import islice
from types import FrameType, MappingProxyType
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.tasks.base import EOS, Message, first_line, last_text

PAD = "<pad>"
MOST_LINES = 3_000_000  # of a chat template's program, for one prompt: some seconds
_CLOCK = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])((?:(?!\1).)*)\1\s*\)""")
_AT_A_TIME = 1024  # prompts that are encoded together

TextOrMessages = str | Sequence[Message]


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
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def uses_template(
    tokenizer: PreTrainedTokenizerFast, chat_template: bool | Literal["auto"]
) -> bool:
    """Whether prompts go through the chat template; `auto`: if the tokenizer has one."""
    return bool(tokenizer.chat_template) if chat_template == "auto" else chat_template


def unread_options(
    tokenizer: PreTrainedTokenizerFast,
    options: Mapping[str, Any],
    *,
    chat_template: bool | Literal["auto"],
) -> list[str]:
    """The options that no prompt depends on: those that the chat template does not name.

    All of them where prompts do not go through it.
    """
    if not uses_template(tokenizer, chat_template):
        return [*options]
    try:
        template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except ValueError:  # as `encode_prompt` says
        return []
    known = {*re.findall(r"\w+", template), *signature(tokenizer.apply_chat_template).parameters}
    return [name for name in options if name not in known]


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: TextOrMessages,
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
            f"{where} has {len(ids)} tokens, at most {max_length} are allowed:"
            f" {shown(last_text(prompt))}"
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
    prompts: Iterable[tuple[str, TextOrMessages]],
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
    least, most = int(not opening), max_length - opening
    rest = _different(prompts)
    while batch := list(islice(rest, _AT_A_TIME)):
        texts = [_as_text(tokenizer, one, templated, template_options, name) for name, one in batch]
        try:
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception:  # a bare one of the Rust side, which does not say of which text
            encoded = None
        if encoded is not None and all(least <= len(ids) <= most for ids in encoded):
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
    prompts: Iterable[tuple[str, TextOrMessages]],
) -> Iterator[tuple[str, TextOrMessages]]:
    seen = set()
    for name, prompt in prompts:
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        if key not in seen:
            seen.add(key)
            yield name, prompt


def _as_text(
    tokenizer: PreTrainedTokenizerFast,
    prompt: TextOrMessages,
    templated: bool,
    options: Mapping[str, Any],
    where: str,
) -> str:
    """The text that becomes a prompt's tokens."""
    if not templated:
        return prompt if isinstance(prompt, str) else "\n\n".join(m.content for m in prompt)
    if not tokenizer.chat_template:
        raise InputError(f"{where}: the tokenizer has no chat template; leave chat_template out")
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    chat = list(map(asdict, messages))
    text = render_chat(tokenizer, chat, options, where=where)
    # Some templates know the user's and assistant's alone.
    check_kept([m for m in chat if m["role"] not in ("user", "assistant")], text, where)
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
        with _ending(), _drawing(repr(chat)):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in chat],
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
    except Exception as error:  # templates raise what their authors chose
        last = chat[-1].get("content")
        raise InputError(
            f"{where}: the chat template refused it: {first_line(error)}: {shown(last)}"
        ) from error
    return str(text)


def check_kept(messages: Iterable[Mapping[str, Any]], text: str, where: str) -> None:
    """Refuses messages that a template passes over: their content is not in the text it wrote.

    As it is or as JSON writes it: Llama's templates write a tool's result so, by Jinja's filter
    `tojson` as `transformers` has it.
    """
    for message in messages:
        plain = message["content"].strip()
        written = (json.dumps(plain, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
        if plain not in text and not any(form in text for form in written):
            raise InputError(
                f"{where}: the chat template leaves out the message of the role"
                f" {message['role']!r}: {shown(message['content'])}"
            )


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
def _ending() -> Iterator[None]:
    """A context in which this thread runs at most `MOST_LINES` lines of Python.

    A template's sandbox limits a range, but not ranges in one another. Lines and not seconds, so
    that a template is refused everywhere or nowhere.
    """
    left = MOST_LINES

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(
                f"it runs without an end (more than {MOST_LINES:,} lines of its program)"
            )
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
            f"{where} has characters without a token, {''.join(unknown[:10])!r}: {shown(text)}"
        ) from error


def _opening(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The bos token, if the tokenizer begins its texts with one. An eos it may add is left out."""
    return [
        i for i in tokenizer.encode("", add_special_tokens=True)[:1] if i == tokenizer.bos_token_id
    ]
