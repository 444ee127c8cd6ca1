"""Myriad: plan, rehearse, run, show and keep alive the training of large language models.

The Python interface is `myriad.api`; `log` records values of a user's own code in a step, and `open` reads a
run in a notebook.
"""

from typing import TYPE_CHECKING

from myriad.system.user_metrics import log

if TYPE_CHECKING:
    from pathlib import Path

    from myriad.notebook import OpenRun

__all__ = ["__version__", "log", "open"]

__version__ = "0.1.0"


def open(run: "str | Path") -> "OpenRun":
    """Open a run in a notebook: its folder, or its name under runs/.

    Its ``metrics``, ``events`` and ``spans()`` are pandas frames, its ``chart()`` and ``charts()`` pictures.
    Raises `myriad.errors.BadInputError` where there is no run."""
    from myriad.notebook import open_run

    return open_run(run)
