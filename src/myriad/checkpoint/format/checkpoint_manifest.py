"""``manifest.json``: the exact content of a checkpoint, which is invalid without it. Without torch.

    {"version": 2, "step": 20, "attempt": 1, "time": ..., "layout": {...}, "data": {...}, "versions": {...},
     "progress": {...}, "tensors": {NAME: {"shape", "dtype"}},
     "files": {".metadata": {"bytes", "xxh3_128"},
               "__0_0.distcp": {"bytes", "chunks": [{"tensor", "offsets", "shape", "start", "head", "bytes",
                                                     "tail", "xxh3_128", "envelope"}, ...]}},
     "xxh3_128": of all that}

A chunk is one stored shard of a tensor. Its ``xxh3_128`` is the hash of the data, equal in memory and on
disk. Its ``envelope`` is the hash of the head and tail that torch needs around the data. Every byte of every
file is covered by a hash.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from myriad.checkpoint.format.stored_shard import Shape, StoredShard, offsets_in_file
from myriad.checkpoint.storage.direct_io import Buffer

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "MANIFEST",
    "CheckpointManifest",
    "StoredChunk",
    "StoredFile",
    "encode_manifest",
    "hash_of",
    "parse_manifest",
    "record_plain_file",
    "record_shards",
]

MANIFEST, VERSION = "manifest.json", 2
_BYTES_OF = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Size of an element of each type that is stored."""
_MOST = 2**62
"""Largest step, size, offset and length of a dimension."""
_MOST_SECONDS = 2**37
"""Latest time of a commit, in seconds since the epoch: some four thousand years."""
_FILE_NAME = re.compile(r"[^/\\\0]{1,128}")
_HASH = re.compile("[0-9a-f]{32}")


def hash_of(*parts: Buffer) -> str:
    """Return the xxh3 hash of 128 bits, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredChunk:
    """Record of one shard in a file."""

    tensor: str
    offsets: Shape
    shape: Shape
    start: int
    """Offset of the head in the file."""
    head: int
    """Size of the head, which precedes the data."""
    bytes: int
    """Size of the data."""
    tail: int
    xxh3_128: str
    envelope: str

    @property
    def data_start(self) -> int:
        """Offset of the data in the file."""
        return self.start + self.head

    @property
    def stop(self) -> int:
        """Offset of the first byte after the chunk."""
        return self.data_start + self.bytes + self.tail

    def __str__(self) -> str:
        return f"{self.tensor}{list(self.shape)} at {list(self.offsets)}"


@dataclass(frozen=True)
class StoredFile:
    """Record of one file: chunks with shards, or a plain file with one hash."""

    bytes: int
    chunks: tuple[StoredChunk, ...] = ()
    xxh3_128: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the JSON value for the manifest."""
        if self.xxh3_128 is not None:
            return {"bytes": self.bytes, "xxh3_128": self.xxh3_128}
        return {"bytes": self.bytes, "chunks": [dict(vars(chunk)) for chunk in self.chunks]}

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "StoredFile":
        """Return the record for a JSON value that `as_json` made."""
        chunks = (
            StoredChunk(**chunk | {key: tuple(chunk[key]) for key in ("offsets", "shape")})
            for chunk in value.get("chunks", ())
        )
        return cls(value["bytes"], tuple(chunks), value.get("xxh3_128"))


def record_shards(stored_shards: Sequence[StoredShard], hashes: Sequence[str]) -> StoredFile:
    """Return the record of a file that `verified_files` writes for shards with these hashes."""
    chunks = tuple(
        StoredChunk(
            shard.tensor,
            shard.offsets,
            shard.shape,
            start,
            len(shard.head),
            shard.num_bytes,
            len(shard.tail),
            data_hash,
            hash_of(shard.head, shard.tail),
        )
        for (shard, start), data_hash in zip(offsets_in_file(stored_shards), hashes, strict=True)
    )
    return StoredFile(sum(shard.file_bytes for shard in stored_shards), chunks)


