"""Train on sequences of 65,536 tokens, and show what a model gains from each position before.

    python benchmarks/training/long_context.py --folder FOLDER [--svg FILE]

A model of 0.9 million parameters learns Python source in windows of 2,048 tokens, and then, as a phase of the
same run, in windows of 65,536 tokens that two processes share (``layout.cp`` 2). Two of its three layers have
attention windows of 128 positions, the third sees all. Then the loss of each position of held-out windows of
65,536 tokens is computed by the state before that phase and by the one after it, and by the latter where it
reads 2,048 tokens at a time. What the text says makes some positions harder than others, for all three alike.

The text is the Python standard library and the installed packages, all files of a package one after another.
Packages that PyTorch needs (`HELD_OUT`) are the test.

Each stage is a command as a user types it: ``data prepare``, ``train``. A stage that has ended is not
repeated, so that an interrupted command continues.
"""

import argparse
import json
import math
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from myriad.data.corpus_opening import open_corpus
from myriad.model.definition import Context
from myriad.model.interleave import run_layers
from myriad.model.token_record import TokenRecord
from myriad.reports.charts.svg import (
    INK,
    SERIES,
    document,
    legend,
    log_ticks,
    polyline,
    round_ticks,
    rule,
    text,
)
from myriad.run import Run
from myriad.train.checkpoint_tools.whole_model import open_checkpoint_model

HELD_OUT = ("networkx", "sympy", "mpmath", "jinja2", "fsspec")
SHORT, LONG = 2048, 65_536
SHORT_STEPS, LONG_STEPS = 1800, 40
WINDOWS = 8
EDGES = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Bounds of the ranges of positions in the table."""
KEYS = {
    "model.sequence": SHORT,
    "model.window": 128,
    "layout.dp": 1,
    "layout.cp": 2,
    "layout.micro_batch": 1,
    "train.global_batch": 2,
    "train.steps": SHORT_STEPS + LONG_STEPS,
    "train.validate_every": 600,
    "data.validation_batches": 1,
    "optimizer.learning_rate": 0.015,
    "optimizer.warmup_steps": 45,
    "optimizer.decay": "linear",
    "optimizer.final_learning_rate_ratio": 0.1,
    "checkpoint.every": SHORT_STEPS,
    "checkpoint.keep": 3,
}
PHASE = {
    "name": "long",
    "at_step": SHORT_STEPS,
    "model.sequence": LONG,
    "train.global_batch": 1,
    "optimizer.learning_rate": 0.005,
    "optimizer.warmup_steps": 0,
    "optimizer.final_learning_rate_ratio": 0.0,
}


def packages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each package or module of a folder, and its source, files in the order of paths."""
    for top in sorted(folder.iterdir()):
        files = [top] if top.suffix == ".py" else sorted(top.rglob("*.py")) if top.is_dir() else []
        kept = [file for file in files if not {"site-packages", "test", "tests"} & {*file.parts[-4:-1]}]
        if whole := "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in kept):
            yield top.stem, whole


def myriad(folder: Path, *arguments: str) -> None:
    """Run a command in the folder."""
    print(f"$ myriad {' '.join(arguments)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "myriad", *arguments], cwd=folder, check=True, stdout=sys.stderr)


def prepare(folder: Path) -> None:
    """Write the text and tokenize it, unless it is there."""
    if (folder / "test/manifest.json").is_file():
        return
    for name in ("train-text", "test-text"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    paths = sysconfig.get_paths()
    for place in ("stdlib", "purelib"):
        for name, source in packages(Path(paths[place])):
            split = "test-text" if name in HELD_OUT else "train-text"
            (folder / split / f"{place}-{name}.txt").write_text(source, encoding="utf-8")
    options = ["--vocabulary", "1024", "--validation", "0.02"]
    myriad(folder, "data", "prepare", "train-text", "--output", "train", *options)
    options = ["--tokenizer", "train", "--validation", "0"]
    myriad(folder, "data", "prepare", "test-text", "--output", "test", *options)


def train(folder: Path) -> Path:
    """Train both phases, unless that run has ended, and return its path."""
    run = folder / "runs/long"
    if not (run / "report.html").is_file():
        phase = ", ".join(f"{key} = {json.dumps(value)}" for key, value in PHASE.items())
        keys = {**KEYS, "data.corpus": "train", "phases": f"[{{{phase}}}]"}
        options = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
        myriad(
            folder,
            "train",
            *(["runs/long"] if run.is_dir() else ["embedded", "--run", "runs/long", *options]),
        )
    return run


@torch.no_grad()
def position_losses(checkpoint: Path, corpus: Path, sequence: int) -> NDArray[np.float64]:
    """Return the mean loss in nats of each of ``LONG`` positions, over windows of the whole test, of which
    the model reads ``sequence`` tokens at a time."""
    model, test = open_checkpoint_model(str(checkpoint)), open_corpus(str(corpus), "train")
    layers, device = model.layers.eval(), torch.device("cpu")
    total = np.zeros(LONG)
    for number in range(WINDOWS):
        words = np.empty(LONG + 1, np.int32)
        test.read((test.num_tokens - len(words)) * number // (WINDOWS - 1), words)
        whole = torch.from_numpy(words.astype(np.int64))
        inputs, targets = (one.reshape(-1, sequence) for one in (whole[:-1], whole[1:]))
        samples = torch.arange(len(inputs))
        record = TokenRecord(len(inputs), sequence, device)
        run_layers(layers, inputs, Context(targets, samples=samples, record=record))
        total += record.losses.double().numpy().ravel()
        print(f"{checkpoint.name}: window {number + 1} of {WINDOWS}", file=sys.stderr)
    return total / WINDOWS


def print_table(losses: dict[str, NDArray[np.float64]]) -> None:
    """Print the mean loss in each range of positions."""
    print(f"| positions | {' | '.join(losses)} |")
    print("|---|" + "---|" * len(losses))
    for first, last in pairwise(EDGES):
        cells = [f"{found[first:last].mean():.3f}" for found in losses.values()]
        print(f"| {first:,} to {last - 1:,} | {' | '.join(cells)} |")
    print(f"| all | {' | '.join(f'{found.mean():.3f}' for found in losses.values())} |")


def print_pace(run: Path) -> None:
    """Print tokens, seconds and losses of the steps of each phase."""
    lines = [*Run(run).read_metrics()]
    for name, first, last in (("short", 1, SHORT_STEPS), ("long", SHORT_STEPS + 1, SHORT_STEPS + LONG_STEPS)):
        steps = [line for line in lines if first <= line["step"] <= last]
        middle = sorted(line["step_seconds"] for line in steps)[len(steps) // 2]
        ends = f"{steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}"
        print(f"{name}: {len(steps)} steps, {middle:.1f} s each, loss {ends}", file=sys.stderr)


def picture(losses: dict[str, NDArray[np.float64]]) -> str:
    """Draw the mean loss over ranges of positions that grow by a quarter."""
    left, right, top, bottom = 60.0, 700.0, 70.0, 360.0
    bounds = [0, *(round(16 * 1.25**power) for power in range(100) if 16 * 1.25**power < LONG), LONG]
    lines = {
        name: [(math.sqrt(max(a, 8) * b), found[a:b].mean()) for a, b in pairwise(bounds)]
        for name, found in losses.items()
    }
    values = [value for line in lines.values() for _, value in line]
    low, high = min(values) - 0.1, max(values) + 0.1

    def x(position: float) -> float:
        return left + (right - left) * math.log(position / 8) / math.log(LONG / 8)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    title = "Loss by position in held-out windows of 65,536 tokens"
    parts = [text(left, 28, title, size=15, ink=INK)]
    parts += legend(zip(SERIES, lines, strict=False), left, 42)
    for value in round_ticks(low, high):
        parts += [
            rule((left, y(value)), (right, y(value))),
            text(left - 8, y(value) + 4, f"{value:g}", "end"),
        ]
    for position in log_ticks(8, LONG, (1,)):
        parts.append(text(x(position), bottom + 18, f"{position:,.0f}", "middle"))
    parts.append(rule((x(SHORT), top), (x(SHORT), bottom), SERIES[6], dashes="4 3"))
    parts.append(text(x(SHORT) + 6, top + 12, "windows of the first phase end here"))
    for colour, line in zip(SERIES, lines.values(), strict=False):
        parts.append(polyline([(x(position), y(value)) for position, value in line], colour))
    parts.append(text((left + right) / 2, bottom + 38, "position (tokens before)", "middle"))
    parts.append(text(18, (top + bottom) / 2, "loss (nats a token)", "middle", upright=True))
    return document(720, 410, title, parts)


def main() -> None:
    """Run every stage, and print the table."""
    parser = argparse.ArgumentParser(description="Train on long sequences, and print the loss by position.")
    parser.add_argument(
        "--folder", type=Path, required=True, help="keep text and run here, and continue from them"
    )
    parser.add_argument("--svg", type=Path, help="draw the losses by position")
    options = parser.parse_args()
    prepare(options.folder)
    run = train(options.folder)
    print_pace(run)
    last = SHORT_STEPS + LONG_STEPS
    losses = {}
    for name, (step, sequence) in {
        "before the long phase": (SHORT_STEPS, LONG),
        "after it": (last, LONG),
        "after it, 2,048 tokens at a time": (last, SHORT),
    }.items():
        kept = options.folder / f"losses-{step}-{sequence}.npy"
        if not kept.is_file():
            np.save(
                kept, position_losses(run / f"checkpoints/step-{step}", options.folder / "test", sequence)
            )
        losses[name] = np.load(kept)
    print_table(losses)
    if options.svg:
        options.svg.write_text(picture(losses))


if __name__ == "__main__":
    main()
