"""What a cluster's file says of its NICs: ``[nics]``. What NCCL and gloo are told follows from it."""

from typing import Literal

from pydantic import Field

from myriad.config import Config

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
