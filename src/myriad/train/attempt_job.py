"""The job as the ranks of this attempt compute it; the driver may have changed its layout."""

import os

from myriad.comm.attempt_layout import AS_THE_JOB, ATTEMPT_LAYOUT, AttemptLayout
from myriad.job import Job

__all__ = ["attempt_job"]


def attempt_job(job: Job) -> Job:
    """Apply the layout that the environment sets for this attempt. Raises `BadInputError` for one that
    cannot be computed."""
    layout = AttemptLayout.parse(os.environ.get(ATTEMPT_LAYOUT, ""))
    return job if layout == AS_THE_JOB else job.in_attempt(layout)
