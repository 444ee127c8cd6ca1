"""What a cluster's file says of its fabric: ``[fabric]``.

    kind = "clos3"          three tiers: switches that ports hang on, a pod's aggregation switches, the core
    rails = true            port r of each node goes to switch r of its set, not all of a node's to one switch
    split = 2               a switch port towards servers is two of half the rate: an uplink carries twice as
                            much as a NIC port, so that two flows that hash on it share nothing

What is off follows from the rest: see each key.
"""

from typing import Literal

from pydantic import Field

from myriad.config import Config, Rate, Seconds

__all__ = ["Cable", "FabricShape", "Kind"]

Kind = Literal["clos2", "clos3", "rail", "dual-plane", "graph"]


class Cable(Config):
    """Between two ends, or between all ports of one and all of the other."""

    ends: tuple[str, str]
    """A switch by its name; ports of nodes by numbers: "3" all ports of node 3, "0-7" of eight nodes, "0-7.1"
    port 1 of each."""
    bytes_per_second: Rate | None = None
    """In each direction; off: as a NIC port."""
    count: int = Field(1, ge=1)
    """So many beside each other."""


class FabricShape(Config):
    """Switches and how they are joined."""

    kind: Kind = "clos2"
    """clos2, clos3: tiers of switches, each joined to all of the next within a pod. rail: clos2 with rails.
    dual-plane: rails, and each NIC has a half-rate port in each of two planes that share no switch. graph:
    whatever cables say."""
    ports_per_switch: int | None = Field(None, ge=2)
    """Of port_bytes_per_second each; off: as many as are needed."""
    port_bytes_per_second: Rate | None = None
    """Of a switch port, in one direction: 400 Gbit/s is 50e9; off: split x what a NIC's link carries."""
    split: int = Field(1, ge=1, le=8)
    """Ports that one switch port towards servers is split in."""
    oversubscription: float = Field(1.0, gt=0)
    """What comes into a first-tier switch from its ports for what goes up from it."""
    pod_oversubscription: float = Field(1.0, gt=0)
    """The same of a pod and what goes up to the core."""
    rails: bool | None = None
    """Port r of each node under a set of switches goes to the set's switch r; off: as the kind says."""
    planes: int | None = Field(None, ge=1, le=8)
    """Copies of the fabric, each with its share of every NIC's rate; off: two for dual-plane, else one."""
    nodes_per_switch: int | None = Field(None, ge=1)
    """Under one first-tier switch, or with rails under one set of them; off: as the cluster says, else what
    ports_per_switch allows, else all."""
    nodes_per_pod: int | None = Field(None, ge=1)
    """Of clos3; off: what ports_per_switch allows."""
    latency_seconds: Seconds = 1e-6
    """Of a link with the forwarding of the switch at its end (1 us: as the simulations of HPCC have it,
    SIGCOMM 2019, section 5.1)."""
    cables: tuple[Cable, ...] = ()
    """Of a graph."""

    @property
    def has_rails(self) -> bool:
        """Whether each rail has a switch of its own."""
        return self.kind in ("rail", "dual-plane") if self.rails is None else self.rails

    @property
    def num_planes(self) -> int:
        """Copies of the fabric."""
        return self.planes or (2 if self.kind == "dual-plane" else 1)
