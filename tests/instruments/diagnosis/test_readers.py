"""Rollouts of other systems, in the shapes that these document, and what is refused of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis import readers
from tim_jax.instruments.diagnosis.declared import Distribution, Shaping
from tim_jax.instruments.diagnosis.rollouts import Limits, RolloutsError, collect
from tim_jax.tasks.text import character_tokenizer

LIMITS = Limits(vocabulary=50, positions=16)
PROMPT, TOKENS, LOG_PROBS = [5, 6, 7], [8, 9], [-0.5, -1.25]
END = 4
PLAIN = {"prompt_token_ids": PROMPT, "response_token_ids": TOKENS, "logprobs": LOG_PROBS}


def mask_of(response):
    assert response.mask is not None
    return response.mask.tolist()


def read(rows, **options):
    return collect(readers.read(rows, **options), limits=LIMITS).responses


def check(response, tokens=TOKENS, log_probs=LOG_PROBS):
    assert list(response.prompt) == PROMPT
    assert list(response.tokens) == tokens
    assert response.log_probs.dtype == np.float32
    np.testing.assert_array_equal(response.log_probs, np.float32(log_probs))


VLLM = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "logprobs": {
                "text_offset": [0, 1],
                "tokens": ["token_id:8", "token_id:9"],
                "token_logprobs": LOG_PROBS,
                "top_logprobs": [{"token_id:8": -0.5, "token_id:3": -2.0}, {"token_id:9": -1.25}],
            },
            "finish_reason": "length",
            "prompt_token_ids": PROMPT,
        }
    ],
}
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "prompt_token_ids": PROMPT,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
            "logprobs": {
                "content": [
                    {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []},
                    {"token": "b", "logprob": -1.25, "bytes": [98], "top_logprobs": []},
                ]
            },
            "token_ids": TOKENS,
            "finish_reason": "stop",
        }
    ],
}
REQUEST_OUTPUT = {
    "request_id": "0",
    "prompt_token_ids": PROMPT,
    "outputs": [
        {
            "index": 0,
            "token_ids": TOKENS,
            "logprobs": [
                {"8": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
                {"9": {"logprob": -1.25, "rank": 2, "decoded_token": "b"}, "3": {"logprob": -0.1}},
            ],
            "finish_reason": "stop",
        }
    ],
}


def output_of(log_probs):
    """A `RequestOutput` with these log-probs."""
    return {**REQUEST_OUTPUT, "outputs": [{"token_ids": TOKENS, "logprobs": log_probs}]}


SGLANG = {
    "text": "ab",
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "step-4",
        "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
        "output_token_logprobs": [[-0.5, 8, None], [-1.25, 9, None]],
    },
}
# Prompts padded on the left, responses on the right, as in a DataProto.
VERL = {
    "prompts": [[0, *PROMPT], [0, *PROMPT]],
    "responses": [[*TOKENS, 0], [*TOKENS, 1]],
    "attention_mask": [[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]],
    "response_mask": [[1, 1, 0], [1, 0, 1]],
    "rollout_log_probs": [[*LOG_PROBS, 0.0], [*LOG_PROBS, -3.0]],
}
TRL = {
    "prompt_ids": [PROMPT, PROMPT],
    "completion_ids": [TOKENS, [*TOKENS, 1]],
    "logprobs": [LOG_PROBS, [*LOG_PROBS, -3.0]],
}
TRL_LIKELIEST = {  # several log-probs a position, with the ids that they are of
    "prompt_ids": [PROMPT],
    "completion_ids": [TOKENS],
    "logprobs": [[[-0.1, -0.5], [-1.25, -4.0]]],
    "logprob_token_ids": [[[3, 8], [9, 3]]],
}
TUNIX = {
    "text": ["ab"],
    "tokens": [[*TOKENS, 0]],
    "left_padded_prompt_tokens": [[0, 0, *PROMPT]],
    "logprobs": [LOG_PROBS],
}


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("plain", PLAIN),
        ("vllm", VLLM),
        ("vllm", CHAT),
        ("vllm", REQUEST_OUTPUT),
        ("sglang", SGLANG),
        ("sglang", SGLANG | {"input_ids": PROMPT, "output_ids": TOKENS}),
        ("verl", {name: x[0] for name, x in VERL.items()}),
        ("trl", TRL_LIKELIEST),
        ("trl", TRL_LIKELIEST | {"logprobs": [[[-0.5], [-1.25]]], "logprob_token_ids": None}),
        ("tunix", TUNIX),
    ],
)
def test_documented_shapes_are_told_by_their_keys_and_read(form, line):
    assert readers.detect(line) == form
    for given in ("auto", form):
        (response,) = read([line], form=given, pad=0)
        check(response)


def test_batches_become_rows():
    first, second = read([VERL])
    check(first)
    assert mask_of(first) == [True, True]
    check(second, [*TOKENS, 1], [LOG_PROBS[0], np.nan, -3.0])
    assert mask_of(second) == [True, False, True]
    first, second = read([TRL])
    check(first)
    check(second, [*TOKENS, 1], [*LOG_PROBS, -3.0])
    assert second.where == "row 1, response 1"


def test_completions_of_one_prompt_follow_it():
    """`trl vllm-serve` gives each prompt once, and n completions of each."""
    prompts, tokens = [[5, 6], [7]], [[10], [11], [20, 1], [21]]
    log_probs = [[-0.1], [-0.2], [-0.3, -1.0], [-0.4]]
    batch = {"prompt_ids": prompts, "completion_ids": tokens, "logprobs": log_probs}
    found = read([batch])
    assert [r.prompt for r in found] == [(5, 6), (5, 6), (7,), (7,)]
    assert [list(r.tokens) for r in found] == tokens
    assert [r.log_probs.tolist() for r in found] == [
        np.asarray(x, np.float32).tolist() for x in log_probs
    ]
    one_prompt = batch | {"prompt_ids": [[5]]}
    assert [r.prompt for r in read([one_prompt])] == [(5,)] * 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (TRL | {"completion_ids": [TOKENS] * 3}, "completion_ids has 3 sequences, but prompt_ids"),
        (
            TRL | {"completion_ids": [TOKENS]},
            "completion_ids has 1 sequences, but prompt_ids has 2",
        ),
        (TRL | {"completion_ids": []}, "completion_ids has 0 sequences, but prompt_ids has 2"),
        (TRL | {"logprobs": [LOG_PROBS]}, "logprobs has 1 sequences, but prompt_ids has 2"),
        (TRL | {"env_mask": [[1, 1]]}, "env_mask has 1 sequences, but prompt_ids has 2"),
        (TRL | {"tool_mask": [[1, 1, 1]] * 2}, "tool_mask has 3 places for 2 tokens"),
        (TRL | {"prompt_mask": [[1, 1]] * 2}, "prompt_mask has 2 places for 3 tokens"),
        (TRL | {"weights_version": [1]}, "weights_version has 1 sequences, but prompt_ids has 2"),
        (
            TRL_LIKELIEST | {"logprob_token_ids": None},
            "logprobs has several a token, so logprob_token_ids must as well",
        ),
        (SGLANG | {"output_ids": [8, 3]}, "output_ids are other tokens than those of output_token"),
        (VERL | {"responses": VERL["responses"][:1]}, "responses has 1 sequences, but prompts has"),
        (TUNIX | {"tokens": TUNIX["tokens"] * 2}, "tokens has 2 sequences, but left_padded_prompt"),
        (VERL | {"response_mask": [[1, 1]] * 2}, "response_mask has 2 places; it must have the"),
        (VERL | {"response_mask": None, "loss_mask": [[1] * 4] * 2}, "loss_mask has 4 places"),
    ],
)
def test_lists_that_do_not_go_together_are_refused(line, message):
    with pytest.raises(RolloutsError, match=f"row 1: {message}"):
        read([line | ({"pad_id": 0} if "tokens" in line else {})])


@pytest.mark.parametrize("before", [[], [0] * 4], ids=["response", "whole"])
def test_a_loss_mask_may_be_of_the_prompt_too(before):
    line = {name: x for name, x in VERL.items() if name != "response_mask"}
    masks = [[*before, 0, 1, 0], [*before, 1, 0, 1]]
    for rows in ([line | {"loss_mask": masks}], [line | {"response_mask": masks}]):
        first, second = read(rows)
        assert mask_of(first) == [False, True]
        assert mask_of(second) == [True, False, True]


PADDED = {  # a batch of TRL's trainer: prompts are padded on the left, completions on the right
    "prompt_ids": [[0, *PROMPT], [4, *PROMPT]],
    "prompt_mask": [[0, 1, 1, 1], [1, 1, 1, 1]],
    "completion_ids": [[*TOKENS, 0, 0], [8, 3, 9, 2]],
    "completion_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
    "tool_mask": [[1, 1, 1, 1], [1, 0, 1, 1]],
    "sampling_per_token_logps": [[*LOG_PROBS, 0.0, 0.0], [-0.5, 0.0, -1.25, -2.0]],
}


def test_masks_of_trl_leave_out_pads_and_what_tools_said():
    first, second = read([PADDED])
    assert [first.prompt, second.prompt] == [tuple(PROMPT), (4, *PROMPT)]
    assert mask_of(first) == [True, True, False, False]
    assert mask_of(second) == [True, False, True, True]
    of_env = {"env_mask" if name == "tool_mask" else name: x for name, x in PADDED.items()}
    assert mask_of(read([of_env])[1]) == [True, False, True, True]
    single = read([{name: x[1] for name, x in PADDED.items()}])
    assert mask_of(single[0]) == [True, False, True, True]
    served = PADDED | {"prompt_ids": [[0, 4, *PROMPT]], "prompt_mask": [[0, 1, 1, 1, 1]]}
    assert [one.prompt for one in read([served])] == [(4, *PROMPT)] * 2  # one for both


@pytest.mark.parametrize("mask", [[0, 0, 0], [False] * 3, [0, 1, 0]], ids=str)
def test_a_loss_mask_of_a_prompt_leaves_the_prompt(mask):
    line = {"prompt_ids": PROMPT, "prompt_mask": mask}  # as prime-rl has it
    line |= {"completion_ids": TOKENS, "completion_mask": [1, 1], "completion_logprobs": LOG_PROBS}
    (response,) = read([line])
    check(response)


@pytest.mark.parametrize("name", ["completion_logprobs", "logps", "sampling_per_token_logps"])
@pytest.mark.parametrize("form", ["auto", "plain"])
def test_completion_ids_go_with_every_name_of_their_log_probs(name, form):
    check(*read([{"prompt_ids": PROMPT, "completion_ids": TOKENS, name: LOG_PROBS}], form=form))
    check(*read([{"prompt_token_ids": PROMPT, "completion_ids": TOKENS, name: LOG_PROBS}]))


@pytest.mark.parametrize("line", [VERL, TRL, TUNIX | {"pad_id": 0}], ids=["verl", "trl", "tunix"])
def test_what_a_batch_says_of_its_rows_is_kept(line):
    count = len(line["logprobs"] if "logprobs" in line else line["prompts"])
    supports = [[[8, 3], [9], [1, 0]][: 2 + row] for row in range(count)]
    of_rows = {"weights_version": [7] * count, "episode_id": list("ab")[:count]}
    found = read([line | of_rows | {"finish_reason": "length", "supports": supports}])
    assert [one.version for one in found] == ["7"] * count
    assert [one.episode for one in found] == list("ab")[:count]
    assert {one.ended for one in found} == {"cut"}
    assert [one.supports is not None and one.supports[0].tolist() for one in found] == (
        [[8, 3]] * count
    )


def arrays(line, of):
    """A batch with arrays in place of lists, of one row each where rows are ragged."""
    try:
        return {name: of(x) for name, x in line.items()}
    except ValueError:
        return {name: [of(row) for row in x] for name, x in line.items()}


LIBRARIES = [("numpy", "asarray"), pytest.param("torch", "tensor", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("library", "name"), LIBRARIES)
def test_arrays_and_tensors_are_read_as_lists(library, name):
    of = getattr(pytest.importorskip(library), name)
    for line in (VERL, TRL, TRL_LIKELIEST, {k: x for k, x in TUNIX.items() if k != "text"}):
        found = read([arrays(line, of)], pad=0)
        check(found[0])
        assert len(found) == len(read([line], pad=0))
    single = {name: np.asarray(x[0]) for name, x in VERL.items()}
    check(*read([single]))
    check(
        *read([{name: np.asarray(x) for name, x in PLAIN.items()} | {"temperature": np.ones(())}])
    )
    deep = []
    for _ in range(10_000):  # deeper than Python calls: of no format, but no crash
        deep = [deep]
    check(*read([PLAIN | {"more": deep}]))


SHORT = {"meta_info": SGLANG["meta_info"] | {"input_token_logprobs": [[None, 7, None]]}}


@pytest.mark.parametrize("key", ["input_ids", "prompt_token_ids", "prompt"])
def test_token_ids_of_the_prompt_may_stand_in_the_request(key):
    response = {name: x for name, x in CHAT.items() if name != "prompt_token_ids"}
    for answer in (response, SGLANG | SHORT):
        check(*read([{"request": {key: PROMPT}, "response": answer}]))
        with pytest.raises(RolloutsError, match="prompt"):
            read([{"request": {}, "response": answer}])
    check(*read([{"request": {key: [1, 2]}, "response": CHAT}]))  # the response's own are taken


def test_text_of_the_prompt_may_stand_in_the_request():
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}c"
    chat = {name: x for name, x in CHAT.items() if name != "prompt_token_ids"}
    meta = {name: x for name, x in SGLANG["meta_info"].items() if name != "input_token_logprobs"}
    messages = [{"role": "user", "content": "ab"}]
    for request, response, prompt in (
        ({"prompt": "ab"}, chat, (2, 3)),
        ({"messages": messages}, chat, (2, 3, 4)),
        ({"text": "ab"}, {"text": "x", "meta_info": meta}, (2, 3)),
    ):
        line = {"request": request, "response": response}
        found = collect(readers.read([line]), limits=LIMITS, tokenizer=tokenizer)
        assert found.responses[0].prompt == prompt
        assert list(found.responses[0].tokens) == TOKENS
        assert "tokenised again" in found.warnings[0]
    line = {"request": {"prompt": "ab", "add_special_tokens": False}, "response": chat}
    with pytest.raises(RolloutsError, match="add_special_tokens = False shaped the prompt"):
        collect(readers.read([line]), limits=LIMITS, tokenizer=tokenizer)


def chat_of(**request):
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if brief %}c{% else %}b{% endif %}"
    )
    chat = {name: x for name, x in CHAT.items() if name != "prompt_token_ids"}
    line = {"request": {"messages": [{"role": "user", "content": "ab"}]} | request}
    rows = readers.read([line | {"response": chat}])
    return collect(rows, limits=LIMITS, tokenizer=tokenizer).responses[0].prompt


def test_what_shapes_the_prompt_of_a_chat_is_heeded_or_refused():
    assert chat_of() == (2, 3, 3)
    assert chat_of(chat_template_kwargs={"brief": True}) == (2, 3, 4)
    assert chat_of(extra_body={"chat_template_kwargs": {"brief": True}}) == (2, 3, 4)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_of(messages=[{"role": "user", "content": parts}]) == (2, 3, 3)
    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("tools", {"tools": [{"type": "function"}]}),
        ("continue_final_message", {"continue_final_message": True}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("add_generation_prompt", {"extra_body": {"add_generation_prompt": False}}),
        ("chat_template", {"chat_template": "{{ messages }}"}),
        ("documents", {"documents": [{"text": "a"}]}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 2}),
    )
    for name, request in refused:
        with pytest.raises(RolloutsError, match=f"{name} .*shaped the prompt"):
            chat_of(**request)
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}
    assert chat_of(messages=[said | {"content": "a"}]) == (2, 3)  # what is empty says nothing
    for key, value in (
        ("tool_calls", [{"type": "function", "function": {"name": "add"}}]),
        ("reasoning_content", "hmm"),
        ("tool_call_id", "x"),
    ):
        match = f"message 1 of the prompt has {key} = .*; give prompt_token_ids"
        with pytest.raises(RolloutsError, match=match):
            chat_of(messages=[{"role": "user", "content": "ab"}, said | {key: value}])
    for content in (None, [{"type": "image_url", "image_url": {}}]):
        with pytest.raises(RolloutsError, match="prompt"):
            chat_of(messages=[{"role": "user", "content": content}])


def test_a_dump_of_verl_may_have_meta_info_of_its_own():
    (plain,) = read([{name: x[0] for name, x in VERL.items()}])
    (response,) = read(
        [{name: x[0] for name, x in VERL.items()} | {"meta_info": {"temperature": 0.6}}]
    )
    assert response.tokens == plain.tokens
    assert response.declared == Distribution(0.6)


def test_what_systems_say_besides_is_kept():
    (response,) = read([VLLM])
    assert response.ended == "cut"
    (response,) = read([SGLANG])
    assert (response.ended, response.end) == ("token", 9)
    assert response.version == "step-4"
    asked = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "prompt": "x"}
    both = {"request": asked, "response": VLLM | {"weights_version": "its own"}}
    (response,) = read([both | {"weights_version": "beside it"}])
    assert response.version == "its own"
    (response,) = read([{"request": asked, "response": VLLM}])
    assert response.declared == Distribution(0.6, 0, 0.9)
    (response,) = read([SGLANG | {"sampling_params": {"temperature": 0.7, "top_k": 4}}])
    assert response.declared == Distribution(0.7, 4, 1.0)
    (response,) = read([PLAIN | {"top_k": LIMITS.vocabulary}])  # all tokens is no truncation
    assert response.declared == Distribution()


def test_files(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(PLAIN) + "\n\n" + json.dumps(VLLM) + "\n")
    first, second = read(lines)
    check(first)
    check(second)
    assert second.where == f"{lines}, line 3"
    one = tmp_path / "a.json"
    one.write_text(json.dumps(CHAT, indent=2))
    check(*read(one))
    one.write_text(json.dumps([PLAIN, PLAIN]))
    assert [r.where for r in read(one)] == [f"{one}, row 1", f"{one}, row 2"]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([PLAIN, PLAIN])
    parquet.write_table(table, tmp_path / "a.parquet")
    check(read(tmp_path / "a.parquet")[1])
    for name, message in (("no.jsonl", "no such file"), ("a.csv", "unknown file type")):
        with pytest.raises(InputError, match=message):
            read(tmp_path / name)


REFUSED = [
    ({"logprobs": None}, "has no logprobs"),
    ({"logprobs": None, "log_prob": [0.0]}, "did you mean 'log_prob'"),
    ({"logprobs": [-1.0, 0.5]}, r"logprobs\[1\] = 0.5 is positive"),
    ({"logprobs": [-1.0, float("nan")]}, r"logprobs\[1\] is nan, which is not finite"),
    ({"logprobs": [-1.0, -1e300]}, r"logprobs\[1\] is -1e\+300, which is not finite"),
    ({"top_k": float("inf")}, "top_k must be a whole number, got inf"),
    ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
    ({"logprobs": [-1.0, -(10**400)]}, r"logprobs\[1\] is -?\d+\.\.\., which is not finite"),
    ({"logprobs": [-1.0, None]}, r"logprobs\[1\] must be a number, got None"),
    ({"logprobs": [-1.0]}, "1 logprobs for 2 tokens"),
    ({"logprobs": [-1.0] * 3}, "3 logprobs for 2 tokens; was the end token stripped"),
    ({"response_token_ids": [8, 50]}, r"\[1\] = 50 is outside the model's vocabulary of 50"),
    ({"prompt_token_ids": [-1]}, r"prompt_token_ids\[0\] = -1 is outside"),
    ({"prompt_token_ids": ["a"]}, r"prompt_token_ids\[0\] must be a token id, got 'a'"),
    ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
    ({"prompt_token_ids": [1] * 15}, "17 tokens, more than the model's 16 positions"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"top_p": 0}, "top_p must be a number"),
    ({"mask": [1]}, "mask must have 2 times 0 or 1"),
    ({"top_logprobs": [{"8": -0.5}, {"9": -0.1}]}, r"logprobs\[1\] = -1.25, but top_logprobs"),
    (
        {"top_logprobs": [{"8": -0.5}, {"9": "x"}]},
        r"top_logprobs\[1\] must have finite numbers, got 'x'",
    ),
    ({"response_token_ids": None, "text": "ab"}, "has text but no response_token_ids"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_bad_line_is_refused_with_its_place_and_can_be_skipped(tmp_path, change, message):
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (PLAIN, PLAIN | change, PLAIN)))
    with pytest.raises(RolloutsError, match=message) as caught:
        read(file)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{file}, line 2: ")
    assert "1 of 3 rows are bad" in f"{caught.value}"
    rest = collect(readers.read(file), limits=LIMITS, skip_bad=True)
    assert len(rest.responses) == 2
    assert rest.problems == caught.value.problems
    with pytest.raises(RolloutsError):  # nothing is left to diagnose
        collect(readers.read([PLAIN | change]), limits=LIMITS, skip_bad=True)


def test_each_bad_line_is_named(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text(
        '{"logprobs": [\n' + json.dumps(PLAIN) + "\n[1]\n" + json.dumps(VERL["prompts"])
    )
    with pytest.raises(RolloutsError) as caught:
        read(file)
    assert [p.split(":")[0] for p in caught.value.problems] == [
        f"{file}, line {number}" for number in (1, 3, 4)
    ]
    with pytest.raises(InputError, match="there are none"):
        read([])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"input": "a", "output": "b", "score": 1.0}, "verl's rollout_data_dir holds text alone"),
        ({"choices": [{"text": "a", "logprobs": None}]}, "ask the server for logprobs=1"),
        ({"meta_info": {"prompt_tokens": 3}}, "return_logprob=true"),
        ({"prompt_ids": [1], "completion_ids": [2]}, "TRL's completions table is text alone"),
        ({name: x for name, x in TUNIX.items() if name != "text"}, "add pad_id"),
        ({"choices": 3}, "not in the shape of vllm"),
        (output_of(None), r"no logprobs; ask with SamplingParams\(logprobs=1\)"),
        (output_of(LOG_PROBS), "logprobs must map ids at each token; numbers alone are read in"),
        (
            {"prompts": [1], "responses": [2], "rollout_log_probs": [-1.0]},
            "not in the shape of verl: there is no .attention_mask",
        ),
    ],
)
def test_a_dump_without_log_probs_says_how_to_get_them(line, message):
    with pytest.raises(RolloutsError, match=f"row 1: .*{message}"):
        read([line])
    with pytest.raises(InputError, match="format 'vlm' is unknown; did you mean 'vllm'"):
        read([line], form="vlm")


def test_text_without_ids_is_tokenised_with_a_warning():
    tokenizer = character_tokenizer("abc")
    row = {"prompt": "ab", "text": "cb", "logprobs": LOG_PROBS}
    found = collect(readers.read([row]), limits=LIMITS, tokenizer=tokenizer)
    assert found.responses[0].prompt == (2, 3)
    assert found.responses[0].tokens == (4, 3)
    assert "tokenised again" in found.warnings[0]
    chat = json.loads(json.dumps(CHAT))
    del chat["choices"][0]["token_ids"]
    found = collect(readers.read([chat]), limits=LIMITS, tokenizer=tokenizer)
    assert found.responses[0].tokens == (2, 3)
    assert not collect(readers.read([PLAIN]), limits=LIMITS, tokenizer=tokenizer).warnings


# Other names, options, ends and masks.


@pytest.mark.parametrize(
    "line",
    [
        {"prompt_ids": PROMPT, "response_ids": TOKENS, "log_probs": LOG_PROBS},
        {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "token_logprobs": LOG_PROBS},
        {"input_ids": PROMPT, "output_ids": TOKENS, "output_logprobs": LOG_PROBS},
        {"input_ids": PROMPT + TOKENS, "response_ids": TOKENS, "logprobs": LOG_PROBS},
        {"prompt_ids": PROMPT, "output_ids": TOKENS, "logprobs": LOG_PROBS, "output": "ab"},
        {"tokens": PROMPT + TOKENS, "response_length": 2, "rollout_log_probs": LOG_PROBS},
        {"prompt_token_ids": PROMPT, "tokens": TOKENS, "logprobs": LOG_PROBS},  # Tinker's
        {"prompt_token_ids": PROMPT, "tokens": PROMPT + TOKENS, "logprobs": LOG_PROBS},
        {"prompt_ids": PROMPT, "tokens": PROMPT + TOKENS, "logprobs": [None, -3, -4, *LOG_PROBS]},
        {
            "input_ids": PROMPT + TOKENS,
            "labels": [-100, -100, -100, *TOKENS],
            "logprobs": [None, -3.0, -4.0, *LOG_PROBS],
        },
        {
            "input_ids": [0, *PROMPT, *TOKENS, 0],
            "attention_mask": [0, 1, 1, 1, 1, 1, 0],
            "loss_mask": [0, 0, 0, 0, 1, 1, 0],
            "logps": [-9.0, -3.0, -4.0, *LOG_PROBS, 0.0],  # of the tokens but for the first
        },
        PLAIN | {"logprobs": [None, -3.0, -4.0, *LOG_PROBS]},
        PLAIN | {"logprobs": [-3.0, -4.0, *LOG_PROBS]},
    ],
)
def test_other_names_and_log_probs_of_the_prompt_are_read(line):
    assert readers.detect(line) == "plain"
    (response,) = read([line])
    check(response)
    assert response.mask is None or response.mask.all()


@pytest.mark.parametrize("gap", [None, float("nan")], ids=str)
def test_the_first_token_of_a_prompt_has_no_log_prob(gap):
    """None, or NaN where the row comes from a table; the prompt may be that token alone."""
    for prompt in (PROMPT, PROMPT[:1]):
        whole = [gap, *[-3.0] * (len(prompt) - 1), *LOG_PROBS]
        tokens = {"response_token_ids": TOKENS}, {"tokens": [*prompt, *TOKENS]}
        for own in tokens:
            (response,) = read([{"prompt_token_ids": prompt, "logprobs": whole} | own])
            assert response.tokens == tuple(TOKENS)
            assert response.log_probs.tolist() == pytest.approx(LOG_PROBS)


@pytest.mark.parametrize(
    ("behind", "left"),
    [
        ([], 2),
        ([0, 0, 0], 2),
        ([0], 3),  # may be a tool's reply
        ([END, 0, 0], 3),
        ([6, 0, 0], 3),  # what a template puts behind a turn
        ([6, 5, 6], 5),
    ],
)
def test_what_a_masked_response_is_filled_up_with_is_cut_off(behind, left):
    """End tokens are the model's and, as here, those of the request."""
    row = {
        "prompt_token_ids": PROMPT,
        "response_token_ids": [*TOKENS, *behind],
        "logprobs": [*LOG_PROBS, *[0.0] * len(behind)],
        "mask": [1, 1, *[0] * len(behind)],
        "stop_token_ids": [END],
    }
    (response,) = read([row])
    whole = response.without_padding(())
    assert whole.tokens == (*TOKENS, *behind)[:left]
    assert len(whole.log_probs) == len(whole.kept) == left


