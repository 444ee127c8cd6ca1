"""Real ranks for tests: forked processes of one thread each, joined by gloo on loopback.

``torch._dynamo`` is imported before the fork and not in it: torch loads it when a layer first runs on the
meta device, which every rank of a layout with messages does, and that costs 0.5 to 1 s of a core each time.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from myriad.comm.free_port import free_port
from myriad.comm.groups import local_rank
from myriad.comm.rendezvous.store_secret import new_store_secret


def enter(
    function: Callable[..., Any], rank: int, environment: dict[str, str], arguments: tuple, results: Any
) -> None:
    """A process becomes a rank. The objects that it inherits are none of the garbage collector's work."""
    gc.freeze()
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    try:
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def environments(world: int) -> list[dict[str, str]]:
    """The environment of each rank of a world, whose store has a port and a secret of its own."""
    port, secret = free_port(), new_store_secret()
    return [local_rank(rank, world, port, secret) for rank in range(world)]


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 270) -> list[Any]:
    """What ``function(*arguments)`` gives on each of ``world`` ranks. A failing rank's traceback becomes the
    error."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=enter, args=(function, rank, environment, arguments, results), daemon=True)
        for rank, environment in enumerate(environments(world))
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        for _ in range(world):
            rank, value, error = results.get(timeout=timeout)
            if error is not None:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            found[rank] = value
        return [found[rank] for rank in range(world)]
    finally:
        for process in processes:
            process.join(2 if len(found) == world else 0)
            process.kill()
