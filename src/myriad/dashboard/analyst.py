"""Analyse steps in the background: match spans to the program, and find which rank waits for which.

The most recently analysed steps are cached. A thread analyses the newest complete step in advance, and idles
twenty times as long as it works. It analyses large steps only while pages request such analyses.
"""

import logging
import threading
import time
from collections import OrderedDict

import numpy as np

from myriad.dashboard.insight.arrivals import Arrows, arrows
from myriad.dashboard.insight.hang_analysis import HangAnalysis, analyze_hang
from myriad.dashboard.insight.losses import Losses, losses_at_speed
from myriad.dashboard.insight.needs import ProgramNeeds
from myriad.dashboard.insight.nesting import nested
from myriad.dashboard.insight.rank_arrays import Array
from myriad.dashboard.insight.step_spans import StepSpans, programs_seen
from myriad.dashboard.insight.straggler_report import Straggler, stragglers, suspects
from myriad.dashboard.store.heat_map import newest_table
from myriad.dashboard.store.step_block import StepBlock
from myriad.dashboard.watched_run import WatchedRun
from myriad.errors import MyriadError
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.run.run_lines import lines_of_steps
from myriad.run.run_speed import run_speed
from myriad.telemetry.span_io.span_records import RECORD, Records

__all__ = ["Analyst"]

_LOG = logging.getLogger(__name__)
_KEPT_STEPS = 2
_LOSS_STEPS = 20
_QUICK_SPANS = 300_000
"""Maximum spans of a step that is analysed within a request."""
_REST_TIMES, _LEAST_REST_SECONDS = 20.0, 1.0
_ASKED_SECONDS = 60.0
"""Seconds after a request for waits during which large steps are analysed in advance."""


