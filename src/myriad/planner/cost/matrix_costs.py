"""Seconds of Muon's orthogonalization of a stage's matrices, which data- and tensor-parallel ranks share.

gather           momentum to the owners of the matrices: of a rank's part, all but what it owns itself
orthogonalize    the Newton-Schulz iterations of the rank with the most work; owners are the runtime's. A rank
                 that owns no matrix of a stage does not wait for it, but goes on to the next ones, as many as
                 `myriad.program.passes.stages_ahead` allows: a stage takes its part of the time of all these
scatter          updates to the holders; with ZeRO 0 every replica gets all of them, and with groups of
                 ``layout.shard_group`` every group

Both messages are all-to-alls: one message to each other rank at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from myriad.model.matrix_shapes import HiddenMatrix, matrices_of_rank
from myriad.optim.matrix_owners import assign_owners, newton_schulz_flops
from myriad.planner.cluster_config import Accelerator, Cluster
from myriad.planner.cost.collective_costs import CommGroup, tensor_group
from myriad.planner.cost.operator_costs import matmul_seconds
from myriad.planner.memory.matrix_memory import MatrixSharers
from myriad.planner.workload import Workload
from myriad.program.passes import stages_ahead

__all__ = ["MatrixCosts", "matrix_costs", "newton_schulz_seconds"]


@dataclass(frozen=True)
class MatrixCosts:
    """Seconds of a stage's matrices in an iteration."""

    gather: float = 0.0
    orthogonalize: float = 0.0
    scatter: float = 0.0

    def __add__(self, other: "MatrixCosts") -> "MatrixCosts":
        """Return the seconds of both, one after the other."""
        return MatrixCosts(
            self.gather + other.gather,
            self.orthogonalize + other.orthogonalize,
            self.scatter + other.scatter,
        )


def matrix_costs(
    matrices: Sequence[HiddenMatrix],
    workload: Workload,
    cluster: Cluster,
    data: CommGroup,
    experts: CommGroup,
    *,
    num_chunks: int = 1,
) -> MatrixCosts:
    """Return the costs of the matrices of one stage of the program. ``data``: the group of the replicas that
    hold them. ``experts``: that of the ranks that hold the same experts, where not all replicas do.
    ``num_chunks``: stages of the program for each one of the layout."""
    layout = workload.layout
    if not layout.folds_experts:
        return _costs_in(data, matrices, workload, cluster, num_chunks)
    others, routed = (matrices_of_rank(matrices, layout.ep, of_experts=which) for which in (False, True))
    found = _costs_in(data, others, workload, cluster, num_chunks)
    return found + _costs_in(experts, routed, workload, cluster, num_chunks, of_experts=True)


def _costs_in(
    data: CommGroup,
    matrices: Sequence[HiddenMatrix],
    workload: Workload,
    cluster: Cluster,
    num_chunks: int,
    *,
    of_experts: bool = False,
) -> MatrixCosts:
    if not matrices:
        return MatrixCosts()
    replicas, shards, tp = MatrixSharers.of(workload, of_experts=of_experts)
    sharers = replicas * tp
    seconds = _orthogonalization(matrices, workload, cluster.accelerator, sharers, num_chunks)
    group = data if replicas > 1 else tensor_group(cluster, float(tp))
    held = sum(matrix.local for matrix in matrices) * workload.matrix_bytes
    sent = held / replicas * (1 - 1 / (shards * tp))
    received = held / shards * (1 - 1 / sharers)
    return MatrixCosts(_all_to_all(group, sent), seconds, _all_to_all(group, received))


def _orthogonalization(
    matrices: Sequence[HiddenMatrix],
    workload: Workload,
    accelerator: Accelerator,
    sharers: int,
    num_chunks: int,
) -> float:
    """Return the seconds of the rank with the most work, in as many such stages as work at a time, for one of
    them."""
    layout, num_stages = workload.layout, 1
    if workload.overlap.optimizer:
        ahead = stages_ahead(layout.num_matrix_sharers, offloads_state=layout.offload_optimizer)
        num_stages = min(ahead + 1, num_chunks * layout.virtual_stages)
    iterations, value_bytes = workload.newton_schulz.iterations, workload.matrix_bytes
    flops = [newton_schulz_flops(one.rows, one.columns, iterations) for one in matrices]
    each = [
        newton_schulz_seconds(accelerator, one.rows, one.columns, iterations, value_bytes) for one in matrices
    ]
    seconds, loads = [0.0] * sharers, [0.0] * sharers
    for _ in range(num_stages):
        for owner, one in zip(assign_owners(flops, loads), each, strict=True):
            seconds[owner] += one
    return max(seconds) / num_stages


def newton_schulz_seconds(
    accelerator: Accelerator, rows: int, columns: int, iterations: int, value_bytes: int
) -> float:
    """Return the seconds of orthogonalizing a matrix."""
    short, long = sorted((rows, columns))
    products = ((short, short, long), (short, short, short), (short, long, short))
    each = sum(float(matmul_seconds(accelerator, *one, value_bytes=value_bytes)) for one in products)
    return iterations * each


def _all_to_all(group: CommGroup, num_bytes: float) -> float:
    """Return the seconds in which a rank sends or receives so many bytes, to or from all others."""
    if num_bytes == 0:
        return 0.0
    begun = group.launch_seconds + group.latency_seconds + group.skew_seconds
    return float(begun + num_bytes / group.bytes_per_second)
