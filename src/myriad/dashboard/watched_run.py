"""The run that a server shows: its files, its spans, and quantities derived from both.

`Freshness` computes the time since the last progress, independent of clock offsets:

    quiet = time of the last read of the files - time of the newest line or span - offset of its clock

The time of the read counts, not the current time, so a server with a long backlog reports no hang. If a run's
times lie in the future, only the server's own clock is used. A run's clock that is behind shows as steady new
data of constant age: that age is the offset.

`Checkpoints` lists the run's current checkpoints, on storage and in the memory of this machine. Each was read
back and compared before it was committed (`myriad.checkpoint`); here only the existence and size of all files
are checked. For storage that is not a folder, the list comes from the run's events.

Scans of folders are cached (`CachedAnswer`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.checkpoint_list import list_checkpoints
from myriad.dashboard.insight.predicted_step import Plan
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.node_measurements import NodeCounters
from myriad.dashboard.node_table import read_facts
from myriad.dashboard.run_files import RunFiles, number
from myriad.dashboard.store.heat_map import HeatMap
from myriad.dashboard.store.span_store import SpanStore
from myriad.errors import MyriadError
from myriad.run.run_status import State, is_at_work, run_state

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["Account", "MakePlan", "WatchedRun"]

_AHEAD_SECONDS = 5.0
_STEADY_LOOKS, _STEADY_SECONDS = 8, 5.0


class Freshness:
    """Tracks the age of a run's newest data. All methods except `looked` are thread-safe."""

    def __init__(self) -> None:
        self._amounts: Any = None
        self._read_time = self._read_at = 0.0
        self._news_at: float | None = None
        """Time of the last new data, at first the time of the first read; ``None`` before that."""
        self._ages: deque[float] = deque(maxlen=_STEADY_LOOKS)
        self._offset = 0.0

    def looked(self, amounts: Any, newest: float, began: float | None = None) -> None:
        """Record a read of the files.

        ``amounts`` differ if there was new data; ``newest`` is the latest time in the files; ``began`` is the
        start of the read by the monotonic clock.
        """
        now = time.monotonic()
        self._read_at = now if began is None else began
        self._read_time = time.time() - (now - self._read_at)
        is_first = self._news_at is None
        if is_first or amounts != self._amounts:
            self._news_at = self._read_at
            if not is_first:
                self._ages.append(self._read_time - newest)
        self._amounts = amounts
        if len(self._ages) == _STEADY_LOOKS and max(self._ages) - min(self._ages) < _STEADY_SECONDS:
            self._offset = max(0.0, min(self._ages))

    @property
    def has_looked(self) -> bool:
        """Whether all files were read once."""
        return self._news_at is not None

    def quiet_seconds(self, newest: float) -> float:
        """Return the seconds since the newest sign of progress; 0 if there was none."""
        if newest <= 0:
            return 0.0
        if self._news_at is None:
            return max(0.0, time.time() - newest)
        if newest > self._read_time + _AHEAD_SECONDS:
            return self._read_at - self._news_at
        return max(0.0, self._read_time - newest - self._offset)


_T = TypeVar("_T")
_REST_TIMES = 20.0


class CachedAnswer(Generic[_T]):
    """Returns the last answer until it expires: after the given seconds, at least 20 times its
    computation."""

    def __init__(self, find: Callable[[], _T], rest_seconds: float) -> None:
        self._find, self._rest_seconds = find, rest_seconds
        self._lock, self._due = threading.Lock(), 0.0

    def __call__(self) -> _T:
        """Return the answer, recomputed if it has expired. It is thread-safe."""
        with self._lock:
            if (began := time.monotonic()) >= self._due:
                self._value = self._find()
                done = time.monotonic()
                self._due = done + max(self._rest_seconds, _REST_TIMES * (done - began))
            return self._value


_REST_SECONDS = 5.0
_MOST_ROWS = 500
_TOLD = ("step", "tier", "state", "bytes", "time", "problems")


