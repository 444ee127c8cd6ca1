"""Data-parallel communication scheduler: gathers parameters and reduces gradients behind the compute.

Every rank of the group calls the same methods, and waits for their results, in the same order. The order on
the wire is separate. Each chunk has a priority, the smallest first. Its slices are sent in messages of
limited size, so that an urgent chunk waits for at most the bytes in flight (BytePS, Jiang et al., OSDI 2020).

    gather           slice i of rank i to all ranks, straight into place
    reduce-scatter   slice i of all ranks to rank i, which adds them in rank order: the same bits every time
    all-reduce       both; each partition is returned as soon as its sum is there

On gloo these are messages between pairs of ranks (`myriad.comm.gloo_transport`), on NCCL collectives
(`myriad.comm.nccl_transport`), level by level of a hierarchy where that is faster. Deadlock-free on gloo:
every rank issues the collectives in the same order and posts all receives before it waits, so each send it
waits for already has a matching receive.
"""

from collections import Counter

import torch
import torch.distributed as dist

from myriad.comm.bucket_collective import BucketCollective, PendingCollective, SingleRankCollective
from myriad.comm.config import CommConfig
from myriad.comm.connection_setup import open_collectives
from myriad.comm.gloo_transport import GlooCollective
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import Hierarchy, make_levels
from myriad.comm.hierarchy_choice import agree_on_hierarchy
from myriad.comm.nccl_transport import NcclCollective
from myriad.comm.payload_codec import make_codec
from myriad.comm.send_queue import SendQueue
from myriad.program.config import OverlapConfig

__all__ = ["BucketCollective", "CommScheduler", "PendingCollective"]


class CommScheduler:
    """Create the collectives of one axis. Call `close` after waiting for the last delivery."""

    def __init__(
        self,
        groups: Groups,
        axis: str | None,
        overlap: OverlapConfig,
        comm: CommConfig,
        device: torch.device,
        *,
        purpose: str = "",
    ) -> None:
        """Without ``axis``, this rank has no peers. ``purpose``: as for `Groups.of`. Two schedulers with the
        same peers need different ones, because a group does not distinguish their messages."""
        self._group = None if axis is None else groups.along(axis, purpose=purpose)
        self._cut_bytes, self._name = overlap.message_bytes, purpose or axis
        self._compress = (comm.compress_gradients, comm.compress_parameters)
        self._queue: SendQueue | None = None
        self.hierarchy: Hierarchy = "flat"
        """The hierarchy that was chosen."""
        if axis is None or self._group is None:
            return
        ranks = groups.grid.peers(axis)
        self.hierarchy, radices = agree_on_hierarchy(groups, axis, comm, device, purpose=purpose)
        self._levels = make_levels(self._group.rank(), radices)
        if dist.get_backend(self._group) == "gloo":
            self._queue = SendQueue(self._group, overlap.max_in_flight_bytes)
        else:
            members = [tuple(ranks[member] for member in level.members) for level in self._levels]
            self._level_groups = [self._level_group(groups, peers) for peers in members]
            for group in self._level_groups if comm.compress_gradients else ():
                open_collectives(group, device, all_to_all=True)
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _level_group(self, groups: Groups, members: tuple[int, ...]) -> Group:
        """Return the group of a level. The only level of a flat exchange has the ranks of the axis, so it
        needs no second communicator."""
        flat = len(members) == dist.get_world_size(self._group)
        group = self._group if flat else groups.of(members, f"{self._name} level")
        assert group is not None, "a level has two ranks at least"
        return group

    def bucket_collective(self, num_elements: int, dtype: torch.dtype) -> BucketCollective:
        """Return the collectives of a chunk of ``num_elements``, a multiple of the group's size, with
        values of ``dtype``."""
        if self._group is None:
            return SingleRankCollective()
        assert num_elements % self._group.size() == 0, (num_elements, self._group.size())
        codecs = [make_codec(name) if name else None for name in self._compress]
        if self._queue is None:
            return NcclCollective(self._level_groups, self._stream, *codecs)
        return GlooCollective(self._queue, self._levels, num_elements, self._cut_bytes, *codecs)

    @property
    def bytes_sent(self) -> Counter[int]:
        """Bytes given to the transport so far, by the receiver's rank; empty on NCCL, which does not report
        them."""
        return self._queue.bytes_sent if self._queue is not None else Counter()

    def close(self) -> None:
        """End the threads of the transport."""
        if self._queue is not None:
            self._queue.close()
