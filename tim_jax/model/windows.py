"""Sliding windows of attention: in `ModelConfig`, in a checkpoint's config.json, for the forward.

In a layer with a window of W, a token at position p attends to positions max(0, p - W + 1)..p.

A window changes which keys are masked, and nothing else. Blocks of keys stay anchored at a
sequence's first token, and what is masked adds exact zeros in its place in the sums, before the
first key that a token sees as after the last. So the order of the sums is the same for every
length, batch and padding, with a cache and without, in sampler and learner.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import whole

_BY_LAYER = ("qwen2", "qwen3")  # families in which some layers may have the window
_IN_EVERY_LAYER = ("mistral", "qwen3_moe")
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What `transformers` takes absent keys for.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_MOST = 2**31
_MOST_LAYERS = 2**16


def check(config: Any) -> None:
    """Checks the fields of a `ModelConfig`. Raises `InputError` naming the field at fault."""
    family, window, layers = config.model_type, config.sliding_window, config.window_layers
    if not whole(window) or not 0 <= window < _MOST:
        raise InputError(
            f"sliding_window must be a whole number from 0 (none) to {_MOST - 1}, found {window!r}"
        )
    if not isinstance(layers, tuple) or not all(isinstance(own, bool) for own in layers):
        raise InputError(f"window_layers must be a tuple of True and False, found {layers!r}")
    if not window:
        if layers:
            raise InputError(f"window_layers must be () without a sliding_window, found {layers}")
        return
    if family not in (*_BY_LAYER, *_IN_EVERY_LAYER):
        raise InputError(f"a {family} model has sliding_window=0, found {window}")
    if len(layers) != config.num_layers:
        raise InputError(f"window_layers has {len(layers)} entries for {config.num_layers} layers")
    if not any(layers):
        raise InputError(f"window_layers has no layer for sliding_window {window}")
    if family in _IN_EVERY_LAYER and not all(layers):
        raise InputError(
            f"a {family} model has its sliding_window in every layer, found window_layers {layers}"
        )


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the contents of a config.json; none where no layer has a window.

    Raises `InputError` for kinds of attention that no forward here computes, and for keys that
    contradict each other.
    """
    window, kinds = _window(values), _kinds(values)
    family, layers = values["model_type"], values["num_hidden_layers"]
    if window is None:
        if kinds is not None and any(kinds):
            needed = "a sliding_window"
            needed += "" if family == "mistral" else " and use_sliding_window true"
            raise InputError(f"layer_types with {_SLIDING!r} needs {needed}")
        return {}
    if not whole(layers) or layers > _MOST_LAYERS:
        return {}  # ModelConfig names the number of layers
    if kinds is None:
        full = _full_layers(values) if family in _BY_LAYER else 0
        kinds = tuple(index >= full for index in range(layers))
    elif family in _IN_EVERY_LAYER and not all(kinds):
        raise InputError(
            f"layer_types with {_FULL!r} contradicts the sliding_window {window}, which a {family}"
            " model has in every layer"
        )
    return {"sliding_window": window, "window_layers": kinds} if any(kinds) else {}


def _window(values: Mapping[str, Any]) -> int | None:
    """The window that some layers may have, None for none."""
    family, window = values["model_type"], values.get("sliding_window", _WINDOW)
    if family == "llama":
        if values.get("sliding_window") is not None:
            raise InputError(f"sliding_window {window!r} is not supported for model_type 'llama'")
        return None
    used = values.get("use_sliding_window")
    if used is not None and not isinstance(used, bool):
        raise InputError(f"use_sliding_window must be true or false, found {used!r}")
    if window is None or (family != "mistral" and not used):
        return None
    if not whole(window) or not 1 <= window < _MOST:
        raise InputError(
            f"sliding_window must be a whole number from 1 to {_MOST - 1}, found {window!r}"
        )
    return window


def _kinds(values: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """For every layer whether layer_types says that it has a window; None: it says nothing."""
    kinds, layers = values.get("layer_types"), values["num_hidden_layers"]
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise InputError(f"layer_types must be a list, found {kinds!r}")
    known = (_FULL,) if values["model_type"] == "llama" else (_FULL, _SLIDING)
    other = sorted(set(map(str, kinds)) - set(known))
    if other:
        raise InputError(
            f"layer_types with {other[0]!r} is not supported, only {' and '.join(map(repr, known))}"
        )
    if len(kinds) != layers:
        raise InputError(f"layer_types has {len(kinds)} entries for {layers!r} layers")
    return tuple(kind == _SLIDING for kind in kinds)


def _full_layers(values: Mapping[str, Any]) -> int:
    """How many layers come before the first one with a window."""
    full = values.get("max_window_layers")
    if full is None:
        return _MAX_WINDOW_LAYERS
    if not whole(full):
        raise InputError(f"max_window_layers must be a whole number, found {full!r}")
    return full


def written(config: Any) -> dict[str, Any]:
    """What a config.json has of them."""
    family, window = config.model_type, config.sliding_window
    if family not in (*_BY_LAYER, *_IN_EVERY_LAYER):
        return {}
    if family == "mistral":
        return {"sliding_window": window or None}
    if not window:
        return {"use_sliding_window": False}
    values: dict[str, Any] = {"sliding_window": window, "use_sliding_window": True}
    if family in _BY_LAYER:
        values["layer_types"] = [_SLIDING if own else _FULL for own in config.window_layers]
    return values


def spread(config: Any, layers: int) -> dict[str, Any]:
    """The fields for another number of layers, windows in about the same share of them.

    Of so many equal runs of layers, each gives its last one's kind.
    """
    count = config.num_layers
    if not config.sliding_window:
        return {}
    kinds = tuple(config.window_layers[((i + 1) * count - 1) // layers] for i in range(layers))
    return {"window_layers": kinds} if any(kinds) else {"sliding_window": 0, "window_layers": ()}


def of_layers(config: Any) -> np.ndarray | None:
    """i32[L] for the forward: how many positions a token attends to; None if no layer has a window.

    A layer without one gets a number that no sequence reaches, so that all layers of a model are
    one and the same program.
    """
    if not config.sliding_window:
        return None
    return np.where(config.window_layers, config.sliding_window, _MOST - 1).astype(np.int32)
