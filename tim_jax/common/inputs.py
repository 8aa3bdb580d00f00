"""What users give as text: paths, JSON and numbers, each refused in one line if it is senseless."""

import json
import math
import numbers
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import date, time
from functools import wraps
from inspect import signature
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from tim_jax.common.errors import InputError, did_you_mean, ours

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
LARGEST = 2**63  # the numbers of TOML have 64 bits; a longer one is a slip
DEEPEST = 32  # tables and lists inside one another
LONGEST_LINE = 1000  # characters of a message

_URL = re.compile(r"[A-Za-z][\w+.-]*://")

P = ParamSpec("P")
T = TypeVar("T")

# What the value of a field may be, by its annotation. A float may be a whole number.
_KINDS: Mapping[type, tuple[type, str]] = MappingProxyType(
    {
        float: (numbers.Real, "a number"),
        int: (numbers.Integral, "a whole number"),
        bool: (bool, "true or false"),
    }
)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns a path with `~` and `~user` at its beginning replaced by the home folder.

    Refuses URLs, unknown users, and what no file can be called: with a NUL, or too long.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path must be text or a pathlib.Path, got {shown(path)}")
    text = os.fspath(path)
    if "\0" in text:
        raise InputError(f"path {shown(text)}: has a NUL character")
    if _URL.match(text):
        rule = "is a URL, not a path on this machine; mount the bucket, or download it"
        raise InputError(f"path {shown(text)}: {rule}")
    try:
        found = Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise InputError(f"path {shown(text)}: {user} is no user's home folder here") from None
    longest = max((len(os.fsencode(part)) for part in found.parts), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(found)) > LONGEST_PATH:
        raise InputError(
            f"path {shown(text)}: is too long; a name has at most {LONGEST_NAME} bytes, a path"
            f" {LONGEST_PATH}"
        )
    return found


def shipped(path: Path) -> Path:
    """Returns a path as it is, or for `configs/...` that is not here, what the package has of it.

    A wheel has the folder `configs` inside the package, a checkout beside it.
    """
    roots = (root for root in Path(__file__).parents[1:3] if (root / "configs").is_dir())
    if path.parts[:1] != ("configs",) or path.exists():
        return path
    return next(roots, Path()) / path


def expanded_name(text: str) -> str:
    """Returns `text` as it is if it may be a name on a hub, else as `expanded`, with its errors."""
    path = expanded(text)
    return str(path) if text.startswith("~") else text


