"""If these fail, a user who traces a run waits for ever, gets a wrong answer, or disturbs the run."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from myriad.cli.span_commands import parse_ranks
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.supervise.agent import rank_traces
from myriad.supervise.agent.rank_traces import TraceRunner
from myriad.supervise.background import AsyncWriter
from myriad.supervise.driver.request_handler import TraceRequests, why_not
from myriad.supervise.driver_requests import request_trace
from myriad.supervise.messages import Trace, TraceAnswer, TraceAsked, Traced
from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.run_state import RunState
from myriad.telemetry.progress.progress_page import ProgressPage
from myriad.telemetry.traces.trace_request import TraceAnswerWord, TraceWord

PLACEMENT = {0: (0, 1), 1: (2, 3), 2: (4, 5)}


def state(phase: str = "running") -> RunState:
    return RunState(phase, 3, placement=dict(PLACEMENT))


def asked(*ranks: int, what: str = "stacks", seconds: float = 1.0) -> TraceAsked:
    return TraceAsked("ann@desk", what, ranks, seconds)


@pytest.mark.parametrize(
    ("one", "ranks", "of", "why"),
    [
        (asked(1), (1,), state("gathering"), "no rank is at work now: the run is gathering"),
        (asked(1, 9), (1, 9), state(), "no rank 9 in this run, which has 0 to 5"),
        (asked(seconds=61.0), (), state(), "61.0: above 0, at most 60"),
        (asked(seconds=0.0), (), state(), "0.0: above 0, at most 60"),
        (asked(what="profile"), tuple(range(17)), state(), "17: at most 16 at a time for --what profile"),
        (asked(1), (1,), state(), ""),
    ],
)
def test_an_impossible_trace_request_is_refused_with_the_reason(
    one: TraceAsked, ranks: tuple[int, ...], of: RunState, why: str
) -> None:
    assert why_not(one, ranks, of) == why


def test_a_rank_that_has_ended_is_reported() -> None:
    ended = state()
    ended.exits[2] = 1
    assert why_not(asked(2), (2,), ended) == "rank 2 has ended"


class Node:
    """The driver's link to one: keeps what it is sent."""

    def __init__(self) -> None:
        self.orders: list[Trace] = []

    def send(self, order: Trace) -> None:
        self.orders.append(order)


def test_each_node_is_asked_for_its_own_and_a_lost_one_is_not_waited_for(tmp_path: Path) -> None:
    run, disk_writer, links = Run(tmp_path), AsyncWriter(), {0: Node(), 1: Node()}
    traces = TraceRequests(run, disk_writer, links, lambda: 1.0)

    async def ask() -> TraceAnswer:
        answer = asyncio.create_task(traces.ask(asked(1, 2, 3, 4), state()))
        await asyncio.sleep(0)
        number = links[0].orders[0].number
        traces.receive(Traced(0, number + 1, ("wrong",), (), ()))
        traces.receive(Traced(0, number, ("traces/a",), ("fast",), ()))
        traces.left(1)
        return await asyncio.wait_for(answer, 5)

    answer = asyncio.run(ask())
    assert (links[0].orders[0].ranks, links[1].orders[0].ranks) == ((1,), (2, 3))
    assert (answer.refused, answer.files, answer.found) == ("", ("traces/a",), ("fast",))
    assert answer.problems == ("node 1 was lost meanwhile", "node 2 has not answered")
    assert disk_writer.wait_written()
    (event,) = run.read_events()
    assert (event["event"], event["who"], event["ranks"]) == ("trace", "ann@desk", "ranks 1 to 4")
    assert event["problem"] == "node 1 was lost meanwhile; node 2 has not answered"


class Crew:
    """Ranks 4 and 5 of a node, in rows 0 and 1 of its page."""

    def __init__(self, *living: int) -> None:
        self.epoch, self.page, self._living = 3, ProgressPage(2), living

    def living(self) -> list[int]:
        return list(self._living)

    def poll(self) -> tuple[()]:
        return ()

    def ask_trace(self, ranks: set[int], word: int) -> None:
        for rank in ranks:
            self.page.ask_trace(rank - 4, word)

    def trace_answer(self, rank: int) -> int:
        return self.page.trace_answer(rank - 4)


