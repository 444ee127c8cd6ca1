"""If these fail, a run's spans cannot be read afterwards, or a reader believes a file that is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from made_spans import SPAN_NAMES, made_batch

from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch, pool
from myriad.telemetry.span_io.span_files import (
    read_facts,
    read_span_file,
    span_files,
    write_span_file,
    write_spans,
)
from myriad.telemetry.span_io.span_records import RECORD
from myriad.telemetry.spans import Span

_TIMES_NS = 300
"""How far a time may be from what was written: a float64 of seconds since the epoch."""


def test_what_is_written_is_read_by_rank_and_start_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    batch = made_batch(num_ranks=3, num_steps=4)
    path = tmp_path / "attempt-2-node-7-0.parquet"
    write_span_file(path, batch)
    found = read_span_file(path)
    assert (found.node, found.attempt, found.names) == (7, 2, SPAN_NAMES)
    assert (found.num_dropped, found.clock_error_seconds) == (5, 0.25e-3)
    order = np.lexsort((-batch.records["duration_ns"], batch.records["start_ns"], batch.records["rank"]))
    expected = batch.records[order]
    for field in ("rank", "step", "name", "stage", "micro_batch", "chunk"):
        assert np.array_equal(found.records[field], expected[field]), field
    assert np.abs(found.records["start_ns"] - expected["start_ns"]).max() < _TIMES_NS
    assert np.abs(found.records["duration_ns"] - expected["duration_ns"]).max() < _TIMES_NS
    facts = read_facts(path)
    assert (facts.first_step, facts.last_step, facts.num_spans) == (1, 4, len(expected))


def test_a_span_takes_at_most_twelve_bytes_of_the_disk(tmp_path: Path) -> None:
    batch = made_batch(num_ranks=8, num_steps=5)
    write_span_file(tmp_path / "a.parquet", batch)
    assert (tmp_path / "a.parquet").stat().st_size <= 12 * len(batch.records)


def test_other_tools_see_the_columns_that_the_documentation_names(tmp_path: Path) -> None:
    write_span_file(tmp_path / "a.parquet", made_batch(num_ranks=1, num_steps=1))
    table = parquet.read_table(tmp_path / "a.parquet")
    row = table.slice(0, 1).to_pylist()[0]
    assert row["name"] == "load" and row["rank"] == 0 and (row["attempt"], row["node"]) == (2, 7)
    assert table.schema.metadata[b"num_dropped"] == b"5"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_half_a_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.parquet"
    write_span_file(path, made_batch(num_ranks=2, num_steps=2))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    for read in (read_span_file, read_facts):
        with pytest.raises(BatchError):
            read(path)


def test_a_file_with_a_hole_in_it_is_refused_or_holds_what_spans_may(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_span_file(path, made_batch(num_ranks=2, num_steps=2))
    data, random = path.read_bytes(), np.random.default_rng(7)
    for _ in range(60):
        at = int(random.integers(0, len(data)))
        path.write_bytes(data[:at] + bytes(random.integers(0, 256, 8, np.uint8)) + data[at + 8 :])
        try:
            found = read_span_file(path)
        except BatchError:
            continue
        records = found.records
        assert records["name"].min() >= 0 and records["name"].max() < len(found.names)
        assert records["rank"].min() >= 0 and records["duration_ns"].min() >= 0


def _changed(path: Path, name: str, column: Any) -> None:
    table = parquet.read_table(path, read_dictionary=["name"])
    index = table.schema.get_field_index(name)
    table = table.remove_column(index) if column is None else table.set_column(index, name, column(table))
    parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("name", "column", "why"),
    [
        ("duration_seconds", lambda t: arrow.array(["long"] * len(t)), "duration_seconds: string"),
        ("rank", lambda t: arrow.array([0.5] * len(t)), "rank: double"),
        ("start_seconds", None, "no column start_seconds"),
        ("name", None, "no column name"),
        ("rank", lambda t: arrow.array([-1] * len(t), arrow.int32()), "negative rank"),
        ("duration_seconds", lambda t: arrow.array([np.nan] * len(t), arrow.float32()), "not a time"),
        ("start_seconds", lambda t: arrow.array([1e300] * len(t)), "not a time"),
        ("step", lambda t: arrow.array([2**40] * len(t)), "step: must be from"),
        ("node", lambda t: arrow.array(range(len(t)), arrow.int32()), "node: 0 and"),
        ("stage", lambda t: arrow.array([None] * len(t), arrow.int16()), "missing"),
        ("name", lambda t: arrow.array(["x" * 65] * len(t)).dictionary_encode(), "names: must be at most"),
    ],
)
def test_a_file_that_holds_no_spans_is_refused_with_the_reason(
    tmp_path: Path, name: str, column: Any, why: str
) -> None:
    path = tmp_path / "a.parquet"
    write_span_file(path, made_batch(num_ranks=1, num_steps=1))
    _changed(path, name, column)
    with pytest.raises(BatchError, match=why):
        read_span_file(path)
    if column is None:
        with pytest.raises(BatchError, match=why):
            read_facts(path)


def test_files_come_in_the_order_in_which_they_were_written_and_drafts_not_at_all(tmp_path: Path) -> None:
    names = [f"attempt-{a}-node-0-{k}.parquet" for a, k in ((1, 2), (1, 10), (2, 0), (10, 1))]
    for name in [*reversed(names), ".attempt-1-node-0-3.parquet.99", "notes.txt"]:
        (tmp_path / name).touch()
    assert [path.name for path in span_files(tmp_path)] == names
    assert span_files(tmp_path / "nowhere") == []


def test_a_prediction_has_the_same_columns_and_is_read_the_same_way(tmp_path: Path) -> None:
    ranks = {
        rank: [Span("forward", rank, 3, 0.5, 0.25), Span("send", rank, 3, 0.75, 0.01)] for rank in (0, 9)
    }
    write_spans(tmp_path / "step-1.parquet", ranks, step=1)
    found = read_span_file(tmp_path / "step-1.parquet")
    assert found.records["rank"].tolist() == [0, 0, 9, 9] and found.names == ("forward", "send")
    assert found.records["start_ns"].tolist() == [500_000_000, 750_000_000] * 2
    schemas = []
    for batch in (found, made_batch(num_ranks=1, num_steps=1)):
        write_span_file(tmp_path / "a.parquet", batch)
        schemas.append(parquet.read_schema(tmp_path / "a.parquet").remove_metadata())
    assert schemas[0] == parquet.read_schema(tmp_path / "step-1.parquet").remove_metadata() == schemas[1]


def test_ranks_that_number_their_names_differently_are_distinguished_by_name() -> None:
    def of(names: tuple[str, ...], rank: int) -> SpanBatch:
        records = np.zeros(len(names) + 1, RECORD)
        records["name"], records["rank"] = [*range(len(names)), 99], rank
        return SpanBatch(0, 1, names, records, num_dropped=1)

    whole = pool([of(("a", "b"), 0), of(("c", "b", "a"), 1), of(("a", "b", "c"), 2)])
    found = [(int(one["rank"]), whole.names[one["name"]]) for one in whole.records]
    assert found == [(0, "a"), (0, "b"), (1, "c"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (2, "c")]
    assert whole.num_dropped == 3 + 3, "spans whose name has no text are lost, and counted"