def test_labels_hide_what_has_no_loss_and_a_list_without_a_border_is_refused():
    whole = {
        "input_ids": PROMPT + TOKENS + [4, 6],
        "logprobs": [None] * 3 + [*LOG_PROBS, 7.0, -2.0],
    }
    (response,) = read([whole | {"labels": [-100] * 3 + [*TOKENS, -100, 6]}])
    assert mask_of(response) == [True, True, False, True]
    assert np.isnan(response.log_probs).tolist() == [False, False, True, False]
    with pytest.raises(RolloutsError, match="nothing says where the response begins: add labels"):
        read([{"tokens": PROMPT + TOKENS, "logprobs": LOG_PROBS}])
    for whole in (
        {"tokens": PROMPT + TOKENS},  # the response may have repeated the prompt
        {"input_ids": [0, *PROMPT, *TOKENS][:5]},  # another prompt, which is no response
    ):
        with pytest.raises(RolloutsError, match="nothing says where the response begins"):
            read([whole | {"prompt_ids": PROMPT, "logprobs": [-1.0] * 5}])


def test_an_echoed_prompt_is_left_out():
    names = [f"token_id:{token}" for token in PROMPT + TOKENS]
    log_probs = {"tokens": names, "token_logprobs": [None, -3.0, -4.0, *LOG_PROBS]}
    check(*read([{"prompt_token_ids": PROMPT, "choices": [{"logprobs": log_probs}]}]))


