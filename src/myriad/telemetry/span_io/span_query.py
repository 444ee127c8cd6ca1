"""Run SQL over a run's spans, metrics and events with DuckDB, read-only.

    spans      rank, step, name, phase, class, stage, micro_batch, chunk, start_seconds, duration_seconds,
               attempt, node: streamed from the files, only the columns and rows that a query asks for
    metrics    a row per step    } columns are the keys of the lines; what is no number
    events     a row per event   } or text in all of them is JSON text
    files      file, attempt, node, num_spans, num_bytes, num_dropped, clock_error_seconds

A query can access these tables and no other file, network or setting: DuckDB's external access is disabled
before the query runs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError, RunFailedError
from myriad.telemetry.span_io.span_batch import BatchError
from myriad.telemetry.span_io.span_files import FileFacts, read_facts, span_files, span_schema
from myriad.telemetry.span_io.span_records import PHASES

if TYPE_CHECKING:
    import duckdb
    import pyarrow as arrow

__all__ = ["Answer", "SpanQueries", "need_packages", "open_queries"]

_AT_ONCE = 10_000
_SHUT = (
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET temp_directory = ''",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
_SPANS = """
    CREATE VIEW spans AS
    SELECT rank, step, name, coalesce(phase, name) AS phase, coalesce(class, 'other') AS class, stage,
           micro_batch, chunk, start_seconds, duration_seconds, attempt, node
    FROM stored_spans LEFT JOIN (SELECT name AS known, phase, class FROM stored_phases) ON name = known
"""
_LEAST = {"metrics": ("step",), "events": ("time", "event")}
"""Columns that exist even in an empty table."""

Rows = Iterator[Sequence[Any]]


@dataclass(frozen=True)
class Answer:
    """The result of one query."""

    columns: tuple[str, ...]
    rows: Rows
    """Rows, fetched on demand. Iteration raises `RunFailedError` if a file cannot be read."""


class SpanQueries:
    """Queries over one run, as it was when they were opened."""

    def __init__(self, connection: "duckdb.DuckDBPyConnection", left_out: Mapping[Path, str]) -> None:
        self._connection = connection
        self.left_out = left_out
        """Files that are not valid span files, each with the reason."""

    def ask(self, query: str) -> Answer:
        """Run a query. Raises `BadInputError` if it is not a valid query of these tables."""
        import duckdb

        try:
            statements = self._connection.extract_statements(query)
            if len(statements) != 1:
                raise BadInputError("QUERY", _short(query), f"{len(statements)} statements: must be one")
            self._connection.execute(statements[0])
        except duckdb.Error as error:
            raise BadInputError("QUERY", _short(query), _words(error)) from None
        columns = tuple(str(one[0]) for one in self._connection.description or ())
        return Answer(columns, self._fetch(query))

    def _fetch(self, query: str) -> Rows:
        import duckdb

        try:
            while rows := self._connection.fetchmany(_AT_ONCE):
                yield from rows
        except duckdb.ProgrammingError as error:  # an unsupported result type, e.g. a time with a zone
            raise BadInputError("QUERY", _short(query), _words(error)) from None
        except (duckdb.Error, OSError) as error:
            raise RunFailedError(f"the files cannot be read to their end: {_words(error)}") from None


@contextmanager
def open_queries(folder: Path, **lines: Sequence[Mapping[str, Any]]) -> Iterator[SpanQueries]:
    """Open queries over the span files in ``folder`` and over ``lines`` of metrics and events. Raises
    `BadInputError` if DuckDB is not installed."""
    need_packages("duckdb", "pyarrow")
    import duckdb
    import pyarrow.dataset as datasets

    facts, left_out = _sound_files(folder)
    paths = [str(fact.path) for fact in facts]
    spans = datasets.dataset(paths, schema=span_schema(), format="parquet") if paths else _no_spans()
    with duckdb.connect(":memory:") as connection:
        connection.register("stored_spans", spans)
        connection.register("stored_phases", _phases())
        connection.execute(_SPANS)
        tables = {"files": _file_table(facts)}
        tables |= {name: line_table(rows, _LEAST.get(name, ())) for name, rows in lines.items()}
        for name, table in tables.items():
            connection.register(f"stored_{name}", table)
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM stored_{name}")
        for statement in _SHUT:
            connection.execute(statement)
        yield SpanQueries(connection, left_out)


def need_packages(*names: str) -> None:
    """Raise `BadInputError` with the package to install if an import fails."""
    try:
        for name in names:
            import_module(name)
    except ImportError as error:
        allowed = "needs a package that is not installed: pip install 'myriad-train[watch]'"
        raise BadInputError("myriad spans", error.name, allowed) from None


def _sound_files(folder: Path) -> tuple[list[FileFacts], dict[Path, str]]:
    found, left_out = [], {}
    for path in span_files(folder):
        try:
            found.append(read_facts(path))
        except (BatchError, OSError) as error:
            left_out[path] = str(error)
    return found, left_out


def _no_spans() -> "arrow.Table":
    return span_schema().empty_table()


def _phases() -> "arrow.Table":
    import pyarrow as arrow

    rows = [(name, phase, kind) for name, (phase, kind) in PHASES.items()]
    return arrow.table(dict(zip(("name", "phase", "class"), map(list, zip(*rows, strict=True)), strict=True)))


def _file_table(facts: Sequence[FileFacts]) -> "arrow.Table":
    import pyarrow as arrow

    types = {"file": arrow.string(), "attempt": arrow.int32(), "node": arrow.int32()}
    types |= {"num_spans": arrow.int64(), "num_bytes": arrow.int64(), "num_dropped": arrow.int64()}
    types |= {"clock_error_seconds": arrow.float64()}
    rows = [
        {
            "file": fact.path.name,
            "attempt": fact.attempt,
            "node": fact.node,
            "num_spans": fact.num_spans,
            "num_bytes": fact.num_bytes,
            "num_dropped": fact.num_dropped,
            "clock_error_seconds": fact.clock_error_seconds,
        }
        for fact in facts
    ]
    return arrow.Table.from_pylist(rows, arrow.schema(types))


def line_table(lines: Sequence[Mapping[str, Any]], least: Sequence[str] = ()) -> "arrow.Table":
    """Return a table of JSON objects, with a column for each key in any of them."""
    import pyarrow as arrow

    keys = dict.fromkeys([*least, *(key for line in lines for key in line)])
    return arrow.table({key: _column([line.get(key) for line in lines]) for key in keys})


def _column(values: Sequence[Any]) -> "arrow.Array":
    import pyarrow as arrow

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return arrow.array([_small(value) for value in values], arrow.int64())
    if kinds in ({float}, {int, float}):
        return arrow.array([None if value is None else float(value) for value in values], arrow.float64())
    if kinds == {bool}:
        return arrow.array(values, arrow.bool_())
    texts = [value if value is None or kinds == {str} else json.dumps(value) for value in values]
    return arrow.array([_clean(text) for text in texts], arrow.string())


def _small(value: int | None) -> int | None:
    return value if value is not None and abs(value) < 2**63 else None


def _clean(text: str | None) -> str | None:
    """Replace unpaired surrogates, which JSON allows and Arrow does not."""
    return None if text is None else text.encode(errors="replace").decode()


def _short(query: str) -> str:
    words = " ".join(query.split())
    return words if len(words) < 60 else words[:57] + "..."


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)