class Checkpoints:
    """The checkpoints of one run. It is thread-safe."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self.newest = CachedAnswer(self._look, _REST_SECONDS)
        """Checkpoints by step, at most some seconds old."""

    def _look(self) -> Sequence[dict[str, Any]]:
        return (self._seen() or self._from_events())[-_MOST_ROWS:]

    def _seen(self) -> list[dict[str, Any]]:
        where = self._files.run.checkpoints(self._files.job)
        if "://" in where or not Path(where).is_dir():
            return []
        try:
            rows = list_checkpoints(self._files.run.path, CheckpointFolder(where))
        except (OSError, ValueError):
            return []
        return [{key: row[key] for key in _TOLD} for row in rows]

    def _from_events(self) -> list[dict[str, Any]]:
        """Return the checkpoints from the run's events."""
        found = []
        for event in self._files.events:
            if event.get("event") == "checkpoint" and number(event.get("step")) is not None:
                known = {"tier": "storage", "state": "complete", "problems": []}
                of_event = {key: event[key] for key in ("tier",) if isinstance(event.get(key), str)}
                figures = {key: number(event.get(key)) for key in ("step", "bytes", "time")}
                found.append(known | of_event | figures)
        return found


Account = Callable[[], Mapping[str, Any]]
"""Returns the account of the run's time: ``classes``, ``effective_ratio``, ``goodput_tokens_per_second``."""
MakePlan = Callable[["Job"], Plan]
"""Returns the prediction for a job. Raises `MyriadError` if the job does not fit the cluster."""
_RECENT_STEPS = 20
_NODES_SECONDS, _FACTS_SECONDS = 2.0, 10.0
_TOLD_EACH_SECONDS = 10.0
"""Resolution of durations on the page."""
_ACCOUNT_SECONDS, _ACCOUNT_TIMES = 1.0, 20.0
_MOST_STEPS_AT_ONCE = 3000
"""Largest number of steps whose account is made while a request waits: about 0.1 s."""


