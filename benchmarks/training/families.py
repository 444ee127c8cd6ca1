"""Blocks of Qwen 3, of Gemma 3 and with experts beside a GPT: bits per byte at equal training FLOPs.

    python benchmarks/training/families.py --runs FOLDER [--flops 3e12] [--seeds 3] [--optimizer muon]
                                           [--shapes "GPT (squared ReLU)" "GPT, experts in every block"]
    python benchmarks/training/families.py --runs FOLDER --flops 5e12 --shapes tiny tiny-moe

Every shape has about the size of the GPT of the job `embedded-gpt` and trains on the same text for the same
FLOPs, one process of one thread, with that job's batch and sequence. A seed fixes the initial weights and the
order of the samples, so all shapes read the same batches in the same order; a cheaper shape reads a few more.
Rates a factor of 2 apart are tried with the first seed until the best one has a worse one on both sides; the
other seeds then train at that rate. FLOPs are the model's: those of Muon's iterations are not counted.
Finished trainings are kept in ``--runs``, and a command that was interrupted continues there.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from myriad.job import Job, load_job
from myriad.run import Run

MOST_RATES = 10
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""97.5 % quantile of Student's distribution for the mean of so many values."""
GEMMA: dict[str, Any] = {
    "activation": "geglu_tanh",
    "kv_heads": 1,
    "qk_norm": "head",
    "norm_placement": "both",
    "norm_zero_centered": "true",
    "norm_epsilon": 1e-6,
    "window": 32,
    "window_rotary_base": 1e4,
    "rotary_base": 1e6,
}
QWEN: dict[str, Any] = {
    "activation": "swiglu",
    "kv_heads": 2,
    "ffn_hidden": 384,
    "qk_norm": "head",
    "norm_epsilon": 1e-6,
    "rotary_base": 1e6,
}
EXPERTS: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "expert_hidden": 256}
"""Two of eight experts compute as many FLOPs as the MLP that they replace."""
SHAPES: dict[str, dict[str, Any]] = {
    "GPT (squared ReLU)": {},
    "GPT, experts in every second block": EXPERTS | {"expert_every": 2},
    "GPT, experts in every block": EXPERTS,
    "Qwen 3": QWEN,
    "Gemma 3, 6 layers, windows 5:1": {
        **GEMMA,
        "layers": 6,
        "hidden": 96,
        "ffn_hidden": 256,
        "window_pattern": "[true, true, true, true, true, false]",
        "embedding_scale": 96**0.5,
    },
    "Gemma 3, 3 layers, windows 2:1": {
        **GEMMA,
        "ffn_hidden": 400,
        "window_pattern": "[true, true, false]",
        "embedding_scale": 128**0.5,
    },
}
"""The model keys of `embedded-gpt` that each shape changes."""
RECIPES = ("tiny", "tiny-moe")
"""Jobs that are shapes, too: equal FLOPs a token, but for the router, with an eighth of `embedded-gpt`'s."""
FIRST_RATES = {"adamw": 0.0025, "muon": 0.01}
"""Learning rates from which the search starts; twice that for `RECIPES`, with eight times the sequences."""


