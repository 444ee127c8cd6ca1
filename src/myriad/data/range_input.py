"""Inputs on remote stores, read by ranges of bytes: a request that fails is retried, then reported."""

import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["TRIES", "RangeInput", "retried"]

TRIES = 3
"""Requests for the same bytes before an error is raised."""
_PAUSE_SECONDS = 0.5
_Result = TypeVar("_Result")


def retried(do: Callable[[], _Result]) -> _Result:
    """Return the result of ``do``; retry it after a transient error. Raises ``OSError``."""
    for number in range(1, TRIES + 1):
        try:
            return do()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # remote stores have their own exception types
            if number == TRIES:
                raise OSError(" ".join(str(error).split()) or type(error).__name__) from error
        time.sleep(number * _PAUSE_SECONDS)
    raise AssertionError("unreachable: the last attempt raises")


class RangeInput(io.RawIOBase):
    """One file with random access; wrap it in an `io.BufferedReader`, whose buffer is one request."""

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs, self._path, self._position = file_system, path, 0
        self._size = int(retried(lambda: file_system.info(path))["size"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        start, stop = self._position, min(self._position + len(buffer), self._size)
        if stop <= start:
            return 0
        content: bytes = retried(lambda: self._fs.cat_file(self._path, start=start, end=stop))
        if len(content) != stop - start:
            raise OSError(f"ends after {start + len(content)} of {self._size} bytes")
        buffer[: len(content)] = content
        self._position = stop
        return len(content)
