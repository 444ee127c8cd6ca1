"""Tables of published iteration times, and the published curve for a model.

A table is recognised by its columns, so that other rows of the same kind can be compared as well
(`published_rows`); a table of any framework's iterations has the `general_form`. All rows are read before the
first is predicted.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from math import isnan
from pathlib import Path

from pydantic import ValidationError

from myriad.comm.layout import check_layout
from myriad.config import explain
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.validation.general_cells import (
    GENERAL_COLUMNS,
    MODEL_KEY,
    is_general_column,
    missing_columns,
)
from myriad.planner.validation.general_form import Recipes, general_row
from myriad.planner.validation.published_rows import (
    TABLE_KINDS,
    PublishedRow,
    TableCells,
    TableKind,
)
from myriad.system.whole_file import read_regular, refuse_gzip

__all__ = [
    "CurvePoint",
    "PublishedTable",
    "TableOptions",
    "builtin_tables",
    "curve_points",
    "parse_table",
    "read_table",
]

_MOST_BYTES = 2**28


@dataclass(frozen=True)
class TableOptions:
    """How tables are read."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """The column of a file by the column of the general form that it gives."""
    framework: str | None = None
    """Framework as which all rows of the general form are predicted; off: each as its own."""
    cluster: str | None = None
    """Cluster, of as many nodes as a row needs, of all rows of the general form; off: each by its cells."""
    skip_bad: bool = False
    """Whether rows that cannot be read or predicted are left out instead of refused."""

    @property
    def columns_back(self) -> dict[str, str]:
        """The column of the general form by the column of a file. Raises `BadInputError`."""
        for column in self.columns:
            if not is_general_column(column):
                allowed = f"one of {', '.join(GENERAL_COLUMNS)}, or {MODEL_KEY}KEY"
                raise BadInputError("--columns", column, allowed)
        return {theirs: ours for ours, theirs in self.columns.items()}


@dataclass(frozen=True)
class PublishedTable:
    """The rows of a file."""

    name: str
    title: str
    source: str
    rows: tuple[PublishedRow, ...]
    """Rows with a measured time."""
    skipped: tuple[BadInputError, ...] = ()
    """Why rows were left out, one error for each."""
    memory_rows: tuple[PublishedRow, ...] = ()
    """Rows that have no time but measured memory, or ran out of it."""
    is_general: bool = False
    """Whether the table has the general form."""
    columns: tuple[str, ...] = ()
    """Names of the columns, as the file has them."""
    unread: tuple[str, ...] = ()
    """Columns of a table in the general form that are not part of that form."""


def builtin_tables(*, general: bool = False) -> list[str]:
    """Return the names of the files that come with the project and contain iterations; with ``general`` also
    those of other systems, in the general form."""
    folder = resources.files("myriad.planner.validation") / "tables"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".csv"))
    headers = {name: frozenset(_columns(name, (folder / name).read_text(encoding="utf-8"))) for name in names}
    return [
        name
        for name, header in headers.items()
        if _kind_of(header) is not None or (general and not missing_columns(header))
    ]


def read_table(name_or_path: str, recipes: Recipes, options: TableOptions = TableOptions()) -> PublishedTable:
    """Read a table that comes with the project, or a file with the columns of one of them or of the general
    form. Raises `BadInputError`."""
    return parse_table(name_or_path, _text(name_or_path), recipes, options)


def parse_table(
    name_or_path: str,
    text: str,
    recipes: Recipes,
    options: TableOptions = TableOptions(),
    places: Sequence[str] | None = None,
) -> PublishedTable:
    """Return the table of a file's text. ``places``: what errors call its rows; off: file and line. Raises
    `BadInputError`."""
    in_file = _columns(name_or_path, text)
    columns = [options.columns_back.get(column, column) for column in in_file]
    kind = _kind_of(frozenset(columns))
    if kind is None:
        columns = [_CAPITALISED.get(column.lower(), column) for column in columns]
        _check_general(name_or_path, columns, has_cluster=options.cluster is not None)
    if twice := sorted(column for column, count in Counter(columns).items() if count > 1):
        raise BadInputError("TABLE", name_or_path, f"each column once: {', '.join(twice)} occurs twice")

    def read(cells: TableCells) -> Iterator[PublishedRow]:
        if kind is not None:
            for row in kind.read(cells, recipes.cluster):
                yield replace(row, framework=kind.framework_of(row))
        else:
            yield general_row(cells, recipes, options.framework, options.cluster)

    lines = _lines(name_or_path, text, columns)
    numbered = (TableCells(places[i] if places else place, cells) for i, (place, cells) in enumerate(lines))
    rows, skipped = _read_rows(read, numbered, skip_bad=options.skip_bad)
    if not rows:
        raise skipped[0] if skipped else BadInputError("TABLE", name_or_path, "has no rows")
    title, source = (kind.title, kind.source) if kind else (Path(name_or_path).stem, "its column source")
    timed = tuple(row for row in rows if not isnan(row.seconds))
    if not timed:
        allowed = "at least one row with a time: what ran out of memory is predicted beside what did not"
        raise BadInputError("TABLE", name_or_path, allowed)
    return PublishedTable(
        Path(name_or_path).stem,
        title,
        source,
        timed,
        tuple(skipped),
        memory_rows=tuple(row for row in rows if isnan(row.seconds)),
        is_general=kind is None,
        columns=tuple(in_file),
        unread=() if kind else tuple(one for one in columns if not is_general_column(one)),
    )


_CAPITALISED = {column.lower(): column for column in GENERAL_COLUMNS}
"""Columns of the general form, which may be capitalised in any way, by their names in small letters."""
_MOST_MISSING = 2
"""Largest number of missing columns with which a table is taken for one in the general form."""


def _check_general(name_or_path: str, columns: Sequence[str], *, has_cluster: bool) -> None:
    """Check that a table of no other kind has the columns of the general form. ``has_cluster``: whether an
    option names the cluster of all rows. Raises `BadInputError`."""
    missing = missing_columns(frozenset(columns) | ({"gpu_type"} if has_cluster else set()))
    if not missing:
        return
    if any(len(columns) == 1 and mark in columns[0] for mark in ";\t"):
        raise BadInputError("TABLE", name_or_path, "must be separated by commas, not by ; or tabs")
    if len(missing) <= _MOST_MISSING:
        allowed = f"lacks {' and '.join(missing)} (--columns maps other names)"
        raise BadInputError("TABLE", name_or_path, allowed)
    allowed = "; ".join(f"{known.title}: {', '.join(sorted(known.columns))}" for known in TABLE_KINDS)
    allowed += "; any framework's: model, gpus, gpu_type and iteration_s, tokens_per_s_per_gpu, "
    allowed += "tflops_per_gpu, mfu or memory (--columns maps other names)"
    raise BadInputError("TABLE", name_or_path, f"must have the columns of one of these tables: {allowed}")


def _lines(name: str, text: str, columns: list[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield the place and the cells of each line below the header."""
    reader = csv.DictReader(io.StringIO(text, newline=""), columns, strict=True)
    try:
        for number, values in enumerate(reader):
            if number == 0:
                continue
            place = f"{name}, line {reader.line_num}"
            if None in values:
                raise BadInputError(place, values[None], "more cells than the header has columns")
            yield place, values
    except csv.Error as error:
        raise BadInputError("TABLE", name, f"not CSV at line {reader.reader.line_num}: {error}") from None


