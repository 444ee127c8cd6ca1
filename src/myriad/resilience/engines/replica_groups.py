"""Which ranks of a job are to hold the same parameters."""

from myriad.comm.grid import RankGrid
from myriad.job import Job

__all__ = ["replica_groups"]


def replica_groups(job: Job) -> tuple[tuple[int, ...], ...]:
    """Those with the same stage and the same share of it; none where nobody tells digests: they are off, or
    no two ranks hold the same whole."""
    layout = job.layout
    if not job.resilience.verify_every or layout.dp == 1 or layout.zero == 3:
        return ()
    return tuple(tuple(row) for row in RankGrid(layout, 0).rows("dp"))
