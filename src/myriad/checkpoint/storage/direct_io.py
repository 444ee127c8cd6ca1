"""Local file access that bypasses the page cache (``O_DIRECT``). Without torch.

A checkpoint is written once and read only after a failure. Through the page cache each byte costs the kernel
a copy and each 4 KiB a page allocation. If cores are scarce, training loses that processor time. The cache
also has to be evicted later. Direct access moves whole blocks between aligned memory and the disk, so a read
returns what is on the disk. On a file system without direct access, the same bytes go through the cache.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

__all__ = ["Buffer", "DirectSink", "aligned_memory", "read_direct"]

Buffer = bytes | bytearray | memoryview

_BLOCK_BYTES = 4096
"""Alignment of offsets, sizes and addresses; no disk requires more."""
_BUFFER_BYTES = 2**22
_COPY_BYTES = 2**16
"""Copies of at least this size release the GIL."""


def aligned_memory(num_bytes: int) -> memoryview:
    """Return at least ``num_bytes`` zero bytes, aligned for `read_direct`."""
    blocks = max(1, -(-num_bytes // _BLOCK_BYTES))
    return memoryview(mmap.mmap(-1, blocks * _BLOCK_BYTES))


def _open(path: Path, flags: int) -> int:
    """Open a file, with ``O_DIRECT`` if the file system supports it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)


def _leave_direct(descriptor: int, error: OSError) -> None:
    """Turn off ``O_DIRECT`` if ``error`` is a refusal of direct access; otherwise raise ``error``."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


class DirectSink:
    """Writes a file through a buffer, in whole blocks. Call `finish` last, then `close`."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._buffer = aligned_memory(_BUFFER_BYTES)
        self._filled = self._size = 0

    def write(self, content: Buffer) -> None:
        """Append bytes to the file, through the buffer."""
        view = memoryview(content).cast("B")
        while len(view):
            count = min(len(view), _BUFFER_BYTES - self._filled)
            _copy(self._buffer[self._filled : self._filled + count], view[:count])
            self._filled += count
            view = view[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write the rest of the buffer and sync the file to disk."""
        self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor, also after a failure."""
        os.close(self._descriptor)

    def _flush(self) -> None:
        rounded = -(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES
        done = 0
        while done < rounded:
            try:
                done += os.pwrite(self._descriptor, self._buffer[done:rounded], self._size + done)
            except OSError as error:
                _leave_direct(self._descriptor, error)
        self._size += self._filled
        if self._filled < rounded:
            os.ftruncate(self._descriptor, self._size)
        self._filled = 0


def _copy(into: memoryview, source: memoryview) -> None:
    if len(source) < _COPY_BYTES or source.readonly:
        into[:] = source
    else:
        to, from_ = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, source))
        ctypes.memmove(to, from_, len(source))


def read_direct(path: Path, start: int, into: memoryview) -> int:
    """Fill ``into``, which must be `aligned_memory`, from offset ``start``; return the number of bytes read.

    ``start`` must be a multiple of the block size."""
    descriptor, done = _open(path, os.O_RDONLY), 0
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # for reads that use the cache after all
        while done < len(into):
            try:
                count = os.preadv(descriptor, [into[done:]], start + done)
            except OSError as error:  # no direct access, or the offset is not aligned
                _leave_direct(descriptor, error)
                continue
            if not count:
                break
            done += count
        return done
    finally:
        os.close(descriptor)
