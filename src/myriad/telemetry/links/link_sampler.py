"""``python -m myriad.telemetry.links.link_sampler RING PAGE ROWS PARENT LINK...``: sample link counters every
10 ms.

    every 10 ms    an interface's counters by one netlink request (RTM_GETSTATS); bytes of an RDMA port by
                   pread of two files that stay open
    every 100 ms   TCP retransmissions (/proc/net/snmp), RDMA retransmissions, pauses (ethtool)
    each row       goes into the ring (`link_ring`), with the current step from the ranks' progress page

The loop is machine code (numba) in a separate process, so a read that a NIC's firmware blocks blocks nothing
else. The loop waits on an idle socket with SO_RCVTIMEO. This uses the kernel's timer wheel, which ticks
anyway on a busy core, at half the cost of a sleep, which programs a timer (measured by ``python
benchmarks/telemetry/link_counters.py``). If sampling costs more than `_MOST_SHARE` of a core, the loop halves
its rate. It ends with process PARENT. A counter that cannot be read keeps its last value."""

import mmap
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from myriad.telemetry.links import link_ring
from myriad.telemetry.links.ethtool import (
    GSTATS,
    MOST_STATISTICS,
    SIOCETHTOOL,
    pause_columns,
    statistic_names,
)
from myriad.telemetry.links.link_ring import (
    CAPACITY_WORD,
    COLUMNS_WORD,
    CPU_WORD,
    FIRST_COLUMNS,
    HEADER_BYTES,
    INTERVAL_WORD,
    LINK_COLUMNS,
    VERSION,
    VERSION_WORD,
    WRITTEN_WORD,
)
from myriad.telemetry.progress.progress_page import ROW_BYTES

__all__ = ["main", "sample"]

_MOST_SHARE = 0.005
"""Maximum fraction of a core for sampling; above it, the loop doubles its interval."""
_SLOWEST_NS = 80_000_000
_RARELY = 10
"""Rows per read of the expensive counters."""
_CHECK_ROWS = 500
_GET_STATS, _REQUEST, _FILTER_LINK_64 = 94, 1, 1
_QUESTION = struct.Struct("=LHHLLBBHLL")
_SKIP_BYTES = 16 + 12 + 4
"""Bytes before rtnl_link_stats64 in the reply: netlink header, if_stats_msg, attribute header."""
_NUM_FIRST, _NUM_FIELDS = len(FIRST_COLUMNS), len(LINK_COLUMNS)
_PHASE_WORD, _STEP_WORD, _PID_WORD, _PAGE_WORDS = 10, 2, 0, ROW_BYTES // 8
_STEP_TEXT = int.from_bytes(b"step\0\0\0\0", sys.byteorder)
_RDMA_BYTES = ("counters/port_rcv_data", "counters/port_xmit_data")
_RDMA_SENT_AGAIN = ("packet_seq_err", "local_ack_timeout_err", "out_of_sequence", "rnr_nak_retry_err")
_RDMA_ERRORS = ("counters/port_rcv_errors", "counters/symbol_error")
_PARENT_LOOK = 100
"""Rows per check that the parent process still runs."""


_SO_RCVTIMEO, _SOL_SOCKET, _DONT_WAIT = socket.SO_RCVTIMEO, socket.SOL_SOCKET, socket.MSG_DONTWAIT
_MONOTONIC, _THREAD_CPU, _MONOTONIC_COARSE = 1, 3, 6
_STAMP = zlib.crc32(Path(link_ring.__file__).read_bytes())
"""Hash of the ring's layout. numba's cache key covers only this file, so the layout must be part of it."""

_LONG: Any = types.intp
_INT: Any = types.int32

# Functions of the C library are bound by name, so that numba can cache the machine code between processes.
_pread: Any = ExternalFunction("pread", _LONG(types.int32, types.voidptr, types.uintp, types.int64))
_send: Any = ExternalFunction("send", _LONG(types.int32, types.voidptr, types.uintp, types.int32))
_recv: Any = ExternalFunction("recv", _LONG(types.int32, types.voidptr, types.uintp, types.int32))
_ioctl: Any = ExternalFunction("ioctl", _INT(types.int32, types.uintp, types.voidptr))
_getppid: Any = ExternalFunction("getppid", _INT())
_clock_gettime: Any = ExternalFunction("clock_gettime", _INT(types.int32, types.voidptr))
_setsockopt: Any = ExternalFunction(
    "setsockopt", _INT(types.int32, types.int32, types.int32, types.voidptr, types.uint32)
)