@pytest.mark.parametrize("hidden", [None, float("nan"), float("-inf"), 99.0, "x", -9999])
def test_what_a_mask_leaves_out_is_not_read(hidden):
    row = PLAIN | {"response_token_ids": [8, 9, 3], "logprobs": [-0.5, hidden, -1.0]}
    (response,) = read([row | {"mask": [1, 0, 1]}])
    assert response.log_probs.tolist()[::2] == [-0.5, -1.0]
    assert np.isnan(response.log_probs[1])


def test_a_log_prob_that_rounding_made_positive_is_zero():
    (response,) = read([PLAIN | {"logprobs": [1e-6, -1.0]}])
    assert response.log_probs.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("values", "ended", "end"),
    [
        ({"finish_reason": "length"}, "cut", None),
        ({"stop_type": "limit"}, "cut", None),
        ({"finish_reason": "stop"}, "token", None),
        ({"finish_reason": "stop", "stop": ["</s>"]}, None, None),
        ({"finish_reason": "stop", "stop": ["</s>"], "stop_reason": None}, "token", None),
        ({"finish_reason": "stop", "stop_reason": "</s>"}, "other", None),
        ({"finish_reason": "stop", "stop_reason": 9}, "token", 9),
        ({"finish_reason": {"type": "stop", "matched": 9}}, "token", 9),
        ({"finish_reason": {"type": "stop", "matched": "</s>"}}, "other", None),
        ({"finish_reason": {"type": "abort", "message": "by request"}}, "other", None),
        ({"finish_reason": "tool_calls"}, "other", None),
        ({"stop_reason": "stop"}, "token", None),
        ({"stop_reason": "stop", "stop": ["</s>"]}, None, None),
        ({"stop_reason": "length"}, "cut", None),
        ({"stop_reason": "</s>"}, "other", None),
        ({"finish_reason": "stop", "stop_reason": "stop"}, "other", None),
        ({}, None, None),
    ],
)
def test_a_response_ends_by_a_token_by_something_else_or_is_cut(values, ended, end):
    (response,) = read([PLAIN | values])
    assert (response.ended, response.end) == (ended, end)


