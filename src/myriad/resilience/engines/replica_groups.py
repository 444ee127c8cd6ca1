"""Which ranks of a job are to hold the same parameters."""

from myriad.comm.grid import RankGrid
from myriad.job import Job

__all__ = ["replica_groups"]


def replica_groups(job: Job) -> tuple[tuple[int, ...], ...]:
    """Those with the same stage and the same share of it; none where nobody tells digests: they are off, or
    no two ranks hold the same whole."""
    return tuple(tuple(row) for row in RankGrid(job.layout, 0).rows("dp")) if job.compares_replicas else ()
