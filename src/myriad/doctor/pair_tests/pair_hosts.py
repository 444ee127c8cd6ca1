"""The nodes of a pairwise test: their addresses, which one is this node, and their shared secret."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from myriad.errors import BadInputError

__all__ = [
    "DEFAULT_PORT",
    "SECRET_VARIABLE",
    "PairHost",
    "check_listening",
    "find_self",
    "read_nodes",
    "read_secret",
]

DEFAULT_PORT = 29_517
SECRET_VARIABLE = "MYRIAD_DOCTOR_SECRET"
_LEAST_SECRET, _MOST_NODES = 16, 2**14


@dataclass(frozen=True)
class PairHost:
    """Address of a node. The first node listens there for all nodes, the others for their partner in a
    test."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return self.host if self.port == DEFAULT_PORT else f"{self.host}:{self.port}"


def read_nodes(text: str) -> list[PairHost]:
    """Parse hosts separated by commas, or a file with one host a line, each with an optional port. Raises
    `BadInputError`."""
    path = Path(text)
    with suppress(OSError, ValueError):
        if path.is_file():
            text = ",".join(line.partition("#")[0] for line in path.read_text().splitlines())
    nodes = [_read_node(part.strip()) for part in text.split(",") if part.strip()]
    if not 2 <= len(nodes) <= _MOST_NODES:
        raise BadInputError(
            "--cluster", text, f"2 to {_MOST_NODES} comma-separated hosts, or a file with one per line"
        )
    if len(set(nodes)) < len(nodes):
        raise BadInputError("--cluster", text, "each host once")
    return nodes


def _read_node(text: str) -> PairHost:
    found = re.fullmatch(r"([\w.-]+)(?::(\d{1,5}))?", text, re.ASCII)
    if found is None or int(found[2] or 1) not in range(1, 2**16):
        raise BadInputError("--cluster", text, "a host name or IPv4 address, with :PORT or without")
    return PairHost(found[1], int(found[2] or DEFAULT_PORT))


def find_self(nodes: Sequence[PairHost], named: str | None = None) -> int:
    """Return the index of the node with an address of this machine, or of the node ``named``. Raises
    `BadInputError` if there is none or several."""
    if named is not None:
        found = [index for index, node in enumerate(nodes) if named in (str(node), node.host)]
        if len(found) != 1:
            raise BadInputError("--node", named, f"one of {', '.join(map(str, nodes[:8]))}")
        return found[0]
    mine = [index for index, node in enumerate(nodes) if _is_here(node.host)]
    if len(mine) != 1:
        why = "none of them is this node" if not mine else "several of them are this node"
        raise BadInputError("--cluster", ",".join(map(str, nodes[:8])), f"{why}: select one with --node")
    return mine[0]


def check_listening(node: PairHost) -> None:
    """Check that this node can listen on its address. Raises `BadInputError`."""
    try:
        socket.create_server((node.host, node.port)).close()
    except OSError as error:
        raise BadInputError("--cluster", str(node), f"cannot be used to listen: {error.strerror}") from None


def _is_here(host: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def read_secret(path: Path | None, environment: Mapping[str, str] = os.environ) -> bytes:
    """Read the secret from a file or the environment; never from the command line, which other users can
    read. Raises `BadInputError`."""
    key = "--secret-file" if path is not None else SECRET_VARIABLE
    try:
        text = path.read_text().strip() if path is not None else environment.get(SECRET_VARIABLE, "")
    except (OSError, ValueError) as error:
        raise BadInputError(key, str(path), f"cannot be read: {error}") from None
    if len(text) < _LEAST_SECRET:
        allowed = f"a secret of {_LEAST_SECRET} characters or more, the same on all nodes"
        raise BadInputError(
            key, "not shown" if text else "", f"{allowed} (--secret-file, or {SECRET_VARIABLE})"
        )
    return text.encode()
