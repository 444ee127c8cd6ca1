"""What a checkpoint should hold, byte for byte: ``manifest.json``, without which a folder is no checkpoint.

    {"version": 2, "step": 20, "attempt": 1, "time": ..., "layout": {...}, "data": {...}, "versions": {...},
     "progress": {...}, "tensors": {NAME: {"shape", "dtype"}},
     "files": {".metadata": {"bytes", "xxh3_128"},
               "__0_0.distcp": {"bytes", "chunks": [{"tensor", "offsets", "shape", "start", "head", "bytes",
                                                     "tail", "xxh3_128", "envelope"}, ...]}},
     "xxh3_128": of all that}

A chunk is one piece of a tensor: ``xxh3_128`` of its data, the same in memory as on disk, and ``envelope`` of
the head and tail that torch needs around it. Every byte of every file is covered by a hash. No torch here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import xxhash

from myriad.checkpoint.direct import Buffer
from myriad.checkpoint.piece import Piece, Shape, place_in_file

__all__ = [
    "MANIFEST",
    "Chunk",
    "FileRecord",
    "Manifest",
    "encode_manifest",
    "hash_of",
    "parse_manifest",
    "record_pieces",
    "record_plain",
]

MANIFEST, VERSION = "manifest.json", 2


def hash_of(*parts: Buffer) -> str:
    """128 bits of xxh3, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Chunk:
    """One piece in a file."""

    tensor: str
    offsets: Shape
    shape: Shape
    start: int
    """First byte of the head."""
    head: int
    """Bytes before the data."""
    bytes: int
    """Of the data."""
    tail: int
    xxh3_128: str
    envelope: str

    @property
    def data_start(self) -> int:
        """First byte of the data."""
        return self.start + self.head

    @property
    def stop(self) -> int:
        """First byte after it."""
        return self.data_start + self.bytes + self.tail

    def __str__(self) -> str:
        return f"{self.tensor}{list(self.shape)} at {list(self.offsets)}"


@dataclass(frozen=True)
class FileRecord:
    """One file: of pieces, or plain with one hash."""

    bytes: int
    chunks: tuple[Chunk, ...] = ()
    xxh3_128: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        if self.xxh3_128 is not None:
            return {"bytes": self.bytes, "xxh3_128": self.xxh3_128}
        return {"bytes": self.bytes, "chunks": [asdict(chunk) for chunk in self.chunks]}

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "FileRecord":
        """`as_json` undone."""
        chunks = (
            Chunk(**chunk | {key: tuple(chunk[key]) for key in ("offsets", "shape")})
            for chunk in value.get("chunks", ())
        )
        return cls(value["bytes"], tuple(chunks), value.get("xxh3_128"))


def record_pieces(pieces: Sequence[Piece], hashes: Sequence[str]) -> FileRecord:
    """The file that `myriad.checkpoint.writing` makes of pieces whose data have these hashes."""
    chunks = tuple(
        Chunk(
            piece.tensor,
            piece.offsets,
            piece.shape,
            start,
            len(piece.head),
            piece.num_bytes,
            len(piece.tail),
            data_hash,
            hash_of(piece.head, piece.tail),
        )
        for (piece, start), data_hash in zip(place_in_file(pieces), hashes, strict=True)
    )
    return FileRecord(sum(piece.file_bytes for piece in pieces), chunks)


def record_plain(content: bytes) -> FileRecord:
    """A file that is no pieces."""
    return FileRecord(len(content), xxh3_128=hash_of(content))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint should hold."""

    step: int
    attempt: int
    """Which start of the run's ranks wrote it: an older one may not commit over a newer."""
    time: float
    """Of the commit, seconds since the epoch."""
    progress: Mapping[str, Any]
    """Where the run was, as the trainer wrote it."""
    layout: Mapping[str, Any]
    """Of the ranks that wrote it; any other can read it."""
    data: Mapping[str, Any]
    """Position in the training data."""
    versions: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]
    """``shape`` and ``dtype`` by name."""
    files: Mapping[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """By tensor."""
        return {name: tuple(tensor["shape"]) for name, tensor in self.tensors.items()}

    def chunks(self) -> Iterator[tuple[str, Chunk]]:
        """Every chunk with its file."""
        for name, file in self.files.items():
            for chunk in file.chunks:
                yield name, chunk

    def stamped(self, time: float) -> "Manifest":
        """With the time of its commit."""
        return replace(self, time=time)


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's content, with the hash over all of it."""
    files = {name: file.as_json() for name, file in manifest.files.items()}
    value: dict[str, Any] = {"version": VERSION} | dict(vars(manifest)) | {"files": files}
    value.pop("shapes", None)
    return json.dumps(value | {"xxh3_128": _hash_of_value(value)}, indent=1).encode()


def _hash_of_value(value: Mapping[str, Any]) -> str:
    return hash_of(json.dumps(value, sort_keys=True).encode())


def parse_manifest(content: bytes) -> Manifest:
    """Raises ``ValueError`` for anything but the bytes that were written, or a newer version."""
    try:
        value = json.loads(content)
        is_right = isinstance(value, dict) and value.pop("xxh3_128", None) == _hash_of_value(value)
    except RecursionError:
        is_right = False
    if not is_right:
        raise ValueError("its bytes changed after it was written")
    version = value.pop("version")
    if version != VERSION:
        raise ValueError(f"of version {version}; this program reads version {VERSION}")
    files = {name: FileRecord.parse(file) for name, file in value.pop("files").items()}
    return Manifest(files=files, **value)
