"""The forward of one micro-batch inside the backward of another: what PAIRED_FORWARD and PAIRED_BACKWARD run.

While gradients of the backward travel between the ranks that share experts, the forward computes, and while
its tokens travel the backward does (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; Megatron-Core's
``--overlap-moe-expert-parallel-comm``). One block of each, `>` where rows leave, `.` where they are awaited:

    backward   gates >          . experts >                  . attention
    forward             attention, router >   . experts >                 .
    network         [results' gradients] [tokens] [tokens' gradients] [results]

The forward is a generator that yields where rows have left, and autograd runs the backward; the node that
sends gradients resumes the forward (`PairedForward.advance`). So the order of all exchanges is that of the
backward's nodes, which is the same on all ranks: the i-th exchange of the forward follows the i-th of the
backward. A forward with more exchanges than the backward runs the rest by itself at its end.
"""

from collections.abc import Generator
from typing import Generic, TypeVar

import torch

__all__ = ["PairedForward"]

Found = TypeVar("Found")


class PairedForward(Generic[Found]):
    """A forward that advances from one exchange of rows to the next."""

    def __init__(self, steps: Generator[object, None, Found]) -> None:
        self._steps = steps
        self._found: list[Found] = []

    def advance(self) -> None:
        """Run the forward until its next rows have left, or to its end."""
        if self._found:
            return
        with torch.enable_grad():  # autograd disables it in the nodes of a backward
            try:
                next(self._steps)
            except StopIteration as end:
                self._found.append(end.value)

    def finish(self) -> Found:
        """Run the rest of the forward and return its result."""
        while not self._found:
            self.advance()
        return self._found[0]
