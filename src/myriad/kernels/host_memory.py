"""What freed memory becomes on a CPU.

glibc gives the memory of a large tensor back to the kernel when it is freed, and each next one of the size is
made of new pages, cleared one fault at a time. Whether it does depends on what happens to lie above in the
heap, so that of two equal ranks one is often the slower. Kept, the memory is used again at once.
"""

import ctypes
from functools import cache

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
_NEVER, _LARGE_BYTES = 2**31 - 1, 2**30
"""Larger ones (parameters, states) are made once and keep pages of their own."""


@cache
def keep_freed_memory() -> bool:
    """For the rest of this process's life; False where its C library cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
