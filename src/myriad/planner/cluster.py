"""A cluster as its data sheets describe it: accelerators, nodes, and the links of each level.

    node        between accelerators of a node (NVLink; on a CPU the loopback)
    network     a node's NICs, its share for one accelerator
    spine       above `nodes_per_switch` nodes, where it is narrower than the network

Rates are for one accelerator and one direction. What of them is reached stands beside them, with the source
of its default.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from pydantic import Field

from myriad.comm.layout import MOST_RANKS
from myriad.config import Config, Rate, Seconds, Size
from myriad.errors import BadInputError
from myriad.network.nics import Nics
from myriad.network.node_topology import NodeTopology
from myriad.network.shape import FabricShape

__all__ = ["Accelerator", "Cluster", "Float32", "Level", "Link", "Links", "SlowNodes"]

Level = Literal["node", "network", "spine"]

_NODE_RATIO, _NETWORK_RATIO = 0.79, 0.90
"""NCCL's all-reduce on A100 reaches 193, 218 and 227 of 300 GB/s among 2, 4 and 8 (vTrain's measurements,
`tables/vtrain_nccl_allreduce_*.csv`, within 2 % of launch + steps + bytes): 0.79 (1 - 0.37 / n). Rings over
NICs reach 0.90 to 0.96 of their line rate at large sizes (SimAI's table); RoCE's and InfiniBand's own headers
are taken off that."""


class Float32(Config):
    """What is different when an accelerator computes in float32; what is off is as in bfloat16."""

    saturation: float | None = Field(None, ge=0)
    launch_seconds: float | None = Field(None, ge=0)
    stream_bytes_per_second: Rate | None = None
    loss_bytes_per_second: Rate | None = None
    weights_bytes_per_second: Rate | None = None
    flash_ratio: float | None = Field(None, gt=0, le=1)
    flash_half_length: float | None = Field(None, ge=0)
    flash_backward: float | None = Field(None, gt=0)


class Accelerator(Config):
    """One GPU, or one CPU core that stands for one."""

    name: str
    """As its maker calls it."""
    peak_flops_per_second: float = Field(ge=1, le=1e21)
    """Peak of dense matrix products in bfloat16 and float16 (CPU core: in the type it trains in)."""
    bfloat16: bool = True
    """Whether it multiplies bfloat16 at that rate. False (V100): float16 alone."""
    float32_flops_per_second: float | None = Field(None, ge=1, le=1e21)
    """The same in float32; off: half of the other."""
    float8_flops_per_second: float | None = Field(None, ge=1, le=1e21)
    """The same in float8; off: it has no such instructions, and computes as in bfloat16."""
    achievable_ratio: float = Field(0.85, gt=0, le=1)
    """Share of the peak that large matrix products reach: 0.86 on A100, 0.80 on H100 and H200 (measured by
    others, 268 of 312 and 792 of 989 TFLOP/s)."""
    memory_bytes: Size
    """Of its own."""
    memory_bytes_per_second: Rate
    """To and from its memory."""
    memory_ratio: float = Field(0.85, gt=0, le=1)
    """Share of that which streaming operators reach."""
    num_units: int = Field(108, ge=1)
    """Multiprocessors: a matrix product is computed in tiles, one of each at a time (A100: 108, H100:
    132)."""
    tile: int = Field(128, ge=1)
    """Rows and columns of a tile."""
    sustained_ratio: float = Field(0.9, gt=0, le=1)
    """Of the rate of large products alone, what they reach hour after hour among the other operators of a
    training, at the clock that the power limit leaves."""
    saturation: float = Field(96.0, ge=0)
    """Inner length of a matrix product at which half of its time is start and end of a tile."""
    launch_seconds: float = Field(4e-6, ge=0, le=1e4)
    """For each operator, however small."""
    captured_launch_seconds: float = Field(1.3e-6, ge=0, le=1e4)
    """The same in a captured CUDA graph: additions of 1,024 numbers take 1.1 to 1.3 us each in one, with what
    they compute (https://github.com/pytorch/pytorch/issues/161104)."""
    flash_ratio: float = Field(0.60, gt=0, le=1)
    """Share of the peak that FlashAttention-2 reaches with long sequences, forward and backward, counting
    attended pairs: A100 0.60 (arXiv 2307.08691, figure 4), H100 0.38 (arXiv 2407.08608, figures 5 and 6)."""
    flash_half_length: float = Field(384.0, ge=0)
    """Sequence length at which it reaches half of that (FlashAttention-2's figure 4: with causal masks 2,048
    tokens reach 0.84 of what 16,384 do)."""
    flash_backward: float = Field(2.5, gt=0)
    """Seconds of its backward for one of the forward: five products for two (arXiv 2307.08691, section
    3.1.2)."""
    host_bytes_per_second: Rate = 32e9
    """To its host's memory, as its data sheet says: what snapshots are copied over. A CPU core copies within
    its own memory instead."""
    stream_bytes_per_second: Rate | None = None
    """What the operators between products (norms, activations, residuals) reach, by the bytes that fused ones
    move; off: memory_bytes_per_second x memory_ratio, as large sweeps over memory do."""
    loss_bytes_per_second: Rate | None = None
    """The same of the loss over the vocabulary, by the bytes of its logits that a fused one moves; off: as
    stream_bytes_per_second."""
    weights_bytes_per_second: Rate | None = None
    """At which the weights of products come from memory, and sums of gradients from there and back, for each
    micro-batch, where products wait for that (a CPU core's do); off: it happens beside their compute, at
    memory_bytes_per_second."""
    float32: Float32 = Float32()
    """What is different in float32."""

    def of(self, value_bytes: int) -> "Accelerator":
        """As it is when it computes with values of so many bytes."""
        other = self.float32.model_dump(exclude_none=True) if value_bytes == 4 else {}
        return self.model_copy(update=other) if other else self

    def captured(self) -> "Accelerator":
        """As it is when its operators are started by a graph."""
        launch = min(self.launch_seconds, self.captured_launch_seconds)
        return self.model_copy(update={"launch_seconds": launch})


class Link(Config):
    """A level of the network, as one accelerator sees it."""

    bytes_per_second: Rate
    """Of one accelerator, in one direction."""
    latency_seconds: Seconds
    """Of one step of a ring, or of one message."""
    launch_seconds: float = Field(38e-6, ge=0, le=1e4)
    """Until a collective has begun (NCCL on A100: 46 us for two ranks, 79 us for eight, the rest is
    steps)."""
    skew_seconds: float = Field(4e-5, ge=0, le=1e4)
    """Ranks of a tensor-parallel group wait so long for the last of them at each collective that nothing
    hides: fit to what the parallel block gained in MegaScale's table 3, which halves their number."""
    achievable_ratio: float | None = Field(None, gt=0, le=1)
    """Share of the rate that large messages reach; off: 0.79 in a node, 0.90 between nodes."""
    small_group_loss: float = Field(0.37, ge=0, le=1)
    """What a group of n ranks inside a node loses of that, times n (NCCL's kernels, as above)."""
    busy_ratio: float = Field(0.15, ge=0, le=2)
    """Of the time that communication is hidden, what it takes from the compute it hides behind: NCCL's
    kernels hold 8 to 24 of some 110 multiprocessors, and memory bandwidth. Of a CPU core: what it spends on
    the transfer."""


class Links(Config):
    """The levels."""

    node: Link
    """Between accelerators of one node."""
    network: Link | None = None
    """Between nodes."""
    tensor: Link | None = None
    """What tensor-parallel gathers and scatters see inside a node, with the copies before and after them,
    where that was measured; off: as node."""
    spine: Link | None = None
    """Between switches of nodes_per_switch nodes each; off: as wide as the network."""


class SlowNodes(Config):
    """Nodes that are always slower than others."""

    ratio: float = Field(0.0, ge=0, lt=1)
    """Share of the nodes."""
    slower_ratio: float = Field(0.0, ge=0, lt=1)
    """By how much."""


class NodeLinks(Config):
    """Nodes whose way to the others is not like the rest's."""

    nodes: tuple[int, ...]
    """Their numbers, from 0."""
    bytes_per_second: Rate
    """Of one accelerator of theirs, in one direction."""


class Cluster(Config):
    """Nodes that are alike, but for what is said of single ones."""

    name: str
    """Of the file."""
    nodes: int = Field(ge=1)
    """How many."""
    accelerators_per_node: int = Field(ge=1)
    """How many in each."""
    nics_per_node: int | None = Field(None, ge=1)
    """Network ports of a node; off: one for each accelerator."""
    nodes_per_switch: int | None = Field(None, ge=1)
    """Nodes under one switch; off: all of them."""
    accelerator: Accelerator
    """All are alike."""
    links: Links
    """Between them."""
    fabric: FabricShape | None = None
    """Switches and cables; off: what nodes_per_switch and links say."""
    nics: Nics | None = None
    """What the NICs are; off: not known."""
    inside: NodeTopology | None = None
    """NVLink pairs, PCIe switches and NUMA nodes of a node; off: all its accelerators reach each other at
    links.node's rate."""
    unequal: tuple[NodeLinks, ...] = ()
    """Nodes with other links than the rest."""
    slow_nodes: SlowNodes = SlowNodes()
    """What is known of nodes that are slower: the whole job waits for them."""
    shared_cores: int | None = Field(None, ge=1)
    """Cores that all accelerators take turns on, rank r on core r modulo their number, where one machine
    rehearses a cluster; off: each computes by itself."""
    turns_ratio: float = Field(0.0, ge=0)
    """How much longer compute takes, besides taking turns, for each doubling of the ranks on its core: at a
    turn's start its caches hold what is another's."""
    core_speeds: tuple[float, ...] = ()
    """Of each shared core, where the accelerator's is 1: virtual cores have neighbours, laptops two
    kinds. Off: all are alike."""
    pace_seconds: float | None = Field(None, gt=0)
    """What a small block took on a core when it was measured (`train.measure_compute.Pace`): by what
    it takes later, that core's speed then is known. Off: not measured."""
    storage_bytes_per_second: Rate | None = None
    """To where checkpoints are stored, for all nodes together; off: unknown."""
    dollars_per_hour: float | None = Field(None, ge=0, le=1e6)
    """For one accelerator; off: unknown."""

    @property
    def on_cpu(self) -> bool:
        """An accelerator is a core, and ranks talk by gloo."""
        return self.shared_cores is not None or self.accelerator.name.startswith("CPU")

    @property
    def world(self) -> int:
        """Accelerators."""
        return self.nodes * self.accelerators_per_node

    def check(self) -> "Cluster":
        """Rules that span fields. Raises `BadInputError`."""
        if self.world > MOST_RANKS:
            allowed = f"at most {MOST_RANKS:,} accelerators: a search holds an entry for each"
            raise BadInputError("nodes x accelerators_per_node", self.world, allowed)
        if self.nodes > 1 and self.links.network is None:
            raise BadInputError("links.network", None, f"needed: the cluster has {self.nodes} nodes")
        if self.links.spine is not None and self.nodes_per_switch is None:
            raise BadInputError("nodes_per_switch", None, "needed: links.spine is what lies above a switch")
        if self.core_speeds and (len(self.core_speeds) != self.shared_cores or min(self.core_speeds) <= 0):
            allowed = f"one above 0 for each of the shared_cores = {self.shared_cores}"
            raise BadInputError("core_speeds", list(self.core_speeds), allowed)
        for group in self.unequal:
            _check_numbers(group.nodes, self.nodes)
        if self.inside is not None:
            self.inside.check(self.accelerators_per_node)
        return self

    def local_bytes_per_second(self, size: int, stride: int) -> float:
        """What links give each rank of groups of ``size`` local ranks ``stride`` apart: links.node, where the
        paths of `inside` use only some of an accelerator's links the share of these."""
        if self.inside is None:
            return self.links.node.bytes_per_second
        found = self.inside.group_bytes_per_second(size, stride, self.accelerators_per_node)
        return self.links.node.bytes_per_second * min(1.0, found / self.inside.whole_bytes_per_second)

    def ratio(self, level: Level) -> float:
        """Share of a level's rate that large messages reach."""
        link = self.link(level)
        if link.achievable_ratio is not None:
            return link.achievable_ratio
        return _NODE_RATIO if level == "node" else _NETWORK_RATIO

    def link(self, level: Level) -> Link:
        """A level, or the next one below where it is not given."""
        links = self.links
        found = {"node": links.node, "network": links.network, "spine": links.spine or links.network}[level]
        if found is None or level == "node" or not self.by_sockets:
            return found or links.node
        assert self.nics is not None
        return _through_sockets(found, self.nics, self.ports_per_node, self.accelerators_per_node)

    @property
    def by_sockets(self) -> bool:
        """Whether NCCL sends through TCP sockets between nodes (``nics.transport = "tcp"``). What gloo
        reaches is in the links, as it was measured."""
        return self.nics is not None and self.nics.transport == "tcp" and not self.on_cpu

    @property
    def slowest_core(self) -> float:
        """Speed of the slowest shared core, which ranks that wait for each other go at."""
        return min(self.core_speeds, default=1.0)

    def turns_slowdown(self, num_ranks: float) -> float:
        """Of compute on a core of so many ranks, besides taking turns."""
        return 1 + self.turns_ratio * math.log2(max(1.0, num_ranks))

    @property
    def ports_per_node(self) -> int:
        """NIC ports."""
        return self.nics_per_node or self.accelerators_per_node

    @property
    def expected_slowdown(self) -> float:
        """By which the slowest of all nodes is expected to hold up everybody, at least 1."""
        slow = self.slow_nodes
        return 1 + slow.slower_ratio * (1 - (1 - slow.ratio) ** self.nodes)


@lru_cache(maxsize=256)
def _through_sockets(link: Link, nics: Nics, ports: int, accelerators: int) -> Link:
    """Return a link between nodes as TCP sockets see it: the ports that they use carry no more than their own
    share of the line and `Nics.socket_bytes_per_second` each, and a step takes at least a socket's
    latency."""
    used = min(ports, nics.socket_ports or ports)
    reached = _NETWORK_RATIO if link.achievable_ratio is None else link.achievable_ratio
    carried = used * nics.socket_bytes_per_second / accelerators
    changed = {
        "achievable_ratio": min(reached * used / ports, carried / link.bytes_per_second),
        "latency_seconds": max(link.latency_seconds, nics.socket_latency_seconds),
    }
    return link.model_copy(update=changed)


def _check_numbers(numbers: Sequence[int], nodes: int) -> None:
    for number in numbers:
        if not 0 <= number < nodes:
            raise BadInputError("unequal.nodes", number, f"0 to {nodes - 1}")
