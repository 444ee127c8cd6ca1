"""What a run measures once and keeps in its folder, so that a resumed run computes alike.

profile.json, hierarchy.json, peak.json    replaced whole; one that cannot be read, or holds anything else,
                                           is measured again; one that cannot be written costs a warning
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myriad.whole_file import read_json, write_whole

__all__ = ["keep_measured", "read_measured"]

_LOG = logging.getLogger(__name__)


def read_measured(path: Path | None, is_valid: Callable[[Any], bool]) -> Any:
    """Return what was kept; ``None``: nothing that can be used."""
    if path is None:
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        _LOG.warning("%s is measured again: %s", path, error)
        return None
    if found is not None and not is_valid(found):
        _LOG.warning("%s is measured again: it holds something else", path)
        return None
    return found


def keep_measured(path: Path | None, value: Any) -> None:
    """Keep it for the next start. A disk that takes no file never ends a run."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(value))
    except OSError as error:
        _LOG.warning("%s is not kept, and measured again at the next start: %s", path, error)
