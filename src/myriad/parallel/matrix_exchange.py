"""Muon's matrices of a chunk: from the ranks that hold parts to the rank that orthogonalizes, and back.

    holders    [-- direction --)[-- direction --)     parts: by tensor parallelism and ZeRO
                     \\__________  ____________/
    owner                       whole direction       Newton-Schulz
                      __________/ \\_____________
    holders    [-- update -----)[-- update -----)     in place of the directions

All data- and tensor-parallel ranks of a pipeline rank share the work (`myriad.optim.matrix_owners`). Both
ways are one all-to-all for each chunk, in the type of the Newton-Schulz iteration, which rounds to it anyway.
The owner assembles the same whole matrix in every layout. Several groups of replicas may hold the whole
state: with ZeRO 0 each replica, else the groups of ``layout.shard_group``. An owner takes directions from its
own group, whose parts have the same bits as every other's, and returns updates to all groups. So groups stay
alike.

An element that several tensor-parallel ranks hold (copies of key and value heads) comes from the first of
them and returns to all.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from myriad.comm.collectives import Pending, start_all_to_all
from myriad.comm.connection_setup import open_collectives
from myriad.comm.groups import Group, Groups
from myriad.model.tensor_shard import TensorShard, shards_of_flat
from myriad.optim.config import OptimizerConfig
from myriad.optim.matrix_owners import assign_owners, newton_schulz_flops
from myriad.optim.muon import MatrixPart, newton_schulz
from myriad.optim.region import Region
from myriad.parallel.chunk import Chunk
from myriad.parallel.parameter_table import Entry
from myriad.program.actions import Kind

__all__ = ["MatrixExchange", "MatrixPeers", "make_exchanges"]

_Place = tuple[slice, slice]
"""Rows and columns of a matrix."""


@dataclass(frozen=True)
class MatrixPeers:
    """The ranks that share the matrices of their chunks."""

    group: Group | None
    members: tuple[tuple[int, int], ...]
    """Index among the ranks of ``dp_cp``, and tensor-parallel index, of each rank of the group."""
    own: int
    """Number of this rank in the group."""
    tp: int
    num_shards: int
    """Consecutive replicas that the state is sharded over."""

    @classmethod
    def of(
        cls, groups: Groups, device: torch.device, *, trains_alone: bool = False, of_experts: bool = False
    ) -> "MatrixPeers":
        """Return the peers of a rank. ``trains_alone``: data-parallel replicas have different parameters.
        ``of_experts``: the peers for experts that this rank does not share with all replicas."""
        grid, layout = groups.grid, groups.grid.layout
        axis, width = ("expert_dp", "etp") if of_experts else ("dp_cp", "tp")
        group = groups.along(*(() if trains_alone else (axis,)), width, purpose="matrices")
        open_collectives(group, device, all_to_all=True)
        replicas = range(1 if trains_alone else grid.size(axis))
        members = tuple((replica, tp) for replica in replicas for tp in range(grid.size(width)))
        own = (0 if trains_alone else grid.index(axis), grid.index(width))
        shards = layout.num_expert_shards if of_experts else layout.num_shards
        return cls(group, members, members.index(own), grid.size(width), shards)


@dataclass(frozen=True)
class _Box:
    """A part of a matrix that a rank holds; ``size`` elements in rows of the flat memory."""

    matrix: int
    place: _Place
    size: int


class _Matrices:
    """The matrices of a chunk. A fused weight is one matrix for each of its parts."""

    def __init__(self, entries: Sequence[Entry], tp: int) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._firsts: dict[str, int] = {}
        self._starts: dict[str, tuple[int, list[int]]] = {}
        for entry in entries:
            self._firsts[entry.name] = len(self.shapes)
            shape = [int(length) for length in entry.shape]
            dim, parts = 0, tuple(shape[:1])
            if entry.cut is not None:
                dim = entry.cut.dim
                parts = entry.cut.parts or (entry.cut.full_size(shape[dim], tp),)
            self._starts[entry.name] = dim, list(accumulate(parts, initial=0))[:-1]
            for part in parts:
                shape[dim] = part
                self.shapes.append((shape[0], shape[1]))

    def box(self, shard: TensorShard) -> _Box:
        """Return the matrix of a shard, and its place there."""
        dim, starts = self._starts[shard.name]
        part = bisect_right(starts, shard.offsets[dim]) - 1
        offsets = list(shard.offsets)
        offsets[dim] -= starts[part]
        rows, columns = (slice(a, a + n) for a, n in zip(offsets, shard.values.shape, strict=True))
        return _Box(self._firsts[shard.name] + part, (rows, columns), shard.values.numel())


@dataclass
class _Owned:
    """A matrix that this rank orthogonalizes, and where its parts lie in the messages."""

    shape: tuple[int, int]
    arrives: list[tuple[int, _Box]]
    """First element in the received message, for each part."""
    leaves: list[tuple[int, _Box]]


class MatrixExchange:
    """Brings a chunk's directions to their owners and the orthogonalized updates back."""

    def __init__(
        self,
        chunk: Chunk,
        peers: MatrixPeers,
        config: OptimizerConfig,
        dtype: torch.dtype,
        loads: list[float],
    ) -> None:
        """``dtype``: type of the messages and of the Newton-Schulz iteration. ``loads``: as for
        `assign_owners`."""
        self._chunk, self._peers, self._dtype = chunk, peers, dtype
        self._iterations = config.muon_iterations
        self._entries = [entry for entry in chunk.entries if entry.orthogonalized]
        self._matrices = _Matrices(self._entries, peers.tp)
        shapes = self._matrices.shapes
        self._owners = assign_owners(
            [newton_schulz_flops(*shape, self._iterations) for shape in shapes], loads
        )
        self._held = list(self._own_parts(copies=True))
        self._device = chunk.master.device
        self._pending = Pending()
        self._sent = self._received = torch.empty(0)
        if peers.group is not None:
            self._plan()

    def parts_of(self, region: Region) -> list[MatrixPart]:
        """Return the parts of matrices in one region."""
        if not region.orthogonalized:
            return []
        return [part for entry, _, part in self._held if entry.rate == region.rate]

    # Who holds what

    def _shards(
        self, member: int, flat: torch.Tensor, *, copies: bool
    ) -> Iterator[tuple[Entry, TensorShard]]:
        """Yield the parts of matrices in the slice of a rank. ``flat``: the slice, or memory of its size.
        ``copies``: yield elements that an earlier tensor-parallel rank holds too."""
        chunk, (replica, tp) = self._chunk, self._peers.members[member]
        length = chunk.stop - chunk.start
        first = replica % self._peers.num_shards * length
        for entry in self._entries:
            start = chunk.start_of(entry)
            low, high = max(start, first), min(start + entry.shape.numel(), first + length)
            if low >= high or (entry.cut is None and tp > 0 and not copies):
                continue
            values = flat[low - first : high - first]
            for shard in shards_of_flat(
                entry.name,
                entry.shape,
                low - start,
                values,
                entry.cut,
                tp,
                self._peers.tp,
                owned_only=not copies,
            ):
                yield entry, shard

    def _own_parts(self, *, copies: bool) -> Iterator[tuple[Entry, _Box, MatrixPart]]:
        """Yield the parts that this rank holds."""
        own, chunk = self._peers.own, self._chunk
        values = self._shards(own, chunk.master, copies=copies)
        gradients = self._shards(own, chunk.gradients, copies=copies)
        for (entry, shard), (_, gradient) in zip(values, gradients, strict=True):
            box = self._matrices.box(shard)
            shape = self._matrices.shapes[box.matrix]
            yield entry, box, MatrixPart(shard.values, gradient.values, shape)

    def _boxes(self, member: int, *, copies: bool) -> list[_Box]:
        flat = torch.empty(self._chunk.stop - self._chunk.start, device="meta")
        return [self._matrices.box(shard) for _, shard in self._shards(member, flat, copies=copies)]

    def _takes_from(self, owner: int, holder: int) -> bool:
        """Return whether an owner takes directions from a holder."""
        groups = [replica // self._peers.num_shards for replica, _ in self._peers.members]
        return groups[owner] == groups[holder]

    def _plan(self) -> None:
        """Lay out the messages. Both ends list the parts by the other rank, and in the order of memory."""
        ranks, own = range(len(self._peers.members)), self._peers.own
        kept, held = list(self._own_parts(copies=False)), self._held
        self._leaving = [
            [(box, part.update) for _, box, part in kept if self._owners[box.matrix] == owner]
            if self._takes_from(owner, own)
            else []
            for owner in ranks
        ]
        """Parts of directions, by owner."""
        self._returning = [
            [(box, part.update) for _, box, part in held if self._owners[box.matrix] == owner]
            for owner in ranks
        ]
        mine = {index for index, owner in enumerate(self._owners) if owner == own}
        arriving = [
            [box for box in self._boxes(holder, copies=False) if box.matrix in mine]
            if mine and self._takes_from(own, holder)
            else []
            for holder in ranks
        ]
        results = [
            [box for box in self._boxes(holder, copies=True) if box.matrix in mine] if mine else []
            for holder in ranks
        ]
        self._arriving_sizes, self._result_sizes = _sizes(arriving), _sizes(results)
        arrives, leaves = _by_matrix(arriving), _by_matrix(results)
        shapes = self._matrices.shapes
        self._owned = [_Owned(shapes[index], arrives[index], leaves[index]) for index in sorted(mine)]

    # The actions of a step

    def do(self, kind: Kind) -> None:
        """Run an action of `ORTHOGONALIZATION`. All ranks of the group run each once in a step, in their
        order."""
        self._do[kind]()

    @cached_property
    def _do(self) -> Mapping[Kind, Callable[[], None]]:
        return {
            Kind.START_GATHER_MOMENTUM: self._start_gather,
            Kind.AWAIT_GATHER_MOMENTUM: self._await_gather,
            Kind.ORTHOGONALIZE: self._orthogonalize,
            Kind.START_SCATTER_UPDATE: self._start_scatter,
            Kind.AWAIT_SCATTER_UPDATE: self._await_scatter,
        }

    def _start_gather(self) -> None:
        """Send the directions to their owners."""
        if self._peers.group is None:
            return
        self._sent = self._empty(sum(_view_sizes(self._leaving)))
        start = 0
        for box, update in (one for owner in self._leaving for one in owner):
            self._sent[start : start + box.size].view(update.shape).copy_(update)
            start += box.size
        self._send(self._arriving_sizes, _view_sizes(self._leaving))

    def _await_gather(self) -> None:
        """Wait until the directions of this rank's matrices have arrived."""
        self._pending.wait()
        self._sent = torch.empty(0)

    def _orthogonalize(self) -> None:
        """Orthogonalize this rank's matrices."""
        if self._peers.group is None:
            for _, _, part in self._held:
                whole = part.update.to(self._dtype, copy=True)
                part.update.copy_(newton_schulz(whole, self._iterations))
            return
        self._sent = self._empty(sum(self._result_sizes))
        for matrix in self._owned:
            whole = self._empty(*matrix.shape)
            for start, box in matrix.arrives:
                into = whole[box.place]
                into.copy_(self._received[start : start + box.size].view(into.shape))
            whole = newton_schulz(whole, self._iterations)
            for start, box in matrix.leaves:
                result = whole[box.place]
                self._sent[start : start + box.size].view(result.shape).copy_(result)
        self._received = torch.empty(0)

    def _start_scatter(self) -> None:
        """Return the updates to the holders."""
        if self._peers.group is not None:
            self._send(_view_sizes(self._returning), self._result_sizes)

    def _await_scatter(self) -> None:
        """Wait for the updates, and write them over the directions."""
        self._pending.wait()
        if self._peers.group is None:
            return
        start = 0
        for box, update in (one for owner in self._returning for one in owner):
            update.copy_(self._received[start : start + box.size].view(update.shape))
            start += box.size
        self._sent = self._received = torch.empty(0)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _send(self, arriving: list[int], leaving: list[int]) -> None:
        self._received = self._empty(sum(arriving))
        self._pending = start_all_to_all(self._received, self._sent, self._peers.group, arriving, leaving)


def make_exchanges(
    chunks: Iterable[Chunk], peers: MatrixPeers, config: OptimizerConfig, dtype: torch.dtype
) -> dict[Chunk, MatrixExchange]:
    """Return the exchange of each chunk that has matrices to orthogonalize."""
    loads = [0.0] * len(peers.members)
    return {
        chunk: MatrixExchange(chunk, peers, config, dtype, loads)
        for chunk in chunks
        if any(entry.orthogonalized for entry in chunk.entries)
    }


def _sizes(boxes: Sequence[Sequence[_Box]]) -> list[int]:
    return [sum(box.size for box in own) for own in boxes]


def _view_sizes(views: Sequence[Sequence[tuple[_Box, torch.Tensor]]]) -> list[int]:
    return [sum(box.size for box, _ in own) for own in views]


def _by_matrix(boxes: Sequence[Sequence[_Box]]) -> dict[int, list[tuple[int, _Box]]]:
    """Return the boxes of each matrix, with their first elements in a message that holds all of them."""
    found: defaultdict[int, list[tuple[int, _Box]]] = defaultdict(list)
    start = 0
    for box in (box for own in boxes for box in own):
        found[box.matrix].append((start, box))
        start += box.size
    return found