def test_servers_say_how_a_response_ended():
    choice = VLLM["choices"][0] | {"finish_reason": "stop", "stop_reason": "</s>"}
    assert read([VLLM | {"choices": [choice]}])[0].ended == "other"
    choice = CHAT["choices"][0] | {"matched_stop": 9}
    assert read([CHAT | {"choices": [choice]}])[0].end == 9
    line = {"request": {"stop": ["x"]}, "response": CHAT}
    assert read([line])[0].ended is None


SHAPED = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "min_p": 0.05,
    "min_tokens": 1,
    "logit_bias": {"8": 2.0, "3": -100},
    "allowed_token_ids": [9, 8, 3],
}


def test_options_that_shape_the_draws_are_read_wherever_they_stand():
    wanted = Shaping(1.1, 0.5, -0.25, 0.05, 1, ((3, -100.0), (8, 2.0)), (3, 8, 9))
    for line in (
        PLAIN | SHAPED,
        PLAIN | {"sampling_params": SHAPED},
        {"request": SHAPED, "response": VLLM},
        {"request": {"extra_body": SHAPED}, "response": CHAT},
        SGLANG | {"sampling_params": SHAPED},
    ):
        (response,) = read([line])
        assert response.declared.shaping == wanted
        assert response.declared.shaped
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0, "min_p": 0.0, "logit_bias": {}}
    more = {"typical_p": 1.0, "bad_words": [], "guided_json": None, "num_beams": 1, "stop": None}
    more |= {"response_format": {"type": "text"}, "allowed_token_ids": None, "regex": None}
    (response,) = read([{"request": neutral | more, "response": VLLM}])
    assert response.declared == Distribution()
    check(*read([PLAIN | {"regex": "[a-z]"}]))  # a column of that name, not an option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"typical_p": 0.9}, "typical_p = 0.9 shaped the draws and cannot be applied here"),
        ({"bad_words": ["no"]}, r"bad_words = \['no'\] shaped the draws"),
        ({"guided_json": {"type": "object"}}, "guided_json = .* shaped the draws"),
        ({"response_format": {"type": "json_object"}}, "response_format = .* shaped the draws"),
        ({"regex": "[a-z]+"}, "regex = .* shaped the draws"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p together with top_p is not scored here"),
        ({"repetition_penalty": "x"}, "repetition_penalty must be a number from 0.01 to 100"),
        ({"min_tokens": 0.5}, "min_tokens must be a whole number, got 0.5"),
        ({"logit_bias": {"99": 1.0}}, "logit_bias must map ids of the model's 50 tokens"),
        ({"allowed_token_ids": [8]}, r"response_token_ids\[1\] = 9 was drawn, but allowed_token"),
        ({"logprobs_mode": "logits"}, "logprobs_mode must be 'raw_logprobs' or"),
    ],
)
def test_options_that_cannot_be_applied_are_refused_by_their_names(options, message):
    with pytest.raises(RolloutsError, match=f"row 1: {message}"):
        read([{"request": options, "response": VLLM}])


