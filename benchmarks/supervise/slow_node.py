"""What a slow rank costs, and what is left of that when work has moved away from it.

    python benchmarks/supervise/slow_node.py [--pp 2] [--factor 1.5] [--seconds 20] [--folder FOLDER]

Two ranks train, each on a core: two replicas, or with --pp 2 the stages of a pipeline. After
some seconds the kernel gives the second one only 1 / FACTOR of a core (a control group with a quota: needs
root), and gives its successors no more. Printed are the median times of a step before that, with it, and
after work has moved, beside the least that both cores could take together; and how long it took to find the
slow rank, and to move.
"""

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from myriad.faults.run_processes import RunProcesses
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.system.jsonl import JsonlTail

JOB = [
    "model.hidden=128", "model.sequence=128", "train.threads=1", "train.steps=100000",
    "checkpoint.memory_seconds=0",
]  # fmt: skip
REPLICAS = ["layout.dp=2", "layout.zero=2", "model.layers=4", "train.global_batch=20"]
STAGES = ["layout.pp=2", "model.layers=22", "train.global_batch=12"]
PERIOD_MICROSECONDS = 10_000
SLOW_RANK = 1
STEPS = 40
"""Measured after the move."""
LONGEST_SECONDS = 240.0


class Quota:
    """A control group whose processes get a part of a core."""

    def __init__(self, group: Path, factor: float) -> None:
        self._group, quota = group, int(PERIOD_MICROSECONDS / factor)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(quota))

    def take(self, pid: int) -> None:
        """All threads of a process."""
        with suppress(ProcessLookupError):
            (self._group / "cgroup.procs").write_text(str(pid))


@contextmanager
def slow_core(factor: float) -> Iterator[Quota]:
    """A group that is gone afterwards; its processes must be, too."""
    roots = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
    root = next(root for root in roots if (root / "cgroup.procs").exists())
    group = root / f"myriad-slow-{os.getpid()}"
    group.mkdir()
    try:
        yield Quota(group, factor)
    finally:
        with suppress(OSError):
            group.rmdir()


class Slowing(threading.Thread):
    """Makes the rank slow when its time has come, and every rank that takes its place; ends the run."""

    def __init__(self, run: Run, quota: Quota, seconds: float) -> None:
        super().__init__(daemon=True)
        self._run, self._quota, self._seconds = run, quota, seconds
        self._processes = RunProcesses(run)
        self.slowed_at, self.slowed_step = 0.0, 0

    def run(self) -> None:
        began: float | None = None
        slowed = -1
        while True:
            time.sleep(0.02)
            lines = self._run.read_metrics()
            if lines and began is None:
                began = time.monotonic()
            if began is None or time.monotonic() - began < self._seconds:
                continue
            pid = self._processes.pid("rank", SLOW_RANK)
            if pid is not None and pid != slowed:
                slowed = pid
                self._quota.take(pid)
                if not self.slowed_at:
                    self.slowed_at, self.slowed_step = time.time(), lines[-1]["step"]
            resumed = [event["step"] for event in self._run.read_events() if event["event"] == "resume"]
            done = bool(resumed) and lines[-1]["step"] >= resumed[-1] + STEPS
            if done or time.monotonic() - began > LONGEST_SECONDS:
                os.kill(os.getpid(), signal.SIGINT)
                return


def milliseconds(lines: Sequence[dict]) -> str:
    """Median, without the first steps, and how many they are of."""
    times = [1e3 * line["step_seconds"] for line in lines[5:]]
    return f"{statistics.median(times):7.1f} ms  ({len(times)} steps)" if times else "      none"


def report(run: Run, slowing: Slowing, factor: float) -> None:
    names = ("diagnosis", "restart", "start", "resume")
    later = [event for event in run.read_events() if event["time"] >= slowing.slowed_at]
    found = {event["event"]: event for event in reversed(later) if event["event"] in names}
    if len(found) < len(names):
        print("nobody was named, or nothing moved:", list(found.values()))
        return
    named, asked, start, resume = (found[name] for name in names)
    lines, back = run.read_metrics(), resume["step"]
    before = [line for line in lines if line["step"] < slowing.slowed_step]
    usual = statistics.median(line["step_seconds"] for line in before[5:])
    slow = [line for line in lines if slowing.slowed_step < line["step"] <= back]
    after = [line for line in lines if line["step"] > back]
    print(f"before                 {milliseconds(before)}")
    print(f"rank {SLOW_RANK} slow            {milliseconds(slow)}")
    told = f"shares {asked['shares']}" if "shares" in asked else f"layers {asked['partition']}"
    print(f"work moved             {milliseconds(after)}  {told}")
    print(f"both cores, no loss    {2e3 * usual / (1 + 1 / factor):7.1f} ms")
    print(f"named after {named['time'] - slowing.slowed_at:.1f} s: {named['problem']}")
    ended, trains = asked["time"] - named["time"], start["time"] - asked["time"]
    print(f"all have ended their step {ended:.2f} s later, train again {trains:.2f} s after that")
    print(f"steps done twice: {len(JsonlTail(run.metrics_path).poll()) - len(lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pp", type=int, choices=(1, 2), default=1)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, slow_core(given.factor) as quota:
        run = Run((given.folder or Path(temporary)) / "run")
        run.create_or_resume(load_job("tiny", [*JOB, *(REPLICAS if given.pp == 1 else STAGES)]))
        slowing = Slowing(run, quota, given.seconds)
        slowing.start()
        run_local(run, 2, threads=1)
        report(run, slowing, given.factor)


if __name__ == "__main__":
    main()
