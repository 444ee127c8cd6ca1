"""What ``myriad train`` checks before a run starts: options, changed keys, and the place of the checkpoints.

Each check raises `BadInputError`, before hours of training depend on what is wrong.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from myriad.checkpoint.snapshots.snapshot_client import list_in_memory
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.folder_owner import check_owner
from myriad.comm.rendezvous.redis_address import exposure
from myriad.errors import BadInputError, toml_value
from myriad.job import Job
from myriad.job.job_changes import JobChange
from myriad.launchers.external_nodes import check_standby
from myriad.launchers.slurm import in_allocation
from myriad.recipes import recipe_names
from myriad.run import Run

__all__ = [
    "check_device",
    "check_restart",
    "check_standby_options",
    "check_storage",
    "find_run_folder",
    "is_queued",
    "redis_exposures",
    "refuse_unused",
]


def find_run_folder(job: str) -> Path | None:
    """Return the folder of the run to resume; ``None`` for a job. A name of both means the job."""
    by_name = Path("runs") / job
    if Path(job).is_dir():
        return Path(job)
    return by_name if (by_name / "job.toml").is_file() and job not in recipe_names("jobs") else None


def check_standby_options(job: str, run: Run, resolved: Job, overrides: Sequence[str]) -> None:
    """Refuse a standby for anything but a run that is training, with keys other than this machine's."""
    if find_run_folder(job) is None:
        raise BadInputError("--standby", job, "must be the folder of a run that is training")
    for key, _, value in (one.partition("=") for one in overrides):
        if key != "resilience.listen":
            allowed = "--standby uses the run's job; only resilience.listen may differ on this machine"
            raise BadInputError(key, value, allowed)
    check_standby(run, resolved)


def is_queued(job: Job, submit: bool) -> bool:
    """Return whether Slurm starts the run later."""
    starts_later = job.resilience.engine == "slurm" and not in_allocation()
    if submit and not starts_later:
        raise BadInputError("--submit", True, "only with the engine slurm, and outside a Slurm job")
    return starts_later


def check_device(job: Job) -> None:
    """Refuse a device or kernels that this machine lacks. Torch is imported only if the job requires one."""
    if job.train.device == "cuda" or job.train.kernels == "triton":
        from myriad.train.device_setup import check_device_here

        check_device_here(job)


def redis_exposures(job: Job) -> list[str]:
    """Return a line for each Redis server of the job that others on the network could use."""
    found = exposure(job.comm.store), exposure(job.resilience.journal, "resilience.journal", "file")
    return [line for line in found if line]


def check_storage(
    run: Run, job: Job, changes: Sequence[JobChange], overrides: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Refuse a place for checkpoints that cannot be written, before hours of training depend on it. Refuse
    also another run's place, and one that lacks the run's stored checkpoints. A run whose state is still in
    memory resumes regardless of missing checkpoints. ``warn`` prints a line for the user."""
    moved = next((change for change in changes if change.key == "checkpoint.url"), None)
    folder = CheckpointFolder(run.checkpoints(job))
    in_memory = bool(list_in_memory(run.path))
    if job.checkpoint.url is not None and (moved is not None or not in_memory):
        try:
            check_owner(folder, run.path)
        except OSError as error:
            raise BadInputError("checkpoint.url", job.checkpoint.url, f"cannot be read: {error}") from None
    if in_memory:
        return
    _check_newer_elsewhere(run, folder, job, overrides, warn)
    if job.checkpoint.url is None and moved is None:
        return
    past = run.past()
    folder.check()
    if moved is None or job.resilience.nodes > 1 or job.checkpoint.restart_from_scratch:
        return  # The ranks find the snapshots in other nodes' memory.
    if past.stored_step and not folder.trained_steps():
        stored = f"which stored step {past.stored_step} in {moved.before or run.checkpoints_path}"
        allowed = (
            f"holds no checkpoint of {run.path}, {stored}: leave the key out, copy the checkpoints there "
            f"first, or give --checkpoint.restart-from-scratch"
        )
        raise BadInputError("checkpoint.url", moved.after, allowed)


def _check_newer_elsewhere(
    run: Run, folder: CheckpointFolder, job: Job, overrides: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Refuse to resume from an older step than the newest one of this run in another place, as after `myriad
    checkpoint save`. If the place was given on the command line, ``warn`` the user instead."""
    if job.checkpoint.restart_from_scratch or not run.exists:
        return
    place = folder.storage.url
    others = [(where, step) for where, step in run.past().stored_in if where != place and step]
    here = max(folder.trained_steps(), default=0) if others else 0
    for where, step in others:
        if step <= here:
            continue
        try:
            if step not in CheckpointFolder(where).steps():
                continue
            state = f"step {step} of {run.path} is in {where}"
        except (OSError, BadInputError) as error:
            state = f"step {step} of {run.path} was stored in {where}, which cannot be read now ({error})"
        found = f"{state}, and the newest here is step {here}"
        if not any(one.startswith("checkpoint.url=") for one in overrides):
            allowed = (
                f"{found}; resume from step {step}: `myriad train {shlex.quote(str(run.path))} "
                f"--checkpoint.url {shlex.quote(where)}`; or from step {here}: --checkpoint.url "
                f"{shlex.quote(job.checkpoint.url or 'off')}"
            )
            raise BadInputError("checkpoint.url", job.checkpoint.url or "off", allowed)
        warn(f"resumes from step {here}: {found}")
        return


def check_restart(job: Job, overrides: Sequence[str]) -> None:
    """Refuse a permission for a single start in a file that every start reads."""
    typed = any(one.startswith("checkpoint.restart_from_scratch=") for one in overrides)
    if job.checkpoint.restart_from_scratch and not typed:
        allowed = (
            "applies to one start: give --checkpoint.restart-from-scratch on the command line, not in "
            "job files"
        )
        raise BadInputError("checkpoint.restart_from_scratch", True, allowed)


def refuse_unused(run: Run, changes: Sequence[JobChange], job: Job) -> None:
    """Refuse keys that a finished run would ignore."""
    if not changes and not job.checkpoint.restart_from_scratch:
        return
    key, before, value = changes[0] if changes else ("checkpoint.restart_from_scratch", False, True)
    done = run.last_step()
    others = [change.key for change in changes[1:]]
    more = f", nor were {', '.join(others)}" if others else ""
    path = shlex.quote(str(run.path))
    finished = f"{path} is finished ({done} of {done} steps, with {key} = {toml_value(before)})"
    allowed = f"was not used{more}: {finished}; longer: --train.steps {2 * done}; a new run: --run NAME"
    raise BadInputError(key, value, allowed)
