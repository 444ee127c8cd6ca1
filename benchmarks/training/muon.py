"""Muon beside AdamW and LAMB: processor time of a step, and the loss at equal tokens.

    python benchmarks/training/muon.py times [--steps 5]
    python benchmarks/training/muon.py learn [--steps 300] [--seeds 1] [--runs FOLDER]

``times`` counts the processor seconds of each rank's training step, which other work on the machine changes
less than its duration: the model of the job `embedded-gpt`, one process and two with ZeRO 1, at its batch and
at larger ones. The figure is the median over steps, of the rank that computes most.

``learn`` trains that job on its real text, for fewer steps than it has, so its schedule is shorter.
The learning rate of each optimizer is bracketed: rates a factor of 2 apart are tried with the first seed
until the best one has a worse one on both sides. The other seeds train at that rate. With ``--runs`` finished
trainings are kept, and a command that was interrupted continues where it stopped.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from myriad.api import train
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.job import load_job
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig, OptimizerName
from myriad.parallel.engine import Engine
from myriad.parallel.runtime import Batch
from myriad.program.partition import partition_layers
from myriad.run import Run
from myriad.telemetry.spans import Recorder

LAYOUTS = {"one process": Layout(micro_batch=4), "dp 2, ZeRO 1": Layout(dp=2, zero=1, micro_batch=4)}
BATCHES = (8, 32, 128)
"""Sequences of a step; the first is the job's."""
RATES: dict[OptimizerName, float] = {"adamw": 5e-3, "muon": 1e-2, "lamb": 2e-2}
"""Learning rate at which each search starts."""
MOST_RATES = 6


def step_seconds(
    rank: int, port: int, layout: Layout, batch: int, optimizer: OptimizerName, steps: int
) -> list[float]:
    """One rank's processor seconds of each step but the first."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.world), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    model, share = load_job("embedded-gpt").model, batch // layout.dp
    definition = GPT(model, seed=1)
    tokens = torch.randint(model.vocabulary, (share, model.sequence))
    data = Batch(tokens, tokens, torch.arange(share))
    sample = Batch(*(one[: layout.micro_batch] for one in (data.inputs, data.targets, data.samples)))
    engine = Engine(
        definition,
        open_world(layout, torch.device("cpu")),
        partition_layers("uniform", 1, definition.kinds),
        sample,
        share // layout.micro_batch,
        OptimizerConfig(name=optimizer),
        seed=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        recorder=Recorder(),
    )
    found = []
    for _ in range(steps + 1):
        began = time.process_time()
        engine.train_step(lambda: data, 1e-3, batch * model.sequence)
        found.append(time.process_time() - began)
    engine.close()
    close_world()
    return found[1:]


def median_seconds(layout: Layout, batch: int, optimizer: OptimizerName, steps: int) -> float:
    """The median step of the rank that computes most."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [(rank, port, layout, batch, optimizer, steps) for rank in range(layout.world)]
    with multiprocessing.get_context("spawn").Pool(layout.world) as pool:
        ranks = pool.starmap(step_seconds, arguments, chunksize=1)
    return max(map(statistics.median, ranks))


def measure_times(steps: int) -> None:
    """Print a row for each layout and batch."""
    print("| layout | tokens of a step | AdamW, ms | Muon, ms | Muon's more |\n|---|---|---|---|---|")
    for name, layout in LAYOUTS.items():
        for batch in BATCHES:
            adamw, muon = (median_seconds(layout, batch, one, steps) for one in ("adamw", "muon"))
            tokens = f"{batch * load_job('embedded-gpt').model.sequence:,}"
            shown = f"{1e3 * adamw:.1f} | {1e3 * muon:.1f} | {muon / adamw - 1:+.1%}"
            print(f"| {name} | {tokens} | {shown} |", flush=True)


class Trainings:
    """Trains the job `embedded-gpt` with an optimizer, or reads what an earlier command trained in the same
    folder."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps

    def loss(self, optimizer: OptimizerName, rate: float, seed: int) -> float:
        """Return the validation loss after the last step."""
        keys = {
            "optimizer.name": optimizer,
            "optimizer.learning_rate": rate,
            "optimizer.warmup_steps": self._steps // 40,
            "train.steps": self._steps,
            "train.seed": seed,
            "train.threads": 1,
            "train.validate_every": 0,
            "train.sample_prompt": "off",
            "checkpoint.every": 0,
        }
        path = self._folder / f"{optimizer}-{self._steps}-{rate:g}-{seed}"
        run = Run(path)
        if not path.exists() or self._last(run) is None:
            run = train("embedded-gpt", [f"{key}={value}" for key, value in keys.items()], run=path)
        loss = self._last(run)
        assert loss is not None, f"{path} has not ended"
        print(f"  {optimizer:6} rate {rate:<8g} seed {seed}: {loss:.4f}", flush=True)
        return loss

    def _last(self, run: Run) -> float | None:
        found = [
            one for one in run.read_events() if one["event"] == "validation" and one["step"] == self._steps
        ]
        return float(found[-1]["loss"]) if found else None


def bracketed(trainings: Trainings, optimizer: OptimizerName, seed: int) -> dict[float, float]:
    """Return the loss at every rate that was tried; the best has a worse one on both sides."""
    tried = {RATES[optimizer]: trainings.loss(optimizer, RATES[optimizer], seed)}
    while len(tried) < MOST_RATES:
        best = min(tried, key=tried.__getitem__)
        missing = [rate for rate in (best / 2, best * 2) if rate not in tried]
        if not missing:
            break
        tried[missing[0]] = trainings.loss(optimizer, missing[0], seed)
    return dict(sorted(tried.items()))


def measure_losses(steps: int, seeds: Sequence[int], folder: Path) -> None:
    """Print a row for each optimizer."""
    trainings, rows = Trainings(folder, steps), []
    for optimizer in RATES:
        tried = bracketed(trainings, optimizer, seeds[0])
        best = min(tried, key=tried.__getitem__)
        losses = [tried[best], *(trainings.loss(optimizer, best, seed) for seed in seeds[1:])]
        shown = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried.items())
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        rows.append(f"| {optimizer} | {shown} | {best:g} | {each} | {statistics.mean(losses):.4f} |")
    print("\n| optimizer | learning rates tried | best | validation loss, each seed | mean |")
    print("|---|---|---|---|---|", *rows, sep="\n")


def main() -> None:
    """Run the measurement that the command line names, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("times", "learn"))
    parser.add_argument("--steps", type=int, help="counted ones (times: 5), or of each training (learn: 300)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="keep the trainings here, and continue from them")
    options = parser.parse_args()
    if options.what == "times":
        measure_times(options.steps or 5)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure_losses(options.steps or 300, range(1, options.seeds + 1), options.runs or Path(folder))


if __name__ == "__main__":
    main()
