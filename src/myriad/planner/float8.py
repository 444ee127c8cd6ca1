"""What multiplying in float8 reads and writes besides the products, as Myriad's kernels do
(`myriad.kernels.triton.scaling`). A matrix is read once for its values in one form or both, a byte each, and
where one scale is for all of it, once more before that for the largest:

    forward      x and W as they lie              (tensor: searched)
    inputs       g in both forms, W transposed    (tensor: g searched; of W it is known)
    weights      x transposed                     (tensor: known too)

Scales are 4 bytes: one for a matrix, for 128 neighbours of a row, or of a weight for 128 x 128 values. In
blocks a weight's gradient is added to its sum inside the product; with one scale the library's product writes
it in the precision of training, and it is read and added in a pass of its own.
"""

from typing import Literal, NamedTuple

from myriad.planner.operators import Number

__all__ = ["Moved", "moved_by_float8", "operand_bytes"]

Scaling = Literal["tensor", "blocks"]
_BLOCK = 128
_SCALE_BYTES = {
    "tensor": 0.0,
    "lines": 4 / _BLOCK,
    "squares": 4 / _BLOCK**2,
}


class Moved(NamedTuple):
    """In one turn of one weight."""

    num_bytes: Number
    operators: int


def operand_bytes(kind: str, value_bytes: int, num_forms: int, *, searched: bool) -> float:
    """For each value of a matrix that is made float8 in so many forms."""
    reads = 2 if searched else 1
    return reads * value_bytes + num_forms * (1 + _SCALE_BYTES[kind])


def moved_by_float8(
    scaling: Scaling, value_bytes: int, x: Number, grad: Number, weight: Number, sum_bytes: int
) -> tuple[Moved, Moved, Moved]:
    """Forward, gradient of the input, of the weight; ``x``, ``grad``, ``weight``: numbers of values."""
    whole = scaling == "tensor"
    lines, squares = ("tensor", "tensor") if whole else ("lines", "squares")
    new = operand_bytes(lines, value_bytes, 1, searched=whole)
    both = operand_bytes(lines, value_bytes, 2, searched=whole)
    known = operand_bytes(lines, value_bytes, 1, searched=False)
    of_weight = operand_bytes(squares, value_bytes, 1, searched=whole)
    again = operand_bytes(squares, value_bytes, 1, searched=False)
    added = weight * (value_bytes + 2 * sum_bytes) if whole else 0.0
    return (
        Moved(new * x + of_weight * weight, 4 if whole else 2),
        Moved(both * grad + again * weight, 3 if whole else 2),
        Moved(known * x + added, 2 if whole else 1),
    )
