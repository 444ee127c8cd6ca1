"""Messages among data-parallel replicas: gathers of parameters, and reductions of gradients.

Myriad's are chunks, by the program. Others differ:

    FrameworkProfile.sharded_at_ends    one collective for all gradients, and one for all parameters, of which
                                        each chunk has a share
    FrameworkProfile.bucket_bytes       torch.nn.parallel.DistributedDataParallel: a backward computes the
                                        gradients of matrices from the last to the first; a bucket takes them
                                        whole, and is reduced as soon as it has so many bytes or more

        down    29 MB   bucket 1          (25 MiB)
        up      59 MB   bucket 2
        output   8 MB   bucket 3, with queries, keys and values
        qkv     25 MB

Where the host checks each collective, it launches no backward meanwhile: checks and launches add up.
"""

from collections.abc import Iterator, Sequence

from myriad.model.config import ModelConfig
from myriad.planner.cost.collective_costs import DpCollectives
from myriad.planner.cost.host_costs import LayerRole, host_seconds
from myriad.planner.cost.product_costs import LayerContext, block_shares
from myriad.planner.cost.stage_layers import block_of, layer_parameters
from myriad.planner.workload import Workload

__all__ = ["bucket_seconds", "count_buckets", "gather_and_reduce"]


def gather_and_reduce(
    workload: Workload, sums: DpCollectives, parameters: float, num_chunks: int
) -> tuple[float, float]:
    """Return the seconds to gather so many parameters of a stage, and to reduce their gradients, as one of
    ``num_chunks`` chunks of a stage of the layout."""
    zero, at_ends = workload.layout.zero, workload.sharded_at_ends
    gradients, share = (
        parameters * workload.profile.gradient_bytes,
        1 / num_chunks / workload.layout.virtual_stages,
    )
    gather = sums.all_gather_seconds(parameters * workload.value_bytes) if zero else 0.0
    if 0 < zero < 3:
        # Every rank's part is a message of its own, and those of a chunk are its share of them.
        gather = gather + (sums.size - 1) * workload.profile.broadcast_seconds * share
    by_shards = zero and not (at_ends or (zero < 3 and workload.profile.all_reduces_gradients))
    reduced = sums.all_gather_seconds(gradients) if by_shards else sums.all_reduce_seconds(gradients)
    begun = (1 - share) * sums.ring.begin_seconds if at_ends and sums.size > 1 else 0.0
    return float(gather - begun), float(reduced - begun)


def bucket_seconds(
    workload: Workload, context: LayerContext, sums: DpCollectives, kinds: Sequence[str]
) -> float:
    """Return the seconds by which gradients take longer in buckets than by one collective. ``kinds``: the
    layers of the gradients (`layer_kinds`)."""
    bucket_bytes = workload.profile.bucket_bytes
    if bucket_bytes is None or workload.layout.zero or sums.size == 1:
        return 0.0
    number = count_buckets(workload.model, kinds, workload.layout.tp, workload.value_bytes, bucket_bytes)
    launches = sum(float(host_seconds(context, _role(kind))[1]) for kind in kinds)
    further = (number - 1) * sums.ring.begin_seconds
    return float(further + (launches if sums.ring.check_seconds else 0.0))


def _role(kind: str) -> LayerRole:
    return "embedding" if kind == "embedding" else "head" if kind == "head" else "block"


def count_buckets(
    model: ModelConfig, kinds: Sequence[str], tp: int, value_bytes: int, bucket_bytes: int
) -> float:
    """Return the number of buckets of layers of these kinds on one of ``tp`` ranks. A bucket that the last
    gradients do not fill counts in part: other layers fill it."""
    complete, filled = 0, 0.0
    for elements in _reversed_matrices(model, kinds):
        filled += elements / tp * value_bytes
        if filled >= bucket_bytes:
            complete, filled = complete + 1, 0.0
    return complete + filled / bucket_bytes


def _reversed_matrices(model: ModelConfig, kinds: Sequence[str]) -> Iterator[float]:
    """Yield the elements of the matrices of layers, from the last to the first."""
    for kind in reversed(kinds):
        if kind in ("embedding", "head"):
            yield float(layer_parameters(model)[0 if kind == "embedding" else -1])
        else:
            shares = block_shares(model.of_block(block_of(kind)))
            yield from (elements for elements, _ in reversed(shares.values()))
