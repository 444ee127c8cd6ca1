"""What a cluster's file says of its NICs: ``[nics]``. What NCCL and gloo are told follows from it."""

from typing import Literal

from pydantic import Field

from myriad.config import Config, Rate, Seconds

__all__ = ["Nics", "Transport"]

Transport = Literal["infiniband", "roce", "tcp"]


class Nics(Config):
    """Of every node; all nodes are alike."""

    transport: Transport
    """What ranks of different nodes talk by."""
    names: tuple[str, ...] = ()
    """RDMA devices that are for training, such as mlx5_0, in the order of rails; off: not known."""
    interface: str | None = None
    """IP interface by which nodes reach each other, such as eth0; off: not known."""
    traffic_class: int | None = Field(None, ge=0, le=255)
    """Of RoCE: that of the lossless class with ECN on the switches (DSCP x 4 + 2); off: not known."""
    gid_index: int | None = Field(None, ge=0)
    """Of RoCE: where NCCL's own choice is wrong; off: NCCL chooses."""
    adaptive_routing: bool = False
    """Of RoCE: switches choose packet by packet, and NICs put in order."""
    adaptive_retransmission: bool = True
    """Of RoCE: NICs can (ConnectX-5 and later)."""
    socket_bytes_per_second: Rate = 5e9
    """TCP: highest rate of one network port through NCCL's sockets, which a processor copies. Measured: 4
    to 6 GB/s on 100 Gb/s among four machines of eight V100, most with NCCL's default of one thread and one
    socket for a connection (https://github.com/NVIDIA/nccl/issues/450). Raise it where more sockets were
    measured to help."""
    socket_latency_seconds: Seconds = 40e-6
    """TCP: latency of one step between nodes. Eight bytes reach another node by NCCL's sockets after 38 to 46
    us (https://github.com/NVIDIA/nccl-tests/issues/82)."""
    socket_ports: int | None = Field(None, ge=1)
    """TCP: network ports of a node that NCCL's sockets use, such as 1 where it finds one interface only
    (https://github.com/NVIDIA/nccl/issues/1447); off: all of them."""
