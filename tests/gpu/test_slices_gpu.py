"""If this fails, tensor-parallel products on GPUs lose rows on their way through symmetric memory. Skipped
where there are not two GPUs that reach each other's memory."""

import multiprocessing
import os
from typing import Any

import pytest
import torch

from myriad.comm.free_port import free_port
from myriad.comm.groups import close_world, local_rank, open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.parallel.symmetric_memory import lacks_symmetric_memory
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

RANKS = 2


def train(rank: int, port: int, kind: str | None, block: str, results: Any) -> None:
    """One rank's side: its losses, or what stands against slices."""
    os.environ |= local_rank(rank, RANKS, port)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if lacks := lacks_symmetric_memory(device, torch.bfloat16, RANKS):
        results.put((rank, lacks))
        return
    layout = Layout(tp=RANKS, micro_batch=4)
    config = ModelConfig(layers=2, hidden=256, heads=4, sequence=128, vocabulary=500, block=block, bias=True)
    tokens = torch.randint(0, 500, (4, 129), generator=torch.Generator().manual_seed(0)).to(device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(4, device=device))
    engine = Engine(
        GPT(config, seed=1),
        open_world(layout, device),
        [range(4)],
        batch,
        1,
        OptimizerConfig(),
        seed=1,
        dtype=torch.bfloat16,
        device=device,
        recorder=Recorder(),
        overlap=OverlapConfig(tensor=kind),
    )
    found = [engine.train_step(lambda: batch, 1e-3, 4 * 128).loss for _ in range(10)]
    engine.close()
    close_world()
    results.put((rank, found))


def losses(kind: str | None, block: str) -> list[float]:
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.Queue()
    for rank in range(RANKS):
        context.Process(target=train, args=(rank, port, kind, block, results), daemon=True).start()
    found = dict(results.get(timeout=300) for _ in range(RANKS))
    if isinstance(found[0], str):
        pytest.skip(found[0])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_slices_give_the_losses_of_whole_tensors(block: str) -> None:
    found = losses("slices", block)
    assert found == pytest.approx(losses(None, block), rel=1e-2)
    assert found[-1] < found[0]
