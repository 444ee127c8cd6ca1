"""Why a rank ended: from its exit status, the last lines of its log, and the kernel's out-of-memory counter.

`error_excerpt` returns the shortest useful form of a rank's error. `is_secondary` returns whether the rank
ended only because a peer had, and `count_memory_kills` reads how often the kernel killed a process for lack
of memory.
"""

import re
import signal
from contextlib import suppress
from pathlib import Path

from myriad.errors import BAD_DATA, NO_STATE
from myriad.supervise.observations import Cause
from myriad.telemetry.progress.progress_page import IN_MEMORY_ONLY, TURNED_CODE

__all__ = ["cause_of", "count_memory_kills", "error_excerpt", "first_not_finite", "spike_text"]

_DEVICE_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE = re.compile(r"CUDA error|uncorrectable ECC|\bXid\b|GPU is lost|NCCL error.*unhandled", re.I)
_PROGRAM = re.compile(r"device-side assert|illegal memory access|misaligned address")
"""Errors that a kernel of the program causes: NVIDIA's debug guidelines say to check the program first."""
_DISK = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_MEMORY = re.compile(r"^MemoryError\b|Cannot allocate memory|can't allocate memory", re.MULTILINE)
_NOT_FINITE = re.compile(
    r"step (\d+): loss is .*; first bad tensor is the (.*), on rank (\d+)$", re.MULTILINE
)
"""Last line of every rank when `myriad.parallel.optimizer_step` finds a non-finite number."""
_SPIKE = re.compile(r"step \d+: (the spike recurred when the step was recomputed: .*)$", re.MULTILINE)
"""Last line of every rank when `myriad.train.loss_spikes` goes back before a spike."""
_NO_STATE = re.compile(rf"^{NO_STATE}", re.MULTILINE)
"""Last line of every rank when the run has trained, but no state of it can be loaded."""
_SERVER_LOST = re.compile(
    r"^myriad\.(wire\.socket_channel\.Closed|checkpoint\.snapshots\.server_monitor\.ServerKilledError)\b",
    re.MULTILINE,
)
"""Errors of a rank that lost its snapshot server during a request."""
_BAD_INPUT = 2


def cause_of(code: int, error: str, *, memory_killed: bool) -> Cause:
    """Return the cause of an exit. ``code``: exit code, or minus the signal. ``memory_killed``: the kernel
    has just killed a process because memory was full."""
    if code == 0:
        return "done"
    if code == -signal.SIGINT or error.rsplit("\n", 1)[-1].startswith("KeyboardInterrupt"):
        return "interrupted"
    if code == -signal.SIGKILL:
        return "host memory" if memory_killed else "killed"
    if code == -signal.SIGABRT and is_secondary(error):  # NCCL's watchdog ends the process
        return "peer"
    if code < 0:
        return "crash"
    if code == _BAD_INPUT:
        return "input"
    if code == TURNED_CODE:
        return "turned"
    if _NOT_FINITE.search(error):
        return "nan"
    if _SPIKE.search(error):
        return "spike"
    if _NO_STATE.search(error):
        return "state"
    for cause, pattern in _BY_WORDS:
        if pattern.search(error):
            return cause
    return "peer" if is_secondary(error) else "user"


def first_not_finite(error: str) -> tuple[int, str]:
    """Return the rank that computed the first non-finite number, and a text about it, from any rank's
    error."""
    found = _NOT_FINITE.search(error)
    assert found is not None, "the cause is nan"
    step, what, rank = found.groups()
    return int(rank), f"the {what} is not finite in step {step}, on rank {rank}"


def spike_text(error: str) -> str:
    """Return the description of a spike from any rank's error."""
    found = _SPIKE.search(error)
    assert found is not None, "the cause is spike"
    return found.group(1)


_BY_WORDS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("data", re.compile(re.escape(BAD_DATA))),
    ("killed", _SERVER_LOST),
    ("unsaved", re.compile(re.escape(IN_MEMORY_ONLY))),
    ("device memory", _DEVICE_MEMORY),
    ("user", _PROGRAM),
    ("device", _DEVICE),
    ("disk", _DISK),
    ("host memory", _MEMORY),
)


_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_memory_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel has killed a process because memory was full: in this process's control
    group if it has a counter, else on the whole machine."""
    for path in (*_of_group(root), root / "proc/vmstat"):
        with suppress(OSError):
            if found := _COUNT.search(path.read_text()):
                return int(found[1])
    return 0


def _of_group(root: Path) -> list[Path]:
    """Return the counter files of version 2 control groups, then of version 1."""
    files = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            where = path.lstrip("/")
            if number == "0":
                files.append(root / "sys/fs/cgroup" / where / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(root / "sys/fs/cgroup/memory" / where / "memory.oom_control")
    return files


_TAIL_BYTES = 64 * 1024
_MAX_LINES = 16
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_NOISE = re.compile(r"^\[rank\d+\]:\[|^\[[WIE]\d{3,} |^\s*$|\bWarning: |resource_tracker")
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|error)|DistNetworkError"
    r"|DistStoreError|recvValue failed|failed to recv|timed out|communicator was aborted"
    r"|collective operation timeout|before timing out|remote process exited|ncclRemoteError"
    r"|peer may have (died|closed)|the rank that owns it has exited|the node's first rank did not start it",
    re.IGNORECASE,
)
_ERROR_LINE = "myriad: error: "
_TRACEBACK = "Traceback (most recent call last)"
_TERMINATED = re.compile(r"^\s*what\(\):\s+(.*)")
"""The line that C++ prints for an uncaught exception, such as that of NCCL's watchdog."""


def error_excerpt(log_path: Path) -> str:
    """Return the one-line error of a rank; else the C++ exception, its last traceback, or its last lines."""
    lines = _last_lines(log_path)
    errors = [line.removeprefix(_ERROR_LINE) for line in lines if line.startswith(_ERROR_LINE)]
    if errors:
        return errors[-1]
    terminated = [found.group(1) for line in lines if (found := _TERMINATED.match(line))]
    if terminated:
        return terminated[-1]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if starts:
        lines = lines[starts[-1] : _traceback_end(lines, starts[-1])]
        return "\n".join(lines if len(lines) <= _MAX_LINES else [lines[0], "  ...", *lines[2 - _MAX_LINES :]])
    return "\n".join(lines[-_MAX_LINES:])


def is_secondary(excerpt: str) -> bool:
    """Return whether a rank died only because a peer had closed its connection."""
    return _SECONDARY.search(excerpt.rsplit("\n", 1)[-1]) is not None


def _traceback_end(lines: list[str], start: int) -> int:
    """Return the index after a traceback, which ends with its first unindented line: ``ValueError: ...``."""
    for index in range(start + 1, len(lines)):
        if not lines[index].startswith(" "):
            return index + 1
    return len(lines)


def _last_lines(log_path: Path) -> list[str]:
    try:
        with log_path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in text.splitlines() if not _NOISE.search(line)]
    return [_RANK_PREFIX.sub("", line) for line in lines]
