"""Destinations of spans: files in the run's folder, and a collector over HTTP.

An `Outlet` has a thread and a bounded queue for one destination, so `offer` never blocks:

    offer ──► [ pending batches: at most MAX_WAITING spans, the oldest are dropped ] ──► deliver

A failed delivery is retried with increasing delays. A destination that hangs blocks only its own thread.
Dropped spans are counted; the count is reported when the destination fails and stored in the next delivered
batch.
"""

import http.client
import logging
import os
import re
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from myriad.telemetry.shipping.page_trust import CERTIFICATES, connect_page
from myriad.telemetry.span_io.span_batch import SpanBatch, encode, pool

__all__ = ["Collector", "FileWriter", "Outlet", "ReportOutlet"]

_LOG = logging.getLogger(__name__)
MAX_WAITING = 2**20
"""Maximum number of queued spans, of 32 bytes each."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0
_REPORT_SECONDS = 30.0

ReportOutlet = Callable[[str, str, int], None]
"""Callback that reports a destination's state: name, problem ("" when it ended), number of spans lost."""


class RefusedError(Exception):
    """Raised if a destination permanently rejects a batch."""


class Outlet:
    """A destination of spans, with its thread and queue."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[Sequence[SpanBatch]], None],
        report: ReportOutlet,
        *,
        every_seconds: float = 0.0,
        at_once: int | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Start the thread.

        ``deliver`` is atomic; it raises ``OSError`` for errors worth a retry, else `RefusedError`. Batches
        are collected for ``every_seconds``; ``at_once`` is the maximum number per delivery."""
        self.name, self._deliver, self._report = name, deliver, report
        self._every, self._at_once, self._max_waiting = every_seconds, at_once, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[SpanBatch] = deque()
        self._num_waiting = self._num_lost = 0
        self._due, self._pause, self._closing = 0.0, 0.0, False
        self._problem, self._is_problem_reported, self._num_unreported, self._report_at = "", False, 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"myriad-{name}", daemon=True)
        self._thread.start()

    def offer(self, batch: SpanBatch) -> None:
        """Queue a batch for delivery, and return at once."""
        with self._changed:
            first = not self._waiting
            self._add([batch])
            if first or self._is_due():  # otherwise the thread's timeout is already set
                self._changed.notify()

    def close(self, seconds: float) -> None:
        """Deliver the queued batches, for at most ``seconds``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _add(self, batches: Sequence[SpanBatch], *, first: bool = False) -> None:
        """Add batches to the queue. Beyond its limit, drop the oldest batches, but always keep one."""
        if not self._waiting and not self._pause:
            self._due = time.monotonic() + self._every
        if first:
            self._waiting.extendleft(reversed(batches))
        else:
            self._waiting.extend(batches)
        self._num_waiting += sum(len(batch.records) for batch in batches)
        while self._num_waiting > self._max_waiting and len(self._waiting) > 1:
            oldest = self._waiting.popleft()
            self._num_waiting -= len(oldest.records)
            self._lose([oldest])

    def _lose(self, batches: Sequence[SpanBatch]) -> None:
        lost = sum(len(batch.records) for batch in batches)
        self._num_lost += lost + sum(batch.num_dropped for batch in batches)
        self._num_unreported += lost

    def _run(self) -> None:
        while batches := self._take():
            try:
                self._deliver(batches)
            except RefusedError as error:
                with self._changed:
                    self._lose(batches)
                self._note(str(error))
            except Exception as error:  # no error here may end the run
                if not isinstance(error, OSError):
                    _LOG.warning("spans to %s", self.name, exc_info=error)
                if self._fail(batches):
                    break
                self._note(str(error) or type(error).__name__)
            else:
                self._pause = 0.0
                self._note("")
        if self._num_unreported:
            self._report(self.name, self._problem or "closed", self._num_unreported)

    def _take(self) -> list[SpanBatch]:
        """Wait until batches are due, and return them; an empty list means that the queue is closed."""
        with self._changed:
            while not (self._closing or self._is_due()):
                seconds = self._due - time.monotonic()
                self._changed.wait(max(0.001, seconds) if self._waiting else None)
            batches = list(islice(self._waiting, self._at_once))
            for batch in batches:
                self._waiting.popleft()
                self._num_waiting -= len(batch.records)
            if batches:
                first, lost = batches[0], self._num_lost
                batches[0], self._num_lost = replace(first, num_dropped=first.num_dropped + lost), 0
            return batches

    def _is_due(self) -> bool:
        late = time.monotonic() >= self._due
        return bool(self._waiting) and (
            late or (not self._pause and self._num_waiting * 2 > self._max_waiting)
        )

    def _fail(self, batches: Sequence[SpanBatch]) -> bool:
        """Put batches back for a retry and return false; if closing, drop them and return true."""
        with self._changed:
            if self._closing:
                self._lose(batches)
                return True
            self._pause = min(_LONGEST_WAIT_SECONDS, max(_FIRST_WAIT_SECONDS, 2 * self._pause))
            self._due = time.monotonic() + self._pause
            self._add(batches, first=True)
            return False

    def _note(self, problem: str) -> None:
        """Report that the destination fails or works again, at most once per `_REPORT_SECONDS`."""
        self._problem = problem
        has_news = bool(problem) != self._is_problem_reported or self._num_unreported
        if has_news and time.monotonic() >= self._report_at:
            self._report_at, self._is_problem_reported = time.monotonic() + _REPORT_SECONDS, bool(problem)
            lost, self._num_unreported = self._num_unreported, 0
            self._report(self.name, problem, lost)


_TIMEOUT_SECONDS = 5.0
_MAX_POSTED = 2**17
"""Maximum number of spans in one request, which is 4 MiB."""
_WILL_NEVER = (400, 404, 405, 411, 413, 415, 422)


class FileWriter:
    """Writes one span file per delivery and attempt. It deletes the oldest files beyond ``keep`` bytes."""

    def __init__(self, folder: Path, place: str, keep: int | None) -> None:
        """Write to ``folder``. ``place`` is "node-3" or "rank-7", a unique part of the files' names."""
        self._folder, self._place, self._keep = folder, place, keep
        self._sizes: dict[Path, int] | None = None
        self._number = 0

    def write(self, batches: Sequence[SpanBatch]) -> None:
        """Write all batches or, if one fails, none. Raises ``OSError``."""
        from myriad.telemetry.span_io.span_files import write_span_file

        sizes = self._poll()
        by_attempt: defaultdict[int, list[SpanBatch]] = defaultdict(list)
        for batch in batches:
            by_attempt[batch.attempt].append(batch)
        written = []
        try:
            for attempt, parts in sorted(by_attempt.items()):
                path = self._folder / f"attempt-{attempt}-{self._place}-{self._number}.parquet"
                write_span_file(path, pool(parts))
                self._number += 1
                written.append(path)
        except OSError:
            for path in written:  # the retry writes all batches again
                path.unlink(missing_ok=True)
            raise
        sizes.update({path: path.stat().st_size for path in written})
        self._remove_oldest(sizes)

    def _poll(self) -> dict[Path, int]:
        """Return this writer's files and their sizes. The first call continues the numbers of an earlier
        process and deletes its incomplete files."""
        if self._sizes is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            own = re.compile(rf"attempt-\d+-{self._place}-(\d+)\.parquet")
            found = {}
            for path in self._folder.iterdir():
                if (match := own.fullmatch(path.name)) is not None:
                    found[int(match.group(1)), path] = path.stat().st_size
                elif path.name[0] == "." and own.match(path.name[1:]):
                    path.unlink(missing_ok=True)
            self._number = 1 + max((number for number, _ in found), default=-1)
            self._sizes = {path: size for (_, path), size in sorted(found.items())}
        return self._sizes

    def _remove_oldest(self, sizes: dict[Path, int]) -> None:
        total = sum(sizes.values())
        while self._keep is not None and total > self._keep and len(sizes) > 1:
            oldest = next(iter(sizes))
            total -= sizes.pop(oldest)
            with suppress(OSError):
                oldest.unlink()


