"""Receive batches of spans over HTTP, each completely or not at all, within a bound on memory.

Status 204 means that the batch was accepted. Status 429 means that too much data is in flight; sender and
server both count the batch as dropped. With a folder, batches are also stored there as Parquet.

A sender that gets no answer resends its batch, and the batch counts once. A sender numbers its batches and
starts none before the previous one was answered, so the newest number of each sender identifies all
duplicates (`BatchDeduplicator`). Among very many senders, those seen last are remembered.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from myriad.dashboard.store.span_store import BeyondJobError, SpanStore
from myriad.dashboard.watched_run import WatchedRun
from myriad.telemetry.span_io.span_batch import MAX_BATCH_BYTES, BatchError, Origin, SpanBatch, decode
from myriad.telemetry.span_io.span_files import write_span_file

__all__ = ["SpanCollector"]

_MOST_SENDERS = 2**15


@dataclass(frozen=True)
class _Newest:
    origin: Origin
    num_dropped: int


class BatchDeduplicator:
    """Finds resent batches among all senders of one server."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, _Newest] = OrderedDict()

    def is_new(self, batch: SpanBatch) -> bool:
        """Return whether the batch is new, and record it. A batch without origin is always new."""
        origin = batch.origin
        if origin is None:
            return True
        known = self._newest.get(origin.sender)
        if known is not None and origin.place <= known.origin.place:
            return False
        self._newest[origin.sender] = _Newest(origin, batch.num_dropped)
        self._newest.move_to_end(origin.sender)
        while len(self._newest) > _MOST_SENDERS:
            self._newest.popitem(last=False)
        return True

    def more_dropped(self, batch: SpanBatch) -> int:
        """Return the spans lost by the sender between its first and second delivery of a batch, which only
        the second reports."""
        known = self._newest.get(batch.origin.sender) if batch.origin is not None else None
        if known is None or known.origin != batch.origin:
            return 0
        self._newest[known.origin.sender] = _Newest(known.origin, max(known.num_dropped, batch.num_dropped))
        return max(0, batch.num_dropped - known.num_dropped)


_LOG = logging.getLogger(__name__)
_MOST_BYTES_AT_ONCE = 4 * MAX_BATCH_BYTES
_BYTES_AT_A_TIME = 4 * 2**20
"""Maximum bytes added at once. Meanwhile no request is answered."""
_BODY_SECONDS, _WAIT_SECONDS = 30.0, 2.0
_LAYOUT_SECONDS = 3.0
"""Time to wait for the run's files to show an attempt with more ranks or steps."""


@dataclass(frozen=True)
class _Waiting:
    batch: SpanBatch
    size: int
    store: SpanStore
    """Store of the layout for which the batch was checked."""


class SpanCollector:
    """Receives the batches of one run. It checks a batch on arrival; a thread adds all pending batches."""

    def __init__(self, watched: WatchedRun, folder: Path | None = None) -> None:
        """Receive batches for ``watched``, and store them in ``folder`` if given."""
        self._watched, self._folder = watched, folder
        self._bytes_at_once = 0
        """Bytes of request bodies in flight and of pending batches."""
        self._once = BatchDeduplicator()
        self._numbers, self._began = itertools.count(), int(time.time())
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Add all accepted batches, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    async def take(self, request: Request) -> Response:
        """Handle the request of one batch."""
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
            counts.add_problem(f"a batch: {error}")
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
        """Return the store that the batch fits. Raises `BatchError`.

        For unknown ranks or steps it first waits for the files to be read again: a restarted run may have
        more."""
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
        """Wait briefly for free memory, which also slows the sender. Return whether there is room."""
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
        except Exception as error:  # a bug; later batches may succeed
            store.counts.add_problem(f"{len(batches)} batches: {error!r}")
            _LOG.exception("batches of spans are lost")
        if self._folder is not None:
            for batch in batches:
                self._keep(self._folder, batch)

    def _keep(self, folder: Path, batch: SpanBatch) -> None:
        """Store a copy of the batch. A full disk loses only this copy."""
        name = f"attempt-{batch.attempt}-node-{batch.node}-{self._began}-{next(self._numbers)}.parquet"
        try:
            write_span_file(folder / name, batch)
        except (OSError, ValueError) as error:
            self._watched.store.counts.add_problem(f"{name} is not kept: {error}")
