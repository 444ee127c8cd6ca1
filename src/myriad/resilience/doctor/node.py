"""All checks of this node, one after the other: `diagnose`.

Nothing of it is torch's: what needs torch runs in a probe, so that an executor that asks keeps its own memory
and its start short. A rate that is too low is measured once more and the better one counts: others' work on
the node makes a rate lower, nothing makes it higher. Wrong bits are never asked twice.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from myriad.resilience.doctor.clock import check_clock, read_clocks
from myriad.resilience.doctor.devices import DeviceProvider, check_devices, has_driver
from myriad.resilience.doctor.item import Diagnosis, Expected, Reading, judge
from myriad.resilience.doctor.operators import check_operators
from myriad.resilience.doctor.probe import PROBES, run_probe
from myriad.resilience.doctor.rdma import check_rdma, find_ports
from myriad.resilience.doctor.settings import check_limits, check_versions

__all__ = ["Tell", "diagnose"]

Tell = Callable[[str, float], None]
"""Gets what is being tested, and the share that is done."""

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
"""Of the time, before each probe."""


def diagnose(
    folder: Path,
    expected: Expected | None = None,
    *,
    provider: DeviceProvider | None = None,
    tell: Tell = lambda what, done: None,
    probes: Sequence[str] = tuple(PROBES),
) -> Diagnosis:
    """``folder``: where the run writes; ``expected``: the cluster's baseline; ``provider``: of device states,
    when left out that of the driver that is here; ``probes``: of `PROBES`, all of them when left out."""
    start, clocks, expected = time.perf_counter(), read_clocks(), expected or {}
    readings: list[Reading] = [*check_limits(), *check_versions()]
    for name in probes:
        tell(PROBES[name][0], _SHARES[name])
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
    items = [judge(reading, expected) for reading in readings]
    return Diagnosis(items, readings, time.perf_counter() - start)


def _probe(name: str, folder: Path, expected: Expected) -> list[Reading]:
    readings = list(run_probe(name, folder))
    if not any(_is_low(reading, expected) for reading in readings):
        return readings
    again = {reading.name: reading for reading in run_probe(name, folder)}
    return [_better(reading, again.get(reading.name, reading), expected) for reading in readings]


def _is_low(reading: Reading, expected: Expected) -> bool:
    verdict = judge(reading, expected).verdict
    return verdict in ("slow", "bad") and isinstance(reading.value, float) and not reading.problem


def _better(first: Reading, second: Reading, expected: Expected) -> Reading:
    """Of a low rate the higher one, unless there is worse than a low rate; of all else the first."""
    if second.problem or not isinstance(second.value, float) or not isinstance(first.value, float):
        return second if second.problem else first
    return second if _is_low(first, expected) and second.value > first.value else first
