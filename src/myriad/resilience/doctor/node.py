"""All checks of this node, one after the other: `diagnose`.

Nothing of it is torch's: what needs torch runs in a probe, so that an executor that asks keeps its own
memory and its start short.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from myriad.resilience.doctor.clock import check_clock, read_clocks
from myriad.resilience.doctor.devices import DeviceProvider, check_devices, find_provider
from myriad.resilience.doctor.item import Diagnosis, Expected, Reading, judge
from myriad.resilience.doctor.probe import PROBES, run_probe
from myriad.resilience.doctor.settings import check_limits, check_versions

__all__ = ["Tell", "diagnose"]

Tell = Callable[[str, float], None]
"""Gets what is being tested, and the share that is done."""

_SHARES = {"memory": 0.05, "disk": 0.25, "network": 0.4, "ranks": 0.5, "gpu": 0.9}
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
    start, clocks = time.perf_counter(), read_clocks()
    provider = provider or find_provider()
    readings: list[Reading] = [*check_limits(), *check_versions(), *check_devices(provider)]
    for name in probes:
        tell(PROBES[name][0], _SHARES[name])
        readings += _probe(name, folder)
    readings += check_clock(clocks, read_clocks())
    items = [judge(reading, expected or {}) for reading in readings]
    return Diagnosis(items, readings, time.perf_counter() - start)


def _probe(name: str, folder: Path) -> Iterator[Reading]:
    if name == "gpu" and find_provider() is None:
        yield Reading(name="GPU", skipped="no accelerator's driver here")
    else:
        yield from run_probe(name, folder)