def test_raw_log_probs_may_be_declared_and_matter_only_where_they_differ():
    raw = Distribution(raw=True)
    (response,) = collect(readers.read([PLAIN]), limits=LIMITS, default=raw).responses
    assert not response.declared.raw  # nothing is drawn otherwise
    warm = PLAIN | {"temperature": 0.6}
    (response,) = collect(readers.read([warm]), limits=LIMITS, default=raw).responses
    assert response.declared.raw
    (response,) = read([warm | {"logprobs_mode": "raw_logprobs"}])
    assert response.declared.raw


def test_errors_of_one_kind_are_one_line_with_a_count(tmp_path):
    rows = [PLAIN | {"logprobs": [-1.0, 0.5 + i]} for i in range(30)]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, [PLAIN, *rows, PLAIN | {"logprobs": [-1.0]}])))
    with pytest.raises(RolloutsError) as caught:
        read(file)
    assert len(caught.value.problems) == 31
    first, second = caught.value.lines
    assert first == (
        f"{file}, line 2: logprobs[1] = 0.5 is positive; a log-probability is at most 0"
        " (and 29 more like it, the last in line 31)"
    )
    assert second == f"{file}, line 32: 1 logprobs for 2 tokens"
    assert caught.value.summary == "31 of 32 rows are bad; --skip-bad diagnoses the other 1"


