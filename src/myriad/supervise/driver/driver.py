"""``python -m myriad.supervise.driver.driver RUN``: decides what happens in a run, and has it carried out.

    agents ──observations──► decisions ──► journal, then events.jsonl, then ──► agents and the launcher
                        ▲ the clock

Requests are answered by `RequestHandler`, commands go out through `CommandSender`, events are written by
`EventLog`. A run has one driver, without torch, in one thread. Its state is in the journal (decisions) and
with the agents (facts). So a new driver continues where the last was killed, and training is not affected.
Agents find it by RUN/driver.json. It writes lines of JSON to the launcher on its output: {} each second,
{"drives": true} once it has a lease, {"replace": NODE}, {"end": OUTCOME, "reason": ...}. On SIGINT the run
saves and stops.

With a lease (`leadership`), several drivers can run: one leads, the others wait. A driver that has lost its
lease does nothing more and ends.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

from myriad.run import Run
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.background import AsyncLogHandler, AsyncWriter
from myriad.supervise.clock_exchange import answer_clock
from myriad.supervise.driver.admission import AdmissionCheck, NodeNumbers
from myriad.supervise.driver.command_sender import CommandSender, SendToLauncher, send_to_launcher
from myriad.supervise.driver.event_log import AlarmProcess, EventLog
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver.launcher_monitor import LauncherMonitor
from myriad.supervise.driver.leadership import Leadership, SoleLeadership
from myriad.supervise.driver.node_inventory import NodeInventory
from myriad.supervise.driver.request_handler import RequestHandler, TraceRequests
from myriad.supervise.driver_address import AddressFile, split_listen
from myriad.supervise.messages import (
    OBSERVED,
    STOP_ASKED,
    Beat,
    ClockAsked,
    EvictionAnswer,
    EvictionAsked,
    NodeJoined,
    NodeLeft,
    NodeWanted,
    Observation,
    Observed,
    Stop,
    StopAsked,
    TraceAsked,
    Traced,
)
from myriad.supervise.observations import Examined, NodeFacts
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.health import ClockCheck
from myriad.supervise.policy.policy_actions import EndRun, PolicyAction
from myriad.system.child_process import die_with_parent
from myriad.system.quick_process import start_quickly
from myriad.wire.framing import Refused
from myriad.wire.listener import Listener, raise_file_limit
from myriad.wire.pending_connections import AUTHENTICATION_SECONDS, PendingConnections
from myriad.wire.run_secret import run_secret

__all__ = ["Driver", "main"]

_LOG = logging.getLogger(__name__)
_DUE_SECONDS, _CALM_SECONDS = 0.25, 1.0
"""Seconds between two checks of deadlines: if something may be wrong, and if all ranks train without a
fault."""
_ALIVE_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_REFUSAL_SECONDS = 10.0
"""At most one refused connection is logged in this time, so that many refusals do not fill the log."""
_MOST_WAITING = 4096
"""Most connections that wait to be accepted: all agents connect at once to a new driver."""


class Driver:
    """Connects observations, decisions, journal and commands; `Decider` makes the decisions."""

    def __init__(
        self,
        run: Run,
        disk_writer: AsyncWriter,
        leadership: Leadership | None = None,
        listen: str | None = None,
        to_launcher: SendToLauncher = send_to_launcher,
        alarms: AlarmProcess | None = None,
        *,
        encrypts: bool = False,
    ) -> None:
        """``listen``: address, if it differs from the plan's. ``to_launcher``: sends a message to the
        launcher. ``alarms``: sends the run's alarms, if the job has destinations. ``encrypts``: with
        TLS, which agents learn from driver.json."""
        self._encrypts = encrypts
        self._run, self._disk_writer, self._alarms = run, disk_writer, alarms
        self._journal = Journal(run.path / "journal.jsonl", self._report_journal)
        self.leadership = leadership or SoleLeadership(self._journal)
        plan, state = self.leadership.replay()
        self._listen = listen or plan.listen
        self._decider = decider = Decider(plan, time.monotonic(), state)
        self._secret = run_secret(run.path / "secret")
        self._send_to_launcher = to_launcher
        self._links: dict[int, AuthenticatedLink] = {}
        self._launcher = LauncherMonitor()
        self._pending, self._refused_at = PendingConnections(), -_REFUSAL_SECONDS
        self._members, self._clocks = NodeNumbers(), ClockCheck()
        self._inventory = NodeInventory(run.nodes_path)
        admission = AdmissionCheck(run, disk_writer, lambda node: to_launcher({"replace": node}))
        self._event_log = EventLog(run, disk_writer, admission)
        self._commands = CommandSender(plan, decider, self._links, to_launcher)
        self._traces = TraceRequests(run, disk_writer, self._links, decider.step_seconds)
        self._handler = RequestHandler(
            plan, decider, admission, self._members, self._traces, self._links.keys()
        )
        self._over, self._due = asyncio.Event(), asyncio.Event()
        self._rests: asyncio.TimerHandle | None = None
        self.is_lost = False
        """Whether this driver ended because another driver leads or may lead."""

    async def drive(self) -> None:
        """Drive until the run is over or the lease is lost."""
        listener = await _bound(*split_listen(self._listen))
        server = await asyncio.start_server(self._serve, sock=listener, backlog=_MOST_WAITING)
        host, port = server.sockets[0].getsockname()[:2]
        address: dict[str, object] = {"host": host, "port": port, "pid": os.getpid()}
        address |= {**self._how_long(), **self._term()}
        if self._encrypts:
            address["encrypt"] = True
        address_file = AddressFile(self._run.path, address)
        if self.leadership.term:
            address_file.repeat(self.leadership.holds, self.leadership.lose)
        self._receive_stop_request()
        async with server:
            if self._decider.state.phase == "over":  # the end was decided, but perhaps not sent
                state = self._decider.state
                assert state.outcome is not None
                self._do(EndRun(rule="it was over", outcome=state.outcome, reason=state.reason))
            alive_at = 0.0
            while not self._over.is_set():
                if not self.leadership.holds():
                    self._lose()
                    break
                self._act(self._decider.due(time.monotonic()))
                self._commands.send_agreed()
                if time.monotonic() >= alive_at:
                    alive_at = time.monotonic() + _ALIVE_SECONDS
                    self._event_log.of_launcher(self._launcher.poll())  # before more is written to the pipe
                    self._send_to_launcher({})
                    self._report_spares()
                    self._act(self._inventory.take())
                    if self._alarms is not None:
                        self._alarms.poll()
                    if self._journal.num_waiting or self._run.num_waiting:
                        self._disk_writer.enter("", self._write_late)
                await self._rest()
            await self._release_node()
        self._disk_writer.enter("", self._write_late)
        self._inventory.wait_written()
        if self._alarms is not None and not self.is_lost:
            self._disk_writer.wait_written()
            self._alarms.finish()

    def _write_late(self) -> None:
        """Write the lines that a full disk has refused, if there is room now."""
        self._journal.retry()
        self._run.flush_lines()

    def _report_journal(self, problem: str, num_late: int, num_dropped: int) -> None:
        counts = {} if problem else {"num_late": num_late, "num_dropped": num_dropped}
        self._disk_writer.enter_event(
            self._run, "telemetry", place="journal.jsonl", problem=problem, **counts
        )

    async def _rest(self) -> None:
        """Wait until the deadlines must be checked again."""
        seconds = _CALM_SECONDS if self._decider.is_calm(time.monotonic()) else _DUE_SECONDS
        self._due.clear()
        self._rests = asyncio.get_running_loop().call_later(seconds, self._due.set)
        await self._due.wait()

    def _soon(self) -> None:
        """Check the deadlines soon, because of an observation that may require it."""
        loop = asyncio.get_running_loop()
        if self._rests is not None and self._rests.when() > loop.time() + _DUE_SECONDS:
            self._rests.cancel()
            self._rests = loop.call_later(_DUE_SECONDS, self._due.set)

    def _how_long(self) -> dict[str, float]:
        """Return how long the driver waits for a silent agent, and how long agents without a driver wait for
        the next one."""
        silent = self._decider.silent_seconds
        return {"silent_seconds": silent, "alone_seconds": silent + self.leadership.takeover_seconds}

    def _term(self) -> dict[str, int]:
        return {"term": self.leadership.term} if self.leadership.term else {}

    def _lose(self) -> None:
        """End because another driver leads, or may: send nothing to agents or launcher."""
        _LOG.warning("the lease on driving this run is lost: this driver ends")
        self.is_lost = True
        self._over.set()
        for link in list(self._links.values()):
            link.abort()

    def _report_spares(self) -> None:
        state = self._decider.state
        if state.phase == "running":
            self._event_log.of_spares(len(self._decider.nodes.keys() - state.placement.keys()))

    def _receive_stop_request(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._ask_to_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has blocked it until now
        if STOP_ASKED in os.environ:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        if self._alarms is not None:
            self._alarms.stopping()
        self._commands.send_all(Stop())
        self._hear(StopAsked(-1))

    async def _release_node(self) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._links and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends or breaks the protocol."""
        link, node = AuthenticatedLink(reader, writer), None
        self._pending.admit(link, writer.get_extra_info("peername", ("",))[0], link.abort)
        try:
            await link.accept(self._secret, encrypts=self._encrypts)
            self._pending.leave(link)
            async with asyncio.timeout(AUTHENTICATION_SECONDS):
                joined = await link.receive((NodeJoined, NodeWanted, EvictionAsked, TraceAsked, Examined))
            if isinstance(joined, Examined):
                self._event_log.of_left_out(joined)
                return
            if not isinstance(joined, NodeJoined):
                link.send(await self._answer(joined))
                return
            if refused := await self._handler.why_not(joined):
                link.send(refused)
                return
            node = joined.node
            self._admit(joined, link)
            while True:
                heard: Observed | ClockAsked | Traced = await link.receive((*OBSERVED, ClockAsked))
                if isinstance(heard, ClockAsked):
                    link.send(answer_clock(heard, time.time_ns()))
                    continue
                if heard.node != node:
                    raise Refused(f"node {node} speaks for node {heard.node}")
                if isinstance(heard, Traced):
                    self._traces.receive(heard)
                else:
                    self._hear(heard)
                self._members.record_beat(node, time.monotonic())
        except Refused as error:
            if node is not None:
                _LOG.warning("node %d: its connection is closed: %s", node, error)
            elif time.monotonic() - self._refused_at > _REFUSAL_SECONDS:
                _LOG.warning("a connection was refused: %s", error)
                self._refused_at = time.monotonic()
        except (OSError, TimeoutError):
            pass  # the connection is lost; that is reported below
        finally:
            self._pending.leave(link)
            link.close()
            if node is not None and self._links.get(node) is link:
                del self._links[node]
                self._members.left(node)
                self._traces.left(node)
                self._hear(NodeLeft(node))

    async def _answer(self, asked: NodeWanted | EvictionAsked | TraceAsked) -> object:
        answer = await self._handler.answer(asked)
        if isinstance(answer, EvictionAnswer) and isinstance(asked, EvictionAsked) and not answer.refused:
            self._hear(asked)
        return answer

    def _admit(self, joined: NodeJoined, link: AuthenticatedLink) -> None:
        if joined.node in self._links:
            self._links[joined.node].close()
        self._links[joined.node] = link
        self._members.joined(joined, time.monotonic())
        if self._decider.state.stop_asked:
            link.send(Stop())
        self._hear(joined)

    def _hear(self, observation: Observation) -> None:
        if isinstance(observation, Beat):
            wrong = self._clocks.observe(observation.node, observation.clock_seconds, time.time())
            self._act([wrong] if wrong is not None else [])
        elif isinstance(observation, NodeFacts):
            self._inventory.enter(observation)
        else:
            self._soon()
        self._act(self._decider.handle(observation, time.monotonic()))

    def _act(self, actions: Sequence[PolicyAction]) -> None:
        if self.is_lost:
            return
        if actions:
            entry = self.leadership.mark(self._journal.entry(actions, self._decider.state))
            if not self.leadership.allows(entry):
                return self._lose()
            self._disk_writer.enter("a decision", partial(self._journal.append, entry))
            for action in actions:
                self._event_log.of_action(action)
            if not self._disk_writer.wait_written():
                _LOG.warning("acting on what is not in the journal yet: its disk hangs")
        for action in actions:
            self._do(action)

    def _do(self, action: PolicyAction) -> None:
        self._commands.carry_out(action)
        if isinstance(action, EndRun):
            self._over.set()


