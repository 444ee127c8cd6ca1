"""The node's clock: told, because logs of several nodes are read side by side, but no decision of Myriad
uses another machine's clock, so that nothing here makes a node unfit.

``CLOCK_MONOTONIC`` and ``CLOCK_REALTIME`` are steered alike; what differs between them is a step: somebody
set the time. Against ``CLOCK_MONOTONIC_RAW``, which nobody steers, the difference is how hard the clock is
steered.
"""

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass

from myriad.resilience.doctor.item import Reading

__all__ = ["ClockTimes", "check_clock", "read_clocks"]

_STEP_SECONDS = 0.05
_STEERED_RATIO = 5e-4
"""The most that the kernel steers a clock; more is a broken timer."""
_UNSYNCHRONIZED, _ERROR_STATE = 0x40, 5


@dataclass(frozen=True)
class ClockTimes:
    """All clocks at one moment, in seconds."""

    realtime: float
    monotonic: float
    raw: float


def read_clocks() -> ClockTimes:
    """Now."""
    clocks = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW)
    return ClockTimes(*(time.clock_gettime(clock) for clock in clocks))


def check_clock(before: ClockTimes, after: ClockTimes) -> Iterator[Reading]:
    """From two moments that lie some seconds apart."""
    passed = after.monotonic - before.monotonic
    step = (after.realtime - before.realtime) - passed
    stepped = abs(step) > _STEP_SECONDS
    yield Reading(
        name="clock step",
        value=step,
        unit="s",
        problem="the time of day was set while this ran: times in logs jump" if stepped else "",
        note=f"in {passed:.1f} s; no decision uses it",
        advisory=True,
    )
    drift = passed / max(after.raw - before.raw, 1e-9) - 1
    yield Reading(
        name="clock drift",
        value=1e6 * drift,
        unit="ppm",
        problem="the clock runs far from its own crystal" if abs(drift) > _STEERED_RATIO else "",
        note="how hard it is steered; no decision uses it",
        advisory=True,
    )
    yield _synchronized()


class _Timex(ctypes.Structure):
    """The kernel's ``struct timex``, as far as it is read; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 256),
    )


def _synchronized() -> Reading:
    """Asks the kernel; changes nothing (``modes`` is 0)."""
    name, timex = "clock synchronized", _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Reading(name=name, skipped="the kernel does not tell", advisory=True)
    lost = state == _ERROR_STATE or bool(timex.status & _UNSYNCHRONIZED)
    return Reading(
        name=name,
        value="no" if lost else "yes",
        problem="no time service steers the clock (chrony, ntpd): times in logs of nodes differ"
        if lost
        else "",
        note=f"off by at most {timex.maxerror / 1e3:.0f} ms, it believes",
        advisory=True,
    )
