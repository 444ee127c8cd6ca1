"""``myriad plan --out FILE.toml``: write the best plan as a job file. It overwrites only an older plan of the
same job."""

from pathlib import Path

from myriad.cli.output_files import check_output
from myriad.errors import BadInputError
from myriad.forecasts.planned_job import PLAN_HEAD
from myriad.job import Job, load_job
from myriad.system.whole_file import read_regular, write_whole

__all__ = ["check_plan_file", "write_plan"]

_MOST_BYTES = 2**20
"""Largest size of a plan file; every written plan is smaller."""


def write_plan(path: Path, job: Job, text: str) -> None:
    """Write the text of a plan. Raises `BadInputError`."""
    check_plan_file(path, job)
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInputError("--out", str(path), f"cannot be written: {error.strerror}") from None


def check_plan_file(path: Path, job: Job) -> None:
    """Raise `BadInputError` for a file that is not a plan, or is another job's plan."""
    check_output("--out", path)
    if not path.exists():
        return
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        text = ""
    if not text.startswith(PLAN_HEAD):
        allowed = "must be a new file, or a plan that `myriad plan` wrote: this file is neither"
        raise BadInputError("--out", str(path), allowed)
    other = load_job(str(path))
    if (other.name, other.model) != (job.name, job.model):
        allowed = f"it is the plan of another job ({other.name}, not {job.name}): give another name"
        raise BadInputError("--out", str(path), allowed)
