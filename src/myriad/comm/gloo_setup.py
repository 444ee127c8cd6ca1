"""What a gloo group needs while it is made: a rendezvous store, its connections, the priority of its thread.

`GlooStore` answers gloo's requests with one request per group.

To connect to n peers, gloo waits for and then gets one key of each: 3 n round trips, and n^2 values in all
for the world. Here the first requested key fetches the keys of every peer that this rank will connect to. In
a small group these are all members. In a large one they are those that rings, trees and barriers use (ranks a
power of two away). So one rank's start costs two requests per group, however many ranks there are.

A timeout error names the ranks that did not join.

`low_priority_gloo_threads` keeps gloo's socket thread from preempting the thread that it would wait for. On a
dedicated core that does no harm. On a core that it shares with the sending thread, the kernel prefers a
thread that wakes over one that has computed for long. When a peer's message wakes gloo's thread, it polls a
lock that the preempted sender holds. It does so until its time slice is over: many times as long as the
transfer takes. A thread with the policy ``SCHED_BATCH`` preempts no other thread when it wakes (sched(7)),
and one with less weight polls only briefly. ``SCHED_IDLE`` would be slightly faster, but starve if other work
takes all cores.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from myriad.errors import RunFailedError

__all__ = ["MESH_RANKS", "GlooStore", "connecting", "low_priority_gloo_threads", "partners"]

MESH_RANKS = 32
"""Largest group whose ranks are all connected to each other when it is made."""
_LAZY = "TORCH_GLOO_LAZY_INIT"


def partners(index: int, size: int) -> tuple[int, ...]:
    """Return the members of a group whose addresses member ``index`` fetches at once: all, or those a
    power of two away."""
    if size <= MESH_RANKS:
        return tuple(range(size))
    steps = [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
    around = {(index + step) % size for step in steps} | {(index - step) % size for step in steps}
    return tuple(sorted(around | {index ^ step for step in steps if index ^ step < size}))


@dataclass(frozen=True)
class _GroupSetup:
    """A group being made: its members' ranks, this rank's index among them, and its name in errors."""

    name: str
    ranks: Sequence[int]
    index: int


class GlooStore(Store):
    """A store for gloo in front of another store."""

    timeout: timedelta
    """The attribute of torch's store, which its type hints lack."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.set_timeout(inner.timeout)
        self._inner = inner  # a Store; its type hints lack half of its methods
        self._making: _GroupSetup | None = None
        self._setups: dict[str, _GroupSetup] = {}
        self._known: dict[str, bytes] = {}

    @contextlib.contextmanager
    def making_group(self, name: str, ranks: Sequence[int], index: int) -> Iterator[None]:
        """Make a group of these ranks inside the block; this rank is the ``index``-th."""
        self._making = _GroupSetup(name, ranks, index)
        try:
            yield
        finally:
            self._making = None

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value. A member's own address also shows the prefix of the other members' keys."""
        prefix, _, member = key.rpartition("/")
        if self._making is not None and member == str(self._making.index):
            self._setups[prefix] = self._making
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Read a value. For a group's address, fetch all addresses that will be needed."""
        if key not in self._known:
            prefix, _, member = key.rpartition("/")
            setup = self._setups.get(prefix)
            if setup is None:
                return self._inner.get(key)
            wanted = partners(setup.index, len(setup.ranks))
            members = wanted if int(member) in wanted else (int(member),)
            self._known |= self._addresses(setup, prefix, members)
        return self._known[key]

    def _addresses(self, setup: _GroupSetup, prefix: str, members: Sequence[int]) -> dict[str, bytes]:
        keys = [f"{prefix}/{member}" for member in members]
        who = f"rank {setup.ranks[setup.index]} waited"
        try:
            return dict(zip(keys, self._inner.multi_get(keys), strict=True))
        except dist.DistNetworkError:
            raise RunFailedError(f"connection to the store was closed while {who} for {setup.name}") from None
        except dist.DistStoreError:
            absent = [
                str(setup.ranks[m]) for m, key in zip(members, keys, strict=True) if not self.check([key])
            ]
            missing = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
            seconds = self.timeout.total_seconds()
            raise RunFailedError(f"{who} {seconds:g} s for {missing} to join {setup.name}") from None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist."""
        others = [key for key in keys if key.rpartition("/")[0] not in self._setups]
        for key in set(keys).difference(others):
            self.get(key)
        if others:
            self._inner.wait(others, timeout or self.timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write the values of several keys."""
        self._inner.multi_set(keys, values)

    def add(self, key: str, value: int) -> int:
        """Add to a number, and return the sum."""
        return self._inner.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value."""
        self._inner.append(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``."""
        return self._inner.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._inner.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which torch calls them

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are available."""
        return True

    def clone(self) -> "GlooStore":
        """Return this store itself, because torch would keep only the C++ half of a new one."""
        return self


@contextlib.contextmanager
def connecting(*, lazily: bool) -> Iterator[None]:
    """Make the gloo groups inside the block connect to a peer at its first use (``lazily``), or to all at
    once.

    gloo prints a line for each group, which for a large group lists every rank. The block keeps it out of the
    rank's log.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1" if lazily else "0"
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
        os.environ.pop(_LAZY)
        if before is not None:
            os.environ[_LAZY] = before


_TASKS = Path("/proc/self/task")
_WORKER = "pt_gloo_runloop"
"""Name of torch's threads, which send; a group has two of them beside gloo's own thread."""
_NUM_WORKERS, _THREAD_START_SECONDS = 2, 0.1
_NICER = 10
"""Added nice value: a tenth of a normal thread's weight."""


@contextmanager
def low_priority_gloo_threads() -> Iterator[None]:
    """Give the gloo thread of the group that is made inside the block a lower priority. Does nothing if
    the kernel has no such policy."""
    if not hasattr(os, "SCHED_BATCH") or not _TASKS.is_dir():
        yield
        return
    before = _threads()
    yield
    deadline = time.monotonic() + _THREAD_START_SECONDS
    while _num_workers(made := _threads() - before) < _NUM_WORKERS and time.monotonic() < deadline:
        time.sleep(1e-4)  # a thread sets its name when it first runs
    for thread in made:
        if _name(thread) != _WORKER:
            _lower_priority(thread)


def _threads() -> set[int]:
    return {int(entry.name) for entry in _TASKS.iterdir()}


def _num_workers(threads: set[int]) -> int:
    return sum(_name(thread) == _WORKER for thread in threads)


def _name(thread: int) -> str:
    with suppress(OSError):  # the thread has ended
        return (_TASKS / str(thread) / "comm").read_text().strip()
    return ""


def _lower_priority(thread: int) -> None:
    with suppress(OSError):  # the thread has ended
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
