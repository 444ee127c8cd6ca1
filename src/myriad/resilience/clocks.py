"""The clocks of executors and of their driver, compared over the connection that they have anyway.

    executor ──ClockAsked──► driver ──ClockTold──► executor: how far it is off (`myriad.telemetry.clock`)

A few times when they meet, then now and then: clocks drift. On one machine both have one clock, and nothing
is off.
"""

import asyncio
import time
from collections.abc import Callable

from myriad.resilience.facts import ClockAsked, ClockTold
from myriad.telemetry.clock import ClockOffset, boot_id, compare

__all__ = ["ClockComparison", "tell_clock"]

_FIRST, _FIRST_SECONDS, _LATER_SECONDS = 8, 0.05, 10.0


def tell_clock(asked: ClockAsked, heard_ns: int) -> ClockTold:
    """The driver's answer, to be sent at once; ``heard_ns``: when it was asked."""
    return ClockTold(asked.asked_ns, heard_ns, time.time_ns(), boot_id())


class ClockComparison:
    """An executor's."""

    def __init__(self, node: int, now_ns: Callable[[], int] = time.time_ns, boot: str | None = None) -> None:
        """``boot``: of this machine, if it is to be another."""
        self._node, self._now_ns = node, now_ns
        self._boot = boot_id() if boot is None else boot
        self._asked = 0
        self.offset = ClockOffset()

    def begin(self) -> None:
        """There is a connection, perhaps to another driver."""
        self._asked = 0

    def ask(self) -> ClockAsked:
        """To be sent at once."""
        self._asked += 1
        return ClockAsked(self._node, self._now_ns())

    def hear(self, told: ClockTold) -> None:
        """It has come back."""
        compared = compare(told.asked_ns, told.heard_ns, told.told_ns, self._now_ns())
        self.offset.add(compared)
        # machines that were copied while they ran say that they are one, and their clocks tell
        if told.boot and told.boot == self._boot and compared.may_be_same:
            self.offset.same()

    async def pause(self) -> None:
        """Until the next question is due."""
        await asyncio.sleep(_FIRST_SECONDS if self._asked < _FIRST else _LATER_SECONDS)
