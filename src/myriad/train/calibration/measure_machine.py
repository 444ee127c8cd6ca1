"""Measure this machine as a cluster that plans can be made for, in some seconds.

    cluster = measure_cluster(report)         one process with one thread for each core, all at once
    write_cluster(cluster, path)            TOML; the first lines state when and how it was measured

A rank is a core. Compute is timed by the processor time of its thread, so that other work on the machine
matters little. Transfers are timed by the clock. A value is the median of several timings, while all
processes do the same. `myriad.planner.rehearsal.machine_fit` fits the constants. Ranks beyond the cores share
them (`Cluster.shared_cores`), so the cluster has more accelerators than there are cores.

How much longer blocks take on a shared core, besides the shared time, is measured with companions
(`turns_ratio`): processes of the same kind that are kept stopped and wake in turns. None, one or three of
them compute beside this process. Only this process's own processor time counts. Each has its own model, as
ranks have. The slowdown comes from caches that hold another process's data at the start of a turn.
"""

import ctypes
import multiprocessing
import os
import queue
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from myriad.comm.free_port import free_port
from myriad.comm.groups import Group, close_world, local_rank, open_world
from myriad.comm.layout import Layout
from myriad.comm.rendezvous.store_secret import new_store_secret
from myriad.errors import RunFailedError
from myriad.kernels.host_memory import keep_freed_memory
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.planner import Cluster
from myriad.planner.cluster_config import Accelerator, Link, Links
from myriad.planner.rehearsal.machine_fit import (
    AttentionTiming,
    LayerTiming,
    MatmulTiming,
    PrecisionTimings,
    TensorParallelTiming,
    doubling_ratio,
    fit_accelerator,
    fit_line,
    fit_precision,
    fit_tensor_parallel,
)
from myriad.system.machine import memory_bytes, num_cores, processor_name
from myriad.train.calibration.cluster_file import CLUSTER_NAME, find_cluster_file, write_cluster
from myriad.train.calibration.compute_timings import (
    PacedTimer,
    stack_of_blocks,
    sweep_bytes_per_second,
    time_type,
)
from myriad.train.calibration.transfer_timings import LinkTimes, time_links, time_tensors

__all__ = ["find_cluster_file", "measure_cluster", "write_cluster"]

_RANKS_PER_CORE = 8
"""Ranks per core that plans for this machine may use."""
_MOST_PROCESSES = 32
_TIMEOUT_SECONDS = 300.0

ReportProgress = Callable[[str, float], None]
"""A callback that gets what is being measured, and the share that is done."""


@dataclass(frozen=True)
class _Answer:
    """The measurements of one process."""

    float32: PrecisionTimings
    bfloat16: PrecisionTimings
    sweep_bytes_per_second: float
    links: LinkTimes
    tensors: Sequence[TensorParallelTiming]
    turns_ratio: float
    pace_seconds: float


def measure_cluster(report: ReportProgress = lambda what, done: None) -> Cluster:
    """Measure this machine for some seconds. Raises `RunFailedError` when a process fails."""
    cores = num_cores()
    world = min(_MOST_PROCESSES, max(2, cores - cores % 2))
    return _fit(_ask_processes(world, report), cores)


def _fit(answers: Sequence[_Answer], cores: int) -> Cluster:
    sweep = sum(answer.sweep_bytes_per_second for answer in answers) / len(answers)
    float32, bfloat16 = (
        fit_precision(_together([getattr(answer, name) for answer in answers]), sweep)
        for name in ("float32", "bfloat16")
    )
    pace = statistics.mean(answer.pace_seconds for answer in answers)
    memory = memory_bytes() // cores
    accelerator: Accelerator = fit_accelerator(
        f"core of {processor_name()}", memory, sweep, float32, bfloat16
    )
    return Cluster(
        name=CLUSTER_NAME,
        nodes=1,
        accelerators_per_node=_RANKS_PER_CORE * cores,
        accelerator=accelerator,
        links=_links([answer.links for answer in answers], [answer.tensors for answer in answers]),
        turns_ratio=statistics.mean(answer.turns_ratio for answer in answers),
        shared_cores=cores,
        core_speeds=tuple(pace / answers[core % len(answers)].pace_seconds for core in range(cores)),
        pace_seconds=pace,
    ).check()


def _together(times: Sequence[PrecisionTimings]) -> PrecisionTimings:
    """Average the times of all ranks: the mean core."""
    return PrecisionTimings(
        times[0].value_bytes,
        [_mean(same, ("seconds",)) for same in zip(*(rank.products for rank in times), strict=False)],
        [
            _mean(same, ("forward_seconds", "backward_seconds"))
            for same in zip(*(rank.attentions for rank in times), strict=False)
        ],
        [_mean(same, ("seconds",)) for same in zip(*(rank.layers for rank in times), strict=False)],
        [_mean(same, ("seconds",)) for same in zip(*(rank.heads for rank in times), strict=False)],
    )


def _same(ranks: Sequence[Sequence[TensorParallelTiming]]) -> list[TensorParallelTiming]:
    """Average the tensor-parallel times of all ranks."""
    names = "added_seconds", "added_overlapped_seconds", "added_processor_seconds"
    return [_mean(same, names) for same in zip(*ranks, strict=True)]


_Time = TypeVar("_Time", MatmulTiming, AttentionTiming, LayerTiming, TensorParallelTiming)


