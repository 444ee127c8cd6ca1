"""Where durable checkpoints lie: a local folder, or any URL that fsspec knows (S3, HDFS, ...). No torch here.

A file counts as written when `Storage.create` has closed it (local: fsync; object stores: the upload is
complete); `Storage.put` replaces a small file in one go. Folders need no making.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from myriad.checkpoint.direct import Buffer, DirectSink, read_direct
from myriad.errors import BadInputError
from myriad.remote_urls import open_url
from myriad.whole_file import opened_to_read

__all__ = ["CACHE_BYTES", "Seen", "Sink", "Storage", "open_storage"]

CACHE_BYTES = 2**19
"""Fits into a core's own cache: what is copied and hashed by blocks comes from memory once."""
_PATTERN = "*?["
"""Characters that fsspec's ``rm`` would match names with: those files are removed one by one."""
_UPLOAD_BYTES = 2**24
"""Part of an upload to an object store."""


Seen = Callable[[memoryview], object]


def _nobody_sees(block: memoryview) -> None:
    pass


class Sink(Protocol):
    """A file being written."""

    def write(self, content: Buffer) -> None:
        """Adds bytes."""


class Storage(Protocol):
    """A tree of files; paths are relative, with ``/``. Raises ``OSError`` for what goes wrong."""

    url: str
    """As the user would name it."""
    is_near: bool
    """What one process of a machine has read, the others have at hand."""

    def names(self, folder: str = "") -> list[str]:
        """Names of what lies in a folder; none when it is not there."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a file; ``None`` when it is not there."""
        ...

    def read(self, path: str) -> bytes:
        """A small file."""
        ...

    def read_into(self, path: str, start: int, into: memoryview, seen: Seen = _nobody_sees) -> int:
        """Fills ``into`` from byte ``start``; gives how much there was. ``seen``: each block when it has
        just been filled and is still in the processor's cache."""
        ...

    def read_stored(self, path: str, start: int, into: memoryview) -> int:
        """The same from where it is stored and from no cache, as far as that can be asked for; ``into`` and
        ``start`` as `myriad.checkpoint.direct` wants them."""
        ...

    def create(self, path: str) -> contextlib.AbstractContextManager[Sink]:
        """A new file, or a new content; on disk when the context ends."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """A small file by one atomic replacement, on disk when this returns."""
        ...

    def remove(self, path: str) -> None:
        """A file or a whole folder; nothing happens when it is not there."""
        ...

    def rename(self, old: str, new: str) -> None:
        """A folder, in place of whatever has the name."""
        ...


def open_storage(url: str | Path) -> Storage:
    """The storage of a path or URL. Raises `BadInputError` for a scheme that is unknown, whose package is
    missing, or that needs what is not there (credentials)."""
    text = str(url)
    scheme, mark, rest = text.partition("://")
    if scheme == "file" and mark and not rest.startswith("/"):
        raise BadInputError("checkpoint.url", text, "must have an absolute path: file:///FOLDER")
    if not mark or scheme == "file":
        return LocalStorage(Path(rest if mark else text))
    try:
        fs, root = open_url(text, use_listings_cache=False)  # others write here too
    except (ImportError, ValueError, OSError) as error:
        raise BadInputError("checkpoint.url", text, f"cannot be opened: {_one_line(error)}") from None
    return RemoteStorage(text, fs, root)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class LocalStorage:
    """A folder of this machine, or of a file system that it has mounted."""

    def __init__(self, root: Path) -> None:
        self.root, self.url, self.is_near = root, str(root), True

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link that leads nowhere
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

    def read_into(self, path: str, start: int, into: memoryview, seen: Seen = _nobody_sees) -> int:
        with opened_to_read(self.root / path) as handle:
            done = 0
            while block := into[done : done + CACHE_BYTES]:
                if not (count := os.preadv(handle, [block], start + done)):
                    break
                seen(block[:count])
                done += count
        return done

    def read_stored(self, path: str, start: int, into: memoryview) -> int:
        return read_direct(self.root / path, start, into)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Sink]:
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
    """With its entry in the folder above on disk."""
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
    """What fsspec reaches. Object stores have no folders, no rename, and replace whole objects only: all of
    that fits, since a checkpoint counts from the moment its manifest is there."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.is_near = False
        self.url, self._fs, self._root = url.rstrip("/"), fs, root.rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Whatever a store raises as an ``OSError``."""
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

    def read_into(self, path: str, start: int, into: memoryview, seen: Seen = _nobody_sees) -> int:
        with self._plain_errors():
            found = self._fs.cat_file(self._path(path), start=start, end=start + len(into))
        into[: len(found)] = found
        seen(into[: len(found)])
        return len(found)

    def read_stored(self, path: str, start: int, into: memoryview) -> int:
        return self.read_into(path, start, into)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Sink]:
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
        """Whether there is more to it than fsspec's copying, which takes a folder for an object (s3fs)."""
        from fsspec import AbstractFileSystem

        return type(self._fs).mv is not AbstractFileSystem.mv


class _RemoteSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _UPLOAD_BYTES):
            self._file.write(view[start : start + _UPLOAD_BYTES])
