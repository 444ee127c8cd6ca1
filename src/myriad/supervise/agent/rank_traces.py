"""Traces of this node's ranks, made on request beside the agent's other work.

    Trace ──► TraceRunner ──┬─ profile, flight   a word on the progress page; the rank writes a file
                            ├─ stacks            a signal and the rank's log, or from outside
                            └─ network           a thread reads the links' counters every 10 ms
          ◄── Traced ───────┘  the files, and a line for each one that is missing

One trace is made at a time; a disk that hangs blocks nothing else. The stacks of a rank's threads:

    a rank that can respond    gets `DUMP_SIGNAL`; its fault handler writes into its log, from which it is cut
    one that cannot            (stopped, or in the kernel) is read from outside by py-spy, if installed and
                               permitted
    always                     the kernel's state of each thread, and the rank's row of the progress page
"""

import asyncio
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from myriad.run import Run
from myriad.supervise.agent.fork_server import DUMP_SIGNAL
from myriad.supervise.agent.link_monitor import LinkMonitor, watch_often
from myriad.supervise.agent.rank_processes import RankProcesses
from myriad.supervise.background import run_in_thread
from myriad.supervise.messages import Trace, Traced
from myriad.supervise.observations import RankStatus
from myriad.system.processes import process_state
from myriad.telemetry.traces.trace_files import trace_path, write_bounded
from myriad.telemetry.traces.trace_request import TraceAnswerWord, TraceWord

