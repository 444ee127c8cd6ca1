"""Runs as people name them on a command line."""

from pathlib import Path

from myriad.errors import BadInputError

__all__ = ["existing_run"]


def existing_run(name_or_path: str) -> Path:
    """The folder of a run, given it or its name under runs/. Raises `BadInputError` when there is none;
    without torch, so that a wrong name is told at once."""
    for path in (Path(name_or_path), Path("runs") / name_or_path):
        if (path / "job.toml").is_file():
            return path
    raise BadInputError("run", name_or_path, "must be a run folder, or the name of one under runs/")
