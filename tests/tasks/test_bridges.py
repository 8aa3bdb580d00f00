"""What follows a turn: seams of BPE, ends of turns, and templates that rewrite what was said."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from bpe import tokenizer

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Answer, Completion, Turn
from tim_jax.tasks.bridges import Bridge, Bridged
from tim_jax.tasks.builtin import ALPHABET
from tim_jax.tasks.environments import Here
from tim_jax.tasks.text import character_tokenizer
from tim_jax.tasks.tools import calculator, tools

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# As Qwen3's: thinking stays after the last message that a user wrote, and a tool writes as a user.
QWEN3 = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content -%}
{%- if loop.index0 < ns.last -%}
{%- set content = m.content.split('</think>')[-1].strip() -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}
{%- endif -%}{%- endif -%}"""

# As Mistral's first: the system's text stands before the last message of the user.
MOVED = """{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}
{%- elif m.role == 'user' -%}
{{ '[INST] ' + (ns.system if loop.last else '') + m.content + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}"""

ROUNDS = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '[Round ' ~ loop.index0 ~ '] ' + m.content + ' A: ' }}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}{%- endfor -%}"""

OPENED = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")
ONLY_LAST = CHATML.replace("in messages -", "in messages[-1:] -")
OTHERWISE = CHATML.replace("m.content +", "m.content.replace('This', 'That') +")
FORGETS = CHATML.replace("in messages -", "in messages[-4:] -")
ENDS = """{%- for m in messages -%}{{ m.content }}
{%- if not loop.last or add_generation_prompt -%}<|im_end|>{%- endif -%}{%- endfor -%}"""


def encode(text, by=None):
    return (by or tokenizer()).encode(text, add_special_tokens=False)


def bridge(template, *, stops=("<|im_end|>", "<|endoftext|>"), **options):
    made = tokenizer(template)
    ids = made.convert_tokens_to_ids(list(stops))
    assert isinstance(ids, list)
    template_options, roles = options.pop("options", {}), options.pop("roles", ("user",))
    bridge = Bridge(
        made, stop_tokens=ids, templated=template is not None, options=template_options, **options
    )
    bridge.check(roles)
    return bridge


def completion(text, ended=True):
    return Completion(text, np.array(encode(text), np.int32), ended)


def test_a_reply_continues_what_the_template_writes():
    tokens = bridge(CHATML).tokens(completion("5<|im_end|>"), "Try again.")
    expected = "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.tolist() == encode(expected)
    assert tokens.dtype == np.int32


def test_a_whole_episode_is_what_the_template_writes_at_once():
    made, chat, row = bridge(CHATML), [{"role": "user", "content": "2+2?"}], []
    write = partial(made.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    row += encode(write(chat))
    for said, reply in (("5", "No."), ("", "Say something."), ("ab!", "ab\n\nc"), ("4", "Yes")):
        row += encode(f"{said}<|im_end|>")
        row += made.tokens(completion(f"{said}<|im_end|>"), reply).tolist()
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
    assert row == encode(write(chat))


def test_a_turn_that_was_cut_is_ended_by_the_bridge():
    made = bridge(CHATML)
    cut, ended = made.tokens(completion("5", ended=False), "a"), made.tokens(completion("5"), "a")
    assert cut.tolist() == [*encode("<|im_end|>"), *ended.tolist()]
    assert made.tokens(completion("", ended=False), "a").tolist() == cut.tolist()


def test_another_end_token_ends_a_turn_too():
    made = bridge(CHATML)
    usual = made.tokens(completion("5<|im_end|>"), "a")
    assert (made.tokens(completion("5<|endoftext|>"), "a") == usual).all()
    only = bridge(CHATML, stops=("<|endoftext|>",))  # the template's own is no end token
    assert only.tokens(completion("5<|endoftext|>"), "a").tolist() == [
        *encode("<|im_end|>"),
        *usual.tolist(),
    ]


def test_a_template_that_ends_no_last_turn():
    made = bridge(ENDS)
    assert made.tokens(completion("5<|im_end|>"), "a").tolist() == encode("a<|im_end|>")
    cut = made.tokens(completion("5", ended=False), "a")
    assert cut.tolist() == encode("<|im_end|>a<|im_end|>")


def test_seams_of_bpe_stay_as_they_were_drawn():
    """`a` and `b` are one token where they stand together: a cut turn and its reply stay two."""
    made = bridge(None)
    assert len(encode("ab")) == 1
    drawn = encode("a")
    row = [*drawn, *made.tokens(completion("a", ended=True), "b").tolist()]
    assert row == [*encode("a"), *encode("b")] != encode("ab")
    made = bridge(CHATML)  # "c\n" is one token; the seam is kept by the end token
    row = [*encode("c"), *made.tokens(completion("c", ended=False), "c\n").tolist()]
    assert row == encode("c<|im_end|>\n<|im_start|>user\nc\n<|im_end|>\n<|im_start|>assistant\n")


def test_plain_text_without_a_template():
    made = Bridge(character_tokenizer(ALPHABET), stop_tokens=[1], templated=False, options={})
    ended = Completion("1", np.array([3, 1], np.int32), True)
    assert made.tokens(ended, "+").tolist() == [2 + ALPHABET.index("+")]
    cut = Completion("1", np.array([3], np.int32), False)
    assert made.tokens(cut, "+").tolist() == [1, 2 + ALPHABET.index("+")]
    assert made.tokens(ended, "").tolist() == []
    with pytest.raises(InputError, match="characters without a token, 'x'"):
        made.tokens(ended, "x")
    both = bridge(None).tokens(completion("1"), [{"role": "user", "content": x} for x in "ab"])
    assert both.tolist() == encode("a\n\nb")


def test_tokens_are_taken_as_they_are():
    made = bridge(CHATML)
    assert made.tokens(completion("5", ended=False), [4, 5]).tolist() == [4, 5]
    assert made.tokens(completion("5"), []).tolist() == []
    with pytest.raises(InputError, match="has token 100000, the vocabulary has"):
        made.tokens(completion("5"), [100_000])


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (QWEN3, {}, "drops the thinking of earlier turns"),
        (QWEN3, {"enable_thinking": False}, r"drops '<think>.*</think>.*', with which it opens a"),
        (OPENED, {}, "drops '<think>', with which it opens a turn"),
        (MOVED, {}, "moves the system's text behind earlier turns"),
        (ROUNDS, {}, "writes a reply in another way later in the conversation"),
        (ONLY_LAST, {}, "leaves out or changes what was said"),
        (OTHERWISE, {}, "leaves out or changes"),
        (FORGETS, {}, "rewrites a turn once two more have followed"),
    ],
)
def test_templates_that_rewrite_history_are_refused(template, options, message):
    with pytest.raises(InputError, match=message):
        bridge(template, options=options)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_history_may_be_kept_as_it_was_drawn(options):
    made = bridge(QWEN3, options=options, history="keep")
    opening = "<think>\n\n</think>\n\n" if options else ""
    expected = f"\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n{opening}"
    assert made.tokens(completion("<think>\nx\n</think>\n\n5<|im_end|>"), "No.").tolist() == encode(
        expected
    )
    for template in (MOVED, ROUNDS, ONLY_LAST):
        with pytest.raises(InputError):
            bridge(template, history="keep")


def talked(template, said, replies, *, stops=("<|im_end|>", "<|endoftext|>"), **options):
    """The rows of an episode that is cut where the template rewrites, and their last conversation.

    `said` are the policy's turns, as text with the end token if there is one.
    """
    made = bridge(template, history="cut", stops=stops, **options)
    talk = made.begin(None, "2+2?")
    rows = [encode(talk.text)]
    for turn, reply in zip(said, replies, strict=True):
        one = completion(turn, ended=turn.endswith(stops))
        rows[-1] += one.tokens.tolist()
        talk, tokens, anew = made.go_on(talk, one, reply)
        if anew is None:
            rows[-1] += tokens.tolist()
        else:
            assert not tokens.size
            rows.append(anew.tolist())
        assert rows[-1] == encode(talk.text)
        chat, options = list(talk.messages), dict(made.options)
        write = partial(made.tokenizer.apply_chat_template, tokenize=False, **options)
        assert talk.text == write(chat, add_generation_prompt=True)
    return rows, talk


THOUGHT = ["<think>\nx\n</think>\n\n5<|im_end|>", "6<|im_end|>"]
TOLD = [{"role": "tool", "content": "12"}]


def test_an_episode_is_cut_where_the_template_drops_thinking():
    rows, _ = talked(QWEN3, THOUGHT, ["No.", "No."])
    cut = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    reply = "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert rows == [
        encode(f"{cut}{THOUGHT[0]}"),
        encode(f"{cut}5<|im_end|>\n{reply}6<|im_end|>\n{reply}"),
    ]


def test_an_episode_is_not_cut_where_thinking_stays():
    rows, _ = talked(QWEN3, [*THOUGHT, "7<|im_end|>"], [TOLD, TOLD, TOLD])
    assert len(rows) == 1
    rows, _ = talked(QWEN3, [*THOUGHT, "7<|im_end|>"], [TOLD, TOLD, "No."])
    assert len(rows) == 2


@pytest.mark.parametrize("said", [["5<|im_end|>", "", "ab!", "4<|im_end|>"], ["<|im_end|>"] * 4])
@pytest.mark.parametrize("template", [CHATML, ENDS])
def test_a_template_that_appends_is_never_cut_and_gives_what_it_gave(template, said):
    replies = ["No.", "Say something.", "ab\n\nc", TOLD]
    rows, _ = talked(template, said, replies, roles=("user", "tool"))
    assert len(rows) == 1
    plain, row = bridge(template), []
    for turn, reply in zip(said, replies, strict=True):
        one = completion(turn, ended=turn.endswith("<|im_end|>"))
        row += [*one.tokens.tolist(), *plain.tokens(one, reply).tolist()]
    assert rows[0][-len(row) :] == row


@pytest.mark.parametrize(
    ("template", "options", "count"),
    [
        (QWEN3, {"enable_thinking": False}, 4),
        (OPENED, {}, 4),
        (MOVED, {}, 4),
        (ROUNDS, {}, 1),  # it numbers turns, but only appends
        (ONLY_LAST, {}, 4),
        (OTHERWISE, {}, 4),  # what ends a turn is not found: every turn is rendered anew
        (FORGETS, {}, 3),
    ],
)
def test_every_row_of_a_template_that_rewrites_is_what_it_writes(template, options, count):
    said = ["This.<|im_end|>", "6<|im_end|>", "7<|im_end|>"]
    rows, talk = talked(template, said, ["a", "b", "c"], options=options)
    assert len(rows) == count
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 3 + ["user"]


def test_a_completion_knows_of_a_thought_that_the_template_opened():
    for template, thinking in ((OPENED, True), (QWEN3, False), (None, False)):
        read = bridge(template, history="cut").read(completion("5"))
        assert read.thinking == thinking
    closed = bridge(QWEN3, history="cut", options={"enable_thinking": False})
    assert not closed.read(completion("5")).thinking


def test_an_environment_whose_replies_are_cut():
    """The source sees its own state; the conversation goes along with it; tokens are refused."""
    seen = []

    class Noting(Says):
        def answers(self, turns):
            seen.extend(turn.state for turn in turns)
            return super().answers(turns)

    source = Noting(Answer("after", "no", 0.5), Answer("after", [4, 5]))
    made = Bridged(source, bridge(QWEN3, history="cut"))
    key, said = np.zeros(2, np.uint32), completion(THOUGHT[0])
    turns = [Turn(0, i, 0, said, "before", key, asked="2+2?") for i in range(2)]
    outcomes = dict(made.outcomes(turns))
    assert seen == ["before"] * 2
    assert outcomes[1].failure == 'reply: is tokens, which history = "cut" cannot render anew'
    assert (outcomes[1].state, outcomes[1].anew) == ("before", None)
    ((_, second),) = Bridged(Noting(Answer("end", done=True)), made.bridge).outcomes(
        [Turn(0, 0, 1, completion("6<|im_end|>"), outcomes[0].state, key, asked="2+2?")]
    )
    assert seen[-1] == "after"
    assert (second.state, second.done) == ("end", True)


def test_replies_of_tools_leave_thinking_where_those_of_users_drop_it():
    made = bridge(QWEN3, roles=("tool",))
    reply = [{"role": "tool", "content": "12"}]
    expected = (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert made.tokens(completion("5<|im_end|>"), reply).tolist() == encode(expected)
    with pytest.raises(InputError, match="drops the thinking"):
        made.tokens(completion("5<|im_end|>"), "a user's")


def test_a_role_that_a_template_leaves_out():
    made = bridge(
        CHATML.replace("{{ '<", "{% if m.role != 'tool' %}{{ '<", 1).replace(
            "<|im_end|>\n' }}", "<|im_end|>\n' }}{% endif %}", 1
        )
    )
    with pytest.raises(InputError, match="leaves out the message of the role 'tool': '12'"):
        made.tokens(completion("5"), [{"role": "tool", "content": "12"}])


@pytest.mark.parametrize("filter", ["tojson", "tojson(ensure_ascii=true)"])
@pytest.mark.parametrize("content", ['{"degrees": 21}', "one\ntwo\n", "C:\\x", "21 °C", ' "12" '])
def test_a_template_may_write_a_result_as_json(filter, content):
    """As those of Llama 3.1 do."""
    template = CHATML.replace(
        "m.content", f"(m.content if m.role != 'tool' else m.content|{filter})"
    )
    reply = [{"role": "tool", "content": content}]
    written = json.dumps(content, ensure_ascii="true" in filter)
    expected = f"\n<|im_start|>tool\n{written}<|im_end|>\n<|im_start|>assistant\n"
    tokens = bridge(template, roles=("tool",)).tokens(completion("5<|im_end|>"), reply)
    assert tokens.tolist() == encode(expected)
    rows, _ = talked(template, ["5<|im_end|>"], [reply], roles=("tool",))
    assert len(rows) == 1
    assert rows[0][-len(tokens) :] == tokens.tolist()


# What templates write for a call. Mistral's takes the arguments as text.
HERMES = """{{ '<tool_call>\n' + f|tojson + '\n</tool_call>' }}"""
LLAMA = """{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments|tojson + '}' }}"""
MISTRAL = """{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}"""
CODER = """{{ '<tool_call>\n<function=' + f.name + '>' }}{% for k, v in f.arguments|items %}
{{ '<parameter=' + k + '>\n' + v + '\n</parameter>' }}{% endfor %}</function>\n</tool_call>"""


def calling(template, role: Any = "tool"):
    """A template that writes calls so, and its environment in tokens."""
    call = "{% for c in m.tool_calls %}{% set f = c.function %}" + template + "{% endfor %}"
    body = "{% if m.tool_calls %}" + call + "{% else %}{{ m.content }}{% endif %}"
    written = body.join(["{{ '<|im_start|>' + m.role + '\n' }}", "{{ '<|im_end|>\n' }}"])
    whole = CHATML.replace(
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}", written
    )
    assert whole != CHATML
    environment = Here(tools([calculator], reward=lambda *_: 1.0, role=role))
    return Bridged(environment, bridge(whole))


@pytest.mark.parametrize("template", [HERMES, LLAMA, ""])
def test_templates_whose_calls_are_read_or_that_know_none(template):
    calling(template)
    Bridged(Here(tools([calculator], reward=lambda *_: 1.0)), bridge(CHATML))


def test_a_template_that_asks_for_a_tool_s_name_is_taken():
    """As Hermes' does; `tools` gives it with each result."""
    asks = "{% if m.role == 'tool' and not m.name %}{{ raise_exception('no name') }}{% endif %}"
    named = CHATML.replace("{{ '<|im_start|>' + m.role", asks + "{{ '<|im_start|>' + m.role", 1)
    assert named != CHATML
    made = Bridged(Here(tools([calculator], reward=lambda *_: 1.0)), bridge(named))
    with pytest.raises(InputError, match="no name"):
        made.bridge.tokens(completion("5"), [{"role": "tool", "content": "12"}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (MISTRAL, r"'\[TOOL_CALLS\]name_of_a_tool\[ARGS\]"),
        (CODER, "'<tool_call>.*<function=name_of"),
    ],
)
def test_a_template_whose_calls_would_not_be_read_is_refused(template, said):
    with pytest.raises(InputError, match=f"the chat template writes a call as {said}") as caught:
        calling(template)
    assert "set tokenizer.response_template, or write a respond of your own" in str(caught.value)
    assert "\n" not in str(caught.value)
    calling(template, role="user")  # the prompts say how to call


