"""Measures, on the backend at hand, how far row counts may vary without changing a row's bits.

Fixed row tiles are exact on any backend, but a small decode batch pays for padding and a large one
for small tiles. So the dots of one model are run at many row counts and their raw bits are
compared; the widest ranges over which they are equal become the `Rows` of a `Numerics`. Such a
range is measured on random data, for one backend, version and machine; it is the audit that proves
that the log-probs of a model are equal.

The measurement is kept in a file, so that a run that resumes need not measure again. It is only
taken from there if machine, versions of JAX, model and numerics are the same. The batch may differ:
ranges chosen for another batch are as exact, if perhaps slower, and a run must keep its bits when
its batch or placement changes.
"""

import itertools
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from tim_jax import machine, waiting
from tim_jax.errors import InputError
from tim_jax.kernels import native, tiles
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import matrices
from tim_jax.numerics import Numerics, Rows
from tim_jax.placement import processes

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 49, 56, 64, 96, 128, 256, 512, 1024, 2048)
_ATTENTION_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48)
_WORTHWHILE = 32  # a learner tile of fewer rows is slow
_PADDING = 3  # how many times its own rows a decode batch may be padded to


@waiting.during("measuring which tiles keep the bits on this machine")
def calibrate(config: ModelConfig, numerics: Numerics, *, batch: int) -> Numerics:
    """Widens the row ranges of tile numerics for this model, on the default backend.

    Args:
      batch: rows of the sampler's decode step, which the ranges should hold without much padding.

    Returns:
      `numerics` with `rows_by_contraction`, `attention_rows` and `whole_kv` as measured; unchanged
      for native numerics and off the CPU, where the tiles are only a slow reference.
    """
    if numerics.family != "tiles" or jax.default_backend() != "cpu":
        return numerics
    by_contraction = []
    for contraction, widths in sorted(_dots(config, numerics.column_tiles).items()):
        holds = [_same_rows(contraction, width, numerics) for width in widths]
        ranges = _common_ranges(holds)
        by_contraction.append((contraction, _choose(ranges, batch, numerics.rows)))
    whole_kv, attention_rows = _attention(config, numerics)
    return replace(
        numerics,
        rows_by_contraction=tuple(by_contraction),
        attention_rows=attention_rows,
        whole_kv=whole_kv,
    )


