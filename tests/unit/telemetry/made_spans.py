"""Spans as a rank of a pipeline makes them: times that vary, numbers that repeat."""

import numpy as np

from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_records import RECORD

SPAN_NAMES = ("load", "receive", "forward", "send", "backward", "await_reduce", "update")
_TYPICAL_NS = (800_000, 90_000, 20_000_000, 70_000, 41_000_000, 900_000, 1_100_000)
BEGAN_NS = 1_790_000_000 * 10**9


def made_batch(num_ranks: int, num_steps: int, num_micro_batches: int = 16) -> SpanBatch:
    """Of node 7 in attempt 2."""
    random, rows = np.random.default_rng(3), []
    micro = [(name, m, -1) for m in range(num_micro_batches) for name in (1, 2, 3, 1, 4, 3)]
    program = [(0, -1, -1), *micro, *((5, -1, chunk) for chunk in range(4)), (6, -1, -1)]
    for rank in range(num_ranks):
        now = BEGAN_NS + int(random.integers(0, 10**7))
        for step in range(1, num_steps + 1):
            for name, micro_batch, chunk in program:
                took = int(_TYPICAL_NS[name] * np.exp(random.normal(0, 0.05)))
                stage = rank % 4 if micro_batch >= 0 else -1
                rows.append((now, took, step, rank, name, stage, micro_batch, chunk))
                now += took + int(random.integers(2_000, 20_000))
    records = np.array(rows, RECORD)
    random.shuffle(records)
    return SpanBatch(7, 2, SPAN_NAMES, records, num_dropped=5, clock_error_seconds=0.25e-3)
