"""The rank processes of a node, as its agent starts, watches and ends them, and the spans that they record.

    agent ──► fork server ──► rank, rank, ...
    ranks ──► span rings ──► Shipper (a thread) ──► RUN/spans, and the job's collector

Times of spans are by the driver's clock. A failure to ship spans never ends the agent.
"""

import asyncio
import logging
import os
import signal
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from myriad.comm.attempt_layout import AS_THE_JOB, ATTEMPT_LAYOUT, AttemptLayout
from myriad.comm.rendezvous.store_secret import STORE_SECRET, attempt_secret
from myriad.run import Run
from myriad.supervise.agent.fork_server import ForkServer
from myriad.supervise.background import AsyncWriter
from myriad.supervise.driver_address import interface_of
from myriad.supervise.exit_causes import cause_of, count_memory_kills, error_excerpt
from myriad.supervise.messages import Start
from myriad.supervise.observations import CommStatus, DeviceTrouble, Digest, RankExited, RankStatus
from myriad.system.processes import PausableClock, StopTimer, process_state
from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.progress.progress_page import PROGRESS, ProgressPage, RowStatus
from myriad.telemetry.shipping.clock_offset import ClockOffset
from myriad.telemetry.shipping.shipper import Shipper, open_outlets
from myriad.telemetry.span_io.span_ring import SPANS, SpanRings
from myriad.wire.run_secret import run_secret

__all__ = ["NodeSpans", "RankProcesses", "troubles_of"]

_LOG = logging.getLogger(__name__)


class NodeSpans:
    """Ships the spans of one node's ranks."""

    def __init__(self, run: Run, node: int, rings: SpanRings, clock: ClockOffset) -> None:
        """``clock``: offset to the driver's clock."""
        self._run, self._node, self._rings, self._clock = run, node, rings, clock
        self._shipper: Shipper | None = None
        self._begun = False

    def begin(self, num_ranks: int) -> None:
        """Begin with the spans of new ranks; the last spans of earlier ranks are kept."""
        if not self._begun:
            self._begun, self._shipper = True, self._start()
        if self._shipper is not None:
            self._shipper.begin(num_ranks)
        else:
            for row in range(num_ranks):
                self._rings.clear(row)

    def _start(self) -> Shipper | None:
        place, run = f"node-{self._node}", self._run
        try:
            how = self._how()
            if not how.spans:
                return None
            outlets = open_outlets(run.spans_path, place, run.path.name, how, self._report)
            return Shipper(self._rings, self._node, outlets, self._clock.at)
        except RuntimeError as error:  # no thread can be started
            _LOG.warning("spans are not kept: %s", error)
            return None

    def address(self, row: int) -> str:
        """Return the address of the ring in which a rank writes its spans."""
        return self._rings.address(row)

    def close(self) -> None:
        """Ship the spans that are left, and end."""
        if self._shipper is not None:
            self._shipper.close()

    def _how(self) -> TelemetryConfig:
        """Return the job's telemetry settings. They were checked when the run began."""
        try:
            tree = tomllib.loads(self._run.job_path.read_text())
            return TelemetryConfig.model_validate(tree.get("telemetry", {}))
        except (OSError, ValueError) as error:
            _LOG.warning("how spans are kept is not known, so it is as by default: %s", error)
            return TelemetryConfig()

    def _report(self, place: str, problem: str, num_dropped: int) -> None:
        state = problem or "works again"
        _LOG.warning("spans to %s: %s; %d spans are lost", place, state, num_dropped)
        self._run.append_event(
            "telemetry", node=self._node, place=place, problem=problem, num_dropped=num_dropped
        )


_STOPPED_SECONDS, _HUNG_SECONDS, _LONGEST_POLL_SECONDS = 1.5, 5.0, 2.0
_MOVING_NS = 400_000_000
"""A rank whose row changed within this time is running; the kernel is not asked for its state."""
_OWN_CHECKS = ("product", "memory", "copy")
"""The checks of `TRAINING_CHECKS` that a rank computes alone."""
_ERROR_CHARACTERS = 4096
"""Most characters of a rank's error that are reported, from its end, because messages have a size limit."""


@dataclass
class _Rank:
    number: int
    row: int
    log: Path
    began_ns: int
    pid: int = 0
    stopped: StopTimer = field(default_factory=StopTimer)
    was_stopped: bool = False


