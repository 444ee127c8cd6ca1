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

import os
from collections import Counter

import torch
import torch.distributed as dist

from myriad.comm.by_collectives import ByCollectives
from myriad.comm.by_pairs import ByPairs
from myriad.comm.codec import make_codec
from myriad.comm.collectives import all_reduce_max
from myriad.comm.config import CommConfig
from myriad.comm.exchange import Alone, Delivery, Exchange
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import Hierarchy, Sites, choose_hierarchy, declared_rates, make_levels
from myriad.comm.links import measure_rates
from myriad.comm.pairwise import Post
from myriad.errors import BadInputError
from myriad.program.config import OverlapConfig

__all__ = ["Courier", "Delivery", "Exchange"]


class Courier:
    """Makes the exchanges of one axis; `close` when the last delivery has been waited for."""

    def __init__(
        self, groups: Groups, axis: str | None, overlap: OverlapConfig, comm: CommConfig, device: torch.device
    ) -> None:
        """``axis`` off: this rank goes alone."""
        self._group = None if axis is None else groups.along(axis, purpose=f"{axis} courier")
        self._cut_bytes = overlap.partition
        self._compress = (comm.compress_gradients, comm.compress_parameters)
        self._post: Post | None = None
        self.hierarchy: Hierarchy = "flat"
        """What was chosen."""
        if axis is None or self._group is None:
            return
        ranks = groups.grid.peers(axis)
        sites = _find_sites(comm, groups.grid.layout.world, self._group, device)
        self.hierarchy = _decide(self._group, ranks, sites, comm)
        radices = sites.radices(ranks, self.hierarchy)
        assert radices is not None
        self._levels = make_levels(self._group.rank(), radices)
        if device.type == "cpu":
            self._post = Post(self._group, overlap.credit)
        else:
            members = [tuple(ranks[member] for member in level.members) for level in self._levels]
            found = [groups.of(peers, f"{axis} courier, level {i}") for i, peers in enumerate(members)]
            self._level_groups = [group for group in found if group is not None]
            self._stream = torch.cuda.Stream(device)

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


def _find_sites(comm: CommConfig, world: int, group: Group, device: torch.device) -> Sites:
    """As the job says, else as the launcher says, when it says the same to all."""
    if comm.node_size is not None:
        return Sites(comm.node_size, comm.switch_size)
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    extremes = torch.tensor([size, -size], device=device)
    largest, smallest = all_reduce_max(extremes, group).abs().tolist()
    if largest == smallest:
        return Sites(size)
    if comm.hierarchy in ("auto", "flat"):
        return Sites(world)
    allowed = f"nodes hold {smallest} to {largest} ranks; equally many, or comm.hierarchy = flat or auto"
    raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)


def _decide(group: Group, ranks: tuple[int, ...], sites: Sites, comm: CommConfig) -> Hierarchy:
    if comm.hierarchy != "auto":
        if sites.radices(ranks, comm.hierarchy) is None:
            allowed = f"ranks {ranks} stand unevenly on nodes of {sites.node_size}; flat or auto"
            raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)
        return comm.hierarchy
    radices = sites.radices(ranks, "switch") or sites.radices(ranks, "node") or (len(ranks),)
    levels = make_levels(group.rank(), radices)
    if len(levels) < 2:
        return "flat"
    here = ranks[group.rank()]
    distances = [sites.distance(here, ranks[level.members[level.others[0]]]) for level in levels]
    rates = declared_rates(comm, sites)
    if not set(distances) <= set(rates):
        if dist.get_backend(group) != "gloo":
            return "flat"  # NCCL knows its links and finds its own way through nodes
        rates = dict(zip(distances, measure_rates(group, levels), strict=True))
    return choose_hierarchy(sites, ranks, rates)
