"""The loader process: ``python -m myriad.data.loader_process DESCRIPTOR``.

The first line of input is the specification. Further input only wakes the process, and the end of input ends
it. It sleeps when all slots are full. This module does not import torch.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from myriad.data.bad_blocks import BlockGuard, ReportEvent
from myriad.data.batch_ring import Ring
from myriad.data.corpus import BatchReader, Corpora
from myriad.data.corpus_opening import open_corpora
from myriad.data.loader import CHANGED_WHILE_READ, LoaderSpec
from myriad.data.streaming.streamed_corpus import StreamPlace
from myriad.errors import BadInputError, MyriadError, RunFailedError
from myriad.system.jsonl import LineFile

__all__ = ["LoaderThread", "main"]

_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 0.0005, 0.01
_INPUT = 0
_GROUPS_AHEAD = 2
"""Groups of streamed text that are tokenized beyond those of the steps in the ring."""
_MOST_BAD_RECORDS = 100
"""Largest number of events about records left out, of one loader; the index counts all."""


def main() -> int:
    """Fill the ring until its owner has ended."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the ranks, which may still save with our batches
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads are those of data.tokenizer_threads
    ring = Ring(int(sys.argv[1]))
    owner = os.getppid()
    try:
        spec = LoaderSpec.model_validate_json(_read_line())
    except MyriadError as error:
        ring.fail(str(error))
        return 1
    return _fill_ring(ring, spec, lambda seconds: _sleep(seconds) and os.getppid() == owner)


class LoaderThread:
    """A loader in a thread of the process that trains (`myriad.train.in_process`)."""

    def __init__(self, spec: LoaderSpec, ring: Ring, descriptor: int, patience: float) -> None:
        """``ring`` and ``patience`` have the same meaning as for a loader process, which can hang and be
        replaced."""
        self._descriptor, self._called, self._ends = descriptor, threading.Event(), False
        arguments = (Ring(descriptor), spec, self._wait)
        self._thread = threading.Thread(target=_fill_ring, args=arguments, daemon=True)
        self._thread.start()

    def _wait(self, seconds: float) -> bool:
        self._called.wait(seconds)
        self._called.clear()
        return not self._ends

    @property
    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def wake(self) -> bool:
        """Notify the loader of a request; False if it has ended."""
        self._called.set()
        return self._thread.is_alive()

    def begin_wait(self) -> None:
        """Do nothing: a thread is not watched."""

    def end_if_stuck(self) -> None:
        """Do nothing: a thread cannot be ended."""

    def restart(self) -> str:
        """Raise `RunFailedError`: a thread ends only with an error, or with `close`."""
        raise RunFailedError("data loader: its thread has ended")

    def close(self) -> None:
        """End the loader's thread."""
        self._ends = True
        self._called.set()
        self._thread.join(timeout=2)
        os.close(self._descriptor)