class RankProcesses:
    """Starts, watches and ends the ranks of one node."""

    def __init__(
        self,
        run: Run,
        node: int,
        page: ProgressPage,
        spans: NodeSpans,
        warm: ForkServer,
        start_warm: Callable[[], ForkServer],
    ) -> None:
        """``start_warm``: starts another fork server when ``warm`` is gone."""
        self._run, self._node, self._page, self._spans = run, node, page, spans
        self._warm, self._start_warm = warm, start_warm
        self._ranks: dict[int, _Rank] = {}
        self._waiting: Start | None = None
        self._clock, self._warm_stopped, self._disk_writer = (
            PausableClock(_LONGEST_POLL_SECONDS),
            StopTimer(),
            AsyncWriter(),
        )
        self._polled_at_ns = time.monotonic_ns()
        self._memory_kills = count_memory_kills()
        self.epoch = 0
        """Number of the newest attempt; 0: no ranks were started yet."""
        self.layout = AttemptLayout()
        """Layout of that attempt."""
        self.host = "127.0.0.1"
        """Address at which ranks of other nodes reach those of this one."""
        self.exits: dict[int, RankExited] = {}
        """Exits of that attempt, by rank."""

    @cached_property
    def _secret(self) -> bytes:
        """The run's secret, read once: a restart must not wait for a disk."""
        return run_secret(self._run.path / "secret")

    def living(self) -> list[int]:
        """Return the ranks that run, in ascending order."""
        return sorted(self._ranks)

    def start(self, order: Start) -> None:
        """Start the ranks of a newer attempt; end those that still run first."""
        if order.epoch <= self.epoch:
            return
        if self._ranks:
            self._waiting = order
            self.signal_all(signal.SIGKILL)
            return
        self._waiting, self.epoch, self.exits = None, order.epoch, {}
        self.layout = order.layout
        self._spans.begin(len(order.ranks))
        for row, number in enumerate(order.ranks):
            self._page.clear(row)
            log = self._run.log_path(number, order.epoch)
            self._ranks[number] = _Rank(number, row, log, time.monotonic_ns())
            self._warm.fork(number, self._environment(order, row), log)

    def _environment(self, order: Start, row: int) -> dict[str, str]:
        mine = {
            "RANK": order.ranks[row],
            "WORLD_SIZE": order.world,
            "LOCAL_RANK": row,
            "LOCAL_WORLD_SIZE": len(order.ranks),
            "GROUP_RANK": order.ranks[row] // len(order.ranks),
            "MASTER_ADDR": order.host,
            "MASTER_PORT": order.port,
            "MYRIAD_EPOCH": order.epoch,
            "MYRIAD_ATTEMPT_ID": f"{self._run.path.name}.{order.epoch}.{order.port}",
            "PYTHONFAULTHANDLER": 1,
            STORE_SECRET: attempt_secret(self._secret, f"{order.epoch}.{order.port}"),
            PROGRESS: self._page.address(row),
            SPANS: self._spans.address(row),
            "MYRIAD_SKIP_STEPS": " ".join(map(str, order.skipped_steps)),
            "MYRIAD_NEWEST_STEP": "" if order.newest_step is None else order.newest_step,
        }
        if order.layout != AS_THE_JOB:
            mine[ATTEMPT_LAYOUT] = order.layout.text
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(self.host)) is not None:
            mine["GLOO_SOCKET_IFNAME"] = interface  # else gloo looks up the host's name: it may not resolve
        return {key: str(value) for key, value in mine.items()}

    def send_signal(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to these ranks and the processes that they have started."""
        self._warm.signal([rank for rank in ranks if rank in self._ranks], number)

    def request_restart(self) -> None:
        """Have all ranks end after the step in progress, so that another attempt can start."""
        for rank in self._ranks.values():
            self._page.request_restart(rank.row)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all ranks and the processes that they have started."""
        self.send_signal(self.living(), number)

    def set_agreed_step(self, step: int) -> None:
        """Let ranks drop the states before ``step``."""
        for rank in self._ranks.values():
            self._page.agree(rank.row, step)

    def ask_trace(self, ranks: Iterable[int], word: int) -> None:
        """Ask these ranks for a trace with a word of the progress page; 0 withdraws the request."""
        for rank in ranks:
            if rank in self._ranks:
                self._page.ask_trace(self._ranks[rank].row, word)

    def trace_answer(self, rank: int) -> int:
        """Return the answer of a rank to `ask_trace`; 0: no answer."""
        return self._page.trace_answer(self._ranks[rank].row) if rank in self._ranks else 0

    def step_of(self, rank: int) -> int:
        """Return the step that a rank is in; -1: no step, or the rank has ended."""
        known = self._ranks.get(rank)
        seen = None if known is None else self._page.read(known.row)
        return seen.step if seen is not None and seen.pid else -1

    def rank_of(self, pid: int) -> int:
        """Return the rank with a process id; -1: no rank has it."""
        return next((rank.number for rank in self._ranks.values() if rank.pid == pid), -1)

    async def wait_for_message(self) -> None:
        """Return when the fork server has sent a message."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._warm.channel, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._warm.channel)

    def take(self) -> list[RankExited | int]:
        """Return the ranks that have ended, and the numbers of those that have begun."""
        messages = self._warm.receive()
        if messages is None:
            return self._lose_warm()
        found: list[RankExited | int] = []
        for message in messages:
            if "forked" in message:
                self._ranks[message["forked"]].pid = message["pid"]
                found.append(message["forked"])
            else:
                found.append(self._ended(message["ended"], message["code"]))
        self._start_waiting()
        return found

    def _ended(self, number: int, code: int) -> RankExited:
        rank = self._ranks.pop(number)
        error = error_excerpt(rank.log)[-_ERROR_CHARACTERS:] if code else ""
        kills = count_memory_kills() if code == -signal.SIGKILL else self._memory_kills
        cause = cause_of(code, error, memory_killed=kills > self._memory_kills)
        self._memory_kills = kills
        seen = self._page.read(rank.row)
        step = seen.step if seen.pid else -1
        digests, log = _digests(seen), str(rank.log)
        ended = RankExited(self._node, self.epoch, number, code, cause, step, error, log, digests)
        self.exits[number] = ended
        return ended

    def _lose_warm(self) -> list[RankExited | int]:
        """Start another fork server, because the last one and its ranks have died."""
        self._warm.close()
        self._warm = self._start_warm()
        lost: list[RankExited | int] = [self._ended(number, -signal.SIGKILL) for number in self.living()]
        self._start_waiting()
        return lost

    def _start_waiting(self) -> None:
        if self._waiting is not None and not self._ranks:
            self.start(self._waiting)

    def poll(self) -> tuple[RankStatus, ...]:
        """Return what each running rank is doing."""
        now, seconds = time.monotonic_ns(), self._clock.read()
        held_up = max(0, now - self._polled_at_ns - int(1e9 * _LONGEST_POLL_SECONDS))
        self._polled_at_ns = now
        self._check_warm(seconds)
        return tuple(self._observe(rank, now, held_up, seconds) for rank in self._ranks.values())

    def _check_warm(self, seconds: float) -> None:
        """Kill a fork server that is stopped or hung, with its ranks: it neither forks ranks nor reports
        their exits."""
        stopped = self._warm_stopped.poll(self._warm.pid, seconds)
        if stopped is not None and stopped > _STOPPED_SECONDS:
            self._kill_warm("was stopped (SIGSTOP)")
        elif (hung := self._warm.ping()) is not None and hung > _HUNG_SECONDS:
            self._kill_warm(f"has not answered for {hung:.0f} s")

    def _kill_warm(self, why: str) -> None:
        """Kill the fork server. The loss of its ranks is reported when they are found to be gone."""
        problem = (
            f"the fork server of node {self._node} (pid {self._warm.pid}) {why}: it is killed with its ranks"
        )
        self._disk_writer.enter_event(self._run, "fault", node=self._node, problem=problem)
        self._warm.kill()

    def _observe(self, rank: _Rank, now: int, held_up: int, seconds: float) -> RankStatus:
        """``held_up``: nanoseconds in which this process did not run (stopped, or paused with others). They
        are not idle time: the rank may not have run either."""
        seen: Any = self._page.read(rank.row)
        if held_up:
            rank.began_ns = min(now, max(seen.changed_ns, rank.began_ns) + held_up)
        idle = max(0, now - max(seen.changed_ns, rank.began_ns))
        return RankStatus(
            rank=rank.number,
            pid=rank.pid,
            state="R" if idle < _MOVING_NS else self._state_of(rank, seconds),
            phase=seen.phase,
            activity=seen.activity,
            step=seen.step if seen.pid else -1,
            entered=seen.entered,
            left=seen.left,
            idle_seconds=idle / 1e9,
            step_seconds=seen.step_ns / 1e9,
            busy_seconds=seen.busy_ns / 1e9,
            digests=_digests(seen),
            comm=None if idle < _MOVING_NS else CommStatus(seen.counters, seen.waits, seen.on_device),
        )

    def failed_checks(self) -> tuple[DeviceTrouble, ...]:
        """Return the checks between steps that failed."""
        rows = {rank.number: self._page.read(rank.row) for rank in self._ranks.values()}
        return troubles_of(rows, self.epoch)

    def _state_of(self, rank: _Rank, seconds: float) -> str:
        """Return the kernel's letter for the state of a rank. A rank that has run since it was seen stopped
        counts as slow, not as stopped."""
        stopped, was_stopped = rank.stopped.poll(rank.pid, seconds), rank.was_stopped
        rank.was_stopped = stopped is not None
        if stopped is None:
            return process_state(rank.pid)
        return "T" if stopped or not was_stopped else "R"

    def close(self) -> None:
        """End all ranks and the processes that they have started."""
        self.signal_all(signal.SIGKILL)
        deadline = time.monotonic() + 2.0
        while self._ranks and time.monotonic() < deadline:
            time.sleep(0.005)
            messages = self._warm.receive()
            if messages is None:
                break
            for message in messages:
                self._ranks.pop(message.get("ended", -1), None)
        self._warm.close()
        self._spans.close()


def troubles_of(rows: Mapping[int, RowStatus], epoch: int) -> tuple[DeviceTrouble, ...]:
    """Return failed checks as device troubles. ``rows``: rows by rank. Wrong bits of a check that a rank
    computes alone are its node's fault; a wrong collective may be the fault of any of its ranks."""
    found = []
    for rank, seen in rows.items():
        for name in seen.failed_checks:
            blame: Literal["hardware", "unknown"] = "hardware" if name in _OWN_CHECKS else "unknown"
            words = f"rank {rank}: the check of {name} in a gap gave wrong values"
            found.append(DeviceTrouble(-1, rank, epoch, blame, words, can_wait=True))
    return tuple(found)


def _digests(seen: RowStatus) -> tuple[Digest, ...]:
    return tuple(Digest(*one) for one in seen.digests)
