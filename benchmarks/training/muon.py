"""Processor time of a step with Muon, beside AdamW's. `convergence` compares what optimizers learn.

    python benchmarks/training/muon.py [--steps 5]

It counts the processor seconds of each rank's training step, which other work on the machine changes
less than its duration: the model of the job `embedded-gpt`, one process and two with ZeRO 1, at its batch and
at larger ones. The figure is the median over steps, of the rank that computes most.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time

import torch

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.job import load_job
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig, OptimizerName
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder

LAYOUTS = {"one process": Layout(micro_batch=4), "dp 2, ZeRO 1": Layout(dp=2, zero=1, micro_batch=4)}
BATCHES = (8, 32, 128)
"""Sequences of a step; the first is the job's."""


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


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    measure_times(parser.parse_args().steps)


if __name__ == "__main__":
    main()