def test_the_engines_log_probs_are_read_and_not_those_computed_again():
    slime = {"tokens": PROMPT + TOKENS, "response_length": 2, "loss_mask": [1, 1]}
    again = {"log_probs": [-9.0, -9.0]}
    (response,) = read([again | slime | {"rollout_log_probs": LOG_PROBS}])
    check(response)
    with pytest.raises(RolloutsError, match="has logprobs and sampling_per_token_logps, which"):
        read([PLAIN | {"sampling_per_token_logps": [-9.0, -9.0]}])
    check(read([PLAIN | {"sampling_per_token_logps": LOG_PROBS}])[0])


def test_maps_of_a_table_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    numbers = pyarrow.map_(pyarrow.string(), pyarrow.float64())

    def table(**change):
        rows = PLAIN | {"sampling_params": {"temperature": 0.5}} | change
        kinds = {
            "prompt_token_ids": pyarrow.list_(pyarrow.int64()),
            "response_token_ids": pyarrow.list_(pyarrow.int64()),
            "logprobs": pyarrow.list_(pyarrow.float64()),
            "sampling_params": numbers,
            "top_logprobs": pyarrow.list_(numbers),
        }
        schema = pyarrow.schema([(name, kinds[name]) for name in rows])
        parquet.write_table(pyarrow.Table.from_pylist([rows], schema), tmp_path / "x.parquet")
        return read(tmp_path / "x.parquet")[0]

    assert table().declared.temperature == 0.5
    with pytest.raises(RolloutsError, match="one of the two is shifted"):
        table(top_logprobs=[{"8": -3.0}, {"9": -1.25}])