def _read_rows(
    read: Callable[[TableCells], Iterator[PublishedRow]], lines: Iterable[TableCells], *, skip_bad: bool
) -> tuple[list[PublishedRow], list[BadInputError]]:
    """Return the rows of all lines, and with ``skip_bad`` why others are left out. Raises `BadInputError`."""
    rows: list[PublishedRow] = []
    skipped: list[BadInputError] = []
    for cells in lines:
        try:
            rows += _rows_of(read, cells)
        except BadInputError as error:
            if not skip_bad:
                raise
            skipped.append(error)
    return rows, skipped


def _rows_of(read: Callable[[TableCells], Iterator[PublishedRow]], cells: TableCells) -> list[PublishedRow]:
    """Return the rows of a line that can be planned. Raises `BadInputError` with the line's place."""
    try:
        rows = list(read(cells))
        for row in rows:
            _check(row)
    except ValidationError as error:
        one = error.errors()[0]
        key = ".".join(map(str, one["loc"]))
        raise BadInputError(cells.place, f"{key} = {one['input']}", explain(one)) from None
    except BadInputError as error:
        if error.key.startswith(cells.place):
            raise
        raise BadInputError(cells.place, f"{error.key} = {error.value}", error.allowed) from None
    return rows


def _check(row: PublishedRow) -> None:
    """Check that a row's workloads are possible. Raises `BadInputError`."""
    for workload in row.works:
        model, layout, world = workload.model, workload.layout, row.cluster.world
        check_layout(layout)
        layout.shares_of(workload.global_batch, "batch")
        if model.heads % model.num_kv_heads:
            raise BadInputError("kv_heads", model.num_kv_heads, f"a divisor of the {model.heads} heads")
        if layout.ep > 1 and model.experts is None:
            raise BadInputError("ep", layout.ep, "1: the model has no experts")
        if layout.world != world:
            raise BadInputError("dp x tp x pp", layout.world, f"the {world} GPUs of the row")
        if layout.num_stages > model.layers + 2:
            raise BadInputError("stages", layout.num_stages, f"at most {model.layers + 2} for these layers")
        if (model.head_dim is None and model.hidden % model.heads) or model.heads % layout.tp:
            allowed = f"heads that divide hidden = {model.hidden} and that tp = {layout.tp} divides"
            raise BadInputError("heads", model.heads, allowed)
        if workload.global_batch > _MOST_BATCH or workload.num_micro_batches > _MOST_MICRO_BATCHES:
            allowed = f"at most {_MOST_BATCH:,} sequences, {_MOST_MICRO_BATCHES:,} micro-batches of a replica"
            raise BadInputError("batch", workload.global_batch, allowed)
    least = max(_LEAST_SECONDS, row.seconds * row.mfu(row.seconds) / _MOST_MFU)
    if row.seconds < least:
        allowed = f"at least {least:.3g}, in which the GPUs' peak computes 1/{_MOST_MFU} of the model's FLOPs"
        raise BadInputError("seconds", f"{row.seconds:.3g}", allowed)
    Costs(row.works[0], row.cluster)


