"""The embedded corpus: real text that exists on every machine, tokenized once and kept in the user's cache.

The text is the source and documentation of the installed Python standard library. Left out are tests (half
the bytes, and repetitive), installed packages, and tables (files full of digits). The language reference
inside ``pydoc_data`` is stored as escaped string literals; it is converted back to prose. Order and split
depend on names and sizes only, so every process of a run sees the same documents.

There is a cached corpus for each Python and vocabulary. Ranks, runs and tests may all request it at the
same moment. One process builds it under a lock in a temporary folder and renames the folder into place;
the others wait for the lock and find it there. A kill leaves at most a hidden partial folder, which the
next build removes.
"""

import ast
import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from myriad.data.block_hashes import BLOCKS_SUFFIX, add_block_hashes, record_files
from myriad.data.corpus_manifest import Manifest, ShardRecord, Split, read_manifest
from myriad.data.indexed import IndexedWriter, token_type
from myriad.errors import BadInputError
from myriad.system.state_folder import cache_folder

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = [
    "VALIDATION_SHARE",
    "Document",
    "embedded_documents",
    "embedded_key",
    "prepare_embedded",
    "split_documents",
]

_RECIPE = 2
"""Version of this module; increment it when the same Python would give other tokens."""
_BATCH_DOCUMENTS = 64


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


class Document(NamedTuple):
    """One text and its name."""

    name: str
    text: str


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


VALIDATION_SHARE = 0.03
"""Share of the text's bytes that is held out."""

_FOLDERS_LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "encodings", "ensurepip"} | {
    "site-packages",
    "dist-packages",
    "__pycache__",
}
_TABLE_DIGITS = 0.1
_TABLE_CHARACTERS = 8192
_TOPICS = "pydoc_data/topics.py"


def embedded_documents(root: Path | None = None) -> Iterator[Document]:
    """Yield the documents by name. ``root`` is the library's folder, by default this Python's."""
    root = root or _library_folder()
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        if name == _TOPICS:
            text = _topics_prose(text)
        if text.strip() and not _is_table(text):
            yield Document(name, text)


def embedded_key(root: Path | None = None) -> str:
    """Return a key of the text without reading it: Python's version, and every file's name and size."""
    return _key_of(root) if root is not None else _own_key()


@cache
def _own_key() -> str:
    """Return the key of the running library, which does not change meanwhile and has some 1,600 files."""
    return _key_of(_library_folder())


def _key_of(root: Path) -> str:
    listing = "".join(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n" for path in _files(root))
    return hashlib.blake2b(f"{sys.version_info[:3]}\n{listing}".encode(), digest_size=8).hexdigest()


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return ``(train, validation)``: whole documents, by the hashes of their names, up to the share."""
    budget = VALIDATION_SHARE * sum(len(document.text) for document in documents)
    held_out: set[str] = set()
    for document in sorted(documents, key=lambda one: hashlib.blake2b(one.name.encode()).digest()):
        if len(document.text) <= budget:
            held_out.add(document.name)
            budget -= len(document.text)
    train = [document for document in documents if document.name not in held_out]
    return train, [document for document in documents if document.name in held_out]


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _files(root: Path) -> list[Path]:
    """Return the Python files of the library itself."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _FOLDERS_LEFT_OUT and "config-" not in name
        ]
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and "_sysconfigdata" not in name
        ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_table(text: str) -> bool:
    digits = sum(map(text.count, "0123456789"))
    return len(text) > _TABLE_CHARACTERS and digits > _TABLE_DIGITS * len(text)


def _topics_prose(source: str) -> str:
    """Return the strings of ``topics = {"assert": "The ...", ...}``, joined."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    tables = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    values = [value.value for table in tables for value in table.values if isinstance(value, ast.Constant)]
    return "\n\n".join(value for value in values if isinstance(value, str))
