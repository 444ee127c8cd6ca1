"""Whether somebody is at work on a run, also on machines that this one knows nothing of.

A launcher holds the run's lock, which only its own machine can see. But executors add a line to
RUN/counters each second, whatever ranks do, and these files are where the run is: one that was just written
says that ranks which say nothing are stuck, and not gone.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from myriad.run import Run

__all__ = ["executors_write", "is_at_work"]

_NAME = re.compile(r"node-\d{1,6}\.jsonl")
_FRESH_SECONDS, _MOST_AHEAD_SECONDS = 10.0, 60.0
"""The second: by which a file server's clock may be ahead of ours."""
_MOST_FILES = 8
"""That are looked at: of very many nodes some are enough."""


def is_at_work(run: Run, *, sends: bool = False) -> bool:
    """A launcher of this machine holds it, or executors of others write. ``sends``: somebody has sent spans
    of it, which counts where no executor's files are here."""
    if run.is_locked:
        return True
    writes = executors_write(run.counters_path)
    return sends if writes is None else writes


def executors_write(folder: Path) -> bool | None:
    """``None``: there are no files of theirs."""
    ages, names = list[float](), list[str]()
    with suppress(OSError):
        names = [one for one in os.listdir(folder) if _NAME.fullmatch(one)]
    for name in names[:_MOST_FILES]:
        with suppress(OSError):
            ages.append(time.time() - _changed(folder / name))
    return any(-_MOST_AHEAD_SECONDS < age < _FRESH_SECONDS for age in ages) if ages else None


def _changed(path: Path) -> float:
    """Opened: a file that another machine writes is only then looked at anew (NFS)."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)
