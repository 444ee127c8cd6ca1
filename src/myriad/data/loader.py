"""One loader process per node prepares the next steps' batches while the ranks compute the current step.

    rank 0 ── starts, wakes, revives ──► loader process ──► ring in shared memory ──► rank 0, rank 1, ...

All ranks of a node that need the same tokens read the same bytes. The batch of a step is a pure function of
(seed, position of the run's state, step). A loader that dies, is stopped or hangs while a rank waits is
therefore replaced and continues with the requested step: no sample is lost or repeated. The loader ends when
the rank that started it ends.

A loader counts as hung if, while a rank waits, it neither fills a slot nor uses processor time for 5 s (20 s
before its first slot). A slow storage looks the same, so this limit doubles with each replacement.
"""

import hashlib
import logging
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from myriad.config import Config
from myriad.data.batch_ring import Geometry, Ring
from myriad.data.config import DataConfig
from myriad.data.corpus_manifest import Split
from myriad.data.sampler import BatchSize, DataPosition, MixtureStart
from myriad.data.windows import row_width
from myriad.errors import RunFailedError
from myriad.system.processes import PausableClock, StopTimer, process_cpu_ticks
from myriad.system.remote_urls import is_url

__all__ = ["CHANGED_WHILE_READ", "Loader", "LoaderClient", "LoaderSpec", "StartLoader"]

CHANGED_WHILE_READ = "its files were replaced; restore them, or start again to train on with the new ones"

_log = logging.getLogger(__name__)

_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 5e-5, 5e-4
_LIVENESS_SECONDS = 0.02
_STOPPED_SECONDS, _HUNG_SECONDS = 1.5, 5.0
_FIRST_RATIO = 4.0
"""Factor on the time without processor use that a loader may take while it starts."""
_FAR_RATIO = 12.0
"""The same factor for a loader that waits for servers, each of which may be silent for 30 s."""
_ATTACH_SECONDS = 300.0
_DEATHS_WITHOUT_PROGRESS = 3


