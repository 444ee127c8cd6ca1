"""A decoder of untrusted data, for tests and `fuzz`: a function of bytes, and the errors it documents."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mutations import BYTES, MOST_BYTES, Codec, dump_json
from myriad.errors import MyriadError

__all__ = ["VALUE_ERRORS", "Target", "as_json", "check", "scratch", "scratch_file", "write_scratch"]

_MOST_TEXT = 2**16


@dataclass(frozen=True)
class Target:
    """A decoder, with valid inputs and the errors that it documents."""

    name: str
    decode: Callable[[bytes], object]
    examples: Callable[[], Sequence[bytes]]
    """Function that returns valid inputs, which are then changed."""
    codec: Codec = BYTES
    errors: tuple[type[Exception], ...] = (MyriadError,)
    """What it may raise, each with a text of one line."""
    slow: bool = False
    most_bytes: int = MOST_BYTES
    """Length of the longest input that `fuzz` makes."""
    examples_are_read: bool = True
    """Whether the valid inputs are accepted; a valid proof depends on a nonce of this end."""


def check(target: Target, data: bytes) -> bool:
    """Decode an input, and return whether it was accepted. Any error but the documented ones comes through,
    and so does ``AssertionError`` for a text that is not one line."""
    try:
        target.decode(data)
    except target.errors as error:
        text = str(error)
        assert text and len(text.splitlines()) == 1, f"not one line: {text[:300]!r}"
        assert len(text) <= _MOST_TEXT + 8 * len(data), f"a text of {len(text)} characters"
        return False
    return True


@cache
def scratch() -> Path:
    """Return a folder in memory that ends with this process."""
    folder = tempfile.TemporaryDirectory(
        prefix="myriad-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[Any] = []


def scratch_file(name: str) -> Path:
    """Return the path of a file in `scratch`, whose folder exists."""
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_scratch(name: str, data: bytes) -> Path:
    """Write a file in `scratch`, and return its path."""
    path = scratch_file(name)
    path.write_bytes(data)
    return path


def as_json(value: Any) -> Callable[[], list[bytes]]:
    """Return a function that gives a value as the only example, in JSON."""
    return lambda: [dump_json(value)]


VALUE_ERRORS = (MyriadError, ValueError)
