"""What it costs to keep every step: the job of `make train` with a snapshot after each step, and with none.

    python benchmarks/checkpoint/checkpoint_every_step.py                two ranks, 300 steps, five turns each
    python benchmarks/checkpoint/checkpoint_every_step.py --every 1 10   other intervals as well

A snapshot is parameters and optimizer state in memory that outlives the rank, hashed by the snapshot server
of the node. Stall is what training waited for (``checkpoint_wait_seconds`` of metrics.jsonl, rank 0); the
last column is what a step took longer than without snapshots: the snapshot server shares the cores with the
ranks."""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from myriad.job import load_job
from myriad.launchers.local import num_cores, run_local
from myriad.run import Run
from myriad.train.inputs import open_inputs

_WARM_UP_STEPS = 20


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, nargs="+", default=[1], help="steps between snapshots (1)")
    parser.add_argument("--steps", type=int, default=300, help="of each turn (300)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--job", default="embedded", help="a job (embedded)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args(arguments)


def turn(job: str, steps: int, every: int, folder: Path) -> list[dict[str, Any]]:
    """The metrics of one run's steps, without its first ones. ``every`` 0: no snapshots."""
    ranks = min(2, num_cores())
    keys = [f"layout.dp={ranks}", f"train.steps={steps}", f"checkpoint.memory_every={every}"]
    keys += [
        "checkpoint.memory_seconds=0",
        "checkpoint.every=0",
        "checkpoint.linger_seconds=0",
        "data.validation_batches=0",
    ]
    keys += ["train.validate_every=0", "train.sample_prompt=off"]
    resolved, run = load_job(job, keys), Run(folder)
    open_inputs(resolved, lambda stage: None)
    run.create_or_resume(resolved)
    run_local(run, ranks)
    return run.read_metrics()[_WARM_UP_STEPS:-1]


def row(every: int, lines: Sequence[dict[str, Any]], without: float) -> dict[str, Any]:
    """Figures of all turns of one interval; ``without``: mean step without snapshots, seconds."""
    stalls = sorted(line["checkpoint_wait_seconds"] for line in lines)
    steps = [line["step_seconds"] for line in lines]
    return {
        "every": every,
        "steps": len(lines),
        "stall_p50_ms": 1e3 * stalls[len(stalls) // 2],
        "stall_p99_ms": 1e3 * stalls[int(0.99 * len(stalls))],
        "stall_share": sum(stalls) / sum(steps),
        "step_ms": 1e3 * statistics.median(steps),
        "longer": statistics.median(steps) / without - 1,
    }


def main(arguments: Sequence[str]) -> int:
    """Runs all turns and prints a table."""
    chosen = parse(arguments)
    found: dict[int, list[dict[str, Any]]] = {every: [] for every in (0, *chosen.every)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(chosen.rounds):
            for every in found:
                sys.stderr.write(f"round {number + 1} of {chosen.rounds}, every {every or 'never'}\n")
                found[every] += turn(chosen.job, chosen.steps, every, Path(folder) / f"{every}-{number}")
    without = statistics.median(line["step_seconds"] for line in found[0])
    rows = [row(every, lines, without) for every, lines in found.items()]
    print("| snapshot every | steps | stall p50, ms | p99 | stall / step | step, ms | longer than without |")
    print("|---|---|---|---|---|---|---|")
    for one in rows:
        every, stalls = one["every"] or "never", f"{one['stall_p50_ms']:.3f} | {one['stall_p99_ms']:.3f}"
        share, longer = f"{one['stall_share']:.2%}", f"{one['longer']:+.1%}"
        print(f"| {every} | {one['steps']} | {stalls} | {share} | {one['step_ms']:.1f} | {longer} |")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