class Collector:
    """Posts batches to a collector over one connection."""

    def __init__(
        self,
        address: str,
        run: str,
        tokens: Callable[[], Sequence[str]] = tuple,
        trust: str | None = None,
    ) -> None:
        """Prepare for ``address`` (http[s]://HOST:PORT), and spans of the run named ``run``.

        ``tokens`` returns the tokens to try, best first; it is called again after a refusal, because a server
        that restarts may want another token. ``trust``: the job's key ``telemetry.collector_ca``."""
        self._address, self._trust = address, trust
        self._path = f"{urlsplit(address).path.rstrip('/')}/api/spans"
        self._connection: http.client.HTTPConnection | None = None
        self._headers = {"Content-Type": "application/octet-stream", "Myriad-Run": run}
        self._tokens, self._token = tokens, next(iter(tokens()), "")

    def post(self, batches: Sequence[SpanBatch]) -> None:
        """Post batches. Raises ``OSError`` if the collector is unreachable or busy, `RefusedError` if it
        rejects a batch."""
        for batch in batches:
            for first in range(0, max(1, len(batch.records)), _MAX_POSTED):
                self._post(_part(batch, first))

    def _post(self, batch: SpanBatch) -> None:
        body = encode(batch)
        status, text = self._ask(body, self._token)
        if status == 401:
            for token in self._tokens():
                if token != self._token and (answer := self._ask(body, token))[0] != 401:
                    (status, text), self._token = answer, token
                    break
        if status >= 300:
            problem = f"the collector says {status}: {text.partition(chr(10))[0][:200]}"
            raise RefusedError(problem) if status in _WILL_NEVER else OSError(problem)

    def _ask(self, body: bytes, token: str) -> tuple[int, str]:
        """Send one request, and return the status and the beginning of the answer."""
        headers = self._headers | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            if self._connection is None:  # certificates may have been renewed since the last one
                trust = os.environ.get(CERTIFICATES) or self._trust
                self._connection = connect_page(self._address, _TIMEOUT_SECONDS, trust)
            self._connection.request("POST", self._path, body, headers)
            answer = self._connection.getresponse()
            text = answer.read(512).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            self._close()
            raise OSError(f"the collector cannot be reached: {_reason(error, self._address)}") from None
        if answer.will_close or not answer.isclosed():
            self._close()
        return answer.status, text

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _reason(error: Exception, address: str) -> str:
    """Return the error's text, with advice if the collector may want TLS or another certificate."""
    text = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{text}; {CERTIFICATES} names the certificates to accept"
    is_odd = isinstance(error, http.client.HTTPException | ConnectionResetError)
    return f"{text}; if it has TLS, name https://" if is_odd and address.startswith("http:") else text


def _part(batch: SpanBatch, first: int) -> SpanBatch:
    dropped = batch.num_dropped if first == 0 else 0
    origin = batch.origin and replace(batch.origin, part=first // _MAX_POSTED)
    records = batch.records[first : first + _MAX_POSTED]
    return replace(batch, records=records, num_dropped=dropped, origin=origin)
