"""Which weights are multiplied in float8: the matrices of the layers between the first and the last.

Tables of tokens and the output projection stay as they are, as in torchtitan's float8 training
(docs/float8.md there): they are where rounding hurts, and of a large model a small part.
"""

from myriad.kernels.float8 import MULTIPLE, Float8
from myriad.kernels.gradient import sink_of
from myriad.parallel.pieces import Pieces

__all__ = ["multiply_in_float8"]


def multiply_in_float8(pieces: Pieces, num_layers: int, float8: Float8) -> int:
    """Marks them, as far as this rank has any; gives their number."""
    found = 0
    for stage in pieces.stages.values():
        for index, layer in stage.layers.items():
            if not 0 < index < num_layers - 1:
                continue
            for weight in layer.parameters():
                sink = sink_of(weight)
                if weight.ndim == 2 and sink is not None and all(n % MULTIPLE == 0 for n in weight.shape):
                    sink.float8 = float8
                    found += 1
    return found
