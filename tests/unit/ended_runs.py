"""Run folders as runs of six steps leave them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from myriad.job import load_job
from myriad.run import Run

AT = 1_700_000_000.0


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(
    folder: Path, *overrides: str, loss: float = 4.0, end: str = "finish", at: float = AT, steps: int = 6
) -> Run:
    """A run of six planned steps whose loss falls to ``loss``."""
    run = Run(folder)
    run.create_or_resume(load_job("tiny", ["train.steps=6", *overrides]))
    write_lines(
        run.metrics_path,
        [
            {
                "step": step,
                "time": at + 10 * step,
                "loss": loss + steps - step,
                "step_seconds": 10.0,
                "tokens": 100 * step,
                "tokens_per_second": 10.0,
                "flops": 500.0,
            }
            for step in range(1, steps + 1)
        ],
    )
    start = {"event": "start", "time": at, "world": 1, "device": "cpu", "precision": "float32", "threads": 1}
    ends = [{"event": end, "time": at + 70, "step": steps}] if end else []
    validations = [
        {"event": "validation", "time": at + 10 * step, "step": step, "loss": value}
        for step, value in ((2, loss + 3), (4, loss + 0.25), (6, loss + 0.5))
        if step <= steps
    ]
    write_lines(run.events_path, [start | {"peak_flops": 100.0, "peak_source": "known"}, *validations, *ends])
    return run
