"""Processor time of a step with Muon, beside AdamW's. `convergence` compares what optimizers learn.

    python benchmarks/training/muon.py [--steps 5] [--precision bfloat16]
    python benchmarks/training/muon.py --bounds

It counts the processor seconds of each rank's training step, which other work on the machine changes
less than its duration: the model of the job `embedded-gpt`, one process and two with ZeRO 1, at its batch and
at larger ones. The figure is the median over steps, of the rank that computes most.

Beside it stands what the floating-point operations alone give: those of the Newton-Schulz iterations on that
rank over those of its step with AdamW. Where a step takes no more than that, the iterations run at the rate
of the model's own products. With ``--bounds`` nothing is measured: it prints from how many tokens of a step
on the iterations of ready jobs are at most 5 % of its FLOPs, shared equally by all ranks.
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
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.model.matrix_shapes import hidden_matrices
from myriad.optim.config import OptimizerConfig, OptimizerName
from myriad.optim.matrix_owners import assign_owners, newton_schulz_flops
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder

LAYOUTS = {"one process": Layout(micro_batch=4), "dp 2, ZeRO 1": Layout(dp=2, zero=1, micro_batch=4)}
BATCHES = (8, 32, 128)
"""Sequences of a step; the first is the job's."""
BOUNDED = ("embedded-gpt", "embedded", "gpt2-124m", "gpt2-1558m", "llama3-8b", "llama3-70b")
ITERATIONS = OptimizerConfig().muon_iterations


def flops_of_matrices(model: ModelConfig) -> list[float]:
    """Return the FLOPs of orthogonalizing each matrix of a model."""
    layers = (hidden_matrices(model, layer, 1) for layer in range(model.layers + 2))
    return [newton_schulz_flops(one.rows, one.columns, ITERATIONS) for layer in layers for one in layer]


def print_bounds() -> None:
    """Print a row for each of some jobs."""
    print("| job | hidden | a step's iterations, GFLOP | a token, GFLOP | 5 % from tokens of a step |")
    print("|---|---|---|---|---|")
    for name in BOUNDED:
        model = load_job(name).model
        total, token = sum(flops_of_matrices(model)), model.flops_per_token()
        cells = name, model.hidden, f"{total / 1e9:,.1f}", f"{token / 1e9:,.3g}", f"{20 * total / token:,.0f}"
        print(f"| {' | '.join(map(str, cells))} |")


def flops_ratio(layout: Layout, batch: int) -> float:
    """Return the FLOPs of Newton-Schulz on the rank with the most, over those of its step with AdamW."""
    model = load_job("embedded-gpt").model
    assign_owners(flops_of_matrices(model), loads := [0.0] * layout.dp)
    return max(loads) / (model.flops_per_token() * model.sequence * batch / layout.dp)


def step_seconds(
    rank: int, port: int, layout: Layout, batch: int, optimizer: OptimizerName, steps: int, dtype: torch.dtype
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
        dtype=dtype,
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


def median_seconds(
    layout: Layout, batch: int, optimizer: OptimizerName, steps: int, dtype: torch.dtype
) -> float:
    """The median step of the rank that computes most."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [(rank, port, layout, batch, optimizer, steps, dtype) for rank in range(layout.world)]
    with multiprocessing.get_context("spawn").Pool(layout.world) as pool:
        ranks = pool.starmap(step_seconds, arguments, chunksize=1)
    return max(map(statistics.median, ranks))


def measure_times(steps: int, dtype: torch.dtype) -> None:
    """Print a row for each layout and batch."""
    print("| layout | tokens of a step | AdamW, ms | Muon, ms | Muon's more | by FLOPs |")
    print("|---|---|---|---|---|---|")
    sequence = load_job("embedded-gpt").model.sequence
    for name, layout in LAYOUTS.items():
        for batch in BATCHES:
            adamw, muon = (median_seconds(layout, batch, one, steps, dtype) for one in ("adamw", "muon"))
            shown = f"{1e3 * adamw:.1f} | {1e3 * muon:.1f} | {muon / adamw - 1:+.1%}"
            bound = flops_ratio(layout, batch)
            print(f"| {name} | {batch * sequence:,} | {shown} | {bound:+.1%} |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bounds", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.bounds:
        print_bounds()
        return
    measure_times(options.steps, getattr(torch, options.precision))


if __name__ == "__main__":
    main()
