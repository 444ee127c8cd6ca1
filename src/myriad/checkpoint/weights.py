"""The weights of a model wherever they come from, under our names, read one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from myriad.checkpoint.store import load_model
from myriad.model.config import ModelConfig

__all__ = ["CheckpointWeights", "Shapes", "Weights"]

_PREFIX = "model."

Shapes = Mapping[str, tuple[int, ...]]
"""Of whole tensors, by full name."""


class Weights(Protocol):
    """What can be asked of weights on disk."""

    path: Path
    model: ModelConfig | None
    """What they are of, where that is known."""
    shapes: Shapes
    """Of every tensor, from headers alone."""

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, in the precision in which it is kept."""
        ...


class CheckpointWeights:
    """Those of one checkpoint folder of ours."""

    def __init__(self, path: Path, model: ModelConfig | None) -> None:
        """Reads names and shapes, no values."""
        self.path, self.model = path, model
        kept = FileSystemReader(path).read_metadata().state_dict_metadata
        self.shapes: Shapes = {
            name.removeprefix(_PREFIX): tuple(tensor.size)
            for name, tensor in kept.items()
            if isinstance(tensor, TensorStorageMetadata) and name.startswith(_PREFIX)
        }

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        return load_model(self.path, _PREFIX + name)[""]
