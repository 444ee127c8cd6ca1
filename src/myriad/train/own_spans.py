"""Spans of a rank that no executor looks after: torchrun or Slurm has started it, and it ships its own.

The thread is the executor's (`myriad.telemetry.shipper`), with one ring; files are named by the rank.
"""

import atexit
import logging
import os

from myriad.comm.clocks import compare_clocks
from myriad.comm.groups import Groups
from myriad.job import Job
from myriad.run import Run
from myriad.telemetry.clock import ClockOffset
from myriad.telemetry.ring import SPANS, SpanRing, SpanRings, own_ring, ring_at
from myriad.telemetry.shipper import Shipper, open_outlets
from myriad.train.build import Place

__all__ = ["open_ring"]

_LOG = logging.getLogger(__name__)


def open_ring(run: Run, job: Job, place: Place, groups: Groups) -> SpanRing:
    """This rank's, which somebody empties. All ranks call this together."""
    if SPANS in os.environ or not job.telemetry.spans:
        return own_ring()
    clock = _compared(place, groups)
    rings = SpanRings(1)
    node = int(os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or 0)

    def tell(where: str, problem: str, num_dropped: int) -> None:
        told = problem or "works again"
        _LOG.warning("spans to %s: %s; %d spans are lost", where, told, num_dropped)
        fields = {"node": node, "rank": place.rank, "place": where, "problem": problem}
        run.append_event("telemetry", **fields, num_dropped=num_dropped)

    outlets = open_outlets(run.spans_path, f"rank-{place.rank}", run.path.name, job.telemetry, tell)
    shipper = Shipper(rings, node, outlets, clock.at)
    shipper.begin(1)
    atexit.register(shipper.close)  # also when training fails
    return ring_at(rings.address(0), attempt=run.num_starts() + 1)


def _compared(place: Place, groups: Groups) -> ClockOffset:
    """With the first rank's."""
    clock = ClockOffset()
    together = groups.on_host("checkpoints") if place.world > place.local_world else None
    if together is None:
        clock.same()
        return clock
    return compare_clocks(together)
