"""The embedded corpus, tokenized once for each Python and vocabulary, and kept in the user's cache.

Ranks, runs and tests may all request it at the same moment. One process builds it under a lock in a temporary
folder and renames the folder into place; the others wait for the lock and find it there. A kill leaves at
most a hidden partial folder, which the next build removes.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from myriad.data.block_hashes import BLOCKS_SUFFIX, add_block_hashes, record_files
from myriad.data.corpus_manifest import Manifest, ShardRecord, Split, read_manifest
from myriad.data.embedded import Document, embedded_documents, embedded_key, split_documents
from myriad.data.indexed import IndexedWriter, token_type
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = ["cache_folder", "prepare_embedded"]

_RECIPE = 2
"""Version of this module and `embedded`; increment it when the same Python would give other tokens."""
_BATCH_DOCUMENTS = 64


def cache_folder() -> Path:
    """Return the folder of derived files: ``$XDG_CACHE_HOME/myriad``, else ``~/.cache/myriad``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "myriad"


def prepare_embedded(
    cache: Path | None = None, vocabulary: int = 4096, progress: Callable[[str], None] | None = None
) -> Path:
    """Return the folder of the embedded corpus, and build it if necessary. ``progress`` gets a description
    of each stage."""
    root = cache or cache_folder()
    folder = root / f"embedded-{embedded_key()}-{vocabulary}-{_RECIPE}"
    if _is_whole(folder) and _has_blocks(folder):
        return folder
    with _lock(root, folder.name):
        if not _is_whole(folder):
            _build(folder, vocabulary, progress or (lambda _: None))
        elif not _has_blocks(folder):
            _add_blocks(folder, vocabulary, progress or (lambda _: None))
    return folder


def _has_blocks(folder: Path) -> bool:
    """Return whether block hashes exist, or cannot be added; an older version wrote none."""
    if not os.access(folder, os.W_OK):
        return True
    manifest = read_manifest(folder)
    return all(f"{shard.name}{BLOCKS_SUFFIX}" in manifest.files for shard in manifest.shards)


def _add_blocks(folder: Path, vocabulary: int, progress: Callable[[str], None]) -> None:
    """Add block hashes; rebuild a corpus that proves to be damaged."""
    try:
        add_block_hashes(folder)
    except BadInputError:
        _build(folder, vocabulary, progress)


def _is_whole(folder: Path) -> bool:
    """Return whether manifest and sizes agree; a cached corpus that lost bytes is rebuilt rather than
    refused."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == record.size_bytes for name, record in files.items())
    except (BadInputError, OSError):
        return False


@contextmanager
def _lock(root: Path, name: str) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BadInputError(
            "XDG_CACHE_HOME", str(root), f"a folder that can be written ({error.strerror})"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(folder: Path, vocabulary: int, progress: Callable[[str], None]) -> None:
    from myriad.data.tokenizer import Tokenizer

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    progress("reading the standard library")
    train, validation = split_documents(list(embedded_documents()))
    if not validation:
        raise BadInputError("data.corpus", "embedded", "this Python has no standard library source to read")
    progress("training the tokenizer")
    tokenizer = Tokenizer.train((document.text for document in train), vocabulary)
    tokenizer.save(partial)
    progress("tokenizing")
    shards = (
        _write_shard(partial, "train", train, tokenizer),
        _write_shard(partial, "validation", validation, tokenizer),
    )
    _manifest(partial, tokenizer, shards, {"train": train, "validation": validation}).write(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _write_shard(
    folder: Path, split: Split, documents: list[Document], tokenizer: "Tokenizer"
) -> ShardRecord:
    name = f"{split}-00000"
    with IndexedWriter(folder / name, token_type(tokenizer.vocabulary)) as writer:
        for start in range(0, len(documents), _BATCH_DOCUMENTS):
            batch = documents[start : start + _BATCH_DOCUMENTS]
            for tokens in tokenizer.encode_batch([document.text for document in batch]):
                writer.add([*tokens, tokenizer.end_of_document])
    return ShardRecord(name=name, split=split, tokens=writer.num_tokens, documents=writer.num_documents)


def _manifest(
    folder: Path,
    tokenizer: "Tokenizer",
    shards: tuple[ShardRecord, ...],
    documents: dict[Split, list[Document]],
) -> Manifest:
    from myriad.data.tokenizer import TOKENIZER_FILE

    return Manifest(
        fingerprint=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        shards=shards,
        text_bytes={split: sum(len(one.text.encode()) for one in some) for split, some in documents.items()},
        files=record_files(folder, [shard.name for shard in shards], [TOKENIZER_FILE]),
        plan={"source": "embedded"},
    )
