"""Tensors on their way between tensor-parallel ranks: posted when made, there when waited for.

On gloo everything is an exchange of messages between pairs. A reduce-scatter is then an all-to-all with a
local sum in rank order: half the bytes of gloo's own, and the same bits every time. Tensors whose residual
stream is cut along the sequence have one stretch of memory for each sequence and rank; where these are long
they are the messages, so that nothing is copied before it is sent or after it has come:

    whole  [B, S, H]     | seq 0: rank 0 | rank 1 |  seq 1: rank 0 | rank 1 |    the part of rank 1 is sent
    share  [B, S/tp, H]                  | seq 0  |                | seq 1  |    from, or to, where it stands

Elsewhere (NCCL) the backend's own collectives do it. Seconds spent in `wait` are recorded as tensor_comm.

Legend: B batch, S sequence, H hidden.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.telemetry.spans import Recorder

__all__ = ["Gathering", "Peers", "Reducing", "Stacking", "Travelling"]

_LONG_BYTES = 2**16
"""Stretches of memory from which on a message each costs less than a copy."""

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
            outgoing = [[self._kept]] * peers.size
            self._works = _exchange(outgoing, [[row] for row in self._stack.unbind()], peers)
            self._stack[peers.rank].copy_(self._kept)
        else:
            flat, part = self._stack.view(-1), self._kept.view(-1)
            self._works = [_all_gather(flat, part, group=peers.group, async_op=True)]

    def _arrived(self) -> torch.Tensor:
        return self._stack


class Gathering(Travelling):
    """``[B, S/tp, H]`` of every rank to ``[B, S, H]``."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        super().__init__(peers, x.contiguous())
        self._stacking = None
        if x.is_meta or not _is_pairwise(peers) or not _in_long_stretches(x):
            self._stacking = Stacking(x, peers)
            return
        self._whole = x.new_empty(len(x), peers.size * x.shape[1], *x.shape[2:])
        shares = self._whole.unflatten(1, (peers.size, -1)).unbind(1)
        outgoing = [self._kept.unbind()] * peers.size
        self._works = _exchange(outgoing, [share.unbind() for share in shares], peers)
        shares[peers.rank].copy_(self._kept)

    def _arrived(self) -> torch.Tensor:
        if self._stacking is None:
            return self._whole
        return self._stacking.wait().transpose(0, 1).flatten(1, 2)


class Reducing(Travelling):
    """``[B, S, H]`` of every rank to this rank's part ``[B, S/tp, H]`` of their sum."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        super().__init__(peers, x.contiguous())
        shares = self._kept.unflatten(1, (peers.size, -1)).unbind(1)
        own = shares[peers.rank]
        self._parts = [own]
        if x.is_meta:
            return
        if not _is_pairwise(peers):
            self._kept = torch.stack(shares)
            self._parts = [own.new_empty(own.shape)]
            flat = self._kept.view(-1)
            self._works = [_reduce_scatter(self._parts[0].view(-1), flat, group=peers.group, async_op=True)]
            return
        self._parts = [own if share is own else own.new_empty(own.shape) for share in shares]
        if _in_long_stretches(own):
            outgoing, incoming = ([part.unbind() for part in parts] for parts in (shares, self._parts))
        else:
            self._kept = torch.stack(shares)
            outgoing, incoming = [[part] for part in self._kept], [[part] for part in self._parts]
        self._works = _exchange(outgoing, incoming, peers)

    def _arrived(self) -> torch.Tensor:
        """In float32, in rank order."""
        first, *others = self._parts
        if first.dtype == torch.float32 and len(others) == 1:
            return first + others[0]
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total.to(first.dtype).contiguous()


def _in_long_stretches(share: torch.Tensor) -> bool:
    """Of ``[B, S/tp, H]``, by shape alone: sender and receiver must agree."""
    return share[0].numel() * share.element_size() >= _LONG_BYTES


def _is_pairwise(peers: Peers) -> bool:
    return dist.get_backend(peers.group) == "gloo"


def _exchange(
    outgoing: Sequence[Iterable[torch.Tensor]], incoming: Sequence[Iterable[torch.Tensor]], peers: Peers
) -> list[dist.Work]:
    """The messages ``outgoing[r]`` to every other rank r, what it sends to this one into ``incoming[r]``.

    Receives are posted first: a gloo connection whose request to send back waits behind its own data moves
    one way at a time (measured: its all-to-all takes up to twice as long).
    """
    others = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
    works = [
        dist.irecv(message, group=peers.group, group_src=rank)
        for rank in reversed(others)
        for message in incoming[rank]
    ]
    works += [
        dist.isend(message, group=peers.group, group_dst=rank)
        for rank in others
        for message in outgoing[rank]
    ]
    return [work for work in works if work is not None]
