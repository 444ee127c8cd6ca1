"""How long a run is without a driver when the machine of the driver is lost.

    python benchmarks/supervise/standby.py [--kills 4] [--folder FOLDER]  needs redis-server, redis

Machines are processes of this one: a driver's, one that stands by, two nodes and a spare, with a rank on each
node; Redis is started here. All of the driver's machine is killed (SIGKILL), again and again, and each time
another begins to stand by; the last time the first node is killed with it.

lease       until whoever stood by has the lease, by its event
address     until driver.json tells where it is
executors   until all of them are connected to it
longest step, of those that were under way from the kill until then, beside the median: what ranks noticed
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from myriad.job import load_job
from myriad.run import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "services"))

from machines import Machine, wait_for

JOB = [
    "layout.dp=2", "layout.zero=3", "layout.micro_batch=2", "train.threads=1", "checkpoint.memory_seconds=0",
    "checkpoint.copies_every=5", "resilience.engine=join", "resilience.nodes=2", "train.steps=100000",
]  # fmt: skip
NODES = 3
"""With the spare."""
REDIS_PORT = 16399
ESTABLISHED = "01"


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    options = ["--port", REDIS_PORT, "--bind", "127.0.0.1", "--dir", folder, "--appendonly", "yes"]
    server = subprocess.Popen(["redis-server", *map(str, options)], stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{REDIS_PORT}/0"
    finally:
        server.kill()
        server.wait()


def connected(port: int) -> int:
    """To this port of the loopback."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(
        words[2].endswith(f":{port:04X}") and words[3] == ESTABLISHED for words in map(str.split, lines)
    )


def seconds_until(condition: Callable[[], object], since: float) -> float:
    while not condition():
        assert time.time() - since < 120, "it did not come"
        time.sleep(0.002)
    return time.time() - since


@dataclass
class Takeover:
    lease: float
    address: float
    executors: float
    longest_step: float

    def __str__(self) -> str:
        times = "".join(f"{value:9.2f} s" for value in (self.lease, self.address, self.executors))
        return f"{times}{1e3 * self.longest_step:12.0f} ms"


class Cluster:
    """All of it."""

    def __init__(self, run: Run) -> None:
        self.run, self._count = run, 0
        self.nodes = [Machine(f"node-{node}", run.path.parent) for node in range(NODES)]
        self.driving, self.waiting = self._driver(), None
        for node, machine in enumerate(self.nodes):
            machine.myriad("join", run.path, "--node", node)
        wait_for("steps", lambda: len(run.read_metrics()) > 10, self.driving, *self.nodes)

    def _driver(self, *options: str) -> Machine:
        self._count += 1
        machine = Machine(f"driver-{self._count}", self.run.path.parent)
        machine.myriad("train", self.run.path, *options)
        return machine

    def events(self, name: str) -> list[dict]:
        return [event for event in self.run.read_events() if event["event"] == name]

    def stand_by(self) -> None:
        """Another machine; returns when it would be let in."""
        log, name = self.run.logs_path, "standing by"
        said = sum(one.read_text().count(name) for one in log.glob("driver-*.log"))
        self.waiting = self._driver("--standby")
        there = lambda: sum(one.read_text().count(name) for one in log.glob("driver-*.log")) > said  # noqa: E731
        wait_for("a machine that stands by", there, self.waiting)
        time.sleep(2.0)

    def address(self) -> dict:
        return json.loads((self.run.path / "driver.json").read_text())

    def lose_driver(self, *others: Machine) -> Takeover:
        before, taken, last = (
            self.address()["port"],
            len(self.events("takeover")),
            self.run.read_metrics()[-1],
        )
        began = time.time()
        for machine in (self.driving, *others):
            machine.lose()
        address = seconds_until(lambda: self.address()["port"] != before, began)
        executors = seconds_until(lambda: connected(self.address()["port"]) >= NODES - len(others), began)
        lease = self.events("takeover")[taken]["time"] - began
        self.driving, self.waiting = self.waiting, None
        time.sleep(1.0)
        steps = [line["step_seconds"] for line in self.run.read_metrics() if line["step"] > last["step"]]
        return Takeover(lease, address, executors, max(steps, default=0.0))

    def close(self) -> None:
        for machine in (self.driving, self.waiting, *self.nodes):
            if machine is not None:
                machine.lose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with redis_server(folder) as url:
            run = Run(folder / "run")
            run.create_or_resume(load_job("tiny", [*JOB, f"resilience.journal={url}"]))
            cluster = Cluster(run)
            try:
                measure(cluster, given.kills)
            finally:
                cluster.close()


def measure(cluster: Cluster, kills: int) -> None:
    print(f"{'killed':24}{'lease':>11}{'address':>11}{'executors':>11}{'longest step':>15}")
    for _ in range(kills):
        cluster.stand_by()
        print(f"{'driver':24}{cluster.lose_driver()}", flush=True)
    assert len(cluster.events("start")) == 1 and not cluster.events("fault"), "a rank has noticed"
    steps = [line["step_seconds"] for line in cluster.run.read_metrics()]
    print(f"median step {1e3 * statistics.median(steps):.0f} ms, {len(steps)} steps, no rank began anew")
    cluster.stand_by()
    began = time.time()
    print(f"{'driver and first node':24}{cluster.lose_driver(cluster.nodes[0])}", flush=True)
    again = seconds_until(lambda: len(cluster.events("start")) == 2, began)
    fault = cluster.events("fault")[0]
    resumed = cluster.events("resume")[-1]
    print(f"{fault['problem']}: told after {fault['time'] - began:.1f} s, on a spare after {again:.1f} s,")
    print(f"from step {resumed['step']} in {resumed['source']}")


if __name__ == "__main__":
    main()
