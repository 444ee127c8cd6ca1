"""Structure-aware mutations of valid inputs, with one source of random numbers, for tests and for `fuzz`.

    bytes        flipped, cut, removed, repeated, replaced by a number at a limit
    values       a format with fields is parsed; one to three of its values are replaced by extremes, by
                 values of another type, removed, repeated, renamed or nested deeply; then it is written again

A format is a `Codec`: ``load`` parses an input into plain values and ``dump`` writes them. A codec that seals
its format with a hash writes a right hash, so that mutations get past it.
"""

import json
import math
import struct
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

__all__ = ["BYTES", "JSON", "JSON_LINES", "MOST_BYTES", "TOML", "Codec", "dump_toml", "mutate"]

MOST_BYTES = 2**15
"""Length at which a changed input is cut, in bytes."""
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 127, 128, 255, 256, 1000, 65535, 65536, 10**9),
    *(
        2**31 - 1,
        2**31,
        -(2**31),
        2**32,
        2**53,
        2**62,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64 - 1,
        2**64,
        -(2**64),
    ),
    *(10**18, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 5e-324, 1e300, -1e300, math.nan, math.inf, -math.inf),
)
_TEXTS = (
    *("", " ", "0", "1", "-1", "nan", "inf", "1e999", "auto", "off", "none", "null", "true", "text"),
    *(".", "..", "/", "../x", "/etc/passwd", "a/b", "a\\b", "\0", "a\0b", "\n", "\x1b[2J", "\x7f", "\ufeff"),
    *(
        "é",
        "\u2028",
        "²",
        "٣",
        "\U0001f600",
        "\ud800",
        "x" * 300,
        "9" * 5000,
        "64 MiB",
        "1e400 GiB",
        "-1 Gbit/s",
    ),
    *("__class__", "{}", "%s", "$HOME", "~", "int64", "float32", "bfloat16", "load", "F32", "rope"),
)
_OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, [0], [None], ["x"])
_ANY = (*_OTHERS, *_NUMBERS, *_TEXTS)


@dataclass(frozen=True)
class Codec:
    """Parser and writer of a format, in plain values."""

    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]
    sealed: bool = False
    """Whether ``dump`` adds a hash or a size over the rest, without which no changed input is read."""


def _unchanged(data: bytes) -> Any:
    raise ValueError("bytes without fields")


def dump_json(value: Any) -> bytes:
    """Return JSON, in which lone surrogates and non-finite numbers are written as Python does."""
    return json.dumps(value).encode()


def dump_toml(tree: Any) -> bytes:
    """Return TOML with inline tables. Keys and values that TOML cannot have become text."""
    if not isinstance(tree, dict):
        return b"value = " + _toml(tree).encode(errors="replace")
    return "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in tree.items()).encode(errors="replace")


def _key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    return _key("null" if value is None else str(value))


BYTES = Codec(_unchanged, bytes)
JSON = Codec(json.loads, dump_json)
TOML = Codec(lambda data: tomllib.loads(data.decode()), dump_toml)
JSON_LINES = Codec(
    lambda data: [json.loads(line) for line in data.splitlines()],
    lambda rows: b"".join(dump_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows])),
)


def mutate(data: bytes, codec: Codec, draw: Random) -> bytes:
    """Return an input near ``data``: with other values if it can be parsed, else with other bytes."""
    if draw.random() < 0.7:
        try:
            return codec.dump(_other_values(codec.load(data), draw))[:MOST_BYTES]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, struct.error):
            pass  # not parsed, or the values cannot be written in this format
        except RecursionError:
            pass
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        data = draw.choice(_OF_BYTES)(data, draw)
    return data[:MOST_BYTES]


def _flip(data: bytes, draw: Random) -> bytes:
    if not data:
        return bytes([draw.randrange(256)])
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def _byte(data: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))]) + data[at + 1 :]


def _cut(data: bytes, draw: Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _remove(data: bytes, draw: Random) -> bytes:
    first = draw.randrange(len(data) + 1)
    return data[:first] + data[first + draw.randrange(1, 17) :]


def _repeat(data: bytes, draw: Random) -> bytes:
    first = draw.randrange(len(data) + 1)
    last = first + draw.randrange(1, 65)
    return data[:last] + data[first:last] * draw.choice((1, 1, 2, 50)) + data[last:]


def _number(data: bytes, draw: Random) -> bytes:
    """Replace bytes by a number at a limit, of 1 to 8 bytes, in either order."""
    size = draw.choice((1, 2, 4, 8))
    value = draw.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1, len(data)))
    at = draw.randrange(len(data) + 1)
    order: Any = draw.choice(("little", "big"))
    return data[:at] + (value % 2 ** (8 * size)).to_bytes(size, order) + data[at + size :]


def _insert(data: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    text = draw.choice(
        (b"[" * 2000, b'{"a":' * 500, b"\xff", b"\0" * 64, b"9" * 5000, b"=", b"\n", b"--", b"$")
    )
    return data[:at] + text + data[at:]


_OF_BYTES = (_flip, _byte, _cut, _remove, _repeat, _number, _insert)


def _other_values(tree: Any, draw: Random) -> Any:
    for _ in range(draw.choice((1, 1, 2, 3))):
        tree = _replaced(tree, _place(tree, draw), draw)
    return tree


def _place(tree: Any, draw: Random) -> tuple[Any, ...]:
    """Return the path of a value: down from the root, by chance."""
    path: list[Any] = []
    while isinstance(tree, dict | list) and tree and draw.random() < (0.97 if not path else 0.8):
        head = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
        path.append(head)
        tree = tree[head]
    return tuple(path)


def _replaced(tree: Any, path: tuple[Any, ...], draw: Random) -> Any:
    """Return a copy of the tree with another value at ``path``."""
    if not path:
        return _other(tree, draw)
    head, *rest = path
    if isinstance(tree, dict):
        copied = dict(tree)
        if rest or draw.random() < 0.7:
            copied[head] = _replaced(tree[head], tuple(rest), draw)
        elif draw.random() < 0.5:
            del copied[head]
        else:
            copied[draw.choice(_TEXTS)] = copied.pop(head)
        return copied
    changed = list(tree)
    if rest or draw.random() < 0.7:
        changed[head] = _replaced(tree[head], tuple(rest), draw)
    elif draw.random() < 0.5:
        del changed[head]
    else:
        changed[head:head] = [changed[head]] * draw.choice((1, 2, 100))
    return changed


def _other(value: Any, draw: Random) -> Any:
    chance = draw.random()
    if isinstance(value, bool) or value is None:
        return draw.choice(_ANY)
    if isinstance(value, int | float) and chance < 0.7:
        near = value + draw.choice((-1, 1, 8, -8)) if abs(value) < 1e300 else 0
        return draw.choice((near, -value) if draw.random() < 0.2 else _NUMBERS)
    if isinstance(value, str) and chance < 0.6:
        return draw.choice((value + draw.choice(_TEXTS), value[:-1]) if draw.random() < 0.2 else _TEXTS)
    if isinstance(value, list) and chance < 0.3:
        return value[::-1] + value
    if chance < 0.97:
        return draw.choice(_ANY)
    return _nested(value, draw.choice((3, 90, 110, 990)), draw)


def _nested(value: Any, depth: int, draw: Random) -> Any:
    in_list = draw.random() < 0.5
    for _ in range(depth):
        value = [value] if in_list else {"a": value}
    return value
