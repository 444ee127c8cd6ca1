"""Point-to-point between pipeline ranks: posted at once, waited for when needed.

Activations and gradients use separate groups, so that a receive in one direction never waits behind a send in
the other. gloo matches by tag. NCCL matches by order, which the program's checker has proved equal on both
sides.

If tensor-parallel ranks all hold the same tensor, each sends its share, and the receivers gather in their
own, faster, group. The slow link between stages then carries the tensor once, not once for each of them
(Megatron-LM's scatter-gather, Narayanan et al., arXiv 2104.04473, section 4.1).
"""

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from myriad.comm.collectives import start_all_gather
from myriad.comm.connection_setup import connect_pairs
from myriad.comm.groups import Group, Groups

__all__ = ["Channel", "PendingTransfer"]


class PendingTransfer:
    """One transfer in flight. A sent tensor is kept alive until `wait`."""

    def __init__(
        self, work: "dist.Work | None", tensor: torch.Tensor, then: Callable[[], object] | None = None
    ) -> None:
        """``then`` completes the tensor after the transfer."""
        self._work, self.tensor, self._then = work, tensor, then

    def wait(self) -> torch.Tensor:
        """Block until the transfer is complete, and return its tensor."""
        work, then = self._work, self._then
        self._work = self._then = None
        if work is not None:
            work.wait()
        if then is not None:
            then()
        return self.tensor


class Channel:
    """Transfers of one payload between this rank and its pipeline peers.

    With several model pieces per rank, one payload travels both ways between the same two ranks, because the
    last pipeline rank's pieces feed the first's. Each direction then has its own group.
    """

    def __init__(self, groups: Groups, purpose: str, *, both_ways: bool, split: Group | None = None) -> None:
        """``split``: the ranks that hold the same tensors and share the transfers; off: each rank sends
        its own."""
        self._split = split
        self._ranks, self._rank = groups.grid.peers("pp"), groups.grid.index("pp")
        upwards = groups.along("pp", purpose=f"{purpose} up", pairwise=True)
        downwards = upwards
        if both_ways:
            downwards = groups.along("pp", purpose=f"{purpose} down", pairwise=True)
        self._groups = {True: upwards, False: downwards}

    def connect(self, routes: Collection[tuple[int, bool]], device: torch.device) -> None:
        """Open the connections of ``routes``. Every rank of the pipeline calls this before its first
        transfer.

        A route is a pipeline rank with which this one exchanges tensors, and whether this rank sends to it.
        """
        for upwards, group in self._groups.items():
            own = [(peer, sends) for peer, sends in routes if ((peer > self._rank) == sends) == upwards]
            connect_pairs(group, own, device)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> PendingTransfer:
        """Post a send to pipeline rank ``peer``."""
        tensor = tensor.contiguous()
        group = self._groups[peer > self._rank]
        return PendingTransfer(
            dist.isend(self._share(tensor), self._ranks[peer], group=group, tag=tag), tensor
        )

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> PendingTransfer:
        """Post a receive into ``tensor`` from pipeline rank ``peer``.

        If transfers are shared, all ranks that share must wait for theirs in the same order.
        """
        group, share = self._groups[peer < self._rank], self._share(tensor)
        work = dist.irecv(share, self._ranks[peer], group=group, tag=tag)
        if share.numel() == tensor.numel():
            return PendingTransfer(work, tensor)
        return PendingTransfer(
            work, tensor, lambda: start_all_gather(tensor.view(-1), share, self._split).wait()
        )

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat part of a tensor that this rank transfers; the whole if it has no equal shares."""
        flat = tensor.view(-1)
        if self._split is None or len(flat) % self._split.size():
            return flat
        return flat.view(self._split.size(), -1)[self._split.rank()]
