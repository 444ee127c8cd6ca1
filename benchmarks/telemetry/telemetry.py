"""What spans cost a training step: ranks that record beside the same ranks that do not, in turns.

    python benchmarks/telemetry/telemetry.py [tiny] [--steps 200] [--layout.pp 2 --layout.dp 1 ...]

a span      one alone, in a loop: entered, left, written to a ring, shown on a progress page
ranks       real ones of the job, a step with spans, one without, and so on: how much longer the first take
            (median of the differences of neighbours, with the 95 % interval of a bootstrap)
a device    what reading the spans of a GPU's step asks of its events, which are counted here, not a GPU's: 32
            layers, 8 micro-batches, with tensor parallelism and without
shipping    a process that takes the spans out of the rings once a second and writes Parquet, as an executor
            does: its processor time. Where ranks take all cores that is a step's time too, at most its share
            of all cores
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from myriad.comm.groups import close_world
from myriad.job import Job, load_job
from myriad.telemetry import spans as spans_module
from myriad.telemetry.progress.device_clock import DeviceClock
from myriad.telemetry.progress.progress_page import ProgressRow
from myriad.telemetry.shipping.shipper import Shipper, open_outlets
from myriad.telemetry.span_io.span_ring import SPANS, SpanRing, SpanRings, own_ring
from myriad.telemetry.spans import Recorder
from myriad.train.device_setup import pick_device, read_rank_environment

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from digests import make_engine

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from ranks import run_ranks

ALONE = 200_000
MICRO_BATCHES, TENSOR_COMMS = 8, 32 * 8
"""Spans of one step on a device: 32 layers wait for their tensor-parallel peers eight times each way."""
FIRST = 10
"""Steps that are not counted at the start."""
DRAWS = 4_000
"""Resamples of the bootstrap that gives the confidence interval."""


def seconds_disconnected() -> float:
    """Return the seconds of an empty span whose object is looked up once, as in the runtime."""
    recorder = Recorder(row=ProgressRow.unseen())
    recorder.step(1)
    span = recorder.span("await_reduce", 3, 17)
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(ALONE):
            with span:
                pass
        both = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(ALONE):
            pass
        found.append((both - (time.perf_counter() - began)) / ALONE)
    return float(np.median(found))


class CountedEvent:
    """A device's that has always passed."""

    asked: ClassVar = Counter[str]()

    def record(self) -> None:
        self.asked["marks"] += 1

    def query(self) -> bool:
        self.asked["queries"] += 1
        return True

    def elapsed_time(self, end: "CountedEvent") -> float:
        self.asked["times"] += 1
        return 0.1

    def synchronize(self) -> None:
        self.asked["waits"] += 1


def asked_of_device(tensor_comms: int) -> tuple[int, Counter[str], float]:
    """Spans of a step of which each forward and backward has so many ``tensor_comms``, calls of its events,
    and seconds in which they are read; the second step of two: events are there."""
    recorder = Recorder(ProgressRow.unseen(), SpanRing.of_its_own(2**15), device=DeviceClock(CountedEvent))
    inner = recorder.span("tensor_comm")
    actions = [
        recorder.span(name, 0, micro_batch, follows=bool(micro_batch or name != "load"))
        for name in ("load", "forward", "backward", "update")
        for micro_batch in range(MICRO_BATCHES if name in ("forward", "backward") else 1)
    ]
    for step in range(2):
        recorder.step(step)
        written = recorder.written
        CountedEvent.asked.clear()
        for action in actions:
            with action:
                for _ in range(tensor_comms if action.name in ("forward", "backward") else 0):
                    with inner:
                        pass
        began = time.perf_counter()
        recorder.collect()
        seconds = time.perf_counter() - began
    return recorder.written - written, CountedEvent.asked, seconds


def switch(on: bool) -> None:
    """Spans are recorded from here on, or nothing is."""
    timed: Any = spans_module._Timed
    timed.__enter__, timed.__exit__ = _ON if on else (_enter_nothing, _leave_nothing)


_ON = spans_module._Timed.__enter__, spans_module._Timed.__exit__
_enter_nothing = lambda self: None  # noqa: E731
_leave_nothing = lambda self, *why: None  # noqa: E731