class LoaderSpec(Config):
    """Specification of one node's loader."""

    name: str
    """Name of the rendezvous, unique for each run, attempt, node and split."""
    data: DataConfig
    """The corpora to read."""
    sequence: int = Field(ge=1)
    """Tokens of a sample; one more is read, as the last target."""
    global_batch: int = Field(ge=1)
    """Samples in one step, over all nodes."""
    shares: tuple[int, ...] = (1,)
    """Micro-batches of each replica."""
    micro_batch: int = 1
    """Samples of a micro-batch. Packed rows are ordered by the replicas and micro-batches of a step."""
    window: int | None = None
    """The model's window of attention, for the pairs that packed rows count."""
    seed: int
    """Seed of the order of samples."""
    rows: tuple[tuple[int, int], ...]
    """Ranges [start, stop) of the global batch's rows that this node needs, in the order of its batch."""
    first_step: int = 0
    """Step from which on the specification holds."""
    first_sample: int = 0
    """Samples that the steps before it take."""
    start: MixtureStart = MixtureStart()
    """Where the mixture begins in the run."""
    later: tuple["LoaderSpec", ...] = ()
    """Specifications of later steps, in order: other batches, sequences or corpora of the same run."""
    split: Split = "train"
    """Part of the corpora to read."""
    content: str | None = None
    """`Corpora.content` at the start of the run; None: any content is accepted."""
    cache: str | None = None
    """Folder for the embedded corpus; None: the user's cache."""
    bad_blocks: tuple[tuple[str, int], ...] = ()
    """File and first byte of the blocks that the run already skips."""
    decides: bool = True
    """Whether a newly found bad block may be skipped at once, because no other node's loader reads these
    rows."""
    streams: str | None = None
    """Folder of the run's streams; None: no index of streamed corpora is kept."""
    writer: str = "0"
    """Name of this node's index files of streamed corpora."""
    events: str | None = None
    """The run's events.jsonl, for events about blocks; None: no events are written."""

    @property
    def width(self) -> int:
        """Words of the row of one sample."""
        return row_width(self.sequence, self.data.documents)

    @property
    def num_rows(self) -> int:
        """Number of rows of a batch on this node."""
        return sum(stop - start for start, stop in self.rows)

    @property
    def slot_shape(self) -> tuple[int, int]:
        """Rows and words of a slot that holds the batch of any step."""
        if not self.later:
            return self.num_rows, self.width
        return 1, max(spec.num_rows * spec.width for spec in (self, *self.later))

    @property
    def position(self) -> DataPosition:
        """The samples of each step."""
        specs = (self, *self.later)
        return DataPosition(
            tuple(BatchSize(one.first_step, one.first_sample, one.global_batch) for one in specs)
        )

    def of_step(self, step: int) -> "LoaderSpec":
        """Return the specification that holds at a step."""
        started = bisect_right(self.later, step, key=lambda spec: spec.first_step)
        return self.later[started - 1] if started else self

    def in_slot(self, slot: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the part of a slot that holds a batch of this specification, [rows of this node, width]."""
        return slot.reshape(-1)[: self.num_rows * self.width].reshape(self.num_rows, self.width)

    def row(self, global_row: int) -> int:
        """Return the index of a global batch's row in this node's batch."""
        before = 0
        for start, stop in self.rows:
            if start <= global_row < stop:
                return before + global_row - start
            before += stop - start
        raise IndexError(f"row {global_row} is not among {self.rows}")


class Loader(Protocol):
    """The interface of a node's loader for the rank that owns it."""

    @property
    def pid(self) -> int:
        """Process in which the loader runs."""

    def wake(self) -> bool:
        """Notify the loader of a request; False if it has ended."""

    def begin_wait(self) -> None:
        """Record that a rank begins to wait for the loader."""

    def end_if_stuck(self) -> None:
        """End a loader that is stopped or hangs while a rank waits for it."""

    def restart(self) -> str:
        """Replace a loader that has ended, and return the reason. Raises `RunFailedError`."""

    def close(self) -> None:
        """End the loader of the node."""


StartLoader = Callable[[LoaderSpec, Ring, int, float], Loader]
"""Type of a function that starts a loader. Its arguments are the specification, the ring, the ring's
descriptor (which the loader closes), and the factor on the timeouts."""


class LoaderClient:
    """One rank's client of the node's loader."""

    def __init__(
        self,
        spec: LoaderSpec,
        local_rank: int = 0,
        num_local_ranks: int = 1,
        first_step: int | None = 0,
        on_restart: Callable[[str], None] = lambda problem: None,
        patience: float = 1.0,
        start: "StartLoader | None" = None,
    ) -> None:
        """Create or join the node's ring, and on local rank 0 start the loader.

        ``local_rank`` counts the node's ranks that read; number 0 owns the loader. ``on_restart`` is called
        with the reason if a loader process is replaced. ``patience`` scales its timeouts. ``start`` starts
        the loader, by default as a process.

        The loader prepares ``first_step`` at once; any other step may be requested. None: it waits for
        `begin`.
        """
        self.spec, self._reader, self._on_restart = spec, local_rank, on_restart
        self.wait_seconds = 0.0
        """Seconds in which the rank waited for data since its start."""
        self.restarts = 0
        """Number of loader processes that died and were replaced."""
        name = hashlib.blake2b(spec.name.encode(), digest_size=12).hexdigest()
        self._process: Loader | None = None
        if local_rank == 0:
            geometry = Geometry(spec.data.prefetch + 1, *spec.slot_shape, num_local_ranks)
            self._ring, descriptor = Ring.create(name, geometry, first_step)
            self._process = (start or _LoaderProcess)(spec, self._ring, descriptor, patience)
        else:
            self._ring = _attach(name)
        self._ring.mark_attached(local_rank)

    def begin(self, step: int, position: DataPosition) -> None:
        """Begin with ``step`` at a position in the data. Every reader calls it before `get`, with the same
        values."""
        assert position.batches == self.spec.position.batches, "the position of the loader's own batches"
        if self._process is not None:
            self._ring.set_first_sample(position.first_sample)
        self._ring.ask(self._reader, step)
        self._look_after_loader()

    def get(self, step: int) -> NDArray[np.int32]:
        """Return the batch of a step, [rows of this node, width], valid until the next call.

        Waits until it is ready; raises `RunFailedError`.
        """
        started = time.perf_counter()
        self._ring.ask(self._reader, step)
        self._look_after_loader()
        if not self._ring.is_ready(step):
            self._wait(step)
        self.wait_seconds += time.perf_counter() - started
        return self.spec.of_step(step).in_slot(self._ring.view(step))

    def rows(self, step: int, start: int, stop: int) -> NDArray[np.int32]:
        """Return rows [start, stop) of the global batch, which lie in one of the spec's ranges; otherwise
        like `get`."""
        first = self.spec.of_step(step).row(start)
        return self.get(step)[first : first + stop - start]

    @property
    def loader_pid(self) -> int | None:
        """Process id of the loader, or None if another rank owns it."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End the loader process, if this rank owns it."""
        if self._process is not None:
            self._process.close()
            self._process = None
            self._ring.remove_name()

    def __enter__(self) -> "LoaderClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, step: int) -> None:
        sleep, next_check = _SHORTEST_SLEEP_SECONDS, time.monotonic() + _LIVENESS_SECONDS
        if self._process is not None:
            self._process.begin_wait()
        while not self._ring.is_ready(step):
            time.sleep(sleep)
            sleep = min(sleep * 1.5, _LONGEST_SLEEP_SECONDS)
            if time.monotonic() >= next_check:
                if self._process is not None:
                    self._process.end_if_stuck()
                self._look_after_loader()
                next_check = time.monotonic() + _LIVENESS_SECONDS

    def _look_after_loader(self) -> None:
        """Wake the loader, replace a dead one, and raise the error that it has reported."""
        if (error := self._ring.error) is not None:
            raise RunFailedError(f"data loader: {error}")
        if self._process is None:
            if not self._ring.owner_is_alive():
                raise RunFailedError("data loader: the rank that owns it has exited")
            return
        self._ring.remove_name_when_attached()
        if self._process.wake():
            return
        if self._ring.error is None:
            problem = self._process.restart()
            self.restarts += 1
            self._on_restart(problem)
        else:
            self._look_after_loader()


class _LoaderProcess:
    """The loader process, as the rank that owns it controls it."""

    def __init__(self, spec: LoaderSpec, ring: Ring, descriptor: int, patience: float) -> None:
        self._spec, self._ring, self._descriptor = spec, ring, descriptor
        data = [one.data for one in (spec, *spec.later)]
        names = [name for one in data for name in (one.corpus, *(share.path for share in one.mixture))]
        slow = _FAR_RATIO if any(map(is_url, names)) else 1.0
        self._stopped_seconds, self._hung_seconds = (
            _STOPPED_SECONDS * patience,
            _HUNG_SECONDS * patience * slow,
        )
        self._deaths, self._clock, self._stopped = 0, PausableClock(), StopTimer()
        self._start()

    def _start(self) -> None:
        self._progress = self._ring.progress
        self._why_killed = ""
        self.begin_wait()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-Pm", "myriad.data.loader_process", str(self._descriptor)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=[self._descriptor],
            env={**os.environ, **one_thread},
        )
        assert self._process.stdin is not None, "stdin is a pipe"
        self._pipe = self._process.stdin
        with suppress(BrokenPipeError):  # the process has already died: the next check reports it
            self._pipe.write(self._spec.model_dump_json().encode() + b"\n")
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Id of the current process."""
        return self._process.pid

    def wake(self) -> bool:
        """Notify the loader of a request; False if it has ended."""
        if self._why_killed or self._process.poll() is not None:
            return False
        try:
            os.write(self._pipe.fileno(), b".")
        except BlockingIOError:
            pass  # the pipe is full of unread wake-ups: the loader will check anyway
        except BrokenPipeError:
            self._process.wait()
            return False
        return True

    def begin_wait(self) -> None:
        """Restart the hang detection, because the loader had no reason to work before."""
        self._seen, self._idle_since = (-1, -1), self._clock.read()

    def end_if_stuck(self) -> None:
        """Kill a loader that is stopped (SIGSTOP) or hangs. A rank calls it while it waits."""
        now, pid = self._clock.read(), self.pid
        if (stopped := self._stopped.poll(pid, now)) is not None and stopped > self._stopped_seconds:
            return self._kill("was stopped (SIGSTOP)")
        seen = self._ring.progress, process_cpu_ticks(pid)
        if seen != self._seen:
            self._seen, self._idle_since = seen, now
        limit = self._hung_seconds * (_FIRST_RATIO if self._ring.progress == self._progress else 1.0)
        if now - self._idle_since > limit:
            self._hung_seconds *= 2
            self._kill(f"did nothing for {now - self._idle_since:.0f} s while a rank waited")

    def _kill(self, why: str) -> None:
        self._why_killed = f"{why} and was killed"
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits for a disk in the kernel is abandoned
            self._process.wait(timeout=1)

    def restart(self) -> str:
        """Start a new process for a dead one, and return the reason. Raises `RunFailedError` if processes
        die without preparing a step."""
        how = self._why_killed
        if not how:
            code = self._process.returncode
            how = f"died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        no_progress = self._ring.progress == self._progress
        self._deaths = self._deaths + (not self._why_killed) if no_progress else 1
        if self._deaths > _DEATHS_WITHOUT_PROGRESS:
            self._ring.fail(f"died {self._deaths} times without preparing a step, the last one {how}")
            raise RunFailedError(f"data loader: {self._ring.error}")
        problem = f"the data loader (pid {self._process.pid}) {how}; another goes on with the same step"
        _log.warning("%s", problem)
        self._pipe.close()
        self._start()
        return problem

    def close(self) -> None:
        """Close the loader's input, which makes it end; kill it if it does not."""
        self._pipe.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._descriptor)


def _attach(name: str) -> Ring:
    deadline = time.monotonic() + _ATTACH_SECONDS
    while (ring := Ring.attach(name)) is None:
        if time.monotonic() > deadline:
            raise RunFailedError(
                f"data loader: the node's first rank did not start it within {_ATTACH_SECONDS:.0f} s"
            )
        time.sleep(0.01)
    return ring
