"""Loading, storing and masking of the attention kernels' blocks of rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
import triton
import triton.language as tl

__all__ = ["load", "sees", "store"]


@triton.jit
def load(
    base,
    rows,
    row_stride,
    columns,
    num_rows,
    width: tl.constexpr,
    padded: tl.constexpr,
    checked: tl.constexpr,
    upcast: tl.constexpr,
):
    """Load ``[rows, columns]``, with zeros beyond the head size and, if ``checked``, beyond the sequence."""
    address = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if checked and width < padded:
        values = tl.load(address, mask=(rows[:, None] < num_rows) & (columns[None, :] < width), other=0.0)
    elif checked:
        values = tl.load(address, mask=rows[:, None] < num_rows, other=0.0)
    elif width < padded:
        values = tl.load(address, mask=columns[None, :] < width, other=0.0)
    else:
        values = tl.load(address)
    return values.to(tl.float32) if upcast else values


@triton.jit
def store(base, values, rows, row_stride, columns, num_rows, width: tl.constexpr):
    inside = (rows[:, None] < num_rows) & (columns[None, :] < width)
    address = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    tl.store(address, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def sees(queries, keys, window, num_rows):
    """Return whether each query sees each key, as a matrix in the given order."""
    return (keys <= queries) & (keys > queries - window) & (keys < num_rows)
