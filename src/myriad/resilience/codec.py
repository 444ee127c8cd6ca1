"""Dataclasses as JSON and back, strictly: what does not fit its type is refused, nothing is ever run.

encode(Beat(node=0, ...))                  {"kind": "Beat", "node": 0, ...}
decode({"kind": "Beat", ...}, (Beat, ...)) Beat(node=0, ...), or ValueError
"""

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

__all__ = ["decode", "encode", "plain", "read"]


def plain(value: Any) -> Any:
    """Values that JSON has; keys of mappings become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def encode(value: Any) -> dict[str, Any]:
    """A dataclass with its name."""
    return {"kind": type(value).__name__, **plain(value)}


def decode(record: Mapping[str, Any], kinds: Iterable[type]) -> Any:
    """One of these dataclasses. Raises ``ValueError``."""
    kind = next((one for one in kinds if one.__name__ == record.get("kind")), None)
    if kind is None:
        raise ValueError(f"unknown kind {record.get('kind')!r:.40}")
    return read(kind, {key: value for key, value in record.items() if key != "kind"})


def read(hint: Any, value: Any) -> Any:
    """``value``, from JSON, as a ``hint``: bool, int, float, str, a dataclass, or tuples, lists, dicts and
    unions of these. Raises ``ValueError``."""
    if is_dataclass(hint):
        return _read_dataclass(hint, value)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list) and isinstance(value, list):
        return origin(read(arguments[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {_read_key(arguments[0], key): read(arguments[1], item) for key, item in value.items()}
    if origin in (types.UnionType, typing.Union) and types.NoneType in arguments:
        return None if value is None else read(arguments[0], value)
    if origin is typing.Literal and value in arguments:
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    raise ValueError(f"{value!r:.40} where {getattr(hint, '__name__', hint)} belongs")


def _read_dataclass(hint: Any, value: Any) -> Any:
    hints = _hints(hint)
    if not isinstance(value, dict) or set(value) != set(hints):
        raise ValueError(f"not the fields of {hint.__name__}")
    return hint(**{name: read(of, value[name]) for name, of in hints.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_key(hint: Any, key: str) -> Any:
    return key if hint is str else read(hint, int(key))
