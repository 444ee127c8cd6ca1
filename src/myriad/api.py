"""The Python interface: train a job and read its run.

    from myriad.api import Job, load_job, train

    run = train("tiny", ["train.steps=20"])           one rank, in this process
    [line["loss"] for line in run.read_metrics()]
    train(run)                                        resume it, or train it longer with other keys

A job of several ranks is trained by processes of this machine, supervised as by ``myriad train``.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from myriad.errors import BadInputError
from myriad.job import Job, load_job
from myriad.run import Run

__all__ = ["Job", "Run", "load_job", "train"]


def train(
    job: Job | Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    on_step: Callable[[], None] | None = None,
) -> Run:
    """Train a job from its newest state to its last step, and return its run.

    ``job``: a typed job, a job file or the name of a recipe, or a `Run` to resume; ``overrides``: keys of the
    job as ``"layout.tp=2"`` (none with a typed job); ``run``: the run folder, ``runs/NAME`` by default, with
    the job's name; ``on_step``: called after each step, or about ten times a second if processes train.

    A job of one rank trains in the calling process: breakpoints and profilers work, and an error is raised
    where it occurs. A job of several ranks is trained by processes of this machine, which repair faults.
    Ctrl-C saves a checkpoint and returns; `Run.last_step` is then less than ``train.steps``. Raises
    `myriad.errors.BadInputError` before anything starts, and `myriad.errors.RunFailedError`."""
    resolved, folder = _resolve(job, overrides, run)
    with folder.lock():
        _begin(folder, resolved)
        if resolved.layout.world == 1 and resolved.resilience.engine == "local":
            from myriad.launchers.metric_loggers import logged
            from myriad.train.in_process import train_in_process

            with logged(folder, resolved.telemetry.loggers):
                train_in_process(folder, on_step or _do_nothing)
        else:
            from myriad.launchers.launcher import train_on

            train_on(resolved)(
                folder,
                resolved.layout.world,
                threads=resolved.train.threads,
                observer=_Observer(on_step or _do_nothing),
            )
    return folder


def _resolve(
    job: Job | Run | str | Path, overrides: Sequence[str], run: str | Path | None
) -> tuple[Job, Run]:
    if isinstance(job, Job) and overrides:
        raise BadInputError(
            "overrides",
            list(overrides),
            "not allowed with a typed job; pass them to load_job(NAME, overrides)",
        )
    if isinstance(job, Run) and run is not None:
        raise BadInputError("run", str(run), f"not together with the run {job.path}")
    if isinstance(job, Run):
        job.check_job_file()
        return load_job(str(job.job_path), overrides), job
    resolved = job.check() if isinstance(job, Job) else load_job(str(job), overrides)
    return resolved, Run(Path("runs") / resolved.name if run is None else run)


def _begin(run: Run, job: Job) -> None:
    """Check everything that the run needs, then make its folder, or note what a resume changes."""
    from myriad.launchers.launcher import check_engine
    from myriad.train.device_setup import check_device_here
    from myriad.train.inputs import keep_inputs, open_run_inputs

    run.check(job)
    check_engine(job)
    check_device_here(job)
    inputs = open_run_inputs(run, job, lambda stage: None)
    run.create_or_resume(job)
    run.allow_restart(allowed=job.checkpoint.restart_from_scratch)
    keep_inputs(run, job, inputs)


def _do_nothing() -> None:
    """Do nothing after a step."""


class _Observer:
    """Calls a function while processes train."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def tick(self) -> None:
        """Call the function that the caller of `train` passed as ``on_step``."""
        self._on_step()

    def stopping(self) -> None:
        """Do nothing: the ranks save and stop by themselves."""
