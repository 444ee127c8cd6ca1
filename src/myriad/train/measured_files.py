"""What a run measures once and keeps in its folder, so that a resumed run computes alike.

profile.json, hierarchy.json    decide where layers are cut and in which order gradients are summed: a
                                damaged one is refused, as measured again it could give other bits
peak.json                       decides the MFU alone: a damaged one is measured again

Each is replaced whole; one that cannot be written costs a warning.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myriad.errors import BadInputError
from myriad.whole_file import read_json, write_whole

__all__ = ["keep_measured", "read_measured"]

_LOG = logging.getLogger(__name__)


def read_measured(path: Path | None, is_valid: Callable[[Any], bool], *, decides_bits: bool = False) -> Any:
    """Return what was kept; ``None`` when nothing was, or nothing usable.

    Raises `BadInputError` for a damaged file that ``decides_bits``."""
    if path is None:
        return None
    try:
        found, problem = read_json(path), "it holds something else"
    except (OSError, ValueError) as error:
        found, problem = None, str(error)
    else:
        if found is None or is_valid(found):
            return found
    if decides_bits:
        allowed = (
            "is damaged; restore it, or remove it: it is measured again, and sums may differ by rounding"
        )
        raise BadInputError("run", str(path), allowed)
    _LOG.warning("%s is measured again: %s", path, problem)
    return None


def keep_measured(path: Path | None, value: Any) -> None:
    """Keep it for the next start. A disk that takes no file never ends a run."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(value))
    except OSError as error:
        _LOG.warning("%s is not kept, and measured again at the next start: %s", path, error)
