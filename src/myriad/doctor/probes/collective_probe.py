"""All-reduce, all-to-all and pairs among a few ranks, over NCCL or gloo: `measure_patterns`.

    python -m myriad.doctor.probes.collective_probe PARENT_PID    one rank; `CollectiveRank` on stdin

A rank names the rail: the NIC for the traffic of this run. NCCL and gloo read it from the environment once,
so every rail gets processes of its own:

    nccl, RDMA       NCCL_IB_HCA = "=mlx5_0:1"
    nccl, sockets    NCCL_SOCKET_IFNAME = "=eth1", NCCL_IB_DISABLE = 1
    gloo             GLOO_SOCKET_IFNAME = "eth1"

Values are small whole numbers, whose sums are exact in any order, so that a wrong bit shows. Sizes grow until
one call takes an eighth of the time for a pattern; all ranks agree on the size and on the repeats.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from myriad.comm.free_port import free_port
from myriad.comm.rendezvous.store_secret import new_store_secret
from myriad.doctor.diagnosis import Reading
from myriad.doctor.probes.collective_patterns import PatternRates, combine_rates, diagnose_patterns
from myriad.errors import RunFailedError
from myriad.system.child_process import die_with_parent

if TYPE_CHECKING:
    import torch

__all__ = [
    "CollectiveRank",
    "check_gpus_together",
    "environment_of",
    "measure_patterns",
    "read_group",
    "start_rank",
    "wait_for_rank",
]

_FIRST_BYTES = 2**17
_MOST_BYTES = {"cpu": 2**26, "cuda": 2**30}
_MOST_REPEATS = 20
_MOST_PAIRED = 16
"""The most ranks for which pairs are measured, one step for each rank."""
_MOST_GROWTH = 16.0
"""The most that a pair's bytes exceed those of a pattern; a step must last longer than starts differ."""
_MOST_OUTPUT = 2**18
_START_SECONDS = 90.0
"""Time for importing torch and forming the group, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRank:
    """Rank, host and port of one process of a collective test."""

    rank: int
    world: int
    host: str
    port: int
    """Port of the rendezvous on ``host``."""
    secret: str
    """What the ranks prove to each other there. It reaches the process on its standard input."""
    backend: Literal["nccl", "gloo"]
    rail: str = ""
    """RDMA port ("mlx5_0:1") or interface ("eth0"); empty: the backend chooses."""
    interface: str = ""
    """Interface of the rendezvous; empty: the backend chooses."""
    gpu: int = 0
    seconds: float = 0.5
    """Time for each pattern."""


def environment_of(spec: CollectiveRank) -> dict[str, str]:
    """Return the variables that bind a rank's traffic to its rail."""
    if spec.backend == "gloo":
        name = spec.rail or spec.interface
        return {"GLOO_SOCKET_IFNAME": name} if name else {}
    found = {"NCCL_SOCKET_IFNAME": f"={spec.interface}"} if spec.interface else {}
    if ":" in spec.rail:
        return found | {"NCCL_IB_HCA": f"={spec.rail}"}
    if spec.rail:
        return {"NCCL_SOCKET_IFNAME": f"={spec.rail}", "NCCL_IB_DISABLE": "1"}
    return found


