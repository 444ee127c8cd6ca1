"""Real ranks for tests: forked processes of one thread each, joined by gloo on loopback.

`run_ranks` starts processes for one call. `RankPool` keeps them for many, each call in a world of its own;
`reuse_ranks` does so for all tests of a file.
"""

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from myriad.comm.free_port import free_port
from myriad.comm.groups import close_world, local_rank
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


def leave_world() -> None:
    """Leave the world once all ranks are here: rank 0 keeps the store, which others may still need to make
    their groups."""
    dist.barrier()
    close_world()


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
            process.join()  # a process that is killed holds the locks of its run for a moment


def lost_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Ranks that all end by SIGKILL."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=enter, args=(function, rank, each, arguments, context.SimpleQueue()))
        for rank, each in enumerate(environments(world))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * world


def serve(connection: Connection, others: list[Connection]) -> None:
    """A process becomes a rank of one world after another, as its parent asks, until the parent ends: it
    closes the parent's ends of the pipes, which it inherits."""
    for other in others:
        other.close()
    gc.freeze()
    torch.set_num_threads(1)
    while True:
        try:
            environment, function, arguments = connection.recv()
        except EOFError:
            return
        os.environ |= {**environment, "OMP_NUM_THREADS": "1"}
        try:
            connection.send((function(*arguments), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
        gc.collect()  # groups of a world that is left would keep their threads, which poll


class RankPool:
    """Processes that run functions as the ranks of a world: all of them, or the first ones. After a failed
    call the next one starts new processes."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        while len(self._ranks) < self._world:
            ours, theirs = context.Pipe()
            inherited = [*(connection for _, connection in self._ranks), ours]
            process = context.Process(target=serve, args=(theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 270) -> list[Any]:
        """What ``function(*arguments)`` gives on each rank. A failing rank's traceback becomes the error."""
        self._start()
        found: dict[int, Any] = {}
        try:
            ranks = self._ranks[: self._world]
            for (_, connection), environment in zip(ranks, environments(self._world), strict=True):
                connection.send((environment, function, arguments))
            waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
            while waiting:
                ready = wait([*waiting], timeout)
                assert ready, f"no answer within {timeout} s from ranks {sorted(waiting.values())}"
                for connection in ready:
                    rank = waiting.pop(connection)
                    found[rank], error = connection.recv()
                    assert error is None, f"rank {rank} failed:\n{error}"
        except BaseException:
            self.close()
            raise
        return [found[rank] for rank in range(self._world)]

    def resize(self, world: int) -> None:
        """Set the number of ranks of later calls. Processes that a smaller world leaves idle stay."""
        self._world = world

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks.clear()


_REUSED = RankPool(0)


def reuse_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 270) -> list[Any]:
    """Like `run_ranks`, on the processes of earlier calls: a fifth less processor time. For functions that
    leave no change in their process, such as a patched module. They see this process as it was when it first
    needed so many ranks."""
    _REUSED.resize(world)
    return _REUSED.run(function, *arguments, timeout=timeout)


def end_reused_ranks() -> None:
    """End the processes that `reuse_ranks` keeps."""
    _REUSED.close()
