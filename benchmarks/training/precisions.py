"""Training in one precision against others: the same model, text and order of samples.

    python benchmarks/training/precisions.py [--steps 200] [--svg docs/images/float8.svg]
    python benchmarks/training/precisions.py --reference float32 --others float16 bfloat16 --steps 300

On a CPU float8 is emulated by the very code that scales and rounds on a GPU (`myriad.kernels.float8`), so the
curves are those of the numbers, not of the time. The distance between two seeds of the reference stands
beside the others: it is what chance alone makes.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.reports.charts.loss_chart import Series, lines_svg, smooth
from myriad.run import Run

LAST = 0.1
"""Share of the steps at the end over which the loss is averaged."""


@dataclass(frozen=True)
class Result:
    """One training."""

    name: str
    validation: float
    last: float
    curve: Series
    num_skipped: int
    """Steps in which float16 overflowed."""

    def distance(self, other: "Result") -> float:
        """Mean over the steps of the relative difference of losses."""
        pairs = zip(self.curve, other.curve, strict=True)
        return sum(abs(a / b - 1) for (_, a), (_, b) in pairs) / len(self.curve)


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
    lines = run.read_metrics()
    curve = [(line["step"], line["loss"]) for line in lines]
    tail = curve[-max(1, int(LAST * len(curve))) :]
    name = precision if seed == 1 else f"{precision}, another seed"
    skipped = sum(line.get("overflow") == 1 for line in lines)
    return Result(name, found["loss"], sum(loss for _, loss in tail) / len(tail), curve, skipped)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description="Losses in several precisions.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--reference", default="bfloat16", help="the precision that others are compared with")
    parser.add_argument("--others", nargs="+", default=["float8", "float8-blocks"])
    parser.add_argument("--svg", type=Path, help="where to draw the losses")
    options = parser.parse_args()
    reference = options.reference
    print(f"tiny with model.hidden {options.hidden}, {options.steps} steps of 8 x 64 tokens")
    headings = ("loss, last tenth", "validation", f"to {reference}", "of each step", "skipped")
    print(f"{'':28}" + "".join(f"{heading:>18}" for heading in headings))
    with tempfile.TemporaryDirectory() as folder:
        results: list[Result] = []
        for precision, seed in ((reference, 1), *((other, 1) for other in options.others), (reference, 2)):
            results.append(train(precision, seed, options, Path(folder)))
            one = results[-1]
            off, each = one.validation / results[0].validation - 1, one.distance(results[0])
            figures = (
                f"{one.last:>18.4f}{one.validation:>18.4f}{off:>+18.2%}{each:>18.3%}{one.num_skipped:>18}"
            )
            print(f"{one.name:28}{figures}", flush=True)
    if options.svg:
        lines = {f"{r.name}: {r.validation:.3f}": smooth(r.curve) for r in results}
        title = f"tiny in {', '.join((reference, *options.others))}, on a CPU"
        options.svg.write_text(lines_svg(lines, title, "steps"))


if __name__ == "__main__":
    main()
