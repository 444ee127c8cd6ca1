"""If these break: what the backward computes again is not what the forward computed, or keeps as much memory
as before."""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import TINY, Case, batch_of_rank, make_engine, run_case
from ranks import reuse_ranks, run_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.activation_memory import kept_bytes_per_micro_batch, kept_bytes_per_token
from myriad.model.boundary import Arriving
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.custom import Layer, LayerList
from myriad.parallel.expert_exchange import ExpertPeers
from myriad.parallel.tensor_parallel import ExpertWidth, GroupBoundary
from myriad.telemetry.spans import Recorder
from myriad.train.fit import fit

pytestmark = pytest.mark.usefixtures("dynamo")

MODELS: dict[str, dict[str, Any]] = {
    "serial": {},
    "parallel-window": {
        "block": "parallel",
        "window": 6,
        "window_pattern": (True, False),
        "kv_heads": 2,
        "activation": "swiglu",
        "tied": False,
    },
    "gpt2": {"norm": "layer", "bias": True, "position": "learned", "dropout": 0.1, "layers": 5},
    "relu2": {"activation": "relu2", "dropout": 0.2},
}
TURNS = {"tensor": True, "tensor_chunks": 2}

Bits = tuple[list[tuple[float, float]], dict[str, np.ndarray]]


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory" / "activations.py"
    spec = importlib.util.spec_from_file_location("activations_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["activations_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK: Any = load_benchmark()


def train(case: Case) -> Bits:
    return reuse_ranks(case.world, run_case, case)[0]


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("serial", {"micro_batch": 4}, {}),
    ("gpt2", {"zero": 3, "virtual_stages": 3}, {}),
    ("relu2", {"dp": 2, "zero": 2, "reduce": "each"}, {}),
    ("gpt2", {"tp": 2, "micro_batch": 4}, TURNS),
    ("parallel-window", {"tp": 2, "micro_batch": 4}, {"tensor": False}),
    ("parallel-window", {"tp": 2, "micro_batch": 1}, TURNS),
    ("serial", {"pp": 3, "virtual_stages": 2, "schedule": "zero-bubble-v"}, {}),
    ("gpt2", {"pp": 2, "tp": 2, "schedule": "zero-bubble", "micro_batch": 2}, TURNS),
    ("relu2", {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batch": 2, "zero": 3}, {}),
    ("serial", {"dp": 2, "zero": 1}, {"chunks": 3}),
]


@pytest.mark.parametrize(("model", "layout", "overlap"), CASES, ids=str)
def test_what_is_computed_again_has_the_same_bits(
    model: str, layout: dict[str, Any], overlap: dict[str, Any]
) -> None:
    def with_mode(mode: str) -> Bits:
        rows = layout.get("dp", 1) * layout.get("micro_batch", 1)
        many = 2 * rows if "tp" in layout and "pp" not in layout else 4 if rows < 4 else 8
        keys = {"overlap": overlap, "steps": 1, "global_batch": many}
        layers = {} if {"pp", "virtual_stages"} & layout.keys() else {"layers": 2}
        return train(Case(layout | {"recompute": mode}, MODELS[model] | layers, **keys))

    losses, parameters = with_mode("none")
    for mode in ("selective", "full"):
        again, same = with_mode(mode)
        assert losses == again, mode
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, same[name], err_msg=f"{mode}: {name}")


@pytest.mark.parametrize("layout", [{"micro_batch": 4}, {"pp": 2, "schedule": "zero-bubble"}], ids=str)
def test_a_share_of_the_layers_computed_again_has_the_same_bits(layout: dict[str, Any]) -> None:
    part = {"recompute": "full", "recompute_ratio": 0.5}
    (losses, parameters), (again, same) = (
        train(Case(layout=layout | changes, model=MODELS["gpt2"], steps=1)) for changes in ({}, part)
    )
    assert losses == again
    for name, values in parameters.items():
        np.testing.assert_array_equal(values, same[name], err_msg=name)


def test_in_bfloat16_too() -> None:
    layout, model = {"tp": 2, "micro_batch": 2}, MODELS["gpt2"] | {"layers": 2}
    modes = [
        train(Case(layout | {"recompute": mode}, model, dtype=torch.bfloat16, steps=1, global_batch=4))[0]
        for mode in ("none", "selective", "full")
    ]
    assert modes[0] == modes[1] == modes[2]


class Live(TorchDispatchMode):
    """Knows the storages that operators made, and which of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


class AfterForward(Recorder):
    """The most that was live at the end of a forward."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live, self.most = live, 0

    def span(
        self, name: str, stage: int = -1, micro_batch: int = -1, chunk: int = -1, **more: Any
    ) -> AbstractContextManager[None]:
        return Looks(self) if name == "forward" else nullcontext()


class Looks(AbstractContextManager[None]):
    """When what it is around has ended, again and again: spans are found once."""

    def __init__(self, recorder: AfterForward) -> None:
        self._recorder = recorder

    def __exit__(self, *problem: object) -> None:
        self._recorder.most = max(self._recorder.most, self._recorder.live.num_bytes())


def kept_after_forwards(case: Case) -> int:
    """Bytes that one step made and still had after a forward, at most."""
    live = Live()
    recorder = AfterForward(live)
    engine = make_engine(case, recorder)
    batch = batch_of_rank(case, engine, 0)
    engine.train_step(lambda: batch, 1e-3, batch.targets.numel())
    recorder.most = 0
    with live:
        engine.train_step(lambda: batch, 1e-3, batch.targets.numel())
    close_world()
    return recorder.most


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", 2), ("1f1b", 1)])
def test_a_rank_keeps_what_the_formula_predicts(schedule: str, in_flight: int) -> None:
    keys: dict[str, Any] = {"hidden": 128, "sequence": 64, "layers": 6}
    model = ModelConfig(**(TINY | keys))
    kinds = ("embedding", *["block"] * 6, "head")
    found: dict[str, int] = {}
    for mode in ("none", "selective", "full"):
        layout = {"micro_batch": 4, "schedule": schedule, "recompute": mode}
        found[mode] = run_ranks(1, kept_after_forwards, Case(layout=layout, model=keys))[0]
        expected = 0.0
        for index, kind in enumerate(kinds):
            # the backward of the last forward comes next: its head is kept
            its_mode = "none" if kind == "head" and schedule == "1f1b" else mode
            arguments: Any = {"bytes_per_value": 4, "recompute": its_mode, "softmax_block": 64}
            per_token = kept_bytes_per_token(model, kind, index - 1, **arguments)  # type: ignore[arg-type]
            fixed = kept_bytes_per_micro_batch(model, kind, index - 1, **arguments)  # type: ignore[arg-type]
            expected += in_flight * (4 * 64 * per_token + fixed)
        assert found[mode] == pytest.approx(expected, rel=0.01), mode
    assert found["selective"] < 0.75 * found["none"]
    assert found["full"] < 0.2 * found["none"]


SHAPES: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu", "dropout": 0.1},
    {"block": "parallel", "kv_heads": 2, "activation": "relu2", "dropout": 0.1},
    {"norm": "layer", "bias": True, "position": "learned"},
    {"position": "none", "kv_heads": 2},
    {"kv_heads": 1, "qk_norm": "head", "vocabulary": 301, "vocabulary_multiple": 1},
    {"position": "none", "block": "parallel", "bias": True},
    {"window": 64},
    {"window": 100, "kv_heads": 2},
    {"sequence": 512, "window": 200, "heads": 2},
    {"sequence": 256, "kv_heads": 2},
    {"sequence": 256, "window": 100, "dropout": 0.1},
    {
        "experts": 4,
        "expert_hidden": 32,
        "shared_experts": 1,
        "shared_expert_gate": True,
        "expert_capacity": 2.0,
    },
    {"experts": 4, "bias": True, "router_logit_bias": True, "activation": "clamped_swiglu", "window": 64}
    | {"attention_sinks": True, "attention_bias": "all", "kv_heads": 2, "shared_experts": 2},
]
"""Library's attention and blocks, in causal, windowed and masked form."""
KINDS = ((torch.bfloat16, "none"), (torch.bfloat16, "selective"), (torch.float32, "full"))
"""Types of values and kinds of recomputation that are measured."""


