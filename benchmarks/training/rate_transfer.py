"""Best learning rate at several widths, with maximal update parametrization and without it.

    python benchmarks/training/rate_transfer.py [--widths 64 256] [--steps 60] [--rates 0.001 0.002 ...]

Each width, parametrization and rate trains the job `tiny` in this process, on the same text in the same
order. The base of `model.mup_base_width` is the smallest width, where both train the same model but for the
scale of attention. Losses are those of validation after the last step, in nats per token.
"""

import argparse
import tempfile
from pathlib import Path

from myriad.api import load_job, train

RATES = (0.001, 0.002, 0.004, 0.008, 0.016)


def loss_of(width: int, base: int | None, rate: float, steps: int, folder: Path) -> float:
    """Train once and return the validation loss at the end."""
    overrides = {
        "model.hidden": width,
        "model.mup_base_width": "off" if base is None else base,
        "optimizer.learning_rate": rate,
        "optimizer.epsilon": 1e-8,
        "optimizer.warmup_steps": max(1, steps // 10),
        "layout.micro_batch": 32,
        "train.global_batch": 32,
        "train.steps": steps,
        "train.precision": "float32",
        "train.validate_every": steps,
        "train.sample_prompt": "off",
        "checkpoint.every": steps,
    }
    job = load_job("tiny", [f"{key}={value}" for key, value in overrides.items()])
    run = train(job, run=folder / f"{width}-{base}-{rate}")
    loss: float = [event["loss"] for event in run.read_events() if event["event"] == "validation"][-1]
    return loss


def main() -> None:
    """Train all and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    options = parser.parse_args()
    headings = "".join(f" {rate:g} |" for rate in options.rates)
    print(f"| parametrization | width |{headings} best |\n|---|---|{'---|' * len(options.rates)}---|")
    with tempfile.TemporaryDirectory() as folder:
        for base in (None, min(options.widths)):
            for width in options.widths:
                losses = {
                    rate: loss_of(width, base, rate, options.steps, Path(folder)) for rate in options.rates
                }
                best = min(losses, key=losses.__getitem__)
                values = "".join(f" {loss:.3f} |" for loss in losses.values())
                name = "standard" if base is None else "maximal update"
                print(f"| {name} | {width} |{values} {best:g} |", flush=True)


if __name__ == "__main__":
    main()
