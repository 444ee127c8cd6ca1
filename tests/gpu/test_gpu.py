"""One GPU gives what the CPU gives; bfloat16 learns. Skipped where there is no CUDA device."""

import pytest
import torch

from myriad.comm.groups import open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.engine import Engine
from myriad.parallel.partition import partition_layers
from myriad.parallel.runtime import Batch
from myriad.telemetry.spans import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = ModelConfig(layers=2, hidden=128, heads=4, sequence=128, vocabulary=500, window=48, block="parallel")


def losses(device: str, dtype: torch.dtype, steps: int = 10) -> list[float]:
    on = torch.device(device)
    layout = Layout(micro_batch=4, virtual_stages=2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 500, (8, 129), generator=generator).to(on)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(8, device=on))
    definition = GPT(CONFIG, seed=1)
    engine = Engine(
        definition,
        open_world(layout, on),
        partition_layers("uniform", 2, definition.kinds),
        Batch(batch.inputs[:4], batch.targets[:4], batch.samples[:4]),
        2,
        OptimizerConfig(),
        seed=1,
        dtype=dtype,
        device=on,
        recorder=Recorder(),
    )
    return [engine.train_step(lambda: batch, 1e-3, 8 * 128).loss for _ in range(steps)]


def test_float32_on_the_gpu_gives_the_losses_of_the_cpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert losses("cuda", torch.float32) == pytest.approx(losses("cpu", torch.float32), rel=1e-4)


def test_bfloat16_learns_and_stays_near_float32() -> None:
    found, reference = losses("cuda", torch.bfloat16), losses("cuda", torch.float32)
    assert found[-1] < found[0] - 0.3
    assert found == pytest.approx(reference, rel=2e-2)


def test_the_same_run_twice_gives_the_same_bits() -> None:
    assert losses("cuda", torch.float32) == losses("cuda", torch.float32)
