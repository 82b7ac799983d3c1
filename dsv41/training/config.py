"""A run's configuration file: TOML into nested frozen dataclasses, with every mistake named by its field.

Each part of training declares its own section as a frozen dataclass; this module knows none of them. A section checks
its values in ``__post_init__`` and raises ``ValueError("<field>: …")``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import math
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

_Config = TypeVar("_Config")
_FIELD = re.compile(r"\w*")
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", pathlib.Path: "a path"}


MAY_CHANGE = {"may_change": True}
"""Metadata of a field in which a resumed run may differ from its beginning."""


class TrainConfigError(ValueError):
    """A training configuration that cannot be run; the message names the field and the value."""


def read_config(path: pathlib.Path, cls: type[_Config], overrides: Iterable[str] = ()) -> _Config:
    """Reads a TOML file into a dataclass.

    Args:
      path: the file.
      cls: a frozen dataclass. Fields may be bool, int, float, str, ``pathlib.Path``, ``Literal``, a tuple, a mapping
        with string keys, another dataclass, or one of these or None. A section that the file leaves out takes its
        class's defaults; one that is None by default is off until the file has it.
      overrides: ``section.field=value``, later ones win. The value is written as in TOML; what is no TOML is a string,
        and an empty one leaves the field (or the section) out, as if the file did not have it.

    Raises:
      TrainConfigError: not TOML; an unknown or missing field; a value of the wrong type, or one that its section
        refuses.
      OSError: the file cannot be read.
    """
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _override(data, override)
    return parse_config(data, cls)


def parse_config(data: Mapping[str, Any], cls: type[_Config]) -> _Config:
    """The same from a mapping. Raises as :func:`read_config`."""
    return _section(data, cls, "")


def flat_config(config: Any, changeable: bool = True) -> dict[str, Any]:
    """All fields of a configuration, by their dotted names, as JSON has them.

    Args:
      config: a dataclass as :func:`read_config` gives it.
      changeable: False leaves out those with :data:`MAY_CHANGE`.
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata == MAY_CHANGE and not changeable:
            continue
        if dataclasses.is_dataclass(value):
            flat |= {f"{field.name}.{name}": leaf for name, leaf in flat_config(value, changeable).items()}
        else:
            flat[field.name] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, pathlib.Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _override(data: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, field = name.strip().split(".")
    if not equals or not all((*sections, field)):
        raise TrainConfigError(f"--set {override!r}: is not section.field=value")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise TrainConfigError(f"--set {override!r}: {section} is no section")
    if not text.strip():
        data.pop(field, None)
        return
    try:
        parsed = tomllib.loads(f"value = {text}")
        data[field] = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        data[field] = text


def _section(data: Any, cls: type[_Config], name: str) -> _Config:
    if not isinstance(data, Mapping):
        raise TrainConfigError(f"{name}: {data!r}, where a section is needed")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    prefix = f"{name}." if name else ""
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}"
            raise TrainConfigError(f"{prefix}{key}: {data[key]!r}: no such {_what(data[key])}; {hint}")
    values = {}
    for key, field in fields.items():
        if key in data:
            values[key] = _value(data[key], hints[key], prefix + key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(hints[key]):
                raise TrainConfigError(f"{prefix}{key}: is missing; {_wanted(hints[key])} is needed")
            values[key] = _section({}, hints[key], prefix + key)
    try:
        return cls(**values)
    except TrainConfigError:
        raise
    except ValueError as error:
        # A section names its own fields; it need not know where it stands in the file.
        message = str(error)
        if prefix and not message.startswith(prefix):
            message = (prefix if _FIELD.match(message).group() in fields else f"{name}: ") + message
        raise TrainConfigError(message) from error


def _what(value: Any) -> str:
    return "section" if isinstance(value, Mapping) else "field"


def _value(value: Any, kind: Any, name: str) -> Any:
    """A value of the file as the field's type has it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, [option for option in arguments if option is not type(None)], name)
    if origin is typing.Literal:
        if not any(value == option and type(value) is type(option) for option in arguments):
            near = difflib.get_close_matches(str(value), map(str, arguments), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TrainConfigError(f"{name}: {value!r} is none of {', '.join(map(str, arguments))}{hint}")
        return value
    if dataclasses.is_dataclass(kind):
        return _section(value, kind, name)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(value, kind, name)
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise TrainConfigError(f"{name}: {value!r} has {len(value)} items; {len(arguments)} are needed")
        kinds = arguments if arguments[-1] is not Ellipsis else [arguments[0]] * len(value)
        return tuple(
            _value(item, each, f"{name}[{i}]") for i, (item, each) in enumerate(zip(value, kinds, strict=True))
        )
    if origin in (dict, collections.abc.Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(value, kind, name)
        return {key: _value(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    return _scalar(value, kind, name)


def _scalar(value: Any, kind: type, name: str) -> Any:
    if kind is float and type(value) in (int, float):
        if math.isnan(value):
            raise TrainConfigError(f"{name}: is not a number")
        return float(value)
    if kind is pathlib.Path and isinstance(value, str) and value:
        return pathlib.Path(value)
    # A bool is an int in Python, not in a configuration.
    if type(value) is not kind:
        raise _wrong(value, kind, name)
    return value


def _one_of(value: Any, options: list[Any], name: str) -> Any:
    problems = []
    for option in options:
        try:
            return _value(value, option, name)
        except TrainConfigError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    raise TrainConfigError(f"{name}: {value!r}, where {' or '.join(map(_wanted, options))} is needed")


def _wrong(value: Any, kind: Any, name: str) -> TrainConfigError:
    return TrainConfigError(f"{name}: {value!r}, where {_wanted(kind)} is needed")


def _wanted(kind: Any) -> str:
    """What a type is called in a message."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_wanted(option) for option in arguments if option is not type(None))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return "a list"
    if dataclasses.is_dataclass(kind) or origin in (dict, collections.abc.Mapping):
        return "a section"
    return _NAMES.get(kind, str(kind))
