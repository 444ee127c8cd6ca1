"""The ``[comm]`` section of a job: rendezvous and collectives. This module does not import torch."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from myriad.config import Config
from myriad.units import parse_rate

__all__ = ["CommConfig"]

_Rate = Annotated[float, BeforeValidator(parse_rate)]


class CommConfig(Config):
    """Rendezvous and collectives; every lossy option is off by default."""

    store: str = "tcp"
    """Rendezvous store: tcp (served by rank 0) or redis[s]://[USER@]HOST:PORT[/DB], whose password is in the
    environment variable MYRIAD_REDIS_PASSWORD."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Seconds that a rank waits for its peers before it fails."""
    max_ctas: int | None = Field(None, ge=1, le=64)
    """Maximum number of GPU multiprocessors for one NCCL message. Fewer leave more to the matrix products
    that hide the message, and make the message slower. off: NCCL's choice, up to 32. No effect on CPUs."""
    hierarchy: Literal["auto", "flat", "node", "switch"] = "auto"
    """Levels of data-parallel reductions. flat: one level over all ranks. node: first inside each node.
    switch: inside each node, then each switch. auto: the fastest on these links, measured once and stored
    in RUN/hierarchy.json, so that a resumed run adds in the same order."""
    node_size: int | None = Field(None, ge=1)
    """Ranks per node, consecutive in rank order; off: as reported by the launcher."""
    island_size: int | None = Field(None, ge=1)
    """Ranks of a node with faster links among them (NVLink, one PCIe switch or one processor), consecutive:
    one more level of comm.hierarchy = node or switch. off: no such level."""
    switch_size: int | None = Field(None, ge=1)
    """Nodes per network switch, consecutive; off: all nodes share one switch."""
    node_order: tuple[int, ...] | None = None
    """Order in which the rank grid fills the nodes, as found by `myriad plan`; nodes are numbered from 0 in
    the launcher's order. off: the launcher's order. No effect on one machine."""
    node_bandwidth: _Rate | None = Field(None, gt=0)
    """Bandwidth between two ranks of a node, e.g. "100 Gbit/s"; used by comm.hierarchy = auto. off:
    measured at start."""
    network_bandwidth: _Rate | None = Field(None, gt=0)
    """Bandwidth of a node to other nodes, shared by its ranks, e.g. "400 Gbit/s"; used by comm.hierarchy =
    auto. off: measured at start."""
    switch_bandwidth: _Rate | None = Field(None, gt=0)
    """Bandwidth of a switch to other switches, shared by its nodes; used by comm.hierarchy = auto. off:
    measured at start."""
    compress_gradients: Literal["bfloat16", "int8"] | None = None
    """Lossy: send gradients in this format; the rounding error is added to the gradients of the next step.
    off: exact."""
    compress_parameters: Literal["bfloat16", "int8"] | None = None
    """Lossy: send parameter updates in this format; the rounding error is added to the next update. Needs
    layout.zero = 1 or 2. off: exact."""
    sync_every: int = Field(1, ge=1)
    """Steps between synchronizations of data-parallel replicas. More than 1 is DiLoCo: each replica trains
    alone in between, so losses differ from those of one process."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """Learning rate of DiLoCo's outer optimizer (Nesterov); used if comm.sync_every > 1. With 1 and
    comm.outer_momentum = 0, replicas are averaged, which suits short trainings."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of DiLoCo's outer optimizer; used if comm.sync_every > 1."""

    @property
    def lossy(self) -> tuple[str, ...]:
        """Descriptions of the options that make results differ from one process; empty if all are off."""
        found = []
        if self.compress_gradients:
            found.append(f"gradients are sent as {self.compress_gradients}")
        if self.compress_parameters:
            found.append(f"parameters are sent as {self.compress_parameters}")
        if self.sync_every > 1:
            found.append(f"replicas synchronize every {self.sync_every} steps")
        return tuple(found)
