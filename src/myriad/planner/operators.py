"""Seconds of single operators on one accelerator, from its data sheet and smooth curves.

Every function takes numbers or arrays of them, so that a million layouts cost one call.

    matrix product   [m, k] x [k, n]: tiles of `tile` x `tile` go to `num_units` units in waves. Tiles cut
                     at the edges and the last, partly filled wave are lost; so is the start and end of each
                     tile, which weighs more the shorter k is. Reading and writing the matrices overlaps with
                     that, but not wholly: the two are joined by a p-norm.
                     Where products wait for weights, these come on top, once for each micro-batch.
    memory-bound     bytes over the bandwidth that streams reach
    attention        with a flash kernel, counted by attended pairs (without one: `layers`)
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster import Accelerator

__all__ = [
    "Number",
    "flash_seconds",
    "matmul_seconds",
    "peak_flops",
    "stream_seconds",
    "sweep_seconds",
    "weights_seconds",
]

Number: TypeAlias = float | npt.NDArray[np.float64]

_JOIN = 2.0
"""Of the p-norm: 1 would add compute and memory time, infinity would hide the shorter one."""
_WAVE_LOSS = 0.35
"""Of a wave: libraries choose among tile shapes and cut the inner length, which fills part of the last
one."""


def peak_flops(accelerator: Accelerator, value_bytes: int) -> float:
    """Return the peak rate of matrix products of values of 2 (bfloat16, float16) or 4 bytes."""
    if value_bytes == 2:
        return accelerator.peak_flops_per_second
    return accelerator.float32_flops_per_second or accelerator.peak_flops_per_second / 2


def matmul_seconds(
    accelerator: Accelerator,
    m: Number,
    n: Number,
    k: Number,
    *,
    value_bytes: int,
    out_bytes: float | None = None,
) -> Number:
    """``[m, k] x [k, n]``; ``out_bytes``: moved for each element of the result, where it is not written once
    in the type of the inputs (a sum of gradients is read and written in float32: 8)."""
    tile, units = accelerator.tile, accelerator.num_units
    rows, columns = np.ceil(np.asarray(m) / tile), np.ceil(np.asarray(n) / tile)
    filled = (m / (rows * tile)) * (n / (columns * tile))
    waves = rows * columns / units
    busy = waves / (np.maximum(waves, 1.0) + _WAVE_LOSS) if units > 1 else 1.0
    inner = k / (k + accelerator.saturation)
    # the two losses are part of what was measured as achievable, at 8,192 cubed
    reference = (8192 / (8192 + accelerator.saturation)) * _reference_waves(accelerator)
    rate = (
        peak_flops(accelerator, value_bytes)
        * accelerator.achievable_ratio
        * accelerator.sustained_ratio
        / reference
    )
    compute = 2.0 * m * n * k / (rate * np.sqrt(filled) * busy * inner)
    written = value_bytes if out_bytes is None else out_bytes
    moved = value_bytes * (m * k + k * n) + written * m * n
    memory = moved / (accelerator.memory_bytes_per_second * accelerator.memory_ratio)
    return _join(compute, memory) + accelerator.launch_seconds


def _reference_waves(accelerator: Accelerator) -> float:
    waves = (8192 / accelerator.tile) ** 2 / accelerator.num_units
    return waves / (waves + _WAVE_LOSS) if accelerator.num_units > 1 else 1.0


def _join(one: Number, other: Number) -> Number:
    joined: Number = (one**_JOIN + other**_JOIN) ** (1 / _JOIN)
    return joined


def stream_seconds(accelerator: Accelerator, num_bytes: Number, num_operators: Number = 1.0) -> Number:
    """Of a layer's operators that only read and write."""
    if accelerator.stream_bytes_per_second is None:
        return sweep_seconds(accelerator, num_bytes, num_operators)
    return num_bytes / accelerator.stream_bytes_per_second + num_operators * accelerator.launch_seconds


def sweep_seconds(accelerator: Accelerator, num_bytes: Number, num_operators: Number = 1.0) -> Number:
    """Of going over large memory, as an optimizer does."""
    rate = accelerator.memory_bytes_per_second * accelerator.memory_ratio
    return num_bytes / rate + num_operators * accelerator.launch_seconds


def weights_seconds(accelerator: Accelerator, num_bytes: Number) -> Number:
    """For which products wait until weights, or sums of their gradients, have been moved."""
    rate = accelerator.weights_bytes_per_second
    return 0.0 if rate is None else num_bytes / rate


def flash_seconds(
    accelerator: Accelerator, flops: Number, sequence: Number, head_width: float, value_bytes: int
) -> Number:
    """Of one pass over the attended pairs; ``flops`` of these alone."""
    width = min(1.0, head_width / 128) ** 0.35
    ratio = accelerator.flash_ratio * width * sequence / (sequence + accelerator.flash_half_length)
    return flops / (peak_flops(accelerator, value_bytes) * ratio) + accelerator.launch_seconds
