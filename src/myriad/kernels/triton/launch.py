"""Launch of Triton kernels, common to all of them. Import late: needs triton.

Multiplications and additions are fused (``enable_fp_fusion``), as in the library's kernels. For a sum over
rows, each program writes one partial sum; these are added up afterwards in a fixed order. Atomics are never
used, because their order differs from run to run, and equal runs must give equal bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton

__all__ = ["block_of", "launch", "num_programs", "rows_of"]

_PROGRAMS_OF_CPU = 3
"""Number of programs in the interpreter: few, but more than one, so that tests cover sums over programs."""


def block_of(width: int) -> int:
    """Return the number of values that a program holds for a row: the next power of two."""
    return int(triton.next_power_of_2(max(width, 1)))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """View ``[..., H]`` as ``[rows, H]`` with contiguous rows; copy only if they are not contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_programs(rows: int, device: torch.device, of_processor: int = 4) -> int:
    """Return the number of programs that share ``rows``: ``of_processor`` for each multiprocessor, because
    several hide latency."""
    most = _processors(device) * of_processor or _PROGRAMS_OF_CPU
    return max(1, min(rows, most))


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Run ``kernel`` on the device of its first argument; do nothing if the grid is empty."""
    if 0 in grid:
        return
    options["enable_fp_fusion"] = True
    if arguments[0].is_cuda:
        with torch.cuda.device(arguments[0].device):
            kernel[tuple(grid)](*arguments, **options)
    else:
        kernel[tuple(grid)](*arguments, **options)
