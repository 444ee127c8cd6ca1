"""If these fail, a layout of several GPUs hangs over NCCL, or trains something else than one GPU does.
Skipped where there are fewer GPUs than ranks; `tests/processes/test_nccl_like.py` runs as much on CPUs."""

import multiprocessing
import os
from functools import partial
from typing import Any

import pytest
import torch

from myriad.comm.collectives import all_reduce, sum_in_order
from myriad.comm.free_port import free_port
from myriad.comm.groups import close_world, local_rank, open_world
from myriad.comm.layout import Layout, lacks_for_graphs
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.program.config import OverlapConfig
from myriad.train.fit import fit

STEPS, GLOBAL_BATCH, LIMIT_SECONDS = 3, 8, 120
CONFIG = ModelConfig(layers=6, hidden=128, heads=4, sequence=64, vocabulary=500)
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero-{stage}": {"dp": 2, "zero": stage} for stage in range(4)},
    "tensor": {"tp": 2},
    "tensor, four sequences": {"tp": 2, "micro_batch": 4},
    **{
        name: {"pp": 2, "schedule": name}
        for name in ("gpipe", "1f1b", "eager-1f1b", "zero-bubble", "eager-zero-bubble")
    },
    **{
        name: {"pp": 2, "schedule": name, "virtual_stages": 2}
        for name in ("interleaved", "zero-bubble-v", "dualpipe-v")
    },
    "pipeline of 4": {"pp": 4},
    "dp x tp": {"dp": 2, "tp": 2, "zero": 1},
    "dp x tp x pp": {"dp": 2, "tp": 2, "pp": 2, "zero": 2},
}
DEVICE = os.environ.get("MYRIAD_TEST_NCCL_ON", "cuda")
"""cpu: the tests' own code is tried, over gloo."""


def needs(world: int) -> pytest.MarkDecorator:
    missing = DEVICE == "cuda" and torch.cuda.device_count() < world
    return pytest.mark.skipif(missing, reason=f"needs {world} CUDA devices")


def batch_of(step: int, rows: range) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 500, (GLOBAL_BATCH, CONFIG.sequence + 1), generator=generator)[list(rows)]
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.tensor(list(rows)))


def train(layout: Layout, captures: bool = False) -> list[float]:
    """One rank's side: its losses, which rank 0 alone has."""
    optimizer = OptimizerConfig()
    steps = fit(GPT(CONFIG, seed=1), batch_of, layout, optimizer, steps=STEPS, global_batch=GLOBAL_BATCH,
                device=DEVICE, precision="float32", cuda_graphs=captures)  # type: ignore[arg-type] # fmt: skip
    return [result.loss for _, result in steps]


def exchange(layout: Layout) -> list[float]:
    """One rank's side: what it has after sums with all ranks, with those of its axis, and in rank order."""
    device = torch.device(DEVICE, int(os.environ["RANK"])) if DEVICE == "cuda" else torch.device("cpu")
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    groups = open_world(layout, device)
    mine = torch.full((1000,), float(groups.grid.rank + 1), device=device)
    found = [all_reduce(mine.clone(), groups.world), all_reduce(mine.clone(), groups.along("tp"))]
    found.append(sum_in_order(mine.clone(), groups.along("tp")))
    values = [float(one.mean()) for one in found]
    close_world()
    return values


def enter(rank: int, world: int, port: int, function: Any, results: Any) -> None:
    os.environ |= {**local_rank(rank, world, port), "OMP_NUM_THREADS": "1"}
    torch.backends.cuda.matmul.allow_tf32 = False
    results.put((rank, function()))


def on_ranks(world: int, function: Any) -> list[Any]:
    """What a function gives on each rank; a rank that does not answer in time fails the test."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.Queue()
    ranks = [context.Process(target=enter, args=(n, world, port, function, results)) for n in range(world)]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=LIMIT_SECONDS) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
    return [found[rank] for rank in range(world)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    (losses,) = on_ranks(1, partial(train, Layout(micro_batch=1)))
    return losses


@needs(4)
def test_ranks_add_up_with_all_and_along_an_axis() -> None:
    found = on_ranks(4, partial(exchange, Layout(dp=2, tp=2)))
    assert found == [[10.0, 3.0, 3.0], [10.0, 3.0, 3.0], [10.0, 7.0, 7.0], [10.0, 7.0, 7.0]]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(**keys), id=name, marks=needs(Layout(**keys).world))
        for name, keys in LAYOUTS.items()
    ],
)
def test_a_layout_over_nccl_gives_the_losses_of_one_gpu(layout: Layout, alone: list[float]) -> None:
    losses, *_ = on_ranks(layout.world, partial(train, layout))
    assert len(losses) == STEPS and losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(**keys), id=name, marks=needs(Layout(**keys).world))
        for name, keys in LAYOUTS.items()
        if not lacks_for_graphs(Layout(**keys), OverlapConfig())
    ],
)
def test_captured_stages_over_nccl_give_the_losses_of_one_gpu(layout: Layout, alone: list[float]) -> None:
    losses, *_ = on_ranks(layout.world, partial(train, layout, captures=True))
    assert len(losses) == STEPS and losses == pytest.approx(alone, rel=1e-4)
