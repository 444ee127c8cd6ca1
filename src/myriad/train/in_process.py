"""Train a job of one rank in the calling process, for a debugger, a profiler or a notebook.

    calling thread   the training loop, as in a rank of its own process
    threads          the loader, the snapshot server, the writer of spans

There is no driver, node agent, snapshot server process or loader process, so no fault is repaired. An error
is raised where it occurs, and snapshots end with the process. Durable checkpoints, metrics, events and spans
are those of any run; `myriad train RUN` resumes it, with the same bits."""

import os
from collections.abc import Callable
from typing import Literal

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.run import Run
from myriad.train.trainer import Trainer

__all__ = ["check_in_process", "train_in_process"]


def check_in_process(job: Job) -> None:
    """Refuse a job that one process cannot train. Raises `BadInputError`."""
    allowed = "1 to train in this process; without it `myriad train` starts a process for each rank"
    if job.layout.world != 1:
        raise BadInputError("layout.dp x layout.tp x layout.pp", job.layout.world, allowed)
    if job.resilience.engine != "local":
        allowed = "local to train in this process"
        raise BadInputError("resilience.engine", job.resilience.engine, allowed)
    if "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise BadInputError("WORLD_SIZE", os.environ["WORLD_SIZE"], "1 to train in this process")


def train_in_process(
    run: Run, on_step: Callable[[], None] = lambda: None
) -> Literal["finished", "interrupted"]:
    """Train a run from its newest state to its last step, and return how it ended.

    ``on_step`` is called after each step. In the main thread, Ctrl-C saves a checkpoint after the current
    step and returns ``"interrupted"``. Raises `BadInputError` before the first step, and `RunFailedError`."""
    check_in_process(run.job())
    trainer = Trainer(run, in_process=True, on_step=on_step)
    failed = True
    try:
        trainer.train()
        failed = False
    finally:
        run.flush_lines()
        trainer.close(failed=failed)
    return "finished" if trainer.step == trainer.job.train.steps else "interrupted"
