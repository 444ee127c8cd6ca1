"""``python -m myriad.resilience.drive.driver RUN``: decides what becomes of a run, and has it done.

    executors ──what they see──► decisions ──► journal, then events.jsonl, then ──► executors and the engine
                        ▲ the clock

Who knocks is answered at the `door`, what others are to do goes out by `orders`, what people read is in
`notes`. One a run, no torch, one thread. What it knows is in the journal (what was decided) and with the
executors (what is): a new one goes on where the last was killed, and training does not notice. It is found
by RUN/driver.json. To the engine it speaks in lines of JSON on its output: {} each second, {"drives": true}
once it has a lease, {"replace": NODE}, {"end": OUTCOME, "reason": ...}. A SIGINT tells it that the run is to
save and stop.

With a lease (`tenure.py`) several can be there: one drives, the others wait. One that has lost its lease
does nothing more and ends.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from myriad.resilience.clocks import tell_clock
from myriad.resilience.decide.actions import Action, EndRun
from myriad.resilience.decide.clocks import Clocks
from myriad.resilience.decide.decisions import Decider
from myriad.resilience.drive.alarms import AlarmProcess
from myriad.resilience.drive.door import Door
from myriad.resilience.drive.gate import Gate
from myriad.resilience.drive.journal import Journal
from myriad.resilience.drive.launcher_watch import LauncherWatch
from myriad.resilience.drive.members import Members
from myriad.resilience.drive.node_book import NodeBook
from myriad.resilience.drive.notes import Notes
from myriad.resilience.drive.orders import Orders, TellEngine, tell_engine
from myriad.resilience.drive.scribe import Scribe, ScribeHandler
from myriad.resilience.drive.tenure import Alone, Tenure
from myriad.resilience.drive.traces import Traces
from myriad.resilience.engines.child import die_with_parent
from myriad.resilience.facts import (
    OBSERVED,
    STOP_ASKED,
    Beat,
    ClockAsked,
    EvictionAnswer,
    EvictionAsked,
    Examined,
    NodeFacts,
    NodeJoined,
    NodeLeft,
    NodeWanted,
    Observation,
    Observed,
    Stop,
    StopAsked,
)
from myriad.resilience.herald import Herald
from myriad.resilience.listen import split_listen
from myriad.resilience.traces import TraceAsked, Traced
from myriad.resilience.wire import Link, Refused, run_secret
from myriad.run import Run
from myriad.strangers import AUTHENTICATION_SECONDS, Strangers

__all__ = ["Driver", "main"]

_LOG = logging.getLogger(__name__)
_DUE_SECONDS, _CALM_SECONDS = 0.25, 1.0
"""How often the time is looked at: while something may be wrong, and while nothing is."""
_ALIVE_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_REFUSAL_SECONDS = 10.0
"""At most one refused connection is logged in this time: a flood must not fill the log."""
_MOST_WAITING = 4096
"""Connections that are not accepted yet: all executors come at once when there is a new driver."""


class Driver:
    """Everything but the decisions."""

    def __init__(
        self,
        run: Run,
        scribe: Scribe,
        tenure: Tenure | None = None,
        listen: str | None = None,
        tell: TellEngine = tell_engine,
        alarms: AlarmProcess | None = None,
    ) -> None:
        """``listen``: address, if not the plan's; ``tell``: hands a line to the engine; ``alarms``: sends the
        run's alarms, if the job has places."""
        self._run, self._scribe, self._alarms = run, scribe, alarms
        self._journal = Journal(run.path / "journal.jsonl", self._report_journal)
        self.tenure = tenure or Alone(self._journal)
        plan, state = self.tenure.replay()
        self._listen = listen or plan.listen
        self._decider = decider = Decider(plan, time.monotonic(), state)
        self._secret = run_secret(run.path / "secret")
        self._tell_engine = tell
        self._links: dict[int, Link] = {}
        self._launcher = LauncherWatch()
        self._strangers, self._refused_at = Strangers(), -_REFUSAL_SECONDS
        self._members, self._clocks = Members(), Clocks()
        self._book = NodeBook(run.nodes_path)
        gate = Gate(run, scribe, lambda node: tell({"replace": node}))
        self._notes = Notes(run, scribe, gate)
        self._orders = Orders(plan, decider, self._links, tell)
        self._traces = Traces(run, scribe, self._links, decider.step_seconds)
        self._door = Door(plan, decider, gate, self._members, self._traces, self._links.keys())
        self._over, self._due = asyncio.Event(), asyncio.Event()
        self._rests: asyncio.TimerHandle | None = None
        self.is_lost = False
        """It has ended because another drives, or may."""

    async def drive(self) -> None:
        """Until the run is over."""
        listen = split_listen(self._listen)
        server = await asyncio.start_server(self._serve, *listen, backlog=_MOST_WAITING)
        host, port = server.sockets[0].getsockname()[:2]
        address = {"host": host, "port": port, "pid": os.getpid(), **self._how_long(), **self._term()}
        herald = Herald(self._run.path, address)
        if self.tenure.term:
            herald.repeat(self.tenure.holds, self.tenure.lose)
        self._hear_of_stop()
        async with server:
            if self._decider.state.phase == "over":  # decided, and perhaps not told
                state = self._decider.state
                assert state.outcome is not None
                self._do(EndRun(rule="it was over", outcome=state.outcome, reason=state.reason))
            tell_at = 0.0
            while not self._over.is_set():
                if not self.tenure.holds():
                    self._lose()
                    break
                self._act(self._decider.due(time.monotonic()))
                self._orders.tell_agreed()
                if time.monotonic() >= tell_at:
                    tell_at = time.monotonic() + _ALIVE_SECONDS
                    self._notes.of_launcher(self._launcher.look())  # before there is more for it to read
                    self._tell_engine({})
                    self._tell_spares()
                    self._act(self._book.take())
                    if self._alarms is not None:
                        self._alarms.look()
                    if self._journal.num_waiting or self._run.num_waiting:
                        self._scribe.enter("", self._write_late)
                await self._rest()
            await self._let_leave()
        self._scribe.enter("", self._write_late)
        self._book.settle()
        if self._alarms is not None and not self.is_lost:
            self._scribe.settle()
            self._alarms.finish()

    def _write_late(self) -> None:
        """What a full disk has refused, if there is room now."""
        self._journal.retry()
        self._run.flush_lines()

    def _report_journal(self, problem: str, num_late: int, num_dropped: int) -> None:
        counts = {} if problem else {"num_late": num_late, "num_dropped": num_dropped}
        self._scribe.enter_event(self._run, "telemetry", place="journal.jsonl", problem=problem, **counts)

    async def _rest(self) -> None:
        """Until the time is to be looked at again."""
        seconds = _CALM_SECONDS if self._decider.is_calm(time.monotonic()) else _DUE_SECONDS
        self._due.clear()
        self._rests = asyncio.get_running_loop().call_later(seconds, self._due.set)
        await self._due.wait()

    def _soon(self) -> None:
        """Something has happened that may need more than an answer."""
        loop = asyncio.get_running_loop()
        if self._rests is not None and self._rests.when() > loop.time() + _DUE_SECONDS:
            self._rests.cancel()
            self._rests = loop.call_later(_DUE_SECONDS, self._due.set)

    def _how_long(self) -> dict[str, float]:
        """This driver waits for an executor that is silent, and executors without any for another driver."""
        silent = self._decider.silent_seconds
        return {"silent_seconds": silent, "alone_seconds": silent + self.tenure.takeover_seconds}

    def _term(self) -> dict[str, int]:
        return {"term": self.tenure.term} if self.tenure.term else {}

    def _lose(self) -> None:
        """Another drives, or may: nobody is told to leave, or anything."""
        _LOG.warning("the lease on driving this run is lost: this driver ends")
        self.is_lost = True
        self._over.set()
        for link in list(self._links.values()):
            link.abort()

    def _tell_spares(self) -> None:
        state = self._decider.state
        if state.phase == "running":
            self._notes.of_spares(len(self._decider.nodes.keys() - state.placement.keys()))

    def _hear_of_stop(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._ask_to_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the engine has blocked it until now
        if STOP_ASKED in os.environ:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        if self._alarms is not None:
            self._alarms.stopping()
        self._orders.send_all(Stop())
        self._hear(StopAsked(-1))

    async def _let_leave(self) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._links and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One executor, until it is gone or says what cannot be."""
        link, node = Link(reader, writer), None
        self._strangers.admit(link, writer.get_extra_info("peername", ("",))[0], link.abort)
        try:
            await link.prove(self._secret, "driver", "executor")
            self._strangers.leave(link)
            async with asyncio.timeout(AUTHENTICATION_SECONDS):
                joined = await link.receive((NodeJoined, NodeWanted, EvictionAsked, TraceAsked, Examined))
            if isinstance(joined, Examined):
                self._notes.of_left_out(joined)
                return
            if not isinstance(joined, NodeJoined):
                link.send(await self._answer(joined))
                return
            if refused := await self._door.why_not(joined):
                link.send(refused)
                return
            node = joined.node
            self._let_in(joined, link)
            while True:
                heard: Observed | ClockAsked | Traced = await link.receive((*OBSERVED, ClockAsked))
                if isinstance(heard, ClockAsked):
                    link.send(tell_clock(heard, time.time_ns()))
                    continue
                if heard.node != node:
                    raise Refused(f"node {node} speaks for node {heard.node}")
                if isinstance(heard, Traced):
                    self._traces.heard(heard)
                else:
                    self._hear(heard)
                self._members.heard(node, time.monotonic())
        except Refused as error:
            if node is not None:
                _LOG.warning("node %d: its connection is closed: %s", node, error)
            elif time.monotonic() - self._refused_at > _REFUSAL_SECONDS:
                _LOG.warning("a connection was refused: %s", error)
                self._refused_at = time.monotonic()
        except (OSError, TimeoutError):
            pass  # it is gone: told below
        finally:
            self._strangers.leave(link)
            link.close()
            if node is not None and self._links.get(node) is link:
                del self._links[node]
                self._members.left(node)
                self._traces.left(node)
                self._hear(NodeLeft(node))

    async def _answer(self, asked: NodeWanted | EvictionAsked | TraceAsked) -> object:
        answer = await self._door.answer(asked)
        if isinstance(answer, EvictionAnswer) and isinstance(asked, EvictionAsked) and not answer.refused:
            self._hear(asked)
        return answer

    def _let_in(self, joined: NodeJoined, link: Link) -> None:
        if joined.node in self._links:
            self._links[joined.node].close()
        self._links[joined.node] = link
        self._members.joined(joined, time.monotonic())
        if self._decider.state.stop_asked:
            link.send(Stop())
        self._hear(joined)

    def _hear(self, observation: Observation) -> None:
        if isinstance(observation, Beat):
            wrong = self._clocks.heard(observation.node, observation.clock_seconds, time.time())
            self._act([wrong] if wrong is not None else [])
        elif isinstance(observation, NodeFacts):
            self._book.enter(observation)
        else:
            self._soon()
        self._act(self._decider.hear(observation, time.monotonic()))

    def _act(self, actions: Sequence[Action]) -> None:
        if self.is_lost:
            return
        if actions:
            entry = self.tenure.mark(self._journal.entry(actions, self._decider.state))
            if not self.tenure.allows(entry):
                return self._lose()
            self._scribe.enter("a decision", partial(self._journal.append, entry))
            for action in actions:
                self._notes.of_action(action)
            if not self._scribe.settle():
                _LOG.warning("acting on what is not in the journal yet: its disk hangs")
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        self._orders.carry_out(action)
        if isinstance(action, EndRun):
            self._over.set()


def main(arguments: list[str]) -> int:
    """Drives one run."""
    if engine := os.environ.get("MYRIAD_ENGINE_PID"):
        die_with_parent(int(engine))
    given = _parser().parse_args(arguments)
    scribe, run = Scribe(), Run(given.run)
    handlers = [ScribeHandler(scribe)]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    _raise_file_limit()
    try:
        tenure = None if given.journal == "file" else _wait_for_tenure(run, given)
        if given.journal == "file" or tenure is not None:
            alarms = AlarmProcess(run) if given.alarms else None
            _drive(Driver(run, scribe, tenure, given.listen, alarms=alarms))
    finally:
        scribe.settle()
    return 0


def _drive(driver: Driver) -> None:
    try:
        asyncio.run(driver.drive())
    finally:
        driver.tenure.release()  # the run is over, or this driver no good: another may have it at once


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--listen")
    parser.add_argument("--journal", default="file")
    parser.add_argument("--owner", default="")
    parser.add_argument("--lease-seconds", type=float, default=0.0)
    parser.add_argument("--alarms", action="store_true")
    return parser


def _wait_for_tenure(run: Run, given: argparse.Namespace) -> Tenure | None:
    """Once the lease is this driver's; ``None``: nobody waits any more."""
    from myriad.resilience.drive.candidate import Candidate

    journal = Journal(run.path / "journal.jsonl")
    candidate = Candidate(run, journal, given.journal, given.owner, given.lease_seconds)
    if (tenure := candidate.wait(tell_engine)) is not None:
        tell_engine({"drives": True})
    return tenure


def _raise_file_limit() -> None:
    """A connection for each executor: by default a process may have 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
