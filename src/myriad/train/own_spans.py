"""Spans of a rank without a node agent: torchrun or Slurm started it, and it ships its own spans.

The thread is the same as the node agent's (`myriad.telemetry.shipping.shipper`), with one ring. Files are
named by rank."""

import logging
import os
from collections.abc import Callable

from myriad.comm.clock_comparison import compare_clocks
from myriad.comm.groups import Groups
from myriad.job import Job
from myriad.run import Run
from myriad.telemetry.shipping.clock_offset import ClockOffset
from myriad.telemetry.shipping.shipper import Shipper, open_outlets
from myriad.telemetry.span_io.span_ring import SPANS, SpanRing, SpanRings, own_ring, ring_at
from myriad.train.device_setup import Place

__all__ = ["open_ring"]

_LOG = logging.getLogger(__name__)


def open_ring(
    run: Run, job: Job, place: Place, groups: Groups, at_end: Callable[[Callable[[], None]], object]
) -> SpanRing:
    """Return this rank's ring of spans, and make sure that a process or a thread empties it.

    ``at_end`` registers the end of such a thread. All ranks call it together.
    """
    if SPANS in os.environ or not job.telemetry.spans:
        return own_ring()
    clock = _compared(place, groups)
    rings = SpanRings(1)
    node = int(os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or 0)

    def report(where: str, problem: str, num_dropped: int) -> None:
        status = problem or "works again"
        _LOG.warning("spans to %s: %s; %d spans are lost", where, status, num_dropped)
        fields = {"node": node, "rank": place.rank, "place": where, "problem": problem}
        run.append_event("telemetry", **fields, num_dropped=num_dropped)

    outlets = open_outlets(run.spans_path, f"rank-{place.rank}", run.path.name, job.telemetry, report)
    shipper = Shipper(rings, node, outlets, clock.at)
    shipper.begin(1)
    at_end(shipper.close)
    return ring_at(rings.address(0), attempt=run.num_starts() + 1)


def _compared(place: Place, groups: Groups) -> ClockOffset:
    """Return this rank's clock offset from the first rank's clock."""
    clock = ClockOffset()
    together = groups.on_host("checkpoints") if place.world > place.local_world else None
    if together is None:
        clock.same()
        return clock
    return compare_clocks(together)
