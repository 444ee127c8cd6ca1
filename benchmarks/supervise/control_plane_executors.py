"""Executors without ranks, by the thousand in one process: real connections, proofs and messages, and an
order is obeyed at once.

    crowd = Crowd(run, step_seconds)
    crowd.join(range(1540))                each lives on, and beats once a second
    await crowd.started(nodes, epoch)      when the last of so many got its Start
    crowd.kill_rank(7), crowd.lose_node(3), crowd.silence(4), crowd.hang(7)
"""

import asyncio
import heapq
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress

from myriad.run import Run
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.messages import ORDERS, Beat, Dump, End, Leave, NodeJoined, Order, Start
from myriad.supervise.observations import Cause, RankExited
from myriad.wire.framing import Refused
from myriad.wire.message_codec import read_message, write_message
from myriad.wire.run_secret import run_secret

RETRY_SECONDS = 0.1
TICK_SECONDS = 0.005
TRACEBACK = "Traceback (most recent call last):\n" + 20 * (
    '  File "/a/usual/place/of/a/package/module.py", line 1234, in function\n    call(what, ever)\n'
)
_ROW = (
    '{"rank":%d,"pid":%d,"state":"S","phase":"step","activity":"reduce","step":%d,'
    '"entered":%d,"left":%d,"idle_seconds":%r,"step_seconds":%r,"busy_seconds":0.0,"digests":[],'
    '"comm":null}'
)
_BEAT = (
    '{"kind":"Beat","node":%d,"epoch":%d,"port":29500,"ranks":[%s],"links":'
    '[{"name":"eth0","up":true,"downs":1,"errors":0}],"devices":[],"clock_seconds":%r}'
)


class Executor:
    """One, of a node."""

    def __init__(self, crowd: "Crowd", node: int) -> None:
        self.crowd, self.node = crowd, node
        self.epoch, self.started_at = 0, 0.0
        self.ranks: tuple[int, ...] = ()
        self.exits: list[RankExited] = []
        self.is_silent = False
        self.link: AuthenticatedLink | None = None
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        while True:
            with suppress(OSError, Refused, ValueError, KeyError, TimeoutError):
                await self._linked()
            self.link = None
            await asyncio.sleep(RETRY_SECONDS)

    async def _linked(self) -> None:
        address = json.loads((self.crowd.run.path / "driver.json").read_text())
        link = AuthenticatedLink(*await asyncio.open_connection(address["host"], address["port"]))
        try:
            await link.connect(self.crowd.secret)
            self.crowd.note_join()
            running = tuple(rank for rank in self.ranks if rank not in {one.rank for one in self.exits})
            joined = NodeJoined(
                self.node, self.epoch, "127.0.0.1", 29500, 8, 2**30, running, tuple(self.exits), False
            )
            link.send(joined)
            self.link = link
            while True:
                self._execute(await link.receive(ORDERS))
        finally:
            link.close()

    def _execute(self, order: Order) -> None:
        if self.is_silent:
            return
        if isinstance(order, Start):
            self.epoch, self.ranks, self.exits, self.started_at = order.epoch, order.ranks, [], time.time()
            self.crowd.note_start(self)
        elif isinstance(order, Leave):
            self.task.cancel()
        elif isinstance(order, Dump):
            self.crowd.dumps += 1
        elif isinstance(order, End) and order.epoch == self.epoch:
            self.end(-9, "killed", "")

    def end(self, code: int, cause: Cause, error: str, ranks: Iterable[int] | None = None) -> None:
        """These ranks, or all that live."""
        gone = {one.rank for one in self.exits}
        for rank in self.ranks if ranks is None else ranks:
            if rank not in gone:
                log = f"{self.crowd.run.path}/logs/rank-{rank}-attempt-{self.epoch}.log"
                ended = RankExited(self.node, self.epoch, rank, code, cause, 3, error, log)
                self.exits.append(ended)
                if self.link is not None:
                    self.link.send(ended)

    def beat(self, now: float) -> None:
        if self.link is None or self.is_silent or self.link.is_closing():
            return
        gone = {one.rank for one in self.exits}
        text = self.crowd.beat_text(self.node, self.epoch, [r for r in self.ranks if r not in gone], now)
        self.link.channel.send(text)


