"""Communication of context parallelism: keys and values around a ring, and positions for heads in a row.

    ring    rank i sends to i + 1 and receives from i - 1, of the same column; on gloo two messages, on other
            backends (NCCL) an all-to-all in which each rank sends to one
    direct  a message for each pair of ranks of a column of which one sees keys of the other; on other
            backends than gloo an all-to-all of unequal parts
    row     an all-to-all of equal parts, and its transpose in the backward

They overlap with nothing but what the caller computes before it waits. Seconds spent in `wait` are recorded
as context_comm. Every backward calls them in the reverse order on all ranks alike.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce, start_all_to_all
from myriad.comm.connection_setup import open_collectives
from myriad.comm.groups import Group, Groups
from myriad.kernels.documents import Documents
from myriad.model.context_share import ContextShare, share_of
from myriad.parallel.tp_async import AsyncCollective
from myriad.telemetry.spans import Recorder

__all__ = ["ContextGroup", "GroupRing"]

_SPAN = "context_comm"


class _Shift(AsyncCollective):
    """A tensor on its way to the next rank of a ring, and the one from the rank before; either may be
    empty."""

    span = _SPAN

    def __init__(self, leaving: torch.Tensor, arriving: torch.Tensor, ring: "GroupRing", step: int) -> None:
        super().__init__(ring, leaving)
        self.step, self._found = step, arriving
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        if dist.get_backend(ring.group) == "gloo":
            works = [dist.irecv(arriving, group=ring.group, group_src=before)] if arriving.numel() else []
            works += [dist.isend(leaving, group=ring.group, group_dst=after)] if leaving.numel() else []
            self._works = [work for work in works if work is not None]
            return
        # one operation, so that no rank waits for a message before it sends its own
        received, sent = ([0] * ring.size for _ in range(2))
        received[before], sent[after] = arriving.numel(), leaving.numel()
        flat = arriving.view(-1), leaving.view(-1)
        work = dist.all_to_all_single(*flat, received, sent, group=ring.group, async_op=True)
        self._works = [] if work is None else [work]

    def _arrived(self) -> torch.Tensor:
        return self._found


class _Messages(AsyncCollective):
    """Tensors on their way to other ranks of a ring, and those that they send."""

    span = _SPAN

    def __init__(
        self, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor], ring: "GroupRing"
    ) -> None:
        super().__init__(ring, torch.empty(0, device=ring.device))
        self._sent = leaving  # the transport reads them
        if dist.get_backend(ring.group) == "gloo":
            works = [dist.irecv(x, group=ring.group, group_src=rank) for rank, x in arriving.items()]
            works += [dist.isend(x, group=ring.group, group_dst=rank) for rank, x in leaving.items()]
            self._works = [work for work in works if work is not None]
            return
        nothing = next(iter((*leaving.values(), *arriving.values())), self._kept).new_empty(0)
        received, sent = (
            [tensors.get(rank, nothing) for rank in range(ring.size)] for tensors in (arriving, leaving)
        )
        work = dist.all_to_all(received, sent, group=ring.group, async_op=True)
        self._works = [] if work is None else [work]

    def _arrived(self) -> torch.Tensor:
        return self._kept


class GroupRing:
    """A ring of the ranks of a group; an implementation of `myriad.kernels.ring_attention.Ring`."""

    def __init__(
        self, group: Group | None, rank: int, size: int, recorder: Recorder, device: torch.device
    ) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.recorder, self.device = recorder, device

    def start_shift(self, leaving: torch.Tensor, arriving: torch.Tensor, step: int) -> _Shift:
        """Send a tensor to the next rank, and receive into another from the one before."""
        return _Shift(leaving, arriving, self, step)

    def start_exchange(
        self, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]
    ) -> _Messages:
        """Send each tensor to its rank, and receive into others what their ranks send."""
        return _Messages(leaving, arriving, self)

    def block(self, step: int) -> AbstractContextManager[None]:
        """Return the span of the pieces of a step."""
        return self.recorder.detail("ring_attention", step)


class ContextGroup:
    """The ranks that share a sequence; an implementation of `myriad.model.context_share.ContextPeers`."""

    def __init__(self, groups: Groups, recorder: Recorder, device: torch.device) -> None:
        """A collective call of all ranks. It opens their connections."""
        grid, layout = groups.grid, groups.grid.layout
        ring, self.row = (groups.along(axis, purpose=f"context {axis}") for axis in ("ring", "ulysses"))
        for group in (ring, self.row):
            open_collectives(group, device, all_to_all=True)
        self.ring = GroupRing(ring, grid.index("ring"), layout.ring, recorder, device)
        self.ulysses, self.column, self.recorder = layout.ulysses, grid.index("ulysses"), recorder
        self._all = ring or self.row
        if ring is not None and self.row is not None:
            self._all = groups.along("cp", purpose="context")
        self._rank, self.num_ranks = grid.index("cp"), layout.cp

    def share(self, sequence: int, documents: Documents | None = None) -> ContextShare:
        """Return this rank's share of sequences of this length, or of windows of documents."""
        return share_of(sequence, self._rank, self.num_ranks, self.ulysses, documents)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send ``x[u]`` to rank u of the row."""
        found: torch.Tensor = _Exchange.apply(x, self)
        return found

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks that share the sequence."""
        with self.recorder.span(_SPAN):
            return all_reduce(x.clone(), self._all)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: ContextGroup) -> torch.Tensor:
        ctx.peers = peers
        return _exchanged(x, peers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grads[0], ctx.peers), None


def _exchanged(x: torch.Tensor, peers: ContextGroup) -> torch.Tensor:
    kept = x.contiguous()
    found = torch.empty_like(kept)
    pending = start_all_to_all(found.view(-1), kept.view(-1), peers.row)
    with peers.recorder.span(_SPAN):
        pending.wait()
    return found
