"""Files of measurements that a run makes once, so that a resumed run computes alike.

profile.json      decides where layers are cut hierarchy.json    decides in which order gradients are summed
tensor_overlap.json    decides in which order products are

A damaged file is refused: a new measurement could give other bits. Each file is replaced atomically. A file
that cannot be written costs a warning, and is measured again at the next start.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myriad.errors import BadInputError
from myriad.system.whole_file import read_json, write_whole

__all__ = ["keep_measured", "read_measured"]

_LOG = logging.getLogger(__name__)


def read_measured(path: Path | None, is_valid: Callable[[Any], bool]) -> Any:
    """Return the stored value, or ``None`` if there is none. Raises `BadInputError` for a damaged file."""
    if path is None:
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = path
    if found is not None and not is_valid(found):
        allowed = (
            "is damaged; restore it, or remove it: it is measured again, and sums may differ by rounding"
        )
        raise BadInputError("run", str(path), allowed)
    return found


def keep_measured(path: Path | None, value: Any) -> None:
    """Store the value for the next start. A failed write never ends a run."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(value))
    except OSError as error:
        _LOG.warning("%s is not kept, and measured again at the next start: %s", path, error)
