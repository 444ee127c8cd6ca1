"""Makes a process of Myriad start and end in less processor time.

A command, a node agent or a driver imports hundreds of modules and lives for seconds. Two things would cost
up to a fifth of a second of it:

- garbage collections during imports, whose objects all stay, and again at the exit;
- Pydantic's search of all installed packages for its plugins. An environment variable turns it off, also for
  the processes that this one starts; a value that the user has set is kept.
"""

import atexit
import gc
import os

__all__ = ["start_quickly"]

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_THRESHOLDS = (10_000, 50, 100)
"""Objects, and then collections of the younger generation, after which a generation is collected."""


def start_quickly() -> None:
    """Prepare this process; call it before large imports."""
    os.environ.setdefault(_PLUGINS, "__all__")
    gc.set_threshold(*_THRESHOLDS)
    atexit.register(gc.freeze)
