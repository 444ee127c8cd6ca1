"""A whole model in one process that scores texts and generates: for `myriad eval`, and for
lm-evaluation-harness.

Log-likelihoods are computed in batches of packed windows. Texts are generated in batches of rows, with a
cache of keys and values.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from myriad.data.tokenizer import Tokenizer
from myriad.evaluation.greedy_texts import GreedyTexts, Prompt
from myriad.evaluation.packed_pieces import PackedPieces, PieceScore, window_length
from myriad.evaluation.token_requests import RequestEncoder, RequestPiece
from myriad.model.definition import Context
from myriad.model.generate import WholeReader, longrope_length
from myriad.model.interleave import run_layers
from myriad.model.layers import Block

__all__ = ["FullModel"]


class FullModel:
    """A model on one device, with its tokenizer."""

    def __init__(self, layers: nn.ModuleList, tokenizer: Tokenizer, sequence: int) -> None:
        """``sequence``: number of tokens that the model was trained to see."""
        self.layers, self.tokenizer, self.sequence = layers.eval(), tokenizer, sequence
        self.encoder = RequestEncoder(tokenizer, sequence)
        self._device = next(layers.parameters()).device
        blocks = [cast(Block, block) for block in list(layers)[1:-1]]
        self._keeps_length = longrope_length(blocks) is not None  # its frequencies depend on the length

    @torch.no_grad()
    def score(
        self,
        pieces: Sequence[RequestPiece],
        batch_tokens: int,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[PieceScore]:
        """Return the score of each piece. ``batch_tokens``: tokens of one forward pass, at least one window.
        ``show(windows_done, windows)`` reports progress."""
        if not pieces:
            return []
        longest = max(len(piece.tokens) - 1 for piece in pieces)
        sequence = window_length(longest, self.sequence, keeps_length=self._keeps_length)
        packed = PackedPieces(pieces, sequence)
        each = max(1, batch_tokens // sequence)
        for start in range(0, packed.num_windows, each):
            rows = range(start, min(start + each, packed.num_windows))
            batch = packed.batch(rows, self._device)
            assert batch.record is not None, "the batches have records"
            context = Context(batch.targets, batch.documents, samples=batch.samples, record=batch.record)
            run_layers(self.layers, batch.inputs, context)
            packed.collect(rows, batch.record)
            show(rows.stop, packed.num_windows)
        return packed.scores()

    def generate(
        self,
        prompts: Sequence[Prompt],
        batch_tokens: int,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[str]:
        """Return the likeliest continuation of each prompt, up to its first stop text, the end of the
        document, or the largest number of tokens. ``batch_tokens``: number of positions whose keys and
        values are held, at least those of one text. ``show(texts_done, texts)`` reports progress."""
        return GreedyTexts(WholeReader(self.layers), self.tokenizer, self.sequence, batch_tokens).generate(
            prompts, show
        )
