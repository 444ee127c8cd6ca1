"""What it costs a node to ship its ranks' spans: bytes of the disk and of memory, and share of a core.

    python benchmarks/telemetry/shipping.py [--ranks 8] [--spans-per-second 500] [--seconds 20]

Rings are filled by this process at the given rate, with the times of a 1F1B pipeline whose durations vary by
5 %; the shipper does what it does in an executor. Its processor time is the process's without that of the
thread that fills. It is compared with what a step of each rank has: all of one core a rank.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.shipping.shipper import Shipper, open_outlets
from myriad.telemetry.span_io.span_files import read_facts, read_span_file, span_files
from myriad.telemetry.span_io.span_ring import SpanRings, ring_at
from myriad.telemetry.spans import Recorder

PROGRAM = ("receive", "forward", "send", "receive", "backward", "send")
SHARES = (0.004, 0.33, 0.003, 0.004, 0.65, 0.003)
MICRO_BATCHES = 16
TICK_SECONDS = 0.1


class Rank:
    """Writes spans at a steady rate, as if it had taken that time."""

    def __init__(self, rings: SpanRings, rank: int, per_second: int) -> None:
        self._recorder = Recorder(ring=ring_at(rings.address(rank), attempt=1), rank=rank)
        self._spans = [
            self._recorder.span(name, rank % 4, micro_batch)
            for micro_batch in range(MICRO_BATCHES)
            for name in PROGRAM
        ]
        self._random = np.random.default_rng(rank)
        self._mean_ns = 1e9 * len(PROGRAM) / per_second
        self._now_ns, self._count, self._step = time.monotonic_ns(), 0, 0

    def fill(self) -> None:
        """Until now."""
        until = time.monotonic_ns()
        noise = np.exp(self._random.normal(0, 0.05, 4096)).tolist()
        while self._now_ns < until:
            place = self._count % len(self._spans)
            if place == 0:
                self._step += 1
                self._recorder.step(self._step)
            took = int(self._mean_ns * SHARES[place % len(PROGRAM)] * noise[self._count % 4096])
            self._recorder.write(self._now_ns, took, self._recorder.when, self._spans[place]._what)
            self._now_ns += took + int(self._mean_ns * 0.001)
            self._count += 1


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--spans-per-second", type=int, default=500, help="of each rank")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.ranks, given.spans_per_second, given.seconds)


def measure(folder: Path, num_ranks: int, per_second: int, seconds: float) -> None:
    """One node for so long."""
    rings = SpanRings(num_ranks)
    how = TelemetryConfig()
    outlets = open_outlets(folder, "node-0", "bench", how, lambda *told: print(*told))
    shipper = Shipper(rings, 0, outlets, lambda now_ns: (0, 0.0))
    shipper.begin(num_ranks)
    ranks = [Rank(rings, rank, per_second) for rank in range(num_ranks)]
    until(how.file_seconds + 2.0, ranks)  # what is imported once is no matter of a run of weeks
    memory, own, all_of_it = peak_bytes(), time.thread_time(), time.process_time()
    began = time.monotonic()
    until(seconds, ranks)
    shipped = (time.process_time() - all_of_it) - (time.thread_time() - own)
    wall = time.monotonic() - began
    shipper.close()
    facts = [read_facts(path) for path in span_files(folder)]
    spans, stored = sum(one.num_spans for one in facts), sum(one.num_bytes for one in facts)
    began = time.perf_counter()
    for path in span_files(folder):
        read_span_file(path)
    read = spans / (time.perf_counter() - began)
    print(f"{num_ranks} ranks, {per_second} spans/s each, {wall:.0f} s")
    print(
        f"files                    {len(facts)}, {spans} spans, {sum(f.num_dropped for f in facts)} dropped"
    )
    print(f"disk                     {stored / spans:.1f} bytes a span")
    print(f"processor                {shipped / wall:.3%} of a core, {shipped / wall / num_ranks:.4%} a rank")
    print(f"memory while it ran      {(peak_bytes() - memory) / 2**20:.1f} MiB more")
    print(f"read                     {read / 1e6:.1f} M spans/s")


def until(seconds: float, ranks: list[Rank]) -> None:
    """Fills the rings for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in ranks:
            rank.fill()
        time.sleep(TICK_SECONDS)


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
