"""Real text that exists on every machine: the source and documentation of the installed Python standard
library.

Left out are tests (half the bytes, and repetitive), installed packages, and tables (files full of digits).
The language reference inside ``pydoc_data`` is stored as escaped string literals; it is converted back to
prose. Order and split depend on names and sizes only, so every process of a run sees the same documents.
"""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["VALIDATION_SHARE", "Document", "embedded_documents", "embedded_key", "split_documents"]

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


class Document(NamedTuple):
    """One text and its name."""

    name: str
    text: str


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
