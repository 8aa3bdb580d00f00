"""TOML files and command-line overrides to a `RunConfig`, and back.

Whatever is wrong is one line: where it was said, the dotted key, the value, what would be right.
"""

import dataclasses
import json
import logging
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import tomli_w
from pydantic import BaseModel, ValidationError

import tim_jax
from tim_jax.app.config.run import RunConfig
from tim_jax.common import inputs
from tim_jax.common.errors import InputError, did_you_mean, ours, suggestion

if TYPE_CHECKING:
    from tim_jax.mismatch import Mismatch

M = TypeVar("M", bound=BaseModel)
COMMAND_LINE = "command line"
NONE = "none"  # an override's value: leave the key out, whatever the file says

_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LOG = logging.getLogger("tim_jax")
# Keys of older versions, and what they are called now.
_RENAMED = {"sampling": {"samples_per_prompt": "samples", "max_response_length": "max_tokens"}}
# How a value's own check names a field, what it is and what would be right.
_CHECKS = (
    re.compile(r"(?P<key>\w+) (?P<rule>must .+), got (?P<value>.+)"),
    re.compile(r"(?P<key>\w+) is (?P<value>[^;]+); it (?P<rule>must .+)"),
)
_SECRET = re.compile(r"api_?key|(^|_)token$|secret|password", re.IGNORECASE)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_RULES = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": 'must be text in quotes, "like this"',
    "tuple_type": "must be a list, [like, this]",
    "dict_type": "must be a table of keys and values",
    "model_type": "must be a table of keys and values",
    "model_attributes_type": "must be a table of keys and values",
    "dataclass_type": "must be a table of keys and values",
    "finite_number": "must be finite",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_pattern_mismatch": 'must be written "module:function"',
}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a TOML file (None: defaults only), applies `section.key=value` overrides, checks all.

    A run's folder stands for its config.toml, and is that of the run, wherever it was moved to.

    A value of an override is read as TOML (`8`, `true`, `[1, 2]`, `{name = "x"}`); what is not
    TOML is a string, so quotes may be left out. `none` leaves the key out, which then has its
    default, even if the file has it.

    Raises:
        InputError: the file is missing, empty or no TOML; a key is unknown; a value is wrong or
            does not go with another. One line, for the first thing that is wrong.
    """
    data = {} if path is None else _read_run(path) or read_toml(path)
    keys = [_override(data, text) for text in overrides]
    return build(data, source=str(path or "defaults"), command_line=keys)


def _read_run(path: str | Path) -> dict[str, Any]:
    folder = inputs.expanded(path)
    if (folder / "config.json").is_file() and not (folder / "config.toml").is_file():
        raise InputError(
            f"config {folder}: is the folder of a model, which has no tasks; give a config or a run"
            " folder ('tim-jax eval CONFIG --model FOLDER' evaluates a model)"
        )
    if not (folder / "config.toml").is_file():
        return {}
    data = drop_unread(read_toml(folder / "config.toml"))
    return data | {"run": data.get("run", {}) | {"folder": str(folder)}}


def drop_unread(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config without keys that older versions took and ignored.

    They are those of a schedule beside a constant rate, of an environment or a reward without one,
    of limits that nothing has, of episodes without turns, and of both sides without entries. A
    config of today that has them is refused.
    """
    optimizer = dict(saved.get("optimizer", {}))
    if optimizer.get("schedule", "constant") == "constant":
        optimizer.pop("total_steps", None)
        if "final_share" in optimizer:
            optimizer["final_share"] = 0.0
    one_turn = "max_turns" not in saved.get("sampling", {})
    unread = ("history",) if one_turn else ()
    task = {key: value for key, value in saved.get("task", {}).items() if key not in unread}
    if "environment" not in task:
        task = {key: value for key, value in task.items() if not key.startswith("environment_")}
    if "reward" not in task and task.get("kind") != "custom":
        task.pop("reward_in_process", None)
        task.pop("reward_time_limit", None)
    elif task.get("reward_in_process"):
        task.pop("reward_time_limit", None)
    if "reward" in task or "environment" in task:
        task.pop("time_limit", None)
    sampler = dict(saved.get("sampler", {}))
    if not sampler.get("mismatch"):
        sampler.pop("both_sides", None)
    new = {"optimizer": optimizer, "task": task, "sampler": sampler}
    return {**saved, **{name: section for name, section in new.items() if name in saved}}


