"""Hashes of a token file by block: ``NAME.blocks`` beside ``NAME.bin``, so that a read of a few kilobytes can
be verified without a pass over the file.

    NAME.blocks   "MYRBLK1\0"  u32 bytes of a block  u32 token type (as in NAME.idx)  u64 bytes of NAME.bin
                  u64[ceil(bytes / block)]  XXH3-64 of each block
                  16 bytes  XXH3-128 of all of the above

Little endian. The manifest of a prepared corpus holds the hash of this file too, so manifest, block hashes
and tokens form a tree. A Megatron corpus has no manifest; the file is verified by its own last 16 bytes. A
block is 64 KiB, which a random read of a mapped file brings in anyway (128 KiB of read-ahead in Linux). Its
hash costs one byte for 8 KiB of tokens.

Write block hashes: with a corpus when it is made, or later for one that has none. Verify a corpus: every byte
of every file, and the consistency of the files (`verify_corpus`).

    myriad data hash CORPUS    a prepared folder: each shard is compared with the manifest on the way
                               a Megatron prefix: there is nothing to compare; the present tokens are hashed

Tokens are read once. ``NAME.blocks`` is written after them and the manifest last, so a kill leaves the corpus
as it was, or with files that the same command replaces.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.corpus_manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    ShardRecord,
    hash_file,
    read_manifest,
)
from myriad.data.indexed import IndexedShard
from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from myriad.errors import BadInputError
from myriad.system.whole_file import write_whole

__all__ = [
    "BLOCKS_SUFFIX",
    "BLOCK_BYTES",
    "BlockHashes",
    "add_block_hashes",
    "hash_blocks",
    "hash_prefix",
    "record_files",
    "verify_corpus",
    "verify_prefix",
]

BLOCK_BYTES = 1 << 16
BLOCKS_SUFFIX = ".blocks"
_MAGIC = b"MYRBLK1\x00"
_HEADER = struct.Struct("<8sIIQ")
_OWN_BYTES = 16
_READ_BYTES = 1 << 22
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 26


@dataclass(frozen=True)
class BlockHashes:
    """Hashes of the blocks of one token file."""

    size_bytes: int
    """Size of the token file."""
    token_type: int
    """Code of the token type in Megatron's index."""
    hashes: NDArray[np.uint64]
    """XXH3-64 of each block, the last of which may be shorter."""
    block_bytes: int = BLOCK_BYTES

    def encode(self) -> bytes:
        """Return the content of ``NAME.blocks``."""
        head = _HEADER.pack(_MAGIC, self.block_bytes, self.token_type, self.size_bytes)
        body = head + self.hashes.astype("<u8").tobytes()
        return body + xxhash.xxh3_128_digest(body)

    def write(self, path: Path) -> None:
        """Write the hashes to ``NAME.blocks`` atomically."""
        write_whole(path, self.encode())

    @classmethod
    def parse(cls, raw: bytes) -> "BlockHashes":
        """Parse the content of ``NAME.blocks``. Raises ``ValueError`` with the reason."""
        if len(raw) < _HEADER.size + _OWN_BYTES or not raw.startswith(_MAGIC):
            raise ValueError("is not a file of block hashes")
        if xxhash.xxh3_128_digest(raw[:-_OWN_BYTES]) != raw[-_OWN_BYTES:]:
            raise ValueError("is corrupt: its bytes differ from those written")
        _, block_bytes, token_type, size = _HEADER.unpack_from(raw)
        hashes = np.frombuffer(raw[_HEADER.size : -_OWN_BYTES], "<u8")
        is_known = _SMALLEST_BLOCK <= block_bytes <= _LARGEST_BLOCK and block_bytes % 8 == 0
        if not is_known or len(hashes) != -(-size // block_bytes):
            raise ValueError(f"has {len(hashes)} hashes of blocks of {block_bytes} bytes for {size} bytes")
        return cls(size, token_type, hashes, block_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """Return the first byte and the size of a block."""
        start = number * self.block_bytes
        return start, min(self.block_bytes, self.size_bytes - start)

    def is_right(self, number: int, content: bytes | memoryview) -> bool:
        """Return whether these bytes are the ones that were written as a block."""
        return bool(xxhash.xxh3_64_intdigest(content) == int(self.hashes[number]))


def hash_blocks(path: Path, token_type: int) -> tuple[BlockHashes, str]:
    """Read a token file once, and return the hashes of its blocks and the XXH3-128 of the whole."""
    whole, size = xxhash.xxh3_128(), 0
    hashes: list[int] = []
    for part in _parts(path):
        whole.update(part)
        size += len(part)
        view = memoryview(part)
        hashes += [
            xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES])
            for start in range(0, len(view), BLOCK_BYTES)
        ]
    return BlockHashes(size, token_type, np.array(hashes, np.uint64)), whole.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    """Yield parts of equal size (but for the last), as hashing by block needs."""
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            yield part


