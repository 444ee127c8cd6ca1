"""How Triton's kernels are started, for all of them alike. Import late: needs triton.

Multiplications and additions are joined (``enable_fp_fusion``), as the library's kernels do. Sums over rows
go to one partial sum for each program, added up afterwards in a fixed order: never by atomics, whose order
differs from run to run, and equal runs must give equal bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton

__all__ = ["block_of", "launch", "num_programs", "rows_of"]

_PROGRAMS_OF_CPU = 3
"""In the interpreter: few, but more than one, so that sums over programs are tested."""
_PROGRAMS_OF_PROCESSOR = 4
"""Programs that loop over rows, for each multiprocessor: enough to hide a load's latency."""


def block_of(width: int) -> int:
    """Values that a program holds for a row: the next power of two."""
    return int(triton.next_power_of_2(max(width, 1)))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[..., H]`` as ``[rows, H]`` whose values lie side by side; a copy only where they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_programs(rows: int, device: torch.device) -> int:
    """That share ``rows`` among them."""
    most = _processors(device) * _PROGRAMS_OF_PROCESSOR or _PROGRAMS_OF_CPU
    return max(1, min(rows, most))


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Runs ``kernel`` on the device of its first argument; nothing where there is nothing to do."""
    if 0 in grid:
        return
    options["enable_fp_fusion"] = True
    if arguments[0].is_cuda:
        with torch.cuda.device(arguments[0].device):
            kernel[tuple(grid)](*arguments, **options)
    else:
        kernel[tuple(grid)](*arguments, **options)
