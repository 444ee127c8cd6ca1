"""Memory of real ranks at their highest moment against what the planner predicts, layout by layout.

    python benchmarks/memory/planner_memory.py [WORLD ...] [KEY ...]        default 1 2 4

Ranks of WORLD processes; with KEY, such as ``pp=``, only layouts with one of these keys.

Measured is what tensors hold after every operator of a step (`live_bytes.py`), the second one; predicted is
`myriad.planner.memory.rank_memory`, without the margin. Beside it stands by how much the process grew
(VmHWM, from before the model is built), which has the allocator's, gloo's and Python's own memory too,
against the prediction with the margin.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from live_bytes import LiveBytes
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

MODEL = ModelConfig(layers=8, hidden=256, heads=4, sequence=1024, vocabulary=4096)
GPT2 = ModelConfig(
    layers=6, hidden=256, heads=4, sequence=256, vocabulary=8192, norm="layer", bias=True, position="learned"
)
LLAMA = ModelConfig(
    layers=6, hidden=256, heads=8, kv_heads=4, ffn_hidden=704, sequence=768, vocabulary=4096,
    activation="swiglu", tied=False,
)  # fmt: skip
PARALLEL = MODEL.model_copy(update={"block": "parallel", "layers": 6, "window": 256})
MOE = ModelConfig(
    layers=4, hidden=256, heads=4, sequence=256, vocabulary=4096, activation="swiglu", experts=8,
    expert_hidden=256, balance_loss=0.1,
)  # fmt: skip
LARGE = ModelConfig(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=16384)
MODELS = {"large": LARGE, "serial": MODEL, "gpt2": GPT2, "llama": LLAMA, "parallel": PARALLEL, "moe": MOE}


@dataclass(frozen=True)
class Case:
    """One job, and how many micro-batches a replica has."""

    layout: dict[str, Any]
    model: str = "serial"
    micro_batches: int = 4
    value_bytes: int = 4
    overlap: dict[str, Any] | None = None

    @property
    def work(self) -> Workload:
        layout = Layout(**self.layout)
        return Workload(
            MODELS[self.model],
            layout,
            self.micro_batches * layout.dp * layout.micro_batch,
            overlap=OverlapConfig(**(self.overlap or {})),
            value_bytes=self.value_bytes,
        )

    def __str__(self) -> str:
        keys = " ".join(f"{key}={value}" for key, value in (self.layout | (self.overlap or {})).items())
        return f"{keys or 'alone'} m={self.micro_batches}"


EARLY = {"optimizer_in_backward": True}

CASES = (
    Case({}),
    Case({}, value_bytes=2),
    Case({"micro_batch": 2, "recompute": "selective"}, value_bytes=2),
    Case({"micro_batch": 2, "recompute": "full"}),
    Case({"micro_batch": 4}, "gpt2"),
    Case({"micro_batch": 2}, "llama", value_bytes=2),
    Case({"micro_batch": 2}, "parallel"),
    Case({"schedule": "gpipe"}),
    Case({}, "large", 2, value_bytes=2),
    Case({}, "large", 1),
    Case({}, "large", 1, overlap=EARLY),
    Case({"pp": 2}),
    Case({"pp": 2, "micro_batch": 2}, value_bytes=2),
    Case({"pp": 2, "virtual_stages": 2, "micro_batch": 2}, "llama"),
    Case({"pp": 2, "virtual_stages": 2}, "gpt2", 24),
    Case({"pp": 2, "schedule": "gpipe"}, "gpt2", 8),
    Case({"pp": 2, "schedule": "zero-bubble"}),
    Case({"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v"}, value_bytes=2),
    Case({"pp": 2, "schedule": "eager-1f1b", "recompute": "full"}, "llama", 8),
    Case({"tp": 2}),
    Case({"tp": 2, "micro_batch": 2}, "llama", value_bytes=2),
    Case({"tp": 2, "micro_batch": 2}, "parallel", overlap={"tensor": False}),
    Case({"dp": 2}),
    Case({"dp": 2, "zero": 1}, "gpt2", value_bytes=2),
    Case({"dp": 2, "zero": 1}, "large", 1),
    Case({"dp": 2, "zero": 1}, "large", 1, overlap=EARLY),
    Case({"dp": 2, "zero": 2, "reduce": "each"}, "llama"),
    Case({"dp": 2, "zero": 3}, "llama", value_bytes=2),
    Case({"dp": 2, "zero": 3, "reduce": "each"}),
    Case({"pp": 2}, "large", 2),
    Case({"pp": 4}, micro_batches=8),
    Case({"pp": 4, "schedule": "eager-1f1b"}, "gpt2", 8),
    Case({"pp": 4, "virtual_stages": 2}, "serial", 8, value_bytes=2),
    Case({"dp": 2, "pp": 2, "zero": 1}, "llama", 4),
    Case({"dp": 2, "pp": 2, "zero": 2, "reduce": "each", "virtual_stages": 2}, "llama", value_bytes=2),
    Case({"dp": 2, "tp": 2, "zero": 3}, "gpt2", value_bytes=2),
    Case({"tp": 2, "pp": 2, "micro_batch": 2}, "parallel", value_bytes=2),
    Case({"dp": 4, "zero": 2}, "serial", 2),
    Case({"tp": 4, "recompute": "selective"}, "llama", 2),
    Case({"micro_batch": 2}, "moe", 2),
    Case({"dp": 2, "ep": 2, "zero": 1, "micro_batch": 2}, "moe", 2),
    Case({"dp": 2, "ep": 2, "zero": 3, "micro_batch": 2}, "moe", 2),
    Case({"tp": 2, "micro_batch": 2}, "moe", 2),
    Case({"tp": 2, "ep": 2, "etp": 1, "micro_batch": 2}, "moe", 2),
    Case({"tp": 2, "etp": 1, "zero": 1, "micro_batch": 2}, "moe", 2),
)


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank."""

    peak: int
    """Highest bytes of tensors."""
    grown: int
    """Growth of the process in bytes."""
    at_peak: dict[str, int]