def _jit(function: Any, *, keep: bool = False) -> Any:
    """Compile a function. With ``keep``, cache the machine code if a cache folder is writable."""
    try:
        return numba.njit(function, nogil=True, cache=keep)
    except RuntimeError:
        return numba.njit(function, nogil=True)


def sample(
    ring: int,
    page: int,
    num_rows: int,
    links: Sequence[str],
    *,
    rows: int = -1,
    parent: int | None = None,
    sys_path: Path = Path("/sys"),
) -> None:
    """Write ``rows`` rows (-1: no limit) into the ring, or until the parent process has ended.

    ``ring`` is a descriptor; ``page`` is the descriptor of the ranks' progress page, or -1. ``links`` are
    interfaces and RDMA ports (DEVICE:PORT). The process ``parent`` may have ended before this call. Raises
    ``OSError``.
    """
    memory = np.frombuffer(mmap.mmap(ring, 0), np.int64)
    if memory[VERSION_WORD] != VERSION:
        raise OSError("the ring is of another version")
    words = np.zeros(0, np.int64) if page < 0 else np.frombuffer(mmap.mmap(page, 0), np.int64)
    sources = _Sources(links, sys_path)
    idle, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    handles = np.array([sources.netlink.fileno(), sources.control.fileno(), idle.fileno(), sources.snmp])
    tick_us = round(time.clock_getres(_MONOTONIC_COARSE) * 1e6)
    numbers = np.array([sources.snmp_column, parent or os.getppid(), rows, tick_us])
    kinds = sources.questions, sources.files, sources.rare_files
    try:
        _run(memory, words[: num_rows * _PAGE_WORDS], handles, numbers, kinds, sources.ethtool)
    finally:
        sources.close()
        idle.close()
        other.close()


class _Sources:
    """Open sources of counters, as arrays for the compiled loop.

    ``questions`` ``[links, bytes]`` are netlink requests. ``files`` ``[links, 2]`` and ``rare_files``
    ``[links, 7]`` are descriptors, -1 for none. For ethtool, ``requests`` ``[links, 40]`` fill ``statistics``
    ``[links, words]``; ``pauses`` ``[links, n]`` are the indices to add up.
    """

    def __init__(self, links: Sequence[str], sys_path: Path) -> None:
        self.netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self.control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        indices = {name: index for index, name in socket.if_nameindex()}
        self.questions = np.zeros((len(links), _QUESTION.size), np.uint8)
        self.files = np.full((len(links), len(_RDMA_BYTES)), -1, np.int64)
        self.rare_files = np.full((len(links), 7), -1, np.int64)
        counters = [(statistic_names(link), link) for link in links]
        paused = [pause_columns(names) if names else [] for names, _ in counters]
        # A driver that gains queues gains counters, and the kernel writes all of them.
        most = MOST_STATISTICS if any(paused) else 0
        self.statistics = np.zeros((len(links), 1 + most), np.int64)
        self.requests = np.zeros((len(links), 40), np.uint8)
        self.pauses = np.full((len(links), 1 + max([len(one) for one in paused], default=0)), -1, np.int64)
        for place, link in enumerate(links):
            if link in indices:
                head = (_QUESTION.size, _GET_STATS, _REQUEST, 0, 0)
                text = _QUESTION.pack(*head, 0, 0, 0, indices[link], _FILTER_LINK_64)
                self.questions[place] = np.frombuffer(text, np.uint8)
                self._ask_pauses(place, link, len(counters[place][0]), paused[place])
            elif ":" in link:
                self._open_port(place, link, sys_path)
        self.snmp, self.snmp_column = _open(Path("/proc/net/snmp")), _retransmission_column()

    def _ask_pauses(self, place: int, link: str, num_names: int, columns: Sequence[int]) -> None:
        if columns:
            self.pauses[place, : len(columns)] = columns
            self.statistics[place, :1].view(np.uint32)[:] = GSTATS, num_names
            address = self.statistics[place].ctypes.data
            request = struct.pack("=16sQ16x", link.encode()[:15], address)
            self.requests[place] = np.frombuffer(request, np.uint8)

    @property
    def ethtool(self) -> tuple[Any, ...]:
        """Requests, their buffers, the indices of the counters to add up, and the buffers' heads."""
        return self.requests, self.statistics, self.pauses, self.statistics[:, 0].copy()

    def _open_port(self, place: int, link: str, sys_path: Path) -> None:
        device, _, port = link.partition(":")
        folder = sys_path / "class/infiniband" / device / "ports" / port
        self.files[place] = [_open(folder / name) for name in _RDMA_BYTES]
        rare = [folder / "hw_counters" / name for name in _RDMA_SENT_AGAIN]
        rare += [folder / name for name in (*_RDMA_ERRORS, "counters/port_xmit_discards")]
        self.rare_files[place, : len(rare)] = [_open(path) for path in rare]

    def close(self) -> None:
        """Close all files and sockets."""
        for handle in (*self.files.ravel(), *self.rare_files.ravel(), self.snmp):
            if handle >= 0:
                os.close(int(handle))
        self.netlink.close()
        self.control.close()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return -1


