"""The executor of a node: starts ranks as the driver says, sees how they are, tells it.

    driver ◄──1 Hz, and when something happens──► executor ──► warm parent ──► rank, rank, ...
                                                      └── reads ── progress page ◄── writes ──┘

It decides nothing. Without a driver it keeps its ranks running, keeps what there is to tell, and looks for a
new one; but where the driver's machine does not answer either, the driver has given this node up, and its
ranks end (`myriad.resilience.reach`). Ctrl-C is for it: it passes it on to the ranks once.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from myriad.comm.free_port import free_port
from myriad.machine import machine_name, memory_bytes, num_cores
from myriad.resilience.clocks import ClockComparison
from myriad.resilience.doctor.devices import has_driver
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.facts import (
    ORDERS,
    STOP_ASKED,
    Agreed,
    Beat,
    Cause,
    ClockTold,
    Dump,
    End,
    Examined,
    ExamineNode,
    KeepCounters,
    Leave,
    LinkSeen,
    LinkTraffic,
    NodeFacts,
    NodeJoined,
    NodeRefused,
    NodeTaken,
    Order,
    RankExited,
    RankSeen,
    Start,
    Stop,
    StopAsked,
    Turn,
)
from myriad.resilience.node.aside import aside
from myriad.resilience.node.counting import CounterLog
from myriad.resilience.node.crew import Crew
from myriad.resilience.node.device_watch import DeviceWatch
from myriad.resilience.node.examination import Examination
from myriad.resilience.node.links import LinkWatch
from myriad.resilience.node.log_watch import LogWatch
from myriad.resilience.node.node_facts import node_facts
from myriad.resilience.node.snapshot_server import watch_snapshot_server
from myriad.resilience.node.spans import NodeSpans
from myriad.resilience.node.tracing import TraceDesk
from myriad.resilience.node.traffic import LinkMonitor
from myriad.resilience.node.warm import DUMP_SIGNAL
from myriad.resilience.node.warm_parent import WarmParent
from myriad.resilience.reach import DriverLostError, Reach, executor_name
from myriad.resilience.traces import Trace, Traced
from myriad.resilience.wire import Link
from myriad.run import Run
from myriad.telemetry.progress_page import ProgressPage
from myriad.telemetry.ring import SpanRings

__all__ = ["execute"]

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS, _FACTS_SECONDS = 1.0, 60.0
_NO_ANOMALY: tuple[Cause, ...] = ("done", "turned", "interrupted", "peer")
"""Causes of a rank's end after which the link counters are not kept."""
_ALONE_SECONDS = 10.0
"""Without a driver, after which the agent that has rank 0 reports it."""


