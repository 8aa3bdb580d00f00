"""Plain lines by other names: what trainers and scripts call prompt, response, log-probs and mask.

A line may also have prompt and response in one list (`input_ids`, `tokens`): with `labels` (-100
where there is no loss), with a mask as long as the list, or with `response_length` or
`prompt_length`.
"""

from collections.abc import Mapping
from typing import Any

from tim_jax.common.errors import InputError

NAMES = {
    "prompt_token_ids": ("prompt_ids", "prompt_tokens", "query_ids", "query_token_ids"),
    "response_token_ids": (
        *("response_ids", "response_tokens", "completion_token_ids", "completion_tokens"),
        *("output_ids", "output_token_ids", "output_tokens", "generated_ids"),
        *("generated_token_ids", "token_ids"),
    ),
    "logprobs": (
        *("log_probs", "logps", "token_logprobs", "response_logprobs", "response_log_probs"),
        *("output_logprobs", "output_log_probs", "completion_logprobs", "rollout_logprobs"),
        *("rollout_log_probs", "generation_logprobs", "sampling_logprobs"),
    ),
    "mask": ("loss_mask", "response_mask", "completion_mask", "action_mask", "assistant_masks"),
    "finish_reason": ("finish_reasons", "stop_type"),
    "weights_version": ("weight_version", "policy_version", "model_version"),
}
_WHOLE = ("input_ids", "tokens")
_NO_LOSS = -100


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The line with the keys of `rows.KEYS`; what has its own name already stays as it is.

    Raises:
      InputError: one list holds prompt and response, and nothing says where the response begins.
    """
    found = dict(values)
    for name, others in NAMES.items():
        if found.get(name) is None:
            given = next((x for x in others if _is_list(values.get(x), name)), None)
            if given is not None:
                found[name] = found.pop(given)
    whole = next((x for x in _WHOLE if isinstance(values.get(x), list)), None)
    if whole is None or found.get("response_token_ids") is not None:
        if found.get("prompt_token_ids") is None and whole == "input_ids":
            found["prompt_token_ids"] = values["input_ids"]
        return found
    return found | _parts(found, values[whole], whole)


def _is_list(value: Any, name: str) -> bool:
    return value is not None and (isinstance(value, list) or name in _SCALARS)


_SCALARS = ("finish_reason", "weights_version")


def _parts(found: Mapping[str, Any], whole: list[Any], name: str) -> dict[str, Any]:
    """Prompt, response, log-probs and mask of one list of tokens."""
    attended = found.get("attention_mask")
    kept = [True] * len(whole)
    if isinstance(attended, list) and len(attended) == len(whole):
        kept = [bool(x) for x in attended]

    def part(key: str) -> list[Any] | None:
        """A list as long as the whole, or one less because its first token has no such value."""
        x = found.get(key)
        if not isinstance(x, list) or len(x) not in (len(whole), len(whole) - 1):
            return None
        filled = [None] * (len(whole) - len(x)) + x
        return [value for value, own in zip(filled, kept, strict=True) if own]

    ids = [token for token, own in zip(whole, kept, strict=True) if own]
    labels, mask, log_probs = part("labels"), part("mask"), part("logprobs")
    if labels is not None and mask is None:
        mask = [int(label is not None and label != _NO_LOSS) for label in labels]
    start = _start(found, ids, mask)
    if start is None:
        raise InputError(
            f"{name} has prompt and response, but nothing says where the response begins: add"
            " labels, a loss mask of the same length, or response_length"
        )
    made = {"prompt_token_ids": ids[:start], "response_token_ids": ids[start:]}
    if mask is not None:
        made["mask"] = [x or 0 for x in mask[start:]]
    if log_probs is not None:
        made["logprobs"] = log_probs[start:]
    return made


def _start(found: Mapping[str, Any], ids: list[Any], mask: list[Any] | None) -> int | None:
    """Where the response begins: as its length says, or at the first token that has a loss."""
    for key, of in (("response_length", lambda n: len(ids) - n), ("prompt_length", lambda n: n)):
        length = found.get(key)
        if isinstance(length, int) and 0 < length < len(ids):
            return of(length)
    if mask is None or not any(mask):
        return None
    return next(place for place, own in enumerate(mask) if own)
