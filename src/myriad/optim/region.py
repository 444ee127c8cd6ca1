"""What an optimizer sees of a sharded model: flat float32 memory, and whose parameter each part of it is.

Data parallelism lays a chunk's parameters end to end in one flat buffer (decayed ones first) and gives each
rank a slice. A `Region` is a contiguous part of that slice in which weight decay is the same for every
element; a `Piece` says which parameter a part of it is. AdamW needs only regions; LAMB and gradient clipping
need norms per parameter, of which this rank may hold a part or nothing: so they work on a table with a row
for *every* parameter of the rank's chunks, which `reduce_table` sums over the ranks that hold the rest.
"""

from dataclasses import dataclass

import torch

__all__ = ["Piece", "Region"]


@dataclass(frozen=True, slots=True)
class Piece:
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
    pieces: tuple[Piece, ...]
