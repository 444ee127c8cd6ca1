"""What is said of a trace that a person wants, between the person, the driver, and the executors of the
ranks' nodes. Plain values, as in `facts`.

    person ──TraceAsked──► driver ──Trace──► executors ──► ranks
           ◄─TraceAnswer──        ◄─Traced──
"""

from dataclasses import dataclass

from myriad.telemetry.trace_request import MOST_SECONDS, What

__all__ = ["MOST_RANKS", "Trace", "TraceAnswer", "TraceAsked", "Traced", "told_limit"]

MOST_RANKS: dict[What, int] = {"profile": 16, "flight": 256, "stacks": 1024, "network": 2**20}
"""At a time: each writes a file."""


@dataclass(frozen=True)
class TraceAsked:
    """A person wants to see what ranks do."""

    who: str
    what: What
    ranks: tuple[int, ...]
    """None: all of the run."""
    seconds: float


@dataclass(frozen=True)
class TraceAnswer:
    """What the driver says when all is written, or cannot be."""

    refused: str
    """Why nothing was done; empty: it was."""
    files: tuple[str, ...]
    """In the run's folder."""
    found: tuple[str, ...]
    """In words."""
    problems: tuple[str, ...]
    """What is missing, a line each."""


@dataclass(frozen=True)
class Trace:
    """Have a look at ranks of this node."""

    epoch: int
    number: int
    """Of the request."""
    what: What
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Traced:
    """An executor has."""

    node: int
    number: int
    files: tuple[str, ...]
    found: tuple[str, ...]
    problems: tuple[str, ...]


def told_limit(what: What, num_ranks: int, seconds: float) -> tuple[str, object, str]:
    """Key, value and what is allowed, for who asks for too much; of three empty ones: it is not."""
    if not 0 < seconds <= MOST_SECONDS:
        return "--seconds", seconds, f"above 0, at most {MOST_SECONDS:g}"
    if num_ranks > MOST_RANKS[what]:
        return "--ranks", num_ranks, f"at most {MOST_RANKS[what]} at a time for --what {what}"
    return "", "", ""
