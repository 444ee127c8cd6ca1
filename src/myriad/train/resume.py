"""Where a rank begins: with the newest state in memory or storage, else with the initial weights.

    in memory, here or on another node   ─┐
    stored at checkpoint.url              ├─►  the newest complete state of all ranks
    train.init_from, train.seed          ─┘    only where the run has never stored a state

All ranks call `resume` together and begin with the same step. States of earlier attempts that are not used
are reported as events.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from myriad.checkpoint.checkpoint_files import AVERAGE_PREFIX
from myriad.checkpoint.load.start_over import RunHistory
from myriad.checkpoint.session import CheckpointSession, LoadedState
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.data.sampler import DataPosition
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.parallel.engine import Engine
from myriad.run import Run
from myriad.train.checkpoint_tools.initial_weights import fill_initial, refuse_other_run
from myriad.train.rank_context import RankContext

__all__ = ["StartState", "data_position", "resume"]

_NEWEST = "MYRIAD_NEWEST_STEP"
"""Environment variable with which the driver excludes later states."""


@dataclass(frozen=True)
class StartState:
    """The state in which this attempt begins."""

    step: int
    """Number of steps done."""
    position: DataPosition
    state: LoadedState | None
    """The loaded state, or ``None`` at step 0."""


def resume(
    rank: RankContext, engine: Engine, session: CheckpointSession, append_event: Callable[..., None]
) -> StartState:
    """Load the state, fill the engine with it, and begin the session.

    ``append_event(event, **fields)`` writes an event. Raises `myriad.errors.NoStateError` if the run has
    stored states and none can be loaded.
    """
    run, job = rank.run, rank.job
    session.acquire(max(run.num_starts(), rank.attempt - 1) if rank.is_first else 0)
    if newest := os.environ.get(_NEWEST):
        session.exclude_after(int(newest))
    past = session.agree(run.past() if rank.is_first else RunHistory(), RunHistory)
    state = session.resume(list(engine.all_shards()), past, optional=AVERAGE_PREFIX)
    _report_unused(run, job, session, state, past, append_event)
    if state is not None:
        position = _restore(run, job, engine, state)
    else:
        position = JobSteps(job).position
        if begun := fill_initial(run, job, engine):
            append_event("weights", **begun)
        else:
            engine.draw_initial()
    session.begin(list(engine.shards()), engine.shards)
    return StartState(0 if state is None else state.step, position, state)


def _restore(run: Run, job: Job, engine: Engine, state: LoadedState) -> DataPosition:
    """Give the engine the progress of a loaded state, whose tensors it has, and return the data's."""
    if state.source == "storage":
        refuse_other_run(run, job, state.step, engine)
    engine.load_progress(state.progress)
    engine.loaded()
    if not state.has_optional:  # optimizer.ema_decay was turned on since
        engine.restart_average()
    return data_position(job, state.step, state.progress["data"]["samples"])


def data_position(job: Job, step: int, samples: int) -> DataPosition:
    """Return the position after a state of ``step`` steps, which had taken ``samples`` samples. Raises
    `BadInputError` for a job whose phases or batch ramp do not lead to so many."""
    steps = JobSteps(job)
    planned = steps.position.samples_before(step)
    if planned != samples and (job.phases or job.train.batch_ramp.start is not None):
        key = "phases" if job.phases else "train.batch_ramp.start"
        value = len(job.phases) or job.train.batch_ramp.start
        allowed = (
            f"with these, {step} steps take {planned} samples, and this run took {samples}: phases and ramps "
            "must give the steps that are done the batches that they had"
        )
        raise BadInputError(key, value, allowed)
    return steps.position.resumed(step, samples)


def _report_unused(
    run: Run,
    job: Job,
    session: CheckpointSession,
    state: LoadedState | None,
    past: RunHistory,
    append_event: Callable[..., None],
) -> None:
    """Report the states of earlier attempts that this attempt does not use."""
    if other := session.taken_from:
        append_event("taken_over", url=job.checkpoint.url, run=other)
    if gone := session.set_aside_wrong:
        newest = os.environ.get(_NEWEST)
        problem = f"states after step {newest} are not gone on from: replicas differed, or a spike came"
        append_event("fault", step=int(newest or 0), problem=problem, set_aside=gone)
    here, step = run.checkpoints(job), 0 if state is None else state.step
    newer = [(where, known) for where, known in past.stored_in if known > step and _is_other(where, here)]
    if newer:
        append_event("older_state", step=step, newer_step=newer[0][1], url=newer[0][0])
    if state is None and past.done_step:
        append_event("start_over", steps_done=past.done_step, allowed=past.may_start_over)
    elif state is not None and past.may_start_over:
        append_event("restart_from_scratch", allowed=False, step=state.step)


def _is_other(place: str, here: str) -> bool:
    """Return whether two checkpoint locations differ, regardless of how they are written."""
    if place == here:
        return False
    try:
        return CheckpointFolder(place).storage.url != CheckpointFolder(here).storage.url
    except BadInputError:  # the location can no longer be opened
        return True
