"""Whether steps stay as quick as they were, and whether ranks launch their communication together.

    python benchmarks/training/drift.py [--steps 2000] [--every 100] [--json] [--quick]

Two data-parallel ranks of one thread, each pinned to a core, train a tiny job for thousands of short steps
with Python's own garbage collector and with Myriad's (`myriad.train.step_signals`). A step's time runs from
its start to the next one's, so pauses between steps count; the launch spread is how far apart the two ranks
start the reduction of the same step (one machine, one clock).

A job this small makes so few objects that Python hardly ever collects. What a rank of a long run holds is
therefore put beside it, **synthetic**: an index that stays, and a shuffle buffer in which every step replaces
samples, as many as chance has it, on each rank another number. With it, also the schedule alone without
freezing what stays.
"""

import argparse
import gc
import json
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.train.trainer import Trainer

RANKS = 2
WARMUP = 50
"""Steps not counted: start-up, and the collection that freezes what is there."""
BLOCKS = 20
"""Stretches whose means the slope is fitted to: neighbouring steps are not independent, stretches nearly."""
STUDENT_T = 2.101
"""Quantile of a 95 % interval with BLOCKS - 2 = 18 degrees of freedom."""
JOB = {
    "model.layers": 1,
    "model.hidden": 32,
    "model.sequence": 32,
    "train.global_batch": 2,
    "train.threads": 1,
    "train.sample_prompt": "off",
    "layout.dp": RANKS,
}


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    every: int
    """Steps between collections; 0: Python's own collector."""
    entries: int
    """Entries of the synthetic heap; two tracked objects each."""
    freezes: bool = True


@dataclass(slots=True)
class Entry:
    """A document in an index, or a sample in a shuffle buffer."""

    number: int
    parts: list[int]


