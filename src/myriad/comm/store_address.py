"""Which Redis server a key of the job names, if any. No torch here: checked before anything starts.

comm.store           tcp, or redis://HOST:PORT[/DB]
resilience.journal   file, or redis://HOST:PORT[/DB]
"""

import importlib.util
from dataclasses import dataclass
from urllib.parse import urlsplit

from myriad.comm.config import CommConfig
from myriad.errors import BadInputError

__all__ = ["RedisAddress", "check_package", "check_store", "redis_address"]


@dataclass(frozen=True)
class RedisAddress:
    """One database of a Redis server."""

    host: str
    port: int
    database: int = 0

    def __str__(self) -> str:
        """As an error names it."""
        return f"Redis at {self.host}:{self.port}"


def redis_address(text: str, key: str = "comm.store", own: str = "tcp") -> RedisAddress | None:
    """The server that the ``key`` of a job names; None for ``own``: none is needed. Raises
    `BadInputError`."""
    if text == own:
        return None
    refused = BadInputError(key, text, f"{own}, or redis://HOST:PORT[/DB]")
    try:
        parts = urlsplit(text)
        host, port, database = parts.hostname, parts.port, parts.path.removeprefix("/")
    except ValueError:
        raise refused from None
    extra = parts.query or parts.fragment or "@" in parts.netloc
    known = parts.scheme == "redis" and host and port and not extra
    if not known or not (database == "" or (database.isascii() and database.isdigit())):
        raise refused
    assert host and port
    return RedisAddress(host, port, int(database or 0))


def check_package(text: str, key: str = "comm.store", own: str = "tcp") -> None:
    """Refuses a server that cannot be, or that needs a package which is not installed."""
    if redis_address(text, key, own) is not None and importlib.util.find_spec("redis") is None:
        raise BadInputError(key, text, f"needs the package redis (pip install 'myriad[redis]'); or {own}")


def check_store(comm: CommConfig) -> None:
    """The same, of where ranks meet."""
    check_package(comm.store)
