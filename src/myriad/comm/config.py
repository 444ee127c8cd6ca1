"""How ranks meet and what they send. No torch here."""

from typing import Literal

from pydantic import Field

from myriad.config import Config

__all__ = ["CommConfig"]


class CommConfig(Config):
    """How ranks meet, and what they send; everything lossy is off unless asked for."""

    store: str = "tcp"
    """Where ranks find each other: tcp (rank 0 serves), or redis://HOST:PORT[/DB]."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a rank waits for others before it gives up."""
    hierarchy: Literal["auto", "flat", "node", "switch"] = "auto"
    """Data-parallel sums: flat among all, by node, by node and switch, or what is quickest on these
    links."""
    node_size: int | None = Field(None, ge=1)
    """Ranks of one node, consecutive; off: as the launcher says."""
    switch_size: int | None = Field(None, ge=1)
    """Nodes under one switch, consecutive; off: all are."""
    compress_gradients: Literal["bfloat16", "int8"] | None = None
    """Lossy: gradients travel so, what is lost is added to the next step's; off: exact."""
    compress_parameters: Literal["bfloat16", "int8"] | None = None
    """Lossy: changes of parameters travel so, what is lost with the next step's; needs layout.zero = 1 or
    2; off: exact."""
    sync_every: int = Field(1, ge=1)
    """Steps between synchronisations of data-parallel replicas; more than 1 is DiLoCo (each replica
    trains alone in between) and gives other losses."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """Of the outer optimizer (Nesterov), with sync_every > 1."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Of the outer optimizer, with sync_every > 1."""

    @property
    def is_lossy(self) -> bool:
        """Whether results differ from those of one process."""
        return bool(self.compress_gradients or self.compress_parameters or self.sync_every > 1)