def _fill_ring(ring: Ring, spec: LoaderSpec, wait: Callable[[float], bool]) -> int:
    """Fill the ring until ``wait`` returns False, and return the exit code; an error is written to the ring.

    ``wait`` takes the seconds until the next check, and returns early when a rank requests a step.
    """
    readers: _Readers | None = None
    try:
        report = _reporter(spec)
        guard = _guard(spec, report)
        readers = _Readers(guard, _streams(spec, report))
        _serve(ring, spec, readers, wait, guard)
    except MyriadError as error:
        ring.fail(str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        ring.fail(f"{type(error).__name__}: {error}")
        return 1
    finally:
        if readers is not None:
            readers.close()
    return 0


def _reporter(spec: LoaderSpec) -> ReportEvent:
    """Return a function that writes events of the run."""
    lines = None if spec.events is None else LineFile(Path(spec.events), marks_late=True)

    def report(event: str, fields: Mapping[str, Any]) -> None:
        if lines is not None:
            lines.append({"time": time.time(), "event": event, **fields})

    return report


def _guard(spec: LoaderSpec, report: ReportEvent) -> BlockGuard:
    """Return the policy for bad blocks; findings become events of the run."""
    data = spec.data
    return BlockGuard(
        data.on_bad_block, data.max_bad_blocks, spec.bad_blocks, decides=spec.decides, report=report
    )


def _streams(spec: LoaderSpec, report: ReportEvent) -> StreamPlace:
    """Return the place of streamed corpora; records that are left out become events of the run."""
    num_reported = 0

    def report_record(problem: str) -> None:
        nonlocal num_reported
        num_reported += 1
        if num_reported <= _MOST_BAD_RECORDS:
            report("bad_record", {"problem": problem})

    folder = None if spec.streams is None else Path(spec.streams)
    return StreamPlace(folder, spec.seed, spec.writer, _GROUPS_AHEAD, report_record)


class _Readers:
    """The reader of each specification, made when a step needs it. Those of the same corpora share the open
    files."""

    def __init__(self, guard: BlockGuard, streams: StreamPlace) -> None:
        self._guard, self._streams = guard, streams
        self._corpora: dict[str, Corpora] = {}
        self._readers: dict[int, BatchReader] = {}

    def of(self, spec: LoaderSpec) -> BatchReader:
        """Return the reader of a specification. Raises `MyriadError`."""
        if spec.first_step not in self._readers:
            shape = (spec.global_batch, spec.shares, spec.micro_batch, spec.window)
            self._readers[spec.first_step] = BatchReader(self._open(spec), spec.seed, *shape, spec.start)
        return self._readers[spec.first_step]

    def _open(self, spec: LoaderSpec) -> Corpora:
        key = f"{spec.sequence} {spec.data.model_dump_json()}"
        if key in self._corpora:
            return self._corpora[key]
        cache = None if spec.cache is None else Path(spec.cache)
        corpora = open_corpora(spec.data, spec.sequence, spec.split, cache, self._guard, self._streams)
        if corpora.num_samples == 0:
            raise BadInputError("data", spec.split, "the held-out text is shorter than one sample")
        if spec.content not in (None, corpora.content):
            allowed = f"the corpus that this run began to read: {CHANGED_WHILE_READ}"
            raise BadInputError("data", ", ".join(one.name for one in corpora.corpora), allowed)
        self._corpora[key] = corpora
        return corpora

    def close(self) -> None:
        """Close the corpora that were opened."""
        for corpora in self._corpora.values():
            corpora.close()


def _serve(
    ring: Ring, spec: LoaderSpec, readers: _Readers, wait: Callable[[float], bool], guard: BlockGuard
) -> None:
    readers.of(spec)  # a wrong corpus is reported before a rank asks for a step
    sleep = _SHORTEST_SLEEP_SECONDS
    while True:
        step = ring.next_to_fill()
        slot = None if step is None else ring.begin(step)
        if step is not None and slot is not None:
            position = spec.position._replace(first_sample=ring.first_sample)
            guard.step, now = step + 1, spec.of_step(step)
            _fill(now.in_slot(slot), position.samples_before(step), now, readers.of(now))
            ring.commit(step)
            sleep = _SHORTEST_SLEEP_SECONDS
        elif not wait(sleep):
            return
        else:
            sleep = min(2 * sleep, _LONGEST_SLEEP_SECONDS)


def _fill(slot: NDArray[np.int32], first: int, spec: LoaderSpec, reader: BatchReader) -> None:
    """Fill a slot with the batch of a step; ``first`` is the step's first sample."""
    filled = 0
    for start, stop in spec.rows:
        reader.read(first, range(start, stop), slot[filled : filled + stop - start])
        filled += stop - start


def _sleep(seconds: float) -> bool:
    """Wait until the owner wakes the loader or the time is over; other readers cannot wake it. Returns
    False if the owner has ended."""
    if select.select([_INPUT], [], [], seconds)[0]:
        return os.read(_INPUT, 65536) != b""
    return True


def _read_line() -> bytes:
    """Return the first line of input; wake-ups that came with it are dropped."""
    line = b""
    while b"\n" not in line:
        block = os.read(_INPUT, 65536)
        if not block:
            raise BadInputError("input", line, "the specification of a loader, as one line of JSON")
        line += block
    return line.partition(b"\n")[0]


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread that tokenizes may not be ended by the interpreter
