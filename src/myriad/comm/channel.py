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
    """Transfers between this rank and its pipeline peers, in one direction of travel."""

    def __init__(self, groups: Groups, purpose: str) -> None:
        self._ranks = groups.grid.peers("pp")
        self._group = groups.along("pp", purpose=purpose)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        """Posts a send to pipeline rank ``peer``."""
        tensor = tensor.contiguous()
        return Posted(dist.isend(tensor, self._ranks[peer], group=self._group, tag=tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Posted:
        """Posts a receive into ``tensor`` from pipeline rank ``peer``."""
        return Posted(dist.irecv(tensor, self._ranks[peer], group=self._group, tag=tag), tensor)
