"""Whether a corpus is what was written: every byte of every file, and that the files agree."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from myriad.data.indexed import IndexedShard
from myriad.data.manifest import MANIFEST_FILE, FileRecord, Manifest, ShardRecord, hash_file, read_manifest
from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from myriad.errors import BadInputError

__all__ = ["Problem", "verify_corpus"]


class Problem(NamedTuple):
    """One thing that is wrong."""

    file: str
    what: str


def verify_corpus(folder: Path, done: Callable[[int, int], None] = lambda _, __: None) -> list[Problem]:
    """Everything wrong with a corpus; ``done`` hears (bytes read, of all). `BadInputError` if it is none."""
    if not (folder / MANIFEST_FILE).is_file():
        read_manifest(folder)  # says what is allowed
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
    return None if found == record else "has other bytes than were written"


def _check_names(folder: Path, manifest: Manifest) -> list[Problem]:
    """Shards that nobody wrote would be read by whoever lists the folder."""
    present = {path.name for pattern in ("*.bin", "*.idx") for path in folder.glob(pattern)}
    return [Problem(name, "is not part of the corpus") for name in sorted(present - set(manifest.files))]


def _check_shard(folder: Path, record: ShardRecord) -> list[Problem]:
    shard = IndexedShard(folder / record.name)
    what = shard.check_index()
    if what is None and (len(shard.tokens), shard.num_documents) != (record.tokens, record.documents):
        what = f"holds {len(shard.tokens)} tokens in {shard.num_documents} documents, unlike the manifest"
    return [Problem(f"{record.name}.idx", what)] if what else []
