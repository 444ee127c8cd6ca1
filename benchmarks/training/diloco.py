"""Replicas that agree every H steps (DiLoCo) against exact data parallelism: the same text, the same tokens.

    python benchmarks/training/diloco.py [--tokens 524288] [--every 8 32] [--outer 0.7,0.9 1,0] [--svg FILE]

Trains a small GPT on the standard library's source with two replicas: exact (`comm.sync_every = 1`), and with
an outer optimizer every H steps: the paper's (Douillard et al., arXiv 2311.08105: rate 0.7, momentum 0.9; the
job's default), and rate 1 without momentum, which is the plain mean of the replicas. The inner learning rate
is the same for all. Validation losses are those of the parameters that the replicas have just agreed on, at
each quarter of the way. Bytes are what the TCP connections of rank 0 have sent (TCP_INFO), everything
counted but what was sent twice: start, gradients or parameters, losses, meetings of checkpoints.
"""

import argparse
import json
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from myriad.errors import RunFailedError
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.reports.charts.loss_chart import Series, lines_svg
from myriad.run import Run
from myriad.train.trainer import Trainer

SEQUENCE, BATCH, REPLICAS, QUARTERS = 128, 8, 2, 4
BYTES_SENT = struct.Struct("200xQQ")
"""tcpi_bytes_sent and, of these, tcpi_bytes_retrans in Linux's struct tcp_info."""


@dataclass(frozen=True)
class Setting:
    """When and how replicas agree."""

    every: int
    rate: float
    momentum: float

    @property
    def name(self) -> str:
        if self.every == 1:
            return "every step, exact"
        return f"every {self.every}, rate {self.rate:g}, momentum {self.momentum:g}"


@dataclass(frozen=True)
class Result:
    """What one training came to."""

    setting: Setting
    steps: int
    losses: tuple[float, ...]
    """On held-out text at each quarter."""
    bytes_sent: int
    """By rank 0."""
    curve: Series
    """Training loss over tokens."""


def tcp_bytes_sent() -> int:
    """What this process has sent over the TCP connections that it has open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT.size)
                    sent, again = BYTES_SENT.unpack(info)
                    total += sent - again
        except OSError:
            continue  # no socket, or closed by now
    return total


def train_rank(run: Run) -> None:
    """One rank's side."""
    trainer = Trainer(run)
    trainer.train()
    if trainer.is_first:
        (run.path / "bytes").write_text(str(tcp_bytes_sent()))
    trainer.close()


def small_job(steps: int) -> dict[str, Any]:
    """Return the keys of `embedded-gpt` that all settings of a comparison change: a small GPT, for so many
    steps, that is validated at each quarter."""
    return {
        "model.layers": 3,
        "model.hidden": 128,
        "model.heads": 4,
        "model.sequence": SEQUENCE,
        "train.steps": steps,
        "train.global_batch": BATCH,
        "train.validate_every": steps // QUARTERS,
        "train.sample_prompt": "off",
        "data.validation_batches": 32,
        "optimizer.warmup_steps": max(1, steps // 20),
    }


def train(setting: Setting, tokens: int, slowest: int, folder: Path) -> Result:
    """One training. Validations fall on steps at which all settings have just agreed."""
    unit = QUARTERS * slowest
    steps = max(1, round(tokens / (BATCH * SEQUENCE * unit))) * unit
    overrides = small_job(steps) | {
        "layout.dp": REPLICAS,
        "layout.micro_batch": BATCH // REPLICAS,
        "checkpoint.every": 0,
        "comm.sync_every": setting.every,
        "comm.outer_learning_rate": setting.rate,
        "comm.outer_momentum": setting.momentum,
    }
    run = Run(folder / f"{setting.every}-{setting.rate}-{setting.momentum}")
    run.create_or_resume(load_job("embedded-gpt", [f"{key}={value}" for key, value in overrides.items()]))
    run_local(run, REPLICAS, command=[sys.executable, __file__, "--rank"])
    if (done := run.read_metrics()[-1]["step"]) < steps:
        raise RunFailedError(f"{setting.name}: it was stopped after {done} of {steps} steps")
    losses = [event["loss"] for event in run.read_events() if event["event"] == "validation"]
    curve = [(line["tokens"], line["loss"]) for line in run.read_metrics()]
    return Result(setting, steps, tuple(losses), int((run.path / "bytes").read_text()), curve)


def line(result: Result, exact: Result) -> str:
    """A line of the table."""
    cells = [result.setting.name, *(f"{loss:.4f}" for loss in result.losses)]
    cells += [f"{result.losses[-1] - exact.losses[-1]:+.4f}", f"{result.bytes_sent / 2**20:,.1f}"]
    cells += [
        f"{result.bytes_sent / result.steps / 2**20:.3f}",
        f"{exact.bytes_sent / result.bytes_sent:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """\
| replicas agree | loss at 1/4 | 1/2 | 3/4 | end | to exact | MiB sent by a rank | a step | times less |
|---|---|---|---|---|---|---|---|---|"""


def compare(
    settings: Sequence[Any],
    train_one: Callable[[Any, Path], Any],
    head: str,
    line_of: Callable[[Any, Any], str],
    title: str,
    options: argparse.Namespace,
) -> None:
    """Train with each setting, the first one exact, and print the results as a table or as JSON."""
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            results.append(train_one(setting, Path(folder)))
            if not options.json:
                first = len(results) == 1
                print(head + "\n" if first else "", line_of(results[-1], results[0]), sep="", flush=True)
    if options.svg:
        curves = {f"{one.setting.name}: {one.losses[-1]:.3f}": one.curve for one in results}
        options.svg.write_text(lines_svg(curves, title, "tokens"))
    if options.json:
        print(json.dumps([asdict(result) for result in results]))


def new_parser(description: str, part: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison. ``part``: of the tokens, with ``--quick``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokens", type=int, default=524_288, help="tokens of each training")
    parser.add_argument("--svg", type=Path, help="where to draw the losses")
    parser.add_argument("--quick", action="store_true", help=f"{part} of the tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def main() -> None:
    parser = new_parser("Losses of replicas that agree every H steps.", "a quarter")
    parser.add_argument("--every", type=int, nargs="+", default=[8, 32], help="steps between agreements")
    parser.add_argument(
        "--outer", nargs="+", default=["0.7,0.9", "1,0"], help="RATE,MOMENTUM of the outer one"
    )
    parser.add_argument("--rank", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return train_rank(Run(options.rank))
    tokens = options.tokens // 4 if options.quick else options.tokens
    outer = [tuple(map(float, text.split(","))) for text in options.outer]
    settings = [Setting(1, 1, 0), *(Setting(every, *own) for every in options.every for own in outer)]
    title = "Replicas that agree every H steps, same tokens"
    compare(
        settings,
        lambda one, folder: train(one, tokens, max(options.every), folder),
        HEAD,
        line,
        title,
        options,
    )


if __name__ == "__main__":
    main()
