"""Loss at equal tokens of blocks, of attention, and of optimizers, on the same text.

    python benchmarks/training/convergence.py blocks [--tokens 600000] [--runs FOLDER] [--svg STEM]
    python benchmarks/training/convergence.py optimizers [--tokens 600000] [--runs FOLDER] [--svg STEM]

MegaScale (arXiv 2402.15627, section 3.1) changes the model and its optimizer for speed and reports that
neither costs convergence. ``blocks`` trains the GPT of `embedded-gpt` on the standard library's source, once
for each block (serial, parallel), attention (full, window) and optimizer (AdamW; LAMB at 4 x its batch), and
prints validation losses. ``optimizers`` compares AdamW, LAMB and Muon with its serial block and full
attention, at that batch and at 4 x of it.

Every setting gets its own learning rate: rates a factor of 2 apart are tried with the first seed until the
best one has a worse one on both sides. The other seeds then train at that rate. A seed fixes the initial
weights and the order of the samples, so differences are taken seed by seed; their interval is Student's. With
``--runs`` finished trainings are kept, and a command that was interrupted continues where it stopped.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.reports.charts.loss_chart import Series, lines_svg, smooth
from myriad.run import Run

SEQUENCE, WINDOW, BATCH = 256, 64, 2
MOST_RATES = 7
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""97.5 % quantile of Student's distribution for the mean of so many values."""


