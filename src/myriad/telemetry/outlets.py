"""The two places where spans go: files in the run's folder, and a collector by HTTP."""

import http.client
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from myriad.telemetry.batch import SpanBatch, encode
from myriad.telemetry.outlet import RefusedError
from myriad.telemetry.pool import pool

__all__ = ["TOKEN", "Collector", "FileWriter"]

TOKEN = "MYRIAD_COLLECTOR_TOKEN"
"""What a collector that is not on this machine asks for, in the environment: no job file has it."""
_TIMEOUT_SECONDS = 5.0
_MAX_POSTED = 2**17
"""Spans in one request: 4 MiB."""
_WILL_NEVER = (400, 404, 405, 411, 413, 415, 422)


class FileWriter:
    """One file of what is given, for each attempt; the oldest are removed beyond ``keep`` bytes."""

    def __init__(self, folder: Path, place: str, keep: int | None) -> None:
        """``place``: "node-3" or "rank-7", part of the files' names: nobody else's."""
        self._folder, self._place, self._keep = folder, place, keep
        self._sizes: dict[Path, int] | None = None
        self._number = 0

    def write(self, batches: Sequence[SpanBatch]) -> None:
        """Raises ``OSError``."""
        from myriad.telemetry.span_files import write_span_file

        sizes = self._look()
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
            for path in written:  # they are written again with the rest
                path.unlink(missing_ok=True)
            raise
        sizes.update({path: path.stat().st_size for path in written})
        self._remove_oldest(sizes)

    def _look(self) -> dict[Path, int]:
        """Its files and their sizes. An earlier process's numbers are gone on from, its drafts removed."""
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
    """Posts batches, over one connection."""

    def __init__(self, address: str, run: str) -> None:
        """``address``: http://HOST:PORT; ``run``: which run they are of."""
        parts = urlsplit(address)
        self._path = f"{parts.path.rstrip('/')}/api/spans"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
        self._headers = {"Content-Type": "application/octet-stream", "Myriad-Run": run}
        if token := os.environ.get(TOKEN):
            self._headers["Authorization"] = f"Bearer {token}"

    def post(self, batches: Sequence[SpanBatch]) -> None:
        """Raises ``OSError`` where it cannot be reached or is too busy, `RefusedError` where it does not take
        this."""
        for batch in batches:
            for first in range(0, max(1, len(batch.records)), _MAX_POSTED):
                self._post(_part(batch, first))

    def _post(self, batch: SpanBatch) -> None:
        try:
            self._connection.request("POST", self._path, encode(batch), self._headers)
            answer = self._connection.getresponse()
            text = answer.read(512).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise OSError(f"the collector cannot be reached: {error or type(error).__name__}") from None
        if answer.will_close or not answer.isclosed():
            self._connection.close()
        if answer.status >= 300:
            problem = f"the collector says {answer.status}: {text.partition(chr(10))[0][:200]}"
            raise RefusedError(problem) if answer.status in _WILL_NEVER else OSError(problem)


def _part(batch: SpanBatch, first: int) -> SpanBatch:
    dropped = batch.num_dropped if first == 0 else 0
    origin = batch.origin and replace(batch.origin, part=first // _MAX_POSTED)
    records = batch.records[first : first + _MAX_POSTED]
    return replace(batch, records=records, num_dropped=dropped, origin=origin)
