"""Arguments that name a run or a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from myriad.errors import BadInputError
from myriad.run import nearest_run

__all__ = ["CHECKPOINTS", "RunName", "UsesAverage", "WithoutRanks", "existing_run"]

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")]
WithoutRanks = Annotated[
    str | None,
    typer.Option(
        metavar="RANKS",
        help="Estimate the step time if these ranks (3 or 0-7,12) were as fast as their peers.",
    ),
]
UsesAverage = Annotated[
    bool,
    typer.Option("--ema", help="Use the moving average of the weights, which optimizer.ema_decay keeps."),
]

CHECKPOINTS = (
    "Run (its folder, or its name under runs/), folder of checkpoints, one checkpoint (step-N), or a "
    "URL of one "
    "of these (s3://BUCKET/FOLDER, file:///FOLDER)."
)
"""Help of an argument that `myriad.train.checkpoint_tools.locate_checkpoint` parses."""


def existing_run(name_or_path: str) -> Path:
    """Return the folder of a run, given it or its name under runs/. Raises `BadInputError` where there is
    none. It does not import torch, so a wrong name is refused at once."""
    for path in (Path(name_or_path), Path("runs") / name_or_path):
        if (path / "job.toml").is_file():
            return path
    allowed = f"must be a run folder, or the name of one under runs/{nearest_run(name_or_path)}"
    raise BadInputError("run", name_or_path, allowed)