def _mean(same: Sequence[_Time], names: Sequence[str]) -> _Time:
    """Average the sizes that all ranks timed; a rank that is too slow for large sizes times fewer."""
    means = {name: sum(getattr(one, name) for one in same) / len(same) for name in names}
    return replace(same[0], **means)


def _links(ranks: Sequence[LinkTimes], tensors: Sequence[Sequence[TensorParallelTiming]]) -> Links:
    node = _link(ranks)
    return Links(node=node, tensor=fit_tensor_parallel(_same(tensors), node))


def _link(ranks: Sequence[LinkTimes]) -> Link:
    """Fit the link between two ranks.

    A message costs latency and bytes. A gather or a reduce-scatter also costs a launch, and moves half of its
    bytes.
    """
    message = fit_line(*zip(*(row for rank in ranks for row in rank.messages), strict=True))
    halves = fit_line(*zip(*(row for rank in ranks for row in rank.half_sums), strict=True))
    latency = max(message.empty_seconds, 1e-6)
    rate = (message.bytes_per_second * halves.bytes_per_second / 2) ** 0.5
    return Link(
        bytes_per_second=rate,
        latency_seconds=latency,
        launch_seconds=max(0.0, halves.empty_seconds - latency),
        skew_seconds=0.0,
        achievable_ratio=1.0,
        small_group_loss=0.0,
        busy_ratio=min(2.0, sum(rank.busy_ratio for rank in ranks) / len(ranks)),
    )


def _ask_processes(world: int, report: ReportProgress) -> list[_Answer]:
    """Start new processes, as a rank is started, and return what each one measured."""
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    port, secret = free_port(), new_store_secret()
    processes = [
        context.Process(
            target=_be_rank, args=(rank, local_rank(rank, world, port, secret), messages), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, messages, report)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(processes: Sequence[SpawnProcess], messages: Any, report: ReportProgress) -> list[_Answer]:
    found: dict[int, _Answer] = {}
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while len(found) < len(processes):
        try:
            rank, kind, value = messages.get(timeout=1.0)
        except queue.Empty:
            if time.monotonic() > deadline:
                raise RunFailedError(f"measuring this machine: no answer in {_TIMEOUT_SECONDS:g} s") from None
            if codes := [process.exitcode for process in processes if process.exitcode]:
                raise RunFailedError(f"measuring this machine: a process died with {codes[0]}") from None
            continue
        if kind == "progress":
            report(*value)
        elif kind == "failed":
            raise RunFailedError(f"measuring this machine: process {rank} failed: {value}")
        else:
            found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _be_rank(rank: int, environment: Mapping[str, str], messages: Any) -> None:
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        answer = _measure_rank(int(environment["WORLD_SIZE"]), _ProgressSender(rank, messages))
        messages.put((rank, "done", answer))
    except BaseException:
        messages.put((rank, "failed", traceback.format_exc(limit=-1).strip()))


class _ProgressSender:
    """Report the progress of rank 0 to the parent process."""

    def __init__(self, rank: int, messages: Any) -> None:
        self._rank, self._messages = rank, messages

    def __call__(self, what: str, done: float) -> None:
        if self._rank == 0:
            self._messages.put((0, "progress", (what, done)))


def _measure_rank(world: int, report: ReportProgress) -> _Answer:
    groups = open_world(Layout(dp=world // 2, tp=2), torch.device("cpu"))
    together = groups.along("dp", "tp")
    report("transfers between ranks", 0.05)
    links = time_links(groups)
    report("tensor-parallel blocks", 0.2)
    pair = groups.along("tp")
    assert pair is not None, "two ranks at least"
    tensors = time_tensors(pair)
    report("memory", 0.3)
    dist.barrier(together)
    pace = PacedTimer()
    sweep = sweep_bytes_per_second(together, pace)
    report("products, attention and layers in float32", 0.35)
    float32 = time_type(torch.float32, together, pace)
    report("products, attention and layers in bfloat16", 0.6)
    bfloat16 = time_type(torch.bfloat16, together, pace)
    report("ranks that share a core", 0.85)
    turns = turns_ratio(together)
    close_world()
    return _Answer(float32, bfloat16, sweep, links, tensors, turns, pace.nominal_seconds)


_SHAPES = ((256, 128, 1), (256, 256, 1))
"""Hidden size, sequence length and micro-batch of each measured block."""
_PR_SET_PDEATHSIG = 1
_STACK = 3
_BESIDE = (0, 1, 3)
_TURN_ROUNDS, _TURN_SECONDS = 4, 0.08
"""Rounds, and seconds of a round for each process that computes."""


def turns_ratio(together: Group | None) -> float:
    """Return the slowdown for each doubling of the ranks on a core."""
    return statistics.mean(doubling_ratio(_times(shape, together)) for shape in _SHAPES)


def _times(shape: tuple[int, int, int], together: Group | None) -> dict[int, float]:
    """Return the seconds of blocks, by the number of processes that compute on the core."""
    iterate = _blocks(shape)
    found: dict[int, list[float]] = {number: [] for number in _BESIDE}
    with _companions(shape, max(_BESIDE)) as companions:
        for turn in range(_TURN_ROUNDS):
            # forth and back: a core that slows down meanwhile affects all numbers alike
            for number in _BESIDE if turn % 2 else reversed(_BESIDE):
                dist.barrier(together)
                with _awake(companions[:number]):
                    found[number].append(_own_seconds(iterate, _TURN_SECONDS * (number + 1)))
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