class Crowd:
    """All of a run."""

    def __init__(self, run: Run, step_seconds: float) -> None:
        self.run, self.secret, self.step_seconds = run, run_secret(run.path / "secret"), step_seconds
        self.executors: dict[int, Executor] = {}
        self.first_join_at, self.num_joins, self.dumps = 0.0, 0, 0
        self._began = time.monotonic()
        self._hung: tuple[int, float] | None = None
        self._started: dict[int, dict[int, float]] = {}
        self._beats: list[tuple[float, int]] = []
        self._beating = asyncio.create_task(self._beat())

    def join(self, nodes: Iterable[int]) -> None:
        nodes = list(nodes)
        for place, node in enumerate(nodes):
            self.executors[node] = Executor(self, node)
            heapq.heappush(self._beats, (time.monotonic() + place / len(nodes), node))

    def note_join(self) -> None:
        self.num_joins += 1
        self.first_join_at = self.first_join_at or time.time()

    def note_start(self, executor: Executor) -> None:
        self._hung = None
        self._started.setdefault(executor.epoch, {})[executor.node] = executor.started_at

    async def started(self, nodes: int, epoch: int) -> float:
        """When the last of them got its order."""
        while len(self._started.get(epoch, ())) < nodes:
            await asyncio.sleep(0.02)
        return max(self._started[epoch].values())

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            while self._beats and self._beats[0][0] <= now:
                due, node = heapq.heappop(self._beats)
                if node in self.executors:
                    self.executors[node].beat(now)
                    heapq.heappush(self._beats, (max(due + 1.0, now), node))
            await asyncio.sleep(TICK_SECONDS)

    def beat_text(self, node: int, epoch: int, ranks: list[int], now: float) -> bytes:
        """As `write_message(Beat(...))` writes it, only quicker: see `check_texts`."""
        since = now if self._hung is None else self._hung[1]
        step = int((since - self._began) / self.step_seconds)
        idle = 0.05 + now - since
        rows: list[str] = []
        for rank in ranks:
            inside = self._hung is None or rank != self._hung[0]
            pid = int(time.monotonic() * 1e6) if not rows else 4000 + rank
            rows.append(_ROW % (rank, pid, step, 9 * step + inside, 9 * step, idle, self.step_seconds))
        return (_BEAT % (node, epoch, ",".join(rows), time.time())).encode()

    def check_texts(self) -> None:
        """What is written quicker is what an executor would send."""
        now = time.monotonic()
        text = self.beat_text(7, 3, [56, 57], now)
        assert text == write_message(read_message(text, (Beat,)))

    # What befalls them

    def executor_of(self, rank: int) -> Executor:
        return next(one for one in self.executors.values() if rank in one.ranks)

    def kill_rank(self, rank: int) -> None:
        self.executor_of(rank).end(-9, "killed", "", [rank])

    def lose_peers(self, rank: int) -> None:
        """All other ranks report it, each with a traceback; a moment later its own node agent does."""
        victim = self.executor_of(rank)
        for one in self.executors.values():
            one.end(1, "peer", TRACEBACK, [other for other in one.ranks if other != rank])
        asyncio.get_running_loop().call_later(0.5, victim.end, -9, "killed", "", [rank])

    def lose_node(self, node: int) -> None:
        """Its connection is closed."""
        executor = self.executors.pop(node)
        executor.task.cancel()

    def silence(self, node: int) -> None:
        """Its connection stays."""
        self.executors[node].is_silent = True

    def hang(self, rank: int) -> None:
        """It does not enter what the others wait in."""
        self._hung = rank, time.monotonic()

    def replace(self, node: int) -> None:
        """As an engine does: whoever is there is ended, another comes."""
        if node in self.executors:
            self.lose_node(node)
        self.join([node])

    def finish(self) -> None:
        for one in self.executors.values():
            one.end(0, "done", "")

    def close(self) -> None:
        self._beating.cancel()
        for one in self.executors.values():
            one.task.cancel()


def processor_seconds(pid: int) -> float:
    """Return the total processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
