"""What a person wants to see of ranks of this node, made beside everything else that the executor does.

    Trace ──► TraceDesk ──┬─ profile, flight   a word on the progress page; the rank writes its file, answers
                          ├─ stacks            a signal, its log; or from outside
                          └─ network           a thread reads the links' counters each 10 ms
          ◄── Traced ─────┘  what is there, and a line for what is not

One at a time. Disks that hang hold up nobody.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from myriad.resilience.facts import RankSeen
from myriad.resilience.node.aside import aside
from myriad.resilience.node.counting import watch_often
from myriad.resilience.node.crew import Crew
from myriad.resilience.node.stacks import read_stacks
from myriad.resilience.node.traffic import LinkMonitor
from myriad.resilience.node.warm import DUMP_SIGNAL
from myriad.resilience.traces import Trace, Traced
from myriad.run import Run
from myriad.telemetry.trace_files import trace_path, write_bounded
from myriad.telemetry.trace_request import TraceAnswerWord, TraceWord

__all__ = ["TraceDesk"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS, _GRACE_SECONDS, _MOST_STEPS = 0.1, 30.0, 3.0
_FILE_SECONDS, _TAIL_BYTES = 20.0, 2**14
_SUFFIXES = {"profile": ".json.gz", "flight": "-flight.json"}
Found = tuple[list[str], list[str], list[str]]
"""Files, words, problems."""


class TraceDesk:
    """Of one executor."""

    def __init__(self, run: Run, node: int, crew: Crew, monitor: LinkMonitor | None = None) -> None:
        """``monitor``: whose ring has the links' counters already."""
        self._run, self._node, self._crew, self._monitor = run, node, crew, monitor
        self._numbers = count(1)
        """Of requests, as ranks hear them: a driver's begin anew with each."""
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: Trace, tell: Callable[[Traced], object]) -> None:
        """Does it, and tells."""
        if self._task is not None and not self._task.done():
            problem = f"node {self._node} is making another trace: ask again when that is done"
            tell(Traced(self._node, order.number, (), (), (problem,)))
        else:
            self._task = asyncio.create_task(self._make(order, tell))

    def cancel(self) -> None:
        """Nobody is told."""
        if self._task is not None:
            self._task.cancel()

    async def _make(self, order: Trace, tell: Callable[[Traced], object]) -> None:
        if order.epoch != self._crew.epoch:
            files, found, problems = self._none(f"the ranks of attempt {order.epoch} are not there any more")
        else:
            try:
                files, found, problems = await self._work(order)
            except Exception as error:  # a trace that fails is a line, not the end of an executor
                _LOG.warning("a trace failed", exc_info=True)
                files, found, problems = self._none(f"{type(error).__name__}: {error}")
        tell(Traced(self._node, order.number, tuple(files), tuple(found), tuple(problems)))

    def _none(self, problem: str) -> Found:
        return [], [], [f"node {self._node}: {problem}"]

    def _work(self, order: Trace) -> Awaitable[Found]:
        if order.what == "stacks":
            return self._stacks(order.ranks)
        if order.what == "network":
            return self._network(order.seconds)
        return self._in_ranks(order)

    # What ranks do themselves

    async def _in_ranks(self, order: Trace) -> Found:
        number = next(self._numbers)
        word = TraceWord(number, order.what, order.seconds).pack()
        waiting, answers = set(order.ranks), dict[int, TraceAnswerWord]()
        began = time.monotonic()
        while waiting and time.monotonic() - began < self._most_seconds(order.seconds):
            living = set(self._crew.living()) if order.epoch == self._crew.epoch else set()
            if not waiting & living:
                break
            self._crew.ask_trace(waiting & living, word)
            await asyncio.sleep(_POLL_SECONDS)
            for rank in waiting & living:
                answer = TraceAnswerWord.unpack(self._crew.trace_answer(rank))
                if answer.number == number:
                    answers[rank] = answer
            waiting = {rank for rank in waiting if rank not in answers or answers[rank].outcome == "begun"}
        self._crew.ask_trace(waiting, 0)
        done = {rank: one.step for rank, one in answers.items() if one.outcome == "done"}
        failed = [rank for rank, one in answers.items() if one.outcome == "failed"]
        files, reasons = await aside(
            lambda: (
                [self._newest(rank, step, order.what) for rank, step in done.items()],
                {rank: _reason(self._run.log_path(rank, order.epoch), order.what) for rank in failed},
            )
        )
        missing = [self._missing(rank, order, answers.get(rank), reasons) for rank in order.ranks]
        return sorted(filter(None, files)), [], list(filter(None, missing))

    def _most_seconds(self, seconds: float) -> float:
        """Ranks begin and end with a step."""
        step = max((one.step_seconds for one in self._crew.look()), default=0.0)
        return seconds + _MOST_STEPS * step + _GRACE_SECONDS

    def _newest(self, rank: int, step: int, what: str) -> str:
        paths = sorted(self._run.traces_path.glob(f"rank-{rank}-step-{step}*{_SUFFIXES[what]}"), key=_made)
        return str(paths[-1].relative_to(self._run.path)) if paths else ""

    def _missing(
        self, rank: int, order: Trace, answer: TraceAnswerWord | None, reasons: Mapping[int, str]
    ) -> str:
        """Why there is no file; empty: there is."""
        if answer is not None and answer.outcome == "done":
            return ""
        if rank not in self._crew.living() or order.epoch != self._crew.epoch:
            return f"rank {rank} has ended"
        if answer is not None and answer.outcome == "failed":
            return f"rank {rank}: {reasons[rank]}"
        if order.what == "flight":
            return f"rank {rank} did not answer: --what stacks tells where it is"
        did = "began, but did not end" if answer is not None else "did not end"
        return f"rank {rank} {did} its step in time: --what stacks tells where it is"

    # Stacks

    async def _stacks(self, ranks: Sequence[int]) -> Found:
        seen = {one.rank: one for one in self._crew.look() if one.rank in ranks}
        logs = {rank: self._run.log_path(rank, self._crew.epoch) for rank in seen}
        sizes = await aside(lambda: {rank: _size(path) for rank, path in logs.items()})
        self._crew.send_signal([rank for rank, one in seen.items() if one.state not in "TtZ"], DUMP_SIGNAL)
        works = [self._stack(one, logs[rank], sizes[rank]) for rank, one in seen.items()]
        files: list[str] = []
        problems = [f"rank {rank} has ended" for rank in ranks if rank not in seen]
        for name, problem in await asyncio.gather(*works):
            files += [name] if name else []
            problems += [problem] if problem else []
        return files, [], problems

    async def _stack(self, one: RankSeen, log: Path, log_bytes: int) -> tuple[str, str]:
        def write() -> tuple[str, bool]:
            text, has_stacks = read_stacks(one, log, log_bytes)
            path = trace_path(self._run.traces_path, one.rank, max(0, one.step), "stacks")
            write_bounded(path, text.encode())
            return str(path.relative_to(self._run.path)), has_stacks

        try:
            name, has_stacks = await asyncio.wait_for(aside(write), _FILE_SECONDS)
        except (OSError, TimeoutError) as error:
            return "", f"rank {one.rank}: the stacks could not be written: {error or 'the disk hangs'}"
        return name, "" if has_stacks else f"rank {one.rank}: none of Python's stacks ({name} says why)"

    # Links

    async def _network(self, seconds: float) -> Found:
        ring = None if self._monitor is None else self._monitor.ring
        work = aside(lambda: watch_often(self._run, self._node, seconds, ring))
        try:
            name, words = await asyncio.wait_for(work, seconds + _FILE_SECONDS)
        except (OSError, TimeoutError) as error:
            return self._none(f"no counters were written: {error or 'the disk hangs'}")
        return [name], words, []


def _made(path: Path) -> int:
    return path.stat().st_mtime_ns


def _reason(log: Path, what: str) -> str:
    """What the rank has said of it (`myriad.train.tracing`)."""
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
