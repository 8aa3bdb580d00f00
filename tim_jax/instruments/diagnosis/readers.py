"""What other systems write, as rows of `rollouts.KEYS`.

plain   a sequence a line, with the keys of `rollouts.KEYS`, or the names of `NAMES` for them
vllm    responses of an OpenAI-style server (`/v1/completions`, `/v1/chat/completions`) with
        `logprobs`, and `return_token_ids` or `return_tokens_as_token_ids`; or `RequestOutput`s
sglang  responses of SGLang's `/generate` with `return_logprob`; its OpenAI-style ones are as vLLM's
verl    rows or batches of a `DataProto`: prompts, responses, attention_mask, rollout_log_probs
trl     prompt_ids, completion_ids, logprobs: of `trl vllm-serve`, of a `rollout_func`, or of a
        batch of the trainer, with its masks
tunix   a `RolloutOutput`: tokens, left_padded_prompt_tokens, logprobs

A line may also be `{"request": ..., "response": ...}`; the request then says how it was sampled,
and after which prompt, if the response does not. Arrays in memory are read as lists.

A plain line may have prompt and response in one list (`input_ids`, `tokens`): with `labels` (-100
where there is no loss), with a mask as long as the list, or with `response_length` or
`prompt_length`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import shown
from tim_jax.instruments.diagnosis import declared
from tim_jax.instruments.diagnosis.rows import SHAPING, Row, is_gap, plain_values, read_lines

FORMATS = ("auto", "plain", "vllm", "sglang", "verl", "trl", "tunix")
_TOKEN_ID = re.compile(r"token_id:(\d+)")
# What trainers call the engine's log-probs, beside those that they computed again.
_OF_ENGINE = (
    *("rollout_log_probs", "rollout_logprobs", "generation_logprobs", "sampling_logprobs"),
    *("sampling_per_token_logps",),
)
# What trainers and scripts call prompt, response, log-probs and mask.
NAMES = {
    "prompt_token_ids": ("prompt_ids", "prompt_tokens", "query_ids", "query_token_ids"),
    "response_token_ids": (
        *("response_ids", "response_tokens", "completion_ids", "completion_token_ids"),
        *("completion_tokens", "output_ids", "output_token_ids", "output_tokens"),
        *("generated_ids", "generated_token_ids", "token_ids"),
    ),
    "logprobs": (
        *_OF_ENGINE,
        *("log_probs", "logps", "token_logprobs", "response_logprobs", "response_log_probs"),
        *("output_logprobs", "output_log_probs", "completion_logprobs"),
    ),
    "mask": ("loss_mask", "response_mask", "completion_mask", "action_mask", "assistant_masks"),
    "finish_reason": ("finish_reasons", "stop_type"),
    "weights_version": ("weight_version", "policy_version", "model_version"),
    "supports": ("sampling_mask", "sampling_masks", "kept_tokens"),
    "routes": ("routed_experts", "rollout_routed_experts"),
    "episode": ("episode_id", "trajectory_id"),
}
_SCALARS = ("finish_reason", "weights_version", "supports", "routes", "episode")  # not lists alone
_WHOLE = ("input_ids", "tokens")
_NO_LOSS = -100
_OF_EPISODES = ("episode", "turn", "turn_token_ids")
_REPLAYED = ("supports", "kept_log_mass", "routes")
_BESIDE = ("weights_version", "mask", *_REPLAYED)
# What a line of verl, TRL or tunix may say of its rows; the first have a value for each token.
_OF_TOKENS = ("supports", "kept_log_mass", "top_logprobs")
_CARRIED = (
    *("finish_reason", "stop_reason", "weights_version", "routes", *_OF_EPISODES),
    *_OF_TOKENS,
)
_VERL_MASKS = ("response_mask", "loss_mask", "mask")
# All of them are 1 at a token that the policy drew; `completion_mask` is 0 at pads.
_TRL_MASKS = ("mask", "completion_mask", "env_mask", "tool_mask")
_WHOLE_NUMBERS = (
    *("turn", "stop_reason", "response_length", "prompt_length", "weights_version"),
    *NAMES["weights_version"],
)


def read(
    source: str | Path | Iterable[Mapping[str, Any]], *, form: str = "auto", pad: int | None = None
) -> Iterator[Row | InputError]:
    """Yields the rows of a file, or of mappings in memory, in their order.

    A line that cannot be read is yielded as the `InputError` that says why.

    Args:
      source: a `.jsonl`, `.json` (an array, or one object) or `.parquet` file, or its lines.
      form: one of `FORMATS`; "auto" tells by the keys of each line.
      pad: the pad token, which tunix's prompts begin with.

    Raises:
      InputError: there is no such file, or it cannot be read at all.
    """
    check_choice("rollouts: format", form, FORMATS)
    for line in read_lines(source):
        if isinstance(line, InputError):
            yield line
            continue
        try:
            yield from _rows(line, form, pad)
        except InputError as error:
            yield error
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            reason = shown(f"{type(error).__name__}: {error}")
            reason = f"there is no {error}" if isinstance(error, KeyError) else reason
            name = detect(line.values) if form == "auto" else form
            yield InputError(f"{line.where}: not in the shape of {name}: {reason}")


def _rows(given: Row, form: str, pad: int | None) -> Iterator[Row]:
    """One line, of one of the formats, as the rows that it holds."""
    if not isinstance(given.values, Mapping):
        raise InputError(f"{given.where}: must be an object with keys, got {shown(given.values)}")
    line = values = plain_values(given.values, whole=_WHOLE_NUMBERS)
    asked: Mapping[str, Any] = {}
    around: list[Mapping[str, Any]] = []
    if isinstance(line.get("request"), Mapping) and isinstance(line.get("response"), Mapping):
        asked, around = line["request"], [line]
        values = _with_prompt(line["response"], asked)
    name = detect(values) if form == "auto" else form
    try:
        of_all = _shaping(asked) | declared.asked(asked, values, *around)
        several = list(tunix(values, pad=pad) if name == "tunix" else _READERS[name](values))
        # The other readers take what stands beside a response from the line themselves.
        for one in [*([values] if name in ("vllm", "sglang") else []), *around]:
            of_all |= _values_beside(one, len(several))
    except InputError as error:
        raise InputError(f"{given.where}: {error}") from None
    of_all |= {key: line[key] for key in _OF_EPISODES if line.get(key) is not None}
    for number, row in enumerate(several):
        own = {
            key: x
            for key, x in row.items()
            if (x is not None or key not in of_all) and key not in declared.IN_REQUESTS
        }
        response = "" if len(several) == 1 else f", response {number}"
        yield Row(of_all | own, f"{given.where}{response}")


def _shaping(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a request says that makes another prompt of its text, in OpenAI's `extra_body` too."""
    inner = asked.get("extra_body")
    places = (inner if isinstance(inner, Mapping) else {}, asked)
    return {x: one[x] for one in places for x in SHAPING if one.get(x) is not None}