def _retransmission_column() -> int:
    """Return the index of RetransSegs among the Tcp names in /proc/net/snmp; -1 if missing."""
    try:
        lines = Path("/proc/net/snmp").read_text().splitlines()
    except OSError:
        return -1
    names = next((line.split() for line in lines if line.startswith("Tcp:")), [])
    return names.index("RetransSegs") if "RetransSegs" in names else -1


# The loop. numba compiles it, so arguments have no annotations and every call is a C library call.


@_jit
def _clock(which, words):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    _clock_gettime(which, words.ctypes.data)
    return words[0] * 1_000_000_000 + words[1]


@_jit
def _number_of(handle, buffer):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Return the number in a file; -1 if it cannot be read now (e.g. the firmware restarts)."""
    size, found = _pread(handle, buffer.ctypes.data, 32, 0), 0
    if size <= 0:
        return -1
    for at in range(size):
        if buffer[at] < 48 or buffer[at] > 57:
            break
        found = found * 10 + (buffer[at] - 48)
    return found


@_jit
def _tcp_sent_again(handle, column, buffer):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Word number ``column`` of the second line that begins with "Tcp:"."""
    size, lines, at = _pread(handle, buffer.ctypes.data, buffer.size, 0), 0, 0
    while at + 4 < size:
        is_tcp = buffer[at] == 84 and buffer[at + 1] == 99 and buffer[at + 2] == 112 and buffer[at + 3] == 58
        lines, word, found = lines + is_tcp, 0, 0
        while at < size and buffer[at] != 10:
            if buffer[at] == 32:
                word += 1
            elif is_tcp and word == column and 48 <= buffer[at] <= 57:
                found = found * 10 + (buffer[at] - 48)
            at += 1
        if is_tcp and lines == 2:
            return found
        at += 1
    return 0


