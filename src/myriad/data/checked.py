"""Shards whose tokens are checked as they are read: every read of a block compares its hash, the first one
and those of later epochs, and the tokens come from the very bytes that were compared.

Nothing is remembered between reads, so a loader that is replaced or a run that resumes needs no state of it.
One block is 64 KiB: a sample costs one or two hashes (docs/data.md has the figures).
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from myriad.data.blocks import BlockHashes
from myriad.data.guard import BlockGuard
from myriad.errors import BAD_DATA, RunFailedError

__all__ = ["BlockStore", "HashedShard", "LocalTokens", "OpenFiles", "Shard", "TokenFile"]

_MOST_OPEN = 128
_TRIES = 2
"""Reads of wrong bytes before a block is bad, and failed reads before the storage is at fault."""


class Shard(Protocol):
    """Tokens of one file, wherever it lies."""

    @property
    def name(self) -> str:
        """The file without its suffix, as the job names it."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the shard."""
        ...

    @property
    def num_documents(self) -> int:
        """Documents that `document` can show."""
        ...

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the tokens from number ``first`` on."""
        ...

    def document(self, index: int) -> NDArray[np.generic]:
        """Tokens of one document."""
        ...

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring the tokens [first, stop) of each range near, where that takes long one by one."""
        ...


class TokenFile(Protocol):
    """A ``.bin`` file of tokens."""

    name: str
    """Path or URL of the file, as the job names it."""

    def read(self, start: int, size: int, *, again: bool) -> bytes:
        """``size`` bytes from byte ``start`` on; fewer at the end of the file. ``again``: past every cache,
        as far as that can be asked for. Raises ``OSError``."""
        ...

    def size(self) -> int:
        """Bytes of the file now. Raises ``OSError``."""
        ...


class BlockStore(Protocol):
    """Copies of blocks that are far away; whether a copy is right is for the reader to find out."""

    def get(self, number: int, size: int) -> bytes:
        """The copy of a block, or whatever lies in its place."""
        ...

    def put(self, number: int, content: bytes) -> None:
        """Store a copy of a block."""
        ...

    def fetch(self, numbers: list[int], bring: Callable[[int], object]) -> None:
        """Call ``bring`` for each of these blocks, several at once."""
        ...


class OpenFiles:
    """The files that were read last, kept open: opening one anew costs a round trip on network storage."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """The descriptor of a file, valid until the next call. Raises ``OSError``."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def forget(self, path: Path) -> None:
        """Open the file anew next time: a network file system may have lost it."""
        if path in self._open:
            os.close(self._open.pop(path))

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class LocalTokens:
    """A ``.bin`` of this machine, or of a file system that it has mounted."""

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
    """A shard with block hashes: `read` uses no byte that it has not compared."""

    def __init__(
        self,
        plain: Shard,
        dtype: np.dtype[np.generic],
        file: TokenFile,
        load: Callable[[], BlockHashes],
        guard: BlockGuard,
        store: BlockStore | None = None,
    ) -> None:
        """``plain``: the same shard unchecked; ``load`` reads its hashes, at the first use."""
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

    def document(self, index: int) -> NDArray[np.generic]:
        return self._plain.document(index)

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the tokens from number ``first`` on. Raises `BadBlockError` for a bad block, and
        `RunFailedError` for one that cannot be read."""
        item, block = self._dtype.itemsize, self._hashes.block_bytes
        start, stop = first * item, (first + len(out)) * item
        for number in self._numbers(first, first + len(out)):
            content, begins = self._block(number), number * block
            lo, hi = max(start, begins), min(stop, begins + len(content))
            tokens = np.frombuffer(content, self._dtype, (hi - lo) // item, lo - begins)
            out[(lo - start) // item : (hi - start) // item] = tokens

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring blocks near that are not; what is wrong with one is left for `read` to find."""
        if self._store is not None:
            numbers = {number for first, stop in ranges for number in self._numbers(first, stop)}
            self._store.fetch(sorted(number for number in numbers if not self._near(number)), self._bring)

    def _numbers(self, first: int, stop: int) -> range:
        """Blocks that hold the tokens [first, stop)."""
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
        """The bytes of one block, which are those that were written."""
        start, size = self._hashes.span(number)
        self._guard.check(self._file.name, start)
        if content := self._near(number):
            return content
        content = self._read_stored(number, start, size)
        if self._store is not None:
            self._store.put(number, content)
        return content

    def _near(self, number: int) -> bytes:
        """The copy of a block, if there is one and it is right; else nothing."""
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
        """From where the file is stored: once more after a failed read or wrong bytes, before a verdict."""
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
                raise self._guard.condemn(self._file.name, start, size)

    def _check_size(self, start: int) -> None:
        """A file that was cut off, or replaced, is no matter of single blocks. Raises `RunFailedError`."""
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
