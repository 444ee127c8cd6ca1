"""Parameters out, gradients in: the transfers of data parallelism, chunk by chunk, behind the compute.

Every rank of the group calls the same methods, and waits for their results, in the same order. What travels
first is another matter: each chunk has a priority, the smallest first, and its slices travel in partitions,
so that an urgent chunk waits for one credit of bytes at most (BytePS, Jiang et al., OSDI 2020).

    gather           slice i of rank i to everybody, straight into place
    reduce-scatter   slice i of everybody to rank i, which adds them in rank order: the same bits every time
    all-reduce       both, each partition's way back as soon as its sum is there

On gloo these are messages between pairs of ranks (`myriad.comm.by_pairs`), on NCCL collectives
(`myriad.comm.by_collectives`), level by level of a hierarchy where that is quicker. No deadlock on gloo: a
rank that waits for a delivery waits for sends that come before the same wait in every other rank's order, and
all that can hold those back is sends of calls before that wait, whose receives each rank posts before it
comes to that wait.
"""

from collections import Counter

import torch
import torch.distributed as dist

from myriad.comm.by_collectives import ByCollectives
from myriad.comm.by_pairs import ByPairs
from myriad.comm.codec import make_codec
from myriad.comm.config import CommConfig
from myriad.comm.exchange import Alone, Delivery, Exchange
from myriad.comm.first_use import open_collectives
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import Hierarchy, make_levels
from myriad.comm.pairwise import Post
from myriad.comm.sites import settle_hierarchy
from myriad.program.config import OverlapConfig

__all__ = ["Courier", "Delivery", "Exchange"]


class Courier:
    """Makes the exchanges of one axis; `close` when the last delivery has been waited for."""

    def __init__(
        self, groups: Groups, axis: str | None, overlap: OverlapConfig, comm: CommConfig, device: torch.device
    ) -> None:
        """``axis`` off: this rank goes alone."""
        self._group = None if axis is None else groups.along(axis)
        self._cut_bytes = overlap.partition
        self._compress = (comm.compress_gradients, comm.compress_parameters)
        self._post: Post | None = None
        self.hierarchy: Hierarchy = "flat"
        """What was chosen."""
        if axis is None or self._group is None:
            return
        ranks = groups.grid.peers(axis)
        self.hierarchy, radices = settle_hierarchy(groups, axis, comm, device)
        self._levels = make_levels(self._group.rank(), radices)
        if dist.get_backend(self._group) == "gloo":
            self._post = Post(self._group, overlap.credit)
        else:
            members = [tuple(ranks[member] for member in level.members) for level in self._levels]
            self._level_groups = [self._level_group(groups, peers, axis) for peers in members]
            for group in self._level_groups if comm.compress_gradients else ():
                open_collectives(group, device, all_to_all=True)
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _level_group(self, groups: Groups, members: tuple[int, ...], axis: str) -> Group:
        """The only level of a flat exchange has the ranks of the axis: it needs no second communicator."""
        flat = len(members) == dist.get_world_size(self._group)
        group = self._group if flat else groups.of(members, f"{axis} level")
        assert group is not None, "a level has two ranks at least"
        return group

    def exchange(self, num_elements: int, dtype: torch.dtype) -> Exchange:
        """For a chunk of ``num_elements``, a multiple of the group's size, with values of ``dtype``."""
        if self._group is None:
            return Alone()
        assert num_elements % self._group.size() == 0, (num_elements, self._group.size())
        codecs = [make_codec(name) if name else None for name in self._compress]
        if self._post is None:
            return ByCollectives(self._level_groups, self._stream, *codecs)
        return ByPairs(self._post, self._levels, num_elements, self._cut_bytes, *codecs)

    @property
    def bytes_sent(self) -> Counter[int]:
        """Bytes given to the transport so far, by the receiver's rank; nothing on NCCL, which does not
        say."""
        return self._post.bytes_sent if self._post is not None else Counter()

    def close(self) -> None:
        """Ends its threads."""
        if self._post is not None:
            self._post.close()
