"""The links between the accelerators of one node: NVLink pairs, PCIe switches, NUMA nodes (``[inside]``).

    nvlink        accelerators that share links, and how many         DGX-1: a hybrid cube mesh
    switched      every one reaches every other at full rate          NVSwitch
    pcie          accelerators under one PCIe switch
    numa          accelerators of one processor

    0 ═ 3   4 ═ 7       ═ two links      The rate of a group is that of its narrowest cut. If NVLink connects
    │ ╳ │   │ ╳ │       ─ one            the group, only NVLink counts (NCCL then uses nothing else); else the
    1 ═ 2   5 ═ 6                        tree of PCIe switches and processors, which all groups share.

A ring all-reduce crosses every cut of its group at the rate at which each rank sends, so no ring is faster
than the narrowest cut; NCCL's sets of rings reach this rate on these machines. No torch here.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from myriad.config import Config, Rate
from myriad.errors import BadInputError

__all__ = ["PRESETS", "NodeTopology"]

Preset = Literal["v100-cube-mesh", "a100-nvswitch", "h100-nvswitch", "rtx4090"]


class NodeTopology(Config):
    """Links inside one node; rates are of one direction."""

    preset: Preset | None = None
    """A known machine with 8 accelerators: v100-cube-mesh (DGX-1), a100-nvswitch, h100-nvswitch, rtx4090 (no
    peer access). Other keys replace its values."""
    switched: bool = False
    """Every accelerator reaches every other at the full rate of its links (NVSwitch)."""
    nvlink: tuple[tuple[int, int, int], ...] = ()
    """Pairs of accelerators and the number of links between them: [[0, 3, 2], ...]."""
    nvlink_bytes_per_second: Rate | None = None
    """Rate of one NVLink (if switched: of all links of an accelerator)."""
    pcie: tuple[tuple[int, ...], ...] = ()
    """Accelerators under each PCIe switch: [[0, 1], [2, 3]]. Default: each is connected to its processor
    directly."""
    pcie_bytes_per_second: Rate = 32e9
    """Rate between an accelerator and its switch, and between a switch and its processor."""
    numa: tuple[tuple[int, ...], ...] = ()
    """Accelerators of each processor: [[0, 1, 2, 3], [4, 5, 6, 7]]. Default: one processor has all."""
    numa_bytes_per_second: Rate = 40e9
    """Rate between two processors."""
    peer_access: bool = True
    """Accelerators read each other's memory over PCIe. If false, bytes go through host memory, twice over
    the same links."""

    def resolved(self) -> "NodeTopology":
        """Return the topology with the preset's values for all fields that are not set."""
        if self.preset is None:
            return self
        own = {name: getattr(self, name) for name in self.model_fields_set}
        return NodeTopology(**(PRESETS[self.preset] | own))

    def check(self, accelerators: int) -> None:
        """Check that a node with ``accelerators`` can have this topology. Raises `BadInputError`."""
        here = self.resolved()
        for key, groups in (("pcie", here.pcie), ("numa", here.numa)):
            members = [one for group in groups for one in group]
            own = key in self.model_fields_set or not here.switched  # else they are not used
            if groups and own and sorted(members) != list(range(accelerators)):
                allowed = f"each of the {accelerators} accelerators of a node (from 0) in one group"
                raise BadInputError(f"inside.{key}", [list(group) for group in groups], allowed)
        for switch in here.pcie if here.numa else ():
            if sum(bool(set(switch) & set(group)) for group in here.numa) > 1:
                raise BadInputError(
                    "inside.pcie", list(switch), "accelerators of one processor (inside.numa)"
                )
        seen = set()
        for a, b, count in here.nvlink:
            if not (0 <= a < accelerators and 0 <= b < accelerators and a != b and count >= 1):
                allowed = f"two of the accelerators 0 to {accelerators - 1} and at least one link"
                raise BadInputError("inside.nvlink", [a, b, count], allowed)
            if frozenset((a, b)) in seen:
                raise BadInputError("inside.nvlink", [a, b, count], "each pair at most once")
            seen.add(frozenset((a, b)))
        if (here.nvlink or here.switched) and here.nvlink_bytes_per_second is None:
            raise BadInputError("inside.nvlink_bytes_per_second", None, "required: the rate of a link")
        if here.nvlink and here.switched:
            raise BadInputError("inside.switched", True, "must be false if inside.nvlink lists pairs")

    def pair_bytes_per_second(self, a: int, b: int, accelerators: int) -> float:
        """Return the rate between two accelerators while no others communicate, by the path between them."""
        return _group_rate(self.resolved(), accelerators, (tuple(sorted((a, b))),), 0)

    @property
    def whole_bytes_per_second(self) -> float:
        """Rate of all links of an accelerator together: the rate that links.node of a cluster file means."""
        here = self.resolved()
        if here.nvlink_bytes_per_second is None:
            return here.pcie_bytes_per_second
        ends = Counter[int]()
        for a, b, count in here.nvlink:
            ends[a] += count
            ends[b] += count
        return here.nvlink_bytes_per_second * max(ends.values(), default=1)

    def order(self, accelerators: int) -> tuple[int, ...]:
        """Return the accelerators in the order of local ranks. Neighbours in this order, by twos, fours and
        so on, have the best paths, so that tensor-parallel groups are NVLink neighbours."""
        return _order(self.resolved(), accelerators)

    def group_bytes_per_second(self, size: int, stride: int, accelerators: int) -> float:
        """Return the rate of each rank in groups of ``size`` local ranks ``stride`` apart while all groups
        communicate; the slowest group's rate."""
        return _rate_of_groups(self, size, stride, accelerators)

    def islands(self, accelerators: int) -> tuple[int, ...]:
        """Return the sizes of the levels of a reduction inside a node, innermost first. There is one level
        more wherever a part of the node has faster links than the whole. Their product is the number of
        accelerators."""
        sizes: list[int] = []
        size, rate = 1, float("inf")
        candidates = [n for n in range(2, accelerators + 1) if accelerators % n == 0]
        for wider in candidates:
            if wider % size:
                continue
            found = self.group_bytes_per_second(wider, 1, accelerators)
            if size > 1 and found < 0.75 * rate:
                sizes.append(size // (_product(sizes)))
            if size == 1 or found < rate or found >= 0.75 * rate:
                size, rate = wider, found
        sizes.append(accelerators // _product(sizes))
        return tuple(one for one in sizes if one > 1)


def _product(values: Sequence[int]) -> int:
    found = 1
    for value in values:
        found *= value
    return found


_CUBE_MESH = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2)),
    *((4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
    *((0, 4, 2), (1, 5, 2), (2, 6, 1), (3, 7, 1)),
)
"""``nvidia-smi topo -m`` of a DGX-1 or p3.16xlarge: six links for each V100."""
_PAIRS, _HALVES = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
PRESETS: dict[str, dict[str, object]] = {
    "v100-cube-mesh": {
        "nvlink": _CUBE_MESH,
        "nvlink_bytes_per_second": 25e9,
        "pcie": _PAIRS,
        "numa": _HALVES,
        "pcie_bytes_per_second": 16e9,
        "numa_bytes_per_second": 19.2e9,
    },
    "a100-nvswitch": {
        "switched": True,
        "nvlink_bytes_per_second": 300e9,
        "pcie": _PAIRS,
        "numa": _HALVES,
        "pcie_bytes_per_second": 32e9,
    },
    "h100-nvswitch": {
        "switched": True,
        "nvlink_bytes_per_second": 450e9,
        "pcie": tuple((one,) for one in range(8)),
        "numa": _HALVES,
        "pcie_bytes_per_second": 64e9,
    },
    "rtx4090": {
        "pcie": tuple((one,) for one in range(8)),
        "numa": _HALVES,
        "pcie_bytes_per_second": 32e9,
        "peer_access": False,
    },
}
"""NVIDIA's data sheets: NVLink 2, 3 and 4 have 25 GB/s for each link and direction, and 6, 12 and 18 links;
PCIe 3, 4 and 5 with 16 lanes have 16, 32 and 64 GB/s; QPI of DGX-1's Xeon E5-2698 v4, 9.6 GT/s, has 19.2
GB/s. GeForce RTX 4090 has no NVLink, and its driver does not support peer access."""


@lru_cache(maxsize=4096)
def _rate_of_groups(topology: NodeTopology, size: int, stride: int, accelerators: int) -> float:
    """Cached `NodeTopology.group_bytes_per_second`: a search asks for the same few groups many times."""
    order, here = topology.order(accelerators), topology.resolved()
    size = max(2, min(size, accelerators // max(1, stride)))
    groups = []
    for block in range(0, accelerators - size * stride + 1, size * stride):
        for first in range(stride):
            ranks = (block + first + place * stride for place in range(size))
            groups.append(tuple(sorted(order[rank] for rank in ranks)))
    if not groups:
        return _group_rate(here, accelerators, (tuple(range(accelerators)),), 0)
    return min(_group_rate(here, accelerators, tuple(groups), index) for index in range(len(groups)))


@lru_cache(maxsize=4096)
def _group_rate(
    here: NodeTopology, accelerators: int, groups: tuple[tuple[int, ...], ...], index: int
) -> float:
    """Return the rate of one group while all groups communicate."""
    group = groups[index]
    if here.switched:
        assert here.nvlink_bytes_per_second is not None, "checked"
        return here.nvlink_bytes_per_second
    if here.nvlink:
        cut = _narrowest_cut(here.nvlink, group)
        if cut:
            assert here.nvlink_bytes_per_second is not None, "checked"
            return cut * here.nvlink_bytes_per_second
    rates = []
    for members, rate in _tree(here, accelerators):
        crossing = [one for one in groups if 0 < len(members & set(one)) < len(one)]
        if group in crossing:
            rates.append(rate / len(crossing))
    through_host = 1.0 if here.peer_access else 0.5
    return min(rates, default=here.pcie_bytes_per_second) * through_host


def _tree(here: NodeTopology, accelerators: int) -> list[tuple[frozenset[int], float]]:
    """Return the accelerators below each edge of the PCIe tree, and the edge's rate."""
    edges = [(frozenset((one,)), here.pcie_bytes_per_second) for one in range(accelerators)]
    edges += [(frozenset(switch), here.pcie_bytes_per_second) for switch in here.pcie if len(switch) > 1]
    edges += [(frozenset(group), here.numa_bytes_per_second) for group in here.numa[1:]]
    return edges


def _narrowest_cut(pairs: Sequence[tuple[int, int, int]], group: Sequence[int]) -> int:
    """Return the number of links of the group's narrowest cut (Stoer and Wagner 1997); 0 if NVLink does not
    connect the group."""
    weights = {one: {other: 0 for other in group if other != one} for one in group}
    for a, b, count in pairs:
        if a in weights and b in weights:
            weights[a][b] += count
            weights[b][a] += count
    best: int | None = None
    while len(weights) > 1:
        first = next(iter(weights))
        order, reach = [first], dict(weights[first])
        while len(order) < len(weights):
            taken = max((one for one in weights if one not in order), key=lambda one: reach.get(one, 0))
            order.append(taken)
            for other, count in weights[taken].items():
                reach[other] = reach.get(other, 0) + count
        last, before = order[-1], order[-2]
        cut = sum(weights[last].values())
        best = cut if best is None else min(best, cut)
        for other, count in weights.pop(last).items():
            weights[other].pop(last)
            if other != before:
                weights[before][other] += count
                weights[other][before] += count
    return best or 0


@lru_cache(maxsize=64)
def _order(here: NodeTopology, accelerators: int) -> tuple[int, ...]:
    """Pair accelerators, then pairs, and so on: at each level the matching with the best worst rate, then
    the best sum."""
    parts: list[tuple[int, ...]] = [(one,) for one in range(accelerators)]
    while len(parts) > 1 and len(parts) % 2 == 0 and len(parts) <= 8:
        best = max(_matchings(parts), key=lambda matching: _worth(here, accelerators, matching))
        parts = [a + b for a, b in best]
    return tuple(itertools.chain.from_iterable(parts))


_Matching = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def _matchings(parts: Sequence[tuple[int, ...]]) -> list[_Matching]:
    """Return every way to pair the parts, pairs of neighbours first."""
    if not parts:
        return [()]
    first, *rest = parts
    found: list[_Matching] = []
    for index, other in enumerate(rest):
        left = [*rest[:index], *rest[index + 1 :]]
        found += [((first, other), *more) for more in _matchings(left)]
    return found


def _worth(here: NodeTopology, accelerators: int, matching: _Matching) -> tuple[float, float]:
    groups = tuple(tuple(sorted(a + b)) for a, b in matching)
    rates = [_group_rate(here, accelerators, groups, index) for index in range(len(groups))]
    return min(rates), sum(rates)
