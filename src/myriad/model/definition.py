"""Interface between the runtime and a model: a list of layers that can be built on any rank, and how tensor
parallelism shards them.

The first layer takes the batch's tokens (or other inputs). Each further layer takes the previous layer's
output. The last one returns the *sum* of the losses of all targets (a float32 scalar, or a vector whose
further elements are the terms that training adds to it). This module uses
no process group: a layer is built with a `Boundary`, which on one device does nothing.

    definition.build(i, boundary)   layer i with this rank's shapes, on torch's default device (meta: free)
    definition.initial(i)           layer i's whole parameters, by name, the same for every layout
    definition.shards               pattern of a parameter's full name -> how tensor-parallel ranks shard it
    definition.tied                 name -> the parameter that it shares (same values, summed gradients)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from myriad.kernels.documents import Documents
from myriad.model.boundary import Boundary
from myriad.model.context_share import ContextShare
from myriad.model.token_record import TokenRecord

__all__ = [
    "Context",
    "Definition",
    "HasExperts",
    "NamesHidden",
    "ScalesRates",
    "Shard",
    "ShardSpan",
    "StatesShapes",
    "drops_tokens",
    "full_shape",
    "is_expert",
    "is_hidden_matrix",
    "mixtures_of",
    "num_experts_of",
    "rate_of",
    "shard_of",
    "values_of_rank",
]


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter cut along ``dim`` into tp equal shards. With ``parts``, each part is cut separately and a
    rank's pieces are concatenated. Parts are full sizes along ``dim``, for example the query, key and value
    rows of a fused matrix. The last shards of a part that the ranks cannot share evenly end in padding: zeros
    that no rank counts or stores. With ``heads``, the number of heads of each part, a head is never cut: if a
    part has fewer heads than there are ranks, consecutive ranks hold copies of a head, along dimension 0
    only.

        4 query and 2 key heads, tp = 4     rank 0: q0 k0    rank 1: q1 k0    rank 2: q2 k1    rank 3: q3 k1
    """

    dim: int
    parts: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    padded: int = 0
    """Rows in the memory of all ranks together, if they are more than those of the only part."""

    def __post_init__(self) -> None:
        assert not self.heads or (self.dim == 0 and len(self.heads) == len(self.parts))

    def spans(self, full: int, rank: int, size: int) -> "list[ShardSpan]":
        """Return what a rank holds of a dimension of ``full`` elements, in the order of its shard."""
        found: list[ShardSpan] = []
        local = start = 0
        for index, part in enumerate(self.parts or (full,)):
            copies = max(1, size // self.heads[index]) if self.heads else 1
            room = -(-max(part, self.padded) * copies // size)
            first = min(rank // copies * room, part)
            width = min(room, part - first)
            found.append(ShardSpan(local, start + first, width, copies, is_copy=rank % copies > 0, room=room))
            local, start = local + room, start + part
        return found

    def spans_of_shard(self, local: int, rank: int, size: int) -> "tuple[ShardSpan, ...]":
        """Return `spans` for a shard of ``local`` elements."""
        return tuple(self.spans(self.full_size(local, size), rank, size))

    def local_size(self, full: int, size: int) -> int:
        """Return the number of elements along ``dim`` that each rank holds."""
        return sum(span.room for span in self.spans(full, 0, size))

    def full_size(self, local: int, size: int) -> int:
        """Return the number of elements of the whole tensor along ``dim``, from that of a shard."""
        return sum(self.parts) or local * size

    def take(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's shard of the whole tensor."""
        found = []
        for span in self.spans(full.shape[self.dim], rank, size):
            found.append(full.narrow(self.dim, span.start, span.width))
            if span.room > span.width:
                shape = list(full.shape)
                shape[self.dim] = span.room - span.width
                found.append(full.new_zeros(shape))
        return torch.cat(found, self.dim)


class ShardSpan(NamedTuple):
    """Consecutive elements that a rank holds of a parameter's dimension."""

    local: int
    """First element in the rank's shard."""
    start: int
    """First element in the whole tensor."""
    width: int
    copies: int
    """Number of consecutive ranks that hold these elements, each with a part of their gradient."""
    is_copy: bool
    """Whether an earlier rank holds them too, which counts and stores them."""
    room: int
    """Number of elements of the shard, those after ``width`` padding."""


@dataclass(slots=True)
class Context:
    """The data of the current micro-batch that every layer of a stage receives."""

    targets: Any = None
    """Targets of the last layer: for the GPT, token ids ``[B, S]``; ``None`` on other stages. In packed
    windows a target without a loss is ``~token``."""
    documents: Documents | None = None
    """Documents in each window, of all positions; ``None``: each window is one sequence."""
    first_target: int = 0
    """Position in the sequence of the first target."""
    following: Any = None
    """Targets of the positions after those of ``targets``, if only a part of the sequence is computed."""
    samples: torch.Tensor | None = None
    """Global index of each sequence in the whole run, ``[B]`` int64. Dropout depends on it, not on the
    layout."""
    first_position: int | None = None
    """Position at which this rank's share of the sequence (or of its computed part) begins; ``None``:
    directly after the equally long shares of the ranks before it."""
    seed: int = 0
    """Seed from which dropout draws its masks."""
    record: TokenRecord | None = None
    """Where the last layer writes the loss of each target, for evaluation. ``samples`` are then the record's
    rows. ``None``: only the sum is needed."""
    share: ContextShare | None = None
    """The positions of the sequences that this rank has; ``None``: all. ``documents`` and
    ``sequence_targets`` are of whole sequences, everything else of these positions."""
    sequence_targets: Any = None
    """``targets`` of whole sequences, with a ``share``."""
    loss_scale: float = 1.0
    """Factor of the loss: gradients are those of (sum of losses) x this, 1 / number of targets in the global
    batch."""

    def first_of_share(self, length: int, rank: int) -> int:
        """Return the position in the sequence at which the share of a tensor-parallel rank begins, if each
        has ``length`` positions."""
        return rank * length if self.first_position is None else self.first_position

    def positions(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return the positions in the sequence of ``count`` of this rank's, from number ``first`` on, int64
        ``[count]``, or ``[B, count]`` if the rank has others of each sequence."""
        if self.share is None:
            return torch.arange(first, first + count, device=device)
        return self.share.positions(device)[..., first : first + count]


class Definition(Protocol):
    """A model as a list of layers."""

    @property
    def names(self) -> Sequence[str]:
        """Name of each layer, in order. It is the prefix of the layer's full parameter names
        (``blocks.3``)."""
        ...

    @property
    def kinds(self) -> Sequence[str]:
        """Type name of each layer, for ``partition = "type:REGEX"``."""
        ...

    @property
    def shards(self) -> Mapping[str, Shard]:
        """fnmatch pattern of a full parameter name to its shard. A parameter that no pattern matches is whole
        on every rank."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Full name of a parameter to the full name of the parameter that it shares."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream is cut along the sequence over tensor-parallel ranks. Gradients of
        parameters that every rank holds whole are then partial sums."""
        ...

    def build(self, index: int, boundary: Boundary) -> nn.Module:
        """Build layer ``index`` with the shapes of one of ``boundary.size`` ranks. Its forward is
        ``forward(x, context) -> output``."""
        ...

    def initial(self, index: int, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return whole initial parameters of layer ``index`` by their name inside the layer. They are float32
        and equal on every rank. ``names``: return only these."""
        ...


@runtime_checkable
class ScalesRates(Protocol):
    """A model whose matrices have learning rates of their own."""

    def rate_of(self, name: str) -> float:
        """Return the factor of the learning rate of the matrix with this full name."""
        ...


@runtime_checkable
class NamesHidden(Protocol):
    """A model that states which of its matrices map hidden values to hidden values. Of any other model these
    are the matrices of all layers but the first and the last."""

    def is_hidden(self, name: str) -> bool:
        """Return whether both dimensions of the matrix with this full name are hidden ones: of none the
        elements are tokens, positions or classes."""
        ...


@runtime_checkable
class StatesShapes(Protocol):
    """A model that states the shapes of its layers' outputs. Those of any other model are found by running
    its layers on the meta device, which imports PyTorch's compiler: more than a second for each rank."""

    def output_shape(self, index: int, inputs: torch.Size, boundary: Boundary) -> torch.Size:
        """Return the shape of layer ``index``'s output on one rank. ``inputs``: shape of one micro-batch as
        the first layer takes it."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """A model whose blocks may be mixtures of experts."""

    @property
    def num_experts(self) -> int:
        """Experts of each block; 0: none."""
        ...

    def is_expert(self, name: str) -> bool:
        """Return whether the parameter with this full name belongs to one of them, so that ranks that share
        experts hold different ones."""
        ...

    @property
    def mixtures(self) -> Sequence[str]:
        """Full name of each module that holds a router and its experts."""
        ...

    @property
    def balance_bias_rate(self) -> float | None:
        """Change of an expert's bias in a step (`myriad.parallel.router_tables`); ``None``: no biases."""
        ...

    @property
    def keeps_loads(self) -> bool:
        """Whether routers keep the loads of the last batch, for their balance loss."""
        ...

    @property
    def drops_tokens(self) -> bool:
        """Whether experts drop tokens in training (`myriad.model.expert_capacity`)."""
        ...


def is_expert(definition: Definition, name: str) -> bool:
    """Return whether the parameter with this full name belongs to one of the experts of a block."""
    return isinstance(definition, HasExperts) and definition.is_expert(name)


def mixtures_of(definition: Definition) -> Sequence[str]:
    """Return the full name of each module of a model that holds a router and its experts."""
    return definition.mixtures if isinstance(definition, HasExperts) else ()


def num_experts_of(definition: Definition) -> int:
    """Return the experts of each block of a model; 0: it has none."""
    return definition.num_experts if isinstance(definition, HasExperts) else 0


def drops_tokens(definition: Definition) -> bool:
    """Return whether experts of a model drop tokens in training."""
    return isinstance(definition, HasExperts) and definition.drops_tokens


def rate_of(definition: Definition, name: str, shape: torch.Size) -> float:
    """Return the factor of the learning rate of a parameter. Vectors have the rate of the schedule."""
    return definition.rate_of(name) if isinstance(definition, ScalesRates) and len(shape) >= 2 else 1.0


def is_hidden_matrix(definition: Definition, index: int, name: str, shape: torch.Size) -> bool:
    """Return whether a parameter of layer ``index`` is a matrix between hidden values, which only that layer
    uses."""
    if len(shape) != 2 or name in definition.tied or name in definition.tied.values():
        return False
    if isinstance(definition, NamesHidden):
        return definition.is_hidden(name)
    return 0 < index < len(definition.names) - 1


def full_shape(definition: Definition, name: str, shape: Sequence[int], size: int = 1) -> tuple[int, ...]:
    """Return the shape of the whole parameter of this full name, from that on one of ``size`` ranks."""
    shard, found = shard_of(definition, name), list(shape)
    if shard is not None:
        found[shard.dim] = shard.full_size(found[shard.dim], size)
    return tuple(found)


def values_of_rank(
    definition: Definition, name: str, full: torch.Tensor, rank: int = 0, size: int = 1
) -> torch.Tensor:
    """Return what a tensor-parallel rank holds of the parameter of this full name, padding included."""
    shard = shard_of(definition, name)
    return full if shard is None else shard.take(full, rank, size)


def shard_of(definition: Definition, name: str) -> Shard | None:
    """Return how tensor parallelism shards the parameter of this full name; ``None``: it is whole on every
    rank."""
    matches = (shard for pattern, shard in definition.shards.items() if fnmatchcase(name, pattern))
    return next(matches, None)
