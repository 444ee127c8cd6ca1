"""How ranks meet and what they send. No torch here."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from myriad.config import Config
from myriad.units import parse_rate

__all__ = ["CommConfig"]

_Rate = Annotated[float, BeforeValidator(parse_rate)]


class CommConfig(Config):
    """How ranks meet, and what they send; everything lossy is off unless asked for."""

    store: str = "tcp"
    """Where ranks find each other: tcp (rank 0 serves), or redis://HOST:PORT[/DB]."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a rank waits for others before it gives up."""
    hierarchy: Literal["auto", "flat", "node", "switch"] = "auto"
    """Data-parallel sums: flat among all, by node, by node and switch; auto: what is quickest on these links,
    measured once and kept in the run's hierarchy.json, so that a resumed run adds up in the same order."""
    node_size: int | None = Field(None, ge=1)
    """Ranks of one node, consecutive; off: as the launcher says."""
    island_size: int | None = Field(None, ge=1)
    """Ranks of a node that reach each other better than the rest of it (NVLink, one PCIe switch or
    processor), consecutive: a level of its own with comm.hierarchy = node or switch. Off: none."""
    switch_size: int | None = Field(None, ge=1)
    """Nodes under one switch, consecutive; off: all are."""
    node_order: tuple[int, ...] | None = None
    """Nodes, numbered from 0 as the launcher starts them, in the order in which the rank grid fills them, as
    `myriad plan` finds it; off: as the launcher says. On one machine it changes nothing."""
    node_bandwidth: _Rate | None = Field(None, gt=0)
    """Bandwidth between two ranks of a node, "100 Gbit/s", for comm.hierarchy = auto. Off: measured at
    start."""
    network_bandwidth: _Rate | None = Field(None, gt=0)
    """Bandwidth of a node to others, which its ranks share. Off: measured at start."""
    switch_bandwidth: _Rate | None = Field(None, gt=0)
    """Bandwidth of a switch to others, which its nodes share. Off: measured at start."""
    compress_gradients: Literal["bfloat16", "int8"] | None = None
    """Lossy: gradients travel so, what is lost is added to the next step's; off: exact."""
    compress_parameters: Literal["bfloat16", "int8"] | None = None
    """Lossy: changes of parameters travel so, what is lost with the next step's; needs layout.zero = 1 or
    2; off: exact."""
    sync_every: int = Field(1, ge=1)
    """Steps between synchronisations of data-parallel replicas; more than 1 is DiLoCo (each replica
    trains alone in between) and gives other losses."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """Learning rate of the outer optimizer (Nesterov), with sync_every > 1; 1 with momentum 0 is
    the plain mean, which loses less in a short training."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the outer optimizer, with sync_every > 1."""

    @property
    def lossy(self) -> tuple[str, ...]:
        """What makes results differ from those of one process, in words; empty: nothing does."""
        found = []
        if self.compress_gradients:
            found.append(f"gradients travel as {self.compress_gradients}")
        if self.compress_parameters:
            found.append(f"parameters travel as {self.compress_parameters}")
        if self.sync_every > 1:
            found.append(f"replicas agree every {self.sync_every} steps")
        return tuple(found)
