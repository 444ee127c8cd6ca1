"""Documents of one file, or of a part of it: text, JSONL or Parquet, also compressed, from any fsspec URL.

A line belongs to the range of bytes in which it starts. A text file is one document; one larger than
`LONGEST_TEXT_BYTES` is cut at line ends into documents of that size. Each document comes with the position
after it, from which a later read continues.
"""

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

from myriad.data.http_input import HttpInput, is_http
from myriad.data.range_input import RangeInput
from myriad.data.records import RecordError, RecordForm
from myriad.data.text_names import Kind
from myriad.data.zstd_input import ZSTD_ENDING, ZstdInput
from myriad.errors import BadInputError, MyriadError
from myriad.system.remote_urls import open_url
from myriad.units import format_bytes

__all__ = [
    "END_OF_FILE",
    "LONGEST_LINE_BYTES",
    "LONGEST_TEXT_BYTES",
    "FileRange",
    "Found",
    "ReadRules",
    "named_error",
    "open_source",
    "parquet_file",
    "read_documents",
    "read_found",
    "shown_name",
]

LONGEST_TEXT_BYTES = 1 << 20
"""Largest text file that is one document."""
LONGEST_LINE_BYTES = 1 << 28
"""Largest line of JSONL; a longer one is refused, because a line is in memory as a whole."""

END_OF_FILE = 2**62
"""Value of `Found.next` if the rest of the file cannot be read."""
_BLOCK_BYTES = 1 << 20
"""Bytes of one request to a server."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class FileRange(NamedTuple):
    """A part of a file: a range of bytes, or of Parquet's row groups. ``stop`` is ``None`` if it extends to
    the end of the file."""

    url: str
    kind: Kind
    start: int
    stop: int | None
    resume: int | None = None
    """`Found.next` of the document after which to continue; ``None``: read from the start."""


class Found(NamedTuple):
    """What was found in a span: a document, a record without text, or one that cannot be read."""

    document: str | None
    next: int
    """Where to continue after it: a byte of the unpacked file, or a row of a Parquet span."""
    problem: str = ""
    """Why it cannot be read; "": it can."""


class ReadRules(NamedTuple):
    """What is refused while documents are read."""

    longest_line_bytes: int = LONGEST_LINE_BYTES
    """Largest line of JSONL."""
    skips_bad: bool = False
    """Whether a record that cannot be read, and the rest of a damaged file, are found with their problem
    instead of raising it."""


def read_documents(span: FileRange, form: RecordForm, skipped: "Counter[str] | None" = None) -> Iterator[str]:
    """Yield the documents that start in a span. Raises `BadInputError` with the location.

    Records whose text is null or empty are left out, of every kind of file, and counted in ``skipped``.
    """
    counts = Counter[str]() if skipped is None else skipped
    for found in read_found(span, form, ReadRules(LONGEST_LINE_BYTES)):
        if found.document:
            yield found.document
        else:
            counts["null" if found.document is None else "empty"] += 1


def read_found(span: FileRange, form: RecordForm, rules: ReadRules = ReadRules()) -> Iterator[Found]:
    """Yield what starts in a span, each with the position after it. Raises `BadInputError` with the
    location."""
    try:
        if span.kind == "parquet":
            yield from _read_parquet(span, form, rules)
        elif span.kind == "jsonl":
            yield from _read_jsonl(span, form, rules)
        else:
            yield from _read_text(span)
    except Exception as error:
        if rules.skips_bad and _is_damage(error):
            yield Found(None, END_OF_FILE, str(named_error(span.url, error)))
        else:
            raise named_error(span.url, error) from None


def _is_damage(error: Exception) -> bool:
    """Return whether the content of a file is at fault, which no other read changes."""
    damaged = isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile)
    named = isinstance(error, BadInputError) and error.key == "INPUT"
    return damaged or named


def named_error(url: str, error: Exception) -> Exception:
    """Turn an error about an unreadable input into a `BadInputError`; any other error stays as it is."""
    remote = "://" in url and not url.startswith("file://")  # remote stores have their own exception types
    unreadable = remote or isinstance(error, OSError | EOFError | ImportError | zlib.error | lzma.LZMAError)
    if isinstance(error, MyriadError) or not unreadable:
        return error
    return BadInputError("INPUT", shown_name(url), f"cannot be read: {error}")


def shown_name(url: str) -> str:
    """Return the name as a user would type it."""
    return url.removeprefix("file://")


def _not_utf8(span: FileRange, offset: int, error: UnicodeDecodeError) -> BadInputError:
    place = f"byte {offset + error.start} is {error.object[error.start]:#04x}"
    likely = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "ISO-8859-1"
    allowed = f"not UTF-8 ({place}): convert it, as by iconv -f {likely} -t UTF-8, or leave it out"
    return BadInputError("INPUT", shown_name(span.url), allowed)


def _lines(span: FileRange, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, line)`` for each line that starts in the span; a line over ``limit`` bytes comes in
    parts."""
    with open_source(span.url) as file:
        position = span.start
        if span.resume is not None:
            position = span.resume
            _reach(file, position)
        elif span.start:
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
def open_source(url: str, *, unpack: bool = True) -> Iterator[IO[bytes]]:
    """Open a file as bytes; compressed files are decompressed."""
    import fsspec.compression
    import fsspec.utils

    compression = fsspec.utils.infer_compression(url) if unpack else None
    with ExitStack() as opened:
        if is_http(url):
            raw: Any = opened.enter_context(io.BufferedReader(HttpInput(url), _BLOCK_BYTES))
        elif url.startswith("file://"):  # five times as fast, which matters for many small files
            raw = opened.enter_context(open(shown_name(url), "rb", buffering=0))
        else:
            raw = opened.enter_context(io.BufferedReader(RangeInput(*open_url(url)), _BLOCK_BYTES))
        if unpack and url.endswith(ZSTD_ENDING):
            raw = opened.enter_context(ZstdInput(raw, shown_name(url)))
        elif compression is not None:
            raw = opened.enter_context(fsspec.compression.compr[compression](raw, mode="rb"))
        yield opened.enter_context(io.BufferedReader(raw))


