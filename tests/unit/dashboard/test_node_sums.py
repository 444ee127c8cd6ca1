"""If these fail, aggregates of nodes tell of other ranks than the node's."""

import time

import numpy as np

from myriad.comm.layout import Layout
from myriad.dashboard.insight.ranks import Ranks
from myriad.dashboard.store.by_node import NodeSums
from myriad.dashboard.store.span_store import SpanStore
from myriad.telemetry.batch import SpanBatch
from myriad.telemetry.records import RECORD


def test_each_node_has_the_mean_and_the_highest_of_its_own_ranks() -> None:
    store = SpanStore(4, 10)
    for step in (1, 2):
        records = np.zeros(3, RECORD)
        records["rank"], records["step"] = [0, 2, 3], step
        records["start_ns"] = time.time_ns() + step * 10**10
        records["duration_ns"] = [10**9, 2 * 10**9, 4 * 10**9]
        store.add(SpanBatch(0, 1, ("forward",), records, num_dropped=step))
    sums = NodeSums(store, Ranks(Layout(dp=4), 2, (1, 0)))
    assert sorted(sums.node_phase_seconds()) == [(0, "forward", 3.0, 4.0), (1, "forward", 1.0, 1.0)]
    assert sums.num_dropped() == 3
