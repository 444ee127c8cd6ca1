"""What an import needs of another system's checkpoint, whatever the system.

A source names whole tensors as that system does, for the weights and for each moment of Adam; the `Link` s
of its names make Myriad's tensors of them. What a link does to weights (rows change places) it does to their
moments, so optimizer state needs no rules of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from myriad.checkpoint.hugging_face_names import Link
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["MOMENTS", "ForeignState", "Kind", "TensorSource", "whole_number"]

Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
KEY = "CHECKPOINT"


class TensorSource(Protocol):
    """Whole tensors of a checkpoint under the names of the system that wrote it."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a weight; ``None``: there is none of this name."""
        ...

    def names(self) -> set[str]:
        """Return the names of all weights in this checkpoint."""
        ...

    def has_optimizer(self) -> bool:
        """Whether both moments are there."""
        ...

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """One whole tensor. Weights come from the master copy in float32 where there is one."""
        ...


@dataclass
class ForeignState:
    """One checkpoint: what the model is, its tensors under Myriad's names, and where training was."""

    where: Path
    system: str
    """System, format and layout that wrote it, for messages: ``Megatron-LM, torch, tp 2, pp 2``."""
    model: ModelConfig
    links: Mapping[str, Link]
    """Link of each tensor, by Myriad's name."""
    source: TensorSource
    step: int
    """Number of completed iterations."""
    samples: int
    """Number of sequences trained on."""
    settings: Mapping[str, Any]
    """Keys of a job that the checkpoint states (``optimizer.learning_rate``), beside the model."""
    notes: list[str] = field(default_factory=list)
    """Differences from the source system, one sentence each."""
    norms_from_one: bool = False
    """Weights of norms are stored less one (``apply_layernorm_1p``)."""
    unused: frozenset[str] = frozenset()
    """Names of theirs that no tensor here needs."""

    def check(self) -> "ForeignState":
        """Compare names and shapes with the model, before any value is read. Raises `BadInputError`."""
        for link in self.links.values():
            for name, shape in link.their_shapes().items():
                found = self.source.shape(name)
                if found != shape:
                    is_there = "is not there" if found is None else f"is {found}"
                    problem = f"not the model that it describes: {name} should be {shape}, {is_there}"
                    raise BadInputError(KEY, str(self.where), problem)
        used = {name for link in self.links.values() for name in link.their_shapes()}
        if left := sorted(self.source.names() - used - self.unused):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            problem = f"holds tensors that no part of the model is: {', '.join(left[:3])}{more}"
            raise BadInputError(KEY, str(self.where), problem[:400])
        return self

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """One tensor of Myriad's in float32."""
        link = self.links[name]
        values = link.read(lambda their: self.source.read(kind, their)).float()
        is_norm = name.split(".")[-2].startswith("norm")
        if kind == "weights" and self.norms_from_one and is_norm and name.endswith("weight"):
            values = values + 1
        return values


def whole_number(value: object, name: str, where: object, low: int = 0, high: int = 2**62) -> int:
    """``value`` if it is a whole number in the range. Raises `BadInputError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadInputError(
            KEY, str(where), f"{name} is {str(value)[:100]!r}: a whole number of {low} or more"
        )
    return value
