"""Devices that are not there: what a stand-in for their driver says of them, for each node in a file.

    RUN/faults/devices/node-0.json      one device for each rank of the node; written anew when one is broken

Named by MYRIAD_DEVICES it is read by the process that would ask the real driver, and goes the same way.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from myriad.resilience.faults.kinds import KindName
from myriad.whole_file import write_whole

__all__ = ["BROKEN", "StandIn"]

BROKEN: Mapping[KindName, Mapping[str, Any]] = {
    "device-fault": {"xids": [95]},
    "device-lost": {"lost": True},
    "device-complaint": {"xids": [31]},
}
"""What is said of a device, by the fault that it has."""


class StandIn:
    """Of all nodes of a run."""

    def __init__(self, folder: Path, num_nodes: int, devices: int) -> None:
        """``devices`` of each node; all are well."""
        self.folder = folder
        self._states = [[{"index": index} for index in range(devices)] for _ in range(num_nodes)]
        folder.mkdir(parents=True)
        for node in range(num_nodes):
            self._write(node)

    def break_one(self, kind: KindName, node: int, device: int) -> None:
        """From now on."""
        self._states[node][device] |= BROKEN[kind]
        self._write(node)

    def _write(self, node: int) -> None:
        states: Sequence[Mapping[str, Any]] = self._states[node]
        write_whole(self.folder / f"node-{node}.json", json.dumps(states))
