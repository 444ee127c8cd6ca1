"""Keep numba's on-disk cache valid when any source file of a simulator changes.

numba compares only the file of the cached function and the values that it closes over; a change in another
file that it calls would go unnoticed. So each cached function closes over `source_stamp` of its folder, and
calls functions that are not cached themselves. Those have no wrappers that Python could call: a wrapper
unpacks every array of every argument, and all wrappers would take as long to compile as the functions.
"""

import zlib
from pathlib import Path
from typing import Any

import numba

__all__ = ["compiled_inside", "source_stamp"]


def source_stamp(file: str) -> int:
    """Return a non-negative checksum of all source files in the folder of ``file``."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(file).parent.glob("*.py"))))


def compiled_inside(function: Any, **options: Any) -> Any:
    """Compile a function that only compiled functions call."""
    njit: Any = numba.njit  # its types leave out these two options
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
