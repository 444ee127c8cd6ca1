"""``python -m myriad.supervise.driver.alarm_process RUN SINCE [ORPHAN_SECONDS]``: sends the alarms of a run.

    RUN/events.jsonl ──► conditions ──► groups ──► an outbox for each sink ──► Slack, e-mail, ...
                             RUN/alerts/state.json: read position, open alarms, pending messages

It is a separate process, so that no failure of a sink, a name server or a library affects the run. The read
position is stored after each message, so the process of another driver can continue. At most one message, the
one in flight, is sent twice, with the same ``id``. Two processes never send at the same time
(RUN/alerts/lock).

The driver writes "over" to standard input when the run is over; pending messages are then sent for a few
seconds. If the input ends without that, driver and launcher are gone. If no other driver takes the lock
within `_ORPHAN_SECONDS`, the run is unsupervised, and this process sends that alarm before it ends. It does
not if the driver wrote "stopping", because a person stopped the run.
"""

import fcntl
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from myriad.alerts.conditions import alarm_of
from myriad.alerts.config import AlertsConfig, event_levels
from myriad.alerts.grouping import AlarmGroups
from myriad.alerts.outbox import Outbox
from myriad.alerts.senders import Sender, senders_of
from myriad.run import Run
from myriad.run.event_text import event_text
from myriad.run.run_lines import event_line
from myriad.system.jsonl import JsonlTail, Record
from myriad.system.whole_file import read_json, write_whole