def measured_and_formula(tp: int) -> list[tuple[str, float, float]]:
    """One rank's side: what was measured, bytes kept, bytes by the formula."""
    groups = open_world(Layout(tp=tp), torch.device("cpu"))
    boundary = GroupBoundary(groups.along("tp"), groups.grid.index("tp"), tp, Recorder())
    base = {"layers": 1, "hidden": 64, "heads": 4, "sequence": 640, "vocabulary": 300}
    found = []
    for keys, index, (dtype, mode) in product(SHAPES, range(3), KINDS):
        model = ModelConfig(**(base | keys))
        kept = BENCHMARK.measure(model, index, boundary, dtype, mode)
        name = f"{keys} layer {index} {dtype} {mode}"
        found.append((name, kept, BENCHMARK.formula(model, index, tp, dtype, mode)))
    close_world()
    return found


def test_layers_of_tensor_parallel_ranks_keep_to_the_byte_what_the_formula_predicts() -> None:
    for rank in run_ranks(2, measured_and_formula, 2):
        for name, kept, expected in rank:
            assert kept == expected, name


EXPERTS = {"experts": 4, "expert_hidden": 32, "shared_experts": 1, "activation": "swiglu"}
MIXTURES: list[dict[str, Any]] = [
    {"prediction_layers": 1},
    {"shared_expert_gate": True, "router_z_loss": 0.1, "norm_placement": "after", "bias": True},
    {"shared_experts": 0, "router_scores": "sigmoid", "experts_per_token": 3},
    {"shared_experts": 0, "balance_loss": 0, "router_normalized": False, "norm_placement": "both"}
    | {"expert_capacity": 2.0},
]


