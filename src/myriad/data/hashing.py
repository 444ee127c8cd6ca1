"""Write block hashes: with a corpus when it is made, or later for one that has none.

    myriad data hash CORPUS    a prepared folder: each shard is compared with the manifest on the way
                               a Megatron prefix: nothing is known of its tokens, so what is there is recorded

Tokens are read once; ``NAME.blocks`` is written after them and the manifest last, so a kill leaves the corpus
as it was, or with files that the same command replaces.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from myriad.data.blocks import BLOCKS_SUFFIX, hash_blocks
from myriad.data.indexed import IndexedShard
from myriad.data.manifest import FileRecord, Manifest, hash_file, read_manifest
from myriad.errors import BadInputError

__all__ = ["add_block_hashes", "hash_prefix", "record_files"]


def record_files(folder: Path, shards: Iterable[str], others: Iterable[str]) -> dict[str, FileRecord]:
    """Write the block hashes of the shards; return the records of all their files and of ``others``."""
    records = {name: hash_file(folder / name) for name in others}
    for name in shards:
        records[f"{name}.bin"] = _write_blocks(folder / name)
        records |= {part: hash_file(folder / part) for part in (f"{name}.idx", f"{name}{BLOCKS_SUFFIX}")}
    return records


def _write_blocks(prefix: Path, expected: FileRecord | None = None) -> FileRecord:
    """Write ``NAME.blocks``; return the record of ``NAME.bin``. Raises `BadInputError` where that is not the
    ``expected`` one."""
    path = prefix.with_name(prefix.name + ".bin")
    hashes, whole = hash_blocks(path, IndexedShard(prefix).token_type)
    found = FileRecord(size_bytes=hashes.size_bytes, xxh3_128=whole)
    if expected is not None and found != expected:
        allowed = f"{path.name} has other bytes than were written; restore it before its hashes are recorded"
        raise BadInputError("shard", str(prefix), allowed)
    hashes.write(prefix.with_name(prefix.name + BLOCKS_SUFFIX))
    return found


def add_block_hashes(folder: Path, done: Callable[[int, int], None] = lambda _, __: None) -> Manifest:
    """Add block hashes to a prepared corpus; ``done`` takes the bytes hashed and all bytes. Raises
    `BadInputError` for a shard that is not as its manifest says."""
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
    """Write the block hashes of a Megatron corpus as it is now; return the record of its tokens."""
    return _write_blocks(prefix)
