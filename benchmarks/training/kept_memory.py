"""An iteration on CPUs whose ranks keep the memory that they free, beside one whose memory goes back.

    python benchmarks/training/kept_memory.py [--rounds 5] [--steps 8]

The GPT of the rehearsals on two ranks (`rehearsal_cases.py`, "dp2 off"), each way by ranks of its own, in
turns; with the seconds of one product of matrices in the same ranks (`PacedTimer`).
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import myriad.parallel.forward_engine as engine_module
from digests import make_engine, seconds_of
from myriad.comm.groups import close_world
from myriad.job import Job
from myriad.kernels.host_memory import keep_freed_memory
from myriad.train.calibration.compute_timings import PacedTimer

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

from rehearsal_cases import CASES

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from ranks import run_ranks

_CPU = torch.device("cpu")


def measure(job: Job, steps: int, keeps: bool) -> tuple[float, float]:
    """Seconds of one rank's iteration (median) and of its product."""
    if keeps:
        keep_freed_memory()
    else:
        engine_module.keep_freed_memory = lambda: False
    engine, batch = make_engine(job, _CPU)
    product = PacedTimer().nominal_seconds
    targets = job.train.global_batch * job.model.sequence
    taken = [seconds_of(lambda: engine.train_step(lambda: batch, 1e-4, targets), _CPU) for _ in range(steps)]
    engine.close()
    close_world()
    return statistics.median(taken), product


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What it brings that ranks keep memory that they free.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    job = CASES[0].job
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.rounds):
        for keeps, rows in found.items():
            rows += run_ranks(job.layout.world, measure, job, options.steps, keeps)
    print(
        "| freed memory | an iteration, ms (least to most) | a product, ms (least to most) |\n|---|---|---|"
    )
    for keeps, rows in found.items():
        cells = (_told(each) for each in zip(*rows, strict=True))
        print(f"| {'kept' if keeps else 'returned'} | {' | '.join(cells)} |")
    returned, kept = (statistics.median(row[0] for row in rows) for rows in found.values())
    print(f"\nkept: {1 - kept / returned:.0%} less time for an iteration")


def _told(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"


if __name__ == "__main__":
    main(sys.argv[1:])