__all__ = ["TraceRunner"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS, _GRACE_SECONDS, _MOST_STEPS = 0.1, 30.0, 3.0
_FILE_SECONDS, _TAIL_BYTES = 20.0, 2**14
_SUFFIXES = {"profile": ".json.gz", "flight": "-flight.json"}
Found = tuple[list[str], list[str], list[str]]
"""Files, lines for the user, and problems."""


class TraceRunner:
    """Makes the traces of one node."""

    def __init__(
        self, run: Run, node: int, rank_processes: RankProcesses, monitor: LinkMonitor | None = None
    ) -> None:
        """``monitor``: its ring already has the links' counters."""
        self._run, self._node, self._rank_processes, self._monitor = run, node, rank_processes, monitor
        self._numbers = count(1)
        """Request numbers that ranks see. They continue across drivers, because each driver starts again at
        one."""
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: Trace, report: Callable[[Traced], object]) -> None:
        """Make a trace and pass it to ``report``."""
        if self._task is not None and not self._task.done():
            problem = f"node {self._node} is making another trace: ask again when that is done"
            report(Traced(self._node, order.number, (), (), (problem,)))
        else:
            self._task = asyncio.create_task(self._make(order, report))

    def cancel(self) -> None:
        """Cancel the request; nothing is reported."""
        if self._task is not None:
            self._task.cancel()

    async def _make(self, order: Trace, report: Callable[[Traced], object]) -> None:
        if order.epoch != self._rank_processes.epoch:
            files, found, problems = self._none(f"the ranks of attempt {order.epoch} are not there any more")
        else:
            try:
                files, found, problems = await self._work(order)
            except Exception as error:  # a failed trace is reported as a problem; it must not end the agent
                _LOG.warning("a trace failed", exc_info=True)
                files, found, problems = self._none(f"{type(error).__name__}: {error}")
        report(Traced(self._node, order.number, tuple(files), tuple(found), tuple(problems)))

    def _none(self, problem: str) -> Found:
        return [], [], [f"node {self._node}: {problem}"]

    def _work(self, order: Trace) -> Awaitable[Found]:
        if order.what == "stacks":
            return self._stacks(order.ranks)
        if order.what == "network":
            return self._network(order.seconds)
        return self._in_ranks(order)

    # Traces that ranks make themselves

    async def _in_ranks(self, order: Trace) -> Found:
        number = next(self._numbers)
        word = TraceWord(number, order.what, order.seconds).pack()
        waiting, answers = set(order.ranks), dict[int, TraceAnswerWord]()
        began = time.monotonic()
        while waiting and time.monotonic() - began < self._most_seconds(order.seconds):
            living = (
                set(self._rank_processes.living()) if order.epoch == self._rank_processes.epoch else set()
            )
            if not waiting & living:
                break
            self._rank_processes.ask_trace(waiting & living, word)
            await asyncio.sleep(_POLL_SECONDS)
            for rank in waiting & living:
                answer = TraceAnswerWord.unpack(self._rank_processes.trace_answer(rank))
                if answer.number == number:
                    answers[rank] = answer
            waiting = {rank for rank in waiting if rank not in answers or answers[rank].outcome == "begun"}
        self._rank_processes.ask_trace(waiting, 0)
        done = {rank: one.step for rank, one in answers.items() if one.outcome == "done"}
        failed = [rank for rank, one in answers.items() if one.outcome == "failed"]
        files, reasons = await run_in_thread(
            lambda: (
                [self._newest(rank, step, order.what) for rank, step in done.items()],
                {rank: _reason(self._run.log_path(rank, order.epoch), order.what) for rank in failed},
            )
        )
        missing = [self._missing(rank, order, answers.get(rank), reasons) for rank in order.ranks]
        return sorted(filter(None, files)), [], list(filter(None, missing))

    def _most_seconds(self, seconds: float) -> float:
        """Return the time limit; ranks begin and end a trace at a step boundary."""
        step = max((one.step_seconds for one in self._rank_processes.poll()), default=0.0)
        return seconds + _MOST_STEPS * step + _GRACE_SECONDS

    def _newest(self, rank: int, step: int, what: str) -> str:
        paths = sorted(self._run.traces_path.glob(f"rank-{rank}-step-{step}*{_SUFFIXES[what]}"), key=_made)
        return str(paths[-1].relative_to(self._run.path)) if paths else ""

    def _missing(
        self, rank: int, order: Trace, answer: TraceAnswerWord | None, reasons: Mapping[int, str]
    ) -> str:
        """Return why there is no file; empty if there is one."""
        if answer is not None and answer.outcome == "done":
            return ""
        if rank not in self._rank_processes.living() or order.epoch != self._rank_processes.epoch:
            return f"rank {rank} has ended"
        if answer is not None and answer.outcome == "failed":
            return f"rank {rank}: {reasons[rank]}"
        if order.what == "flight":
            return f"rank {rank} did not answer: --what stacks shows where it is"
        did = "began, but did not end" if answer is not None else "did not end"
        return f"rank {rank} {did} its step in time: --what stacks shows where it is"

    # Stacks

    async def _stacks(self, ranks: Sequence[int]) -> Found:
        seen = {one.rank: one for one in self._rank_processes.poll() if one.rank in ranks}
        logs = {rank: self._run.log_path(rank, self._rank_processes.epoch) for rank in seen}
        sizes = await run_in_thread(lambda: {rank: _size(path) for rank, path in logs.items()})
        self._rank_processes.send_signal(
            [rank for rank, one in seen.items() if one.state not in "TtZ"], DUMP_SIGNAL
        )
        works = [self._stack(one, logs[rank], sizes[rank]) for rank, one in seen.items()]
        files: list[str] = []
        problems = [f"rank {rank} has ended" for rank in ranks if rank not in seen]
        for name, problem in await asyncio.gather(*works):
            files += [name] if name else []
            problems += [problem] if problem else []
        return files, [], problems

    async def _stack(self, one: RankStatus, log: Path, log_bytes: int) -> tuple[str, str]:
        def write() -> tuple[str, bool]:
            text, has_stacks = read_stacks(one, log, log_bytes)
            path = trace_path(self._run.traces_path, one.rank, max(0, one.step), "stacks")
            write_bounded(path, text.encode())
            return str(path.relative_to(self._run.path)), has_stacks

        try:
            name, has_stacks = await asyncio.wait_for(run_in_thread(write), _FILE_SECONDS)
        except (OSError, TimeoutError) as error:
            return "", f"rank {one.rank}: the stacks could not be written: {error or 'the disk hangs'}"
        return name, "" if has_stacks else f"rank {one.rank}: none of Python's stacks ({name} says why)"

    # Links

    async def _network(self, seconds: float) -> Found:
        ring = None if self._monitor is None else self._monitor.ring
        work = run_in_thread(lambda: watch_often(self._run, self._node, seconds, ring))
        try:
            name, words = await asyncio.wait_for(work, seconds + _FILE_SECONDS)
        except (OSError, TimeoutError) as error:
            return self._none(f"no counters were written: {error or 'the disk hangs'}")
        return [name], words, []


