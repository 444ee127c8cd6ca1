"""Why a rank has ended: from its exit status, the last lines of its log and the kernel's counter."""

import re
import signal

from myriad.errors import BAD_DATA, NO_STATE
from myriad.resilience.engines.logs import is_secondary
from myriad.resilience.facts import Cause
from myriad.telemetry.progress_page import IN_MEMORY_ONLY, TURNED_CODE

__all__ = ["cause_of", "first_not_finite", "spike_text"]

_DEVICE_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE = re.compile(r"CUDA error|uncorrectable ECC|\bXid\b|GPU is lost|NCCL error.*unhandled", re.I)
_PROGRAM = re.compile(r"device-side assert|illegal memory access|misaligned address")
"""What a kernel of the program did: NVIDIA's debug guidelines send whoever sees it to the program first."""
_DISK = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_MEMORY = re.compile(r"^MemoryError\b|Cannot allocate memory|can't allocate memory", re.MULTILINE)
_NOT_FINITE = re.compile(
    r"step (\d+): loss is .*; first bad tensor is the (.*), on rank (\d+)$", re.MULTILINE
)
"""As every rank ends when `myriad.parallel.engine` found it."""
_SPIKE = re.compile(r"step \d+: (a spike, twice: .*)$", re.MULTILINE)
"""As every rank ends where `myriad.train.spikes` is to go back before it."""
_NO_STATE = re.compile(rf"^{NO_STATE}", re.MULTILINE)
"""As every rank ends when the run has trained and no state of it can be loaded."""
_SERVER_LOST = re.compile(
    r"^myriad\.checkpoint\.(wire\.Closed|keeper_watch\.ServerKilledError)\b", re.MULTILINE
)
"""A snapshot server ended while a rank asked it what no other server can answer."""
_BAD_INPUT = 2


def cause_of(code: int, error: str, *, memory_killed: bool) -> Cause:
    """``code``: exit code, or minus the signal; ``memory_killed``: the kernel has just killed somebody for
    want of memory."""
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
    """The rank that made the first number that is not finite, from what any rank said of it, and that in
    words."""
    found = _NOT_FINITE.search(error)
    assert found is not None, "the cause is nan"
    step, what, rank = found.groups()
    return int(rank), f"the {what} is not finite in step {step}, on rank {rank}"


def spike_text(error: str) -> str:
    """What any rank said of it."""
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
