"""One GPU gives what the CPU gives; bfloat16 and float16 learn. Skipped where there is no CUDA device."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.session import CheckpointSession, SessionSettings
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.grid import RankGrid
from myriad.comm.groups import open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.optim.config import LossScaleConfig, OptimizerConfig
from myriad.optim.loss_scale import LossScaler
from myriad.parallel.batch import Batch
from myriad.parallel.cuda_graphs import CudaGraphs
from myriad.parallel.engine import Engine
from myriad.program.partition import partition_layers
from myriad.telemetry.progress.device_clock import cuda_clock
from myriad.telemetry.progress.device_progress import DeviceProgress
from myriad.telemetry.progress.progress_page import ROW_BYTES, ProgressPage, ProgressRow
from myriad.telemetry.spans import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = ModelConfig(layers=2, hidden=128, heads=4, sequence=128, vocabulary=500, window=48, block="parallel")


def losses(device: str, dtype: torch.dtype, steps: int = 10, *, captures: bool = False) -> list[float]:
    on = torch.device(device)
    layout = Layout(micro_batch=4, virtual_stages=2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 500, (8, 129), generator=generator).to(on)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(8, device=on))
    definition = GPT(CONFIG, seed=1)
    engine = Engine(
        definition,
        open_world(layout, on),
        partition_layers("uniform", layout.num_stages, definition.kinds),
        Batch(batch.inputs[:4], batch.targets[:4], batch.samples[:4]),
        2,
        OptimizerConfig(),
        seed=1,
        dtype=dtype,
        device=on,
        recorder=Recorder(),
        loss_scaler=LossScaler(LossScaleConfig(), 8 * 128) if dtype == torch.float16 else None,
    )
    if captures:
        engine.capture(CudaGraphs(on, tp=1), lambda: batch, 8 * 128)
    return [engine.train_step(lambda: batch, 1e-3, 8 * 128).loss for _ in range(steps)]


def test_float32_on_the_gpu_gives_the_losses_of_the_cpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert losses("cuda", torch.float32) == pytest.approx(losses("cpu", torch.float32), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_learn_and_stay_near_float32(dtype: torch.dtype) -> None:
    found, reference = losses("cuda", dtype), losses("cuda", torch.float32)
    assert found[-1] < found[0] - 0.3
    assert found == pytest.approx(reference, rel=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_graphs_give_the_losses_of_operators_started_one_by_one(dtype: torch.dtype) -> None:
    assert losses("cuda", dtype, captures=True) == pytest.approx(losses("cuda", dtype), rel=1e-3)


def test_the_same_run_twice_gives_the_same_bits() -> None:
    assert losses("cuda", torch.float32) == losses("cuda", torch.float32)


def test_spans_have_the_devices_time_and_not_the_time_to_query_it() -> None:
    recorder = Recorder(device=cuda_clock())
    square = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    with recorder.span("forward"):
        for _ in range(20):
            square @ square
    asked = recorder.take_totals()["forward"]
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    recorder.step(2)
    (found,) = recorder.newest()
    assert asked < 0.5 * found.duration_seconds and found.duration_seconds <= took


def test_a_row_shows_where_the_device_is_while_the_host_waits_for_it() -> None:
    """It distinguishes a hang of this GPU from one of a peer."""
    page, device = ProgressPage(1), torch.device("cuda", 0)
    row = ProgressRow(memoryview(page._memory)[:ROW_BYTES])
    row.begin(1)
    recorder = Recorder(row, device=cuda_clock())
    assert recorder.device is not None
    progress = DeviceProgress(recorder.device, row, partial(torch.cuda.set_device, device), poll_seconds=0.01)
    with recorder.span("tensor_comm"):
        pass
    with recorder.span("forward"):
        torch.cuda._sleep(4_000_000_000)  # some two seconds
    with recorder.span("all_reduce", recorded=False):
        time.sleep(0.3)
        seen = page.read(0)
        torch.cuda.synchronize()
        time.sleep(0.3)
        assert page.read(0).activity == "all_reduce"
    progress.close()
    assert seen.on_device and seen.activity == "forward" and (seen.entered, seen.left) == (1, 1)


def test_snapshots_are_of_the_step_they_were_taken_after_while_the_device_runs_ahead(tmp_path: Path) -> None:
    """The next update is asked for at once: only the order on the device keeps it behind the copy."""
    device = torch.device("cuda", 0)
    settings = SessionSettings(
        CheckpointConfig(keep=20),
        run=tmp_path,
        folder=CheckpointFolder(tmp_path / "checkpoints"),
        events=tmp_path / "events.jsonl",
        log=tmp_path / "keeper.log",
        job="",
    )
    session = CheckpointSession(settings, RankGrid(Layout(), 0), 0, None, device)
    session.acquire(0)
    values = torch.zeros(2**24, device=device)
    session.begin([TensorShard("model.w", tuple(values.shape), (0,), values)])
    for step in range(1, 11):
        session.settle()
        values.fill_(step)
        session.take(step, {"step": step}, SnapshotPurpose(durable=step == 10, last=step == 10))
    session.settle()
    values.fill_(99)
    assert session.finish(10) is None
    session.close()
    assert (load_model(tmp_path / "checkpoints" / "step-10")["w"] == 10).all()
