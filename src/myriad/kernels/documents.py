"""Attention inside the documents of packed windows (``data.documents = "packed"``).

The positions of all documents are regrouped by length: documents of about the same length are rows of one
batch, padded to it, and attend as ordinary sequences. So the work grows with the squares of the documents'
lengths, and every implementation of attention can be used:

    windows   | a a a b b | c c c c d |   ->   | a a a | b b . | d . . |   | c c c c |

The padding of a row comes after its document, so no position attends to it, and its results are dropped.

Legend: B batch, S sequence, F features, T = B * S positions, P positions of all batches with padding.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from myriad.kernels.document_shares import DocumentSharing
from myriad.kernels.memory_order import is_sequence_first

__all__ = ["Documents"]

_BLOCK = 64
"""Longer documents are padded to a multiple of this, shorter ones to a power of two."""


class _Group(NamedTuple):
    """Documents that one call of the attention kernel computes together: consecutive rows of the regrouped
    positions. Each document attends to itself."""

    size: int
    """Number of documents."""
    length: int
    """Positions of each document, with its padding."""


class _Regrouping(NamedTuple):
    """Where positions go, and from where they come back."""

    taken: torch.Tensor
    """Position of each of the P places, ``[P]``; padding repeats a position of its document."""
    places: torch.Tensor
    """Place of each position, ``[T]``."""
    padding: torch.Tensor
    """Places that are padding."""


class Documents:
    """The documents in the windows of a micro-batch ``[B, S]``; each window is full."""

    def __init__(
        self,
        positions: torch.Tensor,
        lengths: Sequence[Sequence[int]],
        sharing: DocumentSharing = DocumentSharing(),
    ) -> None:
        """``positions``: position of each token in its document, ``[B, S]`` int64. ``lengths``: lengths of
        the documents of each window, on the host, so that no operator waits for the device. ``sharing``: how
        ranks share them in a ring."""
        self.positions, self.lengths, self.sharing = positions, tuple(map(tuple, lengths)), sharing

    @classmethod
    def of(
        cls,
        positions: np.ndarray[Any, np.dtype[np.int32]],
        on: Callable[[torch.Tensor], torch.Tensor],
        sharing: DocumentSharing = DocumentSharing(),
    ) -> "Documents":
        """Return the documents of windows whose tokens have these positions ``[B, S]``. ``on`` copies a
        tensor to the device; ``sharing`` as for `Documents`."""
        starts = [np.flatnonzero(row == 0) for row in positions]
        lengths = [np.diff(row, append=positions.shape[1]).tolist() for row in starts]
        return cls(on(torch.from_numpy(positions.astype(np.int64))), lengths, sharing)

    def positions_at(self, at: torch.Tensor) -> torch.Tensor:
        """Return the positions inside their documents, ``[B, P]``, of these positions in the windows, ``[P]``
        or ``[B, P]``."""
        return self.positions[:, at] if at.dim() == 1 else self.positions.gather(1, at)

    def rows(self, start: int, stop: int) -> "Documents":
        """Return the documents of some of the windows."""
        return Documents(self.positions[start:stop], self.lengths[start:stop], self.sharing)

    def split(self, sizes: Sequence[int]) -> "list[Documents]":
        """Return the documents of consecutive windows, a value for each of ``sizes``."""
        ends = list(accumulate(sizes))
        return [self.rows(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    @property
    def longest(self) -> int:
        """Positions of the longest document."""
        return max(max(lengths) for lengths in self.lengths)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Boundaries of the documents, if windows are laid end to end: from 0 to B * S, int32."""
        lengths = np.array([0, *(length for row in self.lengths for length in row)])
        return _on(self.positions.device, np.cumsum(lengths)).int()

    def attend(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Apply ``function``, causal attention of whole sequences ``[B, S, F]`` to ``[B, S, G]``, to each
        document."""
        lies_first = is_sequence_first(x)
        regrouping = self._by_position if lies_first else self._by_window
        flat = (x.transpose(0, 1) if lies_first else x).flatten(0, 1)
        parts = _Take.apply(flat, regrouping).split([group.size * group.length for group in self._groups])
        results = [
            function(part.unflatten(0, group)).flatten(0, 1)
            for part, group in zip(parts, self._groups, strict=True)
        ]
        out: torch.Tensor = _Return.apply(torch.cat(results), regrouping)
        if lies_first:
            return out.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)
        return out.unflatten(0, x.shape[:2])

    @cached_property
    def _sorted(self) -> list[tuple[int, int, int, int]]:
        """The padded length, window, first position and length of each document, shortest first."""
        found = []
        for window, lengths in enumerate(self.lengths):
            for length, end in zip(lengths, accumulate(lengths), strict=True):
                padded = min(_padded(length), self.positions.shape[1])
                found.append((padded, window, end - length, length))
        return sorted(found)

    @cached_property
    def _groups(self) -> list[_Group]:
        counts: dict[int, int] = {}
        for padded, *_ in self._sorted:
            counts[padded] = counts.get(padded, 0) + 1
        return [_Group(count, length) for length, count in counts.items()]

    @cached_property
    def _by_window(self) -> _Regrouping:
        return self._regrouping(self.positions.shape[1], 1)

    @cached_property
    def _by_position(self) -> _Regrouping:
        """The regrouping, if the windows' tokens of one position are adjacent in memory."""
        return self._regrouping(1, self.positions.shape[0])

    def _regrouping(self, window_stride: int, position_stride: int) -> _Regrouping:
        padded, windows, starts, lengths = np.array(self._sorted).T
        ends = np.cumsum(padded)
        document = np.repeat(np.arange(len(padded)), padded)
        position = np.arange(ends[-1]) - (ends - padded)[document]
        real = position < lengths[document]
        inside = np.minimum(position, lengths[document] - 1) + starts[document]
        taken = windows[document] * window_stride + inside * position_stride
        places = np.empty(np.count_nonzero(real), np.int64)
        places[taken[real]] = np.flatnonzero(real)
        device = self.positions.device
        return _Regrouping(*(_on(device, one) for one in (taken, places, np.flatnonzero(~real))))


def _on(device: torch.device, values: "np.ndarray[Any, np.dtype[np.int64]]") -> torch.Tensor:
    found = torch.from_numpy(values.astype(np.int64))
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _padded(length: int) -> int:
    """Return the length with padding: few different ones, so that few batches are computed."""
    if length > _BLOCK:
        return -(-length // _BLOCK) * _BLOCK
    return 1 << max(0, length - 1).bit_length()


class _Take(torch.autograd.Function):
    """``[T, F]`` to ``[P, F]``. Padding repeats a position, and its gradient is 0, so that each position's
    gradient comes from one place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, regrouping: _Regrouping) -> torch.Tensor:
        ctx.places = regrouping.places
        return x.index_select(0, regrouping.taken)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.places), None


class _Return(torch.autograd.Function):
    """``[P, G]`` to ``[T, G]``; padding is dropped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, regrouping: _Regrouping) -> torch.Tensor:
        ctx.taken, ctx.padding = regrouping.taken, regrouping.padding
        return x.index_select(0, regrouping.places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.taken).index_fill_(0, ctx.padding, 0.0), None
