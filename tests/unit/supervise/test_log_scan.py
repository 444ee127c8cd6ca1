"""If these fail, an error in the log of a running rank is not found, is reported a thousand times, or a log
that floods takes the node's processor and memory."""

import os
import time
from pathlib import Path

import pytest

from myriad.alerts.log_patterns import LogPatterns
from myriad.run import Run
from myriad.supervise.agent import log_scan
from myriad.supervise.agent.log_monitor import LogMonitor
from myriad.supervise.agent.log_scan import KERNEL, LogMatch, LogScanner
from myriad.supervise.background import AsyncWriter

ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-3-attempt-1.log"
    path.write_text("")
    return path


def scanner_of(*logs: Path, kernel: Path | None = None) -> LogScanner:
    scanner = LogScanner(LogPatterns(), kernel)
    scanner.watch([(int(path.name.split("-")[1]), path) for path in logs], 0.0)
    return scanner


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def texts(found: list[LogMatch]) -> list[tuple[int, str]]:
    return [(one.rank, one.text) for one in found]


def test_a_line_is_found_when_it_is_written_and_once(log: Path) -> None:
    scanner = scanner_of(log)
    add(log, f"step 1\n{ERROR}\nstep 2\n")
    assert texts(scanner.poll(1.0)) == [(3, ERROR)]
    assert scanner.poll(2.0) == []


def test_a_log_that_is_made_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "rank-0-attempt-1.log"
    scanner = scanner_of(log)
    assert scanner.poll(1.0) == []
    log.write_text(ERROR + "\n")
    assert len(scanner.poll(2.0)) == 1


def test_the_same_message_with_other_numbers_is_one_with_its_count(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank-{rank}-attempt-1.log" for rank in range(4)]
    scanner = scanner_of(*logs)
    for rank, log in enumerate(logs):
        add(log, "".join(f"2026-01-01 00:00:0{rank} NCCL WARN timeout {rank * i} ms\n" for i in range(100)))
    (first,) = scanner.poll(1.0)
    assert first.what == "NCCL" and scanner.poll(5.0) == []
    (again,) = scanner.poll(11.5)
    assert (again.count, sorted(again.ranks)) == (400, [0, 1, 2, 3])
    assert scanner.poll(500.0) == [], "nothing has come since"


def test_a_truncated_and_a_replaced_log_are_read_on(log: Path) -> None:
    scanner = scanner_of(log)
    add(log, "ncclSystemError: one\n" * 50)
    assert len(scanner.poll(1.0)) == 1
    log.write_text("Xid 79\n")
    assert [one.what for one in scanner.poll(2.0)] == ["Xid"]
    add(log, "Input/output error\n")
    log.rename(log.with_suffix(".1"))
    log.write_text(ERROR + "\n")
    assert [one.what for one in scanner.poll(3.0)] == ["storage", "CUDA error"]
    log.unlink()
    assert scanner.poll(4.0) == []


def test_a_line_without_an_end_is_found_when_nothing_follows(log: Path) -> None:
    scanner = scanner_of(log)
    add(log, "RuntimeError: CUDA ")
    assert scanner.poll(1.0) == []
    add(log, "error: unknown")
    assert scanner.poll(1.2) == []
    assert len(scanner.poll(1.5)) == 1
    add(log, " CUDA error: the same line goes on\nstep 2\n")
    assert scanner.poll(2.0) == []


def test_a_line_is_found_across_two_reads(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "_CHUNK_BYTES", 7)
    scanner = scanner_of(log)
    add(log, f"a\n{ERROR}\nbc\n\n{ERROR.replace('CUDA error', 'Xid')}\n")
    found = [one for at in range(40) for one in scanner.poll(1.0 + at / 4)]
    assert [one.what for one in found] == ["CUDA error", "Xid"]


def test_a_line_of_a_hundred_megabytes_takes_no_memory(log: Path) -> None:
    scanner = scanner_of(log)
    with log.open("wb") as file:
        file.truncate(10**8)  # zeros, and no newline
    add(log, "\nXid 13\n")
    found = [one for at in range(60) for one in scanner.poll(1.0 + at / 4)]
    assert "Xid" in [one.what for one in found]
    assert len(scanner._tails[0]._rest) <= 2048


def test_a_flood_is_bounded_and_its_newest_part_is_read(log: Path) -> None:
    scanner = scanner_of(log)
    line = "NCCL WARN retry {:09d}, timed out, aborting the communicator of this rank\n"
    add(log, "".join(line.format(at) for at in range(400_000)) + ERROR + "\n")
    found, began, longest = list[LogMatch](), time.thread_time(), 0.0
    for at in range(400):
        before = time.thread_time()
        found += scanner.poll(1.0 + at / 4)
        longest = max(longest, time.thread_time() - before)
        if any(one.what == "CUDA error" for one in found):
            break
    kinds = {one.what for one in found}
    assert {"flood", "NCCL", "CUDA error"} == kinds
    assert "bytes of it were not searched" in next(one.text for one in found if one.what == "flood")
    assert longest < 1.0 and time.thread_time() - began < 20.0
    assert len([one for one in found if one.reported_count == 1]) <= 3


def test_many_different_messages_are_reported_as_such(log: Path) -> None:
    scanner = scanner_of(log)
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(500)]
    add(log, "".join(f"Xid trouble {name}\n" for name in names))
    found = scanner.poll(1.0)
    assert len(found) <= 21 and found[-1].text == "many different messages: see the log"
    assert len(scanner._known) <= 256


