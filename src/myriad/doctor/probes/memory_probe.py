"""Memory: copy bandwidth of all cores of a memory node, and whether it returns what was written."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from myriad.doctor.diagnosis import Reading
from myriad.doctor.hardware import cpu_key
from myriad.system.machine import MemoryNode, find_memory_nodes

__all__ = ["PATTERNS", "check_memory", "fill", "wrong_words"]

Words = npt.NDArray[np.uint64]

_COPY_BYTES = 2**25
"""Bytes that each thread copies: more than the caches hold."""
_COPY_SECONDS = 0.3
_MOST_THREADS = 64
_PATTERN_BYTES = 2**27
"""Bytes tested on each memory node: a sample, since a diagnosis takes only seconds."""
_FLOOR = 1e9
PATTERNS: tuple[int | None, ...] = (0, 2**64 - 1, 0xAAAAAAAAAAAAAAAA, 0x5555555555555555, None)
"""Patterns for stuck and coupled bits; ``None``: each word holds its index, which finds wrong addressing."""


def check_memory() -> Iterator[Reading]:
    """Yield bandwidth and patterns of each memory node."""
    for node in find_memory_nodes():
        place = f"memory node {node.index}"
        yield Reading(
            name=f"memory bandwidth, {place}",
            value=_copy_bytes_per_second(node),
            unit="bytes/s",
            floor=_FLOOR,
            hardware=cpu_key(),
            note=f"read and written by {min(len(node.cpus), _MOST_THREADS)} threads",
            remedy="look for other work on the node, a missing memory module, a throttled processor",
        )
        wrong = _run_on_node(node, lambda: _count_wrong(_pattern_words()))
        bad = f"{wrong} words came back different: take the node out, test its memory modules"
        yield Reading(
            name=f"memory patterns, {place}",
            value=float(wrong),
            unit="wrong words",
            problem=bad if wrong else "",
            note=f"{len(PATTERNS)} patterns over {8 * _pattern_words() / 2**20:.0f} MiB",
        )


def _run_on_node(node: MemoryNode, work: Callable[[], int]) -> int:
    """Run in a thread on the node's cores: memory that it touches first is the node's own."""
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, node.cpus)) as pool:
        return pool.submit(work).result()


def _copy_bytes_per_second(node: MemoryNode) -> float:
    cpus = node.cpus[:_MOST_THREADS]
    with ThreadPoolExecutor(len(cpus)) as pool:
        return sum(pool.map(_copy, cpus))


def _copy(cpu: int) -> float:
    os.sched_setaffinity(0, {cpu})  # of this thread
    here, there = np.ones(_COPY_BYTES // 8), np.zeros(_COPY_BYTES // 8)
    np.copyto(there, here)
    copies, start = 0, time.perf_counter()
    while time.perf_counter() - start < _COPY_SECONDS:
        np.copyto(there, here)
        copies += 1
    return 2 * _COPY_BYTES * copies / (time.perf_counter() - start)


def _pattern_words() -> int:
    """Return the words to test: at most an eighth of the free memory, since the node may be short of
    memory."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(_PATTERN_BYTES, free // 8) // 8)


def _count_wrong(count: int) -> int:
    words = np.empty(count, np.uint64)
    wrong = 0
    for pattern in PATTERNS:
        fill(words, pattern)
        wrong += wrong_words(words, pattern)
    return wrong


def fill(words: Words, pattern: int | None) -> None:
    """Fill the words with a pattern."""
    if pattern is None:
        words[:] = np.arange(len(words), dtype=np.uint64)
    else:
        words[:] = np.uint64(pattern)


def wrong_words(words: Words, pattern: int | None) -> int:
    """Return the number of words with another value."""
    right = np.arange(len(words), dtype=np.uint64) if pattern is None else np.uint64(pattern)
    return int(np.count_nonzero(words != right))
