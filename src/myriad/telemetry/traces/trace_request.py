"""Encode a trace request of an operator, and the rank's answer, as one word each of the node's progress page.

    agent ──► request: number | tenths of a second | what ──► rank, which reads it once per step (a plain
    load) agent ◄── answer:  number | outcome | step            ◄── rank

A word is stored atomically, so neither side reads a partial one. A rank ignores a number that it has
answered."""

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["MOST_SECONDS", "Outcome", "TraceAnswerWord", "TraceWord", "What"]

What = Literal["profile", "flight", "stacks", "network"]
"""Kinds of trace: profile of operators; the communication library's flight recorder; thread stacks; the
node's link counters at a high rate."""
Outcome = Literal["begun", "done", "failed"]
MOST_SECONDS = 60.0
_WHATS: tuple[What, ...] = get_args(What)
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_MOST_NUMBER, _MOST_STEP = 2**27 - 1, 2**31 - 1


@dataclass(frozen=True)
class TraceWord:
    """A trace request, which the node agent writes."""

    number: int
    """Number of the request, from 1."""
    what: What
    seconds: float

    def pack(self) -> int:
        """Return the request as a nonzero word."""
        tenths = max(1, min(round(self.seconds * 10), round(MOST_SECONDS * 10)))
        return (self.number & _MOST_NUMBER) << 16 | tenths << 4 | _WHATS.index(self.what)

    @staticmethod
    def unpack(word: int) -> "TraceWord":
        """Return the request in a word from `pack`."""
        return TraceWord(word >> 16, _WHATS[word & 0x3], (word >> 4 & 0xFFF) / 10)


@dataclass(frozen=True)
class TraceAnswerWord:
    """The rank's answer to a trace request."""

    number: int
    outcome: Outcome
    step: int
    """Step at whose end the trace began, which is part of the file's name."""

    def pack(self) -> int:
        """Return the answer as a nonzero word."""
        outcome = _OUTCOMES.index(self.outcome)
        return (self.number & _MOST_NUMBER) << 36 | outcome << 32 | max(0, min(self.step, _MOST_STEP))

    @staticmethod
    def unpack(word: int) -> "TraceAnswerWord":
        """Return the answer in a word from `pack`."""
        return TraceAnswerWord(word >> 36, _OUTCOMES[(word >> 32 & 0xF) % 3], word & 0xFFFFFFFF)
