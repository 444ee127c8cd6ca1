"""The spans of a run's newest steps, from its folder. Only reads; a file that is no whole one is left out and
counted.

Files are looked at again and again while the run writes them: each is read once and kept while its steps are
wanted. Of a run with very many ranks fewer steps are taken.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from myriad.telemetry.batch import BatchError, SpanBatch
from myriad.telemetry.records import RECORD, Records
from myriad.telemetry.span_files import FileFacts, read_facts, read_span_file, span_files

__all__ = ["NewestSpans", "SpanFolder"]


@dataclass(frozen=True)
class NewestSpans:
    """Of the newest attempt."""

    records: Records
    names: tuple[str, ...]
    attempt: int = 0
    num_dropped: int = 0
    """That the files say were lost, of all that were looked at."""
    num_unreadable: int = 0
    """Files."""
    clock_error_seconds: float = 0.0


@dataclass
class SpanFolder:
    """``RUN/spans``."""

    folder: Path
    most_steps: int = 50
    most_spans: int = 3_000_000
    _facts: dict[Path, FileFacts | None] = field(default_factory=dict)
    """``None``: cannot be read."""
    _batches: dict[Path, SpanBatch] = field(default_factory=dict)

    def newest(self) -> NewestSpans:
        """As the folder is now."""
        paths = [path for path in span_files(self.folder) if not path.is_symlink()]
        self._facts = {path: self._facts_of(path) for path in paths}
        known = [one for one in self._facts.values() if one is not None and one.num_spans]
        unreadable = sum(one is None for one in self._facts.values())
        if not known:
            return NewestSpans(np.zeros(0, RECORD), (), num_unreadable=unreadable)
        attempt = max(one.attempt for one in known)
        wanted = self._wanted([one for one in known if one.attempt == attempt])
        return self._read(wanted, attempt, unreadable)

    def _facts_of(self, path: Path) -> FileFacts | None:
        if self._facts.get(path) is None:
            try:
                return read_facts(path)
            except (BatchError, OSError, ImportError):
                return None
        return self._facts[path]

    def _wanted(self, facts: list[FileFacts]) -> list[tuple[FileFacts, int]]:
        """Files, the newest first as far back as memory goes; each with the first step that is wanted."""
        last = max(one.last_step for one in facts)
        first = last - self.most_steps + 1
        facts = sorted((one for one in facts if one.last_step >= first), key=lambda one: -one.last_step)
        spans = 0
        for one in facts:
            spans += one.num_spans
            if spans > self.most_spans and one.last_step < last - 2:
                first = max(first, one.last_step + 1)
                break
        return [(one, first) for one in facts if one.last_step >= first]

    def _read(self, wanted: list[tuple[FileFacts, int]], attempt: int, unreadable: int) -> NewestSpans:
        kept: dict[Path, SpanBatch] = {}
        numbers: dict[str, int] = {}
        parts: list[Records] = []
        for one, first in wanted:
            batch = self._batches.get(one.path) or self._batch(one.path)
            if batch is None:
                unreadable += 1
                continue
            kept[one.path] = batch
            codes = [numbers.setdefault(name, len(numbers)) for name in batch.names]
            records = batch.records[batch.records["step"] >= first]
            records["name"] = np.array(codes, dtype=np.int16)[records["name"]] if codes else 0
            parts.append(records)
        self._batches = kept
        return NewestSpans(
            np.concatenate(parts) if parts else np.zeros(0, RECORD),
            tuple(numbers),
            attempt,
            sum(one.num_dropped for one in self._facts.values() if one is not None),
            unreadable,
            max((one.clock_error_seconds for one, _ in wanted), default=0.0),
        )

    @staticmethod
    def _batch(path: Path) -> SpanBatch | None:
        try:
            return read_span_file(path)
        except (BatchError, OSError):
            return None
