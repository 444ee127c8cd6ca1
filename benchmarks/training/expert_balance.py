"""What bounds and balance of experts cost: the same text, the same tokens.

    python benchmarks/training/expert_balance.py [--tokens 524288] [--svg FILE] [--quick]

Trains a small mixture (8 experts, 2 a token) on the standard library's source with one rank: with the balance
loss of each sequence, with that of the global batch (`model.balance_scope`), and with capacities that drop
tokens in training (`model.expert_capacity`). A second dropless training from another seed shows how much a
difference means. Validation losses, of the dropless model, at each quarter of the way; the share of dropped
pairs and the load of the busiest expert are means over the last quarter.
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


@dataclass(frozen=True)
class Setting:
    """How experts are balanced and bounded."""

    capacity: float | None = None
    scope: str = "sequence"
    seed: int = 1

    @property
    def name(self) -> str:
        kept = "dropless" if self.capacity is None else f"capacity {self.capacity:g}"
        return f"{kept}, loss of the {self.scope}{', another seed' if self.seed > 1 else ''}"


SETTINGS = (
    Setting(),
    Setting(seed=2),
    *(Setting(capacity) for capacity in (2.0, 1.25, 1.0)),
    Setting(scope="batch"),
    Setting(1.25, "batch"),
)


@dataclass(frozen=True)
class Result:
    """What one training came to."""

    setting: Setting
    losses: tuple[float, ...]
    """Losses on held-out text at each quarter."""
    dropped: float
    """Share of the pairs of a token and an expert that were dropped."""
    load: float
    """Tokens of the busiest expert of a step over those of the mean one."""
    curve: Series
    """Training loss over tokens."""


def overrides(setting: Setting, tokens: int) -> dict[str, Any]:
    """Return the changed keys of the job `embedded-gpt`."""
    steps = max(1, round(tokens / (BATCH * SEQUENCE * QUARTERS))) * QUARTERS
    return diloco.small_job(steps) | {
        "train.seed": setting.seed,
        "model.experts": 8,
        "model.expert_hidden": 256,
        "model.expert_capacity": "off" if setting.capacity is None else setting.capacity,
        "model.balance_scope": setting.scope,
        "layout.dp": 1,
        "layout.micro_batch": BATCH,
    }


def train(setting: Setting, tokens: int, folder: Path) -> Result:
    """Train with a setting, and return its losses and loads."""
    job = load_job("embedded-gpt", [f"{key}={value}" for key, value in overrides(setting, tokens).items()])
    run = Run(folder / setting.name.replace(", ", "-").replace(" ", "-"))
    run.create_or_resume(job)
    run_local(run, 1, command=[sys.executable, diloco.__file__, "--rank"])
    losses = [event["loss"] for event in run.read_events() if event["event"] == "validation"]
    lines = run.read_metrics()
    last = lines[-len(lines) // QUARTERS :]
    dropped, load = (sum(line.get(key, 0.0) for line in last) / len(last) for key in _MEANS)
    return Result(setting, tuple(losses), dropped, load, [(line["tokens"], line["loss"]) for line in lines])


_MEANS = ("dropped_share", "expert_load")


def line(result: Result, first: Result) -> str:
    """Return a line of the table."""
    cells = [result.setting.name, *(f"{loss:.4f}" for loss in result.losses)]
    cells += [f"{result.losses[-1] - first.losses[-1]:+.4f}", f"{result.dropped:.1%}", f"{result.load:.2f}"]
    return f"| {' | '.join(cells)} |"


HEAD = """\
| experts | loss at 1/4 | 1/2 | 3/4 | end | to the first | dropped | busiest expert |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    options = diloco.new_parser(
        "Losses with bounded and with differently balanced experts.", "an eighth"
    ).parse_args()
    tokens = options.tokens // 8 if options.quick else options.tokens
    title = "Bounds and balance of experts, same tokens"
    diloco.compare(SETTINGS, lambda one, folder: train(one, tokens, folder), HEAD, line, title, options)


if __name__ == "__main__":
    main()
