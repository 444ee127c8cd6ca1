"""How long until a link that is slowed or stopped in the middle of a run is named, and whether others are.

    python benchmarks/supervise/link_alarms.py [slow stop none] [--nodes 3]

A run on nodes that are network namespaces, whose links carry 200 Mbit/s (a token bucket at each node); the
driver is reached over another network. It validates each 40 steps and keeps checkpoints in memory and, each
50, on disk. After ten seconds of steps the link of node 1 is slowed to a tenth (slow), or carries nothing
while its carrier stays (stop: the switch's port is blocked), for eight seconds; three later the run is ended.
Printed are the seconds until the alarm, the node that it names, the alarms that are false, and the seconds
from the repair to the event that ends the alarm. Needs root, ip, tc and bridge of iproute2.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "data"))

from tiny_corpora import make_corpus

from myriad.faults.namespaces import Namespaces
from myriad.faults.namespaces import run as command
from myriad.faults.trial import run_on_hosts
from myriad.job import load_job
from myriad.run import Run
from myriad.supervise.agent.link_monitor import LinkMonitor
from myriad.supervise.observations import LinkStatus
from myriad.system.jsonl import JsonlTail
from myriad.telemetry.progress.progress_page import ProgressPage

BROKEN = 1
BEFORE_SECONDS, SECONDS, AFTER_SECONDS = 10.0, 8.0, 3.0
WHOLE, SLOWED = "200mbit", "20mbit"
JOB = [
    "model.layers=2", "model.hidden=64", "model.sequence=32", "train.threads=1", "layout.zero=3",
    "layout.micro_batch=2", "comm.hierarchy=flat", "train.validate_every=40", "checkpoint.every=50",
]  # fmt: skip


@dataclass
class Rehearsal:
    """What was done to the link, and what the run reported of it."""

    run: Run
    broken_at: float = 0.0
    repaired_at: float = 0.0
    alarms: list[dict[str, Any]] = field(default_factory=list)

    def named(self) -> list[dict[str, Any]]:
        """Alarms that began after the link was broken."""
        return [one for one in self.alarms if one["level"] == "warning" and one["time"] > self.broken_at > 0]

    def false(self) -> int:
        """Alarms of a link that nothing was done to, or before anything was."""
        began = [one for one in self.alarms if one["level"] == "warning"]
        return sum(not 0 < self.broken_at < one["time"] or one.get("node") != BROKEN for one in began)


def rehearse(folder: Path, what: str, nodes: int, *keys: str, repairs: bool = True) -> Rehearsal:
    """Train, break the link of node 1, and collect the alarms. ``what``: slow, stop or none. ``keys``: more
    keys of the job. ``repairs``: the run goes on after the link is repaired; else it ends at the first
    alarm."""
    corpus = make_corpus(folder, count=3000)
    compile_sampler(folder)
    given = [f"data.corpus={corpus}", f"layout.dp={nodes}", f"resilience.nodes={nodes}", "train.steps=100000"]
    run = Run(folder / "run")
    run.create_or_resume(load_job("tiny", [*JOB, *given, f"train.global_batch={2 * nodes}", *keys]))
    found = Rehearsal(run)
    with Namespaces(nodes + 1, networks=2) as hosts:
        for host in range(nodes):
            shape(hosts, host, WHOLE)
        threading.Thread(target=break_link, args=(found, hosts, what, repairs), daemon=True).start()
        run_on_hosts(run, nodes, hosts, threads=1)
    found.alarms = alarms_of(run)
    return found


def alarms_of(run: Run) -> list[dict[str, Any]]:
    """Events about the traffic of links."""
    events = [one for one in run.read_events() if one["event"] == "health"]
    return [one for one in events if one.get("what") == "traffic"]


def compile_sampler(folder: Path) -> None:
    """Start the process that reads the counters once: its machine code takes seconds on a new machine, and
    what a link carries before it is broken would not be known."""
    monitor = LinkMonitor(Run(folder / "sampled"), 0, ProgressPage(1))
    monitor.poll((LinkStatus("lo", True, 0, 0),), 1)
    while monitor.ring is not None and not monitor.ring.num_written:
        time.sleep(0.05)
    monitor.close()


def shape(hosts: Namespaces, host: int, rate: str) -> None:
    """Limit the rate at which a node sends to the others."""
    words = ("tc", "qdisc", "replace", "dev", "eth1", "root", "tbf", "rate", rate, "burst", "64kb")
    command("ip", "netns", "exec", hosts.namespace(host), *words, "latency", "100ms")


def break_link(found: Rehearsal, hosts: Namespaces, what: str, repairs: bool) -> None:
    """After some seconds of steps, for some seconds; then the run is to stop, as by Ctrl-C."""
    metrics = JsonlTail(found.run.metrics_path)
    while not metrics.poll():
        time.sleep(0.05)
    time.sleep(BEFORE_SECONDS)
    if what != "none":
        found.broken_at = time.time()
        set_link(hosts, what, whole=False)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and (repairs or not alarms_of(found.run)):
        time.sleep(0.25)
    if repairs:
        if what != "none":
            set_link(hosts, what, whole=True)
            found.repaired_at = time.time()
        time.sleep(AFTER_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


def set_link(hosts: Namespaces, what: str, *, whole: bool) -> None:
    """Set the rate of node 1's link, or the state of its switch port (3: forwarding)."""
    if what == "slow":
        shape(hosts, BROKEN, WHOLE if whole else SLOWED)
    else:
        words = ("ip", "netns", "exec", hosts.switch, "bridge", "link", "set", "dev", hosts.port(BROKEN, 1))
        command(*words, "state", "3" if whole else "0")


def show(what: str, found: Rehearsal) -> None:
    """One line and the sentences of the alarms."""
    named, ended = found.named(), [one for one in found.alarms if one["level"] == "info"]
    first = next((one for one in named if one.get("node") == BROKEN), None)
    parts = [f"{what:5}", f"{found.false()} false alarms"]
    if what != "none":
        parts.append("not found" if first is None else f"named after {first['time'] - found.broken_at:.1f} s")
    if first is not None and ended:
        parts.append(f"over {ended[-1]['time'] - found.repaired_at:.1f} s after the repair")
    kept = len(list((found.run.counters_path / "around").glob("*.gz")))
    print("; ".join([*parts, f"{kept} files of counters"]), flush=True)
    for one in named:
        print(f"      {one['problem']}", flush=True)


def main() -> None:
    """Rehearse each kind of fault and print what was reported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["none", "slow", "stop"], help="none, slow, stop")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for what in given.what:
        with tempfile.TemporaryDirectory() as folder:
            found = rehearse(Path(folder), what, given.nodes)
            if given.json:
                print(json.dumps(found.alarms))
            else:
                show(what, found)


if __name__ == "__main__":
    main()