def json_value(text: str, where: str, *, checked: bool = False) -> Any:
    """Returns the value of JSON text; refuses what is none, is too deep, or has endless digits.

    Args:
      where: the file, in messages.
      checked: refuse what `wrong_number` finds, and a key that has two values.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once if checked else None)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise InputError(
            f"{where}: not JSON: lists and objects lie too deep in one another"
        ) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except ValueError:  # Python converts no longer ones
        raise InputError(f"{where}: a number has thousands of digits") from None
    wrong = wrong_number(value) if checked else None
    if wrong is not None:
        key, number, rule = wrong
        raise InputError(f"{where}: {'.'.join(key) or 'the value'} = {number}: {rule}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; refuses a key that stands there twice with different values."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and repr(found[key]) != repr(value):
            both = f"{shown(found[key])} and {shown(value)}"
            raise InputError(f"{shown(key)} stands there twice, with {both}; leave one out")
        found[key] = value
    return found


def refuse_unknown(function: Callable[P, T]) -> Callable[P, T]:
    """Makes an argument that a function does not have an `InputError` that names the nearest."""
    return refuse_all_but(MappingProxyType({}))(function)


def refuse_all_but(
    elsewhere: Mapping[str, str],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`refuse_unknown`, but for names of `elsewhere`: their error says what to write in place."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = signature(function).parameters

        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            for name in named.keys() - known.keys():
                hint = did_you_mean(name, known)
                meant = name if name in elsewhere else ours(name)
                if meant in elsewhere.keys() - known.keys():
                    hint = f"; write {elsewhere[meant]}"
                raise InputError(f"{function.__name__}: there is no argument {name!r}{hint}")
            return function(*args, **named)

        return call

    return decorate


def wrong_number(value: Any) -> tuple[tuple[str, ...], object, str] | None:
    """The first number in nested tables and lists that is not finite or has more than 64 bits.

    Dates and times of TOML are wrong too: no key takes one, and JSON has none. One rule for all
    keys, those included that are passed on as they are. Returns its key, itself and what would be
    right; None if there is none.
    """
    return next(_wrong_numbers(value, (), 0), None)


def _wrong_numbers(
    value: Any, key: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], object, str]]:
    if depth > DEEPEST:
        rule = f"tables and lists must lie at most {DEEPEST} deep in one another"
        yield tuple(part.partition("[")[0] for part in key[:3]), "...", rule
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, value, "must be finite"
    elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
        yield key, shown(value), "must be a number of at most 64 bits"
    elif isinstance(value, date | time):  # a datetime is a date
        yield key, value, "is a date or a time, which no key takes; put a text in quotes"
    elif isinstance(value, Mapping):
        for name, own in value.items():
            yield from _wrong_numbers(own, (*key, str(name)), depth + 1)
    elif isinstance(value, list | tuple):
        for i, own in enumerate(value):
            inside = (*key[:-1], f"{''.join(key[-1:])}[{i}]")
            yield from _wrong_numbers(own, inside, depth + 1)


def leaves(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what is in nested tables by its dotted key: `learner.mode`, "bypass"."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def shown(value: object) -> str:
    """Returns a value on one line of at most 80 characters, even if its own repr raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # such as that of a number with thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def changes(self: Any) -> str:
    """Returns a dataclass as text, with those fields alone that are not at their defaults.

    Serves as a class's `__repr__`.
    """
    named = (f"{name}={text}" for name, text in changed(self).items())
    return f"{type(self).__name__}({', '.join(named)})"


def changed(value: Any) -> dict[str, str]:
    """Returns the fields of a dataclass that are not at their defaults, as text."""
    known = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: repr(own) for field, own in known if own != _default(field)}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def all_fields(value: Any) -> str:
    """Returns a value as text with every field of dataclasses in it, for keys that are kept."""
    if type(value) is tuple:
        inner = ", ".join(map(all_fields, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    named = (f"{one.name}={all_fields(getattr(value, one.name))}" for one in fields(value))
    return f"{type(value).__name__}({', '.join(named)})"


def public(module: Mapping[str, Any]) -> list[str]:
    """The names of a room's `globals()` that `dir` is to offer: no modules, none of its own."""
    kinds = ((name, value) for name, value in module.items() if not name.startswith("_"))
    return sorted(name for name, value in kinds if not isinstance(value, ModuleType))


def one_line(text: str) -> str:
    """Returns a text on one line, with escapes for what a terminal would not print.

    Of more than `LONGEST_LINE` characters those in the middle are left out.
    """
    line = " ".join(text.splitlines())
    line = "".join(x if x.isprintable() else repr(x)[1:-1] for x in line)
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"


def whole(value: Any) -> bool:
    """Whether a value is a whole number, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(
    name: str, value: object, *, least: int | None = None, most: int | None = None
) -> int:
    """Returns `value`, a whole number of at least `least` and at most `most`, as an int."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {shown(value)}")
    value = int(value)
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise InputError(f"{name} must be at most {most}, got {shown(value)}")
    return value


def check_kinds(value: Any) -> None:
    """Refuses fields of a dataclass that are no number, or neither true nor false, as they should.

    Of fields that are annotated as bool, int or float, or as one of these or None.
    """
    for name, hint in get_type_hints(type(value)).items():
        kinds, given = set(get_args(hint)) or {hint}, getattr(value, name, None)
        kind = next((one for one in _KINDS if one in kinds), None)
        if kind is None or (given is None and type(None) in kinds):
            continue
        wanted, text = _KINDS[kind]
        if not isinstance(given, wanted) or (kind is not bool and isinstance(given, bool)):
            raise InputError(f"{name} is {shown(given)}; it must be {text}")