def _dots(config: ModelConfig, column_tiles: int) -> dict[int, set[int]]:
    """Contraction size -> widths of the column tiles of the weight matrices that have it."""
    dots: dict[int, set[int]] = {}
    for contraction, width in matrices(config).values():
        dots.setdefault(contraction, set()).add(-(-width // column_tiles))
    return dots


def _same_rows(contraction: int, width: int, numerics: Numerics) -> list[bool]:
    """For each count but the first: whether its rows have the bits they have at the count before.

    Rows are taken from the start and from the end of the matrix, because a row's bits must not
    depend on its place either.
    """
    x = _random(0, (_COUNTS[-1], contraction), numerics)
    weight = _random(1, (contraction, width), numerics)
    dot = jax.jit(lambda x, w: tiles.fence(native.dot(*tiles.pin(x, w))))
    whole = {}
    for count in _COUNTS:
        head, tail = dot(x[:count], weight), dot(x[-count:], weight)
        whole[count] = np.asarray(head).view(np.int32), np.asarray(tail).view(np.int32)
    pairs = itertools.pairwise(_COUNTS)
    return [
        bool(
            np.array_equal(whole[small][0], whole[large][0][:small])
            and np.array_equal(whole[small][1], whole[large][1][-small:])
        )
        for small, large in pairs
    ]


def _common_ranges(holds: list[list[bool]]) -> list[Rows]:
    """The longest ranges of counts over which every dot keeps its bits."""
    together = [all(column) for column in zip(*holds, strict=True)]
    ranges, start = [], 0
    for index in range(len(_COUNTS)):
        if index == len(together) or not together[index]:
            ranges.append(Rows(_COUNTS[start], _COUNTS[index]))
            start = index + 1
    return ranges


def _choose(ranges: list[Rows], batch: int, fixed: Rows) -> Rows:
    """The range that serves a decode batch and the learner's many rows best."""

    def cost(rows: Rows) -> tuple[bool, int, int]:
        high = rows.high or _COUNTS[-1]
        padded = rows.split(batch)[0] * rows.split(batch)[1]
        return padded > _PADDING * batch, padded if high >= _WORTHWHILE else 10 * padded, -high

    wide = [rows for rows in ranges if rows.high != rows.low]
    return min(wide, key=cost) if wide else fixed


def _attention(config: ModelConfig, numerics: Numerics) -> tuple[bool, Rows]:
    """Whether one dot over all keys has the bits of dots over fewer, and for which row counts."""
    length, block = 8 * numerics.kv_block, numerics.kv_block
    rows = _ATTENTION_COUNTS[-1]
    heads, key_dim, value_dim = config.attention
    shape = (2, heads)
    query = _random(2, (*shape, rows, key_dim), numerics)
    key = _random(3, (*shape, key_dim, length), numerics)
    value = _random(4, (*shape, length, value_dim), numerics)
    last = np.full((shape[0], rows), block + block // 2, np.int32)
    attend = jax.jit(partial(tiles._attend, numerics=replace(numerics, whole_kv=True)))
    reference = _bits(attend(query, key, value, last))
    prefixes = [
        np.array_equal(reference, _bits(attend(query, key[..., :keys], value[:, :, :keys], last)))
        for keys in (2 * block, 3 * block, 5 * block)
    ]
    low = rows
    for count in reversed(_ATTENTION_COUNTS[:-1]):
        head = _bits(attend(query[:, :, :count], key, value, last[:, :count]))
        tail = _bits(attend(query[:, :, -count:], key, value, last[:, -count:]))
        same = np.array_equal(head, reference[:, :, :count])
        if not (same and np.array_equal(tail, reference[:, :, -count:])):
            break
        low = count
    whole = all(prefixes)
    return whole, Rows(low, rows) if whole else numerics.attention_rows


def _random(seed: int, shape: tuple[int, ...], numerics: Numerics) -> np.ndarray:
    """Random numbers, on the host, where slices need no compilation."""
    draws = np.random.Generator(np.random.Philox(seed)).standard_normal(shape, np.float32)
    return draws.astype(numerics.dtype)


def _bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.int32)


def calibrate_once(
    config: ModelConfig, numerics: Numerics, *, batch: int, file: Path | None
) -> Numerics:
    """`calibrate`, or its earlier result if `file` has it.

    A file that is missing, damaged or from another setting is written anew. If it cannot be
    written, nothing is saved.
    """
    if file is None:
        return calibrate(config, numerics, batch=batch)
    valid_for = _of(config, numerics)
    saved = _read(file)
    if saved is not None and saved.get("of") == valid_for:
        try:
            return replace(numerics, **_values(saved["found"]))
        except (KeyError, TypeError, ValueError, InputError):
            pass  # damaged: measure again
    calibrated = calibrate(config, numerics, batch=batch)
    if calibrated != numerics and processes.leads():
        _write(file, {"of": valid_for, "found": _plain(calibrated)})
    return calibrated


def _of(config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
    return {
        "jax": f"{jax.__version__}, jaxlib {jaxlib.version.__version__}",
        "machine": _machine(),
        "model": repr(config),
        "numerics": repr(numerics),
    }


def _machine() -> str:
    """The CPU's instructions and number of cores, by which XLA chooses kernels."""
    return "; ".join([platform.machine(), f"{os.cpu_count()} cores", *machine.processor()])


def _plain(calibrated: Numerics) -> dict[str, Any]:
    return {
        "rows_by_contraction": [
            [size, rows.low, rows.high] for size, rows in calibrated.rows_by_contraction
        ],
        "attention_rows": [calibrated.attention_rows.low, calibrated.attention_rows.high],
        "whole_kv": calibrated.whole_kv,
    }


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rows_by_contraction": tuple(
            (size, Rows(low, high)) for size, low, high in record["rows_by_contraction"]
        ),
        "attention_rows": Rows(*record["attention_rows"]),
        "whole_kv": bool(record["whole_kv"]),
    }


def _read(file: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _write(file: Path, record: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}")
    try:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
