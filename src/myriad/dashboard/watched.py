"""The one run that a server shows: its files, its spans, and what is derived from both."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from myriad.dashboard.at_work import is_at_work
from myriad.dashboard.checkpoints import Checkpoints
from myriad.dashboard.freshness import Freshness
from myriad.dashboard.insight.ranks import Ranks
from myriad.dashboard.insight.state import State, run_state
from myriad.dashboard.node_counters import NodeCounters
from myriad.dashboard.node_table import read_facts
from myriad.dashboard.plan import Plan
from myriad.dashboard.rarely import Rarely
from myriad.dashboard.run_files import RunFiles, number
from myriad.dashboard.store.heat import HeatMap
from myriad.dashboard.store.span_store import SpanStore
from myriad.errors import MyriadError

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["Account", "MakePlan", "Watched"]

Account = Callable[[], Mapping[str, Any]]
"""Where the run's time went: ``classes``, ``effective_ratio``, ``goodput_tokens_per_second``."""
MakePlan = Callable[["Job"], Plan]
"""Raises `MyriadError` for a job that the cluster cannot hold."""
_RECENT_STEPS = 20
_NODES_SECONDS, _FACTS_SECONDS = 2.0, 10.0
_TOLD_EACH_SECONDS = 10.0
"""How long something has lasted, on a page."""
_ACCOUNT_SECONDS, _ACCOUNT_TIMES = 1.0, 20.0


@dataclass
class Watched:
    """Made once for a server."""

    files: RunFiles
    store: SpanStore
    make_account: Account
    make_plan: MakePlan | None = None
    """Of the prediction that lies beside what is measured, in the newest layout."""
    plan: Plan | None = field(init=False, default=None)
    ranks: Ranks = field(init=False)
    heat: HeatMap = field(init=False)
    heard_of: float = 0.0
    """When the collector last took spans; 0: never."""
    ending: bool = False
    """The server is told to end: what goes on for ever ends by itself."""

    def __post_init__(self) -> None:
        self._num_runs = self.files.num_runs
        self._freshness = Freshness()
        self._shown: tuple[Any, ...] = ()
        self._reading_since: float | None = None
        self._account: Mapping[str, Any] = {}
        self._account_due, self._account_lock = 0.0, threading.Lock()
        self.ranks = self.files.ranks
        self.heat, self.checkpoints = HeatMap(self.store, self.ranks), Checkpoints(self.files)
        self.node_looks = Rarely(NodeCounters(self.files.run.counters_path).newest, _NODES_SECONDS)
        self.node_facts = Rarely(partial(read_facts, self.files.run.nodes_path), _FACTS_SECONDS)
        if self.make_plan is not None:
            self.plan = self.make_plan(self.files.job)

    def follow_layout(self) -> bool:
        """After a look at the files: whether ranks have got other places, so that all spans count anew."""
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
                self.store.counts.tell(f"nothing is predicted for the new layout: {error}")

    def end(self) -> None:
        """The server ends."""
        self.ending = True

    @property
    def account(self) -> Mapping[str, Any]:
        """Where its time went. Worked out from all lines: so only when twenty times as long has passed."""
        with self._account_lock:
            if (began := time.monotonic()) >= self._account_due:
                try:
                    self._account = self.make_account()
                except Exception as error:  # of lines of another kind: all else is shown
                    self.store.counts.tell(f"no account of the run's time: {error!r}")
                done = time.monotonic()
                self._account_due = done + max(_ACCOUNT_SECONDS, _ACCOUNT_TIMES * (done - began))
        return self._account

    @property
    def last_step(self) -> int | None:
        """The newest step that almost all ranks have told of: in the very newest most are still missing."""
        newest: int | None = None
        for step, block in reversed(self.store.blocks(0)):
            newest = step if newest is None else newest
            known = np.isfinite(block.seconds).any(axis=0).sum() if len(block.seconds) else 0
            if known >= 0.9 * self.store.world:
                return step
        return newest

    @property
    def changes(self) -> tuple[Any, ...]:
        """Differs when there is something new to show, also when that is only that nothing comes any more."""
        return (*self._amounts, *self._shown, int(self.behind_seconds / _TOLD_EACH_SECONDS))

    @property
    def _amounts(self) -> tuple[int, ...]:
        files = self.files
        last = int(files.metrics[-1]["step"]) if files.metrics else 0
        return files.num_runs, self.store.version, len(files.events), len(files.metrics), last

    def looked(self, began: float) -> None:
        """The follower has read the files. ``began``: when, by the monotonic clock."""
        self._freshness.looked(self._amounts, self._newest, began)
        state, quiet = self.state, self.quiet_seconds
        tens = int(quiet / _TOLD_EACH_SECONDS) if state == "hangs" else 0
        told = (self.store.counts.num_told, *self.files.problems)
        self._shown = (state, tens, self.files.is_gone, *told)

    @property
    def _newest(self) -> float:
        newest = float(self.store.last_end_ns.max()) * 1e-9
        for line in (*self.files.metrics[-1:], *self.files.events[-1:]):
            newest = max(newest, number(line.get("time")) or 0.0)
        return max(newest, self.files.no_room_at) if newest > 0 else 0.0

    @property
    def quiet_seconds(self) -> float:
        """Since the newest span, step or event; 0: there was none."""
        return self._freshness.quiet_seconds(self._newest)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The follower reads the files: a disk that hangs keeps it there."""
        self._reading_since = time.monotonic()
        try:
            yield
        finally:
            self._reading_since = None

    @property
    def behind_seconds(self) -> float:
        """Since when the run's files are being read."""
        since = self._reading_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def step_seconds(self) -> float:
        """Median of the newest steps; 0: unknown."""
        lines = self.files.metrics[-_RECENT_STEPS:]
        known = [value for line in lines if (value := number(line.get("step_seconds"))) is not None]
        return float(np.median(known)) if known else 0.0

    @property
    def steps_done(self) -> int:
        """As the run tells, or its spans do."""
        return self.files.steps.done or self.last_step or 0

    @property
    def state(self) -> State:
        """In a word. A run whose spans are sent here is held by whoever sends them, wherever that is; once
        its executors' files are here, these say whether they still are."""
        run, quiet, seconds = self.files.run, self.quiet_seconds, self.step_seconds
        sends = self.heard_of > 0
        return run_state(
            self.files.events,
            quiet_seconds=quiet,
            step_seconds=seconds,
            held=run.is_locked,
            at_work=is_at_work(run, sends=sends),
        )

    def steps_in(self, start_ns: int, stop_ns: int) -> list[int]:
        """Steps of which some span is in a window."""
        return [
            step
            for step, block in self.store.blocks(0)
            if block.first_ns < stop_ns and block.last_ns > start_ns
        ]

    def since_first(self, at_ns: int) -> float:
        """Seconds from where the timeline begins."""
        return (at_ns - (self.store.first_ns or 0)) * 1e-9
