"""The figures of a run, read from its files: they are the same at any time, unlike its state.

The table of runs shows them, and experiment trackers get them as the summary of a run. Speed and MFU are
those of `myriad.run.run_speed`, as everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.job.job_changes import flat_values
from myriad.run.run_folder import Run
from myriad.run.run_lines import count_steps, figure_of
from myriad.run.run_speed import Peaks, run_speed
from myriad.run.run_status import STATE_EVENTS, newest_event
from myriad.system.jsonl import Record

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["LAYOUT_AXES", "RunFigures", "layout_text", "read_figures"]

LAYOUT_AXES = ("dp", "pp", "cp", "tp", "ep")
_OF_CHANGE = ("time", "step", "key", "before", "after", "user")
_MOST_CHANGES = 50


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What the files of a run say, at any time. Unknown figures are ``None``."""

    problem: str = ""
    """Why job.toml cannot be read; "": it can."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Values of the job by dotted key; empty if it cannot be read."""
    layout: str = ""
    steps: int = 0
    """Number of training steps that the run has completed."""
    steps_planned: int | None = None
    tokens: int | None = None
    loss: float | None = None
    """Loss of the newest step that has one."""
    best_validation: float | None = None
    best_validation_step: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    step_seconds: float = 0.0
    """Mean time of a step; 0: unknown."""
    started: float | None = None
    """Time of the first event or step, in seconds since the epoch."""
    last_line: float | None = None
    """Time of the last event or step."""
    newest_events: Sequence[str] = ()
    """Names of the events that determine the state, each once, in order of its newest occurrence."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of the job by resumes: ``step``, ``key``, ``before``, ``after``, ``user``."""
    holds_unsaved_step: bool = False
    """Whether the newest step is only in memory, because it could not be stored."""
    is_requeued: bool = False
    """Whether its Slurm job has been requeued and not started since."""


def read_figures(
    run: Run, metrics: Sequence[Record] | None = None, events: Sequence[Record] | None = None
) -> RunFigures:
    """Read what the files of a run say. It takes seconds for 100,000 steps."""
    metrics = run.read_metrics() if metrics is None else metrics
    events = run.read_events() if events is None else events
    try:
        job, problem = run.job(), ""
    except BadInputError as error:
        job, problem = None, str(error)
    speed, best = run_speed(metrics, Peaks(events)), _best_validation(events)
    started, newest = _first_and_last_time(metrics, events)
    losses = (figure_of(line.get("loss")) for line in reversed(metrics))
    names = dict.fromkeys(str(one["event"]) for one in reversed(events) if one["event"] in STATE_EVENTS)
    return RunFigures(
        problem=problem,
        job=flat_values(job) if job else {},
        layout=layout_text(job) if job else "",
        steps=count_steps(metrics, events).done,
        steps_planned=job.train.steps if job else None,
        tokens=metrics[-1].get("tokens") if metrics else None,
        loss=next((loss for loss in losses if loss is not None), None),
        best_validation=best[0] if best else None,
        best_validation_step=best[1] if best else None,
        tokens_per_second=speed.tokens_per_second if speed else None,
        mfu=speed.mfu if speed else None,
        step_seconds=speed.step_seconds if speed else 0.0,
        started=started,
        last_line=newest,
        newest_events=[*names][::-1],
        changes=[
            {key: event.get(key) for key in _OF_CHANGE} for event in events if event["event"] == "job_changed"
        ][-_MOST_CHANGES:],
        holds_unsaved_step=newest_event(events, ("held", "checkpoint", "finish", "start")) == "held",
        is_requeued=_is_requeued(events),
    )


def layout_text(job: "Job") -> str:
    """Return the axes of the layout that are larger than one: ``dp2 tp2``."""
    sizes = ((axis, getattr(job.layout, axis)) for axis in LAYOUT_AXES)
    return " ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "1 rank"


def _is_requeued(events: Sequence[Record]) -> bool:
    names = ("requeue", "start", "finish")
    newest = next((event for event in reversed(events) if event["event"] in names), {})
    return newest.get("event") == "requeue" and "not requeued" not in newest.get("problem", "")


def _best_validation(events: Sequence[Record]) -> tuple[float, int | None] | None:
    """Return the lowest validation loss with its step. A step that a resume repeated counts with its newest
    loss."""
    by_step: dict[int | None, float] = {}
    for event in events:
        if event["event"] == "validation" and (loss := figure_of(event.get("loss"))) is not None:
            by_step[event.get("step")] = loss
    return min(((loss, step) for step, loss in by_step.items()), default=None, key=lambda one: one[0])


def _first_and_last_time(
    metrics: Sequence[Record], events: Sequence[Record]
) -> tuple[float | None, float | None]:
    times = [figure_of(line.get("time")) for line in (*metrics[:1], *metrics[-1:], *events)]
    known = [each for each in times if each is not None]
    return min(known, default=None), max(known, default=None)
