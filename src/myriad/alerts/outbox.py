"""The queue of messages to one place: bounded, sent by a thread, retried, and never blocking the caller.

    offer ──► rate limit ──► queue (at most 100) ──► thread ──► sender
                 └─ withheld: counted by cause, summarised in one message once the limit allows

A failed attempt is retried after 1, 2, 4, ... 300 s; a message is dropped after an hour. A place that hangs
blocks only its own thread. The queue is stored with the rest of the state, so that another process can
continue.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from myriad.alerts.config import LEVELS, Level
from myriad.alerts.grouping import Message, message_from
from myriad.alerts.senders import RefusedMessageError, RetryLaterError, Sender

__all__ = ["Outbox"]

_LOG = logging.getLogger(__name__)
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 300.0
_GIVE_UP_SECONDS = 3600.0
_MOST_QUEUED, _MOST_CAUSES = 100, 32
_HOUR = 3600.0


class Outbox:
    """Queue and sender thread of one place."""

    def __init__(
        self,
        sender: Sender,
        per_hour: int,
        changed: Callable[[], None],
        report: Callable[[str, str], None],
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
    ) -> None:
        """``changed``: called when there is something to store. ``report``: called with the place's name and
        its problem when one begins, and with "" when it is over."""
        self.name, self._sender, self._level = sender.name, sender, sender.level
        self._per_hour, self._changed, self._report = per_hour, changed, report
        self._first_wait = first_wait_seconds
        self._lock = threading.Condition()
        self._queue: deque[tuple[Message, float]] = deque()
        """Messages, and when each was queued (seconds since the epoch)."""
        self._sent_at: deque[float] = deque()
        """Times of messages within the last hour."""
        self._held: Counter[str] = Counter()
        self._held_level: Level = "info"
        self._failures, self._closing = 0, False
        self.problem = ""
        """Why the place fails; empty if it works."""
        self.num_sent = 0
        self._thread = threading.Thread(target=self._work, name=f"alerts-{self.name}", daemon=True)

    def start(self) -> None:
        """Start the sender thread."""
        self._thread.start()

    def offer(self, message: Message, now: float) -> None:
        """Take a message of this place's level or above; return at once."""
        if LEVELS.index(message.level) < LEVELS.index(self._level) or message.not_to == self.name:
            return
        with self._lock:
            if self._has_room(now):
                self._put(message, now)
            else:
                known = message.cause in self._held or len(self._held) < _MOST_CAUSES
                self._held[message.cause if known else "other"] += 1
                self._held_level = max(self._held_level, message.level, key=LEVELS.index)
        self._changed()

    def _has_room(self, now: float) -> bool:
        while self._sent_at and not now - _HOUR < self._sent_at[0] <= now:
            self._sent_at.popleft()
        # The last one of the hour is for the summary of what is held back.
        return len(self._sent_at) < max(1, self._per_hour - 1) and not self._held

    def _put(self, message: Message, now: float) -> None:
        self._sent_at.append(now)
        self._queue.append((message, now))
        if len(self._queue) > _MOST_QUEUED:
            dropped, _ = self._queue.popleft()
            self._hold(dropped)
        self._lock.notify_all()

    def _hold(self, message: Message) -> None:
        self._held[message.cause] += 1
        self._held_level = max(self._held_level, message.level, key=LEVELS.index)

    def due(self, now: float, run: str, *, all_now: bool = False) -> None:
        """Queue the summary of withheld messages, if the rate limit allows it. ``all_now``: the run is
        over."""
        with self._lock:
            while self._sent_at and not now - _HOUR < self._sent_at[0] <= now:
                self._sent_at.popleft()
            early = self._sent_at and now - self._sent_at[-1] < _HOUR / self._per_hour
            full = len(self._sent_at) >= self._per_hour
            if not self._held or self._queue or ((early or full) and not all_now):
                return
            number, lines = (
                self._held.total(),
                [f"{cause}: {count}" for cause, count in self._held.most_common()],
            )
            title = (
                f"{number} message{'s were' if number > 1 else ' was'} held back ({self._per_hour} an hour)"
            )
            level, self._held_level = self._held_level, "info"
            self._held.clear()
            name = f"{run}-{self.name}-held-{now:.0f}"
            self._put(
                Message(name, "summary", level, run, "held back", title, tuple(lines), now, number), now
            )
        self._changed()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                message, since = self._queue[0]
            wait = self._attempt(message, since)
            self._changed()
            if wait > 0:
                with self._lock:
                    self._lock.wait_for(lambda: self._closing, wait)
                    if self._closing:
                        return

    def _attempt(self, message: Message, since: float) -> float:
        """Send once; return the seconds until the next attempt, 0 if there is none."""
        try:
            self._sender.send(message)
        except RefusedMessageError as error:
            self._done(message, sent=False)
            self._note(f"a message was refused: {error}")
            return 0.0
        except Exception as error:  # whatever a library raises, the thread goes on
            if not isinstance(error, OSError):
                _LOG.warning("%s failed: %s", self.name, type(error).__name__)
            text = str(error) if isinstance(error, OSError) else type(error).__name__
            self._failures += 1
            self._note(text)
            if time.time() - since > _GIVE_UP_SECONDS:
                with self._lock:
                    self._hold(message)
                self._done(message, sent=False)
                return 0.0
            asked = error.seconds if isinstance(error, RetryLaterError) else 0.0
            return max(
                asked, min(_LONGEST_WAIT_SECONDS, self._first_wait * 2.0 ** min(self._failures - 1, 20))
            )
        self._failures = 0
        self._done(message, sent=True)
        self._note("")
        return 0.0

    def _done(self, message: Message, *, sent: bool) -> None:
        with self._lock:
            self.num_sent += sent
            if self._queue and self._queue[0][0] is message:
                self._queue.popleft()
            self._lock.notify_all()

    def _note(self, problem: str) -> None:
        before, self.problem = self.problem, problem
        if bool(before) != bool(problem):
            _LOG.warning("%s: %s", self.name, problem or "takes messages again")
            self._report(self.name, problem)

    @property
    def num_waiting(self) -> int:
        """Number of messages that are not sent yet."""
        return len(self._queue) + self._held.total()

    def close(self, deadline: float) -> int:
        """Send queued messages until ``deadline`` (``time.monotonic``); return how many are left."""
        with self._lock:
            while self._queue and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            self._closing = True
            self._lock.notify_all()
        return self.num_waiting

    def stop(self, deadline: float) -> None:
        """Start no further attempt, and wait until ``deadline`` for the one in flight, so that the stored
        state is exact."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def as_json(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        with self._lock:
            return {
                "queue": [[asdict(message), since] for message, since in self._queue],
                "sent_at": list(self._sent_at),
                "held": dict(self._held),
                "held_level": self._held_level,
                "sent": self.num_sent,
                "problem": self.problem,
            }

    def restore(self, found: Mapping[str, Any]) -> None:
        """Restore the state that `as_json` returned; damaged entries are skipped."""
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            for message, since in found["queue"][:_MOST_QUEUED]:
                self._queue.append((message_from(message), float(since)))
            self._sent_at.extend(map(float, found["sent_at"][-self._per_hour :]))
            self._held.update({str(cause): int(count) for cause, count in found["held"].items()})
            self._held_level = found["held_level"] if found["held_level"] in LEVELS else "warning"
            self.num_sent, self.problem = int(found["sent"]), str(found["problem"])
