"""The manifest of a prepared corpus. It is written last, so a folder without it is not a corpus.

``manifest.json`` is canonical: its bytes follow from its content. It contains the hash of its own content, so
a flipped byte in it is found like one in any other file.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.errors import BadInputError

__all__ = [
    "MANIFEST_FILE",
    "FileRecord",
    "Manifest",
    "ShardRecord",
    "Split",
    "hash_file",
    "parse_manifest",
    "read_manifest",
]

MANIFEST_FILE = "manifest.json"
Split = Literal["train", "validation"]

_SELF = "content_xxh3_128"
_BLOCK_BYTES = 1 << 22
_MOST = 2**62
"""Largest size and number of tokens."""


class FileRecord(Config):
    """Size and hash of a file as it was written."""

    size_bytes: int = Field(ge=0, le=_MOST)
    """Size of the file."""
    xxh3_128: str
    """Hash of the file's bytes."""


class ShardRecord(Config):
    """The record of one ``.bin``/``.idx`` pair."""

    name: str
    """Name of both files without their suffix."""
    split: Split
    """Split to which the shard belongs."""
    tokens: int = Field(ge=0, le=_MOST)
    """Number of tokens, including one end of document for each document."""
    documents: int = Field(ge=0, le=_MOST)
    """Number of documents in the shard."""


class Manifest(Config):
    """The content of a whole corpus."""

    format: Literal["myriad-corpus-1", "myriad-corpus-2"] = "myriad-corpus-1"
    """Format version; it changes when an older reader would misread the corpus. 2: some tokens have no loss
    (`myriad.data.loss_mask`)."""
    fingerprint: str
    """Fingerprint of the tokenizer."""
    vocabulary: int
    """Vocabulary size of the tokenizer."""
    end_of_document: int
    """Token after each document."""
    shards: tuple[ShardRecord, ...]
    """Shards in the order of their tokens."""
    text_bytes: dict[Split, int]
    """UTF-8 bytes of the documents of each split."""
    skipped: dict[str, int] = Field(default_factory=dict)
    """Records left out because their text is ``null`` or ``empty``."""
    files: dict[str, FileRecord]
    """Every file of the folder but this one."""
    plan: dict[str, Any]
    """Inputs and options that the corpus was made from, for comparison and for users."""

    def of(self, split: Split) -> list[ShardRecord]:
        """Return the shards of one split."""
        return [shard for shard in self.shards if shard.split == split]

    def num_tokens(self, split: Split) -> int:
        """Return the number of tokens of one split."""
        return sum(shard.tokens for shard in self.of(split))

    def num_documents(self, split: Split) -> int:
        """Return the number of documents of one split."""
        return sum(shard.documents for shard in self.of(split))

    def write(self, folder: Path) -> None:
        """Write the manifest atomically to disk, which makes the folder a corpus."""
        partial = folder / f".{MANIFEST_FILE}.partial"
        with partial.open("wb") as file:
            file.write(_canonical(self.model_dump(mode="json")))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST_FILE)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus. Raises `BadInputError` when it is missing or not what was written."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise BadInputError(
            "corpus", str(folder), f"no {MANIFEST_FILE}; a folder made by `myriad data prepare`"
        )
    return parse_manifest(path.read_bytes(), str(folder))


def parse_manifest(raw: bytes, corpus: str) -> Manifest:
    """Parse the content of ``manifest.json``. Raises `BadInputError`, which names the corpus, when it is
    not what was written."""
    try:
        content = json.loads(raw)
        content.pop(_SELF)
        manifest = Manifest.model_validate(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError) as error:
        reason = " ".join(str(error).split()[:40])
        raise BadInputError("corpus", corpus, f"{MANIFEST_FILE} is corrupt: {reason}") from None
    if _canonical(content) != raw:
        raise BadInputError(
            "corpus", corpus, f"{MANIFEST_FILE} is corrupt: its bytes differ from those written"
        )
    for name in (*manifest.files, *(shard.name for shard in manifest.shards)):
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise BadInputError("corpus", corpus, f"{MANIFEST_FILE} names {name!r}, no file of its folder")
    return manifest


def hash_file(path: Path) -> FileRecord:
    """Return the size and hash of a file, which is read in blocks."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())


def _canonical(content: dict[str, Any]) -> bytes:
    body = json.dumps(content, indent=1, sort_keys=True)
    own = xxhash.xxh3_128(body.encode()).hexdigest()
    return (json.dumps({_SELF: own, **content}, indent=1, sort_keys=True) + "\n").encode()