def test_what_is_said_nowhere_hides_nothing_and_two_values_are_refused():
    inner = {"sampling_params": {"temperature": 0.5}}
    for row in (
        PLAIN | {"temperature": None} | inner,
        {"request": {"temperature": 0.5}, "response": PLAIN | {"temperature": None}},
        {"request": {}, "response": PLAIN, "temperature": 0.5},
    ):
        assert read([row])[0].declared.temperature == 0.5
    for row in (
        PLAIN | {"temperature": 1.0} | inner,
        {"request": {"temperature": 0.5}, "response": PLAIN | {"temperature": 1}},
    ):
        with pytest.raises(RolloutsError, match="temperature is said twice, as "):
            read([row])
    assert read([PLAIN | {"top_k": 0, "sampling_params": {"top_k": -1}}])[0].declared.top_k == 0
    with pytest.raises(RolloutsError, match="sampling_params must be a mapping of options, got"):
        read([PLAIN | {"sampling_params": '{"temperature": 0.5}'}])


def test_gaps_of_a_table_say_nothing():
    """Pandas has NaN for what is missing, and makes floats of a column of whole numbers with it."""
    nothing = float("nan")
    names = "finish_reason", "stop_reason", "weights_version", "episode", "turn", "top_k", "mask"
    (gaps,), (said,) = (
        read([PLAIN | dict.fromkeys(names, nothing)]),
        read([PLAIN | {"finish_reason": "stop", "stop_reason": 9.0, "turn": 1.0}]),
    )
    assert (gaps.ended, gaps.version, gaps.episode, gaps.turn, gaps.mask) == (None,) * 5
    assert (said.ended, said.end, said.turn) == ("token", 9, 1)
    (three, also) = read([PLAIN | {"weights_version": x} for x in (3, 3.0)])
    assert three.version == also.version == "3"


