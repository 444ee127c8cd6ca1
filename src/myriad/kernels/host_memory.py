"""Reuse of freed host memory on a CPU.

glibc returns the memory of a freed large tensor to the kernel. The next tensor of that size gets new pages,
cleared one page fault at a time. Whether glibc does so depends on the memory above in the heap, so one of two
equal ranks is often slower. Memory that is kept is reused at once.
"""

import ctypes
from functools import cache

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, parameters of mallopt(3)."""
_NEVER, _LARGE_BYTES = 2**31 - 1, 2**30
"""Values of the parameters. Larger allocations (parameters, states) are made once and keep their own
pages."""


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory for the rest of this process's life. Return False if the C library does not support
    it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
