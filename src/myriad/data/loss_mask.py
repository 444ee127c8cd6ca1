"""Which tokens of a shard have a loss: ``NAME.loss``, one bit for each token, the first one lowest.

Corpora of prompts and conversations have this file beside ``NAME.bin``; in others every token has a loss.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOSS_SUFFIX", "LossMask", "write_loss_mask"]

LOSS_SUFFIX = ".loss"


class LossMask:
    """The mask of one shard."""

    def __init__(self, packed: NDArray[np.uint8], num_tokens: int) -> None:
        """Raises ``ValueError`` if the mask has another size."""
        if len(packed) != -(-num_tokens // 8):
            raise ValueError(f"has {len(packed)} bytes for {num_tokens} tokens")
        self._packed = packed

    def read(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return whether each of the tokens [start, stop) has a loss."""
        first = start // 8
        bits = np.unpackbits(self._packed[first : -(-stop // 8)], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)


def write_loss_mask(path: Path, mask: NDArray[np.bool_]) -> None:
    """Write a mask ``[tokens]``."""
    path.write_bytes(np.packbits(mask, bitorder="little").tobytes())
