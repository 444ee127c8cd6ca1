"""Whole training steps of Myriad on a fake CUDA device: what they start there, and where the host waits.

    child process     driver loaded, torch imported, `torch.cuda` faked
    each case         an Engine of one rank, built as the trainer builds it, does two steps; the second counts

A wrong device or type of a tensor is an error of FakeTensorMode. Values are not computed.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from fake_device import DEVICE, fake_torch_cuda, waits
from launch_counter import LaunchCounter, lists_in_one_copy
from stand_ins import addresses, counted_kernels, fake_world, indices_on_host
from step_cases import StepCase
from torch._subclasses.fake_tensor import FakeTensorMode

from myriad.comm.layout import check_layout
from myriad.data.config import DataConfig
from myriad.model.gpt import GPT
from myriad.optim.precision import resolve_float8
from myriad.parallel import trial_steps
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.parallel.user_means import UserMeans
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder
from myriad.train.data_loader import to_batch

_FAKES = FakeTensorMode(allow_non_fake_inputs=True)
"""One for all cases: what Myriad caches stays of one kind."""


@dataclass(frozen=True)
class Measured:
    """One step."""

    launches: Counter[str]
    """Kernels by name."""
    moved: Counter[str]
    """Bytes that they read and write."""
    waits: Counter[str]
    """Times that the host waited for the device, by what for and where."""
    validation_waits: Counter[str]
    """Those of a batch of validation."""
    sums_bytes: Counter[str]
    """Bytes of gradient sums that are read and written for each parameter, by operator, without what Triton's
    optimizer reads."""
    in_graphs: Counter[str]
    """Kernels that graphs started: those are one launch each."""


class _FakeGraphs:
    """`myriad.parallel.cuda_graphs.Capturer`: what is captured is counted in the graph, and a replay as
    one."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._counter = counter
        self.replayed: Counter[str] = Counter()
        """Kernels in the graphs that were replayed."""

    def warming(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, work: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        launches = self._counter.launches
        before = Counter(launches)
        work()
        inside = launches - before
        launches.clear()
        launches.update(before)

        def replay() -> None:
            launches["graph"] += 1
            self.replayed.update(inside)

        return replay


def measure(case: StepCase, *, captures: bool = False, validates: bool = True) -> Measured:
    """Return what the second step of a case starts; the first fills caches. ``captures``: its stages are
    captured as CUDA graphs. ``validates``: a validation follows. Raises what goes wrong."""
    counter = LaunchCounter()
    graphs = _FakeGraphs(counter)
    with (
        fake_torch_cuda(),
        counted_kernels(counter),
        indices_on_host(),
        addresses(),
        lists_in_one_copy(),
        mock.patch.object(UserMeans, "means", lambda self, sums: {}),  # the fake's ones are no logged names
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
            keeps_addresses=captures,
        )
        rows = case.micro_batches * layout.micro_batch

        def load() -> Batch:
            tokens = np.zeros((rows, model.sequence + 1), np.int32)
            return to_batch(SimpleNamespace(model=model, data=DataConfig()), tokens, 0, 0, DEVICE)

        if captures:
            with (  # there are no values to compare, and none to add up over ranks
                mock.patch.object(trial_steps, "_difference", lambda *_: ""),
                mock.patch.object(
                    trial_steps.TrialSteps, "_fails_anywhere", lambda trial, problem: bool(problem)
                ),
            ):
                engine.capture(graphs, load, rows * model.sequence)
        chunks = engine.model.chunks
        for _ in range(2):
            counter.clear()
            graphs.replayed.clear()
            counter.watched = {chunk.grad_buffer.untyped_storage()._cdata for chunk in chunks}
            waits.clear()
            engine.train_step(load, 1e-3, rows * model.sequence)
        launches, moved, of_step = Counter(counter.launches), Counter(counter.moved), Counter(waits)
        size = sum(chunk.size for chunk in chunks)
        traffic = Counter({name: count / size for name, count in counter.traffic.items()})
        waits.clear()
        if validates:
            engine.evaluate(load)
        engine.close()
    return Measured(launches, moved, of_step, Counter(waits), traffic, Counter(graphs.replayed))


def launches_captured(case: StepCase) -> dict[str, int]:
    """Return what a step starts operator by operator, and with captured stages by the host and in graphs."""
    one_by_one, captured = measure(case), measure(case, captures=True)
    return {
        "one_by_one": sum(one_by_one.launches.values()),
        "by_host": sum(captured.launches.values()),
        "graphs": captured.launches["graph"],
        "in_graphs": sum(captured.in_graphs.values()),
    }


def measure_layer(case: StepCase) -> tuple[Counter[str], Counter[str]]:
    """Return what one more layer starts, forward, backward and recomputation, and the bytes that it moves; of
    a case with several micro-batches in the last one alone."""
    if case.micro_batches > 1:
        before, whole = _of_all(replace(case, micro_batches=case.micro_batches - 1)), _of_all(case)
        return _difference(whole[0], before[0]), _difference(whole[1], before[1])
    return _of_all(case)


def _of_all(case: StepCase) -> tuple[Counter[str], Counter[str]]:
    """All micro-batches of one more layer."""
    fewer, more = (
        measure(replace(case, model=case.model.model_copy(update={"layers": layers})), validates=False)
        for layers in (1, 2)
    )
    return _difference(more.launches, fewer.launches), _difference(more.moved, fewer.moved)


def _difference(more: Counter[str], fewer: Counter[str]) -> Counter[str]:
    return Counter({name: more[name] - fewer[name] for name in more if more[name] != fewer[name]})
