"""The weights of a model wherever they come from, under our names, read one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from myriad.checkpoint.folder import Checkpoint
from myriad.checkpoint.store import load_model
from myriad.model.config import ModelConfig

__all__ = ["CheckpointWeights", "Shapes", "Weights"]

_PREFIX = "model."

Shapes = Mapping[str, tuple[int, ...]]
"""Of whole tensors, by full name."""


class Weights(Protocol):
    """What can be asked of weights on disk."""

    where: str
    """Path or URL."""
    run: Path | None
    """The run folder that they are of, if any."""
    model: ModelConfig | None
    """What they are of, where that is known."""
    shapes: Shapes
    """Of every tensor, from headers alone."""

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, in the precision in which it is kept."""
        ...


class CheckpointWeights:
    """Those of one checkpoint of ours."""

    def __init__(self, checkpoint: Checkpoint, run: Path | None, model: ModelConfig | None) -> None:
        """Reads names and shapes, no values."""
        self.where, self.run, self.model = checkpoint.where, run, model
        self.shapes: Shapes = {
            name.removeprefix(_PREFIX): shape
            for name, shape in checkpoint.manifest().shapes.items()
            if name.startswith(_PREFIX)
        }

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        return load_model(self.where, _PREFIX + name)[""]
