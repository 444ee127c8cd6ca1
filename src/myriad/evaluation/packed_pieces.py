"""Score pieces of text: packed into windows as documents, with attention inside each.

    windows   | piece 4 | piece 0 | .. |     | piece 2    | piece 1 |    batches of such windows
    loss      |    ^^^^ |      ^^ |    |     |    ^^^^^^^ |       ^ |    of the scored tokens alone

Every layout computes the loss of each token. The sum over a piece is taken in float64 and in the order of
its tokens, so layouts differ by the rounding of the model alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from myriad.data.windows import PackedRows, PackedWindows, fill_padding, pack_documents
from myriad.evaluation.token_requests import RequestPiece
from myriad.kernels.documents import Documents
from myriad.model.token_record import TokenRecord
from myriad.parallel.batch import Batch

__all__ = ["PackedPieces", "PieceScore", "window_length"]

_SHORT_WINDOW = 1024
"""Length of the windows if the requests are shorter; a model may read many more tokens than they have."""


class PieceScore(NamedTuple):
    """The result of one piece, or of several together."""

    log_likelihood: float
    """Sum over the scored tokens, in nats."""
    is_greedy: bool
    """Whether each scored token is the likeliest one."""

    @staticmethod
    def total(scores: "Sequence[PieceScore]") -> "PieceScore":
        """Join the scores of the pieces of one text."""
        return PieceScore(sum(one.log_likelihood for one in scores), all(one.is_greedy for one in scores))


def window_length(longest: int, sequence: int, *, keeps_length: bool) -> int:
    """Return the length of the windows for pieces of at most ``longest`` tokens to read. ``keeps_length``:
    the model computes otherwise in windows of another length than ``sequence``, which it was trained on."""
    return sequence if keeps_length else min(sequence, max(longest, _SHORT_WINDOW))


class PackedPieces:
    """Pieces of text in windows of ``sequence`` tokens, and what was found of each so far."""

    def __init__(self, pieces: Sequence[RequestPiece], sequence: int) -> None:
        self._sequence = sequence
        self._tokens = np.array([token for piece in pieces for token in piece.tokens], np.int32)
        counts = [np.arange(len(tokens), 0, -1) <= scored for tokens, scored in pieces]
        self._counts = np.concatenate([np.empty(0, np.bool_), *counts])  # there may be no pieces
        lengths = np.array([len(piece.tokens) for piece in pieces], np.int64)
        begins = np.cumsum(lengths) - lengths
        packing = pack_documents(lengths, sequence)
        self._lengths, self._firsts = packing.lengths, packing.firsts
        self._piece_of = np.searchsorted(begins, packing.starts)
        self._windows = PackedWindows(packing, sequence, self._has_loss)
        self.found = np.zeros((3, len(pieces)))
        """Loss of each piece in nats, its number of tokens that are not the likeliest, and the sum of the
        tokens that are the likeliest in their place."""

    def begin(self) -> None:
        """Forget what was found."""
        self.found[:] = 0.0

    @property
    def num_windows(self) -> int:
        """Number of windows that the pieces fill."""
        return self._windows.count

    def batch(self, rows: range, device: torch.device) -> Batch:
        """Return some windows as a batch with a record. Windows after the last one have no loss."""
        width = self._windows.width
        words = np.empty((len(rows), width), np.int32)
        for row, window in zip(words, rows, strict=True):
            if window < self.num_windows:
                self._windows.read(self._read, window, row)
            else:
                fill_padding(row, 0)
        packed = PackedRows.of(words)
        inputs, targets = (torch.from_numpy(one.astype(np.int64)).to(device) for one in packed[:2])
        documents = Documents.of(packed.positions, lambda values: values.to(device))
        record = TokenRecord(len(rows), self._sequence, device)
        return Batch(inputs, targets, torch.arange(len(rows), device=device), documents, record=record)

    def collect(self, rows: range, record: TokenRecord) -> None:
        """Add what a batch has recorded."""
        kinds = (record.losses, ~record.is_likeliest, record.likeliest)
        values = np.stack([kind.double().cpu().numpy() for kind in kinds])
        for row, window in enumerate(rows):
            if window < self.num_windows:
                self._collect_window(window, values[:, row])

    def _collect_window(self, window: int, values: NDArray[np.float64]) -> None:
        inside = slice(self._firsts[window], self._firsts[window + 1])
        lengths = self._lengths[inside]
        begins, filled = np.cumsum(lengths) - lengths, lengths.sum()
        self.found[:, self._piece_of[inside]] += np.add.reduceat(values[:, :filled], begins, 1)

    def scores(self) -> list[PieceScore]:
        """Return the result of each piece; a piece without a scored token has log-likelihood 0."""
        return [PieceScore(-loss, misses == 0) for loss, misses, _ in self.found.T.tolist()]

    def likeliest(self) -> list[int]:
        """Return the likeliest token in the place of each piece's scored token, of which it has one."""
        return [round(token) for token in self.found[2]]

    def _read(self, start: int, out: NDArray[np.int32]) -> None:
        out[:] = self._tokens[start : start + len(out)]

    def _has_loss(self, start: int, stop: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._counts[start:stop]
        return found
