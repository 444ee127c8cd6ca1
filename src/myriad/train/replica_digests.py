"""Publish a digest of the state that replicas must hold alike on the progress page, every few steps.

    step N   forward, backward ... | gradients complete | snapshot of N-1 copied | digest of N-1 | update

The digest is computed as late as possible. It therefore covers corruption during the use of the parameters,
and matches the bits of the snapshot that was copied meanwhile. The last step has no step after it: its digest
is computed at the end of the run, from parameters that are gathered once more. No rank waits: the node agent
reads the page, and the driver compares (`myriad.supervise.policy.numeric_faults`).
"""

import torch

from myriad.job import Job
from myriad.parallel.engine import Engine
from myriad.parallel.tensor_digest import digest_of
from myriad.telemetry.progress.progress_page import ProgressRow

__all__ = ["Verifier"]


class Verifier:
    """The digests of one rank."""

    def __init__(self, engine: Engine, job: Job, row: ProgressRow) -> None:
        self._engine, self._row = engine, row
        self._every, self._agree_every = job.resilience.verify_every, job.comm.sync_every
        self._taken: tuple[int, int | torch.Tensor] | None = None
        self._is_first = True

    def take(self, step: int) -> None:
        """Compute a digest before the update, after ``step`` completed steps. The first state of an
        attempt always gets one."""
        if self._every and step % self._agree_every == 0 and (step % self._every == 0 or self._is_first):
            self._is_first = False
            if tensors := self._engine.replicated():
                self._taken = step, digest_of(tensors)

    def publish(self) -> None:
        """Publish the digest after the step, when the device has already computed it."""
        if self._taken is not None:
            step, value = self._taken
            self._row.digest(step, int(value))
            self._taken = None

    def finish(self, step: int) -> None:
        """Publish a digest after this rank's last step. All ranks call it together."""
        if self._every:
            self._engine.gather()
            self._is_first = True
            self.take(step)
            self.publish()
