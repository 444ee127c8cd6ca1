"""Point-to-point messages of one group: receives at once, sends by urgency, a bound on what is under way.

    receive ──► posted to the transport in the call
    send ──► heap (priority, delivery, order of posting) ──► at most `credit` bytes posted ──► completed

Messages match by tag, so every rank may send in an order of its own. One daemon thread waits for completed
sends and posts the next; others run what follows an arrival (a sum, a forward). ByteScheduler (Peng et al.,
SOSP 2019) calls the bound a credit: what is posted cannot be overtaken any more.

gloo has no way to cancel a message, but a receive that times out closes its connection and wakes all who wait
there: `Post.close` uses that when threads are still blocked. A thread that blocked in gloo while the
interpreter ends would abort the process.
"""

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

__all__ = ["Errand", "Post"]

_NUM_TAGS = 2**20
_PATIENCE_SECONDS = 5.0


class Errand:
    """What must be over before a result may be used: sends, and work that follows receives.

    It starts with one part open, which `settle` closes when everything is posted.
    """

    def __init__(self) -> None:
        self._lock, self._over, self._open = threading.Lock(), threading.Event(), 1
        self._error: BaseException | None = None

    def hold(self) -> None:
        """One more part is to be waited for."""
        with self._lock:
            self._open += 1

    def settle(self) -> None:
        """One part is over."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._over.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more is to be waited for."""
        with self._lock:
            self._error = self._error or error
        self._over.set()

    def wait(self) -> None:
        """Blocks until every part is over; raises the error of the first that failed."""
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
    errand: Errand = field(compare=False)


class Post:
    """One rank's messages in one group. Peers are group ranks."""

    def __init__(self, group: Group, credit_bytes: int) -> None:
        self._group, self._credit_bytes = group, credit_bytes
        self._world_rank = dist.get_process_group_ranks(group)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[_Message] = []
        self._posted: deque[tuple[dist.Work, _Message]] = deque()
        self._bytes_under_way = self._serial = self._next_tag = 0
        self._error: BaseException | None = None
        self._is_open = True
        self.bytes_sent: Counter[int] = Counter()
        """Bytes posted so far, by the world rank of the receiver."""
        self._crew = _Crew()
        self._crew.start(self._complete_sends)
        atexit.register(self.close)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """This one's group rank."""
        return self._group.rank()

    def reserve(self, count: int) -> int:
        """The first of ``count`` consecutive tags; the same on every rank, and growing."""
        first = self._next_tag
        self._next_tag += count
        return first

    def receive(self, into: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Posts a receive."""
        return self._group.recv([into], peer, tag % _NUM_TAGS)

    def send(self, data: torch.Tensor, peer: int, tag: int, errand: Errand, urgency: tuple[int, int]) -> None:
        """Sends as soon as nothing waits with a smaller ``urgency`` and the credit allows; ``errand`` waits
        for it."""
        errand.hold()
        with self._lock:
            self._serial += 1
            message = _Message(urgency, self._serial, data, peer, tag % _NUM_TAGS, errand)
            heapq.heappush(self._waiting, message)
            self._post_sends()

    def start(self, job: Callable[[], None], errand: Errand) -> None:
        """Runs a job on a thread of its own; ``errand`` waits for it and gets its error."""
        errand.hold()

        def run() -> None:
            try:
                job()
                errand.settle()
            except BaseException as error:
                errand.fail(error)
                self._fail(error)

        self._crew.start(run)

    def _post_sends(self) -> None:
        while self._waiting and self._error is None:
            size = self._waiting[0].data.nbytes
            if self._bytes_under_way and self._bytes_under_way + size > self._credit_bytes:
                return
            message = heapq.heappop(self._waiting)
            try:
                work = self._group.send([message.data], message.peer, message.tag)
            except BaseException as error:
                message.errand.fail(error)
                self._fail(error)
                return
            self._bytes_under_way += size
            self.bytes_sent[self._world_rank[message.peer]] += size
            self._posted.append((work, message))
            self._changed.notify()
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """A broken connection does not come back: whatever waits to be sent fails with its error, and what is
        posted too, as gloo does not wake every send to a peer that died."""
        with self._lock:
            self._error = self._error or error
            for message in (*self._waiting, *(message for _, message in self._posted)):
                message.errand.fail(error)
            self._waiting.clear()

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
                message.errand.fail(error)
                self._fail(error)
            with self._lock:
                self._posted.popleft()
                self._bytes_under_way -= message.data.nbytes
                self._post_sends()
            message.errand.settle()

    def close(self) -> None:
        """Ends the threads; what is under way fails."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_open = False
            under_way = bool(self._waiting or self._bytes_under_way)
            self._changed.notify()
        if not self._crew.close(0.0 if under_way else 0.2):
            self._break_connections()
            self._crew.close(_PATIENCE_SECONDS)

    def _break_connections(self) -> None:
        nothing, tag = torch.empty(1), _NUM_TAGS
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                with suppress(RuntimeError):
                    self._group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))


class _Crew:
    """Daemon threads, as many as there are jobs at once; idle ones take the next job."""

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
            thread = threading.Thread(target=self._work, name="myriad-comm", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._num_idle += 1

    def close(self, seconds: float) -> bool:
        """Lets every thread end after its job; whether all did, in so much time each."""
        for thread in self._threads:
            if thread.is_alive():
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)
