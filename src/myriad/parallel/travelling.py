"""Tensors on their way between tensor-parallel ranks: posted when made, there when waited for.

On gloo everything is an exchange of messages between pairs. A reduce-scatter is then an all-to-all with a
local sum in rank order: half the bytes of gloo's own, and the same bits every time. One message to a peer: a
message for each sequence, from and to where it stands, saves two copies and costs more (each message is three
on the wire, and wakes two threads).

Elsewhere (NCCL) the backend's own collectives do it. Seconds spent in `wait` are recorded as tensor_comm.

Legend: B batch, S sequence, H hidden.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.telemetry.spans import Recorder

__all__ = ["Gathering", "Peers", "Reducing", "Stacking", "Travelling", "sum_in_rank_order"]

# torch 2.13 renamed them; 2.11 has the old names only
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Peers(Protocol):
    """The ranks on the other side; `myriad.parallel.tensor.GroupBoundary` is one."""

    group: Group | None
    rank: int
    size: int
    recorder: Recorder


class Travelling:
    """What was posted to the transport, with the memory it reads kept alive."""

    def __init__(self, peers: Peers, kept: torch.Tensor) -> None:
        self._peers, self._kept = peers, kept
        self._works: list[dist.Work] = []

    def wait(self) -> torch.Tensor:
        """What came; once."""
        with self._peers.recorder.span("tensor_comm"):
            for work in self._works:
                work.wait()
        return self._arrived()

    def _arrived(self) -> torch.Tensor:
        raise NotImplementedError


class Stacking(Travelling):
    """``[...]`` of every rank to ``[tp, ...]``."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        super().__init__(peers, x.contiguous())
        self._stack = x.new_empty(peers.size, *x.shape)
        if x.is_meta:
            return
        if _is_pairwise(peers):
            self._works = _exchange([self._kept] * peers.size, self._stack.unbind(), peers)
            self._stack[peers.rank].copy_(self._kept)
        else:
            flat, part = self._stack.view(-1), self._kept.view(-1)
            self._works = [_all_gather(flat, part, group=peers.group, async_op=True)]

    def _arrived(self) -> torch.Tensor:
        return self._stack


class Gathering(Stacking):
    """``[B, S/tp, H]`` of every rank to ``[B, S, H]``."""

    def _arrived(self) -> torch.Tensor:
        return self._stack.transpose(0, 1).flatten(1, 2)


class Reducing(Travelling):
    """``[B, S, H]`` of every rank to this rank's part ``[B, S/tp, H]`` of their sum."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        shares = x.unflatten(1, (peers.size, -1)).transpose(0, 1)
        super().__init__(peers, shares.contiguous())  # of one sequence they lie so already
        own = self._kept[peers.rank]
        self._parts = [own]
        if x.is_meta:
            return
        if _is_pairwise(peers):
            self._parts = [own if rank == peers.rank else torch.empty_like(own) for rank in range(peers.size)]
            self._works = _exchange(self._kept.unbind(), self._parts, peers)
        else:
            self._parts = [torch.empty_like(own)]
            flat = self._kept.view(-1)
            self._works = [_reduce_scatter(self._parts[0].view(-1), flat, group=peers.group, async_op=True)]

    def _arrived(self) -> torch.Tensor:
        return self._parts[0] if len(self._parts) == 1 else sum_in_rank_order(self._parts)


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of every rank's part, added in float32 in the order of ``parts``; in ``out``, if
    given."""
    first, *others = parts
    if first.dtype == torch.float32 and len(others) == 1:
        return torch.add(first, others[0], out=out)
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype) if out is None else out.copy_(total)


def _is_pairwise(peers: Peers) -> bool:
    return dist.get_backend(peers.group) == "gloo"


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], peers: Peers
) -> list[dist.Work]:
    """``outgoing[r]`` to every other rank r, what it sends to this one into ``incoming[r]``.

    Receives are posted first: a gloo connection whose request to send back waits behind its own data moves
    one way at a time (measured: its all-to-all takes up to twice as long).
    """
    others = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
    works = [dist.irecv(incoming[rank], group=peers.group, group_src=rank) for rank in reversed(others)]
    works += [dist.isend(outgoing[rank], group=peers.group, group_dst=rank) for rank in others]
    return [work for work in works if work is not None]
