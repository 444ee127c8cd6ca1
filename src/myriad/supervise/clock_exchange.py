"""Compares the clocks of agents with the driver's, over their existing connection.

    agent ──ClockAsked──► driver ──ClockAnswer──► agent: its offset (`myriad.telemetry.shipping.clock_offset`)

Clocks are compared a few times after connecting, then at intervals, because they drift. On one machine both
have the same clock.
"""

import asyncio
import time
from collections.abc import Callable

from myriad.supervise.messages import ClockAnswer, ClockAsked
from myriad.telemetry.shipping.clock_offset import ClockOffset, boot_id, compare

__all__ = ["ClockComparison", "answer_clock"]

_FIRST, _FIRST_SECONDS, _LATER_SECONDS = 8, 0.05, 10.0


def answer_clock(asked: ClockAsked, heard_ns: int) -> ClockAnswer:
    """Return the driver's answer, to be sent at once. ``heard_ns``: time at which the question arrived."""
    return ClockAnswer(asked.asked_ns, heard_ns, time.time_ns(), boot_id())


class ClockComparison:
    """Compares an agent's clock with the driver's."""

    def __init__(self, node: int, now_ns: Callable[[], int] = time.time_ns, boot: str | None = None) -> None:
        """``boot``: boot id to use instead of this machine's."""
        self._node, self._now_ns = node, now_ns
        self._boot = boot_id() if boot is None else boot
        self._asked = 0
        self.offset = ClockOffset()

    def begin(self) -> None:
        """Start over on a new connection, possibly to another driver."""
        self._asked = 0

    def ask(self) -> ClockAsked:
        """Return a question to be sent at once."""
        self._asked += 1
        return ClockAsked(self._node, self._now_ns())

    def receive(self, answer: ClockAnswer) -> None:
        """Record the driver's answer."""
        compared = compare(answer.asked_ns, answer.heard_ns, answer.answered_ns, self._now_ns())
        self.offset.add(compared)
        # copied virtual machines have the same boot id, but their clocks differ
        if answer.boot and answer.boot == self._boot and compared.may_be_same:
            self.offset.same()

    async def pause(self) -> None:
        """Wait until the next question is due."""
        await asyncio.sleep(_FIRST_SECONDS if self._asked < _FIRST else _LATER_SECONDS)
