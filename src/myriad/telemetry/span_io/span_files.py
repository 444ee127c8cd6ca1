"""Read and write span files: Parquet with one row per span, in a run's folder ``spans/``.

    attempt-A-node-N-K.parquet       some seconds of one node (rank-R without a node agent), K = 0, 1, ...
    rank | step | name | stage | micro_batch | chunk | start_seconds | duration_seconds | attempt | node

Rows are sorted by rank and start. Each column then repeats few values, or holds numbers with equal leading
bytes, which are stored separately (BYTE_STREAM_SPLIT) and compressed by zstd. ``start_seconds`` counts from
the epoch (a float64: to a quarter of a microsecond), in a prediction from the iteration's start. In the other
columns, -1 means not applicable. A file appears when it is complete; a reader rejects an incomplete file or
one with other content.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from myriad.system.whole_file import opened_to_read, replacing
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch, check_names
from myriad.telemetry.span_io.span_records import RECORD, Records

if TYPE_CHECKING:
    import pyarrow as arrow

    from myriad.telemetry.spans import Span

__all__ = [
    "MAX_SPANS",
    "FileFacts",
    "read_facts",
    "read_span_file",
    "span_files",
    "span_schema",
    "write_span_file",
    "write_spans",
]

MAX_SPANS = 2**23
"""Maximum number of spans in a file that a reader accepts."""
_ROW_GROUP = 2**17
_MAX_SECONDS = 2**33
"""Maximum time since the epoch, in the year 2242."""
_SPLIT = {"start_seconds": "BYTE_STREAM_SPLIT", "duration_seconds": "BYTE_STREAM_SPLIT"}
_RANGES = ("rank", "step", "start_seconds", "attempt", "node")
"""Columns with minimum and maximum in the file, by which readers skip row groups."""
_COUNTS = ("rank", "step", "stage", "micro_batch", "chunk")


def span_schema() -> "arrow.Schema":
    """Return the columns of a span file and their types."""
    import pyarrow as arrow

    return arrow.schema(
        {
            "rank": arrow.int32(),
            "step": arrow.int64(),
            "name": arrow.dictionary(arrow.int32(), arrow.string()),
            "stage": arrow.int16(),
            "micro_batch": arrow.int16(),
            "chunk": arrow.int16(),
            "start_seconds": arrow.float64(),
            "duration_seconds": arrow.float32(),
            "attempt": arrow.int32(),
            "node": arrow.int32(),
        }
    )


def span_files(folder: Path) -> list[Path]:
    """Return the span files in a folder, oldest first; empty if the folder is missing."""
    try:
        found = [path for path in folder.iterdir() if path.suffix == ".parquet" and path.name[0] != "."]
    except OSError:
        return []
    return sorted(found, key=_sort_key)


def _sort_key(path: Path) -> tuple[list[int], str]:
    """Return a key that sorts by attempt, node and number, so that 10 follows 9."""
    return [int(digits) for digits in re.findall(r"\d{1,18}", path.name)], path.name


def write_span_file(path: Path, batch: SpanBatch, *, predicted: bool = False) -> None:
    """Write a span file, which appears when it is complete. Raises ``OSError`` and leaves no partial file."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    # No fsync: readers skip a file torn by a power cut, and checkpoints have priority on the disk.
    with replacing(path) as draft:
        with arrow.OSFile(str(draft), "wb") as file:
            parquet.write_table(
                _table(batch, predicted),
                file,
                compression="zstd",
                row_group_size=_ROW_GROUP,
                write_page_checksum=True,
                write_statistics=list(_RANGES),
                use_dictionary=[name for name in span_schema().names if name not in _SPLIT],
                column_encoding=_SPLIT,
            )


def _table(batch: SpanBatch, predicted: bool) -> "arrow.Table":
    import pyarrow as arrow

    records = batch.records[_order(batch.records)]
    schema, length = span_schema(), len(batch.records)
    columns: dict[str, Any] = {name: records[name] for name in _COUNTS}
    indices = arrow.array(records["name"].astype(np.int32))
    columns["name"] = arrow.DictionaryArray.from_arrays(indices, arrow.array(batch.names, arrow.string()))
    columns["start_seconds"] = records["start_ns"] / 1e9
    columns["duration_seconds"] = records["duration_ns"] / 1e9
    columns |= {"attempt": np.full(length, batch.attempt), "node": np.full(length, batch.node)}
    arrays = [
        columns[field.name] if field.name == "name" else arrow.array(columns[field.name], field.type)
        for field in schema
    ]
    facts = {"num_dropped": str(batch.num_dropped), "clock_error_seconds": repr(batch.clock_error_seconds)}
    facts |= {"predicted": "true"} if predicted else {}
    return arrow.Table.from_arrays(arrays, schema=schema.with_metadata(facts))


def _order(records: Records) -> Any:
    """Return the order by rank and start.

    A ring is ordered by ends, so in reverse order a parent comes before its children; stable sorting keeps
    this where both start at once. Nearly sorted input also sorts fast."""
    order = np.arange(len(records))[::-1]
    order = order[np.argsort(records["start_ns"][order], kind="stable")]
    return order[np.argsort(records["rank"][order], kind="stable")]


def read_span_file(path: Path) -> SpanBatch:
    """Read a file from `write_span_file`. Raises `BatchError` for any other file, ``OSError`` if it cannot be
    read."""
    with _opened(path) as reader:
        table = reader.read(span_schema().names, use_threads=False)
        dropped, error = _facts(reader)
    return _batch(table, dropped, error)


