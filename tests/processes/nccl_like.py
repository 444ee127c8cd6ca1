"""A transport for CPU ranks that blocks where NCCL blocks: gloo underneath, NCCL's order on top.

    communicator     made by the first operation that needs it: a group has one for its collectives, and one
                     for each pair of ranks that send or receive. It blocks the host until all its ranks have
                     come (`ncclCommInitRank`).
    connection       the first operation of each kind, and the first message in each direction of a pair,
                     blocks the host until its peers have come to theirs (NVIDIA/nccl#783: point-to-point
                     connections are created upon the first exchange)
    operation        those of one communicator run one after the other, in the order of the calls; tags mean
                     nothing. A send is complete only when its receive is.
    lost peer        nothing notices it: an operation waits until the group's timeout, and the watchdog then
                     aborts the process
    abort            what is in flight fails: "NCCL communicator was aborted on rank N"

Waiting for an operation blocks the host here; with NCCL it blocks the GPU's compute stream, and the host runs
ahead. So this is stricter: a first use in the middle of a program may hang here that NCCL would survive. Sums
are added in rank order where Myriad adds them so on gloo, so that losses have the same bits.

`install` makes CPU ranks of this process use it; programs do so where ``PYTHONPATH`` begins with the folder
``nccl_like_site``.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from myriad.comm import groups
from myriad.comm.gloo_setup import connecting, low_priority_gloo_threads

NAME = "nccl_like"
_TOLD = "NCCL_LIKE_TOLD"
"""Where this variable is set, ranks write the communicators that they make into their logs."""
_MOST_POSTED = 1000
FIRST_USES: list[str] = []
"""Communicators made and connections opened in this process, in order."""


class Finished(dist.Work):
    """An operation on its way."""

    def __init__(self) -> None:
        super().__init__()
        self._over, self._error = threading.Event(), ""

    def finish(self, error: str = "") -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._over.wait()
        if self._error:
            raise dist.DistBackendError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()


class Communicator:
    """What `ncclCommInitRank` gives: ranks that have met, and a queue of operations."""

    def __init__(self, name: str, store: Any, index: int, size: int, timeout: timedelta) -> None:
        self.name, self._store, self._index, self._size, self._timeout = name, store, index, size, timeout
        self._used = set[str]()
        self._meet("communicator")  # gloo, which would wait for the others too, holds Python's lock meanwhile
        with connecting(lazily=False), low_priority_gloo_threads():
            self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), index, size, timeout)
        FIRST_USES.append(name)
        if _TOLD in os.environ:
            sys.stderr.write(f"{NAME}: {name}\n")
            sys.stderr.flush()
        self._queue: SimpleQueue[tuple[Callable[[], None], Finished] | None] = SimpleQueue()
        self._posted = deque[Finished](maxlen=_MOST_POSTED)
        self._aborted = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def connect(self, what: str) -> None:
        """Block until all ranks have come to their first operation of this kind."""
        if what in self._used:
            return
        self._meet(what)
        FIRST_USES.append(f"{self.name}: {what}")

    def _meet(self, what: str) -> None:
        self._used.add(what)
        self._store.set(f"{what}/{self._index}", "1")
        self._store.wait([f"{what}/{peer}" for peer in range(self._size)], self._timeout)

    def post(self, operation: Callable[[], None]) -> Finished:
        """Run it after what was posted before."""
        finished = Finished()
        self._posted.append(finished)
        self._queue.put((operation, finished))
        return finished

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            operation, finished = item
            began = time.monotonic()
            try:
                operation()
            except RuntimeError:  # gloo knows that a peer is gone; NCCL waits for it
                patience = self._timeout.total_seconds()
                if not self._aborted.wait(patience - (time.monotonic() - began)):
                    self._bark(1e3 * patience)
            finished.finish()

    def _bark(self, milliseconds: float) -> None:
        """As NCCL's watchdog: write a line, and abort the process."""
        told = f"[Rank {self._index}] Watchdog caught collective operation timeout: {self.name} ran for"
        sys.stderr.write(f"{told} {milliseconds:.0f} milliseconds before timing out.\n")
        sys.stderr.flush()
        os.abort()

    def abort(self) -> None:
        """Fail what is in flight."""
        self._aborted.set()
        for finished in self._posted:
            finished.finish(f"NCCL communicator was aborted on rank {self._index}.")
        self.close()

    def close(self) -> None:
        """End the thread after what was posted."""
        self._queue.put(None)


class NcclLike(dist.ProcessGroup):
    """Stands for ProcessGroupNCCL with communicators made lazily."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._own, self._count, self._patience = store, rank, size, timeout
        self._communicators: dict[str, Communicator] = {}

    def getBackendName(self) -> str:
        return NAME

    def _communicator(self, key: str, index: int, size: int) -> Communicator:
        if key not in self._communicators:
            name = f"{c10d._world.pg_names[self]} {key}"
            store = dist.PrefixStore(f"nccl {key}/", self._store)
            self._communicators[key] = Communicator(name, store, index, size, self._patience)
        return self._communicators[key]

    def _collective(self, kind: str, operation: Callable[[Any], None]) -> Finished:
        communicator = self._communicator("all", self._own, self._count)
        communicator.connect(kind)
        return communicator.post(lambda: operation(communicator.gloo))

    # Messages

    def _pair(self, peer: int) -> Communicator:
        low, high = sorted((self._own, peer))
        return self._communicator(f"{low}:{high}", int(self._own > peer), 2)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Finished:
        pair = self._pair(peer)
        pair.connect(f"{self._own} to {peer}")
        return pair.post(lambda: _wait(pair.gloo.send(tensors, int(self._own < peer), 0)))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Finished:
        pair = self._pair(peer)
        pair.connect(f"{peer} to {self._own}")
        return pair.post(lambda: _wait(pair.gloo.recv(tensors, int(self._own < peer), 0)))

    # Collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Finished:
        return self._collective("allreduce", lambda gloo: _wait(gloo.allreduce(tensors, opts)))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Finished:
        return self._collective("broadcast", lambda gloo: _wait(gloo.broadcast(tensors, opts)))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Finished:
        return self._collective("allgather", lambda gloo: _wait(gloo.allgather(outputs, inputs)))

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Finished:
        parts = list(output.view(-1).chunk(self._count))
        own = own.clone()  # it may lie in the output
        return self._collective("allgather", lambda gloo: _wait(gloo.allgather([parts], [own.view(-1)])))

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Finished:
        def operate(gloo: Any) -> None:
            received = torch.empty_like(whole).view(-1)
            _all_to_all(gloo, received, whole.view(-1))
            rows = received.view(self._count, -1)
            total = rows[0].to(torch.float32, copy=True)
            for row in rows[1:]:
                total += row
            output.view(-1).copy_(total)

        return self._collective("reduce_scatter", operate)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        out_splits: list[int],
        splits: list[int],
        opts: Any = None,
    ) -> Finished:
        return self._collective("alltoall", lambda gloo: _all_to_all(gloo, output, whole, out_splits, splits))

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Finished:
        return self.allreduce([torch.zeros(1)], dist.AllreduceOptions())

    # Ends

    def abort(self) -> None:
        for communicator in self._communicators.values():
            communicator.abort()

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()


def _all_to_all(
    gloo: Any, output: torch.Tensor, whole: torch.Tensor, out_splits: Any = None, splits: Any = None
) -> None:
    _wait(gloo.alltoall_base(output, whole, out_splits or [], splits or []))


def _wait(work: Any) -> None:
    work.wait()


def install() -> None:
    """CPU ranks of this process use it from now on."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])
    groups.BACKENDS["cpu"] = NAME
