"""Spans on disk: Parquet, one row for each, in a run's folder ``spans/``.

    rank | step | name | stage | micro_batch | start_seconds | duration_seconds

``stage`` and ``micro_batch`` are -1 where they have no meaning; ``start_seconds`` counts from the epoch, in a
prediction from the iteration's start.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from myriad.telemetry.spans import Span

__all__ = ["write_spans"]


def write_spans(path: Path, ranks: Mapping[int, Sequence[Span]], step: int) -> None:
    """Writes the spans of one step by rank; the file is there when it is complete."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = [(rank, span) for rank, spans in ranks.items() for span in spans]
    columns = {
        "rank": arrow.array([rank for rank, _ in rows], arrow.int32()),
        "step": arrow.array([step] * len(rows), arrow.int64()),
        "name": arrow.array([span.name for _, span in rows], arrow.string()).dictionary_encode(),
        "stage": arrow.array([span.stage for _, span in rows], arrow.int32()),
        "micro_batch": arrow.array([span.micro_batch for _, span in rows], arrow.int32()),
        "start_seconds": arrow.array([span.start_seconds for _, span in rows], arrow.float64()),
        "duration_seconds": arrow.array([span.duration_seconds for _, span in rows], arrow.float64()),
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    parquet.write_table(arrow.table(columns), beside, compression="zstd")
    beside.replace(path)
