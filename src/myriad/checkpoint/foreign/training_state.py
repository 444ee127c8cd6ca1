"""What an import needs from another system's checkpoint, independent of the system.

A source names full tensors as that system does, for the weights and for each moment of Adam. Each
`TensorMapping` converts them to one of Myriad's tensors. It treats weights and their moments alike (a
permutation of rows), so optimizer state needs no rules of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from myriad.checkpoint.foreign.hugging_face_names import TensorMapping
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["MOMENTS", "ForeignState", "Kind", "TensorSource", "whole_number"]

Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
KEY = "CHECKPOINT"


class TensorSource(Protocol):
    """Full tensors of a checkpoint, under the names of the system that wrote it."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight; ``None``: there is no weight with this name."""
        ...

    def names(self) -> set[str]:
        """Return the names of all weights in this checkpoint."""
        ...

    def has_optimizer(self) -> bool:
        """Whether the checkpoint has both moments of Adam."""
        ...

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """Return one full tensor. Weights come from the float32 master copy if there is one."""
        ...


@dataclass
class ForeignState:
    """A checkpoint of another system: the model, its tensors under Myriad's names, and training progress."""

    where: Path
    system: str
    """System, format and layout, for messages: ``Megatron-LM, torch, tp 2, pp 2``."""
    model: ModelConfig
    mappings: Mapping[str, TensorMapping]
    """Mapping of each tensor, by Myriad's name."""
    source: TensorSource
    step: int
    """Number of completed iterations."""
    samples: int
    """Number of sequences trained on."""
    settings: Mapping[str, Any]
    """Settings that the checkpoint has beside the model, by job key (``optimizer.learning_rate``)."""
    notes: list[str] = field(default_factory=list)
    """Differences from the source system, one sentence each."""
    norms_from_one: bool = False
    """Whether norm weights are stored minus one (``apply_layernorm_1p``)."""
    unused: frozenset[str] = frozenset()
    """Names of source tensors that Myriad's model does not use."""

    def check(self) -> "ForeignState":
        """Compare names and shapes with the model before any value is read. Raises `BadInputError`."""
        for mapping in self.mappings.values():
            for name, shape in mapping.their_shapes().items():
                found = self.source.shape(name)
                if found != shape:
                    is_there = "is not there" if found is None else f"is {found}"
                    problem = f"not the model that it describes: {name} should be {shape}, {is_there}"
                    raise BadInputError(KEY, str(self.where), problem)
        used = {name for mapping in self.mappings.values() for name in mapping.their_shapes()}
        if left := sorted(self.source.names() - used - self.unused):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            problem = f"holds tensors that the model does not have: {', '.join(left[:3])}{more}"
            raise BadInputError(KEY, str(self.where), problem[:400])
        return self

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """Return one of Myriad's tensors in float32."""
        mapping = self.mappings[name]
        values = mapping.read(lambda their: self.source.read(kind, their)).float()
        is_norm = name.split(".")[-2] in ("norm", "norm1", "norm2", "q_norm", "k_norm")
        if kind == "weights" and self.norms_from_one and is_norm and name.endswith("weight"):
            values = values + 1
        return values


def whole_number(value: object, name: str, where: object, low: int = 0, high: int = 2**62) -> int:
    """Return ``value`` if it is an integer in the range. Raises `BadInputError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadInputError(
            KEY, str(where), f"{name} is {str(value)[:100]!r}: a whole number of {low} or more"
        )
    return value
