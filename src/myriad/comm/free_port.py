"""A port for whoever listens a moment later, in another process.

The kernel gives ports from ``ip_local_port_range`` (32768 on) to whoever asks for any: each group of ranks
does, for each pair of them. One that was asked for so and given back may be somebody else's a moment later.
So it is one below those, at random, that nobody listens on: only who wants this very number gets it. Not
29500 (torchrun's) nor 30000 to 32767 (what Kubernetes publishes services at, by its reference for NodePort).
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port"]

_FIRST, _END = 20_000, 29_500
_TRIES = 20
_GIVEN_TO_ALL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHOICE = random.SystemRandom()
"""Not the program's: what it draws shall not depend on how often a port was asked for."""


def free_port(host: str = "127.0.0.1") -> int:
    """At this address of this machine. Raises ``OSError`` when it has no such address."""
    ports = range(_FIRST, min(_END, _first_given()))
    for port in _CHOICE.sample(ports, min(_TRIES, len(ports))):
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
        return found


def _first_given() -> int:
    try:
        return int(_GIVEN_TO_ALL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST
