"""LAMB at 4 x the batch against AdamW: the same real text, the same number of tokens.

    python benchmarks/lamb.py [--tokens 600000] [--svg docs/lamb.svg]

Trains the embedded job's model on the standard library's source with each setting, one after the other, and
prints the validation loss that each reaches. Both optimizers get the same small search over learning rates:
the best of each counts (You et al. 2019, arXiv 1904.00962; MegaScale, section 3.1, uses LAMB to train with 4
x the batch).
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from myriad.cli.plot import Series, lines_svg
from myriad.job import load_job
from myriad.resilience.engines.local import run_local
from myriad.run import Run

SEQUENCE, BATCH = 128, 4
ADAMW_RATES = (1.5e-3, 3e-3)
LAMB_RATES = (3e-2, 6e-2)


@dataclass(frozen=True)
class Result:
    optimizer: str
    batch: int
    learning_rate: float
    steps: int
    loss: float
    curve: Series


def train(optimizer: str, batch: int, learning_rate: float, tokens: int, folder: Path) -> Result:
    steps = tokens // (batch * SEQUENCE)
    overrides = {
        "model.layers": 3,
        "model.hidden": 128,
        "model.heads": 4,
        "model.sequence": SEQUENCE,
        "layout.dp": 2,
        "layout.micro_batch": BATCH // 2,
        "train.steps": steps,
        "train.global_batch": batch,
        "train.validate_every": 0,
        "train.sample_prompt": "off",
        "data.validation_batches": 256 // batch,
        "optimizer.name": optimizer,
        "optimizer.learning_rate": learning_rate,
        "optimizer.warmup_steps": max(1, steps // 20),
    }
    job = load_job("embedded", [f"{key}={value}" for key, value in overrides.items()])
    run = Run(folder / f"{optimizer}-{batch}-{learning_rate:g}")
    run.create_or_resume(job)
    run_local(run, job.layout.world)
    last = [event for event in run.read_events() if event["event"] == "validation"][-1]
    curve = [(line["tokens"], line["loss"]) for line in run.read_metrics()]
    return Result(optimizer, batch, learning_rate, steps, last["loss"], curve)


def best(optimizer: str, batch: int, rates: tuple[float, ...], tokens: int, folder: Path) -> Result:
    found = [train(optimizer, batch, rate, tokens, folder) for rate in rates]
    for result in found:
        cells = (
            result.optimizer,
            result.batch,
            f"{result.learning_rate:g}",
            result.steps,
            f"{result.loss:.4f}",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return min(found, key=lambda result: result.loss)


def draw(results: tuple[Result, ...], path: Path) -> None:
    lines = {f"{r.optimizer}, batch {r.batch}: {r.loss:.3f}": r.curve for r in results}
    path.write_text(lines_svg(lines, "LAMB at 4 x the batch, same text, same tokens", "tokens"))


def main() -> None:
    parser = argparse.ArgumentParser(description="LAMB at 4 x the batch against AdamW, same tokens.")
    parser.add_argument("--tokens", type=int, default=600_000, help="tokens of each training")
    parser.add_argument("--svg", type=Path, help="where to draw the three losses")
    options = parser.parse_args()
    print("| optimizer | batch | learning rate | steps | validation loss |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        small, large, lamb = (
            best(*setting, options.tokens, Path(folder))
            for setting in (
                ("adamw", BATCH, ADAMW_RATES),
                ("adamw", 4 * BATCH, ADAMW_RATES),
                ("lamb", 4 * BATCH, LAMB_RATES),
            )
        )
    print(f"\nbest AdamW, batch {BATCH}: {small.loss:.4f}; best AdamW, batch {4 * BATCH}: {large.loss:.4f}")
    print(f"best LAMB, batch {4 * BATCH}: {lamb.loss:.4f}, {lamb.loss - small.loss:+.4f} to AdamW's")
    if options.svg:
        draw((small, large, lamb), options.svg)


if __name__ == "__main__":
    main()
