"""Shards whose tokens are verified at every read.

Every read of a block compares its hash, in the first epoch and in later ones. The tokens come from the very
bytes that were compared. No state is kept between reads, so a replaced loader or a resumed run needs none.
One block is 64 KiB: a sample costs one or two hashes (docs/guide/data-checks.md has the figures).
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from myriad.data.bad_blocks import BlockGuard
from myriad.data.block_hashes import BlockHashes
from myriad.errors import BAD_DATA, RunFailedError

__all__ = ["BlockStore", "HashedShard", "LocalTokens", "OpenFiles", "TokenFile", "TokenShard"]

_MOST_OPEN = 128
_TRIES = 2
"""Reads of wrong bytes before a block is bad, and failed reads before the storage is at fault."""


class TokenShard(Protocol):
    """Tokens of one file, local or remote."""

    @property
    def name(self) -> str:
        """Path or URL of the file without its suffix, as in the job."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the shard."""
        ...

    @property
    def num_documents(self) -> int:
        """Number of documents that `document` can return."""
        ...

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each document, which cover the shard in their order. Raises
        `BadInputError` if the index is damaged."""
        ...

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the tokens from number ``first`` on."""
        ...

    def document(self, index: int) -> NDArray[np.generic]:
        """Return the tokens of one document."""
        ...

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Cache the tokens [first, stop) of each range, if single reads are slow."""
        ...


class TokenFile(Protocol):
    """A ``.bin`` file of tokens."""

    name: str
    """Path or URL of the file, as in the job."""

    def read(self, start: int, size: int, *, again: bool) -> bytes:
        """Return ``size`` bytes from byte ``start`` on; fewer at the end of the file.

        With ``again``, caches are bypassed as far as possible. Raises ``OSError``.
        """
        ...

    def size(self) -> int:
        """Return the current bytes of the file. Raises ``OSError``."""
        ...


class BlockStore(Protocol):
    """Local copies of remote blocks; the reader verifies each copy."""

    def get(self, number: int, size: int) -> bytes:
        """Return the copy of a block, or whatever its place holds."""
        ...

    def put(self, number: int, content: bytes) -> None:
        """Store a copy of a block."""
        ...

    def fetch(self, numbers: list[int], bring: Callable[[int], object]) -> None:
        """Call ``bring`` for each of these blocks, several at once."""
        ...


class OpenFiles:
    """The most recently read files, kept open: reopening a file costs a round trip on network storage."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """Return the descriptor of a file, valid until the next call. Raises ``OSError``."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def forget(self, path: Path) -> None:
        """Close the file, so that the next read reopens it: a network file system may have lost it."""
        if path in self._open:
            os.close(self._open.pop(path))

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class LocalTokens:
    """A ``.bin`` file on this machine, or on a mounted file system."""

    def __init__(self, path: Path, files: OpenFiles) -> None:
        self.name, self._path, self._files = str(path), path, files

    def read(self, start: int, size: int, *, again: bool) -> bytes:
        if again:
            self._files.forget(self._path)
        descriptor = self._files.descriptor(self._path)
        if again and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
        return os.pread(descriptor, size, start)

    def size(self) -> int:
        return os.stat(self._path).st_size