def record_files(folder: Path, shards: Iterable[str], others: Iterable[str]) -> dict[str, FileRecord]:
    """Write the block hashes of the shards; return the records of all their files and of ``others``."""
    records = {name: hash_file(folder / name) for name in others}
    for name in shards:
        records[f"{name}.bin"] = _write_blocks(folder / name)
        records |= {part: hash_file(folder / part) for part in (f"{name}.idx", f"{name}{BLOCKS_SUFFIX}")}
    return records


def _write_blocks(prefix: Path, expected: FileRecord | None = None) -> FileRecord:
    """Write ``NAME.blocks``, and return the record of ``NAME.bin``. Raises `BadInputError` if it differs
    from ``expected``."""
    path = prefix.with_name(prefix.name + ".bin")
    hashes, whole = hash_blocks(path, IndexedShard(prefix).token_type)
    found = FileRecord(size_bytes=hashes.size_bytes, xxh3_128=whole)
    if expected is not None and found != expected:
        allowed = f"{path.name} is corrupt: its bytes differ from those written; restore it first"
        raise BadInputError("shard", str(prefix), allowed)
    hashes.write(prefix.with_name(prefix.name + BLOCKS_SUFFIX))
    return found


def add_block_hashes(folder: Path, done: Callable[[int, int], None] = lambda _, __: None) -> Manifest:
    """Add block hashes to a prepared corpus; ``done`` takes the bytes hashed and all bytes.

    Raises `BadInputError` for a shard that differs from its manifest.
    """
    manifest = read_manifest(folder)
    missing = [one.name for one in manifest.shards if f"{one.name}{BLOCKS_SUFFIX}" not in manifest.files]
    total, hashed = sum(manifest.files[f"{name}.bin"].size_bytes for name in missing), 0
    records = dict(manifest.files)
    for name in missing:
        hashed += _write_blocks(folder / name, records[f"{name}.bin"]).size_bytes
        records[f"{name}{BLOCKS_SUFFIX}"] = hash_file(folder / f"{name}{BLOCKS_SUFFIX}")
        done(hashed, total)
    if missing:
        manifest = manifest.model_copy(update={"files": records})
        manifest.write(folder)
    return manifest


def hash_prefix(prefix: Path) -> FileRecord:
    """Write the block hashes of a Megatron corpus in its present state, and return the record of its
    tokens."""
    return _write_blocks(prefix)


class _Problem(NamedTuple):
    """One error in a corpus, with its file."""

    file: str
    what: str


def verify_prefix(prefix: Path) -> list[_Problem]:
    """Return all errors in Megatron's files that have block hashes beside them (`myriad data hash`)."""
    blocks = prefix.with_name(prefix.name + BLOCKS_SUFFIX)
    if not blocks.is_file():
        allowed = f"has no manifest and no block hashes; myriad data hash {prefix} adds them"
        raise BadInputError("FOLDER", str(prefix), allowed)
    shard = IndexedShard(prefix)
    if problem := shard.check_index():
        return [_Problem(f"{prefix.name}.idx", problem)]
    try:
        known = BlockHashes.parse(blocks.read_bytes())
    except ValueError as error:
        return [_Problem(blocks.name, str(error))]
    tokens = prefix.with_name(prefix.name + ".bin")
    if known.size_bytes != tokens.stat().st_size:
        return [_Problem(tokens.name, f"has {tokens.stat().st_size} bytes instead of {known.size_bytes}")]
    where = _first_bad_block(tokens)
    return [_Problem(tokens.name, f"has other bytes than were hashed{where}")] if where else []


