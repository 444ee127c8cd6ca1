"""The traffic of a node's links: watched each 10 ms, summed up each second, kept around anomalies.

    LinkRing ◄── sampler process               ring: five minutes, a row each 10 ms
       └──► LinkMonitor ──LinkTraffic──► beats
                 └── slow step, link flap, failed rank, or as the driver says ──► RUN/counters/around

A rate is the one at which the average byte travelled: the mean over all 10 ms, weighted with their bytes. Of
a step that computes for seconds and sends for 100 ms it is what the link carried meanwhile. Only what goes
while all ranks of the node train counts: not start-up, validation, saving.
"""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

import numpy as np
import numpy.typing as npt

from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.facts import LinkSeen, LinkTraffic
from myriad.run import Run
from myriad.telemetry.ethtool import pause_columns, statistic_names
from myriad.telemetry.link_evidence import write_evidence
from myriad.telemetry.link_ring import LinkRing, Rows
from myriad.telemetry.links import link_bytes_per_second
from myriad.telemetry.progress_page import ProgressPage

__all__ = ["LinkMonitor", "sum_up"]

_Floats = npt.NDArray[np.float64]
_Mask = npt.NDArray[np.bool_]
_BEFORE_SECONDS, _AFTER_SECONDS, _APART_SECONDS = 30.0, 3.0, 10.0
"""What is kept of an anomaly; anomalies closer together are in one file."""
_MOST_STARTS, _MOST_LINKS, _LEAST_ROWS, _END_SECONDS = 3, 16, 300, 0.5
_USUAL_RATE = 12.5e9
_NEWEST_NS = 500_000_000
"""A link that has just become slow is not to be averaged with what it was."""
_STILL_BYTES = 2048
"""Less than so many in 10 ms is keep-alive traffic."""
_SLOW_TIMES, _SLOW_SECONDS, _KNOWN_STEPS = 2.0, 0.1, 5
"""A step is slow that takes so many times the median of those before, and so much more."""


class LinkMonitor:
    """Watches the links of one node agent."""

    def __init__(self, run: Run, node: int, page: ProgressPage, scribe: Scribe | None = None) -> None:
        self._run, self._node, self._page, self._scribe = run, node, page, scribe or Scribe()
        self._ring: LinkRing | None = None
        self._sampler: subprocess.Popen[bytes] | None = None
        self._starts, self._reported = 0, False
        self._summed_ns = time.monotonic_ns()
        self._downs: dict[str, int] = {}
        self._frame_us: dict[str, float] = {}
        self._steps: deque[float] = deque(maxlen=20)
        self._pending: tuple[float, float, str] | None = None
        self._kept_at = -_APART_SECONDS

    @property
    def ring(self) -> LinkRing | None:
        """Ring that the sampler fills; ``None``: no link is watched."""
        return self._ring

    def look(self, links: Sequence[LinkSeen], num_rows: int) -> tuple[LinkTraffic, ...]:
        """Sum up the links' traffic; call it each second. ``links``: those of ranks; ``num_rows``: local
        ranks."""
        names = tuple(link.name for link in links)[:_MOST_LINKS]
        if names and num_rows:
            self._keep_sampling(names, num_rows)
        self._see_flaps(links)
        if self._ring is None:
            return ()
        rows = self._rows_of_steps(self._ring)
        found = tuple(self._in_microseconds(one) for one in sum_up(rows, self._summed_ns))
        self._summed_ns = time.monotonic_ns()
        if found and found[0].steps:
            self._see_step(found[0])
        self._write_due()
        return found

    @staticmethod
    def _rows_of_steps(ring: LinkRing) -> Rows:
        """The newest rows with a whole step in them and a second more: all of five minutes would cost more
        each second than sampling them did."""
        most = _LEAST_ROWS
        while True:
            rows = ring.newest(most)
            whole = rows.step[: -_LEAST_ROWS // 3]
            if len(rows.values) < most or most >= ring.capacity or (np.diff(whole) != 0).sum() > 1:
                return rows
            most *= 4

    # The sampler

    def _keep_sampling(self, names: tuple[str, ...], num_rows: int) -> None:
        if self._sampler is not None and self._ring is not None:
            has_ended = self._sampler.poll() is not None
            if not has_ended and set(names) <= set(self._ring.links):
                return
            self._starts -= not has_ended  # a link that comes up later is no failure
        self._end_sampler()
        if self._starts < _MOST_STARTS:
            self._starts += 1
            self._ring = LinkRing(names)
            words = [sys.executable, "-m", "myriad.telemetry.link_sampler", str(self._ring.descriptor)]
            words += [str(self._page.descriptor), str(num_rows), str(os.getpid()), *names]
            keep = (self._ring.descriptor, self._page.descriptor)
            with suppress(OSError):
                self._sampler = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=keep)
        elif not self._reported:
            self._reported = True
            problem = (
                f"the process that samples the links of node {self._node} has ended {_MOST_STARTS} times"
            )
            self._scribe.enter_event(self._run, "telemetry", place="link counters", problem=problem)

    def _in_microseconds(self, one: LinkTraffic) -> LinkTraffic:
        """Pause frames as the longest that they can last (65,535 times 512 bits)."""
        if not one.paused:
            return one
        if one.name not in self._frame_us:
            names = statistic_names(one.name)
            counted = any("pause_duration" in names[at] for at in pause_columns(names))
            rate = link_bytes_per_second(one.name) or _USUAL_RATE
            self._frame_us[one.name] = 1.0 if counted else 65535 * 512 / 8 / rate * 1e6
        return replace(one, paused=round(one.paused * self._frame_us[one.name]))

    def _end_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.kill()
            with suppress(subprocess.TimeoutExpired):  # a read of a NIC's firmware may not end
                self._sampler.wait(_END_SECONDS)
            self._sampler = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    # Anomalies

    def _see_flaps(self, links: Sequence[LinkSeen]) -> None:
        for link in links:
            if link.downs > self._downs.setdefault(link.name, link.downs):
                self.keep("link flap")
            self._downs[link.name] = link.downs

    def _see_step(self, one: LinkTraffic) -> None:
        seconds, known = one.step_seconds, self._steps
        if len(known) >= _KNOWN_STEPS and seconds > max(
            _SLOW_TIMES * median(known), median(known) + _SLOW_SECONDS
        ):
            self.keep("slow step")
        known.append(seconds)

    def begin_attempt(self) -> None:
        """Steps of another attempt may take another time."""
        self._steps.clear()

    def keep(self, why: str) -> None:
        """Store what the ring holds around this moment, in a few seconds."""
        now = time.monotonic()
        if self._ring is None or self._pending is not None or now - self._kept_at < _APART_SECONDS:
            return
        self._kept_at = now
        self._pending = now + _AFTER_SECONDS, time.time(), why

    def _write_due(self, *, at_once: bool = False) -> None:
        if self._pending is None or self._ring is None:
            return
        due, at, why = self._pending
        if at_once or time.monotonic() >= due:
            self._pending = None
            since = time.monotonic_ns() - int(1e9 * (_BEFORE_SECONDS + _AFTER_SECONDS))
            rows, epoch_ns = self._ring.newest().since(since), LinkRing.epoch_ns()
            folder = self._run.counters_path / "around"

            def write() -> None:
                write_evidence(folder, self._node, why, at, rows, epoch_ns)

            self._scribe.enter(f"link counters around a {why}", write)

    def close(self) -> None:
        """Write what is still to be written; end the sampler."""
        self._write_due(at_once=True)
        self._scribe.settle()
        self._end_sampler()