@dataclass(frozen=True)
class FileFacts:
    """Facts in the footer of a span file."""

    path: Path
    attempt: int
    node: int
    num_spans: int
    num_bytes: int
    num_dropped: int
    clock_error_seconds: float
    first_step: int
    last_step: int


def read_facts(path: Path) -> FileFacts:
    """Read the facts of a file without its spans. Raises the same errors as `read_span_file`."""
    with _opened(path) as reader:
        ranges = {name: _range(reader.metadata, name) for name in ("attempt", "node", "step")}
        (attempt, _), (node, _), steps = ranges["attempt"], ranges["node"], ranges["step"]
        return FileFacts(
            path, attempt, node, reader.metadata.num_rows, path.stat().st_size, *_facts(reader), *steps
        )


def _range(metadata: Any, name: str) -> tuple[int, int]:
    """Return the minimum and maximum of a column."""
    column = span_schema().get_field_index(name)
    groups = [metadata.row_group(index).column(column).statistics for index in range(metadata.num_row_groups)]
    known = [group for group in groups if group is not None and group.has_min_max]
    if len(known) < len(groups):
        raise BatchError(f"has no minimum and maximum of {name}")
    return min((int(one.min) for one in known), default=0), max((int(one.max) for one in known), default=-1)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with (
            opened_to_read(path) as handle,
            open(handle, "rb", closefd=False) as file,
            parquet.ParquetFile(file, read_dictionary=["name"], page_checksum_verification=True) as reader,
        ):
            _check(reader)
            yield reader
    except BatchError:
        raise
    except KeyError as error:  # a file without a column that is named at opening
        raise BatchError(f"has no column {_column(error)}") from None
    except (arrow.ArrowException, ValueError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk; pyarrow reports a damaged page without errno
        raise BatchError(f"not a complete span file: {_first_line(error)}") from None


def _column(error: KeyError) -> str:
    name = error.args[0] if error.args else ""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _facts(reader: Any) -> tuple[int, float]:
    facts = reader.metadata.metadata or {}
    try:
        dropped = int(facts.get(b"num_dropped", b"0"))
        error = float(facts.get(b"clock_error_seconds", b"0"))
    except ValueError:
        raise BatchError("num_dropped and clock_error_seconds: must be numbers") from None
    if dropped < 0 or not 0 <= error < math.inf:
        raise BatchError("num_dropped and clock_error_seconds: must be at least 0")
    return dropped, error


def _check(reader: Any) -> None:
    """Check size and columns before reading. Raises `BatchError`."""
    if reader.metadata.num_rows > MAX_SPANS:
        raise BatchError(f"{reader.metadata.num_rows} spans: at most {MAX_SPANS}")
    names = reader.schema_arrow.names
    if len(set(names)) < len(names):
        raise BatchError("has two columns with the same name")
    found = {field.name: field.type for field in reader.schema_arrow}
    for field in span_schema():
        if field.name not in found:
            raise BatchError(f"has no column {field.name}")
        if found[field.name] != field.type:
            raise BatchError(f"{field.name}: {found[field.name]}, must be {field.type}")


def _batch(table: "arrow.Table", dropped: int, error: float) -> SpanBatch:
    records = np.zeros(len(table), RECORD)
    if any(table[name].null_count for name in span_schema().names):
        raise BatchError("a value is missing")
    names = _fill_names(records, table)
    for name in _COUNTS:
        records[name] = _fits(name, table[name].to_numpy())
    for name in ("start", "duration"):
        seconds = table[f"{name}_seconds"].to_numpy().astype(np.float64)
        if not bool(np.all(np.abs(seconds) < _MAX_SECONDS)):  # NaN compares as false
            raise BatchError(f"{name}_seconds: a value is not a time")
        records[f"{name}_ns"] = np.rint(seconds * 1e9).astype(np.int64)
    if len(records) and (records["duration_ns"].min() < 0 or records["rank"].min() < 0):
        raise BatchError("a span has a negative rank or duration")
    node, attempt = (_only(table, name) for name in ("node", "attempt"))
    return SpanBatch(node, attempt, names, records, dropped, error)


def _fits(name: str, values: Any) -> Any:
    limits = np.iinfo(RECORD[name])
    if len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise BatchError(f"{name}: must be from {limits.min} to {limits.max}")
    return values


def _fill_names(records: Records, table: "arrow.Table") -> tuple[str, ...]:
    column = table["name"].unify_dictionaries()
    names = tuple(column.chunk(0).dictionary.to_pylist()) if column.num_chunks else ()
    check_names(names)
    at = 0
    for chunk in column.chunks:
        records["name"][at : at + len(chunk)] = chunk.indices.to_numpy()
        at += len(chunk)
    return names


def _only(table: "arrow.Table", name: str) -> int:
    """Return the value that all rows share. Raises `BatchError` if they differ."""
    values = table[name].to_numpy()
    if len(values) == 0:
        return 0
    if values.min() != values.max():
        raise BatchError(f"{name}: {values.min()} and {values.max()} in one file")
    return int(values[0])


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def write_spans(path: Path, ranks: Mapping[int, Sequence["Span"]], step: int) -> None:
    """Write the predicted spans of one step by rank, with the columns of a run's span files. The file appears
    when it is complete. Times count from the iteration's start."""
    numbers: dict[str, int] = {}
    rows = [
        (
            round(span.start_seconds * 1e9),
            round(span.duration_seconds * 1e9),
            step,
            rank,
            numbers.setdefault(span.name, len(numbers)),
            span.stage,
            span.micro_batch,
            span.chunk,
        )
        for rank, spans in ranks.items()
        for span in spans
    ]
    batch = SpanBatch(0, 0, tuple(numbers), np.array(rows, RECORD))
    write_span_file(path, batch, predicted=True)