def main(arguments: list[str]) -> int:
    """Drive a run: the program of the driver process."""
    start_quickly()
    if engine := os.environ.get("MYRIAD_ENGINE_PID"):
        die_with_parent(int(engine))
    given = _parser().parse_args(arguments)
    disk_writer, run = AsyncWriter(), Run(given.run)
    run.share_as_folder()
    handlers = [AsyncLogHandler(disk_writer)]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    raise_file_limit()
    try:
        leadership = None if given.journal == "file" else _wait_for_leadership(run, given)
        if given.journal == "file" or leadership is not None:
            alarms = AlarmProcess(run) if given.alarms else None
            _drive(Driver(run, disk_writer, leadership, given.listen, alarms=alarms, encrypts=given.encrypt))
    finally:
        disk_writer.wait_written()
    return 0


def _drive(driver: Driver) -> None:
    try:
        asyncio.run(driver.drive())
    finally:
        # the run is over or this driver has failed: another may take the lease at once
        driver.leadership.release()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--listen")
    parser.add_argument("--journal", default="file")
    parser.add_argument("--owner", default="")
    parser.add_argument("--lease-seconds", type=float, default=0.0)
    parser.add_argument("--alarms", action="store_true")
    parser.add_argument("--encrypt", action="store_true")
    return parser


def _wait_for_leadership(run: Run, given: argparse.Namespace) -> Leadership | None:
    """Wait for the lease; ``None``: the wait was stopped."""
    from myriad.supervise.driver.redis_leadership import StandbyDriver

    journal = Journal(run.path / "journal.jsonl")
    candidate = StandbyDriver(run, journal, given.journal, given.owner, given.lease_seconds)
    if (leadership := candidate.wait(send_to_launcher)) is not None:
        send_to_launcher({"drives": True})
    return leadership


async def _bound(host: str, port: int) -> Listener:
    """Return a socket that can listen at this address. Raises ``OSError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    return Listener.bound(family, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
