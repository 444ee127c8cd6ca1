"""Arguments and options that several commands take."""

from typing import Annotated

import typer

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
]

CHECKPOINTS = (
    "Run (its folder, or its name under runs/), folder of checkpoints, one checkpoint (step-N), or a "
    "URL of one "
    "of these (s3://BUCKET/FOLDER, file:///FOLDER)."
)
"""Help of an argument that `myriad.train.checkpoint_tools.locate_checkpoint` parses."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest.")]
ClusterFile = Annotated[
    str, typer.Option(metavar="CLUSTER", help="Cluster file, recipe, or a number of accelerators: 256xb200.")
]
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
