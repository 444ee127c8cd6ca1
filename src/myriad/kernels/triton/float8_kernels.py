"""Products of operands that are scaled in blocks of 128, as a Triton kernel. Import late: needs triton.

A product processes the inner length in steps of 128. The tensor cores multiply the float8 values of a step;
the step's sum is scaled and added to float32 sums (as DeepSeek-V3, arXiv 2412.19437, section 3.3.2, promotes
partial sums: Hopper's tensor cores keep about 14 bits of them). A weight's gradient is added in place to the
float32 sum of a step's gradients, each tile by the one program that computes it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl

from myriad.kernels.choice import in_interpreter
from myriad.kernels.triton.launch import launch

__all__ = ["add_product_of_blocks", "product_kernel", "product_of_blocks"]

_ROWS, _COLUMNS, _INNER = 128, 128, 128


@triton.jit
def product_kernel(
    a_pointer,
    b_pointer,
    out_pointer,
    a_scales_pointer,
    b_scales_pointer,
    num_rows,
    num_columns,
    inner,
    a_scales_row,
    b_scales_row,
    b_height: tl.constexpr,
    row_size: tl.constexpr,
    column_size: tl.constexpr,
    inner_size: tl.constexpr,
    group: tl.constexpr,
    accumulate: tl.constexpr,
    upcast: tl.constexpr,
):
    """Compute ``a b^T`` of ``[M, K]`` and ``[N, K]``, or add it to ``out``. Programs for ``group`` rows of
    tiles run together, so that they read their tiles of ``b`` from the cache."""
    tiles_down, tiles_across = tl.cdiv(num_rows, row_size), tl.cdiv(num_columns, column_size)
    first = tl.program_id(0) // (group * tiles_across) * group
    together = tl.minimum(tiles_down - first, group)
    down = first + tl.program_id(0) % (group * tiles_across) % together
    across = tl.program_id(0) % (group * tiles_across) // together
    rows = down * row_size + tl.arange(0, row_size)
    columns = across * column_size + tl.arange(0, column_size)
    steps = tl.arange(0, inner_size)
    a_rows = a_pointer + rows[:, None].to(tl.int64) * inner + steps[None, :]
    b_rows = b_pointer + columns[:, None].to(tl.int64) * inner + steps[None, :]
    a_scales = a_scales_pointer + rows * a_scales_row
    b_scales = b_scales_pointer + columns // b_height * b_scales_row
    total = tl.zeros([row_size, column_size], tl.float32)
    for step in range(tl.cdiv(inner, inner_size)):
        left = steps[None, :] < inner - step * inner_size
        a = tl.load(a_rows + step * inner_size, mask=(rows[:, None] < num_rows) & left, other=0.0)
        b = tl.load(b_rows + step * inner_size, mask=(columns[:, None] < num_columns) & left, other=0.0)
        if upcast:
            a, b = a.to(tl.float32), b.to(tl.float32)
        a_scale = tl.load(a_scales + step, mask=rows < num_rows, other=0.0)
        b_scale = tl.load(b_scales + step, mask=columns < num_columns, other=0.0)
        total += tl.dot(a, tl.trans(b)) * a_scale[:, None] * b_scale[None, :]
    target = out_pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    if accumulate:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total.to(out_pointer.dtype.element_ty), mask=inside)


def product_of_blocks(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    """Multiply ``[M, K]`` and ``[N, K]``, each with its scales, to ``[M, N]``. ``a`` has scales of rows."""
    result = torch.empty(len(a), len(b), dtype=out, device=a.device)
    _multiply(a, a_scales, b, b_scales, result, accumulate=False)
    return result


def add_product_of_blocks(
    total: torch.Tensor,
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    *,
    first: bool = False,
) -> None:
    """Compute ``total += a b^T`` in ``total``, float32 ``[M, N]``, without other memory. The ``first``
    product of a sum does not read ``total``."""
    assert total.dtype == torch.float32 and total.is_contiguous()
    _multiply(a, a_scales, b, b_scales, total, accumulate=not first)


def _multiply(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    result: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    rows, inner, columns = *a.shape, len(b)
    tiles = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    launch(
        product_kernel,
        (tiles,),
        a, b, result, a_scales, b_scales, rows, columns, inner, a_scales.stride(0), b_scales.stride(0),
        b_height=1 if len(b_scales) == columns else _ROWS,
        row_size=_ROWS, column_size=_COLUMNS, inner_size=_INNER, group=8, accumulate=accumulate,
        upcast=in_interpreter(), num_warps=8, num_stages=3,
    )  # fmt: skip
