"""Point-to-point between pipeline ranks: posted at once, waited for when needed.

Activations and gradients travel in groups of their own: a receive posted in one direction never waits behind
a send in the other. gloo matches by tag; NCCL by order, which the program's checker has proved equal on both
sides.
"""

import torch
import torch.distributed as dist

from myriad.comm.groups import Groups

__all__ = ["Channel", "Posted"]


class Posted:
    """One transfer under way. A sent tensor is kept alive until `wait`."""

    def __init__(self, work: "dist.Work | None", tensor: torch.Tensor) -> None:
        self._work, self.tensor = work, tensor

    def wait(self) -> torch.Tensor:
        """Blocks until the transfer is complete; gives its tensor."""
        if self._work is not None:
            self._work.wait()
        return self.tensor


class Channel:
    """Transfers of one payload between this rank and its pipeline peers.

    With several model pieces a rank, one payload travels both ways between the same two ranks (the last
    pipeline rank's pieces feed the first's): then each way has a group too.
    """

    def __init__(self, groups: Groups, purpose: str, *, both_ways: bool) -> None:
        self._ranks, self._rank = groups.grid.peers("pp"), groups.grid.index("pp")
        upwards = groups.along("pp", purpose=f"{purpose} up")
        downwards = groups.along("pp", purpose=f"{purpose} down") if both_ways else upwards
        self._groups = {True: upwards, False: downwards}

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        """Posts a send to pipeline rank ``peer``."""
        tensor = tensor.contiguous()
        group = self._groups[peer > self._rank]
        return Posted(dist.isend(tensor, self._ranks[peer], group=group, tag=tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        """Posts a receive into ``tensor`` from pipeline rank ``peer``."""
        group = self._groups[peer < self._rank]
        return Posted(dist.irecv(tensor, self._ranks[peer], group=group, tag=tag), tensor)
