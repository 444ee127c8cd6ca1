"""Parse and check the query parameters and the body of a request. An invalid one is answered with status 400
and a line."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from myriad.units import parse_ranges

__all__ = ["QueryParameterError", "as_int", "as_range", "as_ranks", "as_seconds", "json_body"]


class QueryParameterError(ValueError):
    """Raised for an invalid parameter; the text has its key, its value and what is allowed."""

    def __init__(self, key: str, value: str, allowed: str) -> None:
        super().__init__(f"{key} = {value[:80]!r}: {allowed}")


def as_int(query: Mapping[str, str], key: str, default: int, least: int, most: int) -> int:
    """Return a whole number between ``least`` and ``most``; ``default`` if it is missing."""
    text = query.get(key, "")
    if not text:
        return default
    if not (
        text.lstrip("-").isdecimal() and text.isascii() and len(text) < 12 and least <= int(text) <= most
    ):
        raise QueryParameterError(key, text, f"a whole number from {least} to {most}")
    return int(text)


def as_seconds(query: Mapping[str, str], key: str) -> float | None:
    """Return a time in seconds; ``None`` if it is missing."""
    if not (text := query.get(key, "")):
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e10:
        raise QueryParameterError(key, text, "seconds")
    return value


def as_range(query: Mapping[str, str], key: str) -> tuple[int, int] | None:
    """Return the ends of a range such as "10-12" or "10"; ``None`` if it is missing."""
    if not (text := query.get(key, "")):
        return None
    first, _, last = text.partition("-")
    ends = {"first": first, "last": last or first}
    try:
        found = as_int(ends, "first", 0, 0, 2**31 - 1), as_int(ends, "last", 0, 0, 2**31 - 1)
    except QueryParameterError:
        raise QueryParameterError(key, text, "a number, or two with - between them") from None
    return found


def as_ranks(query: Mapping[str, str], key: str, world: int) -> npt.NDArray[Any]:
    """Return the ranks in a list such as "0-63,70", ascending; all ranks if it is missing."""
    if not (text := query.get(key, "")):
        return np.arange(world)
    wanted = np.zeros(world, bool)
    try:
        for part in parse_ranges(text, world):
            wanted[part.start : part.stop] = True
    except ValueError:
        raise QueryParameterError(key, text, f"ranks from 0 to {world - 1}, such as 0-63,70") from None
    return np.flatnonzero(wanted)


async def json_body(request: Request, most_bytes: int, allowed: str) -> dict[str, Any]:
    """Return the JSON object in the body of a request. ``allowed``: what the error says must be there."""
    length = request.headers.get("content-length", "")
    if not (length.isdecimal() and len(length) < 8 and int(length) <= most_bytes):
        raise QueryParameterError("content-length", length, f"at most {most_bytes}")
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise QueryParameterError("body", "", allowed)
    return found
