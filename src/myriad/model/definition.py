"""What the runtime asks of a model: a list of layers that can be built anywhere, and how tensor parallelism
cuts them.

The first layer takes the batch's tokens (or whatever the inputs are), each next one takes its predecessor's
output, the last one returns the *sum* of the losses of all targets (a float32 scalar). Nothing here knows a
process group: a layer is built with a `Boundary`, which on one device does nothing.

    definition.build(i, boundary)   layer i with this rank's shapes, on torch's default device (meta: free)
    definition.initial(i)           layer i's whole parameters, by name, the same for every layout
    definition.shards               pattern of a parameter's full name -> how tensor-parallel ranks cut it
    definition.tied                 name -> the name of the parameter it is (same values, summed gradients)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn

from myriad.model.boundary import Boundary

__all__ = ["Context", "Definition", "Shard", "shard_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter cut along ``dim`` into tp equal parts; with ``parts``, each part (given as full sizes along
    ``dim``, for example the query, key and value rows of a fused matrix) is cut and the pieces are put
    together again."""

    dim: int
    parts: tuple[int, ...] = ()

    def take(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Rank's part of the whole tensor."""
        parts = full.split(self.parts or full.shape[self.dim], self.dim)
        return torch.cat([part.chunk(size, self.dim)[rank] for part in parts], self.dim)


@dataclass(slots=True)
class Context:
    """What every layer of a stage sees of the current micro-batch."""

    targets: Any = None
    """What the last layer compares with: for the GPT, token ids ``[B, S]``; ``None`` on other stages."""
    samples: torch.Tensor | None = None
    """Global index of each sequence in the whole run, ``[B]`` int64: dropout depends on it, not on the
    layout."""
    first_position: int | None = None
    """Where this rank's share of the sequence begins; ``None``: after those of the ranks before it, as long
    as its own."""
    seed: int = 0
    """Of dropout."""
    loss_scale: float = 1.0
    """Gradients are those of (sum of losses) x this: 1 / number of targets in the global batch."""


class Definition(Protocol):
    """A model as a list of layers."""

    @property
    def names(self) -> Sequence[str]:
        """Name of each layer, in order: the prefix of its parameters' full names (``blocks.3``)."""
        ...

    @property
    def kinds(self) -> Sequence[str]:
        """Type name of each layer, for ``partition = "type:REGEX"``."""
        ...

    @property
    def shards(self) -> Mapping[str, Shard]:
        """fnmatch pattern of a full parameter name to its cut; a name no pattern matches is whole on every
        rank."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Full parameter name to the full name of the one it shares."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """The residual stream is cut along the sequence over tensor-parallel ranks: gradients of parameters
        that every rank holds whole are then partial sums."""
        ...

    def build(self, index: int, boundary: Boundary) -> nn.Module:
        """Layer ``index`` with the shapes of one of ``boundary.size`` ranks; ``forward(x, context) ->
        output``."""
        ...

    def initial(self, index: int, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return whole initial parameters of layer ``index`` by their name inside the layer, float32, the
        same on every rank; those of ``names`` alone, where it is given."""
        ...


def shard_of(definition: Definition, name: str) -> Shard | None:
    """How tensor parallelism cuts the parameter of this full name; ``None``: whole on every rank."""
    matches = (shard for pattern, shard in definition.shards.items() if fnmatchcase(name, pattern))
    return next(matches, None)
