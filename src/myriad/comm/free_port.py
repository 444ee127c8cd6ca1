"""Find a port for a server that another process starts a moment later.

The kernel assigns ports from ``ip_local_port_range`` (32768 on) to any process that asks for an arbitrary
one. Each group of ranks does so, for each pair of its ranks. A port that was assigned so and released may
belong to another process a moment later. This module therefore picks a random free port below that range,
which only a process that asks for this number gets. It avoids 29500 (torchrun's) and 30000 to 32767 (what
Kubernetes publishes services at, by its reference for NodePort).
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port"]

_FIRST, _END = 20_000, 29_500
_TRIES = 20
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHOICE = random.SystemRandom()
"""A generator separate from the program's, so that the number of requested ports does not change its
random numbers."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port at this address of this machine. Raises ``OSError`` when the address does not
    exist."""
    ports = range(_FIRST, min(_END, _first_ephemeral()))
    for port in _CHOICE.sample(ports, min(_TRIES, len(ports))):
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
        return found


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST
