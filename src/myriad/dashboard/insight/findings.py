"""Combine all analyses of a run's newest spans in one value, for the terminal, the report and the page.

`arrows_of` returns the arrows of an exported window: from a send to the receive that it ended, and from
the last arriver of a collective to the others.

Drift: ranks that reach a step's first collective a little later with each step.

    lag[step, rank]    start of the rank's first gradient reduction less the median of its peers'
    slope              median of the slopes between step i and step i + n / 2 (a robust line, after Theil and
                       Sen): one pause, however long, does not move it. Of each half of the steps; the
                       smaller one counts, and none where they differ in sign: a rank that became slow once
                       does not drift

MegaScale (section 6.3) lost MFU slowly over weeks this way: pauses at different moments on different
ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from myriad.dashboard.insight.critical_path import CriticalPath, critical_path
from myriad.dashboard.insight.hang_analysis import HangAnalysis, analyze_hang
from myriad.dashboard.insight.losses import Losses, losses_at_speed
from myriad.dashboard.insight.needs import ProgramNeeds
from myriad.dashboard.insight.nesting import Nested, nested
from myriad.dashboard.insight.phase_table import PhaseTable, table_of
from myriad.dashboard.insight.rank_arrays import Array, Ranks
from myriad.dashboard.insight.step_spans import StepSpans, programs_seen
from myriad.dashboard.insight.straggler_report import Straggler, stragglers, suspects
from myriad.dashboard.insight.what_if import WhatIf, what_if
from myriad.errors import MyriadError
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.run import Run
from myriad.run.run_speed import Speed
from myriad.telemetry.span_io.span_records import Records
from myriad.telemetry.span_io.span_window import Arrow, Window
from myriad.telemetry.stragglers import median_known
from myriad.units import format_number

__all__ = ["SpanAnalysis", "arrows_of", "drift", "launches", "ranks_of"]

_LOOKED_AT = 3
"""Number of steps whose waits are divided by the missing rank."""
_WARM_UP_STEPS = 2
_LEAST_DRIFT = 2e-4
"""Minimum drift per step, as a fraction of a step."""


def ranks_of(job: "Job") -> Ranks:
    """Return the ranks of an attempt from its job's layout and nodes."""
    layout, nodes = job.layout, job.resilience.nodes
    size = layout.world // nodes if nodes > 1 else job.comm.node_size
    return Ranks(layout, size or layout.world, job.comm.node_order or ())


@dataclass(frozen=True)
class _Drift:
    """Drift of launch times over some steps."""

    slope: Array
    """Seconds per step, by rank; NaN if unknown."""
    lag: Array
    """Seconds behind the median of its peers, median of steps."""

    def worst(self, least: float = 1e-6) -> list[int]:
        """Ranks that come later by at least ``least`` seconds a step and by four spreads more than others,
        the worst first."""
        known = np.flatnonzero(~np.isnan(self.slope))
        if len(known) == 0:
            return []
        spread = 1.4826 * float(np.median(np.abs(self.slope[known] - np.median(self.slope[known]))))
        late = known[self.slope[known] > max(least, 4 * spread)]
        return [int(rank) for rank in late[np.argsort(-self.slope[late])][:_MOST_WORST]]

    def sentence(self, rank: int) -> str:
        """Describe the drift of a rank."""
        each = self.slope[rank] * 1e3
        return f"rank {rank} comes {format_number(each)} ms later to its first reduction with each step"


@dataclass(frozen=True)
class SpanAnalysis:
    """Analyses of the spans of one attempt, in any order. Each is computed at its first use."""

    records: Records
    names: tuple[str, ...]
    job: "Job"
    """Job in the attempt's layout."""
    speed: Speed | None = None
    """Speed of the run, whose MFU the losses end at; ``None``: unknown."""
    timed: Mapping[int, float | None] = field(default_factory=dict)
    """Seconds of steps by the run's metrics."""

    @cached_property
    def ranks(self) -> Ranks:
        """Ranks of the attempt in the grid."""
        return ranks_of(self.job)

    @cached_property
    def _newest_job(self) -> Job:
        """The job with the values of the last recorded step."""
        steps = self._spans.records["step"]
        return JobSteps(self.job).at(max(0, int(steps.max(initial=1)) - 1))

    @cached_property
    def _spans(self) -> Nested:
        known = (self.records["step"] > 0) & (self.records["rank"] < self.ranks.world)
        return nested(self.records if known.all() else self.records[known])

    @cached_property
    def table(self) -> PhaseTable:
        """Phase table of all recorded steps."""
        return table_of(self._spans, self.names, self.ranks.world)

    @cached_property
    def whole_steps(self) -> Array:
        """Steps that every rank has recorded and finished, without the warm-up steps; if there are none, the
        last of those that most ranks have recorded."""
        steps, seen = self.table.steps, self.table.seen.sum(axis=1)
        if len(steps) == 0:
            return steps
        whole = seen >= 0.99 * self.ranks.world
        if whole[-1] and not self.has_ended(int(steps[-1])):
            whole[-1] = False
        if not whole.any():
            return steps[seen == seen.max()][-1:]
        early = steps < steps[0] + _WARM_UP_STEPS
        return steps[whole & ~early] if (whole & ~early).any() else steps[whole]

    def has_ended(self, step: int) -> bool:
        """Whether all actions of every rank in a step are recorded."""
        return bool(self.step(step).matched.all())

    @cached_property
    def steady(self) -> PhaseTable:
        """Phase table of the whole steps."""
        keep = np.isin(self.table.steps, self.whole_steps)
        return self.table.of_steps(keep)

    @cached_property
    def programs(self) -> tuple[ProgramNeeds, ...]:
        """Programs of the ranks; empty if the spans match no program."""
        job, spans = self._newest_job, self._spans
        training = spans.records[spans.parent < 0]  # what is inside of others is an evaluation's
        try:
            return programs_seen(
                training,
                self.names,
                job.layout,
                job.overlap,
                job.shares,
                tied=job.model.shares_embedding,
                orthogonalizes=job.optimizer.orthogonalizes,
            )
        except (MyriadError, ValueError):
            return ()

    def step(self, step: int) -> StepSpans:
        """Return the spans of one step, matched to their program."""
        if step not in self._steps:
            some = self._spans.records["step"] == step
            spans = nested(self._spans.records[some])
            self._steps[step] = StepSpans(self.ranks, self.names, spans, self.programs)
        return self._steps[step]

    @cached_property
    def _steps(self) -> dict[int, StepSpans]:
        return {}

    @cached_property
    def losses(self) -> Losses | None:
        """Time losses from the peak down to the MFU, over the whole steps."""
        looked = [self.step(int(step)) for step in self.whole_steps[-_LOOKED_AT:]] if self.programs else []
        return losses_at_speed(self.steady, looked, self.speed, self.timed)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Stragglers by phase, most expensive first."""
        shares = np.array(self._newest_job.shares, dtype=float)
        work = shares[self.ranks.replica] if len(set(shares)) > 1 else None
        return stragglers(self.steady, self.ranks, work)

    @property
    def suspects(self) -> list[Straggler]:
        """Stragglers, each rank or node once."""
        return suspects(self.stragglers)

    @cached_property
    def drift(self) -> _Drift:
        """Drift of launch times over the whole steps."""
        steps, first = launches(self._spans, self.names, self.ranks.world)
        keep = np.isin(steps, self.whole_steps)
        return drift(steps[keep], first[keep], self.ranks)

    @property
    def drifting(self) -> list[int]:
        """Ranks that launch ever later, by enough to cost something within some hundred steps."""
        if len(self.whole_steps) == 0:
            return []
        return self.drift.worst(least=max(1e-6, _LEAST_DRIFT * self.steady.usual_step_seconds))

    @cached_property
    def path_step(self) -> int | None:
        """The step of `path`: of the newest whole ones whose spans fit the program the most usual."""
        if not self.programs:
            return None
        looked = [int(step) for step in self.whole_steps[-_LOOKED_AT:]]
        fit = [step for step in looked if self.step(step).matched.any()]
        return min(fit, key=self._unusual, default=None)

    def _unusual(self, step: int) -> float:
        """Return the difference between a step's time and the usual time, in seconds."""
        seconds = self.table.step_seconds[self.table.steps == step][0]
        return abs(float(seconds) - self.steady.usual_step_seconds)

    @cached_property
    def path(self) -> CriticalPath | None:
        """Critical path of `path_step`."""
        return None if self.path_step is None else critical_path(self.step(self.path_step))

    def without(self, ranks: Collection[int]) -> WhatIf | None:
        """Return the step time if ``ranks`` were as fast as their peers."""
        if self.path_step is None:
            return None
        return what_if(self.step(self.path_step), ranks, self.steady.usual_step_seconds)

    @cached_property
    def hang(self) -> HangAnalysis | None:
        """Which rank waits for which, if nothing has happened since the newest span."""
        if not self.programs or len(self.table.steps) == 0:
            return None
        newest = np.full(self.ranks.world, -1, dtype=np.int64)
        np.maximum.at(newest, self._spans.records["rank"], self._spans.records["step"])
        done = np.zeros(self.ranks.world, dtype=np.int64)
        for step in np.unique(newest[newest >= 0]):
            here = newest == step
            done[here] = self.step(int(step)).num_done[here]
        return analyze_hang(self.ranks, self.programs, newest, done)


