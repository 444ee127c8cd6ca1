"""Bytes of Muon's matrices on a rank: the moment that they do not have, and buffers of the orthogonalization.

    START_GATHER_MOMENTUM   a message out, and room for the directions of this rank's own matrices
    AWAIT_GATHER_MOMENTUM   the message out is gone
    ORTHOGONALIZE           the updates of its own matrices, for all holders; the directions are gone after it
    START_SCATTER_UPDATE    and room for the updates of what it holds
    AWAIT_SCATTER_UPDATE    nothing

While a matrix [m, n], m <= n, is orthogonalized there are two of its size and two [m, m]. A rank that shares
its matrices with no other rank has only these. Every number is that of the rank with the most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from myriad.model.matrix_shapes import HiddenMatrix, hidden_matrices, matrices_of_rank
from myriad.optim.matrix_owners import assign_owners, newton_schulz_flops
from myriad.planner.workload import Workload
from myriad.program.actions import Kind

__all__ = ["MatrixBytes", "MatrixSharers", "matrix_bytes"]


@dataclass(frozen=True)
class MatrixBytes:
    """Bytes of one stage's matrices."""

    elements: float = 0.0
    """Elements that a tensor-parallel rank holds."""
    sent: float = 0.0
    arriving: float = 0.0
    results: float = 0.0
    returning: float = 0.0
    workspace: float = 0.0

    def __add__(self, other: "MatrixBytes") -> "MatrixBytes":
        """Return the bytes of both, whose messages are in flight together."""
        pairs = {one.name: (getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        workspace = max(pairs.pop("workspace"))
        return MatrixBytes(**{name: sum(pair) for name, pair in pairs.items()}, workspace=workspace)

    def after_begin_of(self, kind: Kind) -> float | None:
        """Return the bytes in messages from an action's begin on; ``None``: the action changes nothing."""
        return {
            Kind.START_GATHER_MOMENTUM: self.sent + self.arriving,
            Kind.ORTHOGONALIZE: self.arriving + self.results,
            Kind.START_SCATTER_UPDATE: self.results + self.returning,
        }.get(kind)

    def after_end_of(self, kind: Kind) -> float | None:
        """Return the bytes in messages from an action's end on; ``None``: the action changes nothing."""
        return {
            Kind.AWAIT_GATHER_MOMENTUM: self.arriving,
            Kind.ORTHOGONALIZE: self.results,
            Kind.AWAIT_SCATTER_UPDATE: 0.0,
        }.get(kind)

    @property
    def alone(self) -> float:
        """Largest number of bytes if the stage's actions follow each other without those of another."""
        messages = (self.sent, self.results + self.workspace, self.results + self.returning - self.arriving)
        return self.arriving + max(messages)


def matrix_bytes(
    workload: Workload,
    stages: Sequence[Sequence[int]],
    sizes: Sequence[float],
    *,
    of_experts: bool = False,
) -> list[MatrixBytes]:
    """Return the bytes of each stage of a pipeline rank. ``stages``: their layers, in the order of the rank's
    chunks. ``sizes``: elements of these chunks. ``of_experts``: the chunks of experts, which have their own
    where ranks share experts (`StageMemory.expert_chunk`)."""
    if not workload.orthogonalizes:
        return [MatrixBytes() for _ in stages]
    layout = workload.layout
    sharers = MatrixSharers.of(workload, of_experts=of_experts)
    loads = [0.0] * (sharers.replicas * sharers.tp)
    found = []
    for layers, size in zip(stages, sizes, strict=True):
        every = (hidden_matrices(workload.model, layer, layout.tp, etp=layout.etp) for layer in layers)
        matrices = [one for of_layer in every for one in of_layer]
        if layout.folds_experts:
            matrices = matrices_of_rank(matrices, layout.ep, of_experts=of_experts)
        found.append(_of_stage(workload, sharers, matrices, size, loads))
    return found


class MatrixSharers(NamedTuple):
    """The ranks that share the orthogonalization of matrices."""

    replicas: int
    shards: int
    """Consecutive ones that the state is sharded over."""
    tp: int
    """Tensor-parallel ranks of each replica that share the matrices."""

    @classmethod
    def of(cls, workload: Workload, *, of_experts: bool) -> "MatrixSharers":
        """Return those of a rank's matrices. ``of_experts``: of experts that not all replicas hold."""
        layout, together = workload.layout, workload.comm.sync_every == 1
        if of_experts:
            replicas = layout.num_expert_replicas if together else 1
            return cls(replicas, layout.num_expert_shards, layout.expert_tp)
        replicas = layout.num_holders if together else 1
        return cls(replicas, min(layout.num_shards, replicas), layout.tp)


def _of_stage(
    workload: Workload,
    sharers: MatrixSharers,
    matrices: Sequence[HiddenMatrix],
    size: float,
    loads: list[float],
) -> MatrixBytes:
    each, (replicas, shards, tp) = workload.matrix_bytes, sharers
    iterations = workload.newton_schulz.iterations
    elements = sum(one.local for one in matrices)
    workspace = each * max(map(_workspace, matrices), default=0.0)
    if len(loads) == 1:
        return MatrixBytes(elements, workspace=workspace)
    flops = [newton_schulz_flops(one.rows, one.columns, iterations) for one in matrices]
    owned, returned, offered = ([0.0] * len(loads) for _ in range(3))
    for owner, one in zip(assign_owners(flops, loads), matrices, strict=True):
        owned[owner] += one.rows * one.columns
        returned[owner] += one.local * tp * (replicas // shards)
        offered[owner // (tp * shards)] += one.local
    # matrices come first in a chunk, so the first slices hold nothing else
    held = min(size / shards, elements)
    sent = min(held, max(offered))
    return MatrixBytes(elements, each * sent, each * max(owned), each * max(returned), each * held, workspace)


def _workspace(matrix: HiddenMatrix) -> float:
    short = min(matrix.rows, matrix.columns)
    return 2.0 * matrix.rows * matrix.columns + 2.0 * short**2