def _values_beside(values: Mapping[str, Any], responses: int) -> dict[str, Any]:
    """What a recorder put beside a response, or beside a request and its response."""
    given = _named(values, _BESIDE)
    for key in given:
        if responses > 1 and key != "weights_version":
            name = _name_in(values, key)
            raise InputError(f"{name} stands beside {responses} responses; say whose it is")
    return given


def _named(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """What a line says of some keys, by whatever names it has for them."""
    found = {key: values.get(_name_in(values, key)) for key in keys}
    return {key: x for key, x in found.items() if x is not None}


def _with_prompt(values: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """A response, with what its request says of the prompt where it says nothing itself."""
    ids = asked.get("prompt_token_ids") or asked.get("input_ids")
    prompt = asked.get("prompt") or asked.get("messages") or asked.get("text")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        ids, prompt = ids or prompt, None
    if ids and not (values.get("prompt_token_ids") or values.get("input_ids")):
        values = {**values, "prompt_token_ids": ids}
    return {**values, "prompt": prompt} if prompt and not values.get("prompt") else values


def detect(values: Any) -> str:
    """The format of a line, by its keys."""
    keys = set(values) if isinstance(values, Mapping) else set()
    if keys & {"rollout_log_probs"} and not keys & {"prompts", "responses"}:
        return "plain"  # as slime has it
    named = [_name_in(values, key) for key in ("response_token_ids", "logprobs")] if keys else []
    for name, marks in _MARKS:
        if marks & keys and not (name == "vllm" and keys.issuperset(named)):
            return name
    if keys and keys.issuperset(named):
        return "plain"
    return "verl" if keys & {"responses", "output"} else "plain"  # verl's dump is text alone


def plain(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A line in this project's own format, or with the names that other programs give its keys."""
    _check_one_list(values)
    yield renamed(values)


def _check_one_list(values: Mapping[str, Any]) -> None:
    """Refuses `logprobs` beside others that an engine is said to have recorded."""
    own = values.get("logprobs")
    for name in _OF_ENGINE:
        other = values.get(name)
        if isinstance(own, list) and isinstance(other, list) and own != other:
            raise InputError(
                f"has logprobs and {name}, which differ; leave out the one that the engine did not"
                " record"
            )


def vllm(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An OpenAI-style response, a row for each choice; or a dumped `RequestOutput`."""
    if "outputs" in values:
        yield from _request_output(values)
        return
    for choice in values["choices"]:
        logprobs = choice.get("logprobs")
        if not logprobs:
            raise InputError("the response has no logprobs; ask the server for logprobs=1")
        chat = logprobs.get("content")
        if chat is not None:
            names, log_probs = [x["token"] for x in chat], [x["logprob"] for x in chat]
            top = [{x["token"]: x["logprob"] for x in t.get("top_logprobs") or ()} for t in chat]
        else:
            names, log_probs = logprobs["tokens"], logprobs["token_logprobs"]
            top = logprobs.get("top_logprobs")
        ids = choice.get("token_ids") or _token_ids(names)
        prompt = choice.get("prompt_token_ids") or values.get("prompt_token_ids")
        if prompt and ids and ids[: len(prompt)] == prompt and is_gap(log_probs[0]):
            # The server echoed the prompt, whose first token has no log-prob.
            ids, log_probs, top = (x and x[len(prompt) :] for x in (ids, log_probs, top))
        message = choice.get("message") or {}
        yield {
            "prompt_token_ids": prompt,
            "response_token_ids": ids,
            "logprobs": log_probs,
            "top_logprobs": _top_by_id(top),
            "text": choice.get("text") or message.get("content"),
            "prompt": values.get("prompt"),
            **_ending(choice),
            **_named(choice, _REPLAYED),
            "weights_version": values.get("weights_version"),
        }


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    """How a choice ended: vLLM's `stop_reason`, or what SGLang calls `matched_stop`."""
    ending = {"finish_reason": choice.get("finish_reason")}
    if choice.get("matched_stop") is not None:
        return ending | {"stop_reason": choice["matched_stop"]}
    return ending | {key: choice[key] for key in ("stop_reason",) if key in choice}


def _token_ids(names: Sequence[str]) -> list[int] | None:
    """The ids that the names of tokens are, or None if they are texts, of which ids are made."""
    matches = [_TOKEN_ID.fullmatch(name) for name in names]
    return [int(one[1]) for one in matches if one] if all(matches) else None


def _top_by_id(top: Any) -> list[dict[str, float]] | None:
    """Alternatives by token id, if the server gave ids."""
    if not top or not all(isinstance(choices, Mapping) for choices in top):
        return None
    if not all(_TOKEN_ID.fullmatch(name) for choices in top for name in choices):
        return None
    return [{name.partition(":")[2]: x for name, x in choices.items()} for choices in top]


def _request_output(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for output in values["outputs"]:
        ids, likeliest = output["token_ids"], output.get("logprobs")
        if likeliest is None:
            raise InputError("the output has no logprobs; ask with SamplingParams(logprobs=1)")
        if not all(isinstance(choices, Mapping) for choices in likeliest):
            text = "logprobs must map ids at each token; numbers alone are read in rows of"
            raise InputError(f"{text} prompt_token_ids, response_token_ids and logprobs")
        chosen = [x[str(t)] if str(t) in x else x[t] for x, t in zip(likeliest, ids, strict=True)]
        yield {
            "prompt_token_ids": values["prompt_token_ids"],
            "response_token_ids": ids,
            "logprobs": [x["logprob"] if isinstance(x, Mapping) else x for x in chosen],
            "text": output.get("text"),
            "prompt": values.get("prompt"),
            **_ending(output),
            **_named(output, _REPLAYED),
        }


def sglang(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A response of `/generate`: log-prob, token id and text of each token in `meta_info`."""
    if "choices" in values:
        yield from vllm(values)
        return
    meta = values["meta_info"]
    triples = meta.get("output_token_logprobs")
    if triples is None:
        raise InputError("meta_info has no output_token_logprobs; ask with return_logprob=true")
    ids, drawn = [triple[1] for triple in triples], values.get("output_ids")
    if isinstance(drawn, list) and drawn != ids:
        raise InputError("output_ids are other tokens than those of output_token_logprobs")
    prompt = values.get("prompt_token_ids") or values.get("input_ids")
    if prompt is None and meta.get("input_token_logprobs"):
        prompt = [triple[1] for triple in meta["input_token_logprobs"]]
        if len(prompt) != meta.get("prompt_tokens", len(prompt)):
            raise InputError(
                f"input_token_logprobs has {len(prompt)} of {meta['prompt_tokens']} prompt tokens;"
                " ask with logprob_start_len=0, or put the prompt's ids into input_ids"
            )
    yield {
        "prompt_token_ids": prompt,
        "response_token_ids": ids,
        "logprobs": [triple[0] for triple in triples],
        "text": values.get("text"),
        "prompt": values.get("prompt"),
        "finish_reason": meta.get("finish_reason"),
        "weights_version": meta.get("weight_version"),
        **_named(meta, _REPLAYED),
    }


def verl(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a `DataProto`: prompts are padded on the left, responses on the right."""
    if "rollout_log_probs" not in values:
        raise InputError(
            "has no rollout_log_probs; verl's rollout_data_dir holds text alone: dump prompts,"
            " responses, attention_mask and rollout_log_probs of the batch, with"
            " rollout.calculate_log_probs=True"
        )
    names = ("responses", "attention_mask", "rollout_log_probs")
    for row in _batch(values, "prompts", (*names, *_VERL_MASKS)):
        prompt, response, attended = row["prompts"], row["responses"], row["attention_mask"]
        if len(attended) != len(prompt) + len(response):
            raise InputError(
                f"attention_mask has {len(attended)} places for {len(prompt)} + {len(response)}"
            )
        count = sum(1 for x in attended[len(prompt) :] if x)
        yield _carried(row, count) | {
            "prompt_token_ids": [t for t, a in zip(prompt, attended, strict=False) if a],
            "response_token_ids": response[:count],
            "logprobs": row["rollout_log_probs"][:count],
            "mask": _verl_mask(row, len(prompt), len(response), count),
            "routes": _attended_routes(row, attended),
        }


def _attended_routes(row: Mapping[str, Any], attended: Sequence[int]) -> Any:
    """The experts of the tokens that are attended to, of all of them or of all but the last."""
    routes = row.get("routes")
    if not isinstance(routes, list):
        return routes
    if len(routes) not in (len(attended), len(attended) - 1):
        raise InputError(
            f"routes are of {len(routes)} places, but prompt and response have {len(attended)}"
        )
    return [one for one, own in zip(routes, attended, strict=False) if own]


def _verl_mask(row: Mapping[str, Any], before: int, size: int, count: int) -> list[Any] | None:
    """The mask of the `count` tokens of a response in `size` places, after `before` of the prompt.

    A `response_mask` is of the response alone, the `loss_mask` of verl's multi-turn batches of the
    prompt as well.
    """
    name = next((x for x in _VERL_MASKS if row.get(x) is not None), None)
    if name is None:
        return None
    mask = row[name]
    if len(mask) not in (size, before + size):
        raise InputError(
            f"{name} has {len(mask)} places; it must have the response's {size}, or {before + size}"
            " with the prompt's"
        )
    return mask[len(mask) - size :][:count]


def trl(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A batch of `trl vllm-serve` or of a `rollout_func`, or one row of it.

    The server gives each prompt once, and then the n completions of the first prompt, those of the
    second, and so on.
    """
    if values.get(_name_in(values, "logprobs")) is None:
        raise InputError("has no logprobs; TRL's completions table is text alone")
    _check_one_list(values)
    names = ("response_token_ids", "logprobs", "logprob_token_ids", "prompt_mask", *_TRL_MASKS)
    for row in _batch(_with_each_prompt(values), "prompt_token_ids", names):
        log_probs, ids = row["logprobs"], row["response_token_ids"]
        if log_probs and isinstance(log_probs[0], Sequence):  # the drawn token among the likeliest
            choices = row.get("logprob_token_ids") or [[token] for token in ids]
            if [*map(len, log_probs)] != [*map(len, choices)]:
                raise InputError("logprobs has several a token, so logprob_token_ids must as well")
            log_probs = [
                of_place[tokens.index(token)]
                for of_place, tokens, token in zip(log_probs, choices, ids, strict=True)
            ]
        prompt = row["prompt_token_ids"]
        attended = _checked_mask(row, "prompt_mask", len(prompt)) or []
        if not any(attended) or attended != sorted(attended):  # no pads, but a loss mask
            attended = [1] * len(prompt)
        yield _carried(row) | {
            "prompt_token_ids": [t for t, a in zip(prompt, attended, strict=True) if a],
            "response_token_ids": ids,
            "logprobs": log_probs,
            "mask": _trl_mask(row, len(ids)),
            "routes": _attended_routes(row, [*attended, *[1] * len(ids)]),
        }


def _with_each_prompt(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch with the prompt of each completion, where each prompt is given once."""
    name = _name_in(values, "prompt_token_ids")
    prompts, count = values[name], len(values[_name_in(values, "response_token_ids")])
    if not isinstance(prompts[0], Sequence) or not count or count % len(prompts):
        return values
    masks = values.get("prompt_mask")
    given = {name: prompts} | ({"prompt_mask": masks} if masks and len(masks) != count else {})
    each = count // len(prompts)
    return {**values} | {key: [x for x in own for _ in range(each)] for key, own in given.items()}


def _trl_mask(row: Mapping[str, Any], count: int) -> list[Any] | None:
    """The tokens that all masks of a row leave."""
    masks = [_checked_mask(row, name, count) for name in _TRL_MASKS]
    given = [mask for mask in masks if mask is not None]
    return [min(own) for own in zip(*given, strict=True)] if given else None


def _checked_mask(row: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
    mask = row.get(name)
    if mask is not None and len(mask) != count:
        raise InputError(f"{name} has {len(mask)} places for {count} tokens")
    return mask


def tunix(values: Mapping[str, Any], *, pad: int | None = None) -> Iterator[dict[str, Any]]:
    """A `RolloutOutput` or `SamplerOutput`, whose prompts are padded on the left."""
    padded = "left_padded_prompt_tokens"
    padded = padded if padded in values else "padded_prompt_tokens"
    pad = values.get("pad_id", pad)
    if pad is None:
        raise InputError("prompts are padded on the left; add pad_id, the pad token")
    for row in _batch(values, padded, ("tokens", "logprobs", "text", "mask")):
        prompt = list(row[padded])
        while len(prompt) > 1 and prompt[0] == pad:
            prompt.pop(0)
        if row.get("logprobs") is None:
            raise InputError("has no logprobs; set return_logprobs in RolloutConfig")
        count = len(row["logprobs"])
        yield _carried(row, count) | {
            "prompt_token_ids": prompt,
            "response_token_ids": list(row["tokens"])[:count],
            "logprobs": row["logprobs"],
            "text": row.get("text"),
            "mask": row["mask"][:count] if row.get("mask") else None,
        }


def _batch(values: Mapping[str, Any], first: str, rest: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of lists; one row if there is no batch axis.

    They have the keys `first`, `rest` and `_CARRIED` by these names, whatever the line calls them.
    What is no list in a batch is of all its rows.
    """
    given = _named(values, (first, *rest, *_CARRIED))
    name = _name_in(values, first)
    head = values[name]
    if not isinstance(head[0], Sequence):
        yield given
        return
    for key, several in given.items():
        if isinstance(several, list) and len(several) != len(head):
            raise InputError(
                f"{_name_in(values, key)} has {len(several)} sequences, but {name} has {len(head)};"
                " there must be as many"
            )
    for number in range(len(head)):
        yield {key: x[number] if isinstance(x, list) else x for key, x in given.items()}


def _carried(row: Mapping[str, Any], count: int | None = None) -> dict[str, Any]:
    """What a row says besides its tokens, of its first `count` tokens where it is of tokens."""
    return {
        key: row[key][:count] if key in _OF_TOKENS and isinstance(row[key], list) else row[key]
        for key in _CARRIED
        if row.get(key) is not None
    }


_READERS = {"plain": plain, "vllm": vllm, "sglang": sglang, "verl": verl, "trl": trl}
_MARKS = (
    ("plain", {"response_token_ids"}),
    ("verl", {"rollout_log_probs"}),
    ("sglang", {"meta_info"}),
    ("vllm", {"choices", "outputs"}),
    ("trl", {"completion_ids"}),
    ("tunix", {"left_padded_prompt_tokens", "padded_prompt_tokens"}),
)


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The line with the keys of `rollouts.KEYS`; what has its own name already stays as it is.

    Raises:
      InputError: one list holds prompt and response, and nothing says where the response begins.
    """
    row = dict(values)
    for key in NAMES:
        if (name := _name_in(values, key)) != key:
            row[key] = row.pop(name)
    whole = next((x for x in _WHOLE if isinstance(values.get(x), list)), None)
    if whole is None or row.get("response_token_ids") is not None:
        if row.get("prompt_token_ids") is None and whole == "input_ids":
            row["prompt_token_ids"] = _before(values["input_ids"], row["response_token_ids"])
        return row
    return row | _split(row, values[whole], whole)


def _before(ids: list[Any], response: Any) -> list[Any]:
    """The part of ids before a response that they end with, or all of them."""
    size = len(response) if isinstance(response, list) else 0
    return ids[:-size] if 0 < size < len(ids) and ids[-size:] == response else ids


def _name_in(values: Mapping[str, Any], key: str) -> str:
    """The name that a line has for a key: the key itself, unless another of `NAMES` is there."""
    if values.get(key) is not None:
        return key
    kind: Any = object if key in _SCALARS else list
    others = NAMES.get(key, ())
    there = (x for x in others if values.get(x) is not None and isinstance(values[x], kind))
    return next(there, key)


def _split(row: Mapping[str, Any], whole: list[Any], name: str) -> dict[str, Any]:
    """Prompt, response, log-probs and mask of one list of tokens."""
    attended = row.get("attention_mask")
    kept = [True] * len(whole)
    if isinstance(attended, list) and len(attended) == len(whole):
        kept = [bool(x) for x in attended]

    def part(key: str) -> list[Any] | None:
        """A list as long as the whole, or one less because its first token has no such value."""
        x = row.get(key)
        if not isinstance(x, list) or len(x) not in (len(whole), len(whole) - 1):
            return None
        filled = [None] * (len(whole) - len(x)) + x
        return [value for value, own in zip(filled, kept, strict=True) if own]

    ids = [token for token, own in zip(whole, kept, strict=True) if own]
    labels, mask, log_probs = part("labels"), part("mask"), part("logprobs")
    if labels is not None and mask is None:
        mask = [int(not is_gap(label) and label != _NO_LOSS) for label in labels]
    start, prompt = _start(row, ids, mask), row.get("prompt_token_ids")
    if start is None and isinstance(prompt, list) and prompt:
        if name == "tokens" and ids[: len(prompt)] != prompt and all(kept):
            return {"response_token_ids": ids}
        start = _start_behind(prompt, ids, row.get("logprobs"))
    if start is None:
        raise InputError(
            f"{name} has prompt and response, but nothing says where the response begins: add"
            " labels, a loss mask of the same length, or response_length"
        )
    parts = {"prompt_token_ids": ids[:start], "response_token_ids": ids[start:]}
    parts |= {} if mask is None else {"mask": [x or 0 for x in mask[start:]]}
    return parts if log_probs is None else parts | {"logprobs": log_probs[start:]}


def _start(row: Mapping[str, Any], ids: list[Any], mask: list[Any] | None) -> int | None:
    """Where the response begins: as its length says, or at the first token that has a loss."""
    for key in ("response_length", "prompt_length"):
        length = row.get(key)
        if isinstance(length, int) and 0 < length < len(ids):
            return length if key == "prompt_length" else len(ids) - length
    return next((place for place, own in enumerate(mask or ()) if own), None)


def _start_behind(prompt: list[Any], ids: list[Any], log_probs: Any) -> int | None:
    """Where the response begins in ids that begin with the prompt, if the log-probs say that.

    A response may repeat the prompt, so they must be of the tokens behind it, or lack the first.
    """
    if ids[: len(prompt)] != prompt or not isinstance(log_probs, list):
        return None
    of_response = len(log_probs) == len(ids) - len(prompt)
    of_whole = len(log_probs) == len(ids) - 1 or (
        len(log_probs) == len(ids) and is_gap(log_probs[0])
    )
    return len(prompt) if of_response or of_whole else None