@dataclass
class WatchedRun:
    """The run of a server, which creates one instance."""

    files: RunFiles
    store: SpanStore
    make_account: Account
    make_plan: MakePlan | None = None
    """Computes the prediction in the newest layout, which the page shows beside the measurement."""
    plan: Plan | None = field(init=False, default=None)
    ranks: Ranks = field(init=False)
    heat: HeatMap = field(init=False)
    heard_of: float = 0.0
    """Time at which the collector last accepted spans; 0 if never."""
    ending: bool = False
    """Whether the server is shutting down; endless responses then end."""

    def __post_init__(self) -> None:
        self._num_runs = self.files.num_runs
        self._freshness = Freshness()
        self._shown: tuple[Any, ...] = ()
        self._reading_since: float | None = None
        self._account: Mapping[str, Any] = {}
        self._account_due, self._account_lock = 0.0, threading.Lock()
        self._num_accounts = 0
        self.ranks = self.files.ranks
        self.heat, self.checkpoints = HeatMap(self.store, self.ranks), Checkpoints(self.files)
        self.node_samples = CachedAnswer(NodeCounters(self.files.run.counters_path).newest, _NODES_SECONDS)
        self.node_facts = CachedAnswer(partial(read_facts, self.files.run.nodes_path), _FACTS_SECONDS)
        if self.make_plan is not None:
            self.plan = self.make_plan(self.files.job)

    def follow_layout(self) -> bool:
        """Adopt the layout in the files. Return whether ranks moved in the grid, which discards all spans."""
        ranks, since_ns = self.files.ranks, self.files.layout_since_ns
        is_new = since_ns != self.store.since_ns or ranks.world != self.store.world
        is_new = is_new or self.files.num_runs != self._num_runs
        self._num_runs = self.files.num_runs
        if is_new or ranks != self.ranks:
            steps = self.files.job.train.steps
            store = self.store.followed_by(ranks.world, steps, since_ns) if is_new else self.store
            self.ranks, self.heat, self.store = ranks, HeatMap(store, ranks), store
            self._plan_anew()
        return is_new

    def _plan_anew(self) -> None:
        if self.make_plan is not None:
            try:
                self.plan = self.make_plan(self.files.job)
            except MyriadError as error:
                self.plan = None
                self.store.counts.add_problem(f"nothing is predicted for the new layout: {error}")

    def end(self) -> None:
        """Mark the server as shutting down."""
        self.ending = True

    @property
    def account(self) -> Mapping[str, Any]:
        """Account of the run's time. It reads all lines, so it is recomputed only after 20 times its
        duration. That of a long run is made beside the requests, which get the one before, at first none."""
        if len(self.files.metrics) <= _MOST_STEPS_AT_ONCE:
            with self._account_lock:
                self._renew_account()
        elif self._account_lock.acquire(blocking=False):
            if time.monotonic() >= self._account_due:
                threading.Thread(target=self._renew_and_release, name="account", daemon=True).start()
            else:
                self._account_lock.release()
        return self._account

    def _renew_and_release(self) -> None:
        try:
            self._renew_account()
        finally:
            self._account_lock.release()

    def _renew_account(self) -> None:
        if (began := time.monotonic()) < self._account_due:
            return
        try:
            self._account = self.make_account()
            self._num_accounts += 1
        except Exception as error:  # unexpected lines: the page shows the rest
            self.store.counts.add_problem(f"no account of the run's time: {error!r}")
        done = time.monotonic()
        self._account_due = done + max(_ACCOUNT_SECONDS, _ACCOUNT_TIMES * (done - began))

    @property
    def last_step(self) -> int | None:
        """Newest step with spans of at least 90 % of the ranks; else the newest step."""
        newest: int | None = None
        for step, block in reversed(self.store.blocks(0)):
            newest = step if newest is None else newest
            known = np.isfinite(block.seconds).any(axis=0).sum() if len(block.seconds) else 0
            if known >= 0.9 * self.store.world:
                return step
        return newest

    @property
    def changes(self) -> tuple[Any, ...]:
        """A value that changes when the page must update, also if the only news is that data stopped."""
        is_long = len(self.files.metrics) > _MOST_STEPS_AT_ONCE  # pages wait for its account
        accounts = self._num_accounts if is_long else 0
        return (*self._amounts, *self._shown, int(self.behind_seconds / _TOLD_EACH_SECONDS), accounts)

    @property
    def _amounts(self) -> tuple[int, ...]:
        files = self.files
        last = int(files.metrics[-1]["step"]) if files.metrics else 0
        return files.num_runs, self.store.version, len(files.events), len(files.metrics), last

    def looked(self, began: float) -> None:
        """Record that the follower has read the files, from ``began`` by the monotonic clock."""
        self._freshness.looked(self._amounts, self._newest, began)
        state, quiet = self.state, self.quiet_seconds
        tens = int(quiet / _TOLD_EACH_SECONDS) if state == "hangs" else 0
        problems = (self.store.counts.num_problems, *self.files.problems)
        self._shown = (state, tens, self.files.is_gone, *problems)

    @property
    def _newest(self) -> float:
        newest = float(self.store.last_end_ns.max()) * 1e-9
        for line in (*self.files.metrics[-1:], *self.files.events[-1:]):
            newest = max(newest, number(line.get("time")) or 0.0)
        return max(newest, self.files.no_room_at) if newest > 0 else 0.0

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the newest span, step or event; 0 if there is none."""
        return self._freshness.quiet_seconds(self._newest)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark that the follower reads the files in the ``with`` block, which a hung disk prolongs."""
        self._reading_since = time.monotonic()
        try:
            yield
        finally:
            self._reading_since = None

    @property
    def behind_seconds(self) -> float:
        """Duration of the current read of the run's files; 0 if none."""
        since = self._reading_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def step_seconds(self) -> float:
        """Median seconds of the newest steps; 0 if unknown."""
        lines = self.files.metrics[-_RECENT_STEPS:]
        known = [value for line in lines if (value := number(line.get("step_seconds"))) is not None]
        return float(np.median(known)) if known else 0.0

    @property
    def steps_done(self) -> int:
        """Number of steps done, by the run's files or else by its spans."""
        return self.files.steps.done or self.last_step or 0

    @property
    def state(self) -> State:
        """State of the run in a word; "reading" before all its files were read once.

        A run whose spans are sent here counts as running on the senders' machines. If the files of its node
        agents are here, they decide instead.
        """
        files = self.files
        found = run_state(
            files.events,
            steps=files.steps.done,
            planned=files.job.train.steps,
            quiet_seconds=self.quiet_seconds if self._newest > 0 else None,
            step_seconds=self.step_seconds,
            held=files.run.is_locked,
            at_work=is_at_work(files.run, sends=self.heard_of > 0),
        )
        return found if self._freshness.has_looked or found == "finished" else "reading"

    def steps_in(self, start_ns: int, stop_ns: int) -> list[int]:
        """Return the steps with a span in the window."""
        return [
            step
            for step, block in self.store.blocks(0)
            if block.first_ns < stop_ns and block.last_ns > start_ns
        ]

    def since_first(self, at_ns: int) -> float:
        """Return the seconds from the begin of the timeline to ``at_ns``."""
        return (at_ns - (self.store.first_ns or 0)) * 1e-9
