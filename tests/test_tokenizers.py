import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tim_jax.errors import InputError
from tim_jax.tasks.base import Message
from tim_jax.tasks.builtin import ALPHABET, BUILTIN, builtin_task
from tim_jax.tasks.text import (
    character_tokenizer,
    check_prompts,
    encode_prompt,
    load_tokenizer,
)

TOKENIZER = character_tokenizer(ALPHABET)
CHAT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '(' + m.content + ')' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '=' if thinking else '#' }}{% endif %}"
)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def templated():
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT
    return tokenizer


@given(st.text(ALPHABET, max_size=40))
def test_one_token_per_character_and_back(text):
    ids = encode(text)
    assert ids == [2 + ALPHABET.index(letter) for letter in text]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text
    ended = [*ids, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert TOKENIZER.decode(ended, skip_special_tokens=True) == text
    assert TOKENIZER.decode(ended) == text + "<eos><pad>"


def test_special_tokens_and_size():
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    assert len(TOKENIZER) == len(ALPHABET) + 2
    assert TOKENIZER.bos_token_id is None


def test_any_alphabet():
    tokenizer = character_tokenizer("\n\té😀 \\[]^")
    text = "\\[😀]\n^\t é"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_built_in_tasks_fit(name):
    for example in builtin_task(name, {"train_size": 100}).train:
        assert len(encode_prompt(TOKENIZER, example.prompt, max_length=24)) == len(example.prompt)
        assert TOKENIZER.decode(encode(example.solution)) == example.solution


@pytest.mark.parametrize("model_type", [None, "qwen3", "llama"])
def test_saved_and_loaded(tmp_path, model_type):
    """Also beside a model's config, whose family has a tokenizer class of its own."""
    templated().save_pretrained(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = " 3+8 (2)=#"
    for tokenizer in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert tokenizer.encode(text, add_special_tokens=False) == encode(text)
        assert tokenizer.decode(encode(text)) == text
        assert len(tokenizer) == len(TOKENIZER)
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
        assert tokenizer.chat_template == CHAT


def test_plain_prompts():
    assert encode_prompt(TOKENIZER, "1+2=") == encode("1+2=")
    messages = (Message("user", "1+2"), Message("user", "3"))
    with pytest.raises(InputError, match=r"characters without a token, '\\n'"):
        encode_prompt(TOKENIZER, messages)
    assert encode_prompt(TOKENIZER, messages[:1]) == encode("1+2")


def test_chat_template():
    tokenizer = templated()
    messages = (Message("user", "1"), Message("assistant", "2"), Message("user", "3"))
    assert encode_prompt(tokenizer, messages) == encode("(1)(2)(3)#")
    assert encode_prompt(tokenizer, messages, template_options={"thinking": True})[-1:] == encode(
        "="
    )
    assert encode_prompt(tokenizer, "1") == encode_prompt(tokenizer, "1", chat_template=True)
    assert encode_prompt(tokenizer, "1") == encode("(1)#")
    assert encode_prompt(tokenizer, "1", chat_template=False) == encode("1")


def with_bos():
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer("12^")
    tokenizer.bos_token = "^"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="^ $A <eos>", special_tokens=[("^", tokenizer.bos_token_id), ("<eos>", 1)]
    )
    return tokenizer


def test_bos_but_no_eos_before_a_response():
    tokenizer = with_bos()
    assert tokenizer.encode("12") == [4, 2, 3, 1]
    assert encode_prompt(tokenizer, "12") == [4, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("1" * 30, {"max_length": 8}, "train prompt 17 has 30 tokens, at most 8 are allowed: '111"),
        ("", {}, "train prompt 17 is empty"),
        ("1x2y", {}, "train prompt 17 has characters without a token, 'xy': '1x2y'"),
        ("1", {"chat_template": True}, "train prompt 17: the tokenizer has no chat template"),
        ((), {}, "train prompt 17 is empty"),
    ],
)
def test_bad_prompts(prompt, options, message):
    with pytest.raises(InputError, match=message):
        encode_prompt(TOKENIZER, prompt, where="train prompt 17", **options)


def test_the_limit_itself_is_allowed():
    assert len(encode_prompt(TOKENIZER, "1" * 8, max_length=8)) == 8


def test_template_refusals():
    message = "prompt: the chat template refused it: no system: '1'"
    with pytest.raises(InputError, match=message):
        encode_prompt(templated(), (Message("system", "1"),))


WITH_CHAT = {"chat_template": "auto", "template_options": {"thinking": True}, "max_length": 8}


@pytest.mark.parametrize("bad", ["1" * 30, "", "1x2y", (Message("system", "1"),)])
@pytest.mark.parametrize("place", [0, 1023, 1024, 1500])
def test_many_prompts_are_refused_for_the_one_that_is_wrong(bad, place):
    tokenizer = TOKENIZER if bad == "" else templated()
    prompts = [str(i) for i in range(1500)]
    prompts.insert(place, bad)
    named = [(f"row {i}", prompt) for i, prompt in enumerate(prompts)]
    with pytest.raises(InputError) as alone:
        encode_prompt(tokenizer, bad, where=f"row {place}", **WITH_CHAT)
    with pytest.raises(InputError) as together:
        check_prompts(tokenizer, named, **WITH_CHAT)
    assert str(together.value) == str(alone.value)
    check_prompts(tokenizer, named[:place] + named[place + 1 :], **WITH_CHAT)


def test_many_prompts_may_have_the_limit_itself_and_a_bos_before_them():
    options: dict[str, Any] = {**WITH_CHAT, "chat_template": False}
    check_prompts(TOKENIZER, [("", "1" * 8), ("", (Message("user", "12"),))], **options)
    tokenizer = with_bos()
    check_prompts(tokenizer, [("", "1" * 7), ("", "")], **options)
    with pytest.raises(InputError, match="row 1 has 9 tokens, at most 8 are allowed"):
        check_prompts(tokenizer, [("", "2"), ("row 1", "1" * 8)], **options)


def test_equal_prompts_are_looked_at_once():
    tokenizer, seen = templated(), []
    true = tokenizer.apply_chat_template

    def apply(chat, **options):
        seen.append(chat[0]["content"])
        return true(chat, **options)

    tokenizer.apply_chat_template = apply
    chat = [Message("user", "2")]
    prompts = [("", "1"), ("", chat), ("", "1"), ("", tuple(chat))] * 2000
    check_prompts(tokenizer, prompts, **WITH_CHAT)
    assert seen == ["1", "2"]


def test_load_refuses(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"has no tokenizer \(tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="no such model folder"):
        load_tokenizer(tmp_path / "nowhere")
    TOKENIZER.save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"tokenizer of .* \(folder\): ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)

    def unreachable(source, **options):
        del source, options
        raise OSError("cannot connect\nsecond line")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(InputError, match=r"and from the hub\): cannot connect$"):
        load_tokenizer("someone/model")


def test_load_needs_eos_and_gives_pad(tmp_path):
    tokenizer = character_tokenizer("12")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 1
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="names no eos token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("alphabet", "message"), [("", "at least one"), ("abca", "twice: 'a'")])
def test_bad_alphabets(alphabet, message):
    with pytest.raises(InputError, match=message):
        character_tokenizer(alphabet)
