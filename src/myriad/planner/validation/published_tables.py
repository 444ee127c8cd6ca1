"""Tables of published iteration times, and the published curve for a model.

A table is recognised by its columns, so that other rows of the same kind can be compared as well
(`published_rows`).
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from myriad.comm.layout import check_layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.validation.published_rows import (
    TABLE_KINDS,
    Clusters,
    PublishedRow,
    TableCells,
    TableKind,
)
from myriad.system.whole_file import read_regular

__all__ = ["CurvePoint", "PublishedTable", "builtin_tables", "curve_points", "read_table"]

_MOST_BYTES = 2**28


@dataclass(frozen=True)
class PublishedTable:
    """The rows of a file."""

    name: str
    title: str
    source: str
    rows: tuple[PublishedRow, ...]


def builtin_tables() -> list[str]:
    """Return the names of the files that come with the project and contain iterations."""
    folder = resources.files("myriad.planner.validation") / "tables"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".csv"))
    return [
        name
        for name in names
        if _kind_of(frozenset(_columns((folder / name).read_text(encoding="utf-8")))) is not None
    ]


def read_table(name_or_path: str, clusters: Clusters) -> PublishedTable:
    """Read a table that comes with the project, or a file with the same columns. Raises `BadInputError`."""
    text = _text(name_or_path)
    columns = _columns(text)
    kind = _kind_of(frozenset(columns))
    twice = sorted(column for column, count in Counter(columns).items() if count > 1)
    if kind is not None and twice:
        raise BadInputError("TABLE", name_or_path, f"each column once: {', '.join(twice)} occurs twice")
    if kind is None and any(len(columns) == 1 and mark in columns[0] for mark in ";\t"):
        raise BadInputError("TABLE", name_or_path, "must be separated by commas, not by ; or tabs")
    if kind is None:
        allowed = "; ".join(f"{known.title}: {', '.join(sorted(known.columns))}" for known in TABLE_KINDS)
        raise BadInputError("TABLE", name_or_path, f"must have the columns of one of these tables: {allowed}")
    rows: list[PublishedRow] = []
    for place, values in _lines(name_or_path, text):
        rows += _rows_of(kind, TableCells(place, values), clusters)
    if not rows:
        raise BadInputError("TABLE", name_or_path, "has no rows")
    return PublishedTable(Path(name_or_path).stem, kind.title, kind.source, tuple(rows))


def _lines(name: str, text: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield the place and the cells of each line."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for values in reader:
            place = f"{name}, line {reader.line_num}"
            if None in values:
                raise BadInputError(place, values[None], "more cells than the header has columns")
            yield place, values
    except csv.Error as error:
        raise BadInputError("TABLE", name, f"not CSV at line {reader.line_num}: {error}") from None


def _rows_of(kind: TableKind, cells: TableCells, clusters: Clusters) -> list[PublishedRow]:
    """Return the rows of a line that can be planned. Raises `BadInputError` with the line's place."""
    try:
        rows = list(kind.read(cells, clusters))
        for row in rows:
            _check(row)
    except ValidationError as error:
        one = error.errors()[0]
        key, allowed = ".".join(map(str, one["loc"])), one["msg"][0].lower() + one["msg"][1:]
        raise BadInputError(cells.place, f"{key} = {one['input']}", allowed) from None
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
        if layout.world != world:
            raise BadInputError("dp x tp x pp", layout.world, f"the {world} GPUs of the row")
        if layout.num_stages > model.layers + 2:
            raise BadInputError("stages", layout.num_stages, f"at most {model.layers + 2} for these layers")
        if model.hidden % model.heads or model.heads % layout.tp:
            allowed = f"heads that divide hidden = {model.hidden} and that tp = {layout.tp} divides"
            raise BadInputError("heads", model.heads, allowed)
        if workload.global_batch > _MOST_BATCH or workload.num_micro_batches > _MOST_MICRO_BATCHES:
            allowed = f"at most {_MOST_BATCH:,} sequences, {_MOST_MICRO_BATCHES:,} micro-batches of a replica"
            raise BadInputError("batch", workload.global_batch, allowed)


_MOST_BATCH, _MOST_MICRO_BATCHES = 2**24, 100_000


def _text(name_or_path: str) -> str:
    ready = resources.files("myriad.planner.validation") / "tables" / name_or_path
    if "/" not in name_or_path and ready.is_file():
        return ready.read_text(encoding="utf-8")
    try:
        return read_regular(Path(name_or_path), _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInputError("TABLE", name_or_path, "not UTF-8") from None
    except OSError as error:
        raise BadInputError("TABLE", name_or_path, f"cannot be read: {error.strerror}") from None


def _columns(text: str) -> list[str]:
    """Return the names in the first line."""
    return next(csv.reader(text.splitlines()[:1]), [])


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