def verify_corpus(folder: Path, done: Callable[[int, int], None] = lambda _, __: None) -> list[_Problem]:
    """Return all errors in a corpus; ``done`` gets (bytes read, all bytes). Raises `BadInputError` if the
    folder is no corpus."""
    if not (folder / MANIFEST_FILE).is_file():
        read_manifest(folder)  # raises an error that explains what is allowed
    try:
        manifest = read_manifest(folder)
    except BadInputError as error:
        return [_Problem(MANIFEST_FILE, error.allowed)]
    problems = [*_check_bytes(folder, manifest, done), *_check_names(folder, manifest)]
    broken = {problem.file for problem in problems}
    for shard in manifest.shards:
        if not broken & {f"{shard.name}.bin", f"{shard.name}.idx"}:
            problems += _check_shard(folder, shard)
    if TOKENIZER_FILE not in broken and Tokenizer.load(folder).fingerprint != manifest.fingerprint:
        problems.append(_Problem(TOKENIZER_FILE, "is not the tokenizer that the corpus was made with"))
    return problems


def _check_bytes(folder: Path, manifest: Manifest, done: Callable[[int, int], None]) -> list[_Problem]:
    total, read = sum(record.size_bytes for record in manifest.files.values()), 0
    problems: list[_Problem] = []
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        names = list(manifest.files)
        checks = pool.map(_check_file, (folder / name for name in names), manifest.files.values())
        for name, what in zip(names, checks, strict=True):
            read += manifest.files[name].size_bytes
            done(read, total)
            if what:
                problems.append(_Problem(name, what))
    finally:
        pool.shutdown(
            cancel_futures=True
        )  # a Ctrl-C does not wait for files that no thread has begun to read
    return problems


def _check_file(path: Path, record: FileRecord) -> str | None:
    try:
        found = hash_file(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found.size_bytes != record.size_bytes:
        return f"has {found.size_bytes} bytes instead of {record.size_bytes}"
    return (
        None
        if found == record
        else f"is corrupt: its bytes differ from those written{_first_bad_block(path)}"
    )


def _first_bad_block(path: Path) -> str:
    """Return the first byte of the first damaged block and the number of damaged blocks, as the end of a
    sentence.

    Empty if unknown.
    """
    try:
        hashes = BlockHashes.parse(
            path.with_name(path.name.removesuffix(".bin") + BLOCKS_SUFFIX).read_bytes()
        )
        with path.open("rb") as file:
            bad = [
                number
                for number in range(len(hashes.hashes))
                if not hashes.is_right(number, file.read(hashes.block_bytes))
            ]
    except (OSError, ValueError):
        return ""
    return f" in {len(bad)} blocks, the first at byte {hashes.span(bad[0])[0]}" if bad else ""


def _check_names(folder: Path, manifest: Manifest) -> list[_Problem]:
    """Report shards that are not in the manifest, because programs that list the folder would read them."""
    present = {path.name for pattern in ("*.bin", "*.idx", "*.blocks") for path in folder.glob(pattern)}
    return [_Problem(name, "is not part of the corpus") for name in sorted(present - set(manifest.files))]


def _check_shard(folder: Path, record: ShardRecord) -> list[_Problem]:
    shard = IndexedShard(folder / record.name)
    what = shard.check_index()
    if what is None and (len(shard.tokens), shard.num_documents) != (record.tokens, record.documents):
        what = f"holds {len(shard.tokens)} tokens in {shard.num_documents} documents, unlike the manifest"
    return [_Problem(f"{record.name}.idx", what)] if what else []