def measure(job: Job, pairs: int, rings: SpanRings) -> tuple[list[float], list[float], float]:
    """One rank's seconds of steps with spans and without, and spans of a step."""
    place = read_rank_environment(job.layout.world, job.comm)
    os.environ[SPANS] = rings.address(place.rank)
    recorder = Recorder(ProgressRow.unseen(), own_ring(), place.rank)
    engine, batch = make_engine(job, pick_device("cpu", 1, place), recorder)
    targets = job.train.global_batch * job.model.sequence
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(FIRST + 2 * pairs):
        turn = step % 4 in (0, 3)  # on off off on: a drift favours neither
        switch(on=turn)
        recorder.step(step)
        began = time.perf_counter()
        engine.train_step(lambda: batch, 1e-4, targets)
        if step >= FIRST:
            seconds[not turn].append(time.perf_counter() - began)
    written = recorder.written / (FIRST / 2 + pairs)
    engine.close()
    close_world()
    return *seconds, written


def ship(rings: SpanRings, ranks: int, folder: Path, ready: Any, ended: Any, told: Any) -> None:
    """As an executor does; tells its processor time and how long it was at it, once a first file is there:
    what it imports for that is not what it costs."""
    job = load_job("tiny")
    outlets = open_outlets(folder, "node-0", "run", job.telemetry, lambda event, **fields: None)
    shipper = Shipper(rings, 0, outlets, lambda now_ns: (0, 0.0))
    shipper.begin(ranks)
    ready.set()
    while not list(folder.iterdir()) and not ended.wait(0.05):
        pass
    began, used = time.monotonic(), time.process_time()
    ended.wait()
    shipper.close()
    told.put(((time.process_time() - used), time.monotonic() - began))


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", nargs="?", default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="with spans, and as many without")
    options, rest = parser.parse_known_args(arguments)
    given = zip(rest[::2], rest[1::2], strict=True)
    job = load_job(options.job, [f"{key.removeprefix('--')}={value}" for key, value in given])
    alone = seconds_disconnected()
    rings = SpanRings(job.layout.world)
    context = multiprocessing.get_context("fork")
    ready, ended, told = context.Event(), context.Event(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments_of_ship = (rings, job.layout.world, Path(folder), ready, ended, told)
        shipping = context.Process(target=ship, args=arguments_of_ship)
        shipping.start()
        ready.wait()
        of_rank = run_ranks(job.layout.world, measure, job, options.steps, rings)
        ended.set()
        used, during = told.get()
        shipping.join()
    report(job, alone, of_rank, used / during)


def report(
    job: Job, alone: float, of_rank: Sequence[tuple[list[float], list[float], float]], share: float
) -> None:
    """All ranks end a step together: the first speaks for them."""
    on, off, spans = np.array(of_rank[0][0]), np.array(of_rank[0][1]), of_rank[0][2]
    pairs = min(len(on), len(off))
    differences, step = on[:pairs] - off[:pairs], float(np.median(off))
    draws = np.random.default_rng(1).choice(differences, (DRAWS, pairs))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5]) / step
    cores = len(os.sched_getaffinity(0))
    layout = " ".join(f"{axis}={getattr(job.layout, axis)}" for axis in ("dp", "pp", "tp", "zero"))
    print(f"{job.name}: {layout}; a step of {1e3 * step:.1f} ms with {spans:.0f} spans a rank, {pairs} pairs")
    print(f"a span alone      {1e6 * alone:.2f} us; those of a step {spans * alone / step:.4%} of it")
    print(
        f"with and without  {np.median(differences) / step:+.3%} of a step (95 %: {low:+.3%} to {high:+.3%})"
    )
    for name, tensor_comms in (("tp 1", 0), ("tp 8", TENSOR_COMMS)):
        spans_read, asked, seconds = asked_of_device(tensor_comms)
        calls = ", ".join(f"{asked[what]} {what}" for what in ("marks", "times", "queries", "waits"))
        print(f"a device, {name}    {spans_read} spans: {calls}; read in {1e3 * seconds:.1f} ms of Python")
    print(f"shipping          {share:.3%} of a core, {share / cores:.4%} of all {cores}")


if __name__ == "__main__":
    main(sys.argv[1:])
