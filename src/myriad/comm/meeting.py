"""What gloo asks of a store while it connects, answered with one request a group.

To connect to n peers, gloo waits for and then gets one key of each: 3 n round trips, and n^2 values in all
for the world. Here the first key asked for brings those of every peer that this rank will talk to: all of
them in a small group, in a large one those that rings, trees and barriers use (ranks a power of two away).
So one rank's start costs two requests a group, however many ranks there are.

Whoever waits in vain learns which ranks did not come.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from myriad.errors import RunFailedError

__all__ = ["MESH_RANKS", "MeetingStore", "connecting", "partners"]

MESH_RANKS = 32
"""Up to this size a group's ranks are all connected to each other when it is made."""
_LAZY = "TORCH_GLOO_LAZY_INIT"


def partners(index: int, size: int) -> tuple[int, ...]:
    """Members of a group whose addresses member ``index`` gets at once: all, or those a power of two away."""
    if size <= MESH_RANKS:
        return tuple(range(size))
    steps = [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
    around = {(index + step) % size for step in steps} | {(index - step) % size for step in steps}
    return tuple(sorted(around | {index ^ step for step in steps if index ^ step < size}))


@dataclass(frozen=True)
class _Meeting:
    """A group being made: its members' ranks, which of them this is, and how an error names it."""

    name: str
    ranks: Sequence[int]
    index: int


class MeetingStore(Store):
    """A store in front of another one, for gloo."""

    timeout: timedelta
    """torch's own; missing in its type hints."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.set_timeout(inner.timeout)
        self._inner = inner  # a Store; its type hints lack half of its methods
        self._making: _Meeting | None = None
        self._meetings: dict[str, _Meeting] = {}
        self._known: dict[str, bytes] = {}

    @contextlib.contextmanager
    def meeting(self, name: str, ranks: Sequence[int], index: int) -> Iterator[None]:
        """Inside, a group of these ranks is made; this one is the ``index``-th."""
        self._making = _Meeting(name, ranks, index)
        try:
            yield
        finally:
            self._making = None

    def set(self, key: str, value: str | bytes) -> None:
        """Writes; a member's own address also says under which keys the others' are found."""
        prefix, _, member = key.rpartition("/")
        if self._making is not None and member == str(self._making.index):
            self._meetings[prefix] = self._making
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Reads; of a group's addresses, all that will be needed."""
        if key not in self._known:
            prefix, _, member = key.rpartition("/")
            meeting = self._meetings.get(prefix)
            if meeting is None:
                return self._inner.get(key)
            wanted = partners(meeting.index, len(meeting.ranks))
            members = wanted if int(member) in wanted else (int(member),)
            self._known |= self._addresses(meeting, prefix, members)
        return self._known[key]

    def _addresses(self, meeting: _Meeting, prefix: str, members: Sequence[int]) -> dict[str, bytes]:
        keys = [f"{prefix}/{member}" for member in members]
        who = f"rank {meeting.ranks[meeting.index]} waited"
        try:
            return dict(zip(keys, self._inner.multi_get(keys), strict=True))
        except dist.DistNetworkError:
            raise RunFailedError(
                f"connection to the store was closed while {who} for {meeting.name}"
            ) from None
        except dist.DistStoreError:
            absent = [
                str(meeting.ranks[m]) for m, key in zip(members, keys, strict=True) if not self.check([key])
            ]
            for_whom = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
            seconds = self.timeout.total_seconds()
            raise RunFailedError(f"{who} {seconds:g} s for {for_whom} to join {meeting.name}") from None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there."""
        others = [key for key in keys if key.rpartition("/")[0] not in self._meetings]
        for key in set(keys).difference(others):
            self.get(key)
        if others:
            self._inner.wait(others, timeout or self.timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Reads several."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Writes several."""
        self._inner.multi_set(keys, values)

    def add(self, key: str, value: int) -> int:
        """Adds to a number; gives the sum."""
        return self._inner.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Adds bytes at the end of a value."""
        self._inner.append(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes ``desired`` if the value is ``expected``."""
        return self._inner.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._inner.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which torch calls them

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def clone(self) -> "MeetingStore":
        """Itself: of a new one torch would keep the C++ half alone."""
        return self


@contextlib.contextmanager
def connecting(*, lazily: bool) -> Iterator[None]:
    """Inside, gloo groups are made that connect to a peer when they first talk to it, or to all at once.

    gloo prints a line for each group, which for a large one names every rank: not into the rank's log.
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