__all__ = ["AlarmDelivery", "alerts_folder", "main"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_END_SECONDS = 15.0
"""Time for sending the remaining messages after the end of a run."""
_ORPHAN_SECONDS = 30.0
_MOST_OFFSET = 2**63


def alerts_folder(run: Path) -> Path:
    """Return the folder in which a run keeps the state of its alarms."""
    return run / "alerts"


class AlarmDelivery:
    """Reads the events of a run and sends its alarms, until it is closed. Not thread-safe."""

    def __init__(
        self,
        run: Run,
        alerts: AlertsConfig,
        senders: Sequence[Sender],
        since: float = 0.0,
        first_wait_seconds: float = 1.0,
    ) -> None:
        """``since``: earlier events raise no alarm, unless a stored state says where reading stopped."""
        self._run, self._since, self._levels = run, since, event_levels(alerts.levels)
        self._name = run.path.resolve().name
        self._groups = AlarmGroups(self._name, alerts.group_seconds, alerts.repeat_seconds)
        self._changed = threading.Event()
        self._state_path = alerts_folder(run.path) / "state.json"
        self._outboxes = [
            Outbox(one, alerts.per_hour, self._changed.set, self._report, first_wait_seconds)
            for one in senders
        ]
        stored = self._read_state()
        self._tail = JsonlTail(run.events_path, offset=stored, check=lambda line: event_line(line)[0])
        for outbox in self._outboxes:
            outbox.start()

    def _read_state(self) -> int:
        """Restore the stored state; return the number of bytes of events that were read."""
        try:
            found: Any = read_json(self._state_path)
            if not isinstance(found, dict):
                return 0
            self._groups.restore(found["groups"])
            for outbox in self._outboxes:
                outbox.restore(found["places"].get(outbox.name, {}))
            offset = found["offset"]
            if isinstance(offset, int) and 0 <= offset < _MOST_OFFSET:
                self._since = 0.0  # events between two drivers are not lost
                return offset
            return 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("%s is damaged, and not used: %s", self._state_path, type(error).__name__)
            return 0

    def _report(self, place: str, problem: str) -> None:
        """Write an event when a sink begins to fail or works again; the other sinks receive
        it."""
        self._run.append_event("alert", sink=place, problem=problem and f"alarms to {place}: {problem}")

    def poll(self, *, all_now: bool = False) -> None:
        """Read new events, and queue the messages that are due."""
        now = time.time()
        before = self._tail.offset
        for event in self._tail.poll():
            self._take(event, now)
        messages = self._groups.due(now, all_now=all_now)
        for message in messages:
            for outbox in self._outboxes:
                outbox.offer(message, now)
        for outbox in self._outboxes:
            outbox.due(now, self._name, all_now=all_now)
        if messages or self._tail.offset != before or self._changed.is_set():
            self._store()

    def _take(self, event: Record, now: float) -> None:
        at = event.get("time")
        if isinstance(at, int | float) and at < self._since:
            return
        for alarm in alarm_of(event, event_text(event), self._levels):
            self._groups.add(alarm, now)

    def _store(self) -> None:
        self._changed.clear()
        state = {
            "offset": self._tail.offset,
            "groups": self._groups.as_json(),
            "open": self._groups.causes,
            "places": {outbox.name: outbox.as_json() for outbox in self._outboxes},
        }
        try:
            self._state_path.parent.mkdir(exist_ok=True)
            write_whole(self._state_path, json.dumps(state), mode=0o600)
        except OSError as error:
            _LOG.warning("what was sent is not stored: %s", error.strerror)

    def pause(self) -> None:
        """Wait until the next poll is due, or until a message was sent."""
        self._changed.wait(_POLL_SECONDS)

    def report_unsupervised(self) -> None:
        """Send the alarm that no driver or launcher supervises the run."""
        text = "launcher and driver have ended without a word, and no other driver has come"
        self._run.append_event(
            "unsupervised", problem=f"{text}: ranks may have ended, and no fault is repaired"
        )

    def stop(self) -> None:
        """Stop sending; pending messages are stored for the next process."""
        deadline = time.monotonic() + _END_SECONDS
        for outbox in self._outboxes:
            outbox.stop(deadline)
        self._store()

    def close(self, seconds: float) -> int:
        """Send the pending messages; return how many were not sent."""
        self.poll(all_now=True)
        deadline = time.monotonic() + seconds
        left = sum(outbox.close(deadline) for outbox in self._outboxes)
        self._store()
        return left


class _Lock:
    """RUN/alerts/lock: one process sends at a time. On a file system without locks (Lustre without flock) the
    newest process sends: it writes its name into the file, which an older one finds there."""

    def __init__(self, run: Path) -> None:
        alerts_folder(run).mkdir(exist_ok=True)
        self._handle = os.open(alerts_folder(run) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._name = b""

    def take(self) -> bool:
        """Take the lock; return whether this process has it."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return self._take_by_name()
        return True

    def _take_by_name(self) -> bool:
        if self._name:
            return os.pread(self._handle, 64, 0) == self._name
        self._name = secrets.token_hex(16).encode()
        os.pwrite(self._handle, self._name, 0)
        return True

    def leave(self) -> None:
        """Let another process hold the lock."""
        with suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_UN)


class _Input:
    """Reads the driver's messages on standard input."""

    def __init__(self) -> None:
        self.ended, self.is_over, self.is_stopping = threading.Event(), False, False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        text = b""
        while part := os.read(0, 64):
            text = (text + part)[-64:]
        self.is_over, self.is_stopping = b"over" in text, b"stopping" in text
        self.ended.set()


def _wait_for(lock: _Lock, said: _Input) -> bool:
    """Wait for the lock; return whether it was taken. If this process's driver ends first, give up, unless
    the run is over: then the previous process may still be sending, so wait until it must have ended."""
    give_up_at = None
    while not lock.take():
        if said.ended.wait(_POLL_SECONDS):
            now = time.monotonic()
            give_up_at = now + 2 * _END_SECONDS if give_up_at is None else give_up_at
            if not said.is_over or now >= give_up_at:
                return False
            time.sleep(_POLL_SECONDS)
    return True


def main(arguments: list[str]) -> int:
    """Send the alarms of one run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run, since = Run(arguments[0]), float(arguments[1])
    orphan_seconds = float(arguments[2]) if len(arguments) > 2 else _ORPHAN_SECONDS
    alerts, said, lock = run.job().alerts, _Input(), _Lock(run.path)
    os.nice(10)
    if not _wait_for(lock, said):
        return 0
    delivery = AlarmDelivery(run, alerts, senders_of(alerts), since)
    while not said.ended.is_set():
        delivery.poll()
        delivery.pause()
    if not said.is_over:
        delivery.stop()
        lock.leave()
        time.sleep(orphan_seconds)
        if not lock.take():
            return 0
        delivery = AlarmDelivery(run, alerts, senders_of(alerts), since)
        if not said.is_stopping:
            delivery.report_unsupervised()
    if left := delivery.close(_END_SECONDS):
        _LOG.warning("%d messages were not sent", left)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