class Heap:
    """Three quarters an index that stays, one quarter a buffer that turns over."""

    def __init__(self, entries: int, rank: int) -> None:
        self._random = random.Random(rank)
        self._index = [Entry(number, [number]) for number in range(entries * 3 // 4)]
        self._buffer = [Entry(number, [number]) for number in range(entries // 4)]
        self._mean = entries // 1000

    def turn_over(self) -> None:
        """Replaces about a thousandth of the entries."""
        if self._buffer:
            for _ in range(self._random.randint(self._mean // 2, self._mean * 3 // 2)):
                self._buffer[self._random.randrange(len(self._buffer))] = Entry(0, [0])


@dataclass
class Collections:
    """What the garbage collector did in this process."""

    seconds: float = 0.0
    """Processor time, without other processes on the core."""
    number_of_full: int = 0
    longest_seconds: float = 0.0
    _began: float = 0.0

    def note(self, phase: str, info: dict[str, int]) -> None:
        """For ``gc.callbacks``."""
        if phase == "start":
            self._began = time.thread_time()
            return
        seconds = time.thread_time() - self._began
        self.seconds += seconds
        self.number_of_full += info["generation"] == 2
        self.longest_seconds = max(self.longest_seconds, seconds)


@dataclass
class Found:
    """What one rank saw, after the warm-up."""

    begun: np.ndarray
    """When each step began, in seconds since the epoch."""
    launched: np.ndarray
    """When its first reduction did."""
    collections: Collections = field(default_factory=Collections)
    memory_bytes: list[int] = field(default_factory=list)
    """Private memory of the process at each eighth of the way."""
    objects: list[int] = field(default_factory=list)
    """Tracked objects there."""


class WatchedRun(Trainer):
    """A trainer that notes when its steps begin and communicate."""

    def prepare(self, heap: Heap) -> None:
        """Before `train`. Notes have their memory from the start: they must not look like growth."""
        steps = self.job.train.steps
        self.heap, self.found = heap, Found(np.zeros(steps), np.zeros(steps))
        self.looks = {WARMUP + (steps - WARMUP) * part // 8 - 1 for part in range(1, 9)} | {WARMUP}

    def _train_step(self) -> bool:
        step = self.step
        if step == WARMUP:
            self.found.collections = Collections()
            gc.callbacks.append(self.found.collections.note)
        self.found.begun[step] = time.time()
        stopping = super()._train_step()
        newest = self.recorder.ring.newest()
        reduces = [n for n, name in enumerate(newest.names) if name in ("reduce", "start_reduce")]
        of_step = newest.records[newest.records["step"] == step + 1]
        self.found.launched[step] = of_step["start_ns"][np.isin(of_step["name"], reduces)].min() / 1e9
        self.heap.turn_over()
        return stopping

    def _after_step(self, *, is_last: bool, stopping: bool) -> None:
        if self.step - 1 in self.looks:
            self.found.memory_bytes.append(private_bytes())
            self.found.objects.append(len(gc.get_objects()) + gc.get_freeze_count())
        if not is_last:
            super()._after_step(is_last=is_last, stopping=stopping)


def private_bytes() -> int:
    """Private anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def train(setting: Setting, run: Run) -> None:
    """One rank's side; leaves its notes in the run folder."""
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    trainer = WatchedRun(run)
    trainer.prepare(Heap(setting.entries, rank))
    if setting.freezes:
        trainer.train()
    else:
        with mock.patch.object(gc, "freeze"):
            trainer.train()
    gc.callbacks.clear()
    trainer.close()
    (run.path / f"found-{rank}").write_bytes(pickle.dumps(trainer.found))


@dataclass(frozen=True)
class Row:
    """What a setting came to; times in milliseconds."""

    setting: str
    steps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    mean_ms: float
    slope_ms_per_1000_steps: float
    slope_interval_ms: float
    """Half of its 95 % confidence interval."""
    launch_spread_p50_ms: float
    launch_spread_p99_ms: float
    collecting_percent: float
    """Share of a rank's time, mean of the ranks."""
    full_collections: float
    """Number per rank, mean of the ranks."""
    longest_collection_ms: float
    growth_kib: list[list[float]]
    """Private memory of each rank since its first look, at each later one."""
    growth_objects: list[int]
    """Tracked objects of each rank, from its first look to its last."""


def slope(seconds: np.ndarray) -> tuple[float, float]:
    """Least squares over the means of stretches: milliseconds per 1,000 steps, and half its 95 % interval."""
    means = np.array([part.mean() for part in np.array_split(seconds, BLOCKS)]) * 1e3
    x = (np.arange(BLOCKS) + 0.5) * len(seconds) / BLOCKS / 1e3
    x -= x.mean()
    rate = (x * means).sum() / (x * x).sum()
    rest = means - means.mean() - rate * x
    error = np.sqrt((rest * rest).sum() / (BLOCKS - 2) / (x * x).sum())
    return float(rate), float(STUDENT_T * error)


def summarise(setting: Setting, ranks: list[Found]) -> Row:
    """From all ranks' notes to one row."""
    seconds = np.diff(ranks[0].begun[WARMUP:])
    spread = np.ptp(np.array([found.launched[WARMUP:] for found in ranks]), axis=0)
    rate, interval = slope(seconds)
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    spread50, spread99 = np.percentile(spread, [50, 99]) * 1e3
    collections = [found.collections for found in ranks]
    return Row(
        setting=setting.name,
        steps=len(seconds),
        p50_ms=float(p50),
        p99_ms=float(p99),
        max_ms=float(seconds.max() * 1e3),
        mean_ms=float(seconds.mean() * 1e3),
        slope_ms_per_1000_steps=rate,
        slope_interval_ms=interval,
        launch_spread_p50_ms=float(spread50),
        launch_spread_p99_ms=float(spread99),
        collecting_percent=100 * sum(c.seconds for c in collections) / len(ranks) / float(seconds.sum()),
        full_collections=statistics.mean(c.number_of_full for c in collections),
        longest_collection_ms=1e3 * max(c.longest_seconds for c in collections),
        growth_kib=[[(m - found.memory_bytes[0]) / 1024 for m in found.memory_bytes[1:]] for found in ranks],
        growth_objects=[found.objects[-1] - found.objects[0] for found in ranks],
    )


def measure(setting: Setting, steps: int) -> Row:
    """Runs the ranks of one setting."""
    overrides = JOB | {"train.steps": steps + WARMUP, "train.collect_garbage_every": setting.every}
    command = [sys.executable, __file__, "--rank", json.dumps(asdict(setting))]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        run.create_or_resume(load_job("tiny", [f"{key}={value}" for key, value in overrides.items()]))
        run_local(run, RANKS, threads=1, command=command)
        notes = [pickle.loads((run.path / f"found-{rank}").read_bytes()) for rank in range(RANKS)]
    return summarise(setting, notes)


def line(row: Row) -> str:
    """A line of the table."""
    growth = max(kib[-1] - kib[len(kib) // 2] for kib in row.growth_kib)
    cells = [
        row.setting,
        f"{row.p50_ms:.2f}",
        f"{row.p99_ms:.2f}",
        f"{row.max_ms:.1f}",
        f"{row.mean_ms:.2f}",
        f"{row.slope_ms_per_1000_steps:+.3f} ± {row.slope_interval_ms:.3f}",
        f"{row.launch_spread_p50_ms:.2f}",
        f"{row.launch_spread_p99_ms:.2f}",
        f"{row.collecting_percent:.2f}",
        f"{row.full_collections:g}",
        f"{row.longest_collection_ms:.1f}",
        f"{growth:+.0f}",
        f"{max(row.growth_objects):+d}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "collector, p50, p99, max, mean, slope, spread p50, spread p99, "
    "collecting %, full, longest, memory, objects"
)
LEGEND = """
Milliseconds a step; slope: of a step over 1,000 steps, with its 95 % interval; spread: between the ranks'
launches; collecting: share of a rank's time; full: collections of everything, a rank; longest: ms of one;
memory: KiB by which a rank's private memory grew over the second half; objects: tracked ones more, in all."""


def groups(every: int, entries: int) -> dict[str, tuple[Setting, ...]]:
    """The tables and their rows."""
    schedule = f"Myriad's, every {every}"
    return {
        "The job alone": (Setting("Python's", 0, 0), Setting(schedule, every, 0)),
        f"With a synthetic heap of {entries:,} entries": (
            Setting("Python's", 0, entries),
            Setting(f"{schedule}, not frozen", every, entries, freezes=False),
            Setting(schedule, every, entries),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Step times and launch times over thousands of steps.")
    parser.add_argument("--steps", type=int, default=2000, help="counted steps of each setting")
    parser.add_argument("--every", type=int, default=100, help="steps between scheduled collections")
    parser.add_argument("--entries", type=int, default=1_000_000, help="of the synthetic heap")
    parser.add_argument("--quick", action="store_true", help="300 steps, 200,000 entries")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--rank", nargs=2, metavar=("SETTING", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return train(Setting(**json.loads(options.rank[0])), Run(options.rank[1]))
    steps, entries = (300, 200_000) if options.quick else (options.steps, options.entries)
    rows: dict[str, list[Row]] = {}
    for title, settings in groups(options.every, entries).items():
        if not options.json:
            names = HEAD.split(", ")
            print(f"\n{title}; {steps} steps\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|")
        rows[title] = []
        for setting in settings:
            rows[title].append(measure(setting, steps))
            if not options.json:
                print(line(rows[title][-1]), flush=True)
    print(json.dumps(rows, default=asdict) if options.json else LEGEND)


if __name__ == "__main__":
    main()
