"""Find the placement of a group's ranks, and choose the hierarchy of its collectives.

Nodes come from comm.node_size and comm.switch_size, else from the launcher. Bandwidths are declared, else
measured at start. For each distance (in a node, under a switch, across) every rank of a group sends to the
next one at that distance. All ranks send at once, so that shared links are measured shared. Two sizes are
used, so that the latency of a message cancels out. The group takes its slowest rank's value, so that all
ranks have the same numbers and make the same choice."""

import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce_max
from myriad.comm.config import CommConfig
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import (
    HIERARCHIES,
    Hierarchy,
    Level,
    RankPlacement,
    choose_hierarchy,
    declared_rates,
    make_levels,
)
from myriad.errors import BadInputError

__all__ = ["agree_on_hierarchy", "find_placement"]


def agree_on_hierarchy(
    groups: Groups, axis: str, comm: CommConfig, device: torch.device, *, purpose: str = ""
) -> tuple[Hierarchy, tuple[int, ...]]:
    """Return the hierarchy of ``comm.hierarchy``, and the radices of the group along ``axis`` (and of this
    ``purpose``, as `Groups.along` has it).

    For "auto" it is the fastest hierarchy. All ranks of the world call this together and get the same one:
    among the choices of all groups, the one with the fewest levels.
    """
    group, ranks = groups.along(axis, purpose=purpose), groups.grid.peers(axis)
    if group is None:
        return "flat", (1,)
    placement = find_placement(groups, group, comm, device)
    hierarchy = comm.hierarchy
    if hierarchy == "auto":
        chosen = HIERARCHIES.index(_fastest(group, ranks, placement, comm))
        fewest = all_reduce_max(torch.tensor([-chosen], device=device), groups.world).neg()
        hierarchy = HIERARCHIES[int(fewest)]
    radices = placement.radices(ranks, hierarchy)
    if radices is None:
        allowed = f"ranks {ranks} stand unevenly on nodes of {placement.node_size}; flat or auto"
        raise BadInputError("comm.hierarchy", hierarchy, allowed)
    return hierarchy, radices


def find_placement(groups: Groups, group: Group, comm: CommConfig, device: torch.device) -> RankPlacement:
    """Return the job's placement, else the launcher's if it is the same for all ranks of ``group``. A
    collective call of the group."""
    if comm.node_size is not None:
        return RankPlacement(comm.node_size, comm.switch_size, comm.island_size)
    world = groups.grid.layout.world
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    extremes = torch.tensor([size, -size], device=device)
    largest, smallest = all_reduce_max(extremes, group).abs().tolist()
    if largest == smallest:
        return RankPlacement(size, None, comm.island_size)
    if comm.hierarchy in ("auto", "flat"):
        return RankPlacement(world)
    allowed = f"nodes hold {smallest} to {largest} ranks; equally many, or comm.hierarchy = flat or auto"
    raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)


def _fastest(group: Group, ranks: tuple[int, ...], placement: RankPlacement, comm: CommConfig) -> Hierarchy:
    radices = placement.radices(ranks, "switch") or placement.radices(ranks, "node") or (len(ranks),)
    levels = make_levels(group.rank(), radices)
    if len(levels) < 2:
        return "flat"
    here = ranks[group.rank()]
    distances = [placement.distance(here, ranks[level.members[level.others[0]]]) for level in levels]
    rates = declared_rates(comm, placement)
    if not set(distances) <= set(rates):
        if dist.get_backend(group) != "gloo":
            return "flat"  # NCCL detects its links and has its own algorithms across nodes
        rates = dict(zip(distances, measure_rates(group, levels), strict=True))
    return choose_hierarchy(placement, ranks, rates)


_SMALL_BYTES, _LARGE_BYTES, _REPEATS = 2**16, 2**19, 3
_SIZES = (_SMALL_BYTES, _LARGE_BYTES)
_TAG = 2**21


def measure_rates(group: Group, levels: Sequence[Level]) -> list[float]:
    """Return the bits per second of a rank at each level while all ranks send."""
    seconds = torch.tensor([[_seconds(group, level, size) for size in _SIZES] for level in levels])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    rates = []
    for small, large in seconds.tolist():
        without_latency = 8 * (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
        # a small message that took longer than its share gives no estimate of the latency
        rates.append(min(without_latency, 2 * 8 * _LARGE_BYTES / large))
    return rates


def _seconds(group: Group, level: Level, num_bytes: int) -> float:
    """Return the median over repeats, without the first, which also opens the connection."""
    count = len(level.members)
    after, before = level.members[(level.own + 1) % count], level.members[level.own - 1]
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    found = []
    for _ in range(_REPEATS + 1):
        dist.barrier(group)
        start = time.perf_counter()
        received = group.recv([incoming], before, _TAG)
        group.send([outgoing], after, _TAG).wait()
        received.wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
