"""The all-to-alls of expert parallelism: rows to the ranks of their experts, and back.

    rank 0   rows for rank 0 | for rank 1         ->   of rank 0 | of rank 1
    rank 1   rows for rank 0 | for rank 1              of rank 0 | of rank 1

Each rank has any number of rows for each other one. The numbers travel first, then the rows, one message to
each peer; a rank without rows for a peer sends it nothing. The backward sends gradients the other way.

On gloo the rows of a peer are sent from their place and received in their place; on other backends (NCCL) it
is one ``all_to_all``. Seconds spent in `wait` are recorded as expert_comm.

Legend: H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from myriad.comm.collectives import Pending, start_all_to_all
from myriad.comm.connection_setup import open_collectives
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import make_levels
from myriad.comm.hierarchy_choice import find_placement
from myriad.kernels.gradient import LaterProducts
from myriad.model.boundary import Arriving
from myriad.parallel.tp_async import AsyncCollective, AsyncState, issue
from myriad.telemetry.spans import Recorder

__all__ = ["ExpertPeers", "start_counts", "start_rows"]


@dataclass
class ExpertPeers:
    """The ranks that share the experts of a block."""

    group: Group | None
    rank: int
    size: int
    recorder: Recorder

    @classmethod
    def of(cls, groups: Groups, recorder: Recorder, device: torch.device) -> "ExpertPeers":
        """Return the peers of a rank, and open their connections. A collective call of all ranks."""
        group = groups.along("ep", purpose="experts")
        open_collectives(group, device, all_to_all=True)
        return cls(group, groups.grid.index("ep"), groups.grid.layout.ep, recorder)

    def hops(self, groups: Groups, device: torch.device) -> tuple["ExpertPeers", ...]:
        """Return the destinations of each hop of ``layout.expert_dispatch``, and open their connections. A
        collective call of all ranks.

        rank: all peers. node: the peers with this one's place in each node, then the peers of this node;
        where nodes hold unequal numbers of the peers, or one each, or there is one node: all peers."""
        if self.group is None or groups.grid.layout.expert_dispatch == "expert":
            return ()
        if groups.grid.layout.expert_dispatch == "rank":
            return (self,)
        ranks = groups.grid.peers("ep")
        nodes = find_placement(groups, self.group, groups.comm, device).radices(ranks, "node")
        if nodes is None or nodes[0] in (1, self.size):
            return (self,)
        levels = make_levels(self.rank, (nodes[0], self.size // nodes[0]))
        found = []
        for level, purpose in zip(reversed(levels), ("experts of nodes", "experts of a node"), strict=True):
            group = groups.of(tuple(ranks[member] for member in level.members), purpose)
            open_collectives(group, device, all_to_all=True)
            found.append(ExpertPeers(group, level.own, len(level.members), self.recorder))
        return tuple(found)


class _Counts:
    """Numbers of rows in flight; an implementation of `myriad.model.boundary.Arriving`."""

    def __init__(self, peers: ExpertPeers, counts: torch.Tensor, found: torch.Tensor) -> None:
        self._peers, self._kept, self._found = peers, counts, found
        self._pending: Pending = start_all_to_all(found.view(-1), counts, peers.group)

    def wait(self) -> torch.Tensor:
        with self._peers.recorder.span(_Rows.span):
            self._pending.wait()
        return self._found


def start_counts(counts: torch.Tensor, peers: ExpertPeers) -> Arriving:
    """Exchange the numbers of rows for each expert ``[E]``. The result ``[ranks, E/ranks]`` has the rows of
    each rank for the experts of this one."""
    return _Counts(peers, counts, counts.new_empty(peers.size, len(counts) // peers.size))


class _Rows(AsyncCollective):
    """Rows ``[N, H]`` in flight to their ranks."""

    span = "expert_comm"

    def __init__(
        self, rows: torch.Tensor, peers: ExpertPeers, leaving: Sequence[int], arriving: Sequence[int]
    ) -> None:
        super().__init__(peers, rows.contiguous())
        self._found = rows.new_empty(sum(arriving), *rows.shape[1:])
        if dist.get_backend(peers.group) == "gloo":
            self._works = self._post(self._kept.split(list(leaving)), self._found.split(list(arriving)))
        else:
            ends = list(leaving), list(arriving)
            self._works = [
                dist.all_to_all_single(
                    self._found, self._kept, ends[1], ends[0], group=peers.group, async_op=True
                )
            ]

    def _post(self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Post receives first, then sends (`myriad.parallel.tp_async`)."""
        group, rank, size = self._peers.group, self._peers.rank, self._peers.size
        others = [(rank + step) % size for step in range(1, size)]
        works = [
            dist.irecv(arriving[other], group=group, group_src=other)
            for other in reversed(others)
            if len(arriving[other])
        ]
        works += [
            dist.isend(leaving[other], group=group, group_dst=other)
            for other in others
            if len(leaving[other])
        ]
        arriving[rank].copy_(leaving[rank])
        return [work for work in works if work is not None]

    def _arrived(self) -> torch.Tensor:
        return self._found


class _RowsState(AsyncState):
    """The state of an exchange of rows."""

    def __init__(
        self,
        peers: ExpertPeers,
        later: LaterProducts | None,
        leaving: Sequence[int],
        arriving: Sequence[int],
        meanwhile: Callable[[], None],
    ) -> None:
        super().__init__(later)
        self._peers, self._sizes, self._meanwhile = peers, (leaving, arriving), meanwhile

    def _start(self, x: torch.Tensor, *, forward: bool) -> AsyncCollective:
        leaving, arriving = self._sizes if forward else self._sizes[::-1]
        return _Rows(x, self._peers, leaving, arriving)

    def use_the_wait(self) -> None:
        super().use_the_wait()
        self._meanwhile()


def start_rows(
    rows: torch.Tensor,
    peers: ExpertPeers,
    leaving: Sequence[int],
    arriving: Sequence[int],
    later: LaterProducts | None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Arriving:
    """Send ``leaving[r]`` of the rows ``[N, H]``, in order, to each rank r, and receive the ``arriving[r]``
    rows of each. The result is differentiable. ``later``: weight products that the backward computes while
    gradients travel. ``meanwhile`` is called after them."""
    return issue(rows, _RowsState(peers, later, leaving, arriving, meanwhile))
