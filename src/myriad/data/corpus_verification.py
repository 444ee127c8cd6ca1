"""Verify a corpus: every byte of every file, and the consistency of the files."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from myriad.data.block_hashes import BLOCKS_SUFFIX, BlockHashes
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

__all__ = ["Problem", "verify_corpus", "verify_prefix"]


class Problem(NamedTuple):
    """One error in a corpus, with its file."""

    file: str
    what: str


def verify_prefix(prefix: Path) -> list[Problem]:
    """Return all errors in Megatron's files that have block hashes beside them (`myriad data hash`)."""
    blocks = prefix.with_name(prefix.name + BLOCKS_SUFFIX)
    if not blocks.is_file():
        allowed = f"has no manifest and no block hashes; myriad data hash {prefix} adds them"
        raise BadInputError("FOLDER", str(prefix), allowed)
    shard = IndexedShard(prefix)
    if problem := shard.check_index():
        return [Problem(f"{prefix.name}.idx", problem)]
    try:
        known = BlockHashes.parse(blocks.read_bytes())
    except ValueError as error:
        return [Problem(blocks.name, str(error))]
    tokens = prefix.with_name(prefix.name + ".bin")
    if known.size_bytes != tokens.stat().st_size:
        return [Problem(tokens.name, f"has {tokens.stat().st_size} bytes instead of {known.size_bytes}")]
    where = _first_bad_block(tokens)
    return [Problem(tokens.name, f"has other bytes than were hashed{where}")] if where else []


def verify_corpus(folder: Path, done: Callable[[int, int], None] = lambda _, __: None) -> list[Problem]:
    """Return all errors in a corpus; ``done`` gets (bytes read, all bytes). Raises `BadInputError` if the
    folder is no corpus."""
    if not (folder / MANIFEST_FILE).is_file():
        read_manifest(folder)  # raises an error that explains what is allowed
    try:
        manifest = read_manifest(folder)
    except BadInputError as error:
        return [Problem(MANIFEST_FILE, error.allowed)]
    problems = [*_check_bytes(folder, manifest, done), *_check_names(folder, manifest)]
    broken = {problem.file for problem in problems}
    for shard in manifest.shards:
        if not broken & {f"{shard.name}.bin", f"{shard.name}.idx"}:
            problems += _check_shard(folder, shard)
    if TOKENIZER_FILE not in broken and Tokenizer.load(folder).fingerprint != manifest.fingerprint:
        problems.append(Problem(TOKENIZER_FILE, "is not the tokenizer that the corpus was made with"))
    return problems


def _check_bytes(folder: Path, manifest: Manifest, done: Callable[[int, int], None]) -> list[Problem]:
    total, read = sum(record.size_bytes for record in manifest.files.values()), 0
    problems: list[Problem] = []
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        names = list(manifest.files)
        checks = pool.map(_check_file, (folder / name for name in names), manifest.files.values())
        for name, what in zip(names, checks, strict=True):
            read += manifest.files[name].size_bytes
            done(read, total)
            if what:
                problems.append(Problem(name, what))
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


def _check_names(folder: Path, manifest: Manifest) -> list[Problem]:
    """Report shards that are not in the manifest, because programs that list the folder would read them."""
    present = {path.name for pattern in ("*.bin", "*.idx", "*.blocks") for path in folder.glob(pattern)}
    return [Problem(name, "is not part of the corpus") for name in sorted(present - set(manifest.files))]


def _check_shard(folder: Path, record: ShardRecord) -> list[Problem]:
    shard = IndexedShard(folder / record.name)
    what = shard.check_index()
    if what is None and (len(shard.tokens), shard.num_documents) != (record.tokens, record.documents):
        what = f"holds {len(shard.tokens)} tokens in {shard.num_documents} documents, unlike the manifest"
    return [Problem(f"{record.name}.idx", what)] if what else []
