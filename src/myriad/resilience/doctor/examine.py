"""``python -m myriad.resilience.doctor.examine FOLDER full|short PARENT_PID``: a node's diagnosis for its
executor, as one line of JSON; compared with this user's baseline, if there is one.

full    all that `myriad doctor` tests: nobody else is at work on the machine
short   what takes no time from ranks on the same machine and that they do not disturb: no rates, no patterns;
        versions, what the accelerators' driver reports, links
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from myriad.resilience.doctor.baseline import default_path, read_baseline
from myriad.resilience.doctor.hardware import find_nics
from myriad.resilience.doctor.item import Diagnosis, Expected, Reading, judge
from myriad.resilience.doctor.network import check_link
from myriad.resilience.doctor.node import diagnose
from myriad.resilience.doctor.probe import run_probe
from myriad.resilience.doctor.settings import check_versions
from myriad.resilience.engines.child import die_with_parent

__all__ = ["examine", "main"]

_LEAST_PRIORITY = 19


def examine(folder: Path, expected: Expected, *, short: bool) -> Diagnosis:
    """Of this node."""
    if not short:
        return diagnose(folder, expected)
    start = time.perf_counter()
    readings = list(_readings(folder))
    return Diagnosis([judge(one, expected) for one in readings], readings, time.perf_counter() - start)


def _readings(folder: Path) -> Iterator[Reading]:
    yield from check_versions()
    yield from run_probe("devices", folder)
    for nic in find_nics():
        if nic.is_physical:  # a bridge without anybody is down, and well
            yield from check_link(nic)


def main(arguments: list[str]) -> None:
    """Exit code 0: the diagnosis was made, whatever it is."""
    folder, how, parent = arguments
    die_with_parent(int(parent))
    if how == "short":
        os.nice(_LEAST_PRIORITY)
    path = default_path()
    expected = read_baseline(path) if path.is_file() else {}
    found = examine(Path(folder), expected, short=how == "short")
    sys.stdout.write(json.dumps(found.as_json()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
