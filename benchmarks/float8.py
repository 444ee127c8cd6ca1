"""Training in float8 against bfloat16: the same model, text and order of samples, three losses.

    python benchmarks/float8.py [--steps 200] [--svg docs/float8.svg]

On a CPU float8 is emulated by the very code that scales and rounds on a GPU (`myriad.kernels.float8`), so the
curves are those of the numbers, not of the time. The distance between two seeds in bfloat16 stands beside the
others: it is what chance alone makes.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from myriad.cli.plot import Series, lines_svg, smooth
from myriad.job import load_job
from myriad.resilience.engines.local import run_local
from myriad.run import Run

RUNS = (("bfloat16", 1), ("float8", 1), ("float8-blocks", 1), ("bfloat16", 2))
"""Precision and seed."""
LAST = 0.1
"""Of the steps, over which the loss is averaged at the end."""


@dataclass(frozen=True)
class Result:
    """One training."""

    name: str
    validation: float
    last: float
    curve: Series


def train(precision: str, seed: int, options: argparse.Namespace, folder: Path) -> Result:
    """One of them."""
    overrides = {
        "model.hidden": options.hidden,
        "layout.micro_batch": 8,
        "train.steps": options.steps,
        "train.seed": seed,
        "train.precision": precision,
        "train.sample_prompt": "off",
        "optimizer.warmup_steps": max(1, options.steps // 20),
    }
    job = load_job("tiny", [f"{key}={value}" for key, value in overrides.items()])
    run = Run(folder / f"{precision}-{seed}")
    run.create_or_resume(job)
    run_local(run, job.layout.world)
    found = [event for event in run.read_events() if event["event"] == "validation"][-1]
    curve = [(line["step"], line["loss"]) for line in run.read_metrics()]
    tail = curve[-max(1, int(LAST * len(curve))) :]
    name = precision if seed == 1 else f"{precision}, another seed"
    return Result(name, found["loss"], sum(loss for _, loss in tail) / len(tail), curve)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description="Losses in float8 and in bfloat16.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--svg", type=Path, help="where to draw the losses")
    options = parser.parse_args()
    print(f"tiny with model.hidden {options.hidden}, {options.steps} steps of 8 x 64 tokens")
    print(f"{'':28}{'loss, last tenth':>18}{'validation':>12}{'to bfloat16':>13}")
    with tempfile.TemporaryDirectory() as folder:
        results: list[Result] = []
        for precision, seed in RUNS:
            results.append(train(precision, seed, options, Path(folder)))
            one = results[-1]
            off = one.validation / results[0].validation - 1
            print(f"{one.name:28}{one.last:>18.4f}{one.validation:>12.4f}{off:>+13.2%}", flush=True)
    if options.svg:
        lines = {f"{r.name}: {r.validation:.3f}": smooth(r.curve) for r in results}
        options.svg.write_text(lines_svg(lines, "tiny in float8, emulated on a CPU", "steps"))


if __name__ == "__main__":
    main()
