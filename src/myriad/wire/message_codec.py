"""Converts dataclasses to JSON and back, strictly: a value that does not fit its type is refused, and no
code is run.

encode(Beat(node=0, ...))                  {"kind": "Beat", "node": 0, ...}
decode({"kind": "Beat", ...}, (Beat, ...)) Beat(node=0, ...), or ValueError
"""

import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, get_args, get_origin

__all__ = ["decode", "encode", "plain", "read"]

_MOST_AS_FLOAT = 2**1000
_PLAIN = (int, str, float, bool, type(None))


def plain(value: Any) -> Any:
    """Convert a value to JSON types; keys of mappings become text."""
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def encode(value: Any) -> dict[str, Any]:
    """Encode a dataclass with its name."""
    return {"kind": type(value).__name__, **plain(value)}


def decode(record: Mapping[str, Any], kinds: Iterable[type]) -> Any:
    """Decode one of these dataclasses. Raises ``ValueError``."""
    kind = next((one for one in kinds if one.__name__ == record.get("kind")), None)
    if kind is None:
        raise ValueError(f"unknown kind {record.get('kind')!r:.40}")
    return read(kind, {key: value for key, value in record.items() if key != "kind"})


def read(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``hint``: bool, int, float, str, a dataclass, or tuples, lists, dicts
    and unions of these. Raises ``ValueError``."""
    return _reader(hint)(value)


_Reader = Callable[[Any], Any]


@cache
def _reader(hint: Any) -> _Reader:
    """Build the reader of a type, once for each type: 12,288 rows of ranks are read in a second."""
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        return _sequence_reader(origin, _reader(arguments[0]))
    if origin is dict:
        return _dict_reader(arguments[0], _reader(arguments[1]))
    if origin in (types.UnionType, typing.Union) and types.NoneType in arguments:
        inner = _reader(arguments[0])
        return lambda value: None if value is None else inner(value)
    if origin is typing.Literal:
        return _literal_reader(hint, arguments)
    return _read_float if hint is float else _scalar_reader(hint)


def _dataclass_reader(hint: Any) -> _Reader:
    hints = typing.get_type_hints(hint)
    assert not hasattr(hint, "__post_init__") and not hasattr(hint, "__slots__"), "plain values"
    names, readers = set(hints), [(name, _reader(of)) for name, of in hints.items()]

    def read_fields(value: Any) -> Any:
        if type(value) is not dict or value.keys() != names:
            raise ValueError(f"not the fields of {hint.__name__}")
        # the __init__ of a frozen dataclass takes as long as all checks together
        found = object.__new__(hint)
        found.__dict__.update({name: read_field(value[name]) for name, read_field in readers})
        return found

    return read_fields


def _sequence_reader(origin: Any, read_item: _Reader) -> _Reader:
    def read_items(value: Any) -> Any:
        if type(value) is not list:
            raise _misfit(origin, value)
        return origin([read_item(item) for item in value])

    return read_items


def _dict_reader(of_keys: Any, read_item: _Reader) -> _Reader:
    def read_items(value: Any) -> Any:
        if type(value) is not dict:
            raise _misfit(dict, value)
        return {_read_key(of_keys, key): read_item(item) for key, item in value.items()}

    return read_items


def _literal_reader(hint: Any, allowed: tuple[Any, ...]) -> _Reader:
    def read_literal(value: Any) -> Any:
        if type(value) is not str or value not in allowed:
            raise _misfit(hint, value)
        return value

    return read_literal


def _scalar_reader(hint: Any) -> _Reader:
    known = hint in (bool, int, str)

    def read_scalar(value: Any) -> Any:
        if type(value) is not hint or not known:
            raise _misfit(hint, value)
        return value

    return read_scalar


def _read_float(value: Any) -> float:
    """Read a finite float: other values cannot be compared with a deadline."""
    if type(value) is float or (type(value) is int and abs(value) < _MOST_AS_FLOAT):
        found = float(value)
        if isfinite(found):
            return found
    raise _misfit(float, value)


def _misfit(hint: Any, value: Any) -> ValueError:
    return ValueError(f"{_shown(value)} where {getattr(hint, '__name__', hint)} belongs")


def _shown(value: Any) -> str:
    """Shorten a value of any size for an error text."""
    return f"{value!r:.40}" if isinstance(value, (str, float, bool, type(None))) else type(value).__name__


def _read_key(hint: Any, key: str) -> Any:
    return key if hint is str else read(hint, int(key))