def trace(run: Run, rank_processes: Crew, *orders: Trace) -> list[Traced]:
    async def work() -> list[Traced]:
        desk, told = TraceRunner(run, 2, rank_processes), list[Traced]()
        for order in orders:
            desk.begin(order, told.append)
        deadline = time.monotonic() + 10
        while len(told) < len(orders) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return told

    return asyncio.run(work())


def test_a_rank_that_does_not_end_its_step_is_reported_and_not_asked_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_traces, "_GRACE_SECONDS", 0.1)
    rank_processes = Crew(4)
    order = Trace(3, 8, "profile", (4, 5), 0.1)
    busy, told = trace(Run(tmp_path), rank_processes, order, Trace(3, 9, "profile", (4,), 0.1))
    assert busy.number == 9 and "making another trace" in busy.problems[0]
    assert told.number == 8 and told.files == ()
    assert told.problems == (
        "rank 4 did not end its step in time: --what stacks shows where it is",
        "rank 5 has ended",
    )
    assert rank_processes.page.trace_answer(0) == 0
    row = rank_processes.page._memory[14 * 8 : 15 * 8]
    assert row == bytes(8), "it begins no profile when it comes to life hours later"


def test_a_rank_that_could_not_trace_reports_the_reason(tmp_path: Path) -> None:
    class Failing(Crew):
        def ask_trace(self, ranks: set[int], word: int) -> None:
            if word:
                answer = TraceAnswerWord(TraceWord.unpack(word).number, "failed", 7)
                self.page._write(0, 15, answer.pack())

    run, order = Run(tmp_path), Trace(3, 8, "flight", (4,), 1.0)
    assert trace(run, Failing(4), order)[0].problems == (
        "rank 4: no flight of this rank: its log cannot be read: No such file or directory",
    )
    run.logs_path.mkdir()
    why = "no flight of this rank: RuntimeError: the flight recorder is empty"
    run.log_path(4, 3).write_text(f"step 1\n{why}\nstep 2\n")
    assert trace(run, Failing(4), order)[0].problems == (f"rank 4: {why}",)


def test_ranks_of_an_attempt_that_is_over_are_not_looked_for(tmp_path: Path) -> None:
    (told,) = trace(Run(tmp_path), Crew(4), Trace(2, 8, "profile", (4,), 1.0))
    assert told.problems == ("node 2: the ranks of attempt 2 are not there any more",)


@pytest.fixture
def stopped() -> Iterator[RankStatus]:
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    while "\nState:\tT" not in Path(f"/proc/{process.pid}/status").read_text():
        time.sleep(0.01)
    yield RankStatus(4, process.pid, "T", "step", "reduce", 12, 7, 6, 3.25, 0.5)
    process.kill()
    process.wait()


def test_a_stopped_process_that_cannot_be_read_states_what_is_known(
    stopped: RankStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_traces.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(rank_traces.shutil, "which", lambda name: None)
    text, has_stacks = rank_traces.read_stacks(stopped, tmp_path / "no log", 0)
    assert not has_stacks and "it is in state T, and py-spy is not installed (pip install py-spy)" in text
    assert "state T: step 12, step, reduce; 7 communications entered, 6 left; idle 3.2 s" in text
    assert f"thread {stopped.pid} sleep: T" in text


def test_output_of_a_rank_between_stacks_is_ignored(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\nwarning: slow disk\nThread 0x01 (most recent call first):\n  File a\n")
    assert rank_traces.new_stacks(log, 7) == b"Thread 0x01 (most recent call first):\n  File a\n"
    assert rank_traces.new_stacks(log, 40) == b"" and rank_traces.new_stacks(tmp_path / "none", 0) == b""


def test_ranks_are_read_as_people_write_them() -> None:
    assert parse_ranks("all") == [] and parse_ranks("3, 7,5-6,3") == [3, 7, 5, 6]
    for text in ("", "3,", "-1", "7-3", "0-9999999", "three"):
        with pytest.raises(BadInputError, match="--ranks"):
            parse_ranks(text)


def test_a_run_that_is_not_at_work_is_reported_in_a_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", []))
    with pytest.raises(BadInputError, match="is not running"):
        request_trace(run, [0], 1.0)
    with pytest.raises(BadInputError, match=r"--seconds = 90: above 0, at most 60"):
        request_trace(run, [0], 90)
