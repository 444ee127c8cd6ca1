"""Whole training steps of Myriad on a fake CUDA device: what they start there, and where the host waits.

    child process     driver loaded, torch imported, `torch.cuda` faked
    each case         an Engine of one rank, built as the trainer builds it, does two steps; the second counts

A wrong device or type of a tensor is an error of FakeTensorMode. Values are not computed.
"""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from fake_device import DEVICE, fake_torch_cuda, waits
from launch_counter import LaunchCounter, lists_in_one_copy
from stand_ins import addresses, counted_kernels, fake_world, indices_on_host
from step_cases import StepCase
from torch._subclasses.fake_tensor import FakeTensorMode

from myriad.comm.layout import check_layout
from myriad.model.gpt import GPT
from myriad.optim.precision import resolve_float8
from myriad.parallel.engine import Engine
from myriad.parallel.runtime import Batch
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder
from myriad.train.batches import to_batch

_FAKES = FakeTensorMode(allow_non_fake_inputs=True)
"""One for all cases: what Myriad caches stays of one kind."""


@dataclass(frozen=True)
class Measured:
    """One step."""

    launches: Counter[str]
    """Kernels by name."""
    waits: Counter[str]
    """Times that the host waited for the device, by what for and where."""
    validation_waits: Counter[str]
    """Those of a batch of validation."""


def measure(case: StepCase) -> Measured:
    """Return what the second step of a case starts; the first fills caches. Raises what goes wrong."""
    counter = LaunchCounter()
    with (
        fake_torch_cuda(),
        counted_kernels(counter.launches),
        indices_on_host(),
        addresses(),
        lists_in_one_copy(),
        fake_world(case.layout, case.rank) as groups,
        _FAKES,
        counter,
    ):
        model, layout = case.model, case.layout
        check_layout(layout)
        definition = GPT(model, seed=1)
        tokens = torch.zeros((layout.micro_batch, model.sequence), dtype=torch.int64, device=DEVICE)
        engine = Engine(
            definition,
            groups,
            partition_layers(layout.partition, layout.num_stages, definition.kinds, None),
            Batch(tokens, tokens, tokens[:, 0]),
            case.micro_batches,
            case.optimizer,
            seed=1,
            dtype=torch.float32 if case.precision == "float32" else torch.bfloat16,
            device=DEVICE,
            recorder=Recorder(),
            overlap=case.overlap,
            comm=case.comm,
            kernels=case.kernels,
            float8=resolve_float8(case.precision, case.kernels),
        )
        rows = case.micro_batches * layout.micro_batch

        def load() -> Batch:
            tokens = np.zeros((rows, model.sequence + 1), np.int32)
            return to_batch(SimpleNamespace(model=model), tokens, 0, DEVICE)

        for _ in range(2):
            counter.launches.clear()
            waits.clear()
            engine.train_step(load, 1e-3, rows * model.sequence)
        launches, of_step = Counter(counter.launches), Counter(waits)
        waits.clear()
        engine.evaluate(load)
        engine.close()
    return Measured(launches, of_step, Counter(waits))


def launches_a_layer(case: StepCase) -> Counter[str]:
    """Return what one more layer starts, forward, backward and recomputation."""
    fewer, more = (
        measure(replace(case, model=case.model.model_copy(update={"layers": layers}))).launches
        for layers in (1, 2)
    )
    return Counter({name: more[name] - fewer[name] for name in more if more[name] != fewer[name]})
