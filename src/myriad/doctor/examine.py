"""All checks of one node, one after the other: `diagnose`; and the process that a node agent starts for them.

    python -m myriad.doctor.examine FOLDER full|short PARENT_PID    one line of JSON

full    all checks of `myriad doctor`, for a machine without other work
short   checks that take no time from ranks on the machine: versions, the driver's report, links; no rates

The agent's check compares with this user's baseline, if there is one.

This module does not import torch: checks that need torch run in a probe, so that an agent keeps its memory
and start-up time small. A rate that is too low is measured once more and the better one counts: other work
on the node makes a rate lower, never higher. Wrong bits are not measured again.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from myriad.doctor.baseline import default_path, read_baseline
from myriad.doctor.devices import DeviceProvider, check_devices, has_driver
from myriad.doctor.diagnosis import Diagnosis, Expected, Reading, evaluate
from myriad.doctor.hardware import find_nics
from myriad.doctor.probes.host_probe import check_clock, check_limits, check_versions, read_clocks
from myriad.doctor.probes.network_probe import check_link
from myriad.doctor.probes.operator_probe import check_operators
from myriad.doctor.probes.probe_process import PROBES, run_probe
from myriad.doctor.probes.rdma_probe import check_rdma, find_ports
from myriad.system.child_process import die_with_parent

__all__ = ["diagnose", "examine", "main"]

_LEAST_PRIORITY = 19


def examine(folder: Path, expected: Expected, *, short: bool) -> Diagnosis:
    """Return the diagnosis of this node; with ``short`` only of its versions, devices and links."""
    if not short:
        return diagnose(folder, expected)
    start = time.perf_counter()
    readings = list(_readings(folder))
    return Diagnosis([evaluate(one, expected) for one in readings], readings, time.perf_counter() - start)


def _readings(folder: Path) -> Iterator[Reading]:
    yield from check_versions()
    yield from run_probe("devices", folder)
    for nic in find_nics():
        if nic.is_physical:  # a bridge without anybody is down, and well
            yield from check_link(nic)


def main(arguments: list[str]) -> None:
    """Print the diagnosis; the exit code is 0 whatever the verdict is."""
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


ReportProgress = Callable[[str, float], None]
"""Receives the name of the current test, and the share that is done."""

_SHARES = {
    "devices": 0.0,
    "memory": 0.05,
    "disk": 0.25,
    "network": 0.4,
    "rdma": 0.5,
    "ranks": 0.5,
    "gpu": 0.85,
    "gpus": 0.95,
}
"""Share of the time that has passed before each probe."""


def diagnose(
    folder: Path,
    expected: Expected | None = None,
    *,
    provider: DeviceProvider | None = None,
    report: ReportProgress = lambda what, done: None,
    probes: Sequence[str] = tuple(PROBES),
) -> Diagnosis:
    """Diagnose this node. ``folder``: where the run writes; ``expected``: the cluster's baseline;
    ``provider``: reads device states, by default from the driver; ``probes``: names from `PROBES`, by
    default all."""
    start, clocks, expected = time.perf_counter(), read_clocks(), expected or {}
    readings: list[Reading] = [*check_limits(), *check_versions()]
    for name in probes:
        report(PROBES[name][0], _SHARES[name])
        if name == "devices" and provider is not None:
            readings += check_devices(provider)
        elif name == "rdma" and not find_ports():
            readings += check_rdma()  # says why it is skipped, without a process of its own
        elif name == "gpu" and not has_driver():
            readings += [Reading(name="GPU", skipped="no accelerator's driver here"), *check_operators("cpu")]
        elif name == "gpus" and not has_driver():
            readings.append(Reading(name="GPUs with each other", skipped="no accelerator's driver here"))
        else:
            readings += _probe(name, folder, expected)
    readings += check_clock(clocks, read_clocks())
    items = [evaluate(reading, expected) for reading in readings]
    return Diagnosis(items, readings, time.perf_counter() - start)


def _probe(name: str, folder: Path, expected: Expected) -> list[Reading]:
    readings = list(run_probe(name, folder))
    if not any(_is_low(reading, expected) for reading in readings):
        return readings
    again = {reading.name: reading for reading in run_probe(name, folder)}
    return [_better(reading, again.get(reading.name, reading), expected) for reading in readings]


def _is_low(reading: Reading, expected: Expected) -> bool:
    verdict = evaluate(reading, expected).verdict
    return verdict in ("slow", "bad") and isinstance(reading.value, float) and not reading.problem


def _better(first: Reading, second: Reading, expected: Expected) -> Reading:
    """Return the higher of two low rates, unless one reading has a worse problem; else the first reading."""
    if second.problem or not isinstance(second.value, float) or not isinstance(first.value, float):
        return second if second.problem else first
    return second if _is_low(first, expected) and second.value > first.value else first
