"""The table of parameters: what ranks hold of each parameter, and what the optimizer does with it.

A parameter is an `Entry`. It has one `Row` in the table, or two if some of its elements are copied on
several tensor-parallel ranks. Norms of gradients, LAMB's trust ratios and the search for non-finite values go
by rows.
"""

from dataclasses import dataclass

import torch
from torch import nn

from myriad.model.definition import Shard, ShardSpan

__all__ = ["Entry", "Row"]


@dataclass(frozen=True)
class Entry:
    """One parameter of a chunk: which modules use its values, and how it is sharded."""

    name: str
    homes: tuple[tuple[nn.Module, str], ...]
    """(module, attribute) of every use; more than one if the parameter is tied on this rank."""
    shape: torch.Size
    cut: Shard | None
    """How tensor-parallel ranks shard the parameter; ``None``: each rank holds the whole."""
    is_partial_over_tp: bool
    """Whether every tensor-parallel rank holds the whole parameter, with gradients that are partial sums."""
    rank: int = 0
    """Index of this rank among those that shard the parameter."""
    size: int = 1
    """Number of ranks that shard the parameter."""
    rate: float = 1.0
    """Factor of the learning rate."""
    spans: tuple[ShardSpan, ...] = ()
    """What this rank holds of the dimension that is cut."""
    orthogonalized: bool = False
    """Whether Muon orthogonalizes its updates."""

    def rows(self) -> "list[Row]":
        """Return the rows of the table of parameters that this parameter has, at flat elements of its own."""
        if self.cut is None or all(span.copies == 1 for span in self.spans):
            return [Row(self, 0, self.shape.numel(), 1, is_copy=False)]
        assert self.cut.dim == 0, "copies are consecutive in flat memory"
        width, found = self.shape[1:].numel(), list[Row]()
        for span in self.spans:
            start, stop = span.local * width, (span.local + span.width) * width
            if found and (found[-1].copies, found[-1].is_copy) == (span.copies, span.is_copy):
                start = found.pop().start
            found.append(Row(self, start, stop, span.copies, span.is_copy))
        return found

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: it does to matrices, not to norms and biases."""
        return len(self.shape) >= 2

    @property
    def kind(self) -> tuple[bool, bool, float]:
        """How the optimizer updates it: entries of one kind are adjacent in a chunk, matrices first."""
        return not self.decays, not self.orthogonalized, self.rate


@dataclass(frozen=True)
class Row:
    """A row of the table of parameters: consecutive elements of one parameter that equally many
    tensor-parallel ranks hold. A parameter has two rows if some of its elements are copied
    (`myriad.model.definition.Shard.heads`), otherwise one."""

    entry: Entry
    start: int
    stop: int
    copies: int
    """Number of consecutive tensor-parallel ranks that hold the elements, with gradients that are partial
    sums. 1: this rank alone, or every rank (`Entry.is_partial_over_tp`)."""
    is_copy: bool
    """Whether an earlier rank holds the elements too."""

    @property
    def is_partial(self) -> bool:
        """Whether tensor-parallel ranks sum the gradients after the reduction."""
        return self.entry.is_partial_over_tp or self.copies > 1
