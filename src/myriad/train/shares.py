"""The shares of an attempt: the driver may give a slow replica less than the job does."""

from myriad.job import Job

__all__ = ["SHARES", "with_shares"]

SHARES = "MYRIAD_SHARES"
"""Micro-batches of each replica, in a rank's environment: ``5,3``; without it the job's."""


def with_shares(job: Job, told: str) -> Job:
    """The job, computed with other shares. Raises `BadInputError` for what is no division of the batch."""
    if not told:
        return job
    shares = tuple(int(share) for share in told.split(","))
    layout = job.layout.model_copy(update={"shares": shares})
    return job.model_copy(update={"layout": layout}).check()
