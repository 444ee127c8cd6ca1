"""What was published of a model's training, to stand beside a prediction."""

import csv
from dataclasses import dataclass
from importlib import resources

from myriad.model.config import ModelConfig

__all__ = ["CurvePoint", "curve_points"]


@dataclass(frozen=True)
class CurvePoint:
    """A row of table 2 of arXiv 2402.15627: 175B, on A100."""

    system: str
    accelerators: int
    global_batch: int
    seconds: float
    tokens_per_second: float
    mfu: float


def curve_points(model: ModelConfig) -> list[CurvePoint]:
    """Of this model; none for all but MegaScale's of 175B."""
    if (model.layers, model.hidden, model.heads, model.sequence) != (96, 12288, 128, 2048):
        return []
    text = (resources.files("myriad") / "planner" / "tables" / "megascale_table2.csv").read_text()
    return [
        CurvePoint(
            row["system"],
            int(row["gpus"]),
            int(row["batch_sequences"]),
            float(row["iteration_seconds"]),
            float(row["tokens_per_second"]),
            float(row["mfu_percent"]) / 100,
        )
        for row in csv.DictReader(text.splitlines())
    ]
