"""Compressed gradients and parameters against exact ones: the same text, the same tokens.

    python benchmarks/training/lossy.py [--tokens 524288] [--svg docs/images/lossy.svg] [--quick]

Trains a small GPT on the standard library's source with two ranks that shard optimizer state and gradients
(`layout.zero = 2`): exact, and with gradients, parameters or both travelling in bfloat16 or in int8 (blocks
of 256 numbers; what rounding loses is sent with the next step). A second exact training from another seed
shows how much a difference means. Validation losses at each quarter of the way. Bytes are what the TCP
connections of rank 0 have sent (TCP_INFO), everything counted: start, losses and checkpoints too.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diloco
from diloco import BATCH, QUARTERS, SEQUENCE
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.reports.charts.loss_chart import Series
from myriad.run import Run

RANKS = 2
CODECS = ("bfloat16", "int8")


@dataclass(frozen=True)
class Setting:
    """What travels in which form."""

    gradients: str = "off"
    parameters: str = "off"
    seed: int = 1

    @property
    def name(self) -> str:
        parts = [
            f"{what} {codec}"
            for what, codec in (("gradients", self.gradients), ("parameters", self.parameters))
            if codec != "off"
        ]
        exact = "exact" if self.seed == 1 else "exact, another seed"
        return " and ".join(parts) or exact


SETTINGS = (
    Setting(),
    Setting(seed=2),
    *(Setting(gradients=codec) for codec in CODECS),
    *(Setting(parameters=codec) for codec in CODECS),
    *(Setting(codec, codec) for codec in CODECS),
)


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


def overrides(setting: Setting, tokens: int) -> dict[str, Any]:
    """Return the changed keys of the job `embedded-gpt`."""
    steps = max(1, round(tokens / (BATCH * SEQUENCE * QUARTERS))) * QUARTERS
    return diloco.small_job(steps) | {
        "train.seed": setting.seed,
        "layout.dp": RANKS,
        "layout.zero": 2,
        "layout.micro_batch": BATCH // RANKS,
        "comm.compress_gradients": setting.gradients,
        "comm.compress_parameters": setting.parameters,
    }


def train(setting: Setting, tokens: int, folder: Path) -> Result:
    """One training."""
    job = load_job("embedded-gpt", [f"{key}={value}" for key, value in overrides(setting, tokens).items()])
    run = Run(folder / f"{setting.gradients}-{setting.parameters}-{setting.seed}")
    run.create_or_resume(job)
    run_local(run, RANKS, command=[sys.executable, diloco.__file__, "--rank"])
    losses = [event["loss"] for event in run.read_events() if event["event"] == "validation"]
    curve = [(line["tokens"], line["loss"]) for line in run.read_metrics()]
    return Result(setting, job.train.steps, tuple(losses), int((run.path / "bytes").read_text()), curve)


def line(result: Result, exact: Result) -> str:
    """A line of the table."""
    cells = [result.setting.name, *(f"{loss:.4f}" for loss in result.losses)]
    cells.append(f"{result.losses[-1] - exact.losses[-1]:+.4f}")
    cells.append(f"{result.bytes_sent / result.steps / 2**20:.3f}")
    cells.append(f"{exact.bytes_sent / result.bytes_sent:.2f}")
    return f"| {' | '.join(cells)} |"


HEAD = """\
| transfers | loss at 1/4 | 1/2 | 3/4 | end | to exact | MiB a step from a rank | times less |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    options = diloco.new_parser("Losses with compressed and with exact transfers.", "an eighth").parse_args()
    tokens = options.tokens // 8 if options.quick else options.tokens
    title = "Compressed transfers, same tokens"
    diloco.compare(SETTINGS, lambda one, folder: train(one, tokens, folder), HEAD, line, title, options)


if __name__ == "__main__":
    main()
