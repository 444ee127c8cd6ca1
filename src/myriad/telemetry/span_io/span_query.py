"""Run SQL over a run's spans, metrics and events with DuckDB, read-only.

    spans      rank, step, name, phase, class, stage, micro_batch, chunk, start_seconds, duration_seconds,
               attempt, node: streamed from the files, only the columns and rows that a query asks for
    metrics    a row per step    } columns are the keys of the lines; what is no number
    events     a row per event   } or text in all of them is JSON text
    files      file, attempt, node, num_spans, num_bytes, num_dropped, clock_error_seconds

A query can access these tables and no other file, network or setting: DuckDB's external access is disabled
before the query runs.

A query has a limit of time, which counts while DuckDB works, not while a reader takes the rows, and one of
memory. DuckDB counts only part of its memory, so `limited_memory` bounds that of the process, too. Some
functions of one row look at no clock: the caller can end the process then, from a thread of its own.
"""

import json
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError, RunFailedError
from myriad.telemetry.span_io.span_batch import BatchError
from myriad.telemetry.span_io.span_files import FileFacts, read_facts, span_files, span_schema
from myriad.telemetry.span_io.span_records import PHASES
from myriad.units import format_bytes

if TYPE_CHECKING:
    import duckdb
    import pyarrow as arrow

__all__ = ["Answer", "QueryLimits", "SpanQueries", "limited_memory", "need_packages", "open_queries"]

_AT_ONCE = 2048
"""Rows of one of DuckDB's vectors."""
_GIVE_UP_SECONDS = 5.0
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


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one query."""

    seconds: float = 300.0
    memory_bytes: int = 4 * 2**30
    give_up: Callable[[BadInputError], object] | None = None
    """Called in another thread if the query does not end although it is over the limit of time."""


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Limit what this process allocates in the block, beyond what it has: an allocation then fails. Raises
    `MemoryError` or DuckDB's error. Where the system has a lower limit, that one stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + num_bytes
    if any(each != resource.RLIM_INFINITY and each <= limit for each in (soft, hard)):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Return the bytes of this process that the limit counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))


class _Stopwatch:
    """Interrupts a connection that works for longer than the limit, all calls together."""

    def __init__(
        self, connection: "duckdb.DuckDBPyConnection", seconds: float, give_up: Callable[[], object]
    ) -> None:
        self._connection, self._left, self._give_up = connection, seconds, give_up
        self._changed, self._closed = threading.Condition(), False
        self._until: float | None = None
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="myriad-query-limit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that interrupts queries over their time limit, and join it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        began = time.monotonic()
        with self._changed:
            self._until = began + self._left
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._until = None
                self._left -= time.monotonic() - began

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                until, now = self._until, time.monotonic()
                if until is None or now < until:
                    self._changed.wait(None if until is None else until - now)
                    continue
                self.is_over = True
                self._connection.interrupt()  # again and again: a call that begins forgets it
                if now > until + _GIVE_UP_SECONDS:
                    self._give_up()
                self._changed.wait(0.2)


class SpanQueries:
    """Queries over one run, as it was when they were opened."""

    def __init__(
        self,
        connection: "duckdb.DuckDBPyConnection",
        left_out: Mapping[Path, str],
        limits: QueryLimits,
    ) -> None:
        self._connection, self._limits, self._query = connection, limits, ""
        self._stopwatch = _Stopwatch(connection, limits.seconds, self._give_up)
        self.left_out = left_out
        """Files that are not valid span files, each with the reason."""

    def ask(self, query: str) -> Answer:
        """Run a query. Raises `BadInputError` if it is not a valid query of these tables, or exceeds a limit
        here or while its rows are fetched."""
        import duckdb

        self._query = query
        try:
            with self._stopwatch.running():
                statements = self._connection.extract_statements(query)
                if len(statements) != 1:
                    raise BadInputError("QUERY", _short(query), f"{len(statements)} statements: must be one")
                self._connection.execute(statements[0])
        except (duckdb.Error, MemoryError) as error:
            raise self.limit_error(error) or BadInputError("QUERY", _short(query), _words(error)) from None
        columns = tuple(str(one[0]) for one in self._connection.description or ())
        return Answer(columns, self._fetch(query))

    def _fetch(self, query: str) -> Rows:
        import duckdb

        try:
            while rows := self._fetch_some():
                yield from rows
        except duckdb.ProgrammingError as error:  # an unsupported result type, e.g. a time with a zone
            raise BadInputError("QUERY", _short(query), _words(error)) from None
        except (duckdb.Error, OSError, MemoryError) as error:
            failed = RunFailedError(f"the files cannot be read to their end: {_words(error)}")
            raise self.limit_error(error) or failed from None

    def _fetch_some(self) -> list[Any]:
        with self._stopwatch.running():
            return self._connection.fetchmany(_AT_ONCE)

    def close(self) -> None:
        """End the thread that watches the limit of time."""
        self._stopwatch.close()

    def limit_error(self, error: BaseException) -> BadInputError | None:
        """Return the error for the limit that a query has exceeded."""
        import duckdb

        if self._stopwatch.is_over:
            return self._too_slow()
        if isinstance(error, duckdb.OutOfMemoryException | MemoryError):
            size = format_bytes(self._limits.memory_bytes)
            allowed = f"needs more than --memory = {size}: select fewer rows or columns, or raise it"
            return BadInputError("QUERY", _short(self._query), allowed)
        return None

    def _too_slow(self) -> BadInputError:
        allowed = f"takes longer than --timeout = {self._limits.seconds:g} s: select fewer rows, or raise it"
        return BadInputError("QUERY", _short(self._query), allowed)

    def _give_up(self) -> None:
        if self._limits.give_up is not None:
            self._limits.give_up(self._too_slow())


@contextmanager
def open_queries(
    folder: Path, limits: QueryLimits | None = None, **lines: Sequence[Mapping[str, Any]]
) -> Iterator[SpanQueries]:
    """Open queries over the span files in ``folder`` and over ``lines`` of metrics and events. Raises
    `BadInputError` if DuckDB is not installed."""
    limits = limits or QueryLimits()
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
        for statement in (f"SET memory_limit = '{limits.memory_bytes}B'", *_SHUT):
            connection.execute(statement)
        queries = SpanQueries(connection, left_out, limits)
        try:
            yield queries
        finally:
            queries.close()


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
