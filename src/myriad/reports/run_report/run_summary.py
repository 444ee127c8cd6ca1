"""The summary of a run: for the panel at its end, and for ``--json``."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from myriad.run import Run
from myriad.run.run_lines import count_steps, loss_scale_text
from myriad.run.run_speed import Peaks, run_speed
from myriad.run.run_status import State, ended_state
from myriad.system.jsonl import Record

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["Summary", "finished_unwritten", "is_done", "lost_lines_warning", "summarize"]

_MOST_BLOCKS = 8
"""Largest number of bad blocks that are listed one by one."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run; unknown ones (no validation, no peak) are ``None``."""

    run: str
    state: State
    """State of the run, as if no process trained it: see `ended_state`."""
    steps: int
    """Number of steps done, by their numbers."""
    steps_without_line: int
    """Steps among ``steps_done`` that have no line in metrics.jsonl."""
    steps_planned: int
    saved_step: int | None
    """Step of the newest checkpoint."""
    held: dict[str, Any] | None
    """The last step, if it is in memory only: ``step``, ``problem``, ``servers`` (node, host, pid)."""
    resumes_from_step: int | None
    """Step from which the next start resumes, in memory or stored; ``None``: it starts at the first step."""
    resumes_from: str | None
    """Location of that step: ``memory`` or ``storage``."""
    seconds: float
    """Seconds of the steps over all attempts, without steps that were repeated after a resume."""
    tokens: int | None
    parameters: int | None
    world: int | None
    device: str | None
    precision: str | None
    lossy: tuple[str, ...]
    """Settings that make the losses differ from those of one process, or leave out a part of the model."""
    loss_scale: str
    """Float16's loss scale at the end, and the number of steps skipped because gradients overflowed; "":
    none."""
    data_problems: tuple[str, ...]
    """Bad blocks of tokens, and corpora without block hashes; empty: there are none."""
    loss: float | None
    validation_loss: float | None
    validation_bits_per_byte: float | None
    validation_ema_loss: float | None
    """Loss of the moving average of the parameters."""
    tokens_per_second: float | None
    """As the MFU, of the newest attempt: see `myriad.run.run_speed`."""
    mfu: float | None
    peak_flops: float | None
    peak_source: str | None
    plot: str | None
    sample: str | None

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return asdict(self)


def summarize(
    run: Run, metrics: Sequence[Record] | None = None, events: Sequence[Record] | None = None
) -> Summary:
    """Return the summary of a run; lines that are not given are read from its files."""
    metrics = run.read_metrics() if metrics is None else metrics
    events = run.read_events() if events is None else events
    start, peaks = _last(events, "start"), Peaks(events)
    validation = _last(events, "validation")
    last = metrics[-1] if metrics else {}
    job = run.job()
    planned = job.train.steps
    steps, without_line = astuple(count_steps(metrics, events))
    state = ended_state(events, steps, planned)
    resumes_from_step, resumes_from = _resume_point(run, job) if state != "finished" else (None, None)
    seconds = sum(line.get("step_seconds") or 0.0 for line in metrics)
    speed = run_speed(metrics, peaks)
    return Summary(
        run=str(run.path),
        state=state,
        steps=steps,
        steps_without_line=without_line,
        steps_planned=planned,
        saved_step=_last(events, "checkpoint").get("step"),
        held=_held(events),
        resumes_from_step=resumes_from_step,
        resumes_from=resumes_from,
        seconds=seconds,
        tokens=last.get("tokens"),
        parameters=start.get("parameters"),
        world=start.get("world"),
        device=start.get("device"),
        precision=start.get("precision"),
        lossy=_lossy(job),
        loss_scale=loss_scale_text(last, sum(line.get("overflow") == 1 for line in metrics)),
        data_problems=tuple(_data_problems(events)),
        loss=last.get("loss"),
        validation_loss=validation.get("loss"),
        validation_bits_per_byte=validation.get("bits_per_byte"),
        validation_ema_loss=validation.get("ema_loss"),
        tokens_per_second=speed.tokens_per_second if speed else None,
        mfu=speed.mfu if speed else None,
        peak_flops=peaks.flops_per_second,
        peak_source=peaks.source or None,
        plot=str(run.plot_path) if run.plot_path.exists() else None,
        sample=_last(events, "sample").get("text"),
    )


def _lossy(job: "Job") -> tuple[str, ...]:
    of_replicas = job.comm.lossy if job.layout.dp > 1 else ()
    return (*(f"{one}: not the result of one process" for one in of_replicas), *job.model.lossy)


def is_done(run: Run, steps: int) -> bool:
    """Return whether the run has finished ``steps`` steps."""
    metrics, events = run.read_metrics(), run.read_events()
    return count_steps(metrics, events).done >= steps and bool(_last(events, "finish"))


def finished_unwritten(run: Run, summary: Summary) -> Summary:
    """Return the summary of a run whose ranks have done the last step but could not record it. The run is
    finished if the last checkpoint is stored."""
    from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify

    planned = summary.steps_planned
    if summary.state == "finished" or summary.held is not None:
        return summary
    folder = CheckpointFolder(run.checkpoints(run.job()))
    try:
        if planned not in folder.steps() or verify(folder.at_step(planned), sizes_only=True):
            return summary
    except OSError:
        return summary
    missing = planned - summary.steps + summary.steps_without_line
    return replace(summary, state="finished", steps=planned, steps_without_line=missing, saved_step=planned)


def lost_lines_warning(run: Run, summary: Summary) -> str:
    """Return a warning about a finished run with missing metrics lines; "": no line is missing."""
    missing = summary.steps_without_line
    if not missing:
        return ""
    stored = f"all {summary.steps} steps are done and stored"
    return f"{stored}, but {run.path} had no room for the metrics lines of {missing} of them: make room there"


def _resume_point(run: Run, job: "Job") -> tuple[int | None, str | None]:
    from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
    from myriad.checkpoint.storage.checkpoint_list import resume_point

    return resume_point(run.path, CheckpointFolder(run.checkpoints(job))) or (None, None)


def _last(events: Sequence[Record], name: str) -> Record:
    return next((event for event in reversed(events) if event.get("event") == name), {})


def _held(events: Sequence[Record]) -> dict[str, Any] | None:
    """Return the state that the newest attempt could not store, unless it was stored since."""
    names = ("held", "checkpoint", "finish", "start")
    newest = next((event for event in reversed(events) if event.get("event") in names), {})
    if newest.get("event") != "held":
        return None
    return {key: newest.get(key) for key in ("step", "problem", "servers")}


def _data_problems(events: Sequence[Record]) -> Iterator[str]:
    """Return each bad block once, although every attempt reads it again."""
    blocks = {
        (event.get("file"), event.get("offset")): event
        for event in events
        if event.get("event") == "bad_block"
    }
    for event in list(blocks.values())[:_MOST_BLOCKS]:
        skipped = "; samples in it were replaced" if event.get("action") == "skip" else ""
        yield f"{event.get('problem')}{skipped}"
    if len(blocks) > _MOST_BLOCKS:
        yield f"and {len(blocks) - _MOST_BLOCKS} more bad blocks (bad_block in events.jsonl)"
    for name in _last(events, "corpus").get("unchecked", []):
        yield f"{name} has no block hashes, so its tokens were not checked: myriad data hash {name}"
