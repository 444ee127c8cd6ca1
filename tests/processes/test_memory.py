"""If these break: a rank holds more memory, or other memory, than the table of `myriad.parallel.chunk` and
`docs/concepts/memory.md` say."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import TINY, Case, make_engine
from ranks import reuse_ranks, run_ranks

from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.cost.stage_layers import cut_layers
from myriad.planner.memory.matrix_memory import matrix_bytes
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.memory.stage_memory import StageMemory
from myriad.planner.workload import Workload
from myriad.program.actions import ORTHOGONALIZATION, Kind
from myriad.program.build import build_program, count_chunks
from myriad.program.config import OverlapConfig
from myriad.program.partition import cut_ranges


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["memory_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK: Any = load_benchmark()
SMALL = {"layers": 4, "hidden": 32, "vocabulary": 90, "bias": True, "norm": "layer"}


@pytest.mark.parametrize(
    ("dp", "dtype", "tied"), [(3, torch.float32, True), (2, torch.bfloat16, False)], ids=str
)
def test_a_rank_holds_to_the_byte_what_the_formula_predicts(dp: int, dtype: torch.dtype, tied: bool) -> None:
    layouts = [
        Layout(dp=dp, zero=zero, reduce=reduce, virtual_stages=3) for zero, reduce in BENCHMARK.SETTINGS
    ]
    model = BENCHMARK.MODEL.model_copy(update=SMALL | {"tied": tied})
    for rank in run_ranks(dp, BENCHMARK.measure, layouts, dtype, model):
        for layout, (found, sizes) in zip(layouts, rank, strict=True):
            assert found == BENCHMARK.formula(layout, dtype, sizes), f"zero {layout.zero} {layout.reduce}"


def moments(case: Case) -> tuple[int, int]:
    """One rank's place in the pipeline, and the bytes of its optimizer's state."""
    engine = make_engine(case)
    state = engine._optimizer_step.optimizer_state()
    held = sum(4 * one.numel() for tensors in state.values() for one in tensors)
    place = engine.groups.grid.index("pp")
    engine.close()
    close_world()
    return place, held


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4, "zero": 1, "shard_group": 2},
        {"dp": 8, "zero": 2, "shard_group": 4, "ep": 2},
        {"dp": 2, "pp": 2, "zero": 2},
        {"tp": 2},
    ],
    ids=str,
)
def test_the_planner_knows_the_moments_of_matrices_that_are_orthogonalized(layout: dict[str, Any]) -> None:
    """With the moving average of the parameters."""
    optimizer = {"name": "muon", "ema_decay": 0.9}
    model = {"kv_heads": 1, "bias": True} | ({"experts": 4, "expert_hidden": 16} if "ep" in layout else {})
    case = Case(layout, model, optimizer, global_batch=8)
    ranks = run_ranks(case.world, moments, case)
    model = ModelConfig(**(TINY | case.model))
    workload = Workload(
        model, Layout(**layout), case.global_batch, optimizer="muon", ema_every=1, value_bytes=4
    )
    for place, memory in enumerate(memory_of_ranks(workload, on_cpu=True)):
        assert memory.optimizer == max(held for own, held in ranks if own == place)


def lossy_state(case: Case) -> dict[str, int]:
    """The bytes of one rank's weights and state, with what lossy communication keeps from step to step."""
    engine, held = make_engine(case), []
    held += [one for tensors in engine._optimizer_step.optimizer_state().values() for one in tensors]
    if engine._diloco is not None:
        held += engine._diloco.outer.anchor + engine._diloco.outer.velocity
    chunks = engine.model.chunks
    weights = {
        one.untyped_storage().data_ptr(): one for chunk in chunks for one in (chunk.values, chunk.master)
    }
    collectives: list[Any] = [chunk._collective for chunk in chunks]
    errors = [one._errors for one in collectives if engine._diloco is None]
    found = {"optimizer": held, "weights": list(weights.values()), "errors": errors}
    engine.close()
    close_world()
    return {name: sum(one.untyped_storage().nbytes() for one in each) for name, each in found.items()}


@pytest.mark.parametrize(
    "comm", [{"sync_every": 2}, {"compress_gradients": "int8"}, {"compress_parameters": "int8"}]
)
def test_the_planner_knows_what_lossy_communication_keeps(comm: dict[str, Any]) -> None:
    case = Case({"dp": 2, "zero": 0 if "sync_every" in comm else 1}, {}, comm=comm)
    found, _ = reuse_ranks(2, lossy_state, case)
    model = ModelConfig(**(TINY | case.model))
    planned = {}
    for given in (comm, {}):
        work = Workload(
            model, Layout(**case.layout), case.global_batch, comm=CommConfig(**given), value_bytes=4
        )
        (planned[bool(given)],) = memory_of_ranks(work, on_cpu=True)
    assert planned[True].optimizer == found["optimizer"]
    assert planned[True].weights == found["weights"]
    assert planned[True].buffers - planned[False].buffers == found["errors"]


def messages(case: Case) -> tuple[int, list[list[int]]]:
    """One rank's place in the pipeline, and the bytes of each chunk's messages: directions out and in,
    updates out and in."""
    engine = make_engine(case)
    step, found = engine._optimizer_step, []
    step.optimizer.begin(1e-3, 1.0)
    for chunk, exchange in step._exchanges.items():
        chunk.gradients.fill_(1.0)
        sizes = []
        for kind in ORTHOGONALIZATION:
            exchange.do(kind)
            if kind in (Kind.START_GATHER_MOMENTUM, Kind.START_SCATTER_UPDATE):
                sizes += [one.numel() * one.element_size() for one in (exchange._sent, exchange._received)]
        found.append(sizes)
    place = engine.groups.grid.index("pp")
    engine.close()
    close_world()
    return place, found


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "tp": 2, "zero": 1}, {"dp": 2, "pp": 2}, {"tp": 4}, {"dp": 3, "zero": 3}], ids=str
)
def test_the_planner_knows_the_messages_with_matrices(layout: dict[str, Any]) -> None:
    case = Case(layout, {"kv_heads": 2, "bias": True}, {"name": "muon"}, global_batch=6)
    ranks = run_ranks(case.world, messages, case)
    model, shape = ModelConfig(**(TINY | case.model)), Layout(**layout)
    workload = Workload(model, shape, case.global_batch, optimizer="muon", value_bytes=4)
    program = build_program(shape, OverlapConfig(), 3, tied=True, training=True, num_chunks=1)
    layers = cut_layers(model, "uniform", shape.num_stages)
    chunks = count_chunks(shape, OverlapConfig(), layers)
    memory = StageMemory(workload, cut_ranges(layers, chunks), on_cpu=True)
    for place in range(shape.pp):
        stages = [
            stage for stage in range(len(memory.layers)) if program.stage_rank[stage // chunks] == place
        ]
        every = matrix_bytes(
            workload, [memory.layers[stage] for stage in stages], [memory.chunk(stage) for stage in stages]
        )
        planned = [[one.sent, one.arriving, one.results, one.returning] for one in every if one.elements]
        most = np.max([found for own, found in ranks if own == place], axis=0)
        assert most.tolist() == planned


def test_more_sharding_never_holds_more_between_steps() -> None:
    sizes = BENCHMARK.Sizes(stages=(4000, 4000, 4000), tied=0)
    for dtype in (torch.float32, torch.bfloat16):
        rest = [BENCHMARK.formula(Layout(dp=4, zero=zero), dtype, sizes).stepped.total for zero in range(4)]
        assert rest == sorted(rest, reverse=True)
