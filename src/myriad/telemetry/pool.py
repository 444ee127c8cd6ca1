"""What several ranks have recorded, each with names numbered in its own order, as one batch."""

from collections.abc import Iterable, Sequence

import numpy as np

from myriad.telemetry.batch import MAX_NAMES, SpanBatch
from myriad.telemetry.records import RECORD, Records

__all__ = ["pool"]


def pool(batches: Sequence[SpanBatch]) -> SpanBatch:
    """One of all, which are of one node and attempt. A span whose name has no number, or that comes after
    the last name that fits, counts as dropped; a clock is as wrong as it was at its worst."""
    numbers: dict[str, int] = {}
    parts = [_renamed(batch, numbers) for batch in batches]
    records = np.concatenate(parts) if parts else np.zeros(0, RECORD)
    lost = sum(len(batch.records) for batch in batches) - len(records)
    return SpanBatch(
        batches[0].node,
        batches[0].attempt,
        tuple(numbers),
        records,
        lost + sum(batch.num_dropped for batch in batches),
        max(batch.clock_error_seconds for batch in batches),
    )


def _renamed(batch: SpanBatch, numbers: dict[str, int]) -> Records:
    records = batch.records
    known = (records["name"] >= 0) & (records["name"] < len(batch.names))
    if not known.all():
        records = records[known]
    if batch.names == tuple(numbers):
        return records
    to = np.fromiter(_numbers_of(batch.names, numbers), np.int16, len(batch.names))
    if np.array_equal(to, np.arange(len(to))):
        return records
    names = to[records["name"]]
    records = records.copy()
    records["name"] = names
    return records[names >= 0]


def _numbers_of(names: Iterable[str], numbers: dict[str, int]) -> Iterable[int]:
    for name in names:
        full = name not in numbers and len(numbers) >= MAX_NAMES
        yield -1 if full else numbers.setdefault(name, len(numbers))