_MOST_BATCH, _MOST_MICRO_BATCHES = 2**24, 100_000
_MOST_MFU = 10
"""Largest MFU of a row: float8, and sources that count attention otherwise, exceed 1 a few times."""
_LEAST_SECONDS = 1e-6
"""Fewest seconds of an iteration: less than the launch of one operator."""


def _text(name_or_path: str) -> str:
    ready = resources.files("myriad.planner.validation") / "tables" / name_or_path
    if "/" not in name_or_path and ready.is_file():
        return ready.read_text(encoding="utf-8")
    try:
        data = read_regular(Path(name_or_path), _MOST_BYTES)
        refuse_gzip("TABLE", name_or_path, data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInputError("TABLE", name_or_path, "not UTF-8") from None
    except OSError as error:
        raise BadInputError("TABLE", name_or_path, f"cannot be read: {error.strerror}") from None


def _columns(name: str, text: str) -> list[str]:
    """Return the names of the columns of a file. Raises `BadInputError`."""
    if not text.strip():
        raise BadInputError("TABLE", name, "is empty: a table is a line of column names, then its rows")
    try:
        return [column.strip() for column in next(csv.reader(io.StringIO(text, newline="")))]
    except csv.Error as error:
        raise BadInputError("TABLE", name, f"not CSV at line 1: {error}") from None


def _kind_of(header: frozenset[str]) -> TableKind | None:
    return next((kind for kind in TABLE_KINDS if kind.columns <= header), None)


@dataclass(frozen=True)
class CurvePoint:
    """A row of table 2 of arXiv 2402.15627: 175B, on A100."""

    system: str
    accelerators: int
    global_batch: int
    seconds: float
    tokens_per_second: float
    mfu: float


def curve_points(model: ModelConfig) -> list[CurvePoint]:
    """Return the published points of this model; none for all but MegaScale's of 175B."""
    if (model.layers, model.hidden, model.heads, model.sequence) != (96, 12288, 128, 2048):
        return []
    text = (resources.files("myriad.planner.validation") / "tables" / "megascale_table2.csv").read_text()
    return [
        CurvePoint(
            row["system"],
            int(row["gpus"]),
            int(row["batch_sequences"]),
            float(row["iteration_seconds"]),
            float(row["tokens_per_second"]),
            float(row["mfu_percent"]) / 100,
        )
        for row in csv.DictReader(text.splitlines())
    ]
