"""The node agent: starts the ranks of a node on command of the driver, watches them, and reports to the
driver.

    driver ◄──1 Hz, and at each event──► agent ──► fork server ──► rank, rank, ...
                                           └── reads ── progress page ◄── writes ──┘

The agent decides nothing. Without a driver it keeps its ranks running, keeps its reports, and looks for a new
driver. If the driver's machine does not answer either, the driver has given this node up, and the ranks
end (`myriad.supervise.driver_address`). It passes a Ctrl-C on to the ranks once. It also watches the node's
snapshot server, so that a stopped or hung server is noticed even while no rank uses it.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from myriad.checkpoint.snapshots.server_monitor import SnapshotServerMonitor
from myriad.checkpoint.snapshots.server_start import node_server_name
from myriad.comm.free_port import free_port
from myriad.doctor.devices import has_driver
from myriad.run import Run
from myriad.supervise.agent.device_monitor import DeviceMonitor, Examination
from myriad.supervise.agent.fork_server import DUMP_SIGNAL, ForkServer
from myriad.supervise.agent.link_monitor import CounterLog, LinkMonitor
from myriad.supervise.agent.log_monitor import LogMonitor
from myriad.supervise.agent.node_facts import LinkStateReader, node_facts
from myriad.supervise.agent.rank_processes import NodeSpans, RankProcesses
from myriad.supervise.agent.rank_traces import TraceRunner
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.background import AsyncWriter, run_in_thread
from myriad.supervise.clock_exchange import ClockComparison
from myriad.supervise.driver_address import DriverConnection, DriverLostError, agent_name
from myriad.supervise.messages import (
    ORDERS,
    STOP_ASKED,
    Agreed,
    Beat,
    ClockAnswer,
    Dump,
    End,
    ExamineNode,
    KeepCounters,
    Leave,
    NodeJoined,
    NodeRefused,
    NodeTaken,
    Order,
    Start,
    Stop,
    StopAsked,
    Trace,
    Traced,
    Turn,
)
from myriad.supervise.observations import (
    Cause,
    Examined,
    LinkStatus,
    LinkTraffic,
    NodeFacts,
    RankExited,
    RankStatus,
)
from myriad.system.machine import machine_name, memory_bytes, num_cores
from myriad.telemetry.progress.progress_page import ProgressPage
from myriad.telemetry.span_io.span_ring import SpanRings

__all__ = ["run_agent"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS, _FACTS_SECONDS = 1.0, 60.0
_NO_ANOMALY: tuple[Cause, ...] = ("done", "turned", "interrupted", "peer")
"""Causes of a rank's exit after which the link counters are not kept."""
_STOP_SECONDS = 15.0
"""An agent has ended this long after SIGTERM; Slurm waits for 30 s before it sends SIGKILL."""
_ALONE_SECONDS = 10.0
"""Seconds without a driver after which the agent that has rank 0 reports it."""


