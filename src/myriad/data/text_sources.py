"""Sources of text: files, folders, globs and any fsspec URL, of text, JSONL and Parquet, cut into pieces of
work.

Pieces do not depend on the number of workers. They are byte ranges of plain files, row groups of Parquet, and
whole compressed files.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from myriad.data.file_documents import (
    LONGEST_TEXT_BYTES,
    FileRange,
    named_error,
    open_source,
    parquet_file,
    shown_name,
)
from myriad.data.http_input import http_info, is_http
from myriad.data.records import RecordForm
from myriad.data.text_names import COMPRESSED, KINDS, Kind, name_ending
from myriad.data.zstd_input import check_zstd
from myriad.errors import BadInputError
from myriad.system.remote_urls import open_url

__all__ = ["Piece", "SourceFile", "cut_pieces", "find_sources"]


class SourceFile(NamedTuple):
    """One file that holds documents."""

    url: str
    kind: Kind
    size_bytes: int
    stamp: str
    """Value that changes with the file, as far as its store reports changes."""


class Piece(NamedTuple):
    """A unit of work for one worker."""

    number: int
    spans: tuple[FileRange, ...]
    size_bytes: int


def find_sources(inputs: Sequence[str]) -> list[SourceFile]:
    """Return the files that the inputs name, in their order. Raises `BadInputError` for an input without
    files."""
    found: dict[str, SourceFile] = {}
    for given in inputs:
        for source in _expand(given):
            found.setdefault(source.url, source)
    return list(found.values())


def _expand(given: str) -> list[SourceFile]:
    try:
        if not given:
            raise BadInputError("INPUT", given, "a file, a folder, a glob or a URL")
        fs, path = open_url(given)
        if is_http(path) and name_ending(path) in KINDS and "*" not in path:
            paths = [path]
        elif any(mark in path for mark in "*?[") and not fs.isfile(path):  # a name may contain such marks
            paths = sorted(name for name in fs.glob(path) if fs.isfile(name))
        elif name_ending(path) in KINDS and fs.isfile(path):  # asking HTTP for a folder downloads the file
            paths = [path]
        elif fs.isdir(path):
            paths = sorted(name for name in fs.find(path) if _known(name.removeprefix(path)))
        else:
            paths = [path] if fs.isfile(path) else []
        sources = [_source(fs, name) for name in paths]
    except ValueError as error:
        raise BadInputError("INPUT", given, f"cannot be read: {error}") from None
    except Exception as error:
        raise named_error(given, error) from None
    if not sources:
        known = ", ".join(KINDS)
        raise BadInputError(
            "INPUT", given, f"no such file, or no {known} in the folder; a glob takes any file"
        )
    return sources


def _source(fs: Any, path: str) -> SourceFile:
    info = http_info(path) if is_http(path) else fs.info(path)
    if info["type"] != "file":  # reading a pipe or a device may never end
        raise BadInputError("INPUT", path, "is a pipe or a device; a regular file, or a folder of them")
    check_zstd(path)
    stamps = [str(info[key]) for key in ("mtime", "ETag", "LastModified", "last_modified") if key in info]
    return SourceFile(fs.unstrip_protocol(path), _kind(path), int(info["size"] or 0), " ".join(stamps))


def _kind(path: str) -> Kind:
    return KINDS.get(name_ending(path), "text")


def _known(path: str) -> bool:
    """Return whether a file in a folder has a known kind and is not hidden."""
    return name_ending(path) in KINDS and not any(part.startswith(".") for part in path.split("/"))


def cut_pieces(
    sources: Sequence[SourceFile], form: RecordForm, piece_bytes: int, *, cuts_parquet: bool = True
) -> list[Piece]:
    """Cut the sources into pieces, in the order of the corpus: small files together, large files in parts.

    ``cuts_parquet``: Parquet is cut at its row groups, for which the end of each file is read."""
    for source in sources:
        if source.kind == "text" and not form.is_text:
            allowed = "JSONL or Parquet, whose records have the fields that are asked for"
            raise BadInputError("INPUT", shown_name(source.url), allowed)
    pieces: list[Piece] = []
    spans: list[FileRange] = []
    size = 0
    for source in sources:
        is_cut = cuts_parquet and source.kind == "parquet"
        for span, span_bytes in (
            _cut_parquet(source, form, piece_bytes) if is_cut else _cut(source, piece_bytes)
        ):
            if spans and size + span_bytes > piece_bytes:
                pieces.append(Piece(len(pieces), tuple(spans), size))
                spans, size = [], 0
            spans.append(span)
            size += span_bytes
    return [*pieces, Piece(len(pieces), tuple(spans), size)] if spans else pieces


def _cut(source: SourceFile, piece_bytes: int) -> Iterator[tuple[FileRange, int]]:
    whole_bytes = max(piece_bytes, LONGEST_TEXT_BYTES) if source.kind == "text" else piece_bytes
    is_whole = source.kind == "parquet" or source.url.endswith(COMPRESSED)
    if is_whole or source.size_bytes <= whole_bytes:
        yield FileRange(source.url, source.kind, 0, None), source.size_bytes
    else:
        for start in range(0, source.size_bytes, piece_bytes):
            stop = min(start + piece_bytes, source.size_bytes)
            yield FileRange(source.url, source.kind, start, stop), stop - start


def _cut_parquet(source: SourceFile, form: RecordForm, piece_bytes: int) -> Iterator[tuple[FileRange, int]]:
    with open_source(source.url, unpack=False) as file:
        metadata = parquet_file(file, source.url, form).metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    start, size = 0, 0
    for group, group_bytes in enumerate(sizes):
        if size and size + group_bytes > piece_bytes:
            yield FileRange(source.url, "parquet", start, group), size
            start, size = group, 0
        size += group_bytes
    yield FileRange(source.url, "parquet", start, len(sizes)), size
