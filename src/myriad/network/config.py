"""The network tables of a cluster file: ``[fabric]`` (`FabricShape`) and ``[nics]`` (`Nics`).

    kind = "clos3"          three tiers: leaf switches, the aggregation switches of a pod, the core
    rails = true            port r of each node goes to switch r of its set, not all of a node's to one switch
    split = 2               a switch port towards servers is split in two of half the rate: an uplink carries
                            twice as much as a NIC port, so two flows that hash to it do not share it

Keys that are not set follow from the others; each key says how. The settings of NCCL and gloo follow from
``[nics]`` (`planner.tuning`). The links inside a node are ``[inside]`` (`network.node_topology`).
"""

from typing import Literal

from pydantic import Field

from myriad.config import Config, Rate, Seconds

__all__ = ["Cable", "FabricShape", "Kind", "Nics"]

Kind = Literal["clos2", "clos3", "rail", "dual-plane", "graph"]


class Cable(Config):
    """Cables between two ends: one or several from each port or switch of one end to each of the other."""

    ends: tuple[str, str]
    """Name of a switch, or ports of nodes by number: "3" is all ports of node 3, "0-7" all ports of eight
    nodes, "0-7.1" port 1 of each of them."""
    bytes_per_second: Rate | None = None
    """Rate in each direction. Default: the rate of a NIC port."""
    count: int = Field(1, ge=1)
    """Number of parallel cables."""


class FabricShape(Config):
    """Switches and how they are connected."""

    kind: Kind = "clos2"
    """clos2, clos3: two or three tiers of switches, each switch connected to all of the next tier in its
    pod. rail: clos2 with rails. dual-plane: rails, and each NIC has a half-rate port in each of two planes
    that share no switch. graph: the fabric that cables lists."""
    ports_per_switch: int | None = Field(None, ge=2)
    """Ports of a switch, each of port_bytes_per_second. Default: as many as needed."""
    port_bytes_per_second: Rate | None = None
    """Rate of a switch port in one direction: 400 Gbit/s is 50e9. Default: split x the rate of a NIC's
    link."""
    split: int = Field(1, ge=1, le=8)
    """Number of links into which a switch port towards servers is split."""
    oversubscription: float = Field(1.0, gt=0)
    """Rate into a first-tier switch from its ports, divided by the rate up from it."""
    pod_oversubscription: float = Field(1.0, gt=0)
    """The same ratio for a pod and its uplinks to the core."""
    rails: bool | None = None
    """Port r of each node under a set of switches is connected to switch r of the set. Default: true for
    rail and dual-plane, else false."""
    planes: int | None = Field(None, ge=1, le=8)
    """Copies of the fabric, each with its share of the rate of every NIC. Default: two for dual-plane, else
    one."""
    nodes_per_switch: int | None = Field(None, ge=1)
    """Nodes under one first-tier switch, or with rails under one set of them. Default: the cluster's value,
    else what ports_per_switch allows, else all nodes."""
    nodes_per_pod: int | None = Field(None, ge=1)
    """Nodes in a pod of clos3. Default: what ports_per_switch allows."""
    latency_seconds: Seconds = 1e-6
    """Latency of a link, with the forwarding of the switch at its end (1 us as in the simulations of HPCC,
    SIGCOMM 2019, section 5.1)."""
    cables: tuple[Cable, ...] = ()
    """The cables of a graph."""

    @property
    def has_rails(self) -> bool:
        """Whether each rail has a switch of its own."""
        return self.kind in ("rail", "dual-plane") if self.rails is None else self.rails

    @property
    def num_planes(self) -> int:
        """Number of copies of the fabric."""
        return self.planes or (2 if self.kind == "dual-plane" else 1)


Transport = Literal["infiniband", "roce", "tcp"]


class Nics(Config):
    """The NICs of a node; all nodes have the same."""

    transport: Transport
    """Transport between ranks of different nodes."""
    names: tuple[str, ...] = ()
    """RDMA devices for training, such as mlx5_0, in the order of rails. Default: unknown."""
    interface: str | None = None
    """IP interface by which nodes reach each other, such as eth0. Default: unknown."""
    traffic_class: int | None = Field(None, ge=0, le=255)
    """RoCE: traffic class of the lossless class with ECN on the switches (DSCP x 4 + 2). Default: unknown."""
    gid_index: int | None = Field(None, ge=0)
    """RoCE: GID index; set it where NCCL chooses a wrong one. Default: NCCL chooses."""
    adaptive_routing: bool = False
    """RoCE: switches choose the path packet by packet, and NICs restore the order."""
    adaptive_retransmission: bool = True
    """RoCE: the NICs support adaptive retransmission (ConnectX-5 and later)."""
    socket_bytes_per_second: Rate = 5e9
    """TCP: highest rate of one network port through NCCL's sockets; a processor copies the bytes. Measured:
    4 to 6 GB/s on 100 Gb/s among four machines of eight V100, most with NCCL's default of one thread and one
    socket for a connection (https://github.com/NVIDIA/nccl/issues/450). Raise it if you measured that more
    sockets help."""
    socket_latency_seconds: Seconds = 40e-6
    """TCP: latency of one step between nodes. Eight bytes reach another node by NCCL's sockets after 38 to
    46 us (https://github.com/NVIDIA/nccl-tests/issues/82)."""
    socket_ports: int | None = Field(None, ge=1)
    """TCP: network ports of a node that NCCL's sockets use, such as 1 if NCCL finds only one interface
    (https://github.com/NVIDIA/nccl/issues/1447). Default: all ports."""
