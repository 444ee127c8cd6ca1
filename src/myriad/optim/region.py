"""The optimizer's view of a sharded model: flat float32 memory, and the parameter of each part of it.

Data parallelism lays a chunk's parameters end to end in one flat buffer (those with weight decay first) and
gives each rank a slice. A `Region` is a contiguous part of that slice in which weight decay, the factor of
the learning rate and the kind of the update are the same for every element. A `ParameterSlice` assigns a part
of a region to a parameter. AdamW needs only regions. LAMB and gradient clipping need norms per parameter, of
which this rank may hold a part or nothing. They therefore use a table with a row for *every* parameter of the
rank's chunks.
`reduce_table` sums it over the ranks that hold the rest.
"""

from dataclasses import dataclass

import torch

__all__ = ["ParameterSlice", "Region"]


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Elements ``start:stop`` of a region belong to row ``parameter`` of the table of parameters."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous master values and their gradients, both ``[n]`` float32, on this rank."""

    values: torch.Tensor
    gradients: torch.Tensor
    decays: bool
    pieces: tuple[ParameterSlice, ...]
    rate: float = 1.0
    """Factor of the learning rate. Weight decay, in units of the learning rate, does not have it."""
    orthogonalized: bool = False
    """Whether the region holds matrices that Muon orthogonalizes."""
