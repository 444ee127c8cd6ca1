"""A cluster as its data sheets describe it: accelerators, nodes, and the links of each level.

    node        between accelerators of a node (NVLink; on a CPU the loopback)
    network     a node's NICs, its share for one accelerator
    spine       above `nodes_per_switch` nodes, where it is narrower than the network

Rates are for one accelerator and one direction. Each rate has a key for the share that is reached, with the
source of its default.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from pydantic import Field

from myriad.comm.layout import MOST_RANKS
from myriad.config import Config, Rate, Seconds, Size
from myriad.errors import BadInputError
from myriad.network.config import FabricShape, Nics
from myriad.network.node_topology import NodeTopology

__all__ = [
    "Accelerator",
    "Calibration",
    "Cluster",
    "Float32",
    "Level",
    "Link",
    "Links",
    "Server",
    "SlowNodes",
]

Level = Literal["node", "network", "spine"]

_NODE_RATIO, _NETWORK_RATIO = 0.79, 0.90
"""NCCL's all-reduce on A100 reaches 193, 218 and 227 of 300 GB/s among 2, 4 and 8 (vTrain's measurements,
`tables/vtrain_nccl_allreduce_*.csv`, within 2 % of launch + steps + bytes): 0.79 (1 - 0.37 / n). Rings over
NICs reach 0.90 to 0.96 of their line rate at large sizes (SimAI's table), without the headers of RoCE and
InfiniBand."""


class Float32(Config):
    """Values that differ when an accelerator computes in float32; a key that is off has the bfloat16
    value."""

    saturation: float | None = Field(None, ge=0)
    launch_seconds: float | None = Field(None, ge=0)
    stream_bytes_per_second: Rate | None = None
    loss_bytes_per_second: Rate | None = None
    weights_bytes_per_second: Rate | None = None
    flash_ratio: float | None = Field(None, gt=0, le=1)
    flash_half_length: float | None = Field(None, ge=0)
    flash_backward: float | None = Field(None, gt=0)


class Server(Config):
    """The usual server of an accelerator, as its maker or the clouds build it."""

    accelerators: int = Field(8, ge=1)
    """Accelerators that its fast links join, as jobs use them: 64 of the 72 of an NVL72."""
    node_bytes_per_second: Rate
    """Rate of one accelerator in one direction to the others of its server, by the data sheet."""
    node_achievable_ratio: float | None = Field(None, gt=0, le=1)
    """Share of node_bytes_per_second that large messages reach; off: as `Link.achievable_ratio`."""
    network_bytes_per_second: Rate
    """The NICs' share of one accelerator."""


class Accelerator(Config):
    """One GPU, or one CPU core in place of one."""

    name: str
    """Product name of the accelerator."""
    peak_flops_per_second: float = Field(ge=1, le=1e21)
    """Peak of dense matrix products in bfloat16 and float16 (CPU core: in the type it trains in)."""
    bfloat16: bool = True
    """Whether it multiplies bfloat16 at that rate. False (V100): only float16 has it."""
    float32_flops_per_second: float | None = Field(None, ge=1, le=1e21)
    """Peak of dense matrix products in float32; off: half of peak_flops_per_second."""
    float8_flops_per_second: float | None = Field(None, ge=1, le=1e21)
    """Peak of dense matrix products in float8; off: it has no such instructions, and computes as in
    bfloat16."""
    float4_flops_per_second: float | None = Field(None, ge=1, le=1e21)
    """Peak of dense matrix products in four-bit floats with a scale for 16 neighbours (NVFP4); off: it has no
    such instructions, and computes as in bfloat16."""
    float8_any_order: bool = False
    """Whether its float8 products take matrices in any order of memory (Blackwell: Transformer Engine's
    nvte_is_non_tn_fp8_gemm_supported), so that a library needs no transposed form."""
    unaligned_flops_per_second: float | None = Field(None, ge=1, le=1e21)
    """Peak of attention's batched products in 16 bits without a flash kernel, where a head's width is no
    multiple of 16 bytes and the library leaves tensor cores unused: the float32 rate of the other cores
    (A100: 19.5, V100: 15.7 TFLOP/s); off: as for other widths."""
    achievable_ratio: float = Field(0.85, gt=0, le=1)
    """Share of the peak that large matrix products reach: 0.86 on A100, 0.80 on H100 and H200 (measured by
    others, 268 of 312 and 792 of 989 TFLOP/s)."""
    float8_achievable_ratio: float | None = Field(None, gt=0, le=1)
    """The same of products in float8, which draw more power: 0.71 on H100, 0.73 on H200, 0.76 on B200
    (measured by others, 1,403, 1,453 and 3,433 TFLOP/s); off: achievable_ratio."""
    float4_achievable_ratio: float | None = Field(None, gt=0, le=1)
    """The same of products in NVFP4; off: float8_achievable_ratio."""
    memory_bytes: Size
    """The accelerator's own memory."""
    memory_bytes_per_second: Rate
    """Rate to and from its memory."""
    memory_ratio: float = Field(0.85, gt=0, le=1)
    """Share of the memory rate that streaming operators reach."""
    num_units: int = Field(108, ge=1)
    """Number of multiprocessors. A matrix product is computed in tiles, one on each at a time (A100: 108,
    H100: 132)."""
    tile: int = Field(128, ge=1)
    """Rows and columns of a tile."""
    sustained_ratio: float = Field(0.9, gt=0, le=1)
    """Share of achievable_ratio's rate that products keep for hours among the other operators of a training,
    at the clock that the power limit allows."""
    saturation: float = Field(96.0, ge=0)
    """Inner length of a matrix product at which half of its time is the start and end of a tile."""
    launch_seconds: float = Field(4e-6, ge=0, le=1e4)
    """Launch time of each operator, however small."""
    captured_launch_seconds: float = Field(1.3e-6, ge=0, le=1e4)
    """Launch time of each operator in a captured CUDA graph: additions of 1,024 numbers take 1.1 to 1.3 us
    each in one, including their compute (https://github.com/pytorch/pytorch/issues/161104)."""
    flash_ratio: float = Field(0.60, gt=0, le=1)
    """Share of the peak that FlashAttention-2 reaches with long sequences, forward and backward, counting
    attended pairs: A100 0.60 (arXiv 2307.08691, figure 4), H100 0.34 (the same, section 4.1 and figure 7)."""
    flash3_ratio: float | None = Field(None, gt=0, le=1)
    """The same of the kernel for its own generation (FlashAttention-3, cuDNN); off: 1.4 times
    flash_ratio (arXiv 2407.08608, figure 6: 1.5 to 1.75 times in the backward on H100)."""
    flash_half_length: float = Field(384.0, ge=0)
    """Sequence length at which FlashAttention-2 reaches half of flash_ratio (its figure 4: with causal masks
    2,048 tokens reach 0.84 of the rate of 16,384)."""
    flash_backward: float = Field(2.5, gt=0)
    """Seconds of FlashAttention-2's backward for one of its forward: five products for two (arXiv 2307.08691,
    section 3.1.2)."""
    matches: tuple[str, ...] = ()
    """Regular expressions that name this accelerator in what a published row says (source, table, type and
    notes), where its type alone is another one's."""
    server: Server = Server(node_bytes_per_second=32e9, network_bytes_per_second=25e9)
    """Where it usually stands; off: PCIe 4 and a NIC of 200 Gb/s each."""
    watts: float | None = Field(None, gt=0, le=1e6)
    """Power limit by its data sheet; off: unknown."""
    dollars_per_hour: float | None = Field(None, ge=0, le=1e6)
    """Price of renting one; off: unknown."""
    host_bytes_per_second: Rate = 32e9
    """Rate to its host's memory by its data sheet, over which snapshots are copied. A CPU core copies within
    its own memory instead."""
    stream_bytes_per_second: Rate | None = None
    """Rate of the operators between products (norms, activations, residuals), by the bytes that fused ones
    move; off: memory_bytes_per_second x memory_ratio, as for large sweeps over memory."""
    loss_bytes_per_second: Rate | None = None
    """Rate of the loss over the vocabulary, by the bytes of its logits that a fused loss moves; off:
    stream_bytes_per_second."""
    weights_bytes_per_second: Rate | None = None
    """Rate at which products read their weights, and read and write the sums of gradients, for each
    micro-batch, where products wait for that memory traffic (as on a CPU core); off: it overlaps with their
    compute, at memory_bytes_per_second."""
    float32: Float32 = Float32()
    """Values that differ in float32."""

    def of(self, value_bytes: int) -> "Accelerator":
        """Return the accelerator as it is for values of so many bytes."""
        other = self.float32.model_dump(exclude_none=True) if value_bytes == 4 else {}
        return self.model_copy(update=other) if other else self

    def quantized_peak(self, quantization: str | None) -> float | None:
        """Return the peak of products in a profile's format (`FrameworkProfile.quantization`); ``None``: it
        has no such instructions, or the format is that of the other operators."""
        if quantization is None:
            return None
        return self.float4_flops_per_second if quantization == "nvfp4" else self.float8_flops_per_second

    def captured(self) -> "Accelerator":
        """Return the accelerator as it is when a CUDA graph launches its operators."""
        launch = min(self.launch_seconds, self.captured_launch_seconds)
        return self.model_copy(update={"launch_seconds": launch})

    def slowed(self, products_ratio: float) -> "Accelerator":
        """Return the accelerator with matrix products at a share of their rate."""
        return self.model_copy(update={"sustained_ratio": self.sustained_ratio * products_ratio})


class Link(Config):
    """One level of the network, from the view of one accelerator."""

    bytes_per_second: Rate
    """Rate of one accelerator in one direction."""
    latency_seconds: Seconds
    """Latency of one step of a ring, or of one message."""
    launch_seconds: float = Field(38e-6, ge=0, le=1e4)
    """Seconds until a collective has begun (NCCL on A100: 46 us for two ranks, 79 us for eight; the rest is
    steps)."""
    skew_seconds: float = Field(4e-5, ge=0, le=1e4)
    """Seconds that ranks of a tensor-parallel group wait for the last of them at each exposed collective: fit
    to the gain of the parallel block in MegaScale's table 3, which halves their number."""
    achievable_ratio: float | None = Field(None, gt=0, le=1)
    """Share of the rate that large messages reach; off: 0.79 in a node, 0.90 between nodes."""
    small_group_loss: float = Field(0.37, ge=0, le=1)
    """Loss of a group of n ranks inside a node as a share of that, times n (NCCL's kernels, as above)."""
    check_seconds: float = Field(0.0, ge=0, le=1)
    """Seconds of the host before each collective, for each rank of its group at this distance, where PyTorch
    first compares what all ranks call (TORCH_DISTRIBUTED_DEBUG = DETAIL). The device computes meanwhile."""
    busy_ratio: float = Field(0.15, ge=0, le=2)
    """Share of overlapped communication time by which compute slows down: NCCL's kernels hold 8 to 24 of some
    110 multiprocessors, and memory bandwidth. On a CPU core, the share that the core spends on the transfer.
    """


class Links(Config):
    """Links of each level of the network."""

    node: Link
    """Link between accelerators of one node."""
    network: Link | None = None
    """Network between nodes; required with more than one node."""
    tensor: Link | None = None
    """Link for tensor-parallel gathers and scatters inside a node, including the copies before and after
    them, where that was measured; off: as node."""
    spine: Link | None = None
    """Link between switches of nodes_per_switch nodes each; off: as wide as the network."""


class SlowNodes(Config):
    """Nodes that are always slower than the rest."""

    ratio: float = Field(0.0, ge=0, lt=1)
    """Share of the nodes that are slow."""
    slower_ratio: float = Field(0.0, ge=0, lt=1)
    """Share by which the slow nodes are slower."""


class NodeLinks(Config):
    """Nodes whose links to other nodes have another rate than the rest."""

    nodes: tuple[int, ...]
    """Numbers of the nodes, from 0."""
    bytes_per_second: Rate
    """Rate of one accelerator of these nodes, in one direction."""


class Calibration(Config):
    """Measured iterations to which rates of the cluster were fitted (`myriad plan --calibrate`)."""

    framework: str
    """Name of the framework that ran the iterations."""
    rows: int = Field(ge=1)
    """Number of iterations that the rates were fitted to."""
    experts: bool = False
    """Whether the trained models have experts."""
    interval_ratio: float = Field(ge=0, allow_inf_nan=False)
    """Relative half width of the interval that contains nine of ten times of other layouts."""


class Cluster(Config):
    """A cluster of nodes that are alike, except where single nodes are listed."""

    name: str
    """Name of the cluster's file."""
    nodes: int = Field(ge=1)
    """Number of nodes of the cluster."""
    accelerators_per_node: int = Field(ge=1)
    """Number of accelerators in each node."""
    nics_per_node: int | None = Field(None, ge=1)
    """Network ports of a node; off: one for each accelerator."""
    nodes_per_switch: int | None = Field(None, ge=1)
    """Nodes under one switch; off: all of them."""
    accelerator: Accelerator
    """The accelerator; all are alike."""
    links: Links
    """Links between the accelerators."""
    fabric: FabricShape | None = None
    """Switches and cables; off: derived from nodes_per_switch and links."""
    nics: Nics | None = None
    """Properties of the NICs; off: unknown."""
    inside: NodeTopology | None = None
    """NVLink pairs, PCIe switches and NUMA nodes of a node; off: all its accelerators are connected at the
    rate of links.node."""
    unequal: tuple[NodeLinks, ...] = ()
    """Nodes with other links than the rest."""
    slow_nodes: SlowNodes = SlowNodes()
    """Share of slow nodes: the whole job waits for them."""
    shared_cores: int | None = Field(None, ge=1)
    """Number of cores that all accelerators share, with rank r on core r modulo this number, where one
    machine rehearses a cluster; off: each has its own core."""
    turns_ratio: float = Field(0.0, ge=0)
    """Slowdown of compute, in addition to sharing the core, for each doubling of the ranks on a core: after a
    switch the caches hold another rank's data."""
    core_speeds: tuple[float, ...] = ()
    """Speed of each shared core relative to the accelerator's: virtual cores share hardware, and laptops have
    two kinds of cores. Off: all are alike."""
    pace_seconds: float | None = Field(None, gt=0)
    """Seconds of a small block on a core at the time of measurement (`train.measure_compute.Pace`); comparing
    it with a later value gives a core's current speed. Off: not measured."""
    storage_bytes_per_second: Rate | None = None
    """Rate to the checkpoint storage, for all nodes together; off: unknown."""
    dollars_per_hour: float | None = Field(None, ge=0, le=1e6)
    """Price of one accelerator; off: that of its recipe, a list price whose month is in the recipe."""
    watts_per_accelerator: float | None = Field(None, gt=0, le=1e6)
    """Power that one accelerator draws in training, with its share of hosts, network and cooling; off: the
    accelerator's power limit alone."""
    calibration: Calibration | None = None
    """Iterations to which the rates were fitted; off: the rates are those of data sheets or measurements."""

    @property
    def on_cpu(self) -> bool:
        """Whether an accelerator is a CPU core, and ranks communicate by gloo."""
        return self.shared_cores is not None or self.accelerator.name.startswith("CPU")

    @property
    def price(self) -> float | None:
        """Dollars of an hour of one accelerator; ``None``: unknown."""
        own = self.dollars_per_hour
        return self.accelerator.dollars_per_hour if own is None else own

    @property
    def power(self) -> float | None:
        """Watts of one accelerator; ``None``: unknown."""
        return self.watts_per_accelerator or self.accelerator.watts

    @property
    def world(self) -> int:
        """Number of accelerators of all nodes."""
        return self.nodes * self.accelerators_per_node

    def check(self) -> "Cluster":
        """Check the rules that span several fields. Raises `BadInputError`."""
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
        """Return the rate of each rank in groups of ``size`` local ranks ``stride`` apart: links.node,
        reduced where the paths of `inside` use only some of an accelerator's links."""
        if self.inside is None:
            return self.links.node.bytes_per_second
        found = self.inside.group_bytes_per_second(size, stride, self.accelerators_per_node)
        return self.links.node.bytes_per_second * min(1.0, found / self.inside.whole_bytes_per_second)

    def ratio(self, level: Level) -> float:
        """Return the share of a level's rate that large messages reach."""
        link = self.link(level)
        if link.achievable_ratio is not None:
            return link.achievable_ratio
        return _NODE_RATIO if level == "node" else _NETWORK_RATIO

    def link(self, level: Level) -> Link:
        """Return the link of a level, or of the next lower level where it is not given."""
        links = self.links
        found = {"node": links.node, "network": links.network, "spine": links.spine or links.network}[level]
        if found is None or level == "node" or not self.by_sockets:
            return found or links.node
        assert self.nics is not None
        return _through_sockets(found, self.nics, self.ports_per_node, self.accelerators_per_node)

    @property
    def by_sockets(self) -> bool:
        """Whether NCCL sends through TCP sockets between nodes (``nics.transport = "tcp"``). The links
        contain the measured rates of gloo."""
        return self.nics is not None and self.nics.transport == "tcp" and not self.on_cpu

    @property
    def slowest_core(self) -> float:
        """Speed of the slowest shared core, which determines the speed of ranks that wait for each other."""
        return min(self.core_speeds, default=1.0)

    def turns_slowdown(self, num_ranks: float) -> float:
        """Return the slowdown of compute on a core with so many ranks, in addition to sharing the core."""
        return 1 + self.turns_ratio * math.log2(max(1.0, num_ranks))

    @property
    def ports_per_node(self) -> int:
        """Number of NIC ports of a node."""
        return self.nics_per_node or self.accelerators_per_node

    @property
    def expected_slowdown(self) -> float:
        """Expected slowdown of the whole job by the slowest node, at least 1."""
        slow = self.slow_nodes
        return 1 + slow.slower_ratio * (1 - (1 - slow.ratio) ** self.nodes)


@lru_cache(maxsize=256)
def _through_sockets(link: Link, nics: Nics, ports: int, accelerators: int) -> Link:
    """Return a link between nodes as TCP sockets provide it. Each port carries at most its share of the line
    and `Nics.socket_bytes_per_second`, and a step takes at least a socket's latency."""
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
