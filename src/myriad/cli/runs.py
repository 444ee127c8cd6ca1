"""Runs as people name them on a command line."""

from pathlib import Path

from myriad.errors import BadInputError
from myriad.run import nearest_run

__all__ = ["CHECKPOINTS", "existing_run"]

CHECKPOINTS = (
    "A run (its folder, or its name under runs/), a folder of checkpoints, one of them (step-N), or a URL of "
    "either (s3://BUCKET/FOLDER, file:///FOLDER)."
)
"""Help of an argument that `myriad.train.locate` reads."""


def existing_run(name_or_path: str) -> Path:
    """Return the folder of a run, given it or its name under runs/. Raises `BadInputError` where there is
    none, without importing torch, so that a wrong name is refused at once."""
    for path in (Path(name_or_path), Path("runs") / name_or_path):
        if (path / "job.toml").is_file():
            return path
    allowed = f"must be a run folder, or the name of one under runs/{nearest_run(name_or_path)}"
    raise BadInputError("run", name_or_path, allowed)
