"""Ranks of `checkpoint.py`: forked processes with a process group, ended together with all they started."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from myriad.comm.free_port import free_port

__all__ = ["Crew", "CrewError", "die_with", "run_crew"]

_DIE_WITH_PARENT = 1


class CrewError(RuntimeError):
    """A rank failed, died, or gave no answer in time; its last line says what."""


def die_with(parent: int) -> None:
    """Ends this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Crew:
    """``function(rank)`` on each of ``world`` ranks; ``enter`` is called first, to get into a host."""

    def __init__(
        self,
        world: int,
        function: Callable[[int], Any],
        *,
        enter: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        group: bool = True,
        quiet: bool = False,
    ) -> None:
        """``group``: with a process group of gloo; ``quiet``: what ranks write on stderr is lost."""
        context = multiprocessing.get_context("fork")
        base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            receiving, sending = context.Pipe(duplex=False)
            settings = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(environment or {})
            arguments = (os.getpid(), enter, settings, function, group, quiet, sending)
            process = context.Process(target=_be_rank, args=arguments)
            process.start()
            sending.close()
            self.pipes.append(receiving)
            self.processes.append(process)

    def results(self, timeout_seconds: float) -> list[Any]:
        """Every rank's result, in rank order. Raises `CrewError` at the first that has none."""
        deadline = time.monotonic() + timeout_seconds
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        found: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise CrewError(f"no answer from rank {late} in {timeout_seconds:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                found[rank] = self._take(rank, pipe)
        return [found[rank] for rank in sorted(found)]

    def _take(self, rank: int, pipe: Connection) -> Any:
        try:
            value, error = pipe.recv()
        except EOFError:
            self.processes[rank].join(5)
            raise CrewError(f"rank {rank} died with exit code {self.processes[rank].exitcode}") from None
        if error is not None:
            raise CrewError(f"rank {rank} failed:\n{error}")
        return value

    def kill(self) -> None:
        """Ends the ranks and the processes that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()


def run_crew(world: int, function: Callable[[int], Any], timeout_seconds: float, **options: Any) -> list[Any]:
    """What ``function(rank)`` gives on each rank."""
    crew = Crew(world, function, **options)
    try:
        return crew.results(timeout_seconds)
    finally:
        crew.kill()


def _be_rank(
    parent: int,
    enter: Callable[[], None] | None,
    environment: Mapping[str, str],
    function: Callable[[int], Any],
    group: bool,
    quiet: bool,
    pipe: Connection,
) -> None:
    os.setsid()
    die_with(parent)
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        if enter is not None:
            enter()
        with _process_group() if group else contextlib.nullcontext():
            pipe.send((function(int(environment["RANK"])), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    os._exit(0)  # not held up by a contender's threads


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