@dataclass(frozen=True)
class Training:
    """One training: a shape at a learning rate, with a seed."""

    shape: str
    optimizer: str
    learning_rate: float
    seed: int
    flops: float

    def job(self) -> Job:
        """The job of the shape with as many steps as the FLOPs allow."""
        is_recipe = self.shape in RECIPES
        base = self.shape if is_recipe else "embedded-gpt"
        changed = {} if is_recipe else SHAPES[self.shape]
        shape = [f"model.{key}={value}" for key, value in changed.items()]
        model = load_job(base, shape).model
        batch, micro_batch = (64, 16) if is_recipe else (8, 4)
        steps = round(self.flops / (model.flops_per_token() * model.sequence * batch))
        keys = {
            "train.steps": steps,
            "train.global_batch": batch,
            "layout.micro_batch": micro_batch,
            "train.seed": self.seed,
            "train.threads": 1,
            "train.validate_every": steps,
            "train.sample_prompt": "off",
            "data.validation_batches": 128,
            "checkpoint.every": 0,
            "optimizer.name": self.optimizer,
            "optimizer.learning_rate": self.learning_rate,
            "optimizer.warmup_steps": max(1, steps // 40),
        }
        return load_job(base, [*shape, *(f"{key}={value}" for key, value in keys.items())])

    @property
    def folder(self) -> str:
        words = "".join(letter if letter.isalnum() else "-" for letter in self.shape)
        return f"{words}-{self.optimizer}-{self.flops:g}-{self.learning_rate:g}-{self.seed}"


def bits_per_byte(run: Run) -> float | None:
    """The last validation's bits per byte; ``None`` before it."""
    steps = run.job().train.steps
    found = [one for one in run.read_events() if one["event"] == "validation" and one["step"] == steps]
    return found[-1]["bits_per_byte"] if found else None


def train(training: Training, runs: Path) -> float:
    """Train, or read what an earlier command trained, and return bits per byte of held-out text."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from myriad.train.in_process import train_in_process

    run = Run(runs / training.folder)
    run.create_or_resume(training.job())
    if bits_per_byte(run) is None:
        train_in_process(run)
    found = bits_per_byte(run)
    assert found is not None, f"{run.folder} has not ended"
    return found


@dataclass(frozen=True)
class Outcome:
    """A shape at its best learning rate."""

    shape: str
    rates: dict[float, float]
    """Bits per byte of the first seed at every rate that was tried."""
    learning_rate: float
    bits: list[float]
    """One value for each seed."""


class Trainings:
    """Trains each training in a new process."""

    def __init__(self, runs: Path, flops: float, optimizer: str) -> None:
        self._runs, self._flops, self._optimizer = runs, flops, optimizer

    def bits(self, shape: str, learning_rate: float, seed: int) -> float:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            training = Training(shape, self._optimizer, learning_rate, seed, self._flops)
            found = process.submit(train, training, self._runs).result()
        lines = Run(self._runs / training.folder).read_metrics()
        seconds = sum(line["step_seconds"] for line in lines)
        what = f"rate {learning_rate:<8g} seed {seed}: {found:.4f} bits per byte, {seconds:.0f} s of steps"
        print(f"  {shape:32} {what}", flush=True)
        return found

    def search(self, shape: str, seeds: Sequence[int]) -> Outcome:
        """Search the learning rate with the first seed, then train the others at the best one."""
        start = FIRST_RATES[self._optimizer] * (2 if shape in RECIPES else 1)
        found = {start: self.bits(shape, start, seeds[0])}
        while len(found) < MOST_RATES:
            best = min(found, key=lambda rate: found[rate])
            missing = [rate for rate in (best * 2, best / 2) if rate not in found]
            if not missing:
                break
            found[missing[0]] = self.bits(shape, missing[0], seeds[0])
        best = min(found, key=lambda rate: found[rate])
        others = [self.bits(shape, best, seed) for seed in seeds[1:]]
        return Outcome(shape, {rate: found[rate] for rate in sorted(found)}, best, [found[best], *others])


def difference(one: Outcome, other: Outcome) -> str:
    """Mean difference of bits per byte, seed by seed, and the half width of its 95 % interval."""
    found = [ours - theirs for ours, theirs in zip(one.bits, other.bits, strict=True)]
    half = STUDENT[len(found)] * statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.mean(found):+.4f} ± {half:.4f}"


def print_table(outcomes: Sequence[Outcome], flops: float, optimizer: str) -> None:
    """One row for each shape, with its difference to the first."""
    print(
        "\n| shape | parameters | steps | learning rates tried | best | bits per byte, each seed | mean |",
        end="",
    )
    print(" to the first |")
    print("|---|---|---|---|---|---|---|---|")
    for one in outcomes:
        job = Training(one.shape, optimizer, one.learning_rate, 1, flops).job()
        cells = (
            one.shape,
            f"{job.model.num_parameters():,}",
            job.train.steps,
            ", ".join(f"{rate:g}: {bits:.3f}" for rate, bits in one.rates.items()),
            f"{one.learning_rate:g}",
            ", ".join(f"{bits:.4f}" for bits in one.bits),
            f"{statistics.mean(one.bits):.4f}",
            difference(one, outcomes[0]) if one is not outcomes[0] else "",
        )
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Qwen 3's and Gemma 3's blocks beside a GPT's.")
    parser.add_argument(
        "--runs", type=Path, required=True, help="keep the trainings here, and continue there"
    )
    parser.add_argument("--flops", type=float, default=3e12, help="training FLOPs of each training")
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(STUDENT), help="seeds of each shape")
    parser.add_argument("--optimizer", default="adamw", choices=sorted(FIRST_RATES))
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), choices=[*SHAPES, *RECIPES], metavar="SHAPE"
    )
    options = parser.parse_args()
    trainings = Trainings(options.runs, options.flops, options.optimizer)
    outcomes = [trainings.search(shape, range(1, options.seeds + 1)) for shape in options.shapes]
    print_table(outcomes, options.flops, options.optimizer)


if __name__ == "__main__":
    main()