@_jit
def _sample_ranks(page, row):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """The lowest step under way, and whether all ranks train."""
    step, num_ranks, num_training = -1, 0, 0
    for rank in range(page.size // _PAGE_WORDS):
        at = rank * _PAGE_WORDS
        if page[at + _PID_WORD] != 0:
            num_ranks += 1
            num_training += page[at + _PHASE_WORD] == _STEP_TEXT
            if num_ranks == 1 or page[at + _STEP_WORD] < step:
                step = page[at + _STEP_WORD]
    row[1], row[2] = step, num_ranks > 0 and num_ranks == num_training


@_jit
def _sample_links(row, netlink, questions, files, buffer):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    words, first = buffer.view(np.int64), _SKIP_BYTES // 8
    for link in range(questions.shape[0]):
        at = _NUM_FIRST + link * _NUM_FIELDS
        if questions[link, 0]:
            _send(netlink, questions[link].ctypes.data, questions.shape[1], 0)
            if _recv(netlink, buffer.ctypes.data, buffer.size, _DONT_WAIT) >= _SKIP_BYTES + 64:
                row[at], row[at + 1] = words[first + 2], words[first + 3]
                row[at + 2] = words[first + 4] + words[first + 5]
                row[at + 3] = words[first + 6] + words[first + 7]
        elif files[link, 0] >= 0:
            for way in range(2):
                count = _number_of(files[link, way], buffer)
                if count >= 0:
                    row[at + way] = 4 * count  # counted in words of four bytes


@_jit
def _sample_rare_files(row, rare_files, rare, ethtool, control, buffer):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Read the expensive counters. ``rare`` holds the last value of each file in ``rare_files``."""
    requests, statistics, pauses, asked = ethtool
    for link in range(rare_files.shape[0]):
        at = _NUM_FIRST + link * _NUM_FIELDS
        if rare_files[link].max() >= 0:
            row[at + 2] = row[at + 3] = row[at + 4] = 0
            for field in range(rare_files.shape[1]):
                if rare_files[link, field] >= 0:
                    column = 4 if field < 4 else 2 if field < 6 else 3
                    count = _number_of(rare_files[link, field], buffer)
                    if count >= 0:
                        rare[link, field] = count
                    row[at + column] += rare[link, field]
        if pauses[link, 0] >= 0 and _ioctl(control, SIOCETHTOOL, requests[link].ctypes.data) == 0:
            if statistics[link, 0] != asked[link]:
                continue  # the driver's counters changed, so their indices are unknown
            row[at + 5] = 0
            for column in pauses[link]:
                if column >= 0:
                    row[at + 5] += statistics[link, 1 + column]


def _run(ring, page, handles, numbers, kinds, ethtool):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Fill the ring.

    ``handles`` are the descriptors of netlink, ioctl, the idle socket and /proc/net/snmp. ``numbers`` are the
    column in the latter, the parent's id, the number of rows (-1: no limit) and the kernel's tick in us.
    """
    netlink, control, idle, snmp = handles
    column, parent, most, tick_us = numbers
    questions, files, rare_files = kinds
    buffer, words, wait = np.zeros(8192, np.uint8), np.zeros(2, np.int64), np.zeros(2, np.int64)
    rare = np.zeros(rare_files.shape, np.int64)
    columns, capacity = ring[COLUMNS_WORD], ring[CAPACITY_WORD] + 0 * _STAMP
    row, count, due = np.zeros(columns, np.int64), 0, _clock(_MONOTONIC, words)
    began_cpu = before_cpu = _clock(_THREAD_CPU, words)
    before = due
    while count != most:
        row[0] = _clock(_MONOTONIC, words)
        _sample_ranks(page, row)
        _sample_links(row, netlink, questions, files, buffer)
        if count % _RARELY == 0:
            _sample_rare_files(row, rare_files, rare, ethtool, control, buffer)
            if snmp >= 0 and column >= 0:
                row[3] = _tcp_sent_again(snmp, column, buffer)
        first = HEADER_BYTES // 8 + count % capacity * columns
        ring[first : first + columns] = row
        count += 1
        ring[WRITTEN_WORD] = count
        if count % _PARENT_LOOK == 0:
            cpu, now = _clock(_THREAD_CPU, words), _clock(_MONOTONIC, words)
            ring[CPU_WORD] = cpu - began_cpu
            if _getppid() != parent:
                return
            if count % _CHECK_ROWS == 0:
                too_much = cpu - before_cpu > _MOST_SHARE * (now - before)
                if too_much and ring[INTERVAL_WORD] < _SLOWEST_NS:
                    ring[INTERVAL_WORD] *= 2
                before_cpu, before = cpu, now
        due, now = due + ring[INTERVAL_WORD], _clock(_MONOTONIC, words)
        due = max(due, now - ring[INTERVAL_WORD])  # skip missed rows
        if due > now:
            wait[1] = max(1, (due - now) // 1000 - tick_us)  # the kernel waits one tick longer
            _setsockopt(idle, _SOL_SOCKET, _SO_RCVTIMEO, wait.ctypes.data, 16)
            _recv(idle, buffer.ctypes.data, 1, 0)


_run = _jit(_run, keep=True)


def main(arguments: Sequence[str]) -> int:
    """Run the sampler process that a node agent starts, and return its exit status."""
    ring, page, num_rows, parent, *links = arguments
    sample(int(ring), int(page), int(num_rows), links, parent=int(parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
