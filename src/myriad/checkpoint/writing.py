"""Pieces to a file, and back from the file to be sure: no torch, so that any process can do it.

Read back, since what was written is not always what is there: after the fsync the cache is dropped, every
byte is read from where it is stored, and its hash compared with that of the memory it came from.
"""

from collections.abc import Callable, Sequence

import xxhash

from myriad.checkpoint.direct import aligned_memory
from myriad.checkpoint.manifest import FileRecord, hash_of, record_pieces, record_plain
from myriad.checkpoint.piece import Piece
from myriad.checkpoint.storage import CACHE_BYTES, Storage

__all__ = ["check_file", "put_and_check", "write_and_check", "write_pieces"]

_READ_BYTES, _FAR_READ_BYTES = 2**22, 2**26
"""Of one read, of a disk and of a remote store."""
_CHANGED = "its bytes changed after it was written"


def write_pieces(
    storage: Storage, path: str, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
) -> FileRecord:
    """Makes the file of one rank, on disk when this returns; ``data``: the bytes of a piece, hashed as they
    are written."""
    hashes = []
    with storage.create(path) as sink:
        for piece in pieces:
            content, digest = data(piece), xxhash.xxh3_128()
            sink.write(piece.head)
            for start in range(0, len(content), CACHE_BYTES):
                block = content[start : start + CACHE_BYTES]
                digest.update(block)
                sink.write(block)
            sink.write(piece.tail)
            hashes.append(digest.hexdigest())
    return record_pieces(pieces, hashes)


def write_and_check(
    storage: Storage, path: str, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
) -> FileRecord:
    """`write_pieces`, then every byte is read from where it is stored. Raises ``OSError`` when one is another
    than was written."""
    record = write_pieces(storage, path, pieces, data)
    _check_written(storage, path, record)
    return record


def put_and_check(storage: Storage, path: str, content: bytes) -> FileRecord:
    """The same for a small file that is no pieces."""
    storage.put(path, content)
    record = record_plain(content)
    _check_written(storage, path, record)
    return record


def _check_written(storage: Storage, path: str, record: FileRecord) -> None:
    if problems := check_file(storage, path, record, past_cache=True):
        raise OSError(f"read back other bytes than were written: {path}: {problems[0]}")


def check_file(
    storage: Storage,
    path: str,
    record: FileRecord,
    told: Callable[[int], None] = lambda count: None,
    past_cache: bool = False,
) -> list[str]:
    """What is wrong with a file: a line for each chunk that is not as it was written."""
    size = storage.size(path)
    if size is None:
        return ["missing"]
    if size != record.bytes:
        return [f"{size} bytes instead of {record.bytes}"]
    reader = _Reader(storage, path, size, told, past_cache)
    if record.xxh3_128 is not None:
        same = reader.hash_of(record.bytes) == record.xxh3_128
        return [] if same else [_CHANGED]
    problems = []
    for number, chunk in enumerate(record.chunks):
        head, data, tail = reader.take(chunk.head), reader.hash_of(chunk.bytes), reader.take(chunk.tail)
        if data != chunk.xxh3_128 or hash_of(head, tail) != chunk.envelope:
            problems.append(f"chunk {number} ({chunk}): {_CHANGED}")
    return problems


class _Reader:
    """A file from its start to its end, in large blocks."""

    def __init__(
        self, storage: Storage, path: str, size: int, told: Callable[[int], None], past_cache: bool
    ) -> None:
        self._path, self._told = path, told
        self._read = storage.read_stored if past_cache else storage.read_into
        self._block = aligned_memory(min(size, _READ_BYTES if storage.is_near else _FAR_READ_BYTES))
        self._next = self._begin = self._end = 0

    def _more(self, wanted: int) -> memoryview:
        """The next bytes, at least one and at most ``wanted``."""
        if self._begin == self._end:
            self._begin, self._end = 0, self._read(self._path, self._next, self._block)
            if not self._end:
                raise OSError(f"{self._path} ends at byte {self._next}")
            self._next += self._end
            self._told(self._end)
        found = self._block[self._begin : min(self._end, self._begin + wanted)]
        self._begin += len(found)
        return found

    def take(self, count: int) -> bytes:
        """The next bytes."""
        found = bytearray()
        while len(found) < count:
            found += self._more(count - len(found))
        return bytes(found)

    def hash_of(self, count: int) -> str:
        """Of the next bytes."""
        digest = xxhash.xxh3_128()
        while count:
            block = self._more(count)
            digest.update(block)
            count -= len(block)
        return digest.hexdigest()
