"""Real ranks that start: forked from a warm parent, released at once, timed until all groups have been used.

Names of the loopback addresses are put into /etc/hosts of a mount namespace of the benchmark's own (root
only): torch's store client looks up the name of ``::ffff:127.0.0.1`` when it connects, and with a slow or
absent name server those look-ups, not the start, would be measured on both sides.
"""

import gc
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from myriad.comm.config import CommConfig
from myriad.comm.groups import open_world
from myriad.comm.layout import Layout
from myriad.comm.rendezvous.rendezvous_store import open_store

LAYOUTS = {8: (2, 2, 2), 16: (4, 2, 2), 32: (4, 4, 2), 64: (4, 4, 4), 128: (8, 4, 4)}
"""dp, pp, tp."""
AXES = ("dp", "pp", "tp")
_LIMIT_SECONDS = 180.0
_INSIDE = "MYRIAD_BENCHMARK_HOSTS"


Made = tuple[float, list[Any], Any]
"""When the world was there, the groups, and what must live as long as they do."""


@dataclass(frozen=True)
class Start:
    """One start of one side: from the release of the ranks to the last one that was there."""

    world_seconds: float
    groups_seconds: float
    used_seconds: float
    cpu_seconds: float


def _torch_groups(shape: tuple[int, int, int]) -> Made:
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_SECONDS))
    there = time.monotonic()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    return there, [mesh.get_group(axis) for axis in AXES], mesh


def _myriad_groups(shape: tuple[int, int, int]) -> Made:
    dp, pp, tp = shape
    groups = open_world(Layout(dp=dp, pp=pp, tp=tp), torch.device("cpu"))
    there = time.monotonic()
    return there, [groups.along(axis) for axis in AXES], groups


def _floor(shape: tuple[int, int, int]) -> Made:
    """What any start has: reach the store, write one key, read one."""
    rank, world = int(os.environ["RANK"]), int(np.prod(shape))
    store = open_store(CommConfig(), rank, world)
    store.set(str(rank), "here")
    store.get(str((rank + 1) % world))
    return time.monotonic(), [], store


SIDES: dict[str, Callable[[tuple[int, int, int]], Made]] = {
    "torch": _torch_groups,
    "myriad": _myriad_groups,
    "store only": _floor,
}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rank(
    side: str, shape: tuple[int, int, int], rank: int, port: int, gate: Any, release: Any, results: Any
) -> None:
    world = int(np.prod(shape))
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {key: str(value) for key, value in places.items()}
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if gate.wait(_LIMIT_SECONDS) == 0:
        release.value = time.monotonic() + 0.2 + 0.01 * world  # so that none starts when others still wake up
    gate.wait(_LIMIT_SECONDS)
    time.sleep(max(0.0, release.value - time.monotonic()))
    started, cpu = release.value, _cpu_seconds()
    there, groups, _kept = SIDES[side](shape)
    made = time.monotonic()
    for group in [*groups, None] if groups else []:
        dist.all_reduce(torch.ones(1), group=group)
    results.put((started, there, made, time.monotonic(), _cpu_seconds() - cpu))
    gate.wait(_LIMIT_SECONDS)
    os._exit(0)


def start_once(side: str, world: int) -> Start:
    """One start of ``world`` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(world), context.SimpleQueue()
    release = context.Value("d", 0.0)
    arguments = ((side, LAYOUTS[world], rank, port, gate, release, results) for rank in range(world))
    ranks = [context.Process(target=_rank, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    try:
        found = [_next(results, ranks) for _ in ranks]
    finally:
        for process in ranks:
            process.join(5 if "found" in locals() else 0)
            process.kill()
    first = min(started for started, *_ in found)
    ends = [max(times) - first for times in list(zip(*found, strict=True))[1:4]]
    return Start(*ends, sum(each[4] for each in found))


def _next(results: Any, ranks: list[Any]) -> Any:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not results._reader.poll(0.2):
        failed = [rank.exitcode for rank in ranks if rank.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(f"ranks ended with exit codes {failed}" if failed else "ranks do not meet")
    return results.get()


def measure(world: int, rounds: int) -> dict[str, Start]:
    """The median of several starts of each side, in turn."""
    gc.collect()
    gc.freeze()  # else each rank copies what the collector touches
    found: dict[str, list[Start]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            found[side].append(start_once(side, world))
    ordered = {side: sorted(starts, key=lambda start: start.used_seconds) for side, starts in found.items()}
    return {side: starts[len(starts) // 2] for side, starts in ordered.items()}


def has_names() -> bool:
    """Whether the address from which torch's store is reached has a name without a name server."""
    lines = Path("/etc/hosts").read_text().splitlines()
    return any(line.split()[:1] == ["::ffff:127.0.0.1"] for line in lines)


def with_names() -> bool:
    """Runs this program again where loopback addresses have names, and ends; False where that cannot be."""
    if has_names() or _INSIDE in os.environ:
        return has_names()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    with tempfile.NamedTemporaryFile("w", suffix="-hosts") as hosts:
        hosts.write(Path("/etc/hosts").read_text() + "\n::1 localhost\n::ffff:127.0.0.1 localhost\n")
        hosts.flush()
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", inside, hosts.name, sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env=os.environ | {_INSIDE: "1"}).returncode)