def build(
    data: Mapping[str, Any], *, source: str = "config", command_line: Iterable[Sequence[str]] = ()
) -> RunConfig:
    """Returns the checked config of a nested dict; `source` is named in errors.

    `command_line` are the keys, as paths, that errors blame on the command line instead.

    Raises:
        InputError: as `load`.
    """
    return validated(RunConfig, data, source=source, command_line=command_line)


def validated(
    kind: type[M],
    data: Mapping[str, Any],
    *,
    source: str,
    command_line: Iterable[Sequence[str]] = (),
) -> M:
    """Returns the checked section `kind` of a nested dict; otherwise as `build`."""

    def where(key: Sequence[str]) -> str:
        return COMMAND_LINE if any(_overlap(key, path) for path in command_line) else source

    wrong = inputs.wrong_number(data)
    if wrong is not None:
        key, value, rule = wrong
        raise InputError(f"{where(key)}: {_dotted(key)} = {value}: {rule}")
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        # A misspelt key comes first: it often is the reason for the others.
        problems = sorted(error.errors(), key=lambda e: e["type"] not in _UNKNOWN)
        key, text = _describe(problems[0], data, kind)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{where(key)}: {text}{more}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """Returns the nested dict of a TOML file.

    Raises:
        InputError: it cannot be read, is no TOML (with line and column), or says nothing.
    """
    path = inputs.expanded(path)
    try:
        data = _parse(inputs.shipped(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        beside = inputs.shipped(path.parent).glob("*.toml")  # nothing if there is no such folder
        near = [str(path.parent / other.name) for other in beside]
        hint = did_you_mean(str(path), near) if near else ""
        raise InputError(f"config {path}: no such file{hint}") from error
    except OSError as error:
        raise InputError(f"config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"config {path}: not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise InputError(f"config {path}: {error}") from error
    if not data:
        raise InputError(f"config {path}: is empty; it must set at least one key")
    return with_new_keys(data, str(path))


def with_new_keys(data: Mapping[str, Any], source: str | None = None) -> dict[str, Any]:
    """Returns the nested dict with keys of older versions under the names that they have now.

    With a `source`, the logger "tim_jax" says so of each, in a line that names it.

    Raises:
        InputError: a key is there under both names.
    """
    renamed = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            value = with_new_keys(value, source)
            if name == "learner" and (widths := value.pop("widths", 1)) != 1:  # of 1 it did nothing
                raise InputError(
                    f"{source or 'config'}: learner.widths = {_shown(widths)}: is gone; set"
                    " learner.micro_batch_tokens, which computes no padding at all"
                )
            for old in (old for old in _RENAMED.get(name, {}) if old in value):
                new = _new_key(name, old, source)
                if new in value:
                    raise InputError(
                        f"{source or 'config'}: {name}.{old} is the older name of {name}.{new};"
                        " give one of them"
                    )
                value[new] = value.pop(old)
        renamed[name] = value
    return renamed


def _new_key(section: str, key: str, source: str | None) -> str:
    """What `section.key` is called now, which is said if it is another name."""
    new = _RENAMED.get(section, {}).get(key, key)
    if source and new != key:
        _LOG.warning("%s: %s.%s is called %s.%s now", source, section, key, section, new)
    return new


def dump(config: RunConfig) -> str:
    """Returns the config as TOML text, defaults included; loading it gives an equal config."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Returns the key's path and the value of `section.key=value`.

    Raises:
        InputError: there is no `=`, no value, the key is no dotted name, or a value that begins
            like a TOML string, list or table does not end like one.
    """
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(_KEY.fullmatch(part) for part in path):
        raise InputError(f"{COMMAND_LINE}: {text!r}: write section.key=value")
    value = value.strip()
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InputError(f"{COMMAND_LINE}: {text!r}: not UTF-8 text")
    if not value:
        raise InputError(
            f"{COMMAND_LINE}: {text!r}: no value; write {key}={NONE} to leave the key out, or"
            f" {key}='\"\"' for an empty text"
        )
    if value == NONE:
        return path, None
    try:
        parsed = _parse(f"value = {value}")
    except ValueError as error:
        if value[0] in "[{\"'" or not isinstance(error, tomllib.TOMLDecodeError):
            raise InputError(f"{COMMAND_LINE}: {inputs.shown(text)}: {error}") from error
        return path, value
    return path, parsed["value"] if len(parsed) == 1 else value


def read_dial(text: str) -> "Mismatch":
    """A dial from a TOML file with `mismatch = [...]` or `[sampler] mismatch = [...]`, or a list.

    Raises:
      InputError: it is neither, or an entry is wrong.
    """
    if text.strip().startswith("["):
        _, entries = parse_override(f"mismatch={text.strip()}")
    else:
        data = read_toml(text)
        section = data if "mismatch" in data else data.get("sampler")
        entries = section.get("mismatch") if isinstance(section, dict) else None
        if entries is None:
            raise InputError(f"{text}: no list `mismatch`, nor one in a table [sampler]")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"--sampler: {text!r} is no list of entries: [{{name = ...}}, ...]")
    wrong = inputs.wrong_number(entries)
    if wrong is not None:
        raise InputError(f"--sampler: mismatch{'.'.join(wrong[0])} = {wrong[1]}: {wrong[2]}")
    return tim_jax.mismatch.build(entries)


def _override(data: dict[str, Any], text: str) -> tuple[str, ...]:
    path, value = parse_override(text)
    *above, last = path
    value = with_new_keys({last: value}, COMMAND_LINE)[last]
    path = (*above, _new_key(above[-1], last, COMMAND_LINE)) if above else path
    if value is None:
        _check_known(path)
    table = data
    for depth, part in enumerate(path[:-1]):
        # A section that is not there has no key to leave out, and must not come to be by it.
        table = table.get(part, {}) if value is None else table.setdefault(part, {})
        if not isinstance(table, dict):
            where = ".".join(path[: depth + 1])
            raise InputError(
                f"{COMMAND_LINE}: {text!r}: {where} = {_shown(table)} is no table and has no keys"
            )
    if value is None:
        table.pop(path[-1], None)
    else:
        table[path[-1]] = value
    return path


def _check_known(path: Sequence[str]) -> None:
    """Refuses the path of a key that no section has."""
    kinds: list[Any] = [RunConfig]
    for depth, part in enumerate(path, 1):
        keys = [_keys(section) for kind in kinds for section in _sections(kind)]
        if not keys and any(_has_free_keys(kind) for kind in kinds):
            return
        known = {name for each in keys for name in each}
        if part not in known:
            rule = _unknown_key(path[:depth], known, RunConfig)
            raise InputError(f"{COMMAND_LINE}: {_dotted(path[:depth])}: {rule}")
        kinds = [each[part] for each in keys if part in each]


def _has_free_keys(kind: Any) -> bool:
    """Whether a value of this type is a table whose keys are the user's."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return any(get_origin(one) is dict for one in kinds)


def _parse(text: str) -> dict[str, Any]:
    """The contents of TOML text. Raises `ValueError` for whatever is wrong with it."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("not TOML: lists and tables lie too deep in one another") from None
    except tomllib.TOMLDecodeError as error:
        raise tomllib.TOMLDecodeError(f"not TOML: {error}") from error
    except ValueError:  # Python converts no longer ones
        raise ValueError("not TOML: a number has thousands of digits") from None


def _describe(error: Any, data: Mapping[str, Any], root: type) -> tuple[tuple[str, ...], str]:
    """The key to blame, as a path, and the line about it without its source."""
    kind, context = error["type"], error.get("ctx", {})
    key, sections = _walk(error["loc"], data, root)
    value = error["input"]
    if kind == "rule":
        key, value = (*key, *filter(None, context["key"].split("."))), context["value"]
    if kind in ("rule", "value_error") and (value is None or isinstance(value, Mapping)):
        return _blame_section(key, str(context.get("error", context.get("rule"))), data, root)
    if kind == "rule":
        rule = context["rule"]
    elif kind in _UNKNOWN:
        _, parents = _walk(error["loc"][:-1], data, root)
        known = {name for section in parents for name in _keys(section)}
        rule = _unknown_key(key, known, root)
    elif kind in ("literal_error", "union_tag_invalid"):
        if kind == "union_tag_invalid":
            key, value = (*key, "kind"), context["tag"]
        known = re.findall(r"'([^']*)'", context.get("expected") or context["expected_tags"])
        rule = f"unknown value{did_you_mean(str(value), known)}"
    elif kind == "union_tag_not_found":
        kinds = {get_args(_keys(section)["kind"])[0] for section in sections}
        rule = f"needs the key 'kind', one of {', '.join(sorted(kinds))}"
    else:
        rule = _RULES[kind].format(**context) if kind in _RULES else str(error["msg"])
    # A whole table is no use in a message; a missing key has no value; a secret stays one.
    untold = isinstance(value, Mapping) or value is None or kind == "missing"
    untold |= _SECRET.search(key[-1]) is not None if key else False
    return key, f"{_dotted(key)}{'' if untold else f' = {_shown(value)}'}: {rule}"


def _blame_section(
    key: tuple[str, ...], text: str, data: Mapping[str, Any], root: type
) -> tuple[tuple[str, ...], str]:
    """The same for what a section says of itself: of one of its keys, if it begins with that."""
    text = re.sub(r"^\w+: ", "", text)  # the name of the value
    _, sections = _walk(key, data, root)
    known = {name for section in sections for name in _keys(section)}
    for check in _CHECKS:
        found = check.fullmatch(text)
        if found and found["key"] in known:
            key = (*key, found["key"])
            return key, f"{_dotted(key)} = {found['value']}: {found['rule']}"
    return key, f"{_dotted(key)}: {text}"


def _overlap(key: Sequence[str], path: Sequence[str]) -> bool:
    """Whether one is the other or lies inside it; list indices of the key do not count."""
    return all(part.split("[")[0] == other for part, other in zip(key, path, strict=False))


def _walk(
    location: Sequence[str | int], data: Any, root: type
) -> tuple[tuple[str, ...], list[type]]:
    """The key as it stands in the file, and the sections that may stand there (none: a value).

    Pydantic puts the tag of a union into the location, where the file has no such level.
    """
    key: list[str] = []
    sections: list[type] = [root]
    for part in location:
        tagged = [s for s in sections if part in get_args(_keys(s).get("kind"))]
        if tagged and not (isinstance(data, Mapping) and part in data):
            sections = tagged
            continue
        if isinstance(part, int):
            key[-1] += f"[{part}]"
        else:
            key.append(part)
        kinds = [_keys(section).get(str(part)) for section in sections]
        sections = [section for kind in kinds for section in _sections(kind)]
        data = data.get(part) if isinstance(data, Mapping) else None
    return tuple(key), sections


def _keys(section: type) -> dict[str, Any]:
    """The keys of a section and their types."""
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    return get_type_hints(section)


def _sections(kind: Any) -> list[type]:
    """The sections among what a key may be."""
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)):
        return [kind]
    return [section for part in get_args(kind) for section in _sections(part)]


def _unknown_key(key: Sequence[str], known: Collection[str], root: type) -> str:
    """What is said of a key that is not among the known ones of its section.

    Another section may have it, by this name or by the one that it has here.
    """
    name, meant = key[-1], ours(key[-1])
    for wanted in (name,) if meant in known else (name, meant):
        # Its own place is that of another kind of section.
        place = next((one for one in _places(wanted, root) if one != tuple(key)), None)
        if place is not None:
            return f"unknown key{suggestion(name, '.'.join(place))}"
    return f"unknown key{did_you_mean(name, known) if known else ''}"


def _places(name: str, section: type) -> Iterator[tuple[str, ...]]:
    """The paths of the keys of this name, in a section and those inside it."""
    for key, kind in _keys(section).items():
        if key == name:
            yield (key,)
        for inner in _sections(kind):
            yield from ((key, *path) for path in _places(name, inner))


def _dotted(key: Sequence[str]) -> str:
    return ".".join(key) or "config"


def _shown(value: Any) -> str:
    text = _inline(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _inline(value: Any) -> str:
    """A value as TOML on one line, which `tomli_w` does not write."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(_inline, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{key} = {_inline(own)}' for key, own in value.items())}}}"
    return str(value)
