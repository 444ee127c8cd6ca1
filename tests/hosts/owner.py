"""A process that makes hosts, starts ranks with children of their own in them, and waits to be stopped.

python owner.py FOLDER      each rank notes its and its child's process id there
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "common"))

from hosts import Hosts


def start_a_grandchild(note: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    partial = note / f"{os.environ['RANK']}.partial"
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.rename(note / os.environ["RANK"])
    time.sleep(600)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without it
    with Hosts(2, rate="100mbit") as hosts:
        hosts.run_ranks(start_a_grandchild, Path(sys.argv[1]))
