"""Traffic of a node's links: sampled every 10 ms, summed every second, stored around anomalies.

    LinkRing ◄── sampler process               ring: five minutes, a row every 10 ms
       └──► LinkMonitor ──LinkTraffic──► heartbeats
                 └── slow step, link flap, failed rank, or on command of the driver ──► RUN/counters/around

A rate is the one at which the average byte travelled: the mean over all 10 ms intervals, weighted with their
bytes. If a step computes for seconds and sends for 100 ms, it is the rate in those 100 ms. Only traffic while
all ranks of the node train counts, not start-up, validation and saving.

`CounterLog` writes the node's network counters into the run folder every second. Another thread writes, so a
disk that hangs or is full costs lines, never the agent.
"""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt

from myriad.doctor.hardware import find_nics
from myriad.run import Run
from myriad.supervise.background import AsyncWriter
from myriad.supervise.observations import LinkStatus, LinkTraffic
from myriad.telemetry.links.ethtool import link_bytes_per_second, pause_columns, statistic_names
from myriad.telemetry.links.link_evidence import samples_of, write_evidence
from myriad.telemetry.links.link_ring import LinkRing, Rows
from myriad.telemetry.links.network_counters import (
    CounterFile,
    Counters,
    CounterSample,
    describe_peaks,
    sample_often,
)
from myriad.telemetry.progress.progress_page import ProgressPage

__all__ = ["CounterLog", "LinkMonitor", "sum_up", "watch_often"]

_Floats = npt.NDArray[np.float64]
_Mask = npt.NDArray[np.bool_]
_BEFORE_SECONDS, _AFTER_SECONDS, _APART_SECONDS = 30.0, 3.0, 10.0
"""Seconds before and after an anomaly that are kept, and least seconds between two anomalies that are
kept."""
_MOST_STARTS, _MOST_LINKS, _LEAST_ROWS, _END_SECONDS = 3, 16, 300, 0.5
_USUAL_RATE = 12.5e9
_NEWEST_NS = 500_000_000
"""Most time that is averaged, so that a link which has just become slow is not averaged with its earlier
rate."""
_STILL_BYTES = 2048
"""Fewer bytes than this in 10 ms are keep-alive traffic."""
_SLOW_TIMES, _SLOW_SECONDS, _KNOWN_STEPS = 2.0, 0.1, 5
"""A step is slow if it takes this many times the median of the steps before it, and this much longer."""


class LinkMonitor:
    """Watches the links of one node agent."""

    def __init__(
        self, run: Run, node: int, page: ProgressPage, disk_writer: AsyncWriter | None = None
    ) -> None:
        self._run, self._node, self._page, self._disk_writer = run, node, page, disk_writer or AsyncWriter()
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

    def poll(self, links: Sequence[LinkStatus], num_rows: int) -> tuple[LinkTraffic, ...]:
        """Sum up the links' traffic; call this method each second. ``links``: links that ranks use.
        ``num_rows``: number of local ranks."""
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
        """Return the newest rows that hold a whole step, and a second more. Summing up all five minutes would
        cost more each second than sampling them did."""
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
            # a restart for a link that came up later does not count as a failure
            self._starts -= not has_ended
        self._end_sampler()
        if self._starts < _MOST_STARTS:
            self._starts += 1
            self._ring = LinkRing(names)
            words = [sys.executable, "-Pm", "myriad.telemetry.links.link_sampler", str(self._ring.descriptor)]
            words += [str(self._page.descriptor), str(num_rows), str(os.getpid()), *names]
            keep = (self._ring.descriptor, self._page.descriptor)
            with suppress(OSError):
                self._sampler = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=keep)
        elif not self._reported:
            self._reported = True
            problem = (
                f"the process that samples the links of node {self._node} has ended {_MOST_STARTS} times"
            )
            self._disk_writer.enter_event(self._run, "telemetry", place="link counters", problem=problem)

    def _in_microseconds(self, one: LinkTraffic) -> LinkTraffic:
        """Convert pause frames to microseconds: the longest time that they can last (65,535 times 512 bits
        each)."""
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

    def _see_flaps(self, links: Sequence[LinkStatus]) -> None:
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
        """Forget how long steps took, because steps of another attempt may take another time."""
        self._steps.clear()

    def keep(self, why: str) -> None:
        """Store the ring's rows around this moment; they are written a few seconds later."""
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

            self._disk_writer.enter(f"link counters around a {why}", write)

    def close(self) -> None:
        """Write what is pending, and end the sampler."""
        self._write_due(at_once=True)
        self._disk_writer.wait_written()
        self._end_sampler()


def sum_up(rows: Rows, since_ns: int) -> tuple[LinkTraffic, ...]:
    """Sum up the traffic of each link: in the newest steps that ended after ``since_ns`` (half a second of
    them, at least one step), and in the step in progress."""
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
        first = changed[-ended - 1]  # the beginning of this step is in the ring
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
    """Sum up one link. ``masks``: the intervals of ended steps, of the step in progress, and since the last
    look."""
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
    """Return the rate in bytes per second at which the average byte was transferred; 0: no byte was."""
    total = float(moved.sum())
    return round(float((moved.astype(np.float64) ** 2 / seconds).sum()) / total) if total > 0 else 0


_EVERY_SECONDS, _LINES_AT_ONCE = 1.0, 3


class CounterLog:
    """Samples the network counters of one node, and writes them in another thread."""

    def __init__(self, run: Run, node: int, disk_writer: AsyncWriter | None = None) -> None:
        self._counters, self._disk_writer = Counters(_names()), disk_writer or AsyncWriter()
        self._file = CounterFile(run.counters_path / f"node-{node}.jsonl", self._counters.speeds())
        self._due, self._waiting = 0.0, list[CounterSample]()

    def poll(self) -> None:
        """Take a sample if it is due; call this method more often than each second."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _EVERY_SECONDS - 0.1  # the caller may be slightly early
        self._waiting.append(self._counters.sample())
        if len(self._waiting) >= _LINES_AT_ONCE:
            self._disk_writer.enter("", partial(self._file.append, tuple(self._waiting)))
            self._waiting.clear()


def watch_often(run: Run, node: int, seconds: float, ring: LinkRing | None = None) -> tuple[str, list[str]]:
    """Sample the counters every 10 ms for a number of seconds, from the node's ring if it has one. Return the
    path of the file, and lines that describe the peaks. Raises ``OSError``."""
    counters = Counters(_names())
    try:
        speeds = counters.speeds()
        samples = sample_often(counters, seconds) if ring is None else _sample_ring(ring, seconds)
    finally:
        counters.close()
    at = time.strftime("%Y%m%d-%H%M%S", time.localtime(samples[0].time))
    path = run.counters_path / f"node-{node}-each-10-ms-{at}.jsonl"
    CounterFile(path, speeds).append(samples)
    words = [f"node {node}, {line}" for line in describe_peaks(samples, speeds)]
    return str(path.relative_to(run.path)), words


def _sample_ring(ring: LinkRing, seconds: float) -> list[CounterSample]:
    since = time.monotonic_ns()
    time.sleep(seconds)
    rows = ring.newest().since(since)
    if not len(rows.values):
        raise OSError("the process that samples the links has written nothing")
    return samples_of(rows, LinkRing.epoch_ns())


def _names() -> list[str]:
    return [*(nic.name for nic in find_nics()), "lo"]
