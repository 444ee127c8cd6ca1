"""The first use of every communicator and connection: at start, in one order on all ranks.

On NCCL a first use blocks the host until the other ranks reach the same use:

- torch's ProcessGroupNCCL makes a communicator when it is first needed: one for a group's collectives, and
  one for each pair of ranks that send or receive in the group (`ncclCommInitRank`; pytorch PR 129147).
- NCCL connects a pair at its first send and at its first receive, also in a communicator that exists
  (NVIDIA/nccl#783), and since 2.22 the ranks of a collective's algorithm at its first call
  (NCCL_RUNTIME_CONNECT).

Programs post receives ahead, so two ranks may reach their first uses in different orders:

    rank 0   forward 0, receive gradient 0      first use of "gradient": waits for rank 1
    rank 1   receive activation 0               first use of "activation": waits for rank 0

torch's pipelining had the same hang and exchanges a value with each neighbour before its first step (pytorch
PR 160210). The same is done here, and for collectives too. Every rank goes through its groups in the same
order, and through the pairs of a group in turns, of which no two pairs share a rank:

    turn 0   0-1   2-3         turn 1   1-2   3-4         turn 2   the first and the last rank

So there is no cycle of waits, and NCCL allocates the memory of communicators before the first step. A
collective of another size may use another algorithm, which connects then; the ranks of a group reach it in
the same order. On gloo a group is connected when it is made; there only the pairs exchange a value, which is
fast.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce, start_all_gather, start_all_to_all, start_reduce_scatter

__all__ = ["connect_pairs", "open_collectives"]


def open_collectives(
    group: "dist.ProcessGroup | None", device: torch.device, *, all_to_all: bool = False
) -> None:
    """Make the communicator of a group's collectives, and connect its ranks for all-reduce, all-gather and
    reduce-scatter.

    ``all_to_all`` adds this collective. All ranks of the group call it together. Does nothing on gloo.
    """
    if group is None or dist.get_backend(group) == "gloo":
        return
    own, all_ = torch.zeros(1, device=device), torch.zeros(group.size(), device=device)
    all_reduce(own, group)
    start_all_gather(all_, own, group).wait()
    start_reduce_scatter(own, all_, group).wait()
    if all_to_all:
        start_all_to_all(torch.empty_like(all_), all_, group).wait()
    _synchronize(device)


def connect_pairs(
    group: "dist.ProcessGroup | None", routes: Collection[tuple[int, bool]], device: torch.device
) -> None:
    """Send one value along each of ``routes``: a group rank, and whether this rank sends to it.

    The ranks at both ends call this together. The other direction stays unconnected, to save the memory of
    its buffers.
    """
    if group is None:
        return
    own = group.rank()
    for peer, sends in sorted(routes, key=lambda route: _route_order(own, *route)):
        value = torch.zeros(1, device=device)
        if sends:
            work = dist.isend(value, group=group, group_dst=peer)
        else:
            work = dist.irecv(value, group=group, group_src=peer)
        assert work is not None, "this rank is one of the group"
        work.wait()
    _synchronize(device)


def _route_order(own: int, peer: int, sends: bool) -> tuple[int, int, int, bool]:
    """Return the sort key of a route, the same at both ends; routes of an earlier turn come first."""
    low, high = sorted((own, peer))
    return (low % 2 if high - low == 1 else 2), low, high, (peer < own) == sends


def _synchronize(device: torch.device) -> None:
    """Synchronize, so that a transport error is raised here and not in the first step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
