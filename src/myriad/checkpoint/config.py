"""What of a run is kept, where, and for how long."""

from pydantic import Field

from myriad.config import Config

__all__ = ["CheckpointConfig", "num_slots"]


class CheckpointConfig(Config):
    """What is kept."""

    every: int = Field(0, ge=0)
    """Steps between durable checkpoints; 0: only the last step and on Ctrl-C."""
    minutes: float | None = Field(None, gt=0)
    """Minutes between durable checkpoints, whichever of the two is due first; off: steps alone count."""
    url: str | None = None
    """Where durable checkpoints go: a folder, or a URL that fsspec knows (s3://BUCKET/FOLDER, hdfs://...);
    off: checkpoints/ of the run."""
    keep: int = Field(2, ge=1)
    """Newest durable checkpoints kept."""
    keep_days: float | None = Field(None, gt=0)
    """Older ones go even if fewer are kept, but never the newest that is verified; off: age does not
    matter."""
    memory_every: int = Field(1, ge=0)
    """Steps between snapshots in the memory of the node, which outlive a rank; 0: only what is stored."""
    memory_seconds: float = Field(0.5, ge=0)
    """At least so long between them, where steps are shorter; 0: steps alone count."""
    copies_every: int = Field(10, ge=0)
    """Steps between copies of them in the memory of another node, where there is one; 0: none."""
    linger_seconds: float = Field(300.0, ge=0)
    """How long snapshots stay in memory after all ranks of a node have died, for new ones to go on from."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a run that is done waits for its last checkpoint to be durable."""
    alarm_after: int = Field(3, ge=1)
    """Failures in a row after which a fault is an alarm."""
    restart_from_scratch: bool = False
    """On the command line only, for one start: begin again at step 1 when the run has trained and none of its
    checkpoints can be loaded. Those are set aside as step-N.damaged. Unused while one can be loaded."""


def num_slots(config: CheckpointConfig, *, several_nodes: bool, compares: bool) -> int:
    """Return how many snapshots a rank's memory holds; ``compares``: replicas compare what they hold."""
    # the newest and the next; one being stored, one that waits for it; one being copied, the last copied
    slots = 2 + 2 * (config.memory_every > 0) + 2 * (several_nodes and config.copies_every > 0)
    return slots + compares  # what may be gone back to