def measure(case: Case) -> Measured:
    """One rank's side: two steps; the second one's highest moment."""
    work, layout, baseline = case.work, case.work.layout, _high_water()
    groups = open_world(layout, torch.device("cpu"))
    definition = GPT(work.model, seed=1)
    rows = layout.micro_batch * work.num_micro_batches
    live = LiveBytes()
    with live:
        # Random tokens: equal ones would all take the same experts.
        generator = torch.Generator().manual_seed(groups.grid.index("dp"))
        shape = rows, work.model.sequence
        tokens = torch.randint(work.model.vocabulary, shape, generator=generator)
        batch = Batch(tokens, torch.zeros_like(tokens), tokens[:, 0].contiguous())
        engine = Engine(
            definition, groups, stage_layers(work), _rows(batch, layout.micro_batch),
            work.num_micro_batches, OptimizerConfig(clip_norm=None), seed=1,
            dtype=torch.float32 if work.value_bytes == 4 else torch.bfloat16,
            device=torch.device("cpu"), recorder=Recorder(), overlap=work.overlap,
        )  # fmt: skip
        targets = tokens.numel() * layout.dp
        engine.train_step(lambda: batch, 1e-3, targets)
        live.start_peak()
        engine.train_step(lambda: batch, 1e-3, targets)
    engine.close()
    found = Measured(live.peak, _high_water() - baseline, live.at_peak)
    close_world()
    return found


def _rows(batch: Batch, count: int) -> Batch:
    return Batch(batch.inputs[:count], batch.targets[:count], batch.samples[:count])


def _high_water() -> int:
    """Most memory this process ever had, in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def predicted(case: Case) -> list[tuple[float, float]]:
    """Bytes of each pipeline rank: of tensors, and with the margin."""
    ranks = memory_of_ranks(case.work, on_cpu=True)
    return [(float(one.total - one.margin), float(one.total)) for one in ranks]


def _rank(rank: int, port: int, case: Case) -> Measured:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(case.work.layout.world),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    return measure(case)


def measure_ranks(case: Case) -> list[Measured]:
    """Measure every rank in a new process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = case.work.layout.world
    with multiprocessing.get_context("fork").Pool(world) as pool:
        return pool.starmap(_rank, [(rank, port, case) for rank in range(world)], chunksize=1)


def errors_of(case: Case, ranks: Sequence[Measured]) -> list[float]:
    """Return predicted / measured - 1 of each rank's tensors."""
    return [expected[0] / found.peak - 1 for expected, found in _pairs(case, ranks)]


def growth_errors_of(case: Case, ranks: Sequence[Measured]) -> list[float]:
    """The same of the processes, against the prediction with its margin."""
    return [expected[1] / found.grown - 1 for expected, found in _pairs(case, ranks)]


def _pairs(case: Case, ranks: Sequence[Measured]) -> list[tuple[tuple[float, float], Measured]]:
    layout, expected = case.work.layout, predicted(case)
    return [(expected[rank // layout.tp % layout.pp], found) for rank, found in enumerate(ranks)]


def row(case: Case, ranks: Sequence[Measured]) -> str:
    """A line of the table: the rank with the most memory, and the worst error of all."""
    top = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    expected, found = _pairs(case, ranks)[top]
    errors, growth = errors_of(case, ranks), growth_errors_of(case, ranks)
    cells = [case.model, "bf16" if case.value_bytes == 2 else "float32", str(case), str(top)]
    cells += [f"{size / 2**20:,.1f}" for size in (expected[0], found.peak)]
    cells += [f"{errors[top]:+.1%}", f"{max(errors, key=abs):+.1%}"]
    cells += [f"{size / 2**20:,.0f}" for size in (expected[1], found.grown)]
    cells += [f"{growth[top]:+.0%}"]
    return "| " + " | ".join(cells) + " |"


def summary(what: str, errors: Sequence[float], within: float) -> str:
    """Return a line about the errors of all ranks."""
    sizes = [abs(error) for error in errors]
    inside = sum(size <= within for size in sizes)
    words = f"{what} of {len(errors)} ranks: median error {median(sizes):.1%}, "
    words += f"worst {max(errors, key=abs):+.1%}, mean {sum(errors) / len(errors):+.1%}; "
    return words + f"{inside} within {within:.0%}"


def main(arguments: Sequence[str]) -> None:
    """Prints the table, and the median and worst error over all ranks."""
    worlds = [int(argument) for argument in arguments if argument.isdigit()] or [1, 2, 4]
    keys = [argument for argument in arguments if not argument.isdigit()] or [""]
    names = "model, type, layout, rank, predicted MiB, tensors MiB, error, worst rank, with margin MiB, "
    names += "process grew MiB, error"
    print("| " + names.replace(", ", " | ") + " |\n" + "|---" * 11 + "|")
    tensors: list[float] = []
    processes: list[float] = []
    for case in CASES:
        if case.work.layout.world in worlds and any(key in str(case) for key in keys):
            ranks = measure_ranks(case)
            tensors += errors_of(case, ranks)
            processes += growth_errors_of(case, ranks)
            print(row(case, ranks), flush=True)
    print(f"\n{summary('Tensors', tensors, 0.05)}.\n{summary('Processes', processes, 0.15)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
