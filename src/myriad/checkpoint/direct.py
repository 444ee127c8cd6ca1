"""Local files past the page cache (``O_DIRECT``). No torch here.

A checkpoint is written once and read after a crash, if ever. Through the cache every byte costs the kernel a
copy and every 4 KiB a page, processor time that training wants where cores are scarce; what was cached has to
go. Past it whole blocks go from aligned memory to the disk and back; what is read is what the disk has.
Where a file system knows no such access the same bytes go through the cache.
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
"""What offsets, sizes and addresses are multiples of: no disk asks for more."""
_BUFFER_BYTES = 2**22
_COPY_BYTES = 2**16
"""A copy of more lets other threads run meanwhile."""


def aligned_memory(num_bytes: int) -> memoryview:
    """At least so many bytes, zeros, as `read_direct` wants them."""
    blocks = max(1, -(-num_bytes // _BLOCK_BYTES))
    return memoryview(mmap.mmap(-1, blocks * _BLOCK_BYTES))


def _open(path: Path, flags: int) -> int:
    """A descriptor, direct where the file system knows that."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)


def _leave_direct(descriptor: int, error: OSError) -> None:
    """From now on through the cache, when it is that which was refused; raises any other ``error``."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


class DirectSink:
    """A new file, or a new content, gathered in a buffer and written in whole blocks; `finish` comes last."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._buffer = aligned_memory(_BUFFER_BYTES)
        self._filled = self._size = 0

    def write(self, content: Buffer) -> None:
        """Adds bytes."""
        view = memoryview(content).cast("B")
        while len(view):
            count = min(len(view), _BUFFER_BYTES - self._filled)
            _copy(self._buffer[self._filled : self._filled + count], view[:count])
            self._filled += count
            view = view[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def finish(self) -> None:
        """The rest, and everything on the disk."""
        self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Whatever has become of it."""
        os.close(self._descriptor)

    def _flush(self) -> None:
        whole = -(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES
        done = 0
        while done < whole:
            try:
                done += os.pwrite(self._descriptor, self._buffer[done:whole], self._size + done)
            except OSError as error:
                _leave_direct(self._descriptor, error)
        self._size += self._filled
        if self._filled < whole:
            os.ftruncate(self._descriptor, self._size)
        self._filled = 0


def _copy(into: memoryview, source: memoryview) -> None:
    if len(source) < _COPY_BYTES or source.readonly:
        into[:] = source
    else:
        to, from_ = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, source))
        ctypes.memmove(to, from_, len(source))


def read_direct(path: Path, start: int, into: memoryview) -> int:
    """Fills `aligned_memory` from byte ``start``, a multiple of its blocks; gives how much there was."""
    descriptor, done = _open(path, os.O_RDONLY), 0
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # for what goes through the cache
        while done < len(into):
            try:
                count = os.preadv(descriptor, [into[done:]], start + done)
            except OSError as error:  # nothing direct here, or not from the middle of a block
                _leave_direct(descriptor, error)
                continue
            if not count:
                break
            done += count
        return done
    finally:
        os.close(descriptor)