def test_another_attempt_has_logs_and_messages_of_its_own(log: Path) -> None:
    scanner = scanner_of(log)
    add(log, ERROR + "\n")
    assert len(scanner.poll(1.0)) == 1
    add(log, f"{ERROR}\nXid 79 last words")
    newer = log.with_name("rank-3-attempt-2.log")
    newer.write_text(ERROR + "\n")
    left = scanner.watch([(3, newer)], 2.0)
    assert [(one.what, one.count) for one in left] == [("Xid", 1), ("CUDA error", 2)]
    assert texts(scanner.poll(3.0)) == [(3, ERROR)]


def test_a_search_that_begins_again_does_not_report_old_lines(log: Path) -> None:
    add(log, ERROR + "\n")
    scanner = LogScanner(LogPatterns())
    scanner.watch([(3, log)], 0.0, from_end=True)
    assert scanner.poll(1.0) == []
    add(log, "Xid 31\n")
    assert [one.what for one in scanner.poll(2.0)] == ["Xid"]


def test_new_lines_of_the_kernel_name_the_process(tmp_path: Path) -> None:
    kernel = tmp_path / "kmsg"
    kernel.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=old\n")
    scanner = scanner_of(kernel=kernel)
    add(kernel, "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000010\n")
    (one,) = scanner.poll(1.0)
    assert (one.what, one.rank, one.pid) == ("Xid", KERNEL, 4711)
    add(kernel, "3,3,3,-;Memory cgroup out of memory: Killed process 99 (python)\n")
    assert [(one.what, one.pid) for one in scanner.poll(2.0)] == [("OOM", 99)]


def test_a_log_that_cannot_be_read_stops_nothing(log: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "rank-0-attempt-1.log"
    os.mkfifo(pipe)
    scanner = scanner_of(pipe, log)
    add(log, ERROR + "\n")
    assert texts(scanner.poll(1.0)) == [(3, ERROR)]


def test_what_is_left_of_an_attempt_is_reported_as_its_own(log: Path) -> None:
    scanner = LogScanner(LogPatterns())
    scanner.watch([(3, log)], 0.0, epoch=1)
    add(log, f"{ERROR}\n")
    (left,) = scanner.watch([(3, log)], 1.0, epoch=2)
    (new,) = scanner.poll(2.0)
    assert (left.as_json()["epoch"], new.as_json()["epoch"]) == (1, 2)


def test_an_event_names_the_log_that_the_line_is_in(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    watch = LogMonitor(run, 0, lambda rank: 7, lambda pid: -1, AsyncWriter())
    watch.begin(2, [3])
    found = {"what": "NCCL", "text": "NCCL WARN", "rank": 3, "ranks": [3], "pid": 0, "count": 5}
    watch._note(found | {"epoch": 1})
    watch._note(found | {"epoch": 2})
    deadline = time.monotonic() + 10
    while len(run.read_events()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    old, new = run.read_events()
    assert (old["log"], old["epoch"], old.get("step")) == ("rank-3-attempt-1.log", 1, None)
    assert (new["log"], new["epoch"], new.get("step")) == ("rank-3-attempt-2.log", 2, 7)
