"""Publish a digest of the state that replicas must hold alike on the progress page, every few steps.

    step N   forward, backward ... | gradients complete | snapshot of N-1 copied | digest of N-1 | update

The digest is computed as late as possible. It therefore covers corruption during the use of the parameters,
and matches the bits of the snapshot that was copied meanwhile. The last step has no step after it: its digest
is computed at the end of the run, from parameters that are gathered once more. No rank waits: the node agent
reads the page, and the driver compares (`myriad.supervise.policy.numeric_faults`).

A digest is one number (int64), so that contents are compared without moving them. On the host it is xxh3,
which runs at about memory bandwidth. On a device it is a reduction that stays there, so that only one
number is transferred: the words of each row of `_ROW` are added up, then the rows with odd weights, modulo
2^64. A flipped bit changes one sum by a power of two, and an odd multiple of that is never 0, so every
single flip is detected. Swapped words within a row are not detected, but no memory fault swaps words.
"""

from collections.abc import Sequence

import torch
import xxhash

from myriad.job import Job
from myriad.parallel.engine import Engine
from myriad.telemetry.progress.progress_page import EXPERT_DIGEST, ProgressRow

__all__ = ["DigestPublisher", "digest_of", "reduce_bits"]

_ROW = 4096
_WEIGHT, _NEXT = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""Odd numbers below 2^63."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DigestPublisher:
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
                value = digest_of(tensors)
                if experts := self._engine.replicated(of_experts=True):
                    value = value & ~EXPERT_DIGEST | digest_of(experts) & EXPERT_DIGEST
                self._taken = step, value

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


def digest_of(tensors: Sequence[torch.Tensor]) -> int | torch.Tensor:
    """Return the digest of all bits, in order. For tensors on a device it is a number there; `int` waits for
    it."""
    if tensors and tensors[0].device.type != "cpu":
        return reduce_bits(tensors)
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.detach().view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), signed=True)


def reduce_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest that devices compute, as an int64 scalar on the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        total = total * _NEXT + _sum_of(tensor.detach().view(-1))
    return total


def _sum_of(values: torch.Tensor) -> torch.Tensor:
    words = values.view(_WORDS[values.element_size()])
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    weights = torch.arange(len(rows), device=words.device) * 2 + 1
    return (rows * weights).sum() * _WEIGHT + words[whole:].sum(dtype=torch.int64) * (_WEIGHT + 2)
