"""The rendezvous store of one attempt: served by rank 0 (torch's TCPStore) or by a Redis server.

A rank waits for rank 0's port with frequent, cheap connection attempts. torch's own client, refused once,
sleeps for up to a second, and resolves names each time.

torch's server listens on every address of the machine, and asks nobody for proof. Here it listens only on the
address that the ranks use: on one machine that is the loopback.
"""

import errno
import os
import random
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from myriad.comm.config import CommConfig
from myriad.comm.redis_address import check_store, redis_address
from myriad.errors import BadInputError, RunFailedError

__all__ = ["attempt_name", "open_store"]

_BACKLOG = 2048
"""Connections that may wait; torch's own value."""
_TORCHRUN_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable with which torchrun says that its agent serves the store."""


def open_store(comm: CommConfig, rank: int, world: int) -> Store:
    """Connect this rank to the store that ``comm.store`` names. Raises `RunFailedError`."""
    check_store(comm)
    address, timeout = redis_address(comm.store), timedelta(seconds=comm.timeout_seconds)
    if address is None:
        return _open_tcp(rank, world, timeout)
    from myriad.comm.redis_store import RedisStore

    return RedisStore(address, attempt_name(os.environ, comm.store), timeout)


def _open_tcp(rank: int, world: int, timeout: timedelta) -> Store:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    served = f"the store of rank 0 at {host}:{port}"
    if rank > 0 and port.isdigit():
        _await_port(host, int(port), timeout.total_seconds(), f"rank {rank} waited for {served}")
    try:
        if rank == 0 and port.isdigit() and os.environ.get(_TORCHRUN_SERVES) != str(True):
            store: Store = _serve(host, int(port), world, timeout)
        else:
            store = next(rendezvous("env://", rank, world, timeout=timeout))[0]
    except OSError as error:
        raise RunFailedError(f"rank {rank}: {served}: {error.strerror or error}") from None
    except (dist.DistError, RuntimeError) as error:
        raise RunFailedError(f"rank {rank}: {served}: {_first_line(error)}") from None
    store.set_timeout(timeout)
    return store


def _serve(host: str, port: int, world: int, timeout: timedelta) -> TCPStore:
    """Serve the store in this process. Raises `OSError` if the address cannot be listened on."""
    listener = _listen(host, port, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))) == world)
    address, port = listener.getsockname()[0], listener.getsockname()[1]
    name = host if ip_address(address).is_unspecified else address
    return TCPStore(name, port, world, True, timeout, master_listen_fd=listener.detach())


def _listen(host: str, port: int, is_one_machine: bool) -> socket.socket:
    """Listen on the address that ``host`` names. It is every address where other machines know another one
    under that name: for a name of the loopback (Debian gives a host's own name 127.0.1.1), and for an address
    that this machine does not have."""
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if is_one_machine or not ip_address(address).is_loopback:
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    every = "::" if family == socket.AF_INET6 else ""
    return socket.create_server((every, port), family=family, backlog=_BACKLOG)


def _await_port(host: str, port: int, timeout_seconds: float, waited: str) -> None:
    deadline, delay = time.monotonic() + timeout_seconds, 0.005
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, timeout_seconds)).close()
            return
        except OSError as error:
            if time.monotonic() + delay > deadline:
                raise RunFailedError(f"{waited} for {timeout_seconds:g} s: {error}") from None
        time.sleep(delay * (0.5 + random.random()))
        delay = min(1.5 * delay, 0.5)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def attempt_name(environment: Mapping[str, str], store: str) -> str:
    """Return a name that all ranks of this attempt share and no other attempt has. Raises `BadInputError`."""
    own = environment.get("MYRIAD_ATTEMPT_ID")
    if own:
        return own
    elastic = environment.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return f"{elastic}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "SLURM_JOB_ID" in environment:
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm." + ".".join(environment.get(part, "0") for part in parts)
    raise BadInputError(
        "comm.store",
        store,
        "Redis needs a name for this attempt that its ranks share: set MYRIAD_ATTEMPT_ID"
        " (`myriad train`, torchrun --rdzv-id and Slurm give one)",
    )
