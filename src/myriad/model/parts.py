"""Into how many parts a micro-batch is cut, so that the tensors of one travel while another computes
(``overlap.tensor = "turns"``), and into how many slices what a rank gathers or scatters ("slices").

No torch here: the runtime cuts by it (`myriad.model.interleave`, `myriad.parallel.slices`), the planner
predicts by it.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["num_parts", "num_slices", "part_sizes"]

_MORE_PARTS_ON_CPU = 2
"""Times as many parts of positions as of sequences on a CPU: what travels when they meet has nothing to hide
behind, and it is one part. Six layers of 512 and 1,024 positions whose transfers take as long as the compute:
steps 1.38 x as fast with 2 parts, 1.47 x with 4, 1.52 x with 8, counting products and bytes alone. On a GPU
each part starts all kernels of a layer, and smaller products fill it less."""

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
    """Of a micro-batch of ``sequences``, each with ``positions`` of ``position_bytes`` on this rank: as many
    as ``chunks``, on a CPU more of a single one, none smaller than ``message_bytes``."""
    most = sequences * positions * position_bytes // message_bytes
    is_single = np.less_equal(sequences, 1)
    wanted = np.where(is_single, _MORE_PARTS_ON_CPU * chunks, chunks) if on_cpu else chunks
    pieces = np.where(is_single, positions, sequences)
    parts: npt.NDArray[np.float64] = np.maximum(1.0, np.minimum(np.minimum(most, wanted), pieces))
    return parts


def num_slices(rows: Number, row_bytes: Number, *, chunks: Number, message_bytes: Number) -> Number:
    """Return the slices of one rank's share of a tensor of ``rows`` (sequences x positions) of ``row_bytes``:
    as many as ``chunks``, none empty, and none smaller than ``message_bytes`` unless it is the only one."""
    most = np.minimum(rows * row_bytes // message_bytes, rows)
    slices: npt.NDArray[np.float64] = np.maximum(1.0, np.minimum(most, chunks))
    return slices


def part_sizes(length: int, parts: int, multiple: int = 1) -> list[int]:
    """``length`` in ``parts`` as equal as can be, longer ones first; each a multiple of ``multiple``, as
    ``length`` is, and therefore perhaps fewer."""
    units, rest = divmod(length, multiple)
    assert not rest, (length, multiple)
    parts = min(parts, units)
    return [(units // parts + (part < units % parts)) * multiple for part in range(parts)]
