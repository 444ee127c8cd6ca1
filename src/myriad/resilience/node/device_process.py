"""``python -m myriad.resilience.node.device_process NODE EXECUTOR_PID SECONDS``: asks for a node's devices,
in a process of its own.

A driver of devices that hangs takes whoever asks it along, in a state in which nothing can be killed; so it
is not the executor that asks. Each look is a line of JSON on the output, {"news": [], "warnings": [],
"devices": []}, with what is new, mostly nothing, and what each device measures of itself: that no line comes
is itself a sign.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from myriad.resilience.doctor.devices import DeviceProvider, provider_of
from myriad.resilience.engines.child import die_with_parent
from myriad.resilience.node.device_news import DeviceNews
from myriad.resilience.node.gpu_warnings import GpuWarnings

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Until whoever has started it is gone."""
    node, parent, seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    die_with_parent(parent)
    provider, news, warnings = provider_of(node), DeviceNews(), GpuWarnings()
    while provider is not None:
        line = json.dumps(_look(provider, news, warnings)) + "\n"
        os.write(1, line.encode())
        time.sleep(seconds)
    return 0


def _look(provider: DeviceProvider, news: DeviceNews, warnings: GpuWarnings) -> dict[str, Any]:
    try:
        states = provider.states()
    except (OSError, subprocess.SubprocessError) as error:
        return {"news": [asdict(one) for one in news.failed(str(error))], "warnings": [], "devices": []}
    return {
        "news": [asdict(one) for one in news.saw(states)],
        "warnings": [asdict(one) for one in warnings.saw(states)],
        "devices": [
            {"device": state.index, "name": state.name, **state.vitals.model_dump(exclude_none=True)}
            for state in states
            if state.vitals is not None and not state.lost
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
