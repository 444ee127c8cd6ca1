"""The rendezvous store of one attempt: served by rank 0 or by a Redis server.

torch's TCPStore listens on every address of the machine and accepts connections without proof, so that a
stranger could replace a rank's address by its own. Rank 0 therefore serves a store of its own
(`myriad.comm.rendezvous.store_server`), whose clients prove that they have the attempt's secret
(`myriad.comm.rendezvous.store_secret`). It listens only on the address that the ranks use: on one machine
that is the loopback.
"""

import errno
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from myriad.comm.config import CommConfig
from myriad.comm.rendezvous.attempt_store import AttemptStore
from myriad.comm.rendezvous.redis_address import check_store, redis_address
from myriad.comm.rendezvous.store_secret import STORE_SECRET, store_secret
from myriad.comm.rendezvous.store_server import StoreServer
from myriad.errors import BadInputError, RunFailedError
from myriad.wire.run_secret import SECRET_FILE

__all__ = ["attempt_name", "open_at", "open_store"]

_BACKLOG = 2048
"""Connections that may wait; torch's own value."""
_MOST_NAMED = 8
_TORCHRUN_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable with which torchrun says that its agent serves the store."""
_PORT_KEY = "myriad/port of rank 0's store"


def open_store(comm: CommConfig, rank: int, world: int) -> Store:
    """Connect this rank to the store that ``comm.store`` names. Raises `RunFailedError`, `BadInputError`."""
    check_store(comm)
    address, timeout = redis_address(comm.store), timedelta(seconds=comm.timeout_seconds)
    if address is None:
        return _open_own(rank, world, timeout)
    from myriad.comm.rendezvous.redis_store import RedisStore

    return RedisStore(address, attempt_name(os.environ, comm.store), timeout)


def _open_own(rank: int, world: int, timeout: timedelta) -> Store:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdigit()):
        raise RunFailedError(
            f"rank {rank}: MASTER_ADDR = {host!r}, MASTER_PORT = {port!r}: a host and a port"
        )
    if os.environ.get(_TORCHRUN_SERVES) == str(True):
        return _open_beside_torchrun(rank, world, timeout)
    is_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", str(world))) == world
    return open_at(host, int(port), rank, world, timeout, store_secret(), is_one_machine=is_one_machine)


def open_at(
    host: str,
    port: int,
    rank: int,
    world: int,
    timeout: timedelta,
    secret: bytes,
    *,
    is_one_machine: bool = False,
    publish: Callable[[int], None] = lambda port: None,
) -> AttemptStore:
    """Connect to the store that rank 0 serves at an address; rank 0 serves it, and waits for all ranks.

    ``is_one_machine``: no rank is on another machine. ``publish``: rank 0 calls it with the port on which it
    listens. Raises `RunFailedError`."""
    served = f"the store of rank 0 at {host}:{port}"
    if rank > 0:
        return AttemptStore((host, port), secret, rank, timeout)
    try:
        listener = _listen(host, port, is_one_machine)
    except OSError as error:
        raise RunFailedError(f"rank {rank}: {served}: {error.strerror or error}") from None
    server = StoreServer(listener, secret)
    publish(server.address[1])
    store = AttemptStore(_reachable(server.address, host), secret, rank, timeout, server)
    if missing := server.wait_for_ranks(world, timeout.total_seconds()):
        store.close()
        more = ", ..." if len(missing) > _MOST_NAMED else ""
        named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:_MOST_NAMED]))}{more}"
        seconds = timeout.total_seconds()
        raise RunFailedError(f"rank 0: {served}: timed out after {seconds:g} s: {named} did not connect")
    return store


def _reachable(address: tuple[str, int], host: str) -> tuple[str, int]:
    """Return an address at which this process reaches its own server."""
    if not ip_address(address[0]).is_unspecified:
        return address
    return ("::1" if ":" in address[0] else "127.0.0.1"), address[1]


def _open_beside_torchrun(rank: int, world: int, timeout: timedelta) -> Store:
    """Return torchrun's own store, which accepts connections without proof, or the store that rank 0 serves.

    Rank 0 serves one if the ranks have a secret: on one machine always, on several if one was given. Its port
    is written into torchrun's store. Who changes that cannot take rank 0's place without the secret."""
    agent = _torchrun_store(rank, world, timeout)
    is_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world
    if not (is_one_machine or os.environ.get(SECRET_FILE) or os.environ.get(STORE_SECRET)):
        return agent
    host, secret = os.environ["MASTER_ADDR"], store_secret()
    if rank > 0:
        port = agent.get(_PORT_KEY).decode()
        if not port.isdigit():
            raise RunFailedError(f"rank {rank}: torchrun's store has {port!r} as the port of rank 0's")
        return open_at(host, int(port), rank, world, timeout, secret)
    return open_at(
        host,
        0,
        rank,
        world,
        timeout,
        secret,
        is_one_machine=is_one_machine,
        publish=lambda port: agent.set(_PORT_KEY, str(port)),
    )


def _torchrun_store(rank: int, world: int, timeout: timedelta) -> Store:
    served = f"torchrun's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store: Store = next(rendezvous("env://", rank, world, timeout=timeout))[0]
    except OSError as error:
        raise RunFailedError(f"rank {rank}: {served}: {error.strerror or error}") from None
    except (dist.DistError, RuntimeError) as error:
        raise RunFailedError(f"rank {rank}: {served}: {_first_line(error)}") from None
    store.set_timeout(timeout)
    return store


def _listen(host: str, port: int, is_one_machine: bool) -> socket.socket:
    """Listen on the address that ``host`` names. It is every address where other machines know another one
    under that name: for a name of the loopback (Debian gives a host's own name 127.0.1.1), and for an address
    that this machine does not have."""
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_address = address == host  # not a name: other machines could not reach a loopback address
    if is_one_machine or is_address or not ip_address(address).is_loopback:
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    every = "::" if family == socket.AF_INET6 else ""
    return socket.create_server((every, port), family=family, backlog=_BACKLOG)


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