def record_plain_file(content: bytes) -> StoredFile:
    """Return the record of a plain file, without shards."""
    return StoredFile(len(content), xxh3_128=hash_of(content))


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint: progress, layout, tensors and files."""

    step: int
    attempt: int
    """Attempt that wrote it; an older attempt may not commit over a newer one."""
    time: float
    """Time of the commit, in seconds since the epoch."""
    progress: Mapping[str, Any]
    """Training progress, as the trainer wrote it."""
    layout: Mapping[str, Any]
    """Layout of the ranks that wrote it; any other layout can read it."""
    data: Mapping[str, Any]
    """Position in the training data."""
    versions: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]
    """``shape`` and ``dtype`` of each tensor, by name."""
    files: Mapping[str, StoredFile]

    @property
    def num_bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Full shape of each tensor."""
        return {name: tuple(tensor["shape"]) for name, tensor in self.tensors.items()}

    def chunks(self) -> Iterator[tuple[str, StoredChunk]]:
        """Yield every chunk with the name of its file."""
        for name, file in self.files.items():
            for chunk in file.chunks:
                yield name, chunk

    def stamped(self, time: float) -> "CheckpointManifest":
        """Return a copy with the time of the commit."""
        return replace(self, time=time)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the content of the file, with a hash over all of it: a line for each key and each file. (With an
    indent, `json` would use its encoder in Python, which is ten times slower.)"""
    files = {name: file.as_json() for name, file in manifest.files.items()}
    value: dict[str, Any] = {"version": VERSION} | dict(vars(manifest)) | {"files": files}
    value.pop("shapes", None)
    texts = {key: json.dumps(part) for key, part in value.items()} | {"files": _by_line(files)}
    texts["xxh3_128"] = json.dumps(_hash_of_value(value))
    return ("{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}").encode()


def _by_line(files: Mapping[str, Any]) -> str:
    lines = (f"{json.dumps(name)}: {json.dumps(file)}" for name, file in files.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def _hash_of_value(value: Mapping[str, Any]) -> str:
    return hash_of(json.dumps(value, sort_keys=True).encode())


def parse_manifest(content: bytes) -> CheckpointManifest:
    """Parse a manifest. Raises ``ValueError`` if its bytes changed, its version is not supported, or it
    describes no checkpoint: the hash proves that nothing changed, not who wrote it."""
    try:
        value = json.loads(content)
        is_right = isinstance(value, dict) and value.pop("xxh3_128", None) == _hash_of_value(value)
    except RecursionError:
        is_right = False
    if not is_right:
        raise ValueError("its bytes changed after it was written")
    version = value.pop("version", None)
    if version != VERSION:
        raise ValueError(f"of version {version!r:.40}; this program reads version {VERSION}")
    manifest = _manifest_of(value)
    _check_numbers(manifest)
    sizes = {name: _tensor_bytes(name, tensor) for name, tensor in manifest.tensors.items()}
    for name, file in manifest.files.items():
        _check_file(name, file, manifest)
    stored: Counter[str] = Counter()
    for _, chunk in manifest.chunks():
        stored[chunk.tensor] += chunk.bytes
    for name, size in sizes.items():
        if stored[name] != size:
            raise _invalid(f"{name} is not whole: it has {_shown(size)} bytes, and its chunks {stored[name]}")
    return manifest


def _invalid(problem: str) -> ValueError:
    return ValueError(f"not a manifest: {problem}")


@cache
def _adapter() -> "TypeAdapter[CheckpointManifest]":
    from pydantic import TypeAdapter  # slow import, not needed to write

    return TypeAdapter(CheckpointManifest)


def _manifest_of(value: Mapping[str, Any]) -> CheckpointManifest:
    """Check the types of all fields. Raises ``ValueError`` with the first that is wrong."""
    from pydantic import ValidationError

    try:
        return _adapter().validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _invalid(f"{where if where.isprintable() else repr(where)}: {first['msg']}") from None


def _check_numbers(manifest: CheckpointManifest) -> None:
    for key, most in (("step", _MOST), ("attempt", _MOST), ("time", _MOST_SECONDS)):
        if not 0 <= getattr(manifest, key) <= most:  # false for NaN as well
            raise _invalid(f"{key} is {_shown(getattr(manifest, key))}: must be 0 to {most}")


def _shown(value: object) -> str:
    """Return a value in a few characters, however large it is."""
    if isinstance(value, int) and abs(value) > 2**80:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.80}"


def _tensor_bytes(name: str, tensor: Mapping[str, Any]) -> int:
    """Return the size of a tensor. Raises ``ValueError`` for a wrong name, shape or type."""
    if not name or not name.isprintable():
        raise _invalid(f"{name!r:.80} is not a name of a tensor")
    shape, dtype = tensor.get("shape"), tensor.get("dtype")
    if not isinstance(shape, list) or not all(type(one) is int and 0 <= one <= _MOST for one in shape):
        raise _invalid(
            f"{name}: the tensor's shape is {shape!r:.80}, not a list of whole numbers of 0 or more"
        )
    if not isinstance(dtype, str) or dtype not in _BYTES_OF:
        raise _invalid(f"{name}: the tensor's type is {dtype!r:.80}, not one of {', '.join(_BYTES_OF)}")
    return math.prod(shape) * _BYTES_OF[dtype]


def _check_file(name: str, file: StoredFile, manifest: CheckpointManifest) -> None:
    """Check that a file is in the checkpoint's folder, that its chunks are parts of known tensors, and that a
    hash covers each of its bytes."""
    if not _FILE_NAME.fullmatch(name) or not name.isprintable() or name in (".", "..", MANIFEST):
        raise _invalid(f"{name!r:.80} is not a file name")
    if not 0 <= file.bytes <= _MOST:
        raise _invalid(f"{name} has {_shown(file.bytes)} bytes")
    if file.xxh3_128 is not None:
        if file.chunks or not _HASH.fullmatch(file.xxh3_128):
            raise _invalid(f"{name} needs one hash of 32 hexadecimal digits, or chunks")
        return
    stop = 0
    for chunk in file.chunks:
        problem = _problem_of(chunk, manifest.tensors.get(chunk.tensor))
        if not problem and (chunk.start != stop or chunk.stop > file.bytes):
            place = f"bytes {_shown(chunk.start)} to {_shown(chunk.stop)} of {file.bytes}"
            problem = f"{place}; must begin at byte {stop}, where the chunk before it ends"
        if problem:
            raise _invalid(f"{name}: a chunk of {chunk.tensor!r:.80}: {problem}")
        stop = chunk.stop
    if stop != file.bytes:
        raise _invalid(f"{name} has {file.bytes} bytes, and its chunks {_shown(stop)}")


def _problem_of(chunk: StoredChunk, tensor: Mapping[str, Any] | None) -> str:
    """Return what is wrong with a chunk; empty: nothing."""
    if tensor is None:
        return "not a tensor of the checkpoint"
    full, dtype = tensor["shape"], tensor["dtype"]
    if not len(chunk.offsets) == len(chunk.shape) == len(full):
        return f"not a part of {full}"
    ends = zip(chunk.offsets, chunk.shape, full, strict=True)
    if any(first < 0 or count < 0 or first + count > size for first, count, size in ends):
        return f"not a part of {full}"
    if chunk.bytes != math.prod(chunk.shape) * _BYTES_OF[dtype]:
        return f"{_shown(chunk.bytes)} bytes of {dtype} for {list(chunk.shape)}"
    if not (0 <= chunk.head <= _MOST and 0 <= chunk.tail <= _MOST):
        return f"head and tail have {_shown(chunk.head)} and {_shown(chunk.tail)} bytes"
    if not (_HASH.fullmatch(chunk.xxh3_128) and _HASH.fullmatch(chunk.envelope)):
        return "its hashes must have 32 hexadecimal digits"
    return ""
