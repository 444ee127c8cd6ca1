"""Keep numba's on-disk cache valid when any source file of a simulator changes.

numba compares only the file of the cached function and the values that it closes over; a change in another
file that it calls would go unnoticed. So each cached function closes over `source_stamp` of its folder, and
calls functions that are not cached themselves.
"""

import zlib
from pathlib import Path

__all__ = ["source_stamp"]


def source_stamp(file: str) -> int:
    """Return a non-negative checksum of all source files in the folder of ``file``."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(file).parent.glob("*.py"))))