_MOST_ARROWS = 100_000


def arrows_of(run: Run, window: Window) -> list[Arrow]:
    """Return the messages of the newest attempt in the window; none if its ranks did not run the job's
    program."""
    from myriad.dashboard.insight.arrivals import arrows

    attempt = max(one.attempt for one in window.ranks)
    records: Records = np.concatenate([one.records for one in window.ranks if one.attempt == attempt])
    findings, found = SpanAnalysis(records, window.names, run.job()), list[Arrow]()
    for step in np.unique(records["step"][records["step"] > 0]).tolist():
        some = arrows(findings.step(step), limit=_MOST_ARROWS - len(found))
        columns = (some.from_rank, some.from_ns, some.to_rank, some.to_ns)
        found += map(Arrow._make, zip(*(each.tolist() for each in columns), strict=True))
        if len(found) >= _MOST_ARROWS:
            break
    return found


_LAUNCHES = ("reduce", "start_reduce", "clip", "step")
_FEWEST_STEPS = 8
_MOST_WORST = 50


def launches(spans: Nested, names: Sequence[str], world: int) -> tuple[Array, Array]:
    """Return the steps, and the seconds at which each rank began its first reduction, ``[step, rank]``; NaN
    if it has none."""
    for wanted in (_LAUNCHES[:2], _LAUNCHES[2:]):
        codes = [code for code, name in enumerate(names) if name in wanted]
        found = np.flatnonzero(np.isin(spans.records["name"], codes))
        if len(found):
            break
    steps = np.unique(spans.records["step"][found])
    first = np.full((len(steps), world), np.nan)
    if len(found):
        row = np.searchsorted(steps, spans.records["step"][found])
        at = row * world + spans.records["rank"][found]
        # In order of time: written backwards, the first of each step stays.
        origin = int(spans.start[found].min())
        first.ravel()[at[::-1]] = (spans.start[found[::-1]] - origin) * 1e-9
    return steps, first


def drift(steps: Array, first: Array, ranks: Ranks) -> _Drift:
    """Return the drift of launch times from `launches`."""
    lag = first.copy()
    for place in range(ranks.layout.pp):
        members = np.flatnonzero(ranks.pipeline == place)
        own = lag[:, members]
        own -= median_known(own, axis=1)[:, None] if own.size else 0.0
        lag[:, members] = own
    slope = np.full(ranks.world, np.nan)
    if len(steps) >= _FEWEST_STEPS:
        half = len(steps) // 2
        early, late = _slope(steps[:half], lag[:half]), _slope(steps[half:], lag[half:])
        smaller = np.where(np.abs(early) < np.abs(late), early, late)
        slope = np.where(early * late > 0, smaller, 0.0 * smaller)
    usual = median_known(lag, axis=0) if len(steps) else np.full(ranks.world, np.nan)
    return _Drift(slope, usual)


def _slope(steps: Array, lag: Array) -> Array:
    half = len(steps) // 2
    between = (steps[half:] - steps[: len(steps) - half])[:, None]
    return median_known((lag[half:] - lag[: len(steps) - half]) / between, axis=0)
