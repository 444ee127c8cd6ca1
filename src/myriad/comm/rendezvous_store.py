"""The rendezvous store of one attempt: served by rank 0 (torch's TCPStore) or by a Redis server.

A rank waits for rank 0's port with frequent, cheap connection attempts. torch's own client, refused once,
sleeps for up to a second, and resolves names each time.
"""

import os
import random
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from myriad.comm.config import CommConfig
from myriad.comm.redis_address import check_store, redis_address
from myriad.errors import BadInputError, RunFailedError

__all__ = ["attempt_name", "open_store"]


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
        store: Store = next(rendezvous("env://", rank, world, timeout=timeout))[0]
    except (dist.DistError, RuntimeError) as error:
        raise RunFailedError(f"rank {rank}: {served}: {_first_line(error)}") from None
    store.set_timeout(timeout)
    return store


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