def start_rank(spec: CollectiveRank) -> "subprocess.Popen[bytes]":
    """Start the process of a rank; `wait_for_rank` returns its result."""
    process = subprocess.Popen(
        [sys.executable, "-Pm", "myriad.doctor.probes.collective_probe", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment_of(spec)},
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(json.dumps(asdict(spec)).encode())
        process.stdin.close()
    process.stdin = None
    return process


def wait_for_rank(process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any]:
    """Return the result of a rank (`measure_patterns`). Raises `RunFailedError` if it fails or takes longer
    than ``seconds`` beyond its start."""
    try:
        output, _ = process.communicate(timeout=_START_SECONDS + seconds)
        found = json.loads(output[:_MOST_OUTPUT])
    except subprocess.TimeoutExpired:
        raise RunFailedError(f"no answer in {_START_SECONDS + seconds:g} s: it hangs") from None
    except ValueError:
        raise RunFailedError(f"the rank ended with exit code {process.returncode}") from None
    finally:
        process.kill()
        process.wait()
    if not isinstance(found, dict) or "failed" in found:
        raise RunFailedError(str(found.get("failed") if isinstance(found, dict) else found)[:300])
    return found


def check_gpus_together() -> Iterator[Reading]:
    """Measure the patterns among the GPUs of this server over NCCL, with a process for each GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = "GPUs with each other"
    if count < 2 or not torch.distributed.is_nccl_available():
        yield Reading(name=name, skipped="fewer than two GPUs" if count < 2 else "torch without NCCL")
        return
    hardware, port = f"gpu {torch.cuda.get_device_name(0)} x {count}", free_port("127.0.0.1")
    secret = new_store_secret()
    specs = [
        CollectiveRank(
            rank=gpu,
            world=count,
            host="127.0.0.1",
            port=port,
            secret=secret,
            backend="nccl",
            gpu=gpu,
            interface="lo",
        )
        for gpu in range(count)
    ]
    processes = [start_rank(spec) for spec in specs]
    try:
        answers = {rank: wait_for_rank(one, 20 * specs[0].seconds) for rank, one in enumerate(processes)}
    except RunFailedError as error:
        yield Reading(name=name, problem=f"NCCL among {count} GPUs failed: {error}")
        return
    finally:
        for process in processes:
            process.kill()
    yield from read_group(
        name, combine_rates(answers), [f"GPU {gpu}" for gpu in range(count)], hardware, "nccl"
    )


def read_group(
    name: str, rates: PatternRates, names: Sequence[str], hardware: str, backend: str
) -> Iterator[Reading]:
    """Yield readings of a group inside one node: a rate for each pattern, and which pattern is slow."""
    note = f"bus bandwidth of each of {len(names)}, over {backend}"
    for what, value in (("all-reduce", rates.all_reduce), ("all-to-all", rates.all_to_all)):
        yield Reading(name=f"{name}, {what}", value=value, unit="bytes/s", hardware=hardware, note=note)
    verdict = diagnose_patterns(rates, names)
    problem = f"{verdict.kind} trouble: {verdict.words}" if verdict.kind else ""
    yield Reading(name=f"{name}, patterns", value="alike", problem=problem, note=verdict.words)


# One rank


def measure_patterns(device: "torch.device", seconds: float) -> dict[str, Any]:
    """Measure the patterns among all ranks of the open process group. Return ``all_reduce`` and
    ``all_to_all`` (bus bandwidth, bytes per second), ``pairs`` (bytes per second from each rank) and
    ``wrong`` (patterns with wrong values)."""
    import torch.distributed as dist

    clock = _Clock(device, seconds)
    world = dist.get_world_size()
    wrong: list[str] = []
    reduce_bytes, reduce_seconds = clock.time(_all_reduce, wrong)
    exchange_bytes, exchange_seconds = clock.time(_all_to_all, wrong)
    pairs: dict[int, float] = {}
    if 2 < world <= _MOST_PAIRED:
        enough = exchange_bytes * min(_MOST_GROWTH, seconds / exchange_seconds)
        pairs = clock.pairs(int(enough), wrong)
    return {
        "all_reduce": 2 * (world - 1) / world * reduce_bytes / reduce_seconds,
        "all_to_all": (world - 1) / world * exchange_bytes / exchange_seconds,
        "pairs": pairs,
        "wrong": sorted(set(wrong)),
    }


def _all_reduce(x: "torch.Tensor") -> bool:
    """Run an all-reduce; return whether the sum of ``rank + 1`` over ranks is right."""
    import torch.distributed as dist

    world = dist.get_world_size()
    x.fill_(dist.get_rank() + 1)
    dist.all_reduce(x)
    return bool((x == world * (world + 1) // 2).all())


def _all_to_all(x: "torch.Tensor") -> bool:
    """Run an all-to-all; return whether each rank's piece holds that rank's number."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    x.fill_(dist.get_rank())
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return bool((out.view(world, -1) == torch.arange(world, device=x.device)[:, None]).all())


class _Clock:
    """Times calls that all ranks make together."""

    def __init__(self, device: "torch.device", seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def time(self, call: Callable[["torch.Tensor"], bool], wrong: list[str]) -> tuple[int, float]:
        """Return the bytes and the median seconds of one call; append wrong patterns to ``wrong``."""
        import torch

        name, num_bytes = call.__name__.strip("_").replace("_", "-"), _FIRST_BYTES
        most = _MOST_BYTES.get(self._device.type, 2**26)
        while True:
            x = torch.empty(self._count(num_bytes), device=self._device)
            took = self._once(call, x, wrong, name)
            if took > self._seconds / 8 or 4 * num_bytes > most:
                break
            num_bytes *= 4
        repeats = max(1, min(_MOST_REPEATS, int(self._seconds / max(took, 1e-6))))
        times = sorted(self._once(call, x, wrong, name) for _ in range(repeats))
        return 4 * x.numel(), times[len(times) // 2]

    def pairs(self, num_bytes: int, wrong: list[str]) -> dict[int, float]:
        """Return the rate from each other rank, in steps in which every rank sends to one and receives from
        one."""
        import torch
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        x = torch.empty(max(1, num_bytes // 4), device=self._device)
        out = torch.empty_like(x)
        found: dict[int, float] = {}
        for step in range(1, world):
            source, target = (rank - step) % world, (rank + step) % world
            x.fill_(rank)
            self._barrier()
            start = time.perf_counter()
            ops = [dist.P2POp(dist.isend, x, target), dist.P2POp(dist.irecv, out, source)]
            for work in reversed(dist.batch_isend_irecv(ops)):
                work.wait()
                if len(found) < step:  # gloo: the receive comes first in this order
                    found[source] = 4 * x.numel() / max(time.perf_counter() - start, 1e-9)
            self._synchronize()
            if self._device.type == "cuda":
                found[source] = 4 * x.numel() / max(time.perf_counter() - start, 1e-9)
            if not bool((out == source).all()):
                wrong.append("send and receive")
        return found

    def _once(
        self, call: Callable[["torch.Tensor"], bool], x: "torch.Tensor", wrong: list[str], name: str
    ) -> float:
        """Time one call; return the seconds of the slowest rank."""
        import torch
        import torch.distributed as dist

        self._barrier()
        start = time.perf_counter()
        if not call(x):
            wrong.append(name)
        self._synchronize()
        took = torch.tensor([time.perf_counter() - start], device=self._device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    def _barrier(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1, device=self._device))
        self._synchronize()

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @staticmethod
    def _count(num_bytes: int) -> int:
        import torch.distributed as dist

        world = dist.get_world_size()
        return max(1, num_bytes // 4 // world) * world


def _run_rank(spec: CollectiveRank) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from myriad.comm.rendezvous.rendezvous_store import open_at

    torch.set_num_threads(1)
    device = torch.device("cuda", spec.gpu) if spec.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_START_SECONDS)
    store = open_at(spec.host, spec.port, spec.rank, spec.world, timeout, spec.secret.encode())
    dist.init_process_group(spec.backend, store=store, rank=spec.rank, world_size=spec.world, timeout=timeout)
    try:
        return measure_patterns(device, spec.seconds)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    """Write one JSON object: the results, or ``failed``."""
    die_with_parent(int(arguments[0]))
    try:
        found = _run_rank(CollectiveRank(**json.loads(sys.stdin.buffer.read(2**16))))
    except Exception as error:  # whatever NCCL, gloo or the device raise is the answer
        found = {"failed": str(error).strip().partition("\n")[0][:300] or type(error).__name__}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
