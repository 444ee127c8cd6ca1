"""One loader process for each node: it prepares the next steps' batches while the ranks compute this one.

    rank 0 ── starts, wakes, revives ──► loader process ──► ring in shared memory ──► rank 0, rank 1, ...

All ranks of a node that need the same tokens read the same bytes. What a step holds is a pure function of
(seed, position of the run's state, step), so a loader that dies, is stopped or hangs while it is waited for
is replaced and goes on with the step that is asked for: nothing is lost, nothing comes twice. It ends by
itself when the rank that started it does.

A loader hangs if a rank waits for it and it has neither filled a slot nor used processor time for 5 s (20 s
before its first slot). A storage that is slower looks the same, so this limit doubles with each replacement.
"""

import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from myriad.config import Config
from myriad.data.config import DataConfig
from myriad.data.manifest import Split
from myriad.data.ring import Geometry, Ring
from myriad.data.sampler import DataPosition
from myriad.errors import RunFailedError
from myriad.processes import StopTimer, WatchClock, process_cpu_ticks
from myriad.remote_urls import is_url

__all__ = ["CHANGED_WHILE_READ", "LoaderClient", "LoaderSpec"]

CHANGED_WHILE_READ = "its files were replaced; restore them, or start again to train on with the new ones"

_log = logging.getLogger(__name__)

_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 5e-5, 5e-4
_LIVENESS_SECONDS = 0.02
_STOPPED_SECONDS, _HUNG_SECONDS = 1.5, 5.0
_FIRST_RATIO = 4.0
"""How much longer a loader may use no processor time while it starts."""
_FAR_RATIO = 12.0
"""How much longer one may that waits for servers, each of which may be silent for 30 s."""
_ATTACH_SECONDS = 300.0
_DEATHS_WITHOUT_PROGRESS = 3


class LoaderSpec(Config):
    """What one node's loader prepares."""

    name: str
    """Names the meeting place: unique for each run, attempt, node and split."""
    data: DataConfig
    """What is read."""
    sequence: int = Field(ge=1)
    """Tokens of a sample; one more is read, to predict."""
    global_batch: int = Field(ge=1)
    """Samples in one step, over all nodes."""
    seed: int
    """Of the order of samples."""
    rows: tuple[tuple[int, int], ...]
    """Ranges [start, stop) of the global batch's rows that this node needs, as they are laid out."""
    split: Split = "train"
    """Which part of the corpora."""
    content: str | None = None
    """`Corpora.content` of what the run began to read; off: anything is read."""
    cache: str | None = None
    """Folder for the embedded corpus; off: the user's cache."""
    bad_blocks: tuple[tuple[str, int], ...] = ()
    """File and first byte of the blocks that the run skips already."""
    decides: bool = True
    """Whether a bad block that is found may be skipped at once: no other node's loader reads these rows."""
    events: str | None = None
    """The run's events.jsonl, for what is found about blocks; off: nothing is written."""

    @property
    def num_rows(self) -> int:
        """Rows of a batch on this node."""
        return sum(stop - start for start, stop in self.rows)

    def row(self, global_row: int) -> int:
        """Where a row of the global batch lies in this node's batch."""
        before = 0
        for start, stop in self.rows:
            if start <= global_row < stop:
                return before + global_row - start
            before += stop - start
        raise IndexError(f"row {global_row} is not among {self.rows}")


