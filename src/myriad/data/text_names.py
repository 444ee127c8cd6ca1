"""Names of files of text, and of corpora that are streamed from such files. This module imports little."""

import os
from typing import Literal

from myriad.system.remote_urls import is_url

__all__ = ["COMPRESSED", "KINDS", "RAW", "Kind", "is_streamed", "name_ending"]

Kind = Literal["text", "jsonl", "parquet"]

KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}
"""Kinds of files, by the endings of their names."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files, after those."""
RAW = "raw:"
"""Prefix of the name of a corpus that says that it is text."""
_EMBEDDED = "embedded"


def name_ending(path: str) -> str:
    """Return the ending of a file's name that gives its kind."""
    is_http = path.startswith(("http://", "https://"))
    name = (path.partition("?")[0] if is_http else path).rpartition("/")[2]
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return "." + name.rpartition(".")[2].lower()


def is_streamed(name: str) -> bool:
    """Return whether the name of a corpus is that of text, not of a prepared corpus."""
    if name.startswith(RAW):
        return True
    if name == _EMBEDDED or (name_ending(name) not in KINDS and not any(mark in name for mark in "*?[")):
        return False
    path = os.path.expanduser(name.rstrip("/"))
    return is_url(name) or not (os.path.isdir(path) or os.path.isfile(f"{path}.idx"))