def _reach(file: IO[bytes], position: int) -> None:
    """Continue at a position; what lies before it in a compressed file is unpacked again."""
    if file.seekable():
        file.seek(position)
        return
    while position > 0 and (skipped := file.read(min(position, _BLOCK_BYTES))):
        position -= len(skipped)


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while part := file.readline(LONGEST_TEXT_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_text(span: FileRange) -> Iterator[Found]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    size, end = 0, span.start if span.resume is None else span.resume
    for offset, line in _lines(span, LONGEST_TEXT_BYTES):
        if size + len(line) > LONGEST_TEXT_BYTES and parts:
            yield Found("".join(parts), offset - len(decoder.getstate()[0]))
            parts, size = [], 0
        text, end = _decode(decoder, span, offset, line), offset + len(line)
        parts.append(text.removeprefix("\ufeff") if offset == 0 else text)
        size += len(line)
    parts.append(_decode(decoder, span, end))
    if (last := "".join(parts)) or not end:  # no line may start in a later span
        yield Found(last, end)


def _decode(decoder: codecs.IncrementalDecoder, span: FileRange, offset: int, line: bytes = b"") -> str:
    """Decode a line, after the bytes left over from the previous one. Without a line, no bytes may be
    left."""
    left = len(decoder.getstate()[0])
    try:
        return decoder.decode(line, final=not line)
    except UnicodeDecodeError as error:
        raise _not_utf8(span, offset - left, error) from None


def _read_jsonl(span: FileRange, form: RecordForm, rules: ReadRules) -> Iterator[Found]:
    is_rest = False
    for offset, line in _lines(span, rules.longest_line_bytes + 1):
        is_first, is_rest = not is_rest, not line.endswith(b"\n")
        if not is_first or not line.strip():  # the rest of a line that was too long
            continue
        try:
            yield Found(_json_document(span, form, rules, offset, line), offset + len(line))
        except BadInputError as error:
            if not rules.skips_bad:
                raise
            yield Found(None, offset + len(line), str(error))


def _json_document(
    span: FileRange, form: RecordForm, rules: ReadRules, offset: int, line: bytes
) -> str | None:
    """Return the document of a line. Raises `BadInputError` with its place."""
    if len(line) > rules.longest_line_bytes:
        longest = f"at most {format_bytes(rules.longest_line_bytes)}: one document a line{_array_hint(line)}"
        raise BadInputError("INPUT", shown_name(span.url), f"line at byte {offset} is longer; {longest}")
    try:
        record = json.loads(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise _not_utf8(span, offset, error) from None
    except (ValueError, RecursionError) as error:  # also for an integer of over 4,300 digits
        place = f"line at byte {offset} is not JSON that can be read: {error}{_array_hint(line)}"
        raise BadInputError("INPUT", shown_name(span.url), place) from None
    if not isinstance(record, dict):
        raise _no_text(span, offset, form, record, f"has no text under the key {form.key!r}")
    try:
        text = form.document(record)
    except RecordError as error:
        raise _no_text(span, offset, form, record, str(error)) from None
    if text is not None and (half := _HALF_PAIR.search(text)):
        place = f"line at byte {offset} has half of a surrogate pair, \\u{ord(half[0]):04x}: no such text"
        raise BadInputError("INPUT", shown_name(span.url), f"{place} exists in UTF-8; repair or leave it out")
    return text


def _array_hint(line: bytes) -> str:
    return "; one record a line, as jq -c '.[]' makes of an array" if line.lstrip().startswith(b"[") else ""


def _no_text(span: FileRange, offset: int, form: RecordForm, record: object, why: str) -> BadInputError:
    fields = record.items() if isinstance(record, dict) and form.is_text else ()
    others = " or ".join(f"--key {name}" for name, value in fields if isinstance(value, str))
    allowed = f"line at byte {offset} {why}" + (f"; {others}?" if others else "")
    allowed += _array_hint(b"[" if isinstance(record, list) else b"")
    return BadInputError("INPUT", shown_name(span.url), allowed)


def _read_parquet(span: FileRange, form: RecordForm, rules: ReadRules) -> Iterator[Found]:
    import pyarrow as arrow

    with open_source(span.url, unpack=False) as file:
        opened = parquet_file(file, span.url, form)
        last = opened.metadata.num_row_groups if span.stop is None else span.stop
        groups, row, done = list(range(span.start, last)), 0, span.resume or 0
        while groups and row + (num_rows := opened.metadata.row_group(groups[0]).num_rows) <= done:
            groups, row = groups[1:], row + num_rows
        where = f"row groups {span.start} to {last - 1}"
        try:
            for batch in opened.iter_batches(256, row_groups=groups, columns=form.columns) if groups else ():
                for record in batch.to_pylist():
                    row += 1
                    if row > done:
                        yield _parquet_found(span, form, rules, record, row, where)
        except UnicodeDecodeError as error:
            text = f"text that is not UTF-8 ({error}), in {where}"
            raise BadInputError("INPUT", shown_name(span.url), f"column {form.key} holds {text}") from None
        except arrow.ArrowException as error:
            raise BadInputError("INPUT", shown_name(span.url), f"damaged Parquet file: {error}") from None


def _parquet_found(
    span: FileRange, form: RecordForm, rules: ReadRules, record: Mapping[str, Any], row: int, where: str
) -> Found:
    try:
        return Found(form.document(record), row)
    except RecordError as error:
        problem = BadInputError("INPUT", shown_name(span.url), f"a record in {where} {error}")
        if not rules.skips_bad:
            raise problem from None
        return Found(None, row, str(problem))


def parquet_file(file: IO[bytes], url: str, form: RecordForm) -> Any:
    """Return an open Parquet file, and check that it has the columns."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        opened = parquet.ParquetFile(file)
    except arrow.ArrowInvalid as error:
        raise BadInputError("INPUT", shown_name(url), f"not a Parquet file: {error}") from None
    schema = opened.schema_arrow
    for key in form.columns:
        if schema.names.count(key) != 1:
            has = f"{shown_name(url)} has the columns {', '.join(schema.names)}"
            raise BadInputError("--key", key, f"one column of the file: {has}")
        kind = schema.field(key).type
        values = kind.value_type if arrow.types.is_dictionary(kind) else kind
        is_text = values in (arrow.string(), arrow.large_string(), arrow.string_view())
        if not is_text and form.template is None:
            raise BadInputError("--key", key, f"column of {kind} in {shown_name(url)}; a column of text")
    return opened
