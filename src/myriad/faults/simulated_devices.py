"""Simulated devices: a file for each node with the states that its device driver would report.

    RUN/faults/devices/node-0.json      one device for each rank of the node; rewritten for each fault

MYRIAD_DEVICES names the folder; the process that would query the real driver reads it instead.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from myriad.faults.recovery_targets import KindName
from myriad.system.whole_file import write_whole

__all__ = ["DEVICE_FAULTS", "SimulatedDevices"]

DEVICE_FAULTS: Mapping[KindName, Mapping[str, Any]] = {
    "device-fault": {"xids": [95]},
    "device-lost": {"lost": True},
    "device-complaint": {"xids": [31]},
}
"""Changes to a device's state, by kind of fault."""


class SimulatedDevices:
    """The simulated devices of all nodes of a run."""

    def __init__(self, folder: Path, num_nodes: int, devices: int) -> None:
        """``devices``: number of devices of each node; all start healthy."""
        self.folder = folder
        self._states = [[{"index": index} for index in range(devices)] for _ in range(num_nodes)]
        folder.mkdir(parents=True)
        for node in range(num_nodes):
            self._write(node)

    def inject(self, kind: KindName, node: int, device: int) -> None:
        """Add a fault to a device."""
        self._states[node][device] |= DEVICE_FAULTS[kind]
        self._write(node)

    def _write(self, node: int) -> None:
        states: Sequence[Mapping[str, Any]] = self._states[node]
        write_whole(self.folder / f"node-{node}.json", json.dumps(states))