def _made(path: Path) -> int:
    return path.stat().st_mtime_ns


def _reason(log: Path, what: str) -> str:
    """Return the reason that the rank wrote into its log (`myriad.train.rank_profiler`)."""
    begins = f"no {what} of this rank: "
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        lines = [f"{begins}its log cannot be read: {error.strerror}"]
    return next((line for line in reversed(lines) if line.startswith(begins)), f"see {log}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_LOG_SECONDS, _POLL_SECONDS, _SPY_SECONDS = 1.5, 0.02, 10.0
_BEGINS = (b"Thread 0x", b"Current thread 0x")
_MOST_LOG_BYTES = 2**20
_CANNOT = "TtDZ"
"""States of processes that cannot handle a signal now."""


def read_stacks(seen: RankStatus, log: Path, log_bytes: int) -> tuple[str, bool]:
    """Return the text, and whether it contains Python stacks. ``log_bytes``: size of the log before the
    signal."""
    state = process_state(seen.pid)
    parts = [_head(seen, state)]
    dumped = "" if state in _CANNOT else _dumped(log, log_bytes)
    if dumped:
        parts.append(dumped)
    else:
        why = f"it is in state {state}" if state in _CANNOT else "it did not answer the signal"
        found, problem = _spied(seen.pid)
        dumped = found
        parts.append(found or f"No stacks of Python: {why}, and {problem}.\n")
    parts.append("In the kernel:\n" + "".join(_threads(seen.pid)))
    return "\n".join(parts), bool(dumped)


def _head(seen: RankStatus, state: str) -> str:
    doing = f"step {seen.step}, {seen.phase}" + (f", {seen.activity}" if seen.activity else "")
    comm = f"{seen.entered} communications entered, {seen.left} left"
    where = ", by its GPU" if seen.comm is not None and seen.comm.on_device else ""
    return (
        f"rank {seen.rank}, pid {seen.pid}, state {state}: {doing}; {comm}{where};"
        f" idle {seen.idle_seconds:.1f} s\n"
    )


def _dumped(log: Path, log_bytes: int) -> str:
    """Return the output of the fault handler; it is complete when it no longer grows."""
    deadline, found = time.monotonic() + _LOG_SECONDS, b""
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        before, found = found, new_stacks(log, log_bytes)
        if found and found == before:
            break
    return found.decode(errors="replace")


def new_stacks(log: Path, log_bytes: int) -> bytes:
    """Return the stacks from an offset of a log, without what the rank printed before them."""
    try:
        with log.open("rb") as file:
            file.seek(log_bytes)
            data = file.read(_MOST_LOG_BYTES)
    except OSError:
        return b""
    begins = [at for at in map(data.find, _BEGINS) if at >= 0]
    return data[min(begins) :] if begins else b""


def _spied(pid: int) -> tuple[str, str]:
    """Return the stacks that py-spy reads from a process without stopping it, and the reason if it cannot."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed (pip install py-spy)"
    try:
        words = [program, "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy failed: {error}"
    if done.returncode or not done.stdout:
        said = (done.stderr.strip().splitlines() or ["nothing"])[0]
        return "", f"py-spy may not read it, or cannot: {said}"
    return f"Read from outside by py-spy:\n{done.stdout}", ""


def _threads(pid: int) -> Iterator[str]:
    """Yield the name, the state and the kernel call of each thread, as far as they can be read."""
    for task in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            waits = (task / "wchan").read_text().strip("0\n")
        except OSError:
            continue
        yield f"  thread {task.name} {name}: {state}{f' in {waits}' if waits else ''}\n"
