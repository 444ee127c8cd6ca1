"""The softmax over this rank's part of the vocabulary as two Triton kernels, with one program per row of
logits.

    facts      one pass over the logits: maximum, sum of exponentials relative to it, the target's logit
    gradient   one more pass, when the facts of all ranks are known: exp(logit - top) / total - onehot, in the
               type of the matrix products

Maximum and sum are computed together (Milakov & Gimelshein, arXiv 1805.02867, algorithm 3). Between the two
kernels only three numbers per row are written.

Legend: C tokens of a chunk, V/tp this rank's part of the vocabulary.
"""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from myriad.kernels.triton.launch import block_of, launch

__all__ = ["row_facts", "write_gradient"]

_MOST_COLUMNS = 4096
"""Largest number of columns that a program loads at once."""
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
"""Lowest float32 number, used instead of -inf as the maximum of a part that is all padding: its differences
to other logits are numbers."""


@triton.jit
def facts_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    facts: tl.tensor,
    stride: tl.tensor,
    first_row: tl.tensor,
    num_valid: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top = _LOWEST
    total = 0.0
    for start in range(0, num_valid, BLOCK):
        inside = start + column < num_valid
        values = tl.load(logits + row * stride + start + column, mask=inside, other=-float("inf"))
        highest = tl.maximum(top, tl.max(values, 0))
        total = total * tl.exp(top - highest) + tl.sum(tl.exp(values - highest), 0)
        top = highest
    target = tl.load(targets + row) - first_row
    mine = (target >= 0) & (target < num_valid)
    at_target = tl.load(logits + row * stride + target, mask=mine, other=0.0)
    tl.store(facts + 3 * row, top)
    tl.store(facts + 3 * row + 1, total)
    tl.store(facts + 3 * row + 2, at_target)


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    first_row: tl.tensor,
    num_valid: tl.tensor,
    width: tl.tensor,
    gain: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + column, mask=column < num_valid, other=-float("inf"))
    shares = tl.exp(values - tl.load(tops + row)) / tl.load(totals + row)
    target = tl.load(targets + row) - first_row
    shares = tl.where(column < num_valid, shares, 0.0) - (column == target).to(tl.float32)
    tl.store(out + row * out_stride + column, (shares * gain).to(out.dtype.element_ty), mask=column < width)


def _block(width: int) -> dict[str, int]:
    block = min(block_of(width), _MOST_COLUMNS)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def row_facts(logits: torch.Tensor, targets: torch.Tensor, first_row: int, num_valid: int) -> torch.Tensor:
    """Return ``[C, 3]``: the maximum, the sum of exponentials relative to it, and the logit of the target
    if it is one of these rows, else 0. ``logits``: float32 ``[C, V/tp]``; the first ``num_valid`` columns
    count."""
    facts = logits.new_empty(len(logits), 3)
    stride = logits.stride(0)
    arguments = (logits, targets.contiguous(), facts, stride, first_row, num_valid)
    launch(facts_kernel, (len(logits),), *arguments, **_block(num_valid))
    return facts


def write_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    first_row: int,
    num_valid: int,
    out: torch.Tensor,
    gain: float,
) -> torch.Tensor:
    """Write to ``out`` ``[C, V/tp]`` the softmax, less one at the target, times ``gain``. The maximum and
    the sum of exponentials of every row over all ranks are given, each ``[C]``. ``out`` may be ``logits``
    itself."""
    width = logits.shape[1]
    blocks = _block(width)
    grid = (len(logits), triton.cdiv(width, blocks["BLOCK"]))
    strides = (logits.stride(0), out.stride(0))
    arguments = (logits, targets.contiguous(), top.contiguous(), total.contiguous(), out, *strides)
    launch(gradient_kernel, grid, *arguments, first_row, num_valid, width, gain, **blocks)
    return out