class Analyst:
    """Analyses one run. It is thread-safe."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._steps: OrderedDict[tuple[int, int, int, int], StepSpans] = OrderedDict()
        self._suspects: list[Straggler] = []
        self._asked = -_ASKED_SECONDS
        self._losses: tuple[object, Losses | None, range] = (None, None, range(0))
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._hang: tuple[tuple[int, int], HangAnalysis | None] = ((-1, -1), None)
        self._thread = threading.Thread(target=self._work, name="analyst", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is analysing."""
        self._stop.set()
        self._thread.join(5.0)

    def step(self, step: int, *, at_once: bool = True) -> StepSpans | None:
        """Return an analysed step; ``None`` if it is unknown or, without ``at_once``, too large to analyse
        now."""
        store = self._watched.store
        found = store.blocks(step, step)
        if not found or not found[0][1].count:
            return None
        block = found[0][1]
        key = (store.generation, step, block.attempt, block.count)
        if key not in self._steps and not at_once and block.count > _QUICK_SPANS:
            return None
        with self._lock:
            if key not in self._steps:
                self._steps[key] = self._look(block, step)
                while len(self._steps) > _KEPT_STEPS:
                    self._steps.popitem(last=False)
            return self._steps[key]

    def arrows(self, first: int, last: int, ranks: Array, most: int) -> tuple[list[Arrows], bool]:
        """Return the arrows to ``ranks`` in these steps, and whether they are complete. Large steps are left
        out until they are analysed."""
        self._asked = time.monotonic()
        steps = [step for step, _ in self._watched.store.blocks(max(first, 0), last)][-_KEPT_STEPS:]
        looked = [self.step(step, at_once=False) for step in steps]
        return [arrows(step, ranks, most) for step in looked if step is not None], None not in looked

    @property
    def suspects(self) -> list[Straggler]:
        """Stragglers of the newest steps at the last analysis, most expensive first."""
        return self._suspects

    def losses(self, first: int | None, last: int | None) -> Losses | None:
        """Return the time losses of some steps; ``None`` if they are unknown. Default: the losses of the run,
        divided as in its newest steps."""
        return self.losses_and_steps(first, last)[0]

    def losses_and_steps(self, first: int | None, last: int | None) -> tuple[Losses | None, range]:
        """Return the same with the steps whose spans divide it."""
        watched = self._watched
        last = watched.last_step if last is None else last
        blocks = watched.store.blocks(last, last) if last is not None else []
        news = (len(watched.files.metrics), len(watched.files.events), blocks[0][1].changes if blocks else 0)
        key = (watched.store.generation, first, last, news)
        if self._losses[0] != key:
            self._losses = (key, *self._losses_of(first, last))
        return self._losses[1:]

    def _losses_of(self, first: int | None, last: int | None) -> tuple[Losses | None, range]:
        watched = self._watched
        table = newest_table(watched.store, last, _LOSS_STEPS if first is None else 10**6)
        if table is None or last is None:
            return None, range(0)
        table = table.window(0 if first is None else first, last)
        steps = range(int(table.steps[0]), int(table.steps[-1]) + 1) if len(table.steps) else range(0)
        looked = self.step(last, at_once=False)
        files, some = watched.files, [] if looked is None else [looked]
        lines = lines_of_steps(files.metrics, int(table.steps[0]), last) if len(table.steps) else []
        timed = {int(line["step"]): line.get("step_seconds") for line in lines}
        speed = files.speed_meter.speed if first is None else run_speed(lines, files.peaks)
        return losses_at_speed(table, some, speed, timed), steps

    def _find_suspects(self) -> list[Straggler]:
        watched = self._watched
        table = newest_table(watched.store, watched.last_step)
        if table is None:
            return []
        shares = np.array(self._job_at(watched.last_step).shares, dtype=float)
        work = shares[watched.ranks.replica] if len(set(shares)) > 1 else None
        return suspects(stragglers(table, watched.ranks, work))

    def hang(self) -> HangAnalysis | None:
        """Find which rank waits for which; ``None`` if the run does not hang or its program is unknown."""
        if self._watched.state != "hangs":
            return None
        key = (self._watched.store.generation, self._watched.store.version)
        if self._hang[0] != key:
            self._hang = (key, self._current_hang())
        return self._hang[1]

    def _current_hang(self) -> HangAnalysis | None:
        newest = self._watched.store.last_step_of
        if not len(steps := np.unique(newest[newest >= 0])):
            return None
        done, programs = np.zeros(self._watched.store.world, np.int64), None
        for step in steps[-_KEPT_STEPS:]:
            if (looked := self.step(int(step))) is None:
                continue
            here = newest == step
            done[here] = looked.num_done[here]
            programs = looked.programs or programs
        return analyze_hang(self._watched.ranks, programs, newest, done) if programs else None

    def _look(self, block: StepBlock, step: int) -> StepSpans:
        store, watched = self._watched.store, self._watched
        columns = store.columns(block)
        records = np.zeros(len(columns["rank"]), RECORD)
        for key in ("start_ns", "rank", "name", "stage", "micro_batch", "chunk"):
            records[key] = columns[key]
        records["duration_ns"] = columns["duration"].astype(np.float64) * 1e9
        names, spans = tuple(store.names.names), nested(records)
        training = spans.records[spans.parent < 0]  # what is inside of others is an evaluation's
        job = self._job_at(step)
        return StepSpans(watched.ranks, names, spans, self._programs(training, names, job))

    def _job_at(self, step: int | None) -> Job:
        """Return the job with the values of a step, which counts from 1."""
        return JobSteps(self._watched.files.job).at((step or 1) - 1)

    def _programs(self, records: Records, names: tuple[str, ...], job: Job) -> tuple[ProgramNeeds, ...]:
        """Return the programs of the ranks; empty if the spans do not match them."""
        try:
            return programs_seen(
                records,
                names,
                job.layout,
                job.overlap,
                job.shares,
                tied=job.model.shares_embedding,
                orthogonalizes=job.optimizer.orthogonalizes,
            )
        except (MyriadError, ValueError):
            return ()

    def _work(self) -> None:
        rest = _LEAST_REST_SECONDS
        while not self._stop.wait(rest):
            began = time.monotonic()
            try:
                if (newest := self._watched.last_step) is not None:
                    self.step(newest, at_once=time.monotonic() - self._asked < _ASKED_SECONDS)
                    self._suspects = self._find_suspects()
            except Exception:  # of a bug: what is measured is shown all the same
                _LOG.exception("a step cannot be analysed")
            rest = max(_LEAST_REST_SECONDS, _REST_TIMES * (time.monotonic() - began))
