"""Write stored shards to a file and verify the file by reading it back. Without torch.

The bytes on disk are not always those that were written. So after the fsync the cache is dropped, every byte
is read from the device, and its hash is compared with the hash of the source memory.
"""

from collections.abc import Callable, Sequence

import xxhash

from myriad.checkpoint.format.checkpoint_manifest import StoredFile, hash_of, record_plain_file, record_shards
from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.storage.direct_io import aligned_memory
from myriad.checkpoint.storage.storage_backends import CACHE_BYTES, Storage

__all__ = ["check_file", "put_and_check", "write_and_check", "write_pieces"]

_READ_BYTES, _FAR_READ_BYTES = 2**22, 2**26
"""Size of one read from a disk and from a remote store."""
_CHANGED = "its bytes changed after it was written"


def write_pieces(
    storage: Storage,
    path: str,
    stored_shards: Sequence[StoredShard],
    data: Callable[[StoredShard], memoryview],
) -> StoredFile:
    """Write the file of one rank; it is on disk when this returns.

    ``data`` returns the bytes of a shard; they are hashed while they are written."""
    hashes = []
    with storage.create(path) as sink:
        for shard in stored_shards:
            content, digest = data(shard), xxhash.xxh3_128()
            sink.write(shard.head)
            for start in range(0, len(content), CACHE_BYTES):
                block = content[start : start + CACHE_BYTES]
                digest.update(block)
                sink.write(block)
            sink.write(shard.tail)
            hashes.append(digest.hexdigest())
    return record_shards(stored_shards, hashes)


def write_and_check(
    storage: Storage,
    path: str,
    stored_shards: Sequence[StoredShard],
    data: Callable[[StoredShard], memoryview],
) -> StoredFile:
    """Write a file with `write_pieces`, then verify every stored byte. Raises ``OSError`` on a mismatch."""
    record = write_pieces(storage, path, stored_shards, data)
    _check_written(storage, path, record)
    return record


def put_and_check(storage: Storage, path: str, content: bytes) -> StoredFile:
    """Write and verify a small plain file. Raises ``OSError`` on a mismatch."""
    storage.put(path, content)
    record = record_plain_file(content)
    _check_written(storage, path, record)
    return record


def _check_written(storage: Storage, path: str, record: StoredFile) -> None:
    if problems := check_file(storage, path, record, past_cache=True):
        raise OSError(f"the bytes read back differ from those written: {path}: {problems[0]}")


def check_file(
    storage: Storage,
    path: str,
    record: StoredFile,
    on_read: Callable[[int], None] = lambda count: None,
    past_cache: bool = False,
) -> list[str]:
    """Return the problems of a file, one line per bad chunk; empty: it is as written.

    ``on_read(count)`` is called after each read of ``count`` bytes. ``past_cache``: bypass the page cache."""
    size = storage.size(path)
    if size is None:
        return ["missing"]
    if size != record.bytes:
        return [f"{size} bytes instead of {record.bytes}"]
    reader = _SequentialReader(storage, path, size, on_read, past_cache)
    if record.xxh3_128 is not None:
        same = reader.hash_of(record.bytes) == record.xxh3_128
        return [] if same else [_CHANGED]
    problems = []
    for number, chunk in enumerate(record.chunks):
        head, data, tail = reader.take(chunk.head), reader.hash_of(chunk.bytes), reader.take(chunk.tail)
        if data != chunk.xxh3_128 or hash_of(head, tail) != chunk.envelope:
            problems.append(f"chunk {number} ({chunk}): {_CHANGED}")
    return problems


class _SequentialReader:
    """Reads a file sequentially, in large blocks."""

    def __init__(
        self, storage: Storage, path: str, size: int, on_read: Callable[[int], None], past_cache: bool
    ) -> None:
        self._path, self._on_read = path, on_read
        self._read = storage.read_stored if past_cache else storage.read_into
        self._block = aligned_memory(min(size, _READ_BYTES if storage.is_near else _FAR_READ_BYTES))
        self._next = self._begin = self._end = 0

    def _more(self, wanted: int) -> memoryview:
        """Return the next bytes: at least one, at most ``wanted``."""
        if self._begin == self._end:
            self._begin, self._end = 0, self._read(self._path, self._next, self._block)
            if not self._end:
                raise OSError(f"{self._path} ends at byte {self._next}")
            self._next += self._end
            self._on_read(self._end)
        found = self._block[self._begin : min(self._end, self._begin + wanted)]
        self._begin += len(found)
        return found

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        found = bytearray()
        while len(found) < count:
            found += self._more(count - len(found))
        return bytes(found)

    def hash_of(self, count: int) -> str:
        """Return the hash of the next ``count`` bytes."""
        digest = xxhash.xxh3_128()
        while count:
            block = self._more(count)
            digest.update(block)
            count -= len(block)
        return digest.hexdigest()
