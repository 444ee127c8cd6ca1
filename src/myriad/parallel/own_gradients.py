"""A rank's own gradients: those that it computed itself, before ranks combine them.

A NaN of one rank is in the gradients of all ranks after the reduction. The sum of a rank's own gradients
shows whether it produced the NaN. Before the reduction, only those are added up that memory does not hold
afterwards:

    one data-parallel rank    partial gradients: tensor-parallel ranks sum them in place
    ZeRO 0                    all: the reduction overwrites them
    ZeRO 1                    partial gradients: the slices of other ranks stay as they were
    ZeRO 2, 3                 all: the gradient buffer is freed
    tied parameters           all: they are summed with those of the other stage first

The rest is added up only when a norm is non-finite.
"""

from collections.abc import Iterable, Sequence

import torch

from myriad.parallel.parameter_table import Row

__all__ = ["OwnGradients"]


class OwnGradients:
    """Whether this rank's own gradients of a chunk were finite, in the iteration in progress."""

    def __init__(
        self, grad_buffer: torch.Tensor, rows: Sequence[Row], kept: Sequence[torch.Tensor] | None
    ) -> None:
        """``kept``: views of ``grad_buffer`` that hold own gradients after the reduction too; those of
        partial gradients do not count. ``None``: none do."""
        self._grad_buffer, self._kept = grad_buffer, kept
        self._counted = [(0, len(grad_buffer))] if kept is None else _partial_spans(rows)
        self._total: torch.Tensor | None = None
        self._is_mixed = self._was_mixed = False

    def begin(self) -> None:
        """Forget the gradients of the iteration before."""
        self._total = None
        self._is_mixed = self._was_mixed = False

    def count(self) -> None:
        """Add up the own gradients that memory will not hold after the reduction that follows."""
        if not self._is_mixed:
            self._add(self._counted)
        self._is_mixed = False

    def count_before_mixing(self) -> None:
        """Add up all own gradients: those of another stage are added to them before they are reduced."""
        self._add([(0, len(self._grad_buffer))])
        self._is_mixed = self._was_mixed = True

    def _add(self, spans: Iterable[tuple[int, int]]) -> None:
        for start, stop in spans:
            total = self._grad_buffer[start:stop].sum()
            self._total = total if self._total is None else self._total + total

    @property
    def was_non_finite(self) -> bool:
        """Whether a gradient was non-finite. Read it before the next iteration, and only if the norm is
        non-finite: it reads the gradients that memory still holds."""
        totals = [] if self._total is None else [self._total]
        if self._kept is not None and not self._was_mixed:
            totals += [part.sum() for part in self._kept]
        return not all(bool(torch.isfinite(total)) for total in totals)


def _partial_spans(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Return the spans of partial gradients; adjacent spans are joined."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if row.is_partial and found and found[-1][1] == row.start:
            found[-1] = (found[-1][0], row.stop)
        elif row.is_partial:
            found.append((row.start, row.stop))
    return found
