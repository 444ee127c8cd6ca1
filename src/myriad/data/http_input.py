"""Inputs over HTTP: a request to a silent server is retried, then reported; it never stalls a command.

fsspec waits up to five minutes for a whole request, even if no byte arrives. Here `SILENCE_SECONDS` without a
byte end a request. It is retried from the last byte received, `TRIES` times in all. Then, and for an answer
that will not change (404), the error is raised.
"""

import io
import time
from http import HTTPStatus
from typing import Any

__all__ = [
    "SILENCE_SECONDS",
    "TRIES",
    "HttpInput",
    "http_file_system",
    "http_info",
    "http_range",
    "is_http",
    "tried_http",
]

SILENCE_SECONDS = 30.0
"""Longest wait for the next byte of an answer."""
TRIES = 3
"""Consecutive requests that may return nothing."""
_PAUSE_SECONDS = 1.0
_BUSY = 429
_BLOCK_BYTES = 1 << 16


def is_http(url: str) -> bool:
    """Return whether an input is read over HTTP."""
    return url.startswith(("http://", "https://"))


def http_info(url: str) -> dict[str, Any]:
    """Return the server's facts about a file: name, size and, if available, stamps. Raises ``OSError``."""
    return dict(tried_http(url, lambda: http_file_system().info(url)))


def http_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file; fewer at its end.

    Raises ``OSError``, also if the server sends the whole file instead, of which no more than that is read.
    """
    import fsspec.asyn

    fs = http_file_system()
    return bytes(tried_http(url, lambda: fsspec.asyn.sync(fs.loop, _range, fs, url, start, stop)))


async def _range(fs: Any, url: str, start: int, stop: int) -> bytes:
    if stop <= start:
        return b""
    session = await fs.set_session()
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    async with session.get(fs.encode_url(url), headers=headers) as answer:
        fs._raise_not_found_for_status(answer, url)
        found = bytearray()
        async for part in answer.content.iter_chunked(_BLOCK_BYTES):
            found += part
            if len(found) > stop - start or (start > 0 and answer.status != HTTPStatus.PARTIAL_CONTENT):
                raise ValueError("its server does not support range requests")
        return bytes(found)


class HttpInput(io.RawIOBase):
    """One file with random access; wrap it in an `io.BufferedReader`."""

    def __init__(self, url: str) -> None:
        self._url, self._position = url, 0
        self._file: Any = None
        self._size: int | None = http_info(url)["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size is None:
            raise OSError("its server does not report the size")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}[whence]
        if base + offset != self._position:
            self._position = base + offset
            self._drop()
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data: bytes = tried_http(self._url, lambda: self._read(len(buffer)), self._drop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        if self._file is None:
            self._file = http_file_system().open(self._url, "rb")
            self._reach(self._position)
        data: bytes = self._file.read(size)
        if not data and self._size is not None and self._position < self._size:
            raise OSError(f"ends after {self._position} of {self._size} bytes")
        return data

    def _reach(self, position: int) -> None:
        """Seek to a position; a server without byte ranges sends all bytes before it again."""
        try:
            self._file.seek(position)
        except ValueError:
            while position > 0 and (skipped := self._file.read(min(position, _BLOCK_BYTES))):
                position -= len(skipped)

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def http_file_system() -> Any:
    """Return fsspec's HTTP file system, with timeouts for silent servers."""
    import aiohttp
    import fsspec

    silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
    return fsspec.filesystem("http", client_kwargs={"timeout": silence})


def tried_http(url: str, do: Any, clear: Any = lambda: None) -> Any:
    """Return the result of ``do``; after a transient error, call ``clear`` and retry."""
    for number in range(1, TRIES + 1):
        try:
            return do()
        except Exception as error:
            clear()
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            if isinstance(cause, TimeoutError):
                reason = f"no byte came for {SILENCE_SECONDS:g} s, {TRIES} times"
            else:
                reason = str(cause) or type(cause).__name__
            if number == TRIES or not _may_pass(cause):
                raise OSError(reason) from error
        time.sleep(number * _PAUSE_SECONDS)
    raise AssertionError("unreachable: the last attempt raises")


def _may_pass(error: BaseException) -> bool:
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= 500 or error.status == _BUSY
    return isinstance(error, OSError | TimeoutError | aiohttp.ClientError)
