"""Where the ranks of a group stand, and which way their sums take.

Nodes are those of comm.node_size and comm.switch_size, else the launcher's; bandwidths are declared, else
measured (`myriad.comm.links`).
"""

import os

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce_max
from myriad.comm.config import CommConfig
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import (
    HIERARCHIES,
    Hierarchy,
    Sites,
    choose_hierarchy,
    declared_rates,
    make_levels,
)
from myriad.comm.links import measure_rates
from myriad.errors import BadInputError

__all__ = ["settle_hierarchy"]


def settle_hierarchy(
    groups: Groups, axis: str, comm: CommConfig, device: torch.device
) -> tuple[Hierarchy, tuple[int, ...]]:
    """What ``comm.hierarchy`` says, and the radices of the group along ``axis``; for "auto" what is quickest,
    the same on all ranks of the world, which call this together: of what the groups would choose, the one
    with the fewest levels."""
    group, ranks = groups.along(axis), groups.grid.peers(axis)
    if group is None:
        return "flat", (1,)
    sites = _find_sites(groups, group, comm, device)
    hierarchy = comm.hierarchy
    if hierarchy == "auto":
        chosen = HIERARCHIES.index(_quickest(group, ranks, sites, comm))
        fewest = all_reduce_max(torch.tensor([-chosen], device=device), groups.world).neg()
        hierarchy = HIERARCHIES[int(fewest)]
    radices = sites.radices(ranks, hierarchy)
    if radices is None:
        allowed = f"ranks {ranks} stand unevenly on nodes of {sites.node_size}; flat or auto"
        raise BadInputError("comm.hierarchy", hierarchy, allowed)
    return hierarchy, radices


def _find_sites(groups: Groups, group: Group, comm: CommConfig, device: torch.device) -> Sites:
    """As the job says, else as the launcher says, when it says the same to all."""
    if comm.node_size is not None:
        return Sites(comm.node_size, comm.switch_size, comm.island_size)
    world = groups.grid.layout.world
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    extremes = torch.tensor([size, -size], device=device)
    largest, smallest = all_reduce_max(extremes, group).abs().tolist()
    if largest == smallest:
        return Sites(size, None, comm.island_size)
    if comm.hierarchy in ("auto", "flat"):
        return Sites(world)
    allowed = f"nodes hold {smallest} to {largest} ranks; equally many, or comm.hierarchy = flat or auto"
    raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)


def _quickest(group: Group, ranks: tuple[int, ...], sites: Sites, comm: CommConfig) -> Hierarchy:
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
