"""Point-to-point messages of one group: receives at once, sends by urgency, bounded bytes in flight.

    receive ──► posted to the transport in the call
    send ──► heap (priority, delivery, order of posting) ──► at most `credit` bytes posted ──► completed

Messages match by tag, so every rank may send in its own order. One daemon thread waits for completed sends
and posts the next. Other threads run the work after an arrival (a sum, a forward). ByteScheduler (Peng et
al., SOSP 2019) calls the bound a credit: a posted message cannot be overtaken any more.

gloo has no way to cancel a message. A receive that times out, however, closes its connection and wakes all
threads that wait on it; `SendQueue.close` uses that if threads are still blocked. A thread that is blocked in
gloo while the interpreter ends would abort the process."""

import atexit
import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from myriad.comm.groups import Group

__all__ = ["PendingOp", "SendQueue"]

_NUM_TAGS = 2**20
_CLOSE_SECONDS = 5.0


class PendingOp:
    """A pending operation: the sends, and the work after receives, that must complete before a result is
    used.

    It starts with one open part, which `complete_part` closes when everything is posted.
    """

    def __init__(self) -> None:
        self._lock, self._over, self._open = threading.Lock(), threading.Event(), 1
        self._error: BaseException | None = None

    def add_part(self) -> None:
        """Add one part to wait for."""
        with self._lock:
            self._open += 1

    def complete_part(self) -> None:
        """Record that one part is complete."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._over.set()

    def fail(self, error: BaseException) -> None:
        """Record an error, and wake all waiting threads."""
        with self._lock:
            self._error = self._error or error
        self._over.set()

    def wait(self) -> None:
        """Block until every part is complete; raise the error of the first part that failed."""
        self._over.wait()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, order=True)
class _Message:
    urgency: tuple[int, int]
    serial: int
    data: torch.Tensor = field(compare=False)
    peer: int = field(compare=False)
    tag: int = field(compare=False)
    pending: PendingOp = field(compare=False)


class SendQueue:
    """The message queue of one rank in one group. Peers are group ranks."""

    def __init__(self, group: Group, max_bytes_in_flight: int) -> None:
        self._group, self._max_bytes_in_flight = group, max_bytes_in_flight
        self._world_rank = dist.get_process_group_ranks(group)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queued: list[_Message] = []
        self._posted: deque[tuple[dist.Work, _Message]] = deque()
        self._bytes_in_flight = self._serial = self._next_tag = 0
        self._error: BaseException | None = None
        self._is_open = True
        self.bytes_sent: Counter[int] = Counter()
        """Bytes posted so far, by the world rank of the receiver."""
        self._threads = _ThreadPool()
        self._threads.start(self._complete_sends)
        atexit.register(self.close)

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """This rank's group rank."""
        return self._group.rank()

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` consecutive tags; tags grow, and are the same on every rank."""
        first = self._next_tag
        self._next_tag += count
        return first

    def receive(self, into: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Post a receive, and return its handle."""
        return self._group.recv([into], peer, tag % _NUM_TAGS)

    def send(
        self, data: torch.Tensor, peer: int, tag: int, pending: PendingOp, urgency: tuple[int, int]
    ) -> None:
        """Send once no message with a smaller ``urgency`` waits and the credit allows it; ``pending`` waits
        for the send."""
        pending.add_part()
        with self._lock:
            self._serial += 1
            message = _Message(urgency, self._serial, data, peer, tag % _NUM_TAGS, pending)
            heapq.heappush(self._queued, message)
            self._post_sends()

    def start(self, job: Callable[[], None], pending: PendingOp) -> None:
        """Run a job on a separate thread; ``pending`` waits for it and gets its error."""
        pending.add_part()

        def run() -> None:
            try:
                job()
                pending.complete_part()
            except BaseException as error:
                pending.fail(error)
                self._fail(error)

        self._threads.start(run)

    def _post_sends(self) -> None:
        while self._queued and self._error is None:
            size = self._queued[0].data.nbytes
            if self._bytes_in_flight and self._bytes_in_flight + size > self._max_bytes_in_flight:
                return
            message = heapq.heappop(self._queued)
            try:
                work = self._group.send([message.data], message.peer, message.tag)
            except BaseException as error:
                message.pending.fail(error)
                self._fail(error)
                return
            self._bytes_in_flight += size
            self.bytes_sent[self._world_rank[message.peer]] += size
            self._posted.append((work, message))
            self._changed.notify()
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Fail all waiting and posted messages, because a broken connection does not recover.

        Posted messages fail too, because gloo does not wake every send to a dead peer.
        """
        with self._lock:
            self._error = self._error or error
            for message in (*self._queued, *(message for _, message in self._posted)):
                message.pending.fail(error)
            self._queued.clear()

    def _complete_sends(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._posted or not self._is_open)
                if not self._posted:
                    return
                work, message = self._posted[0]
            try:
                work.wait()
            except BaseException as error:
                message.pending.fail(error)
                self._fail(error)
            with self._lock:
                self._posted.popleft()
                self._bytes_in_flight -= message.data.nbytes
                self._post_sends()
            message.pending.complete_part()

    def close(self) -> None:
        """End the threads; messages in flight fail."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_open = False
            in_flight = bool(self._queued or self._bytes_in_flight)
            self._changed.notify()
        if not self._threads.close(0.0 if in_flight else 0.2):
            self._break_connections()
            self._threads.close(_CLOSE_SECONDS)

    def _break_connections(self) -> None:
        nothing, tag = torch.empty(1), _NUM_TAGS
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                with suppress(RuntimeError):
                    self._group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))


class _ThreadPool:
    """A pool of daemon threads, as many as there are concurrent jobs; idle threads take the next job."""

    def __init__(self) -> None:
        self._lock, self._num_idle = threading.Lock(), 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._num_idle -= 1
            needs_one_more = self._num_idle < 0
            if needs_one_more:
                self._num_idle = 0
        self._jobs.put(job)
        if needs_one_more:
            thread = threading.Thread(target=self._run_jobs, name="myriad-comm", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._num_idle += 1

    def close(self, seconds: float) -> bool:
        """Let every thread end after its job, and return whether all ended within ``seconds`` each."""
        for thread in self._threads:
            if thread.is_alive():
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)
