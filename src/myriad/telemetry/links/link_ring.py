"""Keep the newest minutes of a node's link counters, one row per 10 ms, in memory that two processes share.

    sampler (`link_sampler`) ──row, then the count of rows──► LinkRing ◄──reads── node agent

    0        8         16       24       32       40           512             512 + 8 x columns x row
    version  capacity  columns  written  cpu_ns   interval_ns  row 0           row ...

A row is int64 words: monotonic nanoseconds, the current step, 1 if all ranks of the node are in a step, TCP
segments that the node retransmitted, then `LINK_COLUMNS` of each link. Counters only grow. ``sent_again``,
``paused`` and the TCP column are read every 100 ms, the others every 10 ms.
"""

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FIRST_COLUMNS", "LINK_COLUMNS", "LinkRing", "Rows", "columns_of"]

FIRST_COLUMNS = ("time_ns", "step", "in_step", "tcp_sent_again")
LINK_COLUMNS = ("received_bytes", "sent_bytes", "errors", "drops", "sent_again", "paused")
"""Counters of a link. ``sent_again`` counts RDMA packets; ``paused`` counts microseconds, or pause frames if
the driver has no duration."""
VERSION, HEADER_BYTES = 1, 512
VERSION_WORD, CAPACITY_WORD, COLUMNS_WORD, WRITTEN_WORD, CPU_WORD, INTERVAL_WORD = range(6)
_Words = npt.NDArray[np.int64]


def columns_of(links: Sequence[str]) -> list[str]:
    """Return the names of a row's columns: the node's columns, then LINK.FIELD."""
    return [*FIRST_COLUMNS, *(f"{link}.{field}" for link in links for field in LINK_COLUMNS)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a ring, oldest first."""

    links: tuple[str, ...]
    values: _Words
    """Counters as an array ``[rows, columns]``."""

    @property
    def time_ns(self) -> _Words:
        """Time of each row by the machine's monotonic clock."""
        return self.values[:, 0]

    @property
    def step(self) -> _Words:
        """Lowest current step of the node's ranks; -1 if there is none."""
        return self.values[:, 1]

    @property
    def in_step(self) -> npt.NDArray[np.bool_]:
        """Whether every rank of the node trained; false if one saved, validated or started."""
        return self.values[:, 2] != 0

    @property
    def tcp_sent_again(self) -> _Words:
        """TCP segments that the node retransmitted."""
        return self.values[:, 3]

    def column(self, link: str, field: str) -> _Words:
        """Return a counter of one link. Raises ``ValueError`` if the ring lacks it."""
        at = self.links.index(link) * len(LINK_COLUMNS) + LINK_COLUMNS.index(field)
        return self.values[:, len(FIRST_COLUMNS) + at]

    def since(self, time_ns: int) -> "Rows":
        """Return the rows after ``time_ns``."""
        return Rows(self.links, self.values[self.time_ns > time_ns])


class LinkRing:
    """A ring in anonymous memory. The sampler inherits its descriptor; the last process frees it."""

    def __init__(self, links: Sequence[str], seconds: float = 300.0, every_seconds: float = 0.01) -> None:
        """Allocate a ring for ``seconds`` of rows, one per ``every_seconds``."""
        self.links = tuple(links)
        self.num_columns, self.capacity = len(columns_of(links)), max(16, round(seconds / every_seconds))
        size = HEADER_BYTES + 8 * self.num_columns * self.capacity
        self.descriptor = os.memfd_create("myriad-links", 0)
        os.ftruncate(self.descriptor, size)
        self._words = np.frombuffer(mmap.mmap(self.descriptor, size), np.int64)
        self._words[[VERSION_WORD, CAPACITY_WORD, COLUMNS_WORD]] = VERSION, self.capacity, self.num_columns
        self._words[INTERVAL_WORD] = round(every_seconds * 1e9)
        self._rows = self._words[HEADER_BYTES // 8 :].reshape(self.capacity, self.num_columns)

    @property
    def num_written(self) -> int:
        """Number of rows written since the ring was created."""
        return int(self._words[WRITTEN_WORD])

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the sampler's loop."""
        return float(self._words[CPU_WORD]) * 1e-9

    @property
    def every_seconds(self) -> float:
        """Current interval between rows. The sampler doubles it if sampling costs too much."""
        return float(self._words[INTERVAL_WORD]) * 1e-9

    def newest(self, most: int | None = None) -> Rows:
        """Return the newest rows, at most ``most``, without those overwritten during the read."""
        written = self.num_written
        count = min(written, self.capacity, written if most is None else most)
        found = self._rows.take(np.arange(written - count, written), axis=0, mode="wrap")
        overwritten = max(0, self.num_written + 1 - self.capacity - (written - count))
        return Rows(self.links, found[overwritten:])

    @staticmethod
    def epoch_ns() -> int:
        """Return the nanoseconds from the epoch to 0 of the rows' clock."""
        return time.time_ns() - time.monotonic_ns()

    def close(self) -> None:
        """Close the descriptor. Rows stay readable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
