"""Seconds of single operators on one accelerator, from its data sheet and smooth curves.

Every function takes numbers or arrays, so that a million layouts cost one call.

    matrix product   [m, k] x [k, n]: tiles of `tile` x `tile` run on `num_units` units in waves. Three
                     losses count: tiles cut at the edges, the last, partly filled wave, and the start and
                     end of each tile, which weighs more the shorter k is. Reading and writing the matrices
                     overlaps with that, but not completely: the two are joined by a p-norm.
                     Where products wait for weights, these seconds are added once for each micro-batch.
    memory-bound     bytes over the bandwidth that streams reach
    attention        with a flash kernel, counted by attended pairs (without one: `layer_costs`)

`TimeBreakdown` splits seconds by kind of operator: the parts of a waterfall.
"""

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster_config import Accelerator

__all__ = [
    "ALIGNED_BYTES",
    "Number",
    "TimeBreakdown",
    "flash_seconds",
    "matmul_seconds",
    "optimizer_bytes",
    "peak_flops",
    "plain_flops",
    "stream_seconds",
    "sweep_seconds",
    "weights_seconds",
]

Number: TypeAlias = float | npt.NDArray[np.float64]

_JOIN = 2.0
"""Exponent of the p-norm: 1 would add compute and memory time, infinity would hide the shorter one."""
_WAVE_LOSS = 0.35
"""Share of a wave that is lost. Libraries choose among tile shapes and cut the inner length, which fills part
of the last wave."""


def peak_flops(accelerator: Accelerator, value_bytes: int) -> float:
    """Return the peak rate of matrix products of values of 2 (bfloat16, float16) or 4 bytes."""
    if value_bytes == 2:
        return accelerator.peak_flops_per_second
    return accelerator.float32_flops_per_second or accelerator.peak_flops_per_second / 2


_PLAIN_RATIO = 0.5
"""Share of the peak that the batched products of scores reach, whose inner or outer length is a head's
width."""
ALIGNED_BYTES = 16
"""Bytes of which a head's width is a multiple where tensor cores multiply 16-bit scores (NVIDIA, Matrix
Multiplication Background, section 2.2; arXiv 2401.14489)."""
_UNALIGNED_RATIO = 0.56
"""The same share where other cores multiply them: fit to two of BLOOM's experiments, which differ in heads of
144 and 108 values (chronicles-prequel.md, lines 739 and 740)."""


def plain_flops(accelerator: Accelerator, value_bytes: int, head_width: int) -> float:
    """Return the rate of attention's batched products without a flash kernel."""
    slow = accelerator.unaligned_flops_per_second
    if value_bytes != 2 or slow is None or head_width * value_bytes % ALIGNED_BYTES == 0:
        return _PLAIN_RATIO * peak_flops(accelerator, value_bytes)
    return _UNALIGNED_RATIO * slow


def matmul_seconds(
    accelerator: Accelerator,
    m: Number,
    n: Number,
    k: Number,
    *,
    value_bytes: int,
    out_bytes: float | None = None,
    num_in_kernel: Number = 1.0,
) -> Number:
    """Return the seconds of ``[m, k] x [k, n]``. ``out_bytes``: bytes moved for each element of the result,
    where it is not written once in the type of the inputs (a gradient buffer is read and written in float32:
    8). ``num_in_kernel``: products of this shape that one kernel computes; their tiles share waves, and the
    launch."""
    tile, units = accelerator.tile, accelerator.num_units
    rows, columns = np.ceil(np.asarray(m) / tile), np.ceil(np.asarray(n) / tile)
    filled = (m / (rows * tile)) * (n / (columns * tile))
    waves = rows * columns / units * num_in_kernel
    busy = waves / (np.maximum(waves, 1.0) + _WAVE_LOSS) if units > 1 else 1.0
    inner = k / (k + accelerator.saturation)
    # The achievable rate was measured at 8,192 cubed and includes both losses.
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
    return _join(compute, memory) + accelerator.launch_seconds / num_in_kernel


def _reference_waves(accelerator: Accelerator) -> float:
    waves = (8192 / accelerator.tile) ** 2 / accelerator.num_units
    return waves / (waves + _WAVE_LOSS) if accelerator.num_units > 1 else 1.0


def _join(one: Number, other: Number) -> Number:
    joined: Number = (one**_JOIN + other**_JOIN) ** (1 / _JOIN)
    return joined


def stream_seconds(accelerator: Accelerator, num_bytes: Number, num_operators: Number = 1.0) -> Number:
    """Return the seconds of a layer's memory-bound operators."""
    if accelerator.stream_bytes_per_second is None:
        return sweep_seconds(accelerator, num_bytes, num_operators)
    return num_bytes / accelerator.stream_bytes_per_second + num_operators * accelerator.launch_seconds


def sweep_seconds(accelerator: Accelerator, num_bytes: Number, num_operators: Number = 1.0) -> Number:
    """Return the seconds of a pass over large memory, such as the optimizer's."""
    rate = accelerator.memory_bytes_per_second * accelerator.memory_ratio
    return num_bytes / rate + num_operators * accelerator.launch_seconds


def weights_seconds(accelerator: Accelerator, num_bytes: Number) -> Number:
    """Return the seconds that products wait while weights, or sums of their gradients, are moved."""
    rate = accelerator.weights_bytes_per_second
    return 0.0 if rate is None else num_bytes / rate


def flash_seconds(
    accelerator: Accelerator, flops: Number, sequence: Number, head_width: float, value_bytes: int
) -> Number:
    """Return the seconds of one pass over the attended pairs; ``flops`` counts only these pairs."""
    width = min(1.0, head_width / 128) ** 0.35
    ratio = accelerator.flash_ratio * width * sequence / (sequence + accelerator.flash_half_length)
    return flops / (peak_flops(accelerator, value_bytes) * ratio) + accelerator.launch_seconds


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of compute by kind of operator, with the communication of layers inside it."""

    matmul: Number = 0.0
    attention: Number = 0.0
    memory: Number = 0.0
    """Memory-bound operators: norms, activations, residuals."""
    tensor: Number = 0.0
    """Exposed tensor-parallel communication, and the slowdown of compute by the overlapped part."""
    experts: Number = 0.0
    """The same of the exchanges of tokens between ranks that share experts."""
    context: Number = 0.0
    """The same of keys, values and heads between ranks that share sequences."""

    def __add__(self, other: "TimeBreakdown") -> "TimeBreakdown":
        return TimeBreakdown(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, factor: Number) -> "TimeBreakdown":
        """Return every part multiplied by a factor."""
        return TimeBreakdown(*(getattr(self, one.name) * factor for one in fields(self)))

    @property
    def total(self) -> Number:
        """Sum of all parts."""
        return self.matmul + self.attention + self.memory + self.tensor + self.experts + self.context


def optimizer_bytes(optimizer: str, value_bytes: int, ema_every: int = 0) -> float:
    """Return the bytes that the optimizer moves for each parameter. The float32 master value and two moments
    are read and written; the gradient is read and the compute value written. LAMB makes another pass over
    values and updates for their norms. Muon has one moment, whose pass also writes the gradient, and reads
    and writes the values twice, for decay and update. Every ``ema_every`` steps (0: never) the values' moving
    average is read and written, and the values are read."""
    average = 12.0 / ema_every if ema_every else 0.0
    return 24.0 + 4.0 + value_bytes + {"lamb": 16.0, "muon": 8.0}.get(optimizer, 0.0) + average
