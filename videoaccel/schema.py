"""Strict dataclasses: unknown keys and wrong types are errors, and plain data goes in and out.

A plain dataclass answers an unknown key with a TypeError that names no alternative, and takes any value for
any field. Configs and receipts promise better, so both are built from here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from videoaccel.errors import UserError, unknown

_Class = TypeVar("_Class", bound=type)


def fields_of(cls: type) -> Mapping[str, Any]:
    """The keys of a dataclass and the type of each, annotations resolved, in order."""
    return _fields_of(cls)


@functools.cache
def _fields_of(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def strict(cls: _Class) -> _Class:
    """Class decorator, above `@dataclass(frozen=True, kw_only=True)`: checks keys and types on creation.

    Fields may be scalars, `Literal`s, strict dataclasses, `tuple[X, ...]`, `Mapping[str, X]`, and unions of
    those.

    Raises (on creation):
        UserError: an unknown key (names the nearest), a missing one, or a value of the wrong type.
    """
    wrapped: Callable[..., None] = vars(cls)["__init__"]
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    @functools.wraps(wrapped)
    def checked(self: Any, **values: Any) -> None:
        _check(type(self), values)
        missing = sorted(required - values.keys())
        if missing:
            raise UserError(f"{cls.__name__} needs {', '.join(missing)}")
        wrapped(self, **values)

    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


def to_plain(value: Any) -> Any:
    """Mappings, lists and scalars only; dataclass keys left at None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {key: getattr(value, key) for key in fields_of(type(value))}
        return {key: to_plain(item) for key, item in items.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type, values: object) -> Any:
    """The inverse of `to_plain` for a strict dataclass.

    Raises:
        UserError: `values` is no mapping; an unknown, missing or ill-typed key at any depth.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{cls.__name__} must be a mapping of {', '.join(fields_of(cls))}, not {values!r}")
    fields = fields_of(cls)
    for key in values:
        if key not in fields:
            raise unknown(f"key of {cls.__name__}", key, fields)
    return cls(**{key: _convert(fields[key], value) for key, value in values.items()})


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: `(float, NoneType)` for `float | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _convert(hint: Any, value: Any) -> Any:
    for member in _members(hint):
        origin = typing.get_origin(member)
        if origin is tuple and isinstance(value, list):
            return tuple(_convert(typing.get_args(member)[0], item) for item in value)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(member):
            return from_plain(typing.cast(type, member), value)
        if isinstance(value, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
            return {key: _convert(typing.get_args(member)[1], item) for key, item in value.items()}
    return value


def _fits(value: object, member: Any) -> bool:
    origin = typing.get_origin(member)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(member)[0]) for item in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        each = typing.get_args(member)[1]
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and _fits(item, each) for key, item in value.items()
        )
    if origin is typing.Literal:
        # 1, 1.0 and True are equal and only one of them was meant.
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(member))
    if isinstance(value, bool):  # a bool is an int to isinstance, and `steps: yes` is a mistake
        return member is bool
    if member is float:
        return isinstance(value, int | float)
    return isinstance(value, member)


def _name(member: Any) -> str:
    if member is type(None):
        return "nothing"
    if typing.get_origin(member) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(member)))
    origin = typing.get_origin(member)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping to {_name(typing.get_args(member)[1])}"
    if origin is tuple:
        return f"a list of {_name(typing.get_args(member)[0])}"
    return member.__name__ if isinstance(member, type) and not typing.get_args(member) else str(member)


def _check(cls: type, values: Mapping[str, Any]) -> None:
    fields = fields_of(cls)
    for key, value in values.items():
        if key not in fields:
            raise unknown(f"key of {cls.__name__}", key, fields)
        members = _members(fields[key])
        if not any(_fits(value, member) for member in members):
            wanted = " or ".join(_name(member) for member in members)
            raise UserError(f"{cls.__name__}.{key} must be {wanted}, not {value!r}")
