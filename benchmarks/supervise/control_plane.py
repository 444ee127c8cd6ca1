"""One driver for a cluster: what it costs, how late it is, how quickly it repairs, with executors that have
connections and messages but no ranks.

    python benchmarks/supervise/control_plane.py [--executors 1536] [--ranks-per-node 8] [--json]

start       from the first executor that joins until the last has its Start
steady      each executor tells of its ranks once a second: the driver's share of a core (/proc), and how long
            after an executor began to send a beat the driver had handled it, by the clock that processes of
            one machine share (`control_plane_driver.py`)
faults      until the driver has told the fault (events.jsonl), and from then until the last executor has its
            Start of the next attempt. Ranks end as soon as they are told, and begin as soon: what is left is
            the driver's part
driver      killed, and another started: until all executors are back
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from array import array
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from control_plane_executors import Crowd, processor_seconds
from myriad.run import Run
from myriad.supervise.driver.journal import Journal
from myriad.supervise.policy.run_state import RunPlan

HERE = Path(__file__).parent
SPARES = 4


@dataclass
class Repair:
    found_seconds: float
    again_seconds: float
    driver_cpu_seconds: float


@dataclass
class Results:
    executors: int
    ranks: int
    start_seconds: float = 0.0
    cpu_share: float = 0.0
    simulator_cpu_share: float = 0.0
    beats_per_second: float = 0.0
    lag_p50_seconds: float = 0.0
    lag_p99_seconds: float = 0.0
    lag_max_seconds: float = 0.0
    memory_bytes: int = 0
    repairs: dict[str, Repair] = field(default_factory=dict)
    new_driver_seconds: float = 0.0
    journal_bytes: int = 0


class Bench:
    def __init__(self, run: Run, given: argparse.Namespace) -> None:
        self.run, self.given = run, given
        self.nodes, self.ranks = given.executors, given.executors * given.ranks_per_node
        self.results = Results(self.nodes, self.ranks)
        self.lags = run.path / "lags"
        self.epoch = 1

    async def start_driver(self) -> None:
        environment = os.environ | {"MYRIAD_ENGINE_PID": str(os.getpid())}
        command = [sys.executable, str(HERE / "control_plane_driver.py"), str(self.run.path), str(self.lags)]
        log = (self.run.logs_path / "driver.log").open("ab")
        self.driver: Process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=PIPE, stderr=log
        )
        self._reading = asyncio.create_task(self._read(self.driver))

    async def _read(self, driver: Process) -> None:
        """As the engine does."""
        assert driver.stdout is not None
        async for line in driver.stdout:
            message = json.loads(line)
            if "replace" in message:
                asyncio.get_running_loop().call_later(1.0, self.crowd.replace, message["replace"])
        if await driver.wait() > 0:
            sys.exit((self.run.logs_path / "driver.log").read_text())

    async def measure(self) -> None:
        self.crowd = Crowd(self.run, self.given.step_seconds)
        self.crowd.check_texts()
        await self.start_driver()
        self.crowd.join(range(self.nodes + SPARES))
        last = await self.crowd.started(self.nodes, self.epoch)
        self.results.start_seconds = last - self.crowd.first_join_at
        await self.measure_steady()
        for name, act in self.faults_to_cause():
            await self.measure_repair(name, act)
        await self.measure_new_driver()
        self.crowd.finish()
        await asyncio.wait_for(self.driver.wait(), 30)
        self.crowd.close()
        self.results.journal_bytes = (self.run.path / "journal.jsonl").stat().st_size

    def faults_to_cause(self) -> Iterator[tuple[str, Callable[[], None]]]:
        crowd, ranks = self.crowd, self.ranks
        yield "a rank is killed", partial(crowd.kill_rank, ranks // 2)
        yield "and all others say so", partial(crowd.lose_peers, ranks // 3)
        yield "a node's connection closes", lambda: crowd.lose_node(crowd.executor_of(9).node)
        yield "a node is silent", lambda: crowd.silence(crowd.executor_of(ranks - 1).node)
        yield "a rank hangs", partial(crowd.hang, ranks // 2)

    async def measure_steady(self) -> None:
        await asyncio.sleep(5)
        pid, seconds = self.driver.pid, self.given.seconds
        began, used, own = time.monotonic(), processor_seconds(pid), time.process_time()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        results, took = self.results, ended - began
        results.cpu_share = (processor_seconds(pid) - used) / took
        results.simulator_cpu_share = (time.process_time() - own) / took
        results.memory_bytes = 1024 * int(
            next(
                line.split()[1]
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("VmRSS")
            )
        )
        await asyncio.sleep(2)
        found = array("d")
        found.frombytes(self.lags.read_bytes())
        lags = sorted(lag for at, lag in zip(found[::2], found[1::2], strict=True) if began <= at < ended)
        results.beats_per_second = len(lags) / took
        results.lag_p50_seconds, results.lag_max_seconds = lags[len(lags) // 2], lags[-1]
        results.lag_p99_seconds = lags[int(0.99 * len(lags))]

    async def measure_repair(self, name: str, act: Callable[[], None]) -> None:
        faults, used = len(self.faults()), processor_seconds(self.driver.pid)
        began = time.time()
        act()
        self.epoch += 1
        last = await self.crowd.started(self.nodes, self.epoch)
        found = self.faults()[faults]["time"]
        cpu = processor_seconds(self.driver.pid) - used
        self.results.repairs[name] = Repair(found - began, last - found, cpu)
        await asyncio.sleep(3)

    def faults(self) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] == "fault"]

    async def measure_new_driver(self) -> None:
        """Wait until each node agent has reported its ranks."""
        joins, began = self.crowd.num_joins, time.monotonic()
        self.driver.kill()
        await self.driver.wait()
        await self.start_driver()
        while self.crowd.num_joins < joins + len(self.crowd.executors):
            await asyncio.sleep(0.01)
        self.results.new_driver_seconds = time.monotonic() - began


def report(results: Results) -> None:
    print(f"{results.executors} executors, {results.ranks} ranks")
    print(f"start: {results.start_seconds:.2f} s from the first that joins to the last Start")
    print(
        f"steady: driver {results.cpu_share:.1%} of a core, {results.memory_bytes / 2**20:.0f} MiB;"
        f" {results.beats_per_second:.0f} beats/s handled after"
        f" {1e3 * results.lag_p50_seconds:.1f} ms (p50), {1e3 * results.lag_p99_seconds:.1f} ms (p99),"
        f" {1e3 * results.lag_max_seconds:.1f} ms (max);"
        f" simulator {results.simulator_cpu_share:.1%} of a core"
    )
    print(f"{'fault':28} {'found after':>12} {'all start again':>16} {'driver CPU':>11}")
    for name, one in results.repairs.items():
        print(
            f"{name:28} {one.found_seconds:10.2f} s {one.again_seconds:14.2f} s"
            f" {one.driver_cpu_seconds:9.2f} s"
        )
    print(f"driver killed: all executors are with another after {results.new_driver_seconds:.2f} s")
    print(f"journal: {results.journal_bytes / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--executors", type=int, default=1536)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.logs_path.mkdir()
        plan = RunPlan(given.executors * given.ranks_per_node, given.executors, first_epoch=1)
        Journal(run.path / "journal.jsonl").begin(plan)
        bench = Bench(run, given)
        asyncio.run(bench.measure())
    if given.json:
        print(json.dumps(asdict(bench.results)))
    else:
        report(bench.results)


if __name__ == "__main__":
    main()
