"""If these fail, activations or optimizer state that were in host memory come back as other values, are not
freed on the device, or take more memory than the plan says."""

import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from parity_case import TINY, Case, batch_of_rank, make_engine, train_steps
from ranks import run_ranks

from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.workload import Workload
from myriad.program.actions import Kind
from myriad.program.config import OverlapConfig


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory" / "offload.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("offload_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["offload_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


BENCHMARK: Any = load_benchmark()
OFFLOADS: dict[str, Any] = {"offload_activations": 1.0, "offload_optimizer": True}
STEPS = 3


@dataclass
class Found:
    """What one rank did."""

    place: int
    results: list[tuple[float, float]]
    state: dict[str, bytes]
    saved: list[bytes]
    host_bytes: int = 0
    stays_bytes: int = 0
    """Bytes of moments that stay on the device."""
    left_on_device: int = 0
    """The most bytes of moments and offloaded activations that were on the device while they were out."""


def trained(case: Case, first: int, last: int, start: list[bytes]) -> Found:
    """Train some steps, from the state of an earlier run if ``start`` has one."""
    engine = make_engine(case)
    found = Found(engine.groups.grid.index("pp"), [], {}, [])
    offload, do = engine._runtime.offload, engine._runtime.offload._do

    def awaited(key: tuple[int, int]) -> None:
        do[Kind.AWAIT_OFFLOAD](key)
        left = sum(storage.nbytes() for storage in offload._offloaded[key].storages)
        found.left_on_device = max(found.left_on_device, left)

    offload._do = {**do, Kind.AWAIT_OFFLOAD: awaited}
    for one, values in zip(engine.all_shards(), start, strict=False):
        one.values.copy_(torch.frombuffer(bytearray(values), dtype=torch.float32).view(one.values.shape))
    if start:
        engine.optimizer.steps_done = first
        engine.loaded()
    found.results = train_steps(case, engine, first, last)
    if "ema_decay" in case.optimizer:
        with engine.averaged():
            found.results.append(engine.evaluate(lambda: batch_of_rank(case, engine, last)))
    found.state = {f"{one.name} {one.offsets}": one.values.numpy().tobytes() for one in engine.shards()}
    found.saved = [one.values.numpy().tobytes() for one in engine.all_shards()]
    if engine.optimizer.host is not None:
        found.host_bytes = offload.host_bytes + engine._optimizer_step.offload.host_bytes
        away = [one for one in engine.model.chunks if one.stored is not one.master]
        found.left_on_device += sum(one.master.untyped_storage().nbytes() for one in away)
        adam: Any = engine.optimizer
        pairs = zip(adam.exp_avg, adam.exp_avg_sq, strict=True)
        on_device = [sum(one.untyped_storage().nbytes() for one in pair) for pair in pairs]
        sizes = list(zip(map(sum, engine.optimizer.host._sizes), on_device, strict=True))
        found.left_on_device += sum(here for there, here in sizes if there)
        found.stays_bytes = sum(here for there, here in sizes if not there)
    engine.close()
    close_world()
    return found


def from_saved(case: Case, first: int, last: int, states: list[list[bytes]]) -> Found:
    return trained(case, first, last, states[int(os.environ["RANK"])])


@pytest.mark.parametrize(
    "case",
    [
        Case({"dp": 2, "zero": 2, "reduce": "each", "recompute": "selective"}, dtype=torch.bfloat16),
        Case({"dp": 2, "zero": 3}, {}, {"ema_decay": 0.5}, dtype=torch.bfloat16),
        Case({"pp": 2, "schedule": "gpipe", "recompute": "full", "recompute_ratio": 0.5}, {"tied": False}),
        Case(
            {"tp": 2, "dp": 2, "micro_batch": 2, "offload_optimizer_ratio": 0.5},
            {"kv_heads": 2},
            {"name": "muon"},
            dtype=torch.bfloat16,
        ),
    ],
    ids=lambda case: str(case.layout),
)
def test_what_was_in_host_memory_comes_back_to_the_bit_and_takes_the_planned_bytes(case: Case) -> None:
    case = replace(case, steps=STEPS, overlap={"chunks": 2}, optimizer=case.optimizer | {"clip_norm": None})
    layout = Layout(**(case.layout | OFFLOADS))
    workload = Workload(
        ModelConfig(**(TINY | case.model)),
        layout,
        case.global_batch,
        overlap=OverlapConfig(**case.overlap),
        optimizer=case.optimizer.get("name", "adamw"),
        value_bytes=case.dtype.itemsize,
        ema_every="ema_decay" in case.optimizer,
    )
    planned = memory_of_ranks(workload, on_cpu=True)
    most = [0] * layout.pp
    expected = run_ranks(case.world, trained, case, 0, STEPS, [])
    case, resumes = replace(case, layout=case.layout | OFFLOADS), case.layout.get("zero") == 2
    found = run_ranks(case.world, trained, case, 0, 1 if resumes else STEPS, [])
    if resumes:
        begun = found
        found = run_ranks(case.world, from_saved, case, 1, STEPS, [one.saved for one in begun])
        for one, then in zip(found, begun, strict=True):
            one.results = then.results + one.results
    for plain, offloaded in zip(expected, found, strict=True):
        assert [loss for loss, _ in offloaded.results] == [loss for loss, _ in plain.results]
        assert offloaded.state.keys() == plain.state.keys()
        for name, values in plain.state.items():
            assert offloaded.state[name] == values, name
        assert offloaded.left_on_device == 0 and offloaded.host_bytes > 0
        assert (offloaded.stays_bytes > 0) == (layout.offload_optimizer_ratio < 1)
        most[offloaded.place] = max(most[offloaded.place], offloaded.host_bytes)
    assert most == [memory.host for memory in planned]


def measured_bytes(layout: Layout, dtype: torch.dtype, model: ModelConfig) -> tuple[int, int]:
    BENCHMARK.MODEL = model
    device, host, _ = BENCHMARK.measure(layout, dtype, 1)
    close_world()
    return device, host


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    ("layout", "dtype", "sequence", "limit"),
    [
        (Layout(offload_activations=1.0), torch.float32, 512, 2**19),
        (Layout(zero=3, offload_optimizer=True), torch.bfloat16, 16, 2**14),
    ],
    ids=["activations", "masters"],
)
def test_the_device_holds_the_planned_bytes_at_its_peak(
    layout: Layout, dtype: torch.dtype, sequence: int, limit: int
) -> None:
    """Within a limit: the forward of the largest layer has ten times as many temporary bytes, the master
    values in bfloat16 have two hundred times as many."""
    model = BENCHMARK.MODEL.model_copy(update={"sequence": sequence})
    ((device, host),) = run_ranks(1, measured_bytes, layout, dtype, model)
    workload = replace(BENCHMARK.workload_of(layout, dtype), model=model)
    (planned,) = memory_of_ranks(workload, on_cpu=True)
    assert host == planned.host
    assert device == pytest.approx(float(planned.total) - float(planned.margin), abs=limit)