@pytest.mark.parametrize("line", [VLLM, REQUEST_OUTPUT, SGLANG])
def test_what_a_recorder_puts_beside_a_response_is_read(line):
    beside = {"mask": [1, 0], "weight_version": 7, "supports": [[8, 1], [9]]}
    for row in (line | beside, {"request": {}, "response": line} | beside):
        (response,) = read([row])
        assert mask_of(response) == [True, False]
        assert response.version == ("step-4" if line is SGLANG else "7")
        assert response.supports is not None
    several = VLLM | {"choices": VLLM["choices"] * 2, "mask": [1, 0]}
    with pytest.raises(RolloutsError, match="mask stands beside 2 responses; say whose it is"):
        read([several])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_mask": {"token_ids": [8, 9], "offsets": 12}}, "supports must have token_ids"),
        ({"sampling_mask": {"ids": [8, 9], "counts": ["1", 1]}}, "supports must have token_ids"),
    ],
)
def test_supports_of_another_kind_are_refused(change, message):
    with pytest.raises(RolloutsError, match=message):
        read([PLAIN | change])


def test_numbers_and_columns_that_a_table_makes_are_taken():
    assert read([PLAIN | {"min_tokens": 10**12}])[0].declared.shaping.min_tokens == 2**31 - 1
    (response,) = read([PLAIN | {"logit_bias": {"5": 1.0, "6": None}}])
    assert response.declared.shaping.bias == ((5, 1.0),)
    named = {"prompt_ids": PROMPT, "response_ids": TOKENS, "logprobs": LOG_PROBS}
    check(read([named | {"choices": ["A", "B"], "outputs": "ab"}])[0])


def test_the_page_lists_every_name_that_is_read():
    page = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text()
    for key, names in readers.NAMES.items():
        assert f"| `{key}` | {', '.join(f'`{name}`' for name in names)} |" in page
