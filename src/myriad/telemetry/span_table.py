"""Spans of a prediction on disk: the same columns as those of a run (`myriad.telemetry.span_files`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from myriad.telemetry.batch import SpanBatch
from myriad.telemetry.records import RECORD
from myriad.telemetry.span_files import write_span_file
from myriad.telemetry.spans import Span

__all__ = ["write_spans"]


def write_spans(path: Path, ranks: Mapping[int, Sequence[Span]], step: int) -> None:
    """Writes the spans of one step by rank; the file is there when it is complete. Times count from the
    iteration's start."""
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
