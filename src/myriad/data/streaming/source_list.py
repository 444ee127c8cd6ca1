"""The files of a streamed corpus, listed once for a run.

The order of samples follows from this list, so a run keeps it: ``streams/KEY/sources.json`` in its folder,
with the size and the stamp of each file. A resume lists the files again. New ones are ignored; one that is
missing or has changed is refused. The file contains the hash of its own content.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import xxhash
from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.data.http_input import is_http
from myriad.data.text_names import RAW, Kind
from myriad.data.text_sources import SourceFile, find_sources
from myriad.errors import BadInputError
from myriad.system.whole_file import read_regular, write_whole

__all__ = [
    "SourceList",
    "check_unchanged",
    "list_sources",
    "parse_sources",
    "read_sources",
    "stream_folder",
]

_FILE = "sources.json"
_SELF = "content_xxh3_128"
_MOST_BYTES = 1 << 30
"""Largest list that is read."""


class SourceList(Config):
    """The files of a streamed corpus, in their order."""

    format: Literal["myriad-stream-1"] = "myriad-stream-1"
    """Format version; it changes when an older reader would take the documents in another order."""
    name: str
    """The corpus, as in the job."""
    files: tuple[tuple[str, Kind, Annotated[int, Field(ge=0, le=2**62)], str], ...] = Field(min_length=1)
    """URL, kind, size in bytes and stamp of each file."""

    @property
    def sources(self) -> list[SourceFile]:
        """Files of the corpus, in the order in which they are read."""
        return [SourceFile(*one) for one in self.files]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, as they are stored."""
        return sum(size for _, _, size, _ in self.files)

    @cached_property
    def content(self) -> str:
        """Identifier that changes with the files."""
        return xxhash.xxh3_128(json.dumps([self.format, self.files]).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write the list into a folder, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": self.format, "name": self.name, _SELF: self.content}
        lines = ",\n".join(json.dumps(one) for one in self.files)
        write_whole(folder / _FILE, f'{json.dumps(content)[:-1]}, "files": [\n{lines}\n]}}\n')


def stream_folder(streams: Path, name: str) -> Path:
    """Return the folder of a corpus in the folder of a run's streams."""
    return streams / hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def list_sources(name: str) -> SourceList:
    """List the files of a corpus, sorted by their URLs. Raises `BadInputError`."""
    try:
        found = find_sources([name.removeprefix(RAW)])
    except BadInputError as error:
        raise BadInputError("data.corpus", name, error.allowed) from None
    files = tuple(sorted(tuple(one) for one in found if one.size_bytes or is_http(one.url)))
    if not files:
        raise BadInputError("data.corpus", name, "none of these files contains text")
    return SourceList(name=name, files=files)


def read_sources(folder: Path) -> SourceList | None:
    """Read the list in a folder; ``None`` if there is none. Raises `BadInputError` for a damaged one."""
    path = folder / _FILE
    try:
        raw = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadInputError("data.corpus", str(path), f"cannot be read: {error}") from None
    return parse_sources(raw, str(path))


def parse_sources(raw: bytes, name: str) -> SourceList:
    """Parse the content of ``sources.json``. Raises `BadInputError`, which gives its ``name``."""
    try:
        content = json.loads(raw)
        own = content.pop(_SELF)
        found = SourceList.model_validate(content)
        if found.content != own:
            raise ValueError("its bytes differ from those written")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError) as error:
        reason = " ".join(str(error).split()[:40])
        raise BadInputError("data.corpus", name, f"is corrupt: {reason}; restore it from a copy") from None
    return found


def check_unchanged(kept: SourceList, now: SourceList, path: Path) -> None:
    """Refuse files that have changed since a run listed them. Raises `BadInputError`."""
    present = {one.url: one for one in now.sources}
    for before in kept.sources:
        found = present.get(before.url)
        if found == before:
            continue
        if found is None:
            problem = "is missing"
        elif found.size_bytes != before.size_bytes:
            problem = f"has {found.size_bytes} bytes instead of {before.size_bytes}"
        else:
            problem = "has changed"
        file = before.url.removeprefix("file://")
        remedy = f"restore it, or remove {path / _FILE} to use the files as they are"
        allowed = f"{file} {problem} since the run began; {remedy}"
        raise BadInputError("data.corpus", kept.name, allowed)
