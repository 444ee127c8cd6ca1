"""Storage of durable checkpoints: a local folder, or a URL that fsspec opens (S3, HDFS, ...). Without torch.

A file is written once the context of `Storage.create` has ended (local: fsync; object stores: the upload is
complete). `Storage.put` replaces a small file atomically. Folders are created on demand.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from myriad.checkpoint.storage.direct_io import Buffer, DirectSink, read_direct
from myriad.errors import BadInputError
from myriad.system.remote_urls import open_url
from myriad.system.whole_file import opened_to_read

__all__ = ["CACHE_BYTES", "FileSink", "OnBlock", "Storage", "open_storage"]

CACHE_BYTES = 2**19
"""Block size of copies with hashing. It fits a core's private cache, so memory is read once."""
_PATTERN = "*?["
"""Wildcards of fsspec's ``rm``. Files with these characters in their names are removed one by one."""
_UPLOAD_BYTES = 2**24
"""Size of one part of an upload to an object store."""


OnBlock = Callable[[memoryview], object]


def _ignore_block(block: memoryview) -> None:
    pass


class FileSink(Protocol):
    """A file that is being written."""

    def write(self, content: Buffer) -> None:
        """Append bytes to the file."""


class Storage(Protocol):
    """A tree of files. Paths are relative and use ``/``. Methods raise ``OSError`` on failure."""

    url: str
    """Location, as the user would write it."""
    is_near: bool
    """Whether data that one process has read is cached for other processes of the machine."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; empty if it does not exist."""
        ...

    def size(self, path: str) -> int | None:
        """Return the size of a file; ``None``: it does not exist."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a small file."""
        ...

    def read_into(self, path: str, start: int, into: memoryview, on_block: OnBlock = _ignore_block) -> int:
        """Fill ``into`` with the bytes from ``start`` on; return the number of bytes read.

        ``on_block`` is called with each block just after it was filled, while it is in the processor's
        cache."""
        ...

    def read_stored(self, path: str, start: int, into: memoryview) -> int:
        """Like `read_into`, but bypass caches as far as the storage allows it.

        ``start`` and ``into`` must be aligned as for `myriad.checkpoint.storage.direct_io.read_direct`."""
        ...

    def create(self, path: str) -> contextlib.AbstractContextManager[FileSink]:
        """Create or replace a file. It is on disk when the context ends."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Replace a small file atomically. It is on disk when this returns."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a whole folder, if it exists."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a folder; it replaces ``new`` if that exists."""
        ...


def open_storage(url: str | Path) -> Storage:
    """Return the storage of a path or URL.

    Raises `BadInputError` if the scheme is unknown, its package is not installed, or credentials are
    missing."""
    text = str(url)
    scheme, mark, rest = text.partition("://")
    if scheme == "file" and mark and not rest.startswith("/"):
        raise BadInputError("checkpoint.url", text, "must have an absolute path: file:///FOLDER")
    if not mark or scheme == "file":
        return LocalStorage(Path(rest if mark else text))
    try:
        fs, root = open_url(text, use_listings_cache=False)  # other processes write here too
    except (ImportError, ValueError, OSError) as error:
        raise BadInputError("checkpoint.url", text, f"cannot be opened: {_one_line(error)}") from None
    return RemoteStorage(text, fs, root)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class LocalStorage:
    """A folder on this machine or on a mounted file system."""

    def __init__(self, root: Path) -> None:
        self.root, self.url, self.is_near = root, str(root), True

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ELOOP:  # a cycle of symbolic links
                return []
            raise

    def size(self, path: str) -> int | None:
        try:
            return (self.root / path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str) -> bytes:
        with opened_to_read(self.root / path) as handle, open(handle, "rb", closefd=False) as file:
            return file.read()

    def read_into(self, path: str, start: int, into: memoryview, on_block: OnBlock = _ignore_block) -> int:
        with opened_to_read(self.root / path) as handle:
            done = 0
            while block := into[done : done + CACHE_BYTES]:
                if not (count := os.preadv(handle, [block], start + done)):
                    break
                on_block(block[:count])
                done += count
        return done

    def read_stored(self, path: str, start: int, into: memoryview) -> int:
        return read_direct(self.root / path, start, into)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[FileSink]:
        target = self.root / path
        _make_folder(target.parent)
        with contextlib.closing(DirectSink(target)) as sink:
            yield sink
            sink.finish()

    def put(self, path: str, content: bytes) -> None:
        target = self.root / path
        draft = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with self.create(str(draft.relative_to(self.root))) as sink:
                sink.write(content)
            draft.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)

    def rename(self, old: str, new: str) -> None:
        self.remove(new)
        (self.root / old).rename(self.root / new)
        _sync_folder(self.root)


