"""Sources of text: files, folders, globs and any fsspec URL, of text, JSONL and Parquet, cut into pieces of
work.

Pieces do not depend on the number of workers. They are byte ranges of plain files, row groups of Parquet, and
whole compressed files. A line belongs to the range in which it starts. A text file is one document; one
larger than `LONGEST_TEXT_BYTES` is cut at line ends into documents of that size.
"""

import codecs
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any, Literal, NamedTuple

import fsspec
import fsspec.compression
import fsspec.core
import fsspec.utils

from myriad.data.http_input import HttpInput, http_info, is_http
from myriad.data.records import RecordError, RecordForm
from myriad.errors import BadInputError, MyriadError
from myriad.system.remote_urls import open_url
from myriad.units import format_bytes

__all__ = [
    "LONGEST_LINE_BYTES",
    "LONGEST_TEXT_BYTES",
    "FileRange",
    "Piece",
    "SourceFile",
    "cut_pieces",
    "find_sources",
    "read_documents",
]

LONGEST_TEXT_BYTES = 1 << 20
"""Largest text file that is one document."""
LONGEST_LINE_BYTES = 1 << 28
"""Largest line of JSONL; a longer one is refused, because a line is in memory as a whole."""

Kind = Literal["text", "jsonl", "parquet"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


_HTTP_BLOCK_BYTES = 1 << 20
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class SourceFile(NamedTuple):
    """One file that holds documents."""

    url: str
    kind: Kind
    size_bytes: int
    stamp: str
    """Value that changes with the file, as far as its store reports changes."""


class FileRange(NamedTuple):
    """A part of a file: bytes, or row groups of Parquet; with ``stop`` None, up to the end."""

    url: str
    kind: Kind
    start: int
    stop: int | None


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
        if is_http(path) and _suffix(path) in _KINDS and "*" not in path:
            paths = [path]
        elif any(mark in path for mark in "*?[") and not fs.isfile(path):  # a name may contain such marks
            paths = sorted(name for name in fs.glob(path) if fs.isfile(name))
        elif _suffix(path) in _KINDS and fs.isfile(path):  # asking HTTP for a folder downloads the file
            paths = [path]
        elif fs.isdir(path):
            paths = sorted(name for name in fs.find(path) if _known(name.removeprefix(path)))
        else:
            paths = [path] if fs.isfile(path) else []
        sources = [_source(fs, name) for name in paths]
    except ValueError as error:
        raise BadInputError("INPUT", given, f"cannot be read: {error}") from None
    except Exception as error:
        raise _named(given, error) from None
    if not sources:
        known = ", ".join(_KINDS)
        raise BadInputError(
            "INPUT", given, f"no such file, or no {known} in the folder; a glob takes any file"
        )
    return sources


def _source(fs: Any, path: str) -> SourceFile:
    info = http_info(path) if is_http(path) else fs.info(path)
    if info["type"] != "file":  # reading a pipe or a device may never end
        raise BadInputError("INPUT", path, "is a pipe or a device; a regular file, or a folder of them")
    if path.endswith(".zst") and "zstd" not in fsspec.available_compressions():
        raise BadInputError("INPUT", path, "reading .zst needs: pip install zstandard; or unpack it")
    stamps = [str(info[key]) for key in ("mtime", "ETag", "LastModified", "last_modified") if key in info]
    return SourceFile(fs.unstrip_protocol(path), _kind(path), int(info["size"] or 0), " ".join(stamps))


def _suffix(path: str) -> str:
    name = (path.partition("?")[0] if is_http(path) else path).rpartition("/")[2]
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return "." + name.rpartition(".")[2].lower()


def _kind(path: str) -> Kind:
    return _KINDS.get(_suffix(path), "text")


def _known(path: str) -> bool:
    """Return whether a file in a folder has a known kind and is not hidden."""
    return _suffix(path) in _KINDS and not any(part.startswith(".") for part in path.split("/"))


def cut_pieces(sources: Sequence[SourceFile], form: RecordForm, piece_bytes: int) -> list[Piece]:
    """Cut the sources into pieces, in the order of the corpus: small files together, large files in parts."""
    for source in sources:
        if source.kind == "text" and not form.is_text:
            allowed = "JSONL or Parquet, whose records have the fields that are asked for"
            raise BadInputError("INPUT", _name(source.url), allowed)
    pieces: list[Piece] = []
    spans: list[FileRange] = []
    size = 0
    for source in sources:
        for span, span_bytes in _cut(source, form, piece_bytes):
            if spans and size + span_bytes > piece_bytes:
                pieces.append(Piece(len(pieces), tuple(spans), size))
                spans, size = [], 0
            spans.append(span)
            size += span_bytes
    return [*pieces, Piece(len(pieces), tuple(spans), size)] if spans else pieces


def _cut(source: SourceFile, form: RecordForm, piece_bytes: int) -> Iterator[tuple[FileRange, int]]:
    whole_bytes = max(piece_bytes, LONGEST_TEXT_BYTES) if source.kind == "text" else piece_bytes
    if source.kind == "parquet":
        yield from _cut_parquet(source, form, piece_bytes)
    elif source.url.endswith(_COMPRESSED) or source.size_bytes <= whole_bytes:
        yield FileRange(source.url, source.kind, 0, None), source.size_bytes
    else:
        for start in range(0, source.size_bytes, piece_bytes):
            stop = min(start + piece_bytes, source.size_bytes)
            yield FileRange(source.url, source.kind, start, stop), stop - start


def _cut_parquet(source: SourceFile, form: RecordForm, piece_bytes: int) -> Iterator[tuple[FileRange, int]]:
    with _open(source.url, unpack=False) as file:
        metadata = _parquet(file, source.url, form).metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    start, size = 0, 0
    for group, group_bytes in enumerate(sizes):
        if size and size + group_bytes > piece_bytes:
            yield FileRange(source.url, "parquet", start, group), size
            start, size = group, 0
        size += group_bytes
    yield FileRange(source.url, "parquet", start, len(sizes)), size


def read_documents(span: FileRange, form: RecordForm, skipped: "Counter[str] | None" = None) -> Iterator[str]:
    """Yield the documents that start in a span. Raises `BadInputError` with the location.

    Records whose text is null or empty are left out, of every kind of file, and counted in ``skipped``.
    """
    counts = Counter[str]() if skipped is None else skipped
    try:
        documents: Iterator[str | None]
        if span.kind == "parquet":
            documents = _read_parquet(span, form)
        elif span.kind == "jsonl":
            documents = _read_jsonl(span, form)
        else:
            documents = _read_text(span)
        for document in documents:
            if document:
                yield document
            else:
                counts["null" if document is None else "empty"] += 1
    except Exception as error:
        raise _named(span.url, error) from None


def _named(url: str, error: Exception) -> Exception:
    """Turn an error about an unreadable input into a `BadInputError`; any other error stays as it is."""
    remote = "://" in url and not url.startswith("file://")  # remote stores have their own exception types
    unreadable = remote or isinstance(error, OSError | EOFError | ImportError | zlib.error | lzma.LZMAError)
    if isinstance(error, MyriadError) or not unreadable:
        return error
    return BadInputError("INPUT", _name(url), f"cannot be read: {error}")


def _name(url: str) -> str:
    """Return the name as a user would type it."""
    return url.removeprefix("file://")


def _not_utf8(span: FileRange, offset: int, error: UnicodeDecodeError) -> BadInputError:
    place = f"byte {offset + error.start} is {error.object[error.start]:#04x}"
    likely = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "ISO-8859-1"
    allowed = f"not UTF-8 ({place}): convert it, as by iconv -f {likely} -t UTF-8, or leave it out"
    return BadInputError("INPUT", _name(span.url), allowed)


def _lines(span: FileRange, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, line)`` for each line that starts in the span; a line over ``limit`` bytes comes in
    parts."""
    with _open(span.url) as file:
        position = span.start
        if span.start:
            file.seek(span.start - 1)
            position = span.start - 1 + _skip_line(file)
        whole = True
        while not whole or span.stop is None or position < span.stop:
            line = file.readline(limit)
            if not line:
                return
            yield position, line
            position += len(line)
            whole = line.endswith(b"\n")


@contextmanager
def _open(url: str, *, unpack: bool = True) -> Iterator[IO[bytes]]:
    """Open a file as bytes; compressed files are decompressed."""
    compression = fsspec.utils.infer_compression(url) if unpack else None
    with ExitStack() as opened:
        if is_http(url):
            raw: Any = opened.enter_context(io.BufferedReader(HttpInput(url), _HTTP_BLOCK_BYTES))
        elif url.startswith("file://"):  # five times as fast, which matters for many small files
            raw = opened.enter_context(open(_name(url), "rb", buffering=0))
        else:
            fs, path = open_url(url)
            raw = opened.enter_context(fs.open(path, "rb"))
        if compression is not None:
            raw = opened.enter_context(fsspec.compression.compr[compression](raw, mode="rb"))
        yield opened.enter_context(io.BufferedReader(raw))


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while part := file.readline(LONGEST_TEXT_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_text(span: FileRange) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    size, end = 0, span.start
    for offset, line in _lines(span, LONGEST_TEXT_BYTES):
        if size + len(line) > LONGEST_TEXT_BYTES and parts:
            yield "".join(parts)
            parts, size = [], 0
        text, end = _decode(decoder, span, offset, line), offset + len(line)
        parts.append(text.removeprefix("\ufeff") if offset == 0 else text)
        size += len(line)
    parts.append(_decode(decoder, span, end))
    if (last := "".join(parts)) or not span.start:  # no line may start in a later span
        yield last


def _decode(decoder: codecs.IncrementalDecoder, span: FileRange, offset: int, line: bytes = b"") -> str:
    """Decode a line, after the bytes left over from the previous one. Without a line, no bytes may be
    left."""
    left = len(decoder.getstate()[0])
    try:
        return decoder.decode(line, final=not line)
    except UnicodeDecodeError as error:
        raise _not_utf8(span, offset - left, error) from None


def _read_jsonl(span: FileRange, form: RecordForm) -> Iterator[str | None]:
    for offset, line in _lines(span, LONGEST_LINE_BYTES + 1):
        if len(line) > LONGEST_LINE_BYTES:
            longest = f"at most {format_bytes(LONGEST_LINE_BYTES)}: one document a line{_array_hint(line)}"
            raise BadInputError("INPUT", _name(span.url), f"line at byte {offset} is longer; {longest}")
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode().removeprefix("\ufeff"))
        except UnicodeDecodeError as error:
            raise _not_utf8(span, offset, error) from None
        except (ValueError, RecursionError) as error:  # also for an integer of over 4,300 digits
            place = f"line at byte {offset} is not JSON that can be read: {error}{_array_hint(line)}"
            raise BadInputError("INPUT", _name(span.url), place) from None
        if not isinstance(record, dict):
            raise _no_text(span, offset, form, record, f"has no text under the key {form.key!r}")
        try:
            text = form.document(record)
        except RecordError as error:
            raise _no_text(span, offset, form, record, str(error)) from None
        if text is not None and (half := _HALF_PAIR.search(text)):
            place = f"line at byte {offset} has half of a surrogate pair, \\u{ord(half[0]):04x}: no such text"
            raise BadInputError("INPUT", _name(span.url), f"{place} exists in UTF-8; repair or leave it out")
        yield text


def _array_hint(line: bytes) -> str:
    return "; one record a line, as jq -c '.[]' makes of an array" if line.lstrip().startswith(b"[") else ""


def _no_text(span: FileRange, offset: int, form: RecordForm, record: object, why: str) -> BadInputError:
    fields = record.items() if isinstance(record, dict) and form.is_text else ()
    others = " or ".join(f"--key {name}" for name, value in fields if isinstance(value, str))
    allowed = f"line at byte {offset} {why}" + (f"; {others}?" if others else "")
    allowed += _array_hint(b"[" if isinstance(record, list) else b"")
    return BadInputError("INPUT", _name(span.url), allowed)


def _read_parquet(span: FileRange, form: RecordForm) -> Iterator[str | None]:
    import pyarrow as arrow

    with _open(span.url, unpack=False) as file:
        groups = list(range(span.start, span.stop or 0))
        opened = _parquet(file, span.url, form)
        where = f"row groups {span.start} to {groups[-1]}"
        try:
            for batch in opened.iter_batches(256, row_groups=groups, columns=form.columns):
                yield from map(form.document, batch.to_pylist())
        except UnicodeDecodeError as error:
            text = f"text that is not UTF-8 ({error}), in {where}"
            raise BadInputError("INPUT", _name(span.url), f"column {form.key} holds {text}") from None
        except RecordError as error:
            raise BadInputError("INPUT", _name(span.url), f"a record in {where} {error}") from None
        except arrow.ArrowException as error:
            raise BadInputError("INPUT", _name(span.url), f"damaged Parquet file: {error}") from None


def _parquet(file: IO[bytes], url: str, form: RecordForm) -> Any:
    """Return an open Parquet file, and check that it has the columns."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        opened = parquet.ParquetFile(file)
    except arrow.ArrowInvalid as error:
        raise BadInputError("INPUT", _name(url), f"not a Parquet file: {error}") from None
    schema = opened.schema_arrow
    for key in form.columns:
        if schema.names.count(key) != 1:
            has = f"{_name(url)} has the columns {', '.join(schema.names)}"
            raise BadInputError("--key", key, f"one column of the file: {has}")
        kind = schema.field(key).type
        values = kind.value_type if arrow.types.is_dictionary(kind) else kind
        is_text = values in (arrow.string(), arrow.large_string(), arrow.string_view())
        if not is_text and form.template is None:
            raise BadInputError("--key", key, f"column of {kind} in {_name(url)}; a column of text")
    return opened
