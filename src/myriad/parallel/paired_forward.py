"""The forward of one micro-batch inside the backward of another: what PAIRED_FORWARD and PAIRED_BACKWARD run.

While gradients of the backward travel between the ranks that share experts, the forward computes, and while
its tokens travel the backward does (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; Megatron-Core's
``--overlap-moe-expert-parallel-comm``). One block of each, `>` where rows leave, `.` where they are awaited:

    backward   gates >         . experts >                                       . attention
    forward            . experts >         . attention and router of the next block >
    network    tokens] [results' gradients] [results] [tokens' gradients] [tokens

The forward is a generator that yields where rows have left, and autograd runs the backward; the node that
sends gradients resumes the forward. So the order of all exchanges is that of the backward's nodes, which is
the same on all ranks: the i-th exchange of the forward follows the i-th of the backward.

Where pairs follow each other directly, the next forward sends its first tokens before the last part of the
one before it, which is the loss in the last stage. These tokens, and the last gradients, travel behind it:

    backward of m            . experts >                                                   . attention
    forward of m + 1   experts >                                           . results, loss
    forward of m + 2                     attention and router of block 0 >

Weight products that a backward has left are computed in the next one. Before any other action all of this is
completed (`PairedForwards.finish`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["PairedForward", "PairedForwards"]


@dataclass
class PairedForward:
    """A forward of one micro-batch that advances from one exchange of rows to the next."""

    steps: Iterator[object]
    """They yield where rows have left. The last one stores the forward's output."""
    num_left: int
    """Exchanges that it still begins."""
    has_begun: bool = False
    has_ended: bool = False

    def advance(self) -> None:
        """Run the forward until its next rows have left, or to its end."""
        self.has_begun = True
        with torch.enable_grad():  # autograd disables it in the nodes of a backward
            try:
                next(self.steps)
                self.num_left -= 1
            except StopIteration:
                self.has_ended = True


class PairedForwards:
    """The forwards of pairs that follow each other directly."""

    def __init__(self, forwards: Iterable[PairedForward]) -> None:
        self._forwards = deque(forwards)

    def advance(self) -> None:
        """Run the oldest forward until its next rows have left, or to its end. Before its last part, the next
        one sends its first rows."""
        if not self._forwards:
            return
        oldest = self._forwards[0]
        if oldest.num_left == 0 and len(self._forwards) > 1 and not self._forwards[1].has_begun:
            self._forwards[1].advance()
        oldest.advance()
        if oldest.has_ended:
            self._forwards.popleft()

    def finish(self) -> None:
        """Run the rest of all forwards."""
        while self._forwards:
            self.advance()
