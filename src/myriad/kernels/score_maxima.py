"""The largest attention score of each head, before the softmax, in bounded memory.

The library's kernels do not return it, so it is computed beside them: blocks of queries times the keys that
they see. Every implementation of attention has the same scores up to rounding, so that one computation serves
all of them.

Legend: B batch, S sequence, N query heads, K key/value heads, R = N / K, D head size.
"""

import torch

from myriad.kernels.documents import Documents

__all__ = ["add_largest_scores"]

_BLOCK_BYTES = 2**25
"""Bytes of scores in memory at a time."""


@torch.no_grad()
def add_largest_scores(
    into: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    window: int | None,
    scale: float,
    documents: Documents | None,
) -> None:
    """Raise ``into`` ``[N]`` to the largest causal scores of ``q`` ``[B, S, N, D]`` with ``k``
    ``[B, S, K, D]``, times ``scale``."""
    batch, sequence, num_heads, _ = q.shape
    rows = max(1, _BLOCK_BYTES // (4 * batch * num_heads * sequence))
    at = torch.arange(sequence, device=q.device)
    first = (at - (window or sequence) + 1).expand(batch, sequence)
    if documents is not None:
        first = torch.maximum(first, at - documents.positions)
    q, k = q.detach().float().unflatten(2, (k.shape[2], -1)), k.detach().float()
    for start in range(0, sequence, rows):
        stop = min(start + rows, sequence)
        low = max(0, start - (window or sequence) + 1)
        scores = torch.einsum("bqkrd,bskd->bkrqs", q[:, start:stop], k[:, low:stop])
        keys = at[low:stop]
        sees = (keys <= at[start:stop, None]) & (keys >= first[:, start:stop, None])  # [B, queries, keys]
        largest = scores.masked_fill_(~sees[:, None, None], -torch.inf).amax((0, 3, 4)).flatten()
        torch.maximum(into, largest * scale, out=into)