def sum_up(rows: Rows, since_ns: int) -> tuple[LinkTraffic, ...]:
    """Per link: the steps that ended after ``since_ns``, of these the newest half second (at least one), and
    the step under way."""
    if len(rows.values) < 2 or rows.step[-1] < 0:
        return ()
    seconds = np.diff(rows.time_ns) * 1e-9
    trains = (rows.in_step[1:] & rows.in_step[:-1]) & (seconds > 0)
    steps, newest = rows.step[:-1], int(rows.step[-1])
    changed = np.flatnonzero(np.diff(rows.step) != 0) + 1
    now = steps == newest
    now[: changed[-1] if len(changed) else 0] = False
    done = np.zeros(len(steps), bool)
    num_steps = 0
    since = max(since_ns, int(rows.time_ns[-1]) - _NEWEST_NS) if len(changed) else since_ns
    newest_alone = int(len(changed) > 0 and rows.time_ns[changed[-1]] > since_ns)
    ended = max(int((rows.time_ns[changed] > since).sum()), newest_alone)
    if (ended := min(ended, len(changed) - 1)) > 0:
        first = changed[-ended - 1]  # of a step whose beginning is in the ring
        done[first : changed[-1]] = True
        num_steps = max(0, newest - int(rows.step[first]))
    new = rows.time_ns[1:] > since_ns
    carried = {link: int(np.ptp(rows.column(link, "sent_bytes"))) for link in rows.links if ":" not in link}
    busiest = max(carried, key=carried.__getitem__, default="")
    masks = trains & done, trains & now, new
    return tuple(
        _of_link(rows, link, seconds, masks, num_steps, is_busiest=link == busiest) for link in rows.links
    )


def _of_link(
    rows: Rows,
    link: str,
    seconds: _Floats,
    masks: tuple[_Mask, _Mask, _Mask],
    num_steps: int,
    *,
    is_busiest: bool,
) -> LinkTraffic:
    """``masks``: which intervals are of ended steps, of the step under way, and new."""
    done, now, new = masks
    sent, received = (np.diff(rows.column(link, field)) for field in ("sent_bytes", "received_bytes"))
    moved = np.flatnonzero(now & (sent + received > _STILL_BYTES))
    still = now.copy()
    still[: moved[-1] + 1 if len(moved) else 0] = False
    each = max(1, num_steps)
    again = rows.tcp_sent_again if is_busiest else rows.column(link, "sent_again")
    return LinkTraffic(
        name=link,
        steps=num_steps if done.any() else 0,
        step_seconds=round(float(seconds[done].sum()) / each, 3),
        sent_bytes=int(sent[done].sum()) // each,
        received_bytes=int(received[done].sum()) // each,
        sent_rate=_rate(sent[done], seconds[done]),
        received_rate=_rate(received[done], seconds[done]),
        now_step=int(rows.step[-1]),
        now_seconds=round(float(seconds[now].sum()), 2),
        now_sent_bytes=int(sent[now].sum()),
        now_received_bytes=int(received[now].sum()),
        now_sent_rate=_rate(sent[now], seconds[now]),
        now_received_rate=_rate(received[now], seconds[now]),
        still_seconds=round(float(seconds[still].sum()), 2),
        sent_again=int(np.diff(again)[new].sum()),
        paused=int(np.diff(rows.column(link, "paused"))[new].sum()),
    )


def _rate(moved: npt.NDArray[np.int64], seconds: _Floats) -> int:
    """Bytes per second at which the average byte travelled; 0: none did."""
    total = float(moved.sum())
    return round(float((moved.astype(np.float64) ** 2 / seconds).sum()) / total) if total > 0 else 0
