"""``python -m myriad.cli.train.follow RUN READY``: print a run's progress as lines until standard input ends,
and run the loggers of its metrics.

It serves a rank 0 that torchrun or another launcher started (`myriad.train.worker`); the lines are those of
``myriad train`` without a terminal. It is a separate process, so that printing does not slow the rank.
"""

import contextlib
import os
import select
import signal
import sys

from rich.console import Console

from myriad.cli.train.run_progress import Progress
from myriad.cli.train.train_screen import PlainScreen
from myriad.errors import MyriadError
from myriad.launchers.metric_loggers import logged
from myriad.run import Run

__all__ = ["follow"]

_POLL_SECONDS = 0.25


def follow(run: Run, console: Console, ready: int) -> None:
    """Print until standard input is closed, then the end line. ``ready``: a descriptor to which one byte is
    written once all later lines of the run will be read."""
    job = run.job()
    progress = Progress(run, job.train.steps)
    screen = PlainScreen(console, progress)
    with logged(run, job.telemetry.loggers):
        os.write(ready, b"\n")
        os.close(ready)
        while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            screen.tick()
        screen.tick()
    state = "finished" if progress.has_ended and progress.step >= progress.steps else "stopped"
    line = f"{state} at step {progress.step} of {progress.steps}: {run.path}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    # The rank decides when to stop, and then closes standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(MyriadError):  # The rank reports the error.
        follow(Run(sys.argv[1]), Console(), int(sys.argv[2]))
