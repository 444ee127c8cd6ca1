"""The baseline: what healthy nodes of a cluster reach, a JSON file by hardware that nodes can share.

    {"format": 1, "hardware": {"cpu ... x 64": {"memory bandwidth, memory node 0": 2.1e11, ...},
                               "nic eth0 15b3:101e": {"link speed": 200000.0, ...}}}

A node reads the entries of its own hardware. The key of a NIC is its name and its vendor's and device's
numbers, not its speed: a port that came up at half its speed must not find an easier baseline.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from myriad.config import Config
from myriad.doctor.diagnosis import Expected, Reading
from myriad.errors import BadInputError
from myriad.system.machine import user_folder
from myriad.system.whole_file import write_whole

__all__ = ["default_path", "merge", "read_baseline", "summarize", "write_baseline"]

_MOST_BYTES = 2**24


class _File(Config):
    format: Literal[1]
    hardware: dict[str, dict[str, float | str]]


def default_path() -> Path:
    """Return the path of this user's baseline."""
    return user_folder() / "baseline.json"


def read_baseline(path: Path, key: str = "--baseline") -> Expected:
    """Read a baseline. Raises `BadInputError` if the file is invalid."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise BadInputError(key, str(path), f"a baseline has at most {_MOST_BYTES} bytes")
        return _File.model_validate(json.loads(text)).hardware
    except OSError as error:
        raise BadInputError(key, str(path), f"cannot be read: {error.strerror}") from None
    except (ValidationError, ValueError, RecursionError):
        raise BadInputError(key, str(path), "a file that `myriad doctor --save-baseline` wrote") from None


def write_baseline(path: Path, expected: Expected) -> None:
    """Write a baseline atomically. Raises `BadInputError` if the file cannot be written."""
    text = json.dumps({"format": 1, "hardware": expected}, indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        raise BadInputError("--baseline", str(path), f"cannot be written: {error.strerror}") from None


def summarize(rounds: Sequence[Sequence[Reading]]) -> Expected:
    """Return the medians of several diagnoses of a healthy node. Raises `BadInputError` if a value that must
    be the same differs (the bits of a calculation): such a node cannot be a baseline."""
    found: dict[str, dict[str, list[float | str]]] = defaultdict(lambda: defaultdict(list))
    for reading in (one for readings in rounds for one in readings):
        if reading.hardware and reading.value is not None:
            found[reading.hardware][reading.measure or reading.name].append(reading.value)
    return {
        hardware: {name: _typical(name, values) for name, values in sorted(measures.items())}
        for hardware, measures in sorted(found.items())
    }


def _typical(name: str, values: Sequence[float | str]) -> float | str:
    texts = {value for value in values if isinstance(value, str)}
    if len(texts) > 1:
        raise BadInputError(
            name, sorted(texts)[0], "results differ between repetitions; a baseline needs a stable node"
        )
    return texts.pop() if texts else statistics.median(float(value) for value in values)


def merge(old: Expected, new: Expected) -> Expected:
    """Merge two baselines: new values of a hardware replace its old ones."""
    return {**old, **new}