@dataclass(frozen=True)
class Setting:
    """One way to train the model."""

    block: str
    attention: str
    optimizer: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.block}, {self.attention}, {self.optimizer}, batch {self.batch}"

    def overrides(self, learning_rate: float, seed: int, tokens: int) -> dict[str, object]:
        """The keys of `embedded-gpt` that this training changes."""
        steps = tokens // (self.batch * SEQUENCE)
        return {
            "model.block": self.block,
            "model.window": WINDOW if self.attention == "window" else "off",
            "model.sequence": SEQUENCE,
            "layout.micro_batch": BATCH,
            "train.steps": steps,
            "train.seed": seed,
            "train.global_batch": self.batch,
            "train.validate_every": 0,
            "train.sample_prompt": "off",
            "data.validation_batches": 256 // self.batch,
            "checkpoint.every": 0,
            "optimizer.name": self.optimizer,
            "optimizer.learning_rate": learning_rate,
            "optimizer.warmup_steps": max(1, steps // 20),
        }


@dataclass(frozen=True)
class Trained:
    """One training's end and its way there."""

    validation: float
    curve: Series


@dataclass(frozen=True)
class Outcome:
    """A setting at its best learning rate."""

    setting: Setting
    learning_rate: float
    rates: dict[float, float]
    """Validation loss of the first seed at every rate that was tried."""
    trained: tuple[Trained, ...]
    """One for each seed."""

    @property
    def losses(self) -> list[float]:
        return [one.validation for one in self.trained]


BASELINE = Setting("serial", "full", "adamw", BATCH)
START = {
    ("adamw", BATCH): 4e-3,
    ("adamw", 4 * BATCH): 4e-3,
    ("lamb", BATCH): 1e-2,
    ("lamb", 4 * BATCH): 4e-2,
    ("muon", BATCH): 4e-3,
    ("muon", 4 * BATCH): 8e-3,
}
"""Learning rate at which each search starts."""


def optimizer_settings() -> list[Setting]:
    """Return the settings of ``optimizers``, with the baseline first."""
    return [
        replace(BASELINE, optimizer=optimizer, batch=batch)
        for batch in (BATCH, 4 * BATCH)
        for optimizer in ("adamw", "lamb", "muon")
    ]


def block_settings() -> list[Setting]:
    """Return the settings of ``blocks``: the baseline first, and AdamW beside LAMB at the large batch."""
    models = [(block, attention) for block in ("serial", "parallel") for attention in ("full", "window")]
    small = [Setting(*model, "adamw", BATCH) for model in models]
    large = [Setting(*model, "lamb", 4 * BATCH) for model in models]
    return [*small, replace(BASELINE, batch=4 * BATCH), *large]


class Trainings:
    """Trains a setting, or reads what an earlier command trained in the same folder."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self._folder = folder
        self._tokens = tokens

    def train(self, setting: Setting, learning_rate: float, seed: int) -> Trained:
        overrides = setting.overrides(learning_rate, seed, self._tokens)
        job = load_job("embedded-gpt", [f"{key}={value}" for key, value in overrides.items()])
        name = f"{setting.name}-{self._tokens}-{learning_rate:g}-{seed}".replace(", ", "-").replace(" ", "")
        run = Run(self._folder / name)
        run.create_or_resume(job)
        if self._validation(run, job.train.steps) is None:
            run_local(run, job.layout.world)
        validation = self._validation(run, job.train.steps)
        assert validation is not None, f"{run.path} has not ended"
        print(f"  {setting.name:38} rate {learning_rate:<8g} seed {seed}: {validation:.4f}", flush=True)
        return Trained(validation, [(line["tokens"], line["loss"]) for line in run.read_metrics()])

    @staticmethod
    def _validation(run: Run, steps: int) -> float | None:
        """Validation loss after the last step; ``None`` before it."""
        found = [one for one in run.read_events() if one["event"] == "validation" and one["step"] == steps]
        return found[-1]["loss"] if found else None


def find_best(setting: Setting, seeds: Sequence[int], trainings: Trainings) -> Outcome:
    """Searches the learning rate with the first seed, then trains the others at the best one."""
    start = START[setting.optimizer, setting.batch]
    first = {start: trainings.train(setting, start, seeds[0])}
    while len(first) < MOST_RATES:
        best = min(first, key=lambda rate: first[rate].validation)
        missing = [rate for rate in (best / 2, best * 2) if rate not in first]
        if not missing:
            break
        first[missing[0]] = trainings.train(setting, missing[0], seeds[0])
    best = min(first, key=lambda rate: first[rate].validation)
    others = [trainings.train(setting, best, seed) for seed in seeds[1:]]
    rates = {rate: first[rate].validation for rate in sorted(first)}
    return Outcome(setting, best, rates, (first[best], *others))


def difference(one: Outcome, other: Outcome) -> tuple[float, float]:
    """Mean difference of the validation losses, seed by seed, and the half width of its 95 % interval."""
    found = [ours - theirs for ours, theirs in zip(one.losses, other.losses, strict=True)]
    spread = statistics.stdev(found) / len(found) ** 0.5
    return statistics.mean(found), STUDENT[len(found)] * spread


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One row for each setting, with its difference to the baseline and to its optimizer's plain model."""
    baseline = outcomes[0]
    print("\n| block | attention | optimizer | batch | learning rates tried | best |", end="")
    print(" validation loss, each seed | mean | to the baseline | to the same optimizer's serial, full |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for outcome in outcomes:
        setting = outcome.setting
        plain = replace(setting, block="serial", attention="full")
        peer = next(one for one in outcomes if one.setting == plain)
        cells = (
            setting.block,
            setting.attention,
            setting.optimizer,
            setting.batch,
            ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in outcome.rates.items()),
            f"{outcome.learning_rate:g}",
            ", ".join(f"{loss:.4f}" for loss in outcome.losses),
            f"{statistics.mean(outcome.losses):.4f}",
            _interval(outcome, baseline),
            _interval(outcome, peer),
        )
        print(f"| {' | '.join(map(str, cells))} |")


def _interval(one: Outcome, other: Outcome) -> str:
    if one is other:
        return ""
    mean, half = difference(one, other)
    return f"{mean:+.4f} ± {half:.4f}"


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """The first seed's training losses over tokens."""
    lines = {
        f"{one.setting.name}: {one.losses[0]:.3f}": smooth(one.trained[0].curve, 0.06) for one in outcomes
    }
    path.write_text(lines_svg(lines, "Same text, same tokens, each at its best learning rate", "tokens"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss at equal tokens of blocks, or of optimizers.")
    parser.add_argument("what", choices=("blocks", "optimizers"))
    parser.add_argument("--tokens", type=int, default=600_000, help="tokens of each training")
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(STUDENT), help="seeds of each setting")
    parser.add_argument("--runs", type=Path, help="keep the trainings here, and continue from them")
    parser.add_argument(
        "--svg", metavar="STEM", help="draw STEM-adamw.svg and STEM-lamb.svg, or STEM-batch-N.svg"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainings = Trainings(options.runs or Path(folder), options.tokens)
        seeds = range(1, options.seeds + 1)
        settings = block_settings() if options.what == "blocks" else optimizer_settings()
        outcomes = [find_best(setting, seeds, trainings) for setting in settings]
    print_table(outcomes)
    if options.svg:
        small = [one for one in outcomes if one.setting.batch == BATCH]
        large = [one for one in outcomes if one.setting.batch != BATCH]
        if options.what == "blocks":
            draw(small, Path(f"{options.svg}-adamw.svg"))
            draw([outcomes[0], *large], Path(f"{options.svg}-lamb.svg"))
        else:
            draw(small, Path(f"{options.svg}-batch-{BATCH}.svg"))
            draw(large, Path(f"{options.svg}-batch-{4 * BATCH}.svg"))


if __name__ == "__main__":
    main()
