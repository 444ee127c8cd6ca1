"""The forward of one micro-batch inside the backward of another: what PAIRED_FORWARD and PAIRED_BACKWARD run.

While gradients of the backward travel between the ranks that share experts, the forward computes, and while
its tokens travel the backward does (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; Megatron-Core's
``--overlap-moe-expert-parallel-comm``). One block of each, `>` where rows leave, `.` where they are awaited:

    backward   gates >              . experts >                  . attention
    forward             . attention, router >   . experts >
    network    results] [results' gradients] [tokens] [tokens' gradients] [results

The forward is a generator that yields where rows have left, and autograd runs the backward; the node that
sends gradients resumes the forward. So the order of all exchanges is that of the backward's nodes, which is
the same on all ranks: the i-th exchange of the forward follows the i-th of the backward.

A forward does not end with its backward: its last results are still travelling. The forward of the next pair
continues with them, behind the first gradients of the next backward. Likewise the weight products that the
backward has left are computed there. Before any other action both are completed (`PairedForward.finish`).
"""

from collections.abc import Generator
from typing import Self

import torch

__all__ = ["PairedForward", "PairedSteps"]

PairedSteps = Generator[object, None, None]
"""Steps of a forward, which yield where rows have left. The last one stores its output."""


class PairedForward:
    """A forward that advances from one exchange of rows to the next."""

    def __init__(self, steps: PairedSteps) -> None:
        self._steps = steps
        self._ended = False

    def then(self, steps: PairedSteps) -> Self:
        """Return this forward followed by another one."""
        return type(self)(_chained(self._steps, steps))

    def advance(self) -> None:
        """Run the forward until its next rows have left, or to its end."""
        if self._ended:
            return
        with torch.enable_grad():  # autograd disables it in the nodes of a backward
            try:
                next(self._steps)
            except StopIteration:
                self._ended = True

    def finish(self) -> None:
        """Run the rest of the forward."""
        while not self._ended:
            self.advance()


def _chained(first: PairedSteps, second: PairedSteps) -> PairedSteps:
    yield from first
    yield from second