class Says:
    """An environment that says what it is told to."""

    roles, tools, reads_calls = ("user",), (), False

    def __init__(self, *said):
        self.said = said

    def answers(self, turns):
        for index in reversed(range(len(turns))):
            yield index, self.said[index]


def test_answers_become_outcomes():
    said = [
        Answer("s", "no", 0.5),
        Answer("s", "nobody reads this", 1.0, done=True),
        Answer("s", [10**6]),
        Answer("s", done=True, failure="crash: it was killed by signal 9"),
    ]
    turns = [
        Turn(0, i, 0, completion("5<|im_end|>"), "before", np.zeros(2, np.uint32))
        for i in range(len(said))
    ]
    outcomes = dict(Bridged(Says(*said), bridge(CHATML)).outcomes(turns))
    assert list(outcomes) == [3, 2, 1, 0]
    assert (outcomes[0].state, outcomes[0].reward, outcomes[0].done) == ("s", 0.5, False)
    assert outcomes[0].tokens.tolist() == bridge(CHATML).tokens(turns[0].completion, "no").tolist()
    assert (outcomes[1].reward, outcomes[1].done, outcomes[1].tokens.size) == (1.0, True, 0)
    assert outcomes[2].failure is not None
    assert outcomes[2].failure.startswith("reply: has token 1000000")
    assert (outcomes[2].state, outcomes[2].reward, outcomes[2].done) == ("before", 0.0, True)
    assert outcomes[3].failure == "crash: it was killed by signal 9"
