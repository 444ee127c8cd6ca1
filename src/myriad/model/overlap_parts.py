"""Number of parts of a micro-batch that alternate between computing and communicating
(``overlap.tensor = "turns"``), and number of slices of a gather or scatter ("slices").

No torch here: the runtime cuts with these numbers (`myriad.model.interleave`,
`myriad.parallel.sliced_products`), and the planner predicts with them."""

import numpy as np
import numpy.typing as npt

__all__ = ["num_parts", "num_slices", "part_sizes"]

_MORE_PARTS_ON_CPU = 2
"""On a CPU, a sequence is cut into this many times more parts than a micro-batch of several sequences. The
communication at the point where parts meet overlaps with nothing, and it is one part long.

Six layers of 512 and 1,024 positions whose transfers take as long as the compute: steps are 1.38 x as fast
with 2 parts, 1.47 x with 4, 1.52 x with 8, counting products and bytes alone. On a GPU each part launches all
kernels of a layer, and smaller products use it less well.
"""

Number = float | npt.NDArray[np.float64]


def num_parts(
    sequences: Number,
    positions: Number,
    position_bytes: Number,
    *,
    chunks: Number,
    message_bytes: Number,
    on_cpu: bool,
) -> Number:
    """Return the number of parts of a micro-batch of ``sequences``, each with ``positions`` of
    ``position_bytes`` on this rank. It is at most ``chunks`` (on a CPU more for a single sequence), and no
    part is smaller than ``message_bytes``."""
    most = sequences * positions * position_bytes // message_bytes
    is_single = np.less_equal(sequences, 1)
    wanted = np.where(is_single, _MORE_PARTS_ON_CPU * chunks, chunks) if on_cpu else chunks
    pieces = np.where(is_single, positions, sequences)
    parts: npt.NDArray[np.float64] = np.maximum(1.0, np.minimum(np.minimum(most, wanted), pieces))
    return parts


def num_slices(rows: Number, row_bytes: Number, *, chunks: Number, message_bytes: Number) -> Number:
    """Return the number of slices of one rank's share of a tensor of ``rows`` (sequences x positions) of
    ``row_bytes``. It is at most ``chunks``, and no slice is empty. No slice is smaller than ``message_bytes``
    unless it is the only one."""
    most = np.minimum(rows * row_bytes // message_bytes, rows)
    slices: npt.NDArray[np.float64] = np.maximum(1.0, np.minimum(most, chunks))
    return slices


def part_sizes(length: int, parts: int, multiple: int = 1) -> list[int]:
    """Split ``length`` into ``parts`` nearly equal sizes, larger ones first. Each size is a multiple of
    ``multiple``, which divides ``length``, so there may be fewer parts."""
    units, rest = divmod(length, multiple)
    assert not rest, (length, multiple)
    parts = min(parts, units)
    return [(units // parts + (part < units % parts)) * multiple for part in range(parts)]
