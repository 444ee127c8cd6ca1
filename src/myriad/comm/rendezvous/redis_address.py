"""Parse the Redis address in a job key. This module does not import torch: it runs before anything starts.

comm.store           tcp, or redis[s]://[USER@]HOST:PORT[/DB]
resilience.journal   file, or the same
rediss               TLS; the server's certificate must be valid for HOST

A job is stored in plain files and shown on a page, so it holds no password. Each process of a run reads these
environment variables instead:

MYRIAD_REDIS_PASSWORD   password of USER, or of the server's default user
MYRIAD_REDIS_CA         file with the certificates that sign the server's; default: those of the system
"""

import importlib.util
import os
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

from myriad.comm.config import CommConfig
from myriad.errors import BadInputError

__all__ = ["RedisAddress", "check_package", "check_store", "exposure", "redis_address"]

_PASSWORD, _CERTIFICATES = "MYRIAD_REDIS_PASSWORD", "MYRIAD_REDIS_CA"
_FORM = "redis[s]://[USER@]HOST:PORT[/DB]"


@dataclass(frozen=True)
class RedisAddress:
    """The address of one database of a Redis server."""

    host: str
    port: int
    database: int = 0
    user: str | None = None
    encrypts: bool = False
    """Whether the connection uses TLS."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``redis.Redis`` that lead to the server, with the password and the
        certificates that the environment names."""
        found: dict[str, Any] = {"host": self.host, "port": self.port, "db": self.database}
        if password := os.environ.get(_PASSWORD):
            found |= {"username": self.user, "password": password}
        if self.encrypts:
            found |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
            found |= {"ssl_ca_certs": os.environ.get(_CERTIFICATES) or None}
        return found

    def __str__(self) -> str:
        """Return the name of the server for errors."""
        return f"Redis at {self.host}:{self.port}"


def redis_address(text: str, key: str = "comm.store", own: str = "tcp") -> RedisAddress | None:
    """Return the server that the ``key`` of a job names, or None for ``own``, which needs no server. Raises
    `BadInputError`."""
    if text == own:
        return None
    refused = BadInputError(key, _without_password(text), f"{own}, or {_FORM}")
    try:
        parts = urlsplit(text)
        host, port, database = parts.hostname, parts.port, parts.path.removeprefix("/")
    except ValueError:
        raise refused from None
    if parts.password is not None:
        raise BadInputError(key, _without_password(text), f"{_FORM}; set the password in {_PASSWORD}")
    extra = parts.query or parts.fragment
    known = parts.scheme in ("redis", "rediss") and host and port and parts.username != "" and not extra
    if not known or not (database == "" or (database.isascii() and database.isdigit())):
        raise refused
    assert host and port
    user = None if parts.username is None else unquote(parts.username)
    return RedisAddress(host, port, int(database or 0), user, encrypts=parts.scheme == "rediss")


def _without_password(text: str) -> str:
    """Return the address without what may be a password, for an error."""
    account, at, server = text.rpartition("@")
    return f"{account.rpartition(':')[0]}:...@{server}" if at and account.count(":") > 1 else text


def check_package(text: str, key: str = "comm.store", own: str = "tcp") -> None:
    """Refuse an invalid address, one that needs a package that is not installed, or certificates that cannot
    be read."""
    address = redis_address(text, key, own)
    if address is not None and importlib.util.find_spec("redis") is None:
        raise BadInputError(
            key, text, f"needs the package redis (pip install 'myriad-train[redis]'); or {own}"
        )
    path = os.environ.get(_CERTIFICATES)
    if address is not None and address.encrypts and path and not os.access(path, os.R_OK):
        raise BadInputError(_CERTIFICATES, path, "a readable file of certificates")


def exposure(text: str, key: str = "comm.store", own: str = "tcp") -> str:
    """Return in a line what others can do to a Redis server across a network; "" if it is protected, or on
    this machine. Whoever can write to it can take the place of a driver or of a rank."""
    address = redis_address(text, key, own)
    if address is None or _is_loopback(address.host):
        return ""
    if not os.environ.get(_PASSWORD):
        return f"{key} = {text}: Redis without a password ({_PASSWORD}): who reaches it can drive the run"
    if not address.encrypts:
        return f"{key} = {text}: the password of Redis crosses the network in clear: use rediss://"
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_store(comm: CommConfig) -> None:
    """Refuse an invalid ``comm.store``, or one that needs a package that is not installed."""
    check_package(comm.store)
