"""Limits on unauthenticated connections to a listener: how many there may be, and for how long.

    accepted ──► pending ──proof within 5 s──► admitted, no longer counted
                    ├── no proof by then ──► closed by the thread that serves the connection
                    └── too many are pending ──► the oldest of the address with the most is closed

A peer with the secret proves it within a round trip, so it is almost never the oldest of thousands.
A new connection is therefore never refused in favour of an old one: nodes can connect during a flood.
"""

import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress

__all__ = ["AUTHENTICATION_SECONDS", "PendingConnections"]

AUTHENTICATION_SECONDS = 5.0
"""Time within which a new connection must prove that it has the secret."""
_MOST, _MOST_OF_AN_ADDRESS = 4096, 2048
"""With a new driver all nodes of a large run connect at once; in rehearsals, from one address."""


_SHARE = 4
"""Part of the files that this process can open which unauthenticated connections may take."""


def _most_by_files() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files // _SHARE


class PendingConnections:
    """Unauthenticated connections of one listener. Thread-safe."""

    def __init__(self, most: int | None = None, most_of_an_address: int | None = None) -> None:
        """``None``: limits that follow from the number of files that this process may open."""
        share = _most_by_files()
        self._most = min(_MOST, share) if most is None else most
        self._most_of_an_address = (
            min(_MOST_OF_AN_ADDRESS, share // 2) if most_of_an_address is None else most_of_an_address
        )
        self._lock = threading.Lock()
        self._pending: dict[Hashable, tuple[str, Callable[[], object]]] = {}
        """Address and close function of each pending connection, oldest first."""
        self._of_address: Counter[str] = Counter()
        self.num_closed = 0
        """Number of connections closed to make room for newer ones."""

    def admit(self, key: Hashable, address: str, close: Callable[[], object]) -> None:
        """Add a new connection. This may close another one by calling its ``close``."""
        with self._lock:
            self._pending[key] = address, close
            self._of_address[address] += 1
            victim = self._victim(address)
        if victim is not None:
            self.num_closed += 1
            with suppress(OSError):
                victim()

    def _victim(self, newest: str) -> Callable[[], object] | None:
        """Remove and return the connection to close, if there are too many. The caller holds the lock."""
        if self._of_address[newest] > self._most_of_an_address:
            address = newest
        elif len(self._pending) > self._most:
            address = self._of_address.most_common(1)[0][0]
        else:
            return None
        key = next(key for key, (of, _) in self._pending.items() if of == address)
        return self._remove(key)

    def _remove(self, key: Hashable) -> Callable[[], object] | None:
        found = self._pending.pop(key, None)
        if found is None:
            return None
        self._of_address[found[0]] -= 1
        if not self._of_address[found[0]]:
            del self._of_address[found[0]]
        return found[1]

    def leave(self, key: Hashable) -> None:
        """Remove a connection that has authenticated or ended."""
        with self._lock:
            self._remove(key)
