"""Where ranks meet, as the job says it. No torch here: checked before anything starts."""

import importlib.util
from dataclasses import dataclass
from urllib.parse import urlsplit

from myriad.comm.config import CommConfig
from myriad.errors import BadInputError

__all__ = ["RedisAddress", "check_store", "redis_address"]

_ALLOWED = "tcp, or redis://HOST:PORT[/DB]"


@dataclass(frozen=True)
class RedisAddress:
    """One database of a Redis server."""

    host: str
    port: int
    database: int = 0

    def __str__(self) -> str:
        """As an error names it."""
        return f"Redis at {self.host}:{self.port}"


def redis_address(store: str) -> RedisAddress | None:
    """The server that ``comm.store`` names; None: rank 0 serves. Raises `BadInputError`."""
    if store == "tcp":
        return None
    try:
        parts = urlsplit(store)
        host, port, database = parts.hostname, parts.port, parts.path.removeprefix("/")
    except ValueError:
        raise BadInputError("comm.store", store, _ALLOWED) from None
    extra = parts.query or parts.fragment or "@" in parts.netloc
    known = parts.scheme == "redis" and host and port and not extra
    if not known or not (database == "" or (database.isascii() and database.isdigit())):
        raise BadInputError("comm.store", store, _ALLOWED)
    assert host and port
    return RedisAddress(host, port, int(database or 0))


def check_store(comm: CommConfig) -> None:
    """Refuses a store that cannot be, or that needs a package which is not installed."""
    if redis_address(comm.store) is not None and importlib.util.find_spec("redis") is None:
        allowed = "needs the package redis (pip install 'myriad[redis]'); or tcp"
        raise BadInputError("comm.store", comm.store, allowed)
