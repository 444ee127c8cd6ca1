"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from myriad.errors import BadInputError
from myriad.run import nearest_run

__all__ = [
    "CHECKPOINTS",
    "AsJson",
    "CheckpointPath",
    "ClusterChanges",
    "ClusterFile",
    "HasDriver",
    "Oversubscribes",
    "RunName",
    "UsesAverage",
    "WithoutRanks",
    "existing_run",
]

CHECKPOINTS = (
    "Run (its folder, or its name under runs/), folder of checkpoints, one checkpoint (step-N), or a "
    "URL of one "
    "of these (s3://BUCKET/FOLDER, file:///FOLDER)."
)
"""Help of an argument that `myriad.train.checkpoint_tools.locate_checkpoint` parses."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest.")]
ClusterFile = Annotated[str, typer.Option(metavar="CLUSTER", help="Cluster file or recipe.")]
ClusterChanges = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Change the cluster, e.g. fabric.split=1; repeatable."),
]
HasDriver = Annotated[
    bool,
    typer.Option("--driver/--no-driver", help="Whether `myriad train` watches links and restarts ranks."),
]
Oversubscribes = Annotated[
    bool, typer.Option("--oversubscribe", help="Allow more ranks than cores; ranks then share cores.")
]
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


def existing_run(name_or_path: str) -> Path:
    """Return the folder of a run, given it or its name under runs/. Raises `BadInputError` where there is
    none. It does not import torch, so a wrong name is refused at once."""
    for path in (Path(name_or_path), Path("runs") / name_or_path):
        if (path / "job.toml").is_file():
            return path
    allowed = f"must be a run folder, or the name of one under runs/{nearest_run(name_or_path)}"
    raise BadInputError("run", name_or_path, allowed)
