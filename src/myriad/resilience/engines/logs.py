"""A dead rank's log: its error in the shortest useful form, and whether it only followed another's death."""

import re
from pathlib import Path

__all__ = ["error_excerpt", "is_secondary"]

_TAIL_BYTES = 64 * 1024
_MAX_LINES = 16
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_NOISE = re.compile(r"^\[rank\d+\]:\[|^\[[WIE]\d{3,} |^\s*$|\bWarning: |resource_tracker")
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|error)|DistNetworkError"
    r"|DistStoreError|recvValue failed|failed to recv|timed out|communicator was aborted"
    r"|collective operation timeout|before timing out|remote process exited|ncclRemoteError"
    r"|peer may have (died|closed)|the rank that owns it is gone|the node's first rank made none",
    re.IGNORECASE,
)
_ERROR_LINE = "myriad: error: "
_TRACEBACK = "Traceback (most recent call last)"
_TERMINATED = re.compile(r"^\s*what\(\):\s+(.*)")
"""The line that C++ prints for an uncaught exception, such as the one of NCCL's watchdog."""


def error_excerpt(log_path: Path) -> str:
    """The one-line error of a rank, else what terminated it, else its last traceback or its last lines."""
    lines = _last_lines(log_path)
    told = [line.removeprefix(_ERROR_LINE) for line in lines if line.startswith(_ERROR_LINE)]
    if told:
        return told[-1]
    terminated = [found.group(1) for line in lines if (found := _TERMINATED.match(line))]
    if terminated:
        return terminated[-1]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if starts:
        lines = lines[starts[-1] : _traceback_end(lines, starts[-1])]
        return "\n".join(lines if len(lines) <= _MAX_LINES else [lines[0], "  ...", *lines[2 - _MAX_LINES :]])
    return "\n".join(lines[-_MAX_LINES:])


def is_secondary(excerpt: str) -> bool:
    """Whether a rank died only because another one had: a peer hung up on it."""
    return _SECONDARY.search(excerpt.rsplit("\n", 1)[-1]) is not None


def _traceback_end(lines: list[str], start: int) -> int:
    """A traceback ends with its first line that is not indented: ``ValueError: ...``."""
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