class HashedShard:
    """A shard with block hashes: `read` returns only verified bytes."""

    def __init__(
        self,
        plain: TokenShard,
        dtype: np.dtype[np.generic],
        file: TokenFile,
        load: Callable[[], BlockHashes],
        guard: BlockGuard,
        store: BlockStore | None = None,
    ) -> None:
        """``plain`` is the same shard without checks; ``load`` reads its hashes, at the first use."""
        self._plain, self._dtype, self._file, self._load = plain, dtype, file, load
        self._guard, self._store = guard, store
        self._loaded: BlockHashes | None = None

    @property
    def name(self) -> str:
        return self._plain.name

    @property
    def num_tokens(self) -> int:
        return self._plain.num_tokens

    @property
    def num_documents(self) -> int:
        return self._plain.num_documents

    def document_lengths(self) -> NDArray[np.int64]:
        return self._plain.document_lengths()

    def document(self, index: int) -> NDArray[np.generic]:
        return self._plain.document(index)

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the tokens from number ``first`` on.

        Raises `BadBlockError` for a bad block, and `RunFailedError` for one that cannot be read.
        """
        item, block = self._dtype.itemsize, self._hashes.block_bytes
        start, stop = first * item, (first + len(out)) * item
        for number in self._numbers(first, first + len(out)):
            content, begins = self._block(number), number * block
            lo, hi = max(start, begins), min(stop, begins + len(content))
            tokens = np.frombuffer(content, self._dtype, (hi - lo) // item, lo - begins)
            out[(lo - start) // item : (hi - start) // item] = tokens

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Cache missing blocks; `read` finds and reports errors."""
        if self._store is not None:
            numbers = {number for first, stop in ranges for number in self._numbers(first, stop)}
            self._store.fetch(sorted(number for number in numbers if not self._near(number)), self._bring)

    def _numbers(self, first: int, stop: int) -> range:
        """Return the blocks that hold the tokens [first, stop)."""
        item, block = self._dtype.itemsize, self._hashes.block_bytes
        return range(first * item // block, -(-stop * item // block))

    @property
    def _hashes(self) -> BlockHashes:
        if self._loaded is None:
            found = self._load()
            if found.size_bytes != self.num_tokens * self._dtype.itemsize:
                raise RunFailedError(
                    f"{self.name}.blocks has hashes of {found.size_bytes} bytes, the shard has "
                    f"{self.num_tokens} tokens of {self._dtype.itemsize} bytes; restore it or prepare again"
                )
            self._loaded = found
        return self._loaded

    def _block(self, number: int) -> bytes:
        """Return the verified bytes of one block."""
        start, size = self._hashes.span(number)
        self._guard.check(self._file.name, start)
        if content := self._near(number):
            return content
        content = self._read_stored(number, start, size)
        if self._store is not None:
            self._store.put(number, content)
        return content

    def _near(self, number: int) -> bytes:
        """Return the local copy of a block if it is there and right, else nothing."""
        if self._store is None:
            return b""
        size = self._hashes.span(number)[1]
        copy = self._store.get(number, size)
        if len(copy) == size and self._hashes.is_right(number, copy):
            return copy
        return b""

    def _bring(self, number: int) -> None:
        start, size = self._hashes.span(number)
        content = self._file.read(start, size, again=False)
        if self._store is not None and len(content) == size and self._hashes.is_right(number, content):
            self._store.put(number, content)

    def _read_stored(self, number: int, start: int, size: int) -> bytes:
        """Read a block from its storage, and read it again after a failed read or wrong bytes."""
        num_wrong, failed, problem = 0, 0, ""
        while True:
            try:
                content = self._file.read(start, size, again=bool(problem))
            except OSError as error:
                failed, problem = failed + 1, f"could not be read ({error.strerror or error})"
                if failed == _TRIES:
                    raise self._unreadable(start, error) from None
                continue
            if len(content) == size and self._hashes.is_right(number, content):
                if problem:
                    self._guard.reread(self._file.name, start, f"{problem}; it was right when read again")
                return content
            num_wrong, problem = num_wrong + 1, "was read with other bytes than were written"
            if num_wrong == _TRIES:
                self._check_size(start)
                raise self._guard.reject(self._file.name, start, size)

    def _check_size(self, start: int) -> None:
        """Raise `RunFailedError` if the file was truncated or replaced, which is not a fault of single
        blocks."""
        try:
            size = self._file.size()
        except OSError as error:
            raise self._unreadable(start, error) from None
        if size != self._hashes.size_bytes:
            text = (
                f"{self._file.name} has {size} bytes instead of {self._hashes.size_bytes}; restore the file"
            )
            raise RunFailedError(f"{BAD_DATA}{text}")

    def _unreadable(self, start: int, error: OSError) -> RunFailedError:
        reason = error.strerror or error
        return RunFailedError(f"{self._file.name}, byte {start}: cannot be read: {reason}")
