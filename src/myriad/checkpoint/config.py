"""The ``[checkpoint]`` section of a job: durable checkpoints and in-memory snapshots."""

from pydantic import Field

from myriad.config import Config

__all__ = ["CheckpointConfig", "num_slots"]


class CheckpointConfig(Config):
    """Durable checkpoints and in-memory snapshots: how often, where, how many."""

    every: int = Field(0, ge=0)
    """Steps between durable checkpoints; 0: only after the last step and on Ctrl-C."""
    minutes: float | None = Field(None, gt=0)
    """Minutes between durable checkpoints, in addition to checkpoint.every: whichever is due first. off:
    count steps only."""
    url: str | None = None
    """Where durable checkpoints are written: a folder or a URL that fsspec opens (s3://BUCKET/FOLDER,
    hdfs://...). off: RUN/checkpoints."""
    keep: int = Field(2, ge=1)
    """Number of newest durable checkpoints to keep."""
    keep_days: float | None = Field(None, gt=0)
    """Delete durable checkpoints older than this many days, except the newest verified one. off: keep by
    number only."""
    memory_every: int = Field(1, ge=0)
    """Steps between in-memory snapshots. The snapshot server of the node holds them, so they survive the
    loss of a rank. 0: no snapshots."""
    memory_seconds: float = Field(0.5, ge=0)
    """Minimum seconds between in-memory snapshots; 0: no minimum."""
    copies_every: int = Field(10, ge=0)
    """Steps between copies of the snapshots to the memory of another node, in runs of several nodes; 0: no
    copies."""
    holders: int | None = Field(None, ge=1)
    """Nodes whose snapshots hold each part of the state, where ranks of several nodes hold the same
    (layout.shard_group, or layout.zero = 0). With 2 or more the loss of a node costs no step, and its parts
    are not copied to another node. off: 2 with layout.shard_group and checkpoint.copies_every > 0, else
    1."""
    linger_seconds: float = Field(300.0, ge=0)
    """Seconds that snapshots stay in memory after all ranks of a node have ended, for a restart to resume
    from."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Seconds that a finished run waits for its last checkpoint to become durable."""
    alarm_after: int = Field(3, ge=1)
    """Failed saves in a row after which a fault event becomes an alarm."""
    restart_from_scratch: bool = False
    """Start again at step 1 although the run has trained and none of its checkpoints can be loaded; they
    are renamed to step-N.damaged. Command line only, for one start; ignored if a checkpoint can be
    loaded."""


def num_slots(config: CheckpointConfig, *, sends_copies: bool, compares: bool) -> int:
    """Return the number of snapshot slots per rank. ``sends_copies``: snapshots are copied to other nodes.
    ``compares``: replicas compare digests of their state."""
    # 2: newest and next; 2: one being stored and one waiting; 2: one being copied and the last copied
    slots = 2 + 2 * (config.memory_every > 0) + 2 * sends_copies
    return slots + compares  # one for the trusted snapshot, the target of a rollback