class LoaderClient:
    """One rank's end of the node's loader."""

    def __init__(
        self,
        spec: LoaderSpec,
        local_rank: int = 0,
        num_local_ranks: int = 1,
        first_step: int | None = 0,
        on_restart: Callable[[str], None] = lambda problem: None,
        patience: float = 1.0,
    ) -> None:
        """``local_rank`` counts the node's ranks that read; number 0 owns the loader process. ``on_restart``
        is called with the reason when that process is replaced; ``patience`` scales its deadlines.

        The loader prepares ``first_step`` at once; any other may be asked for. None: it waits for `begin`.
        """
        self.spec, self._reader, self._on_restart = spec, local_rank, on_restart
        self.wait_seconds = 0.0
        """Time in which the rank waited for data, since it started."""
        self.restarts = 0
        """Loader processes that died and were replaced."""
        name = hashlib.blake2b(spec.name.encode(), digest_size=12).hexdigest()
        self._process: _LoaderProcess | None = None
        if local_rank == 0:
            geometry = Geometry(spec.data.prefetch + 1, spec.num_rows, spec.sequence + 1, num_local_ranks)
            self._ring, descriptor = Ring.create(name, geometry, first_step)
            self._process = _LoaderProcess(spec, self._ring, descriptor, patience)
        else:
            self._ring = _attach(name)
        self._ring.mark_attached(local_rank)

    def begin(self, step: int, position: DataPosition) -> None:
        """Begin with ``step`` at a position in the data. Every reader calls it before `get`, with the same
        values."""
        assert position.global_batch == self.spec.global_batch, "the position of the loader's own batches"
        if self._process is not None:
            self._ring.set_first_sample(position.first_sample)
        self._ring.ask(self._reader, step)
        self._look_after_loader()

    def get(self, step: int) -> NDArray[np.int32]:
        """[rows of this node, sequence + 1], valid until the next call. Waits; raises `RunFailedError`."""
        started = time.perf_counter()
        self._ring.ask(self._reader, step)
        self._look_after_loader()
        if not self._ring.is_ready(step):
            self._wait(step)
        self.wait_seconds += time.perf_counter() - started
        return self._ring.view(step)

    def rows(self, step: int, start: int, stop: int) -> NDArray[np.int32]:
        """Rows [start, stop) of the global batch, which lie in one of the spec's ranges; as `get`."""
        first = self.spec.row(start)
        return self.get(step)[first : first + stop - start]

    @property
    def loader_pid(self) -> int | None:
        """The loader process; None where another rank owns it."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """Ends the loader process, if this rank owns it."""
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
        sleep, next_look = _SHORTEST_SLEEP_SECONDS, time.monotonic() + _LIVENESS_SECONDS
        if self._process is not None:
            self._process.begin_wait()
        while not self._ring.is_ready(step):
            time.sleep(sleep)
            sleep = min(sleep * 1.5, _LONGEST_SLEEP_SECONDS)
            if time.monotonic() >= next_look:
                if self._process is not None:
                    self._process.end_if_stuck()
                self._look_after_loader()
                next_look = time.monotonic() + _LIVENESS_SECONDS

    def _look_after_loader(self) -> None:
        """Wakes the loader, replaces a dead one, passes on its last words."""
        if (error := self._ring.error) is not None:
            raise RunFailedError(f"data loader: {error}")
        if self._process is None:
            if not self._ring.owner_is_alive():
                raise RunFailedError("data loader: the rank that owns it is gone")
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
    """The process, as the rank that owns it sees it."""

    def __init__(self, spec: LoaderSpec, ring: Ring, descriptor: int, patience: float) -> None:
        self._spec, self._ring, self._descriptor = spec, ring, descriptor
        names = [spec.data.corpus, *(share.path for share in spec.data.mixture)]
        slow = _FAR_RATIO if any(map(is_url, names)) else 1.0
        self._stopped_seconds, self._hung_seconds = (
            _STOPPED_SECONDS * patience,
            _HUNG_SECONDS * patience * slow,
        )
        self._deaths, self._clock, self._stopped = 0, WatchClock(), StopTimer()
        self._start()

    def _start(self) -> None:
        self._progress = self._ring.progress
        self._why_killed = ""
        self.begin_wait()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "myriad.data.loader_process", str(self._descriptor)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=[self._descriptor],
            env={**os.environ, **one_thread},
        )
        assert self._process.stdin is not None, "stdin is a pipe"
        self._pipe = self._process.stdin
        with suppress(BrokenPipeError):  # dead already: the next look at it says so
            self._pipe.write(self._spec.model_dump_json().encode() + b"\n")
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._process.pid

    def wake(self) -> bool:
        """Tells the loader that something was asked for; False when it is dead."""
        if self._why_killed or self._process.poll() is not None:
            return False
        try:
            os.write(self._pipe.fileno(), b".")
        except BlockingIOError:
            pass  # full of calls it has not read yet: it will look anyway
        except BrokenPipeError:
            self._process.wait()
            return False
        return True

    def begin_wait(self) -> None:
        """A rank begins to wait for it: before, it had no reason to do anything."""
        self._seen, self._idle_since = (-1, -1), self._clock.look()

    def end_if_stuck(self) -> None:
        """Kill a loader that is stopped (SIGSTOP) or hangs. Called while a rank waits."""
        now, pid = self._clock.look(), self.pid
        if (stopped := self._stopped.look(pid, now)) is not None and stopped > self._stopped_seconds:
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
        with suppress(subprocess.TimeoutExpired):  # one that waits for a disk in the kernel is left behind
            self._process.wait(timeout=1)

    def restart(self) -> str:
        """Starts a new process for a dead one and returns what happened. Raises `RunFailedError` when they
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
        """End of its input is the signal to go."""
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
                f"data loader: the node's first rank made none within {_ATTACH_SECONDS:.0f} s"
            )
        time.sleep(0.01)
    return ring