class CountingBoundary(GroupBoundary):
    """Records the rows that arrive in each exchange, over those that leave."""

    loads: list[float]

    def start_exchange(self, rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Arriving:
        self.loads.append(sum(arriving) / sum(leaving))
        return super().start_exchange(rows, leaving, arriving)


def measured_and_formula_of_experts(
    layout: Layout, mixtures: list[dict[str, Any]]
) -> list[tuple[str, float, float]]:
    """The same of a rank that shares experts, by the tokens that it gets for them."""
    groups, found = open_world(layout, torch.device("cpu")), []
    peers = ExpertPeers.of(groups, Recorder(), torch.device("cpu")) if layout.ep > 1 else None
    tp, width = layout.tp, ExpertWidth.of(groups)
    boundary = CountingBoundary(
        groups.along("tp"), groups.grid.index("tp"), tp, Recorder(), experts=peers, width=width
    )
    torch.manual_seed(groups.grid.rank)
    base = {"layers": 1, "hidden": 64, "heads": 4, "sequence": 640, "vocabulary": 300}
    for keys in mixtures:
        model = ModelConfig(**(base | EXPERTS | keys))
        layers = (1, 2) if model.prediction_layers else (1,)
        for index, (dtype, mode) in product(layers, KINDS):
            boundary.loads = [1.0] * (layout.ep == 1)
            kept = BENCHMARK.measure(model, index, boundary, dtype, mode)
            sharing = layout.ep, layout.etp, boundary.loads[0]
            expected = BENCHMARK.formula(model, index, tp, dtype, mode, *sharing)
            found.append((f"{keys} layer {index} {dtype} {mode}", kept, expected))
    close_world()
    return found


@pytest.mark.parametrize(
    ("layout", "mixtures"),
    [
        (Layout(dp=2, ep=2), MIXTURES[:1]),
        (Layout(tp=2, ep=2, etp=1), MIXTURES),
        (Layout(tp=2, etp=1), MIXTURES[:2]),
        (Layout(tp=4, ep=2, etp=2), MIXTURES),
    ],
    ids=("replicas", "whole experts", "whole experts of each rank", "halves of experts"),
)
def test_ranks_that_share_experts_keep_what_the_formula_predicts_for_their_load(
    layout: Layout, mixtures: list[dict[str, Any]]
) -> None:
    for rank in run_ranks(layout.world, measured_and_formula_of_experts, layout, mixtures):
        for name, kept, expected in rank:
            assert kept == expected, name


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.dropout = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.mix(x)).tanh()


def random_batch(step: int, rows: range) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(64, 16, generator=generator)[rows.start : rows.stop]
    return Batch(inputs, inputs.roll(1, 1), torch.arange(rows.start, rows.stop))


def own_losses(layout: Layout) -> list[tuple[float, float]]:
    layers = [Layer("bare", nn.Tanh), *(Layer(f"noisy.{i}", Noisy) for i in range(4))]
    model = LayerList(layers, lambda output, targets: (output - targets).square().sum())
    torch.manual_seed(5)
    found = fit(model, random_batch, layout, OptimizerConfig(warmup_steps=0), steps=4, global_batch=64)
    return [(result.loss, result.grad_norm) for _, result in found]


@pytest.mark.parametrize("keys", [{}, {"pp": 2, "schedule": "zero-bubble"}, {"dp": 2, "zero": 3}], ids=str)
def test_own_layers_that_draw_random_numbers_draw_the_same_again(keys: dict[str, Any]) -> None:
    none, full = (Layout(micro_batch=8, recompute=mode, **keys) for mode in ("none", "full"))
    assert run_ranks(none.world, own_losses, none)[0] == run_ranks(full.world, own_losses, full)[0]


def kept_with(num_micro_batches: int) -> list[int]:
    layout = {"pp": 2, "micro_batch": 1, "recompute": "full"}
    keys: dict[str, Any] = {"hidden": 128, "sequence": 64}
    case = Case(layout=layout, model=keys, global_batch=num_micro_batches)
    return run_ranks(2, kept_after_forwards, case)


def test_a_first_stage_keeps_no_more_when_there_are_more_micro_batches() -> None:
    """What it sent is given up when it is known to have arrived."""
    few, many = kept_with(4)[0], kept_with(12)[0]
    assert many == pytest.approx(few, rel=0.02)
