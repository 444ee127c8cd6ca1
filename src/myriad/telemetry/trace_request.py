"""What a person may ask a rank for while it trains, as one word of the node's progress page, and its answer.

    executor ──► request: number | tenths of a second | what ──► rank, which looks once a step (a plain load)
    executor ◄── answer:  number | outcome | step            ◄── rank

A word is stored whole, so neither side ever reads half of one. A rank that has answered a number does nothing
when it sees it again.
"""

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["MOST_SECONDS", "Outcome", "TraceAnswerWord", "TraceWord", "What"]

What = Literal["profile", "flight", "stacks", "network"]
"""A profile of operators; what the communication library remembers; where each thread is; the counters of the
node's links, often."""
Outcome = Literal["begun", "done", "failed"]
MOST_SECONDS = 60.0
_WHATS: tuple[What, ...] = get_args(What)
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_MOST_NUMBER, _MOST_STEP = 2**27 - 1, 2**31 - 1


@dataclass(frozen=True)
class TraceWord:
    """What the executor writes."""

    number: int
    """Of the request, from 1."""
    what: What
    seconds: float

    def pack(self) -> int:
        """As a word that is not 0."""
        tenths = max(1, min(round(self.seconds * 10), round(MOST_SECONDS * 10)))
        return (self.number & _MOST_NUMBER) << 16 | tenths << 4 | _WHATS.index(self.what)

    @staticmethod
    def unpack(word: int) -> "TraceWord":
        """Of what `pack` made."""
        return TraceWord(word >> 16, _WHATS[word & 0x3], (word >> 4 & 0xFFF) / 10)


@dataclass(frozen=True)
class TraceAnswerWord:
    """What the rank says of it."""

    number: int
    outcome: Outcome
    step: int
    """In the name of its file: the one at whose end it began."""

    def pack(self) -> int:
        """As a word that is not 0."""
        outcome = _OUTCOMES.index(self.outcome)
        return (self.number & _MOST_NUMBER) << 36 | outcome << 32 | max(0, min(self.step, _MOST_STEP))

    @staticmethod
    def unpack(word: int) -> "TraceAnswerWord":
        """Of what `pack` made."""
        return TraceAnswerWord(word >> 36, _OUTCOMES[(word >> 32 & 0xF) % 3], word & 0xFFFFFFFF)