def _make_folder(path: Path) -> None:
    """Create a folder, with its directory entry on disk."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteStorage:
    """Storage that fsspec reaches.

    Object stores have no folders and no rename, and replace only whole objects. That is sufficient, because
    writing the manifest commits a checkpoint."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.is_near = False
        self.url, self._fs, self._root = url.rstrip("/"), fs, root.rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Convert any exception of the storage back end to an ``OSError``."""
        try:
            yield
        except (OSError, BadInputError):
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {_one_line(error)}") from error

    def names(self, folder: str = "") -> list[str]:
        with self._plain_errors():
            try:
                found = self._fs.ls(self._path(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
            except TypeError:  # a file system without a cache of listings
                found = self._fs.ls(self._path(folder), detail=False)
            names = {path.rstrip("/").rpartition("/")[2] for path in found}
            return sorted(names - {"", self._path(folder).rpartition("/")[2]})

    def size(self, path: str) -> int | None:
        with self._plain_errors():
            try:
                self._fs.invalidate_cache()
                return int(self._fs.info(self._path(path))["size"] or 0)
            except FileNotFoundError:
                return None

    def read(self, path: str) -> bytes:
        with self._plain_errors():
            return bytes(self._fs.cat_file(self._path(path)))

    def read_into(self, path: str, start: int, into: memoryview, on_block: OnBlock = _ignore_block) -> int:
        with self._plain_errors():
            found = self._fs.cat_file(self._path(path), start=start, end=start + len(into))
        into[: len(found)] = found
        on_block(into[: len(found)])
        return len(found)

    def read_stored(self, path: str, start: int, into: memoryview) -> int:
        return self.read_into(path, start, into)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[FileSink]:
        with self._plain_errors():
            with contextlib.suppress(NotImplementedError):
                self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)
            with self._fs.open(self._path(path), "wb", block_size=_UPLOAD_BYTES) as file:
                yield _RemoteSink(file)

    def put(self, path: str, content: bytes) -> None:
        with self._plain_errors():
            self._fs.pipe_file(self._path(path), content)

    def remove(self, path: str) -> None:
        with self._plain_errors(), contextlib.suppress(FileNotFoundError):
            if any(mark in self._path(path) for mark in _PATTERN):
                for found in [*self._fs.find(self._path(path)), self._path(path)]:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(found)
            else:
                self._fs.rm(self._path(path), recursive=True)

    def rename(self, old: str, new: str) -> None:
        self.remove(new)
        with self._plain_errors():
            if self._renames_itself:
                self._fs.mv(self._path(old), self._path(new), recursive=True)
                return
            for path in self._fs.find(self._path(old)):
                self._fs.cp_file(path, self._path(new) + path.removeprefix(self._path(old)))
        self.remove(old)

    @property
    def _renames_itself(self) -> bool:
        """Whether the file system has its own ``mv``. That of fsspec copies a folder as an object (s3fs)."""
        from fsspec import AbstractFileSystem

        return type(self._fs).mv is not AbstractFileSystem.mv


class _RemoteSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _UPLOAD_BYTES):
            self._file.write(view[start : start + _UPLOAD_BYTES])
