"""Where the threads of a rank are, also of one that hangs or is stopped.

    a rank that can      gets `DUMP_SIGNAL`; its fault handler writes into its log, from which it is cut
    one that cannot      (stopped, or in the kernel) is read from outside by py-spy, where that is installed
                         and may
    always               what the kernel says of each thread, and the rank's row of the progress page

What is missing is said in a line of the file.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from myriad.processes import process_state
from myriad.resilience.facts import RankSeen

__all__ = ["new_stacks", "read_stacks"]

_LOG_SECONDS, _LOOK_SECONDS, _SPY_SECONDS = 1.5, 0.02, 10.0
_BEGINS = (b"Thread 0x", b"Current thread 0x")
_MOST_LOG_BYTES = 2**20
_CANNOT = "TtDZ"
"""States of processes that take no signal now."""


def read_stacks(seen: RankSeen, log: Path, log_bytes: int) -> tuple[str, bool]:
    """The text, and whether it has stacks of Python. ``log_bytes``: where in the log what the signal made it
    write begins."""
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


def _head(seen: RankSeen, state: str) -> str:
    doing = f"step {seen.step}, {seen.phase}" + (f", {seen.activity}" if seen.activity else "")
    comm = f"{seen.entered} communications entered, {seen.left} left"
    return (
        f"rank {seen.rank}, pid {seen.pid}, state {state}: {doing}; {comm}; idle {seen.idle_seconds:.1f} s\n"
    )


def _dumped(log: Path, log_bytes: int) -> str:
    """What the fault handler wrote; it is complete when it grows no more."""
    deadline, found = time.monotonic() + _LOG_SECONDS, b""
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        before, found = found, new_stacks(log, log_bytes)
        if found and found == before:
            break
    return found.decode(errors="replace")


def new_stacks(log: Path, log_bytes: int) -> bytes:
    """Of a log, from there on: stacks alone, without what the rank says meanwhile before them."""
    try:
        with log.open("rb") as file:
            file.seek(log_bytes)
            data = file.read(_MOST_LOG_BYTES)
    except OSError:
        return b""
    begins = [at for at in map(data.find, _BEGINS) if at >= 0]
    return data[min(begins) :] if begins else b""


def _spied(pid: int) -> tuple[str, str]:
    """What py-spy reads of a process without having it do anything; else why it does not."""
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
    """Name, state, and in what call of the kernel it waits, as far as that may be known."""
    for task in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            waits = (task / "wchan").read_text().strip("0\n")
        except OSError:
            continue
        yield f"  thread {task.name} {name}: {state}{f' in {waits}' if waits else ''}\n"
