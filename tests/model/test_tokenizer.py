import json
import random
import shutil
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.model.files import load_tokenizer, save_tokenizer
from tim_jax.tasks.base import Message
from tim_jax.tasks.builtin import ALPHABET, BUILTIN, builtin_task
from tim_jax.tasks.text import (
    character_tokenizer,
    check_prompts,
    dated,
    encode_prompt,
    unread_options,
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


@pytest.mark.parametrize("name", sorted({*BUILTIN} - {"addition"}))
def test_built_in_tasks_fit(name):
    for example in builtin_task(name, {"train_size": 100}).train:
        assert len(encode_prompt(TOKENIZER, example.prompt, max_length=24)) == len(example.prompt)
        assert TOKENIZER.decode(encode(example.solution)) == example.solution


@pytest.mark.parametrize("model_type", [None, "qwen3", "llama"])
def test_saved_and_loaded(tmp_path, model_type):
    """Also beside a model's config, whose family has a tokenizer class of its own."""
    save_tokenizer(templated(), tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = " 3+8 (2)=#"
    for tokenizer in (read(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert tokenizer.encode(text, add_special_tokens=False) == encode(text)
        assert tokenizer.decode(encode(text)) == text
        assert len(tokenizer) == len(TOKENIZER)
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
        assert tokenizer.chat_template == CHAT


# A tokenizer of its own: letters are made small, digits go three by three, and 12 is one token.
OWN_TEXT = "Ab 1234 <think>b12"
OWN_IDS = [3, 4, 9, 7, 8, 11, 9, 10, 4, 7]


def own_tokenizer(*, bos=False):
    words = ["<s>", "</s>", "<pad>", "a", "b", "1", "2", "12", "3", "\u0120", "<think>", "4"]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("1", "2")], unk_token="<pad>")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.add_tokens(["<think>"])
    if bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def own_folder(folder, *, bos=False, model_type="llama", **settings):
    """A model's folder with the files of a tokenizer, and nothing else of it."""
    own_tokenizer(bos=bos).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=3))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def read(folder):
    return load_tokenizer(folder, vocab_size=100)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "TokenizersBackend", None]
)
def test_ids_are_those_of_the_file_whatever_its_class_is_called(tmp_path, name, model_type):
    """`transformers` 5 rebuilds some of them, see the next test."""
    named = {} if name is None else {"tokenizer_class": name, "legacy": True}
    tokenizer = read(own_folder(tmp_path, model_type=model_type, **named))
    assert tokenizer.encode(OWN_TEXT, add_special_tokens=False) == OWN_IDS
    assert own_tokenizer().encode(OWN_TEXT).ids == OWN_IDS
    assert tokenizer.decode(OWN_IDS) == own_tokenizer().decode(OWN_IDS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_what_others_make_of_such_a_file(tmp_path):
    folder = own_folder(tmp_path, model_type="qwen2", tokenizer_class="LlamaTokenizerFast")
    rebuilt = AutoTokenizer.from_pretrained(folder)
    assert rebuilt.encode(OWN_TEXT, add_special_tokens=False) != OWN_IDS


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("declared", [False, True, None])
def test_texts_begin_with_bos_where_it_is_declared(tmp_path, bos, declared):
    settings = {} if declared is None else {"add_bos_token": declared, "add_eos_token": True}
    tokenizer = read(own_folder(tmp_path, bos=bos, tokenizer_class="LlamaTokenizer", **settings))
    begins = bos if declared is None else declared
    assert encode_prompt(tokenizer, "ab") == [*([0] if begins else []), 3, 4]
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert encode_prompt(tokenizer, "ab") == [3, 4]  # a template writes its own


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_has_the_files_that_were_read(tmp_path):
    source, again = tmp_path / "source", tmp_path / "again"
    source.mkdir()
    again.mkdir()
    own_folder(source, tokenizer_class="LlamaTokenizerFast", add_bos_token=True, custom=[1])
    (source / "chat_template.jinja").write_text(CHAT)
    (source / "special_tokens_map.json").write_text('{"eos_token":\n"</s>"}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (source / "notes.json").write_text("{}")
    tokenizer = read(source)
    expected = files_of(source / "additional_chat_templates")
    shutil.rmtree(source / "additional_chat_templates")
    save_tokenizer(tokenizer, again)
    assert files_of(again / "additional_chat_templates") == expected
    shutil.rmtree(again / "additional_chat_templates")
    kept = files_of(source)
    del kept["config.json"], kept["notes.json"]
    assert files_of(again) == kept


CHANGES = {
    "template": lambda tokenizer: setattr(tokenizer, "chat_template", "{{ 7 }}"),
    "token": lambda tokenizer: tokenizer.add_tokens(["<new>"]),
    "pad": lambda tokenizer: setattr(tokenizer, "pad_token", "</s>"),
    "beginning": lambda tokenizer: setattr(tokenizer, "add_bos_token", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_since_is_exported_as_it_is(tmp_path, change):
    source, again = tmp_path / "source", tmp_path / "again"
    source.mkdir()
    again.mkdir()
    tokenizer = read(own_folder(source, bos=True, tokenizer_class="LlamaTokenizerFast"))
    CHANGES[change](tokenizer)
    save_tokenizer(tokenizer, again)
    (again / "config.json").write_text('{"model_type": "qwen3"}')
    for same in (read(again), AutoTokenizer.from_pretrained(again)):
        assert same.chat_template == tokenizer.chat_template
        assert same.special_tokens_map == tokenizer.special_tokens_map
        assert same.encode(f"{OWN_TEXT}<new>") == tokenizer.encode(f"{OWN_TEXT}<new>")
    settings = json.loads((again / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_names_that_version_4_does_not_know_are_replaced(tmp_path):
    source, again = tmp_path / "source", tmp_path / "again"
    source.mkdir()
    again.mkdir()
    new = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<think>"]}
    tokenizer = read(own_folder(source, **new, model_max_length=10**30))
    assert "<think>" in tokenizer.all_special_tokens
    save_tokenizer(tokenizer, again)
    settings = json.loads((again / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<think>"]
    assert settings["model_max_length"] == 10**30
    assert "extra_special_tokens" not in settings
    assert read(again).all_special_tokens == tokenizer.all_special_tokens
    assert (again / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_code_that_is_not_copied_is_not_named(tmp_path):
    """Moonlight's tokenizer is code of its repository, and needs none with a tokenizer.json."""
    templated().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    code = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    named = {"auto_map": code, "tokenizer_class": "TikTokenTokenizer"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    tokenizer = load_tokenizer(tmp_path, vocab_size=100)
    (tmp_path / "out").mkdir()
    save_tokenizer(tokenizer, tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.encode("1+2") == tokenizer.encode("1+2")


def test_settings_that_contradict_the_file_are_refused(tmp_path):
    added = {"3": {"content": "<think>", "special": False, "normalized": True}}
    with pytest.raises(InputError, match=r"json: token '<think>' is 3, but 10 in tokenizer.json$"):
        read(own_folder(tmp_path, added_tokens_decoder=added))
    added = {"12": {"content": "<other>"}}
    assert read(own_folder(tmp_path, added_tokens_decoder=added)).encode("<other>") == [12]
    with pytest.raises(InputError, match=r"add_bos_token is true, but there is no bos_token$"):
        read(own_folder(tmp_path, add_bos_token=True, bos_token=None))
    with pytest.raises(InputError, match=r"json adds '<s>' to every text, but .* no bos_token;"):
        read(own_folder(tmp_path, bos=True, bos_token=None))


def test_a_tokenizer_that_draws_its_ids_is_refused(tmp_path):
    file = own_folder(tmp_path) / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["dropout"] = 0.1
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"tokenizer.json: dropout 0.1 gives .* other ids each"):
        read(tmp_path)


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


def test_a_message_that_a_template_passes_over_is_refused():
    tokenizer = templated()
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    messages = (Message("user", "1"), Message("tool", " 2 "), Message("user", "3"))
    with pytest.raises(InputError, match=r"leaves out the message of the role 'tool': ' 2 '"):
        encode_prompt(tokenizer, messages)
    assert encode_prompt(tokenizer, messages[::2]) == encode("13")


def test_a_message_that_a_template_writes_as_json_is_kept():
    tokenizer = character_tokenizer('12"\\n')
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{{ m.content if m.role == 'user' else m.content | tojson }}{% endfor %}"
    )
    messages = (Message("user", "1"), Message("tool", '"2"\n'), Message("user", "1"))
    ids = encode_prompt(tokenizer, messages)
    assert tokenizer.decode(ids) == r'1"\"2\"\n"1'


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ({"thinking": False}, []),
        ({"thinkng": False, "thinking": True}, ["thinkng"]),
        ({"tools": [], "documents": []}, []),  # transformers', which templates get
        ({"chat_template": "{{ thinkng }}", "thinkng": 1}, []),
    ],
)
def test_options_that_no_prompt_depends_on(options, unread):
    assert unread_options(templated(), options, chat_template="auto") == unread
    assert unread_options(TOKENIZER, options, chat_template="auto") == [*options]
    assert unread_options(templated(), options, chat_template=False) == [*options]


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


def test_a_template_draws_the_same_for_the_same_prompt():
    tokenizer = templated()
    tokenizer.chat_template = "{{ range(10)|list|random }}{{ messages[0].content }}"
    random.seed(1)
    first = [encode_prompt(tokenizer, str(i)) for i in range(20)]
    state = random.getstate()
    random.seed(2)
    assert [encode_prompt(tokenizer, str(i)) for i in range(20)] == first
    assert len({ids[0] for ids in first}) > 3
    assert random.random() == random.Random(2).random()  # others draw as they would have drawn
    random.setstate(state)


@pytest.mark.parametrize(
    "clock",
    [
        "{{ strftime_now('%d%H') }}",
        '{%- set date = strftime_now( "%d%H" ) %}{{ date }}',
        "{{ strftime_now(format='%d') + strftime_now('%H') }}",
        "{% if strftime_now is defined %}{{ strftime_now('%d%H').replace('x', '') }}{% endif %}",
    ],
)
def test_the_clock_of_a_template_is_the_one_given(clock):
    tokenizer, now = templated(), datetime(2026, 3, 11, 12)
    template = f"{clock}{{{{ messages[0].content }}}}"
    for tokenizer.chat_template, options in (
        (template, {}),
        ({"default": template, "other": "1"}, {}),
        ("1", {"chat_template": template}),
    ):
        options = dated(tokenizer, options, now)
        assert encode_prompt(tokenizer, "5", template_options=options) == encode("11125")


def test_a_date_whose_format_is_computed_is_refused():
    tokenizer, now = templated(), datetime(2026, 3, 11, 12)
    assert dated(tokenizer, WITH_CHAT, now) is WITH_CHAT
    assert dated(TOKENIZER, {}, now) == {}
    tokenizer.chat_template = {"one": "1", "two": "2"}
    assert dated(tokenizer, {}, now) == {}
    tokenizer.chat_template = "{% set day = '%d' %}{{ strftime_now(day) }}"
    with pytest.raises(InputError, match="template computes the format of a date"):
        dated(tokenizer, {}, now)


def test_equal_prompts_are_looked_at_once():
    tokenizer: Any = templated()
    seen: list[str] = []
    true = tokenizer.apply_chat_template

    def apply(chat, **options):
        seen.append(chat[0]["content"])
        return true(chat, **options)

    tokenizer.apply_chat_template = apply
    chat = [Message("user", "2")]
    prompts = [("", "1"), ("", chat), ("", "1"), ("", tuple(chat))] * 2000
    check_prompts(tokenizer, prompts, **WITH_CHAT)
    assert seen == ["1", "2"]


@pytest.mark.parametrize(("alphabet", "message"), [("", "at least one"), ("abca", "twice: 'a'")])
def test_bad_alphabets(alphabet, message):
    with pytest.raises(InputError, match=message):
        character_tokenizer(alphabet)
