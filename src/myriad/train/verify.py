"""Tells the digest of what this rank's replicas are to hold alike, on the progress page, every so many steps.

    step N   forward, backward ... | gradients complete | snapshot of N-1 copied | digest of N-1 | update

It is taken as late as possible: what happened to the bits while they were used shows, and the snapshot that
was copied meanwhile is of the bits that the digest is of. The last step has none after it: its digest is
taken when the run is over, from parameters that are gathered once more. Nobody waits for anybody: the
executor reads the page, and the driver compares (`myriad.resilience.decide.replicas`).
"""

import torch

from myriad.job import Job
from myriad.parallel.digest import digest_of
from myriad.parallel.engine import Engine
from myriad.telemetry.progress_page import ProgressRow

__all__ = ["Verifier"]


class Verifier:
    """Of one rank."""

    def __init__(self, engine: Engine, job: Job, row: ProgressRow) -> None:
        self._engine, self._row = engine, row
        self._every, self._agree_every = job.resilience.verify_every, job.comm.sync_every
        self._taken: tuple[int, int | torch.Tensor] | None = None
        self._is_first = True

    def take(self, step: int) -> None:
        """Before the update: ``step`` steps are done. The first state of an attempt counts always."""
        if self._every and step % self._agree_every == 0 and (step % self._every == 0 or self._is_first):
            self._is_first = False
            if tensors := self._engine.replicated():
                self._taken = step, digest_of(tensors)

    def tell(self) -> None:
        """After the step: what a device has computed by now need not be waited for."""
        if self._taken is not None:
            step, value = self._taken
            self._row.digest(step, int(value))
            self._taken = None

    def finish(self, step: int) -> None:
        """After the last step of this rank's life, on all ranks."""
        if self._every:
            self._engine.gather()
            self._is_first = True
            self.take(step)
            self.tell()