def execute(
    run: Run,
    node: int,
    page: ProgressPage,
    rings: SpanRings,
    warm: WarmParent,
    start_warm: Callable[[], WarmParent],
    *,
    lonely_seconds: float | None = None,
) -> str | None:
    """Until the driver says that the run is over, or SIGTERM comes; gives what went wrong.
    ``lonely_seconds``: how long it waits for a driver without ranks, until it raises `DriverLostError`; off:
    for ever, as its engine ends it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    clocks = ClockComparison(node)
    spans = NodeSpans(run, node, rings, clocks.offset)
    executor = _Executor(
        run,
        node,
        Crew(run, node, page, spans, warm, start_warm),
        clocks,
        LinkMonitor(run, node, page),
        lonely_seconds,
    )
    try:
        asyncio.run(executor.live())
    finally:
        executor.crew.close()
        executor.monitor.close()
    if executor.lonely:
        raise DriverLostError(executor.problem)
    return executor.problem


class _Executor:
    def __init__(
        self,
        run: Run,
        node: int,
        crew: Crew,
        clocks: ClockComparison,
        monitor: LinkMonitor,
        lonely_seconds: float | None,
    ) -> None:
        self._run, self._node, self.crew, self._clocks, self.monitor = run, node, crew, clocks, monitor
        self._facts: NodeFacts | None = None
        """Facts that were last sent to this driver."""
        self._reach, self._lonely_seconds = Reach(run.path), lonely_seconds
        self._examination = Examination(node, run.path)
        self._links = LinkWatch(lambda: self._reach.interface, rdma=has_driver())
        self._devices = DeviceWatch(node, run=run)
        self._logs = LogWatch(run, node, crew.step_of, crew.rank_of)
        self._traces, self._counters = TraceDesk(run, node, crew, monitor), CounterLog(run, node)
        self._link: Link | None = None
        self.problem: str | None = None
        self.lonely = False
        self._stop_asked = STOP_ASKED in os.environ
        self._over = asyncio.Event()
        self._scribe, self._reported_alone = Scribe(), False
        self._told_digests: dict[tuple[int, int], int] = {}
        """Epoch and rank to the step of the newest that this driver was told."""

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._ask_to_stop)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._over.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # an engine has blocked it until now
        works = (self._stay_linked, self._look, self._hear_ranks, self._compare_clocks)
        tasks = [
            asyncio.create_task(work())
            for work in (*works, self._send_facts, self._devices.watch, self._logs.watch)
        ]
        tasks.append(asyncio.create_task(watch_snapshot_server(self._run, self._node)))
        for task in tasks:
            task.add_done_callback(self._end_with)
        await self._over.wait()
        self._examination.cancel()
        self._traces.cancel()
        for task in tasks:
            task.cancel()

    def _end_with(self, task: "asyncio.Task[None]") -> None:
        """A part that fails takes the executor with it: the engine starts another."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("the executor ends", exc_info=error)
            self._end(f"the executor failed: {error}")

    def _end(self, problem: str | None = None) -> None:
        self.problem = problem
        self._over.set()

    def _ask_to_stop(self) -> None:
        if not self._stop_asked:
            self._stop_asked = True
            self.crew.signal_all(signal.SIGINT)
            self._tell(StopAsked(self._node))

    # Ranks

    async def _hear_ranks(self) -> None:
        """What the warm parent tells, as it does."""
        while True:
            await self.crew.told()
            for event in self.crew.take():
                if isinstance(event, RankExited):
                    self._tell(event)
                    if event.cause not in _NO_ANOMALY:
                        self.monitor.keep("failed rank")
                elif self._stop_asked:
                    self.crew.send_signal((event,), signal.SIGINT)

    async def _look(self) -> None:
        """At the progress page and the ranks' states, links and devices, and tells. What cannot wait a second
        (a rank's end) comes by itself."""
        while True:
            seen, links = self.crew.look(), self._links.look()
            devices = self._devices.found + self.crew.failed_checks()
            port, known = free_port(self._reach.host), self._news(seen)
            traffic = self._look_at_traffic(links, len(seen))
            self._tell(Beat(self._node, self.crew.epoch, port, known, links, devices, time.time(), traffic))
            self._counters.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def _look_at_traffic(self, links: Sequence[LinkSeen], num_ranks: int) -> tuple[LinkTraffic, ...]:
        try:
            return self.monitor.look(links, num_ranks)
        except (OSError, ValueError) as error:  # no memory for a ring, for one: ranks go on without
            _LOG.warning("the traffic of links is not known: %s", error)
            return ()

    # The driver

    def _news(self, seen: Sequence[RankSeen]) -> tuple[RankSeen, ...]:
        """The same without digests that this driver knows."""
        if self._link is None:
            return tuple(seen)
        found = []
        for one in seen:
            key = self.crew.epoch, one.rank
            known = self._told_digests.get(key, -1)
            new = tuple(digest for digest in one.digests if digest.step > known)
            self._told_digests[key] = new[-1].step if new else known
            found.append(replace(one, digests=new))
        return tuple(found)

    async def _send_facts(self) -> None:
        """When a driver is new, or they have changed. Read in a thread: a device driver may hang."""
        while True:
            if self._link is not None:
                link, address = self._link, self._reach.host
                facts = self._facts
                try:
                    facts = await aside(partial(node_facts, self._node, address))
                except Exception:  # of a driver or its library: hardware that is not known ends no agent
                    _LOG.warning("what this node is made of cannot be read", exc_info=True)
                if facts is not None and facts != self._facts and link is self._link:
                    self._facts = facts
                    link.send(facts)
            await asyncio.sleep(_FACTS_SECONDS if self._facts is not None else _LOOK_SECONDS)

    async def _compare_clocks(self) -> None:
        """With the driver's."""
        while True:
            if self._link is not None:
                self._link.send(self._clocks.ask())
            await self._clocks.pause()

    def _tell(self, message: RankExited | Beat | StopAsked | Examined | Traced) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _stay_linked(self) -> None:
        while True:
            try:
                await self._linked()
            except (OSError, ValueError, KeyError) as error:
                self._reach.failed(error)
            self._link = None
            self._be_alone()
            await asyncio.sleep(self._reach.pause_seconds())

    async def _linked(self) -> None:
        async with self._reach.link() as link:
            self.crew.host = self._reach.host
            self._told_digests, self._facts = {}, None
            self._clocks.begin()
            link.send(self._joined())
            self._link = link
            if self._reported_alone:
                self._reported_alone = False
                self._report_driver("a driver is there again")
            while True:
                order = await link.receive(ORDERS)
                if isinstance(order, NodeRefused):
                    break
                self._obey(order)
        await self._leave(order)

    async def _leave(self, refused: NodeRefused) -> None:
        """For good; what the doctor then says is for whoever looks after this machine."""
        self._link, found = None, ""
        if refused.examine is not None:
            examined = await self._examination.made(refused.examine)
            found = f"; {examined.words}"
            with suppress(OSError, ValueError, KeyError):
                async with self._reach.link() as link:
                    link.send(examined)
        self._end(refused.why + found)

    def _be_alone(self) -> None:
        if self._reach.is_cut_off() and self.crew.living():
            _LOG.warning("the driver's machine does not answer: it has given this node up; the ranks end")
            self.crew.signal_all(signal.SIGKILL)
        if (
            not self._reported_alone
            and 0 in self.crew.living()
            and self._reach.seconds_alone() > _ALONE_SECONDS
        ):
            self._reported_alone = True
            text = f"no driver can be reached for {_ALONE_SECONDS:g} s"
            self._report_driver(f"{text}: ranks go on, but no fault is repaired until there is one")
        patience = self._lonely_seconds
        if patience is not None and self._reach.seconds_alone() > patience and not self.crew.living():
            self.lonely = True
            self._end(f"no driver of the run was found for {patience:g} s")

    def _report_driver(self, problem: str) -> None:
        _LOG.warning("%s", problem)
        self._scribe.enter_event(self._run, "health", what="driver", problem=problem)

    def _joined(self) -> NodeJoined:
        crew = self.crew
        return NodeJoined(
            node=self._node,
            epoch=crew.epoch,
            host=self._reach.host,
            port=free_port(self._reach.host),
            cores=num_cores(),
            memory_bytes=memory_bytes(),
            running=tuple(crew.living()),
            exits=tuple(crew.exits.values()),
            stop_asked=self._stop_asked,
            by=executor_name(),
            machine=machine_name(),
            layout=crew.layout,
        )

    def _obey(self, order: Order) -> None:
        if isinstance(order, Leave):
            self._end()
        elif isinstance(order, NodeTaken):
            self._end(f"{order.by} is node {self._node} of this run already")
        elif isinstance(order, Stop):
            self._ask_to_stop()
        elif isinstance(order, Start):
            self._examination.cancel()
            if order.epoch > self.crew.epoch:
                self._devices.begin(order.epoch, order.ranks)
                self.monitor.begin_attempt()
                self._logs.begin(order.epoch, order.ranks)
            self.crew.start(order)
        elif isinstance(order, ClockTold):
            self._clocks.hear(order)
        elif isinstance(order, ExamineNode):
            self._examination.begin(order.how, self._tell)
        elif isinstance(order, Trace):
            self._traces.begin(order, self._tell)
        elif isinstance(order, KeepCounters):
            self.monitor.keep(order.why)
        elif isinstance(order, NodeRefused) or order.epoch != self.crew.epoch:
            return
        elif isinstance(order, End):
            self.crew.signal_all(signal.SIGKILL)
        elif isinstance(order, Turn):
            self.crew.turn()
        elif isinstance(order, Dump):
            self.crew.send_signal(order.ranks, DUMP_SIGNAL)
        elif isinstance(order, Agreed):
            self.crew.tell_agreed(order.step)
