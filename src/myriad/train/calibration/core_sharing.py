"""Measure how much longer blocks take on a core that other ranks share, besides the shared time.

Companion processes of the same kind are kept stopped and wake in turns: none, one or three of them compute
beside this process. Only this process's own processor time counts. Each process has its own model, as ranks
have. The slowdown comes from caches that hold another process's data at the start of a turn.
"""

import ctypes
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.errors import RunFailedError
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.planner.rehearsal.machine_fit import doubling_ratio
from myriad.train.calibration.compute_timings import stack_of_blocks

__all__ = ["turns_ratio"]

_SHAPES = ((256, 128, 1), (256, 256, 1))
"""Hidden size, sequence length and micro-batch of each measured block."""
_PR_SET_PDEATHSIG = 1
_STACK = 3
_BESIDE = (0, 1, 3)
_ROUNDS, _SECONDS = 4, 0.08
"""Rounds, and seconds of a round for each process that computes."""


def turns_ratio(together: Group | None) -> float:
    """Return the slowdown for each doubling of the ranks on a core."""
    return statistics.mean(doubling_ratio(_times(shape, together)) for shape in _SHAPES)


def _times(shape: tuple[int, int, int], together: Group | None) -> dict[int, float]:
    """Return the seconds of blocks, by the number of processes that compute on the core."""
    iterate = _blocks(shape)
    found: dict[int, list[float]] = {number: [] for number in _BESIDE}
    with _companions(shape, max(_BESIDE)) as companions:
        for turn in range(_ROUNDS):
            # forth and back: a core that slows down meanwhile affects all numbers alike
            for number in _BESIDE if turn % 2 else reversed(_BESIDE):
                dist.barrier(together)
                with _awake(companions[:number]):
                    found[number].append(_own_seconds(iterate, _SECONDS * (number + 1)))
    return {number + 1: statistics.mean(seconds) for number, seconds in found.items()}


def _own_seconds(iterate: Callable[[], None], least_seconds: float) -> float:
    """Return the processor time of a call, over at least ``least_seconds`` of the clock."""
    iterate()
    start, until, calls = time.thread_time(), time.perf_counter() + least_seconds, 0
    while calls == 0 or time.perf_counter() < until:
        iterate()
        calls += 1
    return (time.thread_time() - start) / calls


def _blocks(shape: tuple[int, int, int]) -> Callable[[], None]:
    hidden, sequence, micro_batch = shape
    model = ModelConfig(layers=_STACK, hidden=hidden, heads=hidden // 64, sequence=sequence)
    x = torch.randn(micro_batch, sequence, hidden)
    iterate = stack_of_blocks(model, torch.float32, Boundary(), x)
    iterate()
    return iterate


@contextmanager
def _companions(shape: tuple[int, int, int], number: int) -> Iterator[Sequence[int]]:
    """Start stopped processes on this core that compute the same blocks when woken, and yield their ids."""
    started: list[int] = []
    try:
        for _ in range(number):
            started.append(_start_companion(shape))
        for process in started:
            if not os.WIFSTOPPED(os.waitpid(process, os.WUNTRACED)[1]):
                raise RunFailedError("a benchmark process exited early")
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _start_companion(shape: tuple[int, int, int]) -> int:
    parent = os.getpid()
    if process := os.fork():
        return process
    try:
        if sys.platform == "linux":  # elsewhere the companion notices it when it is awake
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        iterate = _blocks(shape)
        os.kill(os.getpid(), signal.SIGSTOP)
        while os.getppid() == parent:
            iterate()
    finally:
        os._exit(0)


@contextmanager
def _awake(processes: Sequence[int]) -> Iterator[None]:
    for process in processes:
        os.kill(process, signal.SIGCONT)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGSTOP)
