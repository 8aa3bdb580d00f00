"""How a response ended, as engines say it."""

from collections.abc import Mapping
from typing import Any, Literal

# How a response ended: by an end token, by something else (a stop string, a tool call, an abort),
# or it was cut at the longest length.
Ended = Literal["token", "other", "cut"]
_CUT = ("length", "max_tokens", "max_length", "max_new_tokens")
_STOPPED = ("stop", "eos", "eos_token", "end_turn", "stop_token")


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
