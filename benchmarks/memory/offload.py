"""Memory and time with activations or optimizer state in host memory, beside recomputation.

    python benchmarks/memory/offload.py measured [--steps 4] [--precision bfloat16]
    python benchmarks/memory/offload.py predicted [JOB] [--cluster CLUSTER]

``measured`` trains a small model in one process. Device memory is what tensors hold after every operator of a
step (`live_bytes.py`), without the host buffers, which on a CPU are the same kind of memory. Beside it stand
the planner's bytes, without the margin, and the processor seconds of a step, the least of some. On a CPU a
copy overlaps with nothing: the seconds show what it costs, not what is hidden.

``predicted`` prints what the planner says of the job's layouts with ZeRO 1 on the whole cluster: bytes on the
fullest accelerator and in its host's memory, and the seconds of a simulated iteration.
"""

import argparse
import os
import socket
import time
from itertools import product

import torch

from live_bytes import LiveBytes
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.job import load_job
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.memory.closed_form_memory import PeakMemory, fits_probability
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster
from myriad.telemetry.spans import Recorder

MODEL = ModelConfig(layers=4, hidden=128, heads=4, sequence=512, vocabulary=1024)
OVERLAP = OverlapConfig(chunks=6)
"""One layer in each chunk."""
OFFLOADS = tuple(product((0.0, 1.0), (False, True)))
RECOMPUTES = ("none", "selective", "full")


def measure(layout: Layout, dtype: torch.dtype, steps: int) -> tuple[int, int, float]:
    """Return the most bytes of a step on the device, those in host memory, and a step's processor seconds."""
    tokens = torch.zeros(2 * layout.micro_batch, MODEL.sequence, dtype=torch.int64)
    data = Batch(tokens, tokens, torch.arange(len(tokens)))
    sample = Batch(*(one[: layout.micro_batch] for one in (data.inputs, data.targets, data.samples)))
    workload = workload_of(layout, dtype)
    with LiveBytes() as live:
        engine = Engine(
            GPT(MODEL, seed=1),
            open_world(layout, torch.device("cpu")),
            stage_layers(workload),
            sample,
            2,
            OptimizerConfig(),
            seed=1,
            dtype=dtype,
            device=torch.device("cpu"),
            recorder=Recorder(),
            overlap=OVERLAP,
        )
        engine.train_step(lambda: data, 1e-3, tokens.numel())
        live.start_peak()
        engine.train_step(lambda: data, 1e-3, tokens.numel())
    host = engine._runtime.offload.host_bytes
    host += engine._optimizer_step.offload.host_bytes
    seconds = []
    for _ in range(steps):
        begun = time.process_time()
        engine.train_step(lambda: data, 1e-3, tokens.numel())
        seconds.append(time.process_time() - begun)
    engine.close()
    return live.peak - host, host, min(seconds)


def workload_of(layout: Layout, dtype: torch.dtype) -> Workload:
    """Return what the planner is asked of the small model."""
    return Workload(MODEL, layout, 2, overlap=OVERLAP, value_bytes=dtype.itemsize)


def print_measured(dtype: torch.dtype, steps: int) -> None:
    """Print a line for each kind of recomputation and offload."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    print("| recompute | offload | device MiB | planned | host MiB | planned | processor s / step |")
    print("|---" * 7 + "|")
    for recompute, (activations, optimizer) in product(RECOMPUTES, OFFLOADS):
        layout = Layout(recompute=recompute, offload_activations=activations, offload_optimizer=optimizer)
        device, host, seconds = measure(layout, dtype, steps)
        (plan,) = memory_of_ranks(workload_of(layout, dtype), on_cpu=True)
        sizes = (device, float(plan.total) - float(plan.margin), host, float(plan.host))
        cells = [recompute, _name(activations, optimizer), *(f"{size / 2**20:.1f}" for size in sizes)]
        print("| " + " | ".join([*cells, f"{seconds:.2f}"]) + " |", flush=True)
    close_world()


def print_predicted(name: str, cluster_name: str) -> None:
    """Print a line for each size of a micro-batch, kind of recomputation and offload."""
    cluster = load_cluster(cluster_name)
    model = load_job(name).model
    print(f"{name}, {cluster.world} x {cluster.accelerator.name}, ZeRO 1, {32 * cluster.world} sequences.\n")
    print("| micro-batch | recompute | offload | device GiB | host GiB | fits | s / iteration |")
    print("|---" * 7 + "|")
    for size, recompute, activations, optimizer in product(
        (1, 2), RECOMPUTES, (0.0, 0.25, 0.5, 1.0), (False, True)
    ):
        layout = Layout(
            dp=cluster.world,
            zero=1,
            micro_batch=size,
            recompute=recompute,
            offload_activations=activations,
            offload_optimizer=optimizer,
        )
        workload = Workload(model, layout, 32 * cluster.world)
        (memory,) = memory_of_ranks(workload, node_size=cluster.accelerators_per_node)
        seconds = SimulationCache().seconds(Costs(workload, cluster))
        cells = [str(size), recompute, _name(activations, optimizer), *_sizes(memory)]
        cells.append(f"{float(fits_probability(memory, float(cluster.accelerator.memory_bytes))):.0%}")
        print("| " + " | ".join([*cells, f"{seconds:.2f}"]) + " |", flush=True)


def _sizes(memory: PeakMemory) -> list[str]:
    return [f"{float(size) / 2**30:.1f}" for size in (memory.total, memory.host)]


def _name(activations: float, optimizer: bool) -> str:
    share = [f"activations {activations:g}"] if activations else []
    return " and ".join(share + ["optimizer"] * optimizer) or "nothing"


def main() -> None:
    """Print the table that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("measured", "predicted"))
    parser.add_argument("job", nargs="?", default="llama3-8b")
    parser.add_argument("--cluster", default="one-node-8xh100")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    if given.what == "measured":
        print_measured(getattr(torch, given.precision), given.steps)
    else:
        print_predicted(given.job, given.cluster)


if __name__ == "__main__":
    main()
