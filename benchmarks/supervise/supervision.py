"""What it costs to be watched, and how quickly a fault is found and repaired.

    python benchmarks/supervise/supervision.py [--ranks 2] [--kills 5] [--folder FOLDER] [KEY=VALUE ...]

faults      a run of real ranks, of which one is killed, again and again, one is stopped, and the driver is
            killed: until the driver has told who, until it has asked for all ranks anew, until they train
watching    processor time of driver and executor, while nothing happens (from the 200th step, when all is
            loaded, --steady steps long) and over all faults. Where ranks take all cores, a watcher's time is
            taken from them: its share of all cores is what it adds to a step, at most (what ranks write
            themselves: telemetry.py)
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from watching import process_of

JOB = ["layout.zero=3", "layout.micro_batch=2", "train.threads=1", "checkpoint.memory_seconds=0"]
WATCHERS = ("driver", "agent_process")
SETTLED = 200
"""Steps until the first file of spans is written, and what writes it is loaded."""


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Faults:
    """Does something to the run every few steps; the run's events tell when it was seen."""

    def __init__(self, run: Run, acts: Sequence[Callable[[], None]], every: int, steady: int) -> None:
        """The first act comes ``steady`` steps later than it would."""
        self._run, self._acts, self._every, self._steady = run, acts, every, steady
        self.done: list[float] = []
        self._marks: list[tuple[float, dict[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._wait_for(SETTLED)
        self._mark()
        for number, act in enumerate(self._acts):
            self._wait_for(SETTLED + self._steady + number * self._every)
            if self._ended.is_set():
                return
            self._mark()
            self.done.append(time.time())
            act()

    def _wait_for(self, step: int) -> None:
        while not self._has_come_to(step) and not self._ended.wait(0.02):
            pass

    def _mark(self) -> None:
        used = {name: processor_seconds(process_of(name)) for name in WATCHERS}
        self._marks.append((time.monotonic(), used))

    def shares(self, first: int, last: int) -> dict[str, float]:
        """Return each watcher's share of a core between two marks (0: before any fault, 1: the first)."""
        (began, before), (ended, after) = self._marks[first], self._marks[last]
        return {name: (after[name] - before[name]) / (ended - began) for name in WATCHERS}

    def _has_come_to(self, step: int) -> bool:
        lines = self._run.read_metrics()
        return bool(lines) and lines[-1]["step"] >= step

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def kill_rank(ranks: int, number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(process_of(f"rank-{random.randrange(ranks)}"), number)


class Successor:
    """Kills the driver, and sees when another has taken over: when it has written where it is."""

    def __init__(self, run: Run) -> None:
        self._path = run.path / "driver.json"
        self.seconds = 0.0

    def kill_driver(self) -> None:
        before, began = self._path.read_text(), time.monotonic()
        os.kill(process_of("driver"), signal.SIGKILL)
        while self._path.read_text() == before:
            time.sleep(0.005)
        self.seconds = time.monotonic() - began


def times_of(run: Run, done: list[float]) -> Iterator[tuple[str, float, float, float]]:
    """Yield each fault's cause and the seconds until it was found, ranks were commanded, and they train."""
    events = run.read_events()
    faults, restarts, starts = (
        [event for event in events if event["event"] == name] for name in ("fault", "restart", "start")
    )
    for at, fault, restart, start in zip(done, faults, restarts, starts[1:], strict=False):
        seen = fault["time"]
        yield fault["cause"], seen - at, restart["time"] - seen, start["time"] - seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steady", type=int, default=400)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the job, beside its own")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = Run((given.folder or Path(temporary)) / "run")
        kill, stop = (kill_rank(given.ranks, number) for number in (signal.SIGKILL, signal.SIGSTOP))
        successor, every = Successor(run), 15
        acts = [*[kill] * given.kills, stop, successor.kill_driver]
        steps = f"train.steps={SETTLED + given.steady + every * (len(acts) + 1)}"
        job = load_job("tiny", [*JOB, f"layout.dp={given.ranks}", steps, *given.overrides])
        run.create_or_resume(job)
        faults = Faults(run, acts, every, given.steady)
        run_local(run, given.ranks)
        faults.end()
        report(run, faults, successor)


def report(run: Run, faults: Faults, successor: Successor) -> None:
    step = statistics.median(line["step_seconds"] for line in run.read_metrics())
    print(f"{'fault':10} {'found after':>12} {'restart asked':>14} {'trains again':>13}")
    for cause, found, asked, trains in times_of(run, faults.done):
        print(f"{cause:10} {found:10.3f} s {asked:12.3f} s {trains:11.2f} s")
    print(f"driver killed: another one drives after {successor.seconds:.2f} s, no rank noticed")
    print(f"step {1e3 * step:.1f} ms")
    cores = len(os.sched_getaffinity(0))
    for what, first, last in (("nothing happens", 0, 1), ("faults", 1, -1)):
        shares = faults.shares(first, last)
        told = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
        print(f"while {what}: {told} of a core; at most {sum(shares.values()) / cores:.2%} of a step")


if __name__ == "__main__":
    main()
