"""``python -m myriad.resilience.node.device_process NODE EXECUTOR_PID``: asks for a node's devices, in a
process of its own.

A driver of devices that hangs takes whoever asks it along, in a state in which nothing can be killed; so it
is not the executor that asks. Each look is a line of JSON on the output, with what is new, mostly nothing:
that no line comes is itself a sign.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

from myriad.resilience.doctor.devices import DeviceProvider, provider_of
from myriad.resilience.engines.child import die_with_parent
from myriad.resilience.node.device_news import DeviceNews, News

__all__ = ["LOOK_SECONDS", "main"]

LOOK_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Until whoever has started it is gone."""
    node, parent = map(int, arguments)
    die_with_parent(parent)
    provider, news = provider_of(node), DeviceNews()
    while provider is not None:
        line = json.dumps([asdict(one) for one in _look(provider, news)]) + "\n"
        os.write(1, line.encode())
        time.sleep(LOOK_SECONDS)
    return 0


def _look(provider: DeviceProvider, news: DeviceNews) -> list[News]:
    try:
        return news.saw(provider.states())
    except (OSError, subprocess.SubprocessError) as error:
        return news.failed(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
