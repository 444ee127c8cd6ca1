"""Converts dataclasses to JSON and back, by msgspec: a value that does not fit its type is refused, and no
code is run.

write_message(Beat(node=0, ...))                 b'{"kind":"Beat","node":0,...}'
read_message(b'{"kind":"Beat",...}', (Beat,))    Beat(node=0, ...), or ValueError

A key that the type does not have is ignored, and a missing one is refused unless it has a default. msgspec
takes no half of a surrogate pair, which text from a log may have: such messages take the way through `json`.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

__all__ = ["decode", "encode", "plain", "read", "read_message", "write_message"]


class _Kind(msgspec.Struct):
    """The part of a message that names its type."""

    kind: str


_KIND = msgspec.json.Decoder(_Kind)


def write_message(message: Any) -> bytes:
    """Return a dataclass, with its name, as JSON text."""
    try:
        text = msgspec.json.encode(message)
    except UnicodeEncodeError:
        return json.dumps(encode(message)).encode()
    first = b'{"kind":"%s"' % type(message).__name__.encode()
    return first + (b"}" if text == b"{}" else b"," + text[1:])


def read_message(text: bytes, kinds: Iterable[type]) -> Any:
    """Return the one of these dataclasses that a JSON text holds. Raises ``ValueError``."""
    try:
        kind = _of_name(tuple(kinds), _KIND.decode(text).kind)
        return _decoder(kind).decode(text)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except (msgspec.DecodeError, RecursionError):  # half of a surrogate pair, or no JSON
        return decode(_parse(text), kinds)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return record


def plain(value: Any) -> Any:
    """Convert a value to JSON types; keys of mappings become text."""
    return msgspec.to_builtins(value, str_keys=True)


def encode(value: Any) -> dict[str, Any]:
    """Encode a dataclass with its name."""
    return {"kind": type(value).__name__, **plain(value)}


def decode(record: Mapping[str, Any], kinds: Iterable[type]) -> Any:
    """Decode one of these dataclasses. Raises ``ValueError``."""
    kind = _of_name(tuple(kinds), record.get("kind"))
    return read(kind, {key: value for key, value in record.items() if key != "kind"})


def read(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``hint``: bool, int, float, str, a dataclass, or tuples, lists, dicts
    and unions of these. A float is finite: other values cannot be compared with a deadline. Raises
    ``ValueError``."""
    try:
        try:
            return _decoder(hint).decode(msgspec.json.encode(value))  # writes what is not finite as null
        except UnicodeEncodeError:
            json.dumps(value, allow_nan=False)
            return msgspec.convert(value, hint, str_keys=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _of_name(kinds: tuple[type, ...], name: object) -> type:
    kind = next((one for one in kinds if one.__name__ == name), None)
    if kind is None:
        raise ValueError(f"unknown kind {name!r:.40}")
    return kind


@cache
def _decoder(hint: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(hint)
