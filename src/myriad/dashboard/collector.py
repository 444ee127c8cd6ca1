"""Takes batches of spans by HTTP: whole or not at all, and never more of them at once than memory allows.

A sender that gets 204 knows that its spans are taken. One that got no answer sends the same batch again,
which is known by its sender and number, and counts once. 429: too much is on its way already; the sender
counts the batch as dropped, and so does this server. With a folder, what comes is kept there as Parquet too.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from myriad.dashboard.store.sent_once import SentOnce
from myriad.dashboard.store.span_store import BeyondJobError, SpanStore
from myriad.dashboard.watched import Watched
from myriad.telemetry.batch import MAX_BATCH_BYTES, BatchError, SpanBatch, decode
from myriad.telemetry.span_files import write_span_file

__all__ = ["Collector"]

_LOG = logging.getLogger(__name__)
_MOST_BYTES_AT_ONCE = 4 * MAX_BATCH_BYTES
_BYTES_AT_A_TIME = 4 * 2**20
"""Added at once: while they are, nobody's question is answered."""
_BODY_SECONDS, _WAIT_SECONDS = 30.0, 2.0
_LAYOUT_SECONDS = 3.0
"""After which the run's files have told of an attempt that has more ranks or steps, or nobody will."""


@dataclass(frozen=True)
class _Waiting:
    batch: SpanBatch
    size: int
    store: SpanStore
    """Of the layout for which the batch was checked."""


class Collector:
    """Of one run. Batches are checked as they come, and added by a thread of its own, all that are there."""

    def __init__(self, watched: Watched, folder: Path | None = None) -> None:
        """``folder``: where batches are kept; nowhere when left out."""
        self._watched, self._folder = watched, folder
        self._bytes_at_once = 0
        """Of bodies on their way, and of batches that wait."""
        self._once = SentOnce()
        self._numbers, self._began = itertools.count(), int(time.time())
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)

    def start(self) -> None:
        """Once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """What was taken is added first."""
        self._waiting.put(None)
        self._thread.join()

    async def take(self, request: Request) -> Response:
        """Answers one batch."""
        length = request.headers.get("content-length", "")
        counts = self._watched.store.counts
        if not length.isdecimal() or len(length) > 12:
            return PlainTextResponse("content-length: must be given\n", 411)
        size = int(length)
        if size > MAX_BATCH_BYTES:
            counts.refused_batches += 1
            return PlainTextResponse(f"{size} bytes: at most {MAX_BATCH_BYTES}\n", 413)
        if not await self._has_room(size):
            counts.flooded_batches += 1
            return PlainTextResponse("too much at once: this batch is dropped\n", 429, {"retry-after": "1"})
        self._bytes_at_once += size
        try:
            batch = decode(await asyncio.wait_for(request.body(), _BODY_SECONDS))
            store = await self._store_of(batch)
        except BatchError as error:
            self._bytes_at_once -= size
            counts.refused_batches += 1
            counts.tell(f"a batch: {error}")
            return PlainTextResponse(f"{error}\n", 400)
        except BaseException:
            self._bytes_at_once -= size
            raise
        self._watched.heard_of = time.time()
        if not self._once.is_new(batch):
            self._bytes_at_once -= size
            counts.repeated_batches += 1
            counts.lost_before += self._once.more_dropped(batch)
            return Response(status_code=204)
        kept = store.of_layout(batch)
        counts.too_old += len(batch.records) - len(kept.records)
        self._waiting.put(_Waiting(kept, size, store))
        return Response(status_code=204)

    async def _store_of(self, batch: SpanBatch) -> SpanStore:
        """It fits there. Raises `BatchError`; of ranks or steps that are not known not before the files were
        looked at again: a run may have begun anew with more of them."""
        until = time.monotonic() + _LAYOUT_SECONDS
        while True:
            store = self._watched.store
            try:
                store.check(store.of_layout(batch))
                return store
            except BeyondJobError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.1)

    async def _has_room(self, size: int) -> bool:
        """A sender waits a little before its batch is dropped: it sends less meanwhile."""
        until = time.monotonic() + _WAIT_SECONDS
        while self._bytes_at_once + size > _MOST_BYTES_AT_ONCE:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.02)
        return True

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            taken, size = [first], first.size
            while size < _BYTES_AT_A_TIME and not self._waiting.empty():
                if (more := self._waiting.get()) is None:
                    self._waiting.put(None)
                    break
                taken.append(more)
                size += more.size
            for store in dict.fromkeys(one.store for one in taken):
                self._add(store, [one.batch for one in taken if one.store is store])
            self._loop.call_soon_threadsafe(self._done, size)

    def _done(self, size: int) -> None:
        self._bytes_at_once -= size

    def _add(self, store: SpanStore, batches: list[SpanBatch]) -> None:
        try:
            store.add_checked(batches)
        except Exception as error:  # of a bug: the next ones may be well
            store.counts.tell(f"{len(batches)} batches: {error!r}")
            _LOG.exception("batches of spans are lost")
        if self._folder is not None:
            for batch in batches:
                self._keep(self._folder, batch)

    def _keep(self, folder: Path, batch: SpanBatch) -> None:
        """A full disk costs the copy only."""
        name = f"attempt-{batch.attempt}-node-{batch.node}-{self._began}-{next(self._numbers)}.parquet"
        try:
            write_span_file(folder / name, batch)
        except (OSError, ValueError) as error:
            self._watched.store.counts.tell(f"{name} is not kept: {error}")
