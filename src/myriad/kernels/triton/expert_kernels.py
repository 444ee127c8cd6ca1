"""Sums of what experts computed of each token, times their gates, as Triton kernels. Import late: needs
triton.

    forward     y_t = sum over the pairs p of token t of gate_p rows_p       rows read once, y written once
    backward    grad rows_p = gate_p grad_t,  grad gate_p = rows_p . grad_t  in one pass

Each sum is in float32, in the order of a token's destinations, by one program. Without gates the forward
sums gradients of tokens that were copied to their experts.

Legend: T tokens, P pairs of a token and a destination, H hidden.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl

from myriad.kernels.triton.launch import block_of, launch, rows_of

__all__ = ["gate_gradients", "gradient_kernel", "sum_kernel", "sum_pairs"]

_MOST_COLUMNS = 1024
"""Largest number of columns that a program holds."""


@triton.jit
def sum_kernel(
    rows_pointer,
    places_pointer,
    begins_pointer,
    pairs_pointer,
    gates_pointer,
    y_pointer,
    rows_row,
    num_tokens,
    num_pairs,
    width,
    has_gates: tl.constexpr,
    block: tl.constexpr,
):
    """Sum the rows of a token."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    begin = tl.load(begins_pointer + token)
    end = tl.load(begins_pointer + token + 1, mask=token + 1 < num_tokens, other=num_pairs)
    total = tl.zeros([block], tl.float32)
    for index in range(begin, end):
        place = tl.load(places_pointer + index)
        values = tl.load(rows_pointer + place * rows_row + columns, mask=inside, other=0.0).to(tl.float32)
        if has_gates:
            values *= tl.load(gates_pointer + tl.load(pairs_pointer + place))
        total += values
    target = y_pointer + tl.cast(token, tl.int64) * width + columns
    tl.store(target, total.to(y_pointer.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    grad_pointer,
    rows_pointer,
    tokens_pointer,
    pairs_pointer,
    gates_pointer,
    grad_rows_pointer,
    grad_gates_pointer,
    grad_row,
    rows_row,
    width,
    block: tl.constexpr,
):
    """Compute the gradients of one pair's row and gate."""
    place = tl.program_id(0).to(tl.int64)
    token, pair = tl.load(tokens_pointer + place), tl.load(pairs_pointer + place)
    gate = tl.load(gates_pointer + pair)
    total = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        grad = tl.load(grad_pointer + token * grad_row + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(rows_pointer + place * rows_row + columns, mask=inside, other=0.0).to(tl.float32)
        total += values * grad
        target = grad_rows_pointer + place * width + columns
        tl.store(target, (gate * grad).to(grad_rows_pointer.dtype.element_ty), mask=inside)
    tl.store(grad_gates_pointer + pair, tl.sum(total, 0))


def sum_pairs(
    rows: torch.Tensor,
    places: torch.Tensor,
    begins: torch.Tensor,
    pairs: torch.Tensor,
    gates: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sums ``[T, H]`` of rows ``[P, H]``: token t has those at ``places[begins[t]:begins[t+1]]``.
    ``gates``: factor of each pair, float32, by the number in ``pairs`` ``[P]``."""
    rows = rows_of(rows)
    y = rows.new_empty(len(begins), rows.shape[1])
    block = min(block_of(rows.shape[1]), _MOST_COLUMNS)
    launch(
        sum_kernel,
        (len(begins), triton.cdiv(rows.shape[1], block)),
        rows, places, begins, pairs, rows if gates is None else gates.contiguous(), y,
        rows.stride(0), len(begins), len(places), rows.shape[1],
        has_gates=gates is not None, block=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return y


def gate_gradients(
    grad: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, pairs: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows ``[P, H]`` and of the gates, from those of the sums ``[T, H]``.
    ``tokens`` and ``pairs``: token and number of each row's pair. A gate without a row gets zero."""
    grad, rows = rows_of(grad), rows_of(rows)
    grad_rows, grad_gates = torch.empty_like(rows), torch.zeros_like(gates)
    block = min(block_of(rows.shape[1]), _MOST_COLUMNS)
    launch(
        gradient_kernel,
        (len(rows),),
        grad, rows, tokens, pairs, gates.contiguous(), grad_rows, grad_gates,
        grad.stride(0), rows.stride(0), rows.shape[1], block=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return grad_rows, grad_gates