def run_agent(
    run: Run,
    node: int,
    page: ProgressPage,
    rings: SpanRings,
    warm: ForkServer,
    start_warm: Callable[[], ForkServer],
    *,
    unattended_seconds: float | None = None,
) -> str | None:
    """Run the agent until the driver reports that the run is over, or until SIGTERM. Return the problem, or
    ``None``. ``unattended_seconds``: how long an agent without ranks waits for a driver before
    `DriverLostError` is raised. ``None``: without limit, because its launcher ends it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    clocks = ClockComparison(node)
    spans = NodeSpans(run, node, rings, clocks.offset)
    executor = NodeAgent(
        run,
        node,
        RankProcesses(run, node, page, spans, warm, start_warm),
        clocks,
        LinkMonitor(run, node, page),
        unattended_seconds,
    )
    try:
        asyncio.run(executor.live())
    finally:
        executor.rank_processes.close()
        executor.monitor.close()
    if executor.is_unattended:
        raise DriverLostError(executor.problem)
    return executor.problem


class NodeAgent:
    """Connects to the driver, carries out its commands, and reports to it."""

    def __init__(
        self,
        run: Run,
        node: int,
        rank_processes: RankProcesses,
        clocks: ClockComparison,
        monitor: LinkMonitor,
        unattended_seconds: float | None,
    ) -> None:
        self._run, self._node, self.rank_processes, self._clocks, self.monitor = (
            run,
            node,
            rank_processes,
            clocks,
            monitor,
        )
        self._facts: NodeFacts | None = None
        """Facts that were last sent to this driver."""
        self._reach, self._unattended_seconds = DriverConnection(run.path), unattended_seconds
        self._examination = Examination(node, run.path)
        self._links = LinkStateReader(lambda: self._reach.interface, rdma=has_driver())
        self._devices = DeviceMonitor(node, run=run)
        self._logs = LogMonitor(run, node, rank_processes.step_of, rank_processes.rank_of)
        self._traces, self._counters = TraceRunner(run, node, rank_processes, monitor), CounterLog(run, node)
        self._link: AuthenticatedLink | None = None
        self.problem: str | None = None
        self.is_unattended = False
        self._stop_asked = STOP_ASKED in os.environ
        self._over = asyncio.Event()
        self._disk_writer, self._reported_alone = AsyncWriter(), False
        self._reported_digests: dict[tuple[int, int], int] = {}
        """Newest step whose digest was sent to this driver, by attempt and rank."""

    async def live(self) -> None:
        """Run all tasks of the agent until the run is over or a task fails."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._ask_to_stop)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end_soon)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a launcher has blocked it until now
        works = (self._stay_linked, self._poll, self._receive_from_ranks, self._compare_clocks)
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

    def _end_soon(self) -> None:
        """End, and with it the ranks. A thread ends the process if something hangs meanwhile."""
        self._over.set()
        timer = threading.Timer(_STOP_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _end_with(self, task: "asyncio.Task[None]") -> None:
        """End the agent when one of its tasks fails; the launcher starts another agent."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("the executor ends", exc_info=error)
            self._end(f"the executor failed: {error}")

    def _end(self, problem: str | None = None) -> None:
        self.problem = problem
        self._over.set()

    def _ask_to_stop(self) -> None:
        if not self._stop_asked:
            self._stop_asked = True
            self.rank_processes.signal_all(signal.SIGINT)
            self._send(StopAsked(self._node))

    # Ranks

    async def _receive_from_ranks(self) -> None:
        """Forward events of the fork server as they arrive."""
        while True:
            await self.rank_processes.wait_for_message()
            for event in self.rank_processes.take():
                if isinstance(event, RankExited):
                    self._send(event)
                    if event.cause not in _NO_ANOMALY:
                        self.monitor.keep("failed rank")
                elif self._stop_asked:
                    self.rank_processes.send_signal((event,), signal.SIGINT)

    async def _poll(self) -> None:
        """Report the progress page and the states of ranks, links and devices each second. Events that cannot
        wait that long (a rank's exit) are reported separately."""
        while True:
            seen, links = self.rank_processes.poll(), self._links.poll()
            devices = self._devices.found + self.rank_processes.failed_checks()
            port, known = free_port(self._reach.host), self._news(seen)
            traffic = self._measure_traffic(links, len(seen))
            self._send(
                Beat(self._node, self.rank_processes.epoch, port, known, links, devices, time.time(), traffic)
            )
            self._counters.poll()
            await asyncio.sleep(_POLL_SECONDS)

    def _measure_traffic(self, links: Sequence[LinkStatus], num_ranks: int) -> tuple[LinkTraffic, ...]:
        try:
            return self.monitor.poll(links, num_ranks)
        # for example, there is no memory for a ring: ranks continue without it
        except (OSError, ValueError) as error:
            _LOG.warning("the traffic of links is not known: %s", error)
            return ()

    # The driver

    def _news(self, seen: Sequence[RankStatus]) -> tuple[RankStatus, ...]:
        """Return the rows without digests that were already sent to this driver."""
        if self._link is None:
            return tuple(seen)
        found = []
        for one in seen:
            key = self.rank_processes.epoch, one.rank
            known = self._reported_digests.get(key, -1)
            new = tuple(digest for digest in one.digests if digest.step > known)
            self._reported_digests[key] = new[-1].step if new else known
            found.append(replace(one, digests=new))
        return tuple(found)

    async def _send_facts(self) -> None:
        """Send the facts of this node to each new driver, and when they change. They are read in a thread,
        because a device driver may hang."""
        while True:
            if self._link is not None:
                link, address = self._link, self._reach.host
                facts = self._facts
                try:
                    facts = await run_in_thread(partial(node_facts, self._node, address))
                except Exception:  # an error of a device driver or its library does not end the agent
                    _LOG.warning("what this node is made of cannot be read", exc_info=True)
                if facts is not None and facts != self._facts and link is self._link:
                    self._facts = facts
                    link.send(facts)
            await asyncio.sleep(_FACTS_SECONDS if self._facts is not None else _POLL_SECONDS)

    async def _compare_clocks(self) -> None:
        """Compare clocks with the driver at intervals."""
        while True:
            if self._link is not None:
                self._link.send(self._clocks.ask())
            await self._clocks.pause()

    def _send(self, message: RankExited | Beat | StopAsked | Examined | Traced) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _stay_linked(self) -> None:
        while True:
            try:
                await self._linked()
            except (OSError, ValueError, KeyError) as error:
                self._reach.failed(error)
            self._link = None
            self._check_unattended()
            await asyncio.sleep(self._reach.pause_seconds())

    async def _linked(self) -> None:
        async with self._reach.link() as link:
            self.rank_processes.host = self._reach.host
            self._reported_digests, self._facts = {}, None
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
                self._execute(order)
        await self._leave(order)

    async def _leave(self, refused: NodeRefused) -> None:
        """Leave the run for good, after the examination that the driver asks for."""
        self._link, found = None, ""
        if refused.examine is not None:
            examined = await self._examination.made(refused.examine)
            found = f"; {examined.words}"
            with suppress(OSError, ValueError, KeyError):
                async with self._reach.link() as link:
                    link.send(examined)
        self._end(refused.why + found)

    def _check_unattended(self) -> None:
        if self._reach.is_cut_off() and self.rank_processes.living():
            _LOG.warning("the driver's machine does not answer: it has given this node up; the ranks end")
            self.rank_processes.signal_all(signal.SIGKILL)
        if (
            not self._reported_alone
            and 0 in self.rank_processes.living()
            and self._reach.seconds_disconnected() > _ALONE_SECONDS
        ):
            self._reported_alone = True
            text = f"no driver can be reached for {_ALONE_SECONDS:g} s"
            self._report_driver(f"{text}: ranks go on, but no fault is repaired until there is one")
        patience = self._unattended_seconds
        if (
            patience is not None
            and self._reach.seconds_disconnected() > patience
            and not self.rank_processes.living()
        ):
            self.is_unattended = True
            self._end(f"no driver of the run was found for {patience:g} s")

    def _report_driver(self, problem: str) -> None:
        _LOG.warning("%s", problem)
        self._disk_writer.enter_event(self._run, "health", what="driver", problem=problem)

    def _joined(self) -> NodeJoined:
        rank_processes = self.rank_processes
        return NodeJoined(
            node=self._node,
            epoch=rank_processes.epoch,
            host=self._reach.host,
            port=free_port(self._reach.host),
            cores=num_cores(),
            memory_bytes=memory_bytes(),
            running=tuple(rank_processes.living()),
            exits=tuple(rank_processes.exits.values()),
            stop_asked=self._stop_asked,
            by=agent_name(),
            machine=machine_name(),
            layout=rank_processes.layout,
        )

    def _execute(self, order: Order) -> None:
        if isinstance(order, Leave):
            self._end()
        elif isinstance(order, NodeTaken):
            self._end(f"{order.by} is node {self._node} of this run already")
        elif isinstance(order, Stop):
            self._ask_to_stop()
        elif isinstance(order, Start):
            self._examination.cancel()
            if order.epoch > self.rank_processes.epoch:
                self._devices.begin(order.epoch, order.ranks)
                self.monitor.begin_attempt()
                self._logs.begin(order.epoch, order.ranks)
            self.rank_processes.start(order)
        elif isinstance(order, ClockAnswer):
            self._clocks.receive(order)
        elif isinstance(order, ExamineNode):
            self._examination.begin(order.how, self._send)
        elif isinstance(order, Trace):
            self._traces.begin(order, self._send)
        elif isinstance(order, KeepCounters):
            self.monitor.keep(order.why)
        elif isinstance(order, NodeRefused) or order.epoch != self.rank_processes.epoch:
            return
        elif isinstance(order, End):
            self.rank_processes.signal_all(signal.SIGKILL)
        elif isinstance(order, Turn):
            self.rank_processes.request_restart()
        elif isinstance(order, Dump):
            self.rank_processes.send_signal(order.ranks, DUMP_SIGNAL)
        elif isinstance(order, Agreed):
            self.rank_processes.set_agreed_step(order.step)


async def watch_snapshot_server(run: Run, node: int) -> None:
    """Watch the node's snapshot server and report a fault, until cancelled."""
    watch, disk_writer = SnapshotServerMonitor(node_server_name(run.path)), AsyncWriter()
    while True:
        if (found := watch.poll()) is not None:
            _LOG.warning("%s", found.problem)
            disk_writer.enter_event(run, "fault", node=node, problem=found.problem)
        await asyncio.sleep(_POLL_SECONDS)
