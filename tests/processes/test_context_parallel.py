"""If these fail, ranks that share sequences train another model than one process does: they attend to wrong
positions, turn or drop values at wrong ones, or sum what they should not.

`benchmarks/parity/context_layouts.py` has the whole list of layouts, of which these are a sample.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from parity_case import Case
from ranks import run_ranks
from test_expert_faults import differs, run_with
from test_parity import FEW, MODELS, assert_equal, name_of, train
from test_recompute import BENCHMARK

from myriad.comm.groups import Groups, close_world, open_world
from myriad.comm.layout import Layout
from myriad.kernels import ring_plan as ring_plan_module
from myriad.kernels.attention_pieces import Joined
from myriad.kernels.ring_plan import Piece, RingPlan, ring_plan
from myriad.kernels.rotary import Rotary, rotary_turns
from myriad.model import context_share, self_attention
from myriad.model.config import ModelConfig
from myriad.model.context_share import ContextShare, share_of
from myriad.model.definition import Context
from myriad.parallel import context_exchange, optimizer_step
from myriad.parallel.context_exchange import ContextGroup
from myriad.parallel.tensor_parallel import make_boundary
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

WHOLE = {"whole_documents": True}
LAYOUTS: list[tuple[str, str, dict[str, Any], bool]] = [
    # model, optimizer, layout, packed documents
    ("gpt2", "adamw", {"cp": 2, "zero": 3}, False),
    ("parallel-window", "adamw", {"cp": 4, "micro_batch": 2} | WHOLE, True),
    ("gemma", "adamw", {"cp": 2, "tp": 2, "micro_batch": 2}, False),
    ("latent-experts", "lamb", {"cp": 2, "dp": 2, "zero": 2, "recompute": "selective"}, True),
    (
        "predictions",
        "adamw",
        {"cp": 2, "pp": 2, "schedule": "zero-bubble", "recompute": "full"} | WHOLE,
        True,
    ),
    ("granite-sinks", "muon", {"cp": 4, "ulysses": 2, "zero": 1}, True),
    ("experts", "adamw", {"cp": 2, "tp": 4, "ep": 4, "etp": 2, "micro_batch": 2}, False),
    ("experts", "muon", {"cp": 2, "pp": 2, "ep": 2, "zero": 2}, False),
    ("few-kv-heads", "adamw", {"cp": 4, "ulysses": 4, "dp": 2, "zero": 1, "shard_group": 4}, False),
]


@pytest.mark.parametrize(("model", "optimizer", "layout", "packed"), LAYOUTS, ids=name_of)
def test_ranks_that_share_sequences_learn_what_one_process_does(
    model: str, optimizer: str, layout: dict[str, Any], packed: bool
) -> None:
    keys = MODELS[model] | {"layers": 2}
    how: dict[str, Any] = {"optimizer": {"name": optimizer}, "steps": FEW, "packed": packed}
    how["global_batch"] = 4 if model != "gemma" else 16  # small weights of its norms show rounding
    case = Case(layout=layout, model=keys, **how, overlap={"tensor_chunks": 2})
    assert_equal(case, train(Case(model=keys, **how)))


def test_the_same_layout_twice_gives_the_same_bits() -> None:
    case = Case({"cp": 4, "ulysses": 2}, {"layers": 2}, {"name": "adamw"}, FEW, global_batch=2, packed=True)
    (losses, parameters), (again, same) = train(case), train(case)
    assert losses == again
    assert all((same[name] == values).all() for name, values in parameters.items())


SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2, "activation": "swiglu"},
    {"position": "none", "qk_norm": "head"},
    {"window": 64, "attention_sinks": True, "norm": "layer", "bias": True},
    {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
]


def measured_and_formula(
    layout: dict[str, Any],
) -> tuple[list[tuple[str, float, float]], set[tuple[str, int]]]:
    """One rank's side: what was measured, bytes kept, bytes by the formula; and its spans with their step of
    the ring."""
    groups, overlap = open_world(Layout(**layout), torch.device("cpu")), OverlapConfig()
    recorder = Recorder()
    boundary = make_boundary(groups, overlap, recorder, "auto", torch.device("cpu"))
    base = {"layers": 1, "hidden": 64, "heads": 4, "sequence": 640, "vocabulary": 300}
    context = groups.grid.layout.ring, groups.grid.layout.ulysses
    found = []
    for keys, index, dtype, mode in product(SHAPES, range(3), BENCHMARK.DTYPES, BENCHMARK.MODES):
        model = ModelConfig(**(base | keys))
        kept = BENCHMARK.measure(model, index, boundary, dtype, mode)
        expected = BENCHMARK.formula(model, index, boundary.size, dtype, mode, context=context)
        found.append((f"{keys} layer {index} {dtype} {mode}", kept, expected))
    close_world()
    return found, {(span.name, span.chunk) for span in recorder.newest()}


@pytest.mark.parametrize("layout", [{"cp": 2, "ulysses": 2}, {"cp": 2, "tp": 2}], ids=name_of)
def test_layers_keep_to_the_byte_what_the_formula_predicts(layout: dict[str, Any]) -> None:
    for found, spans in run_ranks(Layout(**layout).world, measured_and_formula, layout):
        wrong = [one for one in found if one[1] != one[2]]
        assert not wrong, wrong[:6]
        assert {step for name, step in spans if name == "ring_attention"} == set(range(Layout(**layout).ring))
        assert {("context_comm", 1), ("context_comm", -1)} & spans, "a ring's step, or an exchange"


# Faults that users of other systems reported, each put in on purpose in every rank.


def documents_are_not_seen() -> None:
    """torchtitan#2536, Megatron-Bridge#1292: packed documents attend to each other."""

    def plan(sequence: int, window: int | None, rank: int, size: int, documents: Any = None) -> RingPlan:
        return ring_plan(sequence, window, rank, size)

    def share(sequence: int, rank: int, size: int, ulysses: int, documents: Any = None) -> ContextShare:
        return share_of(sequence, rank, size, ulysses)

    context_share.ring_plan, context_exchange.share_of = plan, share


def positions_begin_anew_on_each_rank() -> None:
    """NVIDIA-NeMo/NeMo#15339: losses differ between layouts."""

    def of_part(rotary: Rotary, x: torch.Tensor, share: ContextShare | None) -> torch.Tensor:
        return rotary_turns(rotary, x.shape[1], x.device)

    self_attention.turns_of = of_part


def dropped_values_depend_on_the_rank() -> None:
    def own(self: Context, first: int, count: int, device: torch.device) -> torch.Tensor:
        return torch.arange(first, first + count)

    Context.positions = own  # type: ignore[method-assign]


def the_loss_is_that_of_one_rank() -> None:
    def weight(groups: Groups) -> float:
        return float(groups.grid.index("cp") == 0)

    optimizer_step.loss_weight = weight


def a_query_that_sees_no_key_of_another_rank_is_not_a_number() -> None:
    """Megatron-LM#1764: NaN where ranks share sequences."""
    visible = ring_plan_module._pieces

    def every_pair(rows: slice, queries: Any, keys: Any, window: int) -> Iterator[Piece]:
        for piece in visible(rows, queries, keys, 10**6):
            yield piece._replace(window=window)

    ring_plan_module._pieces = every_pair

    def add(self: Joined, piece: Piece, other: Joined) -> None:
        out, lse = self.out[piece.rows, piece.queries], self.lse[piece.rows, piece.queries]
        joined = torch.logaddexp(lse, other.lse)
        out *= (lse - joined).exp().unsqueeze(-1)
        out += other.out * (other.lse - joined).exp().unsqueeze(-1)
        lse.copy_(joined)

    Joined.add = add  # type: ignore[method-assign]


def experts_are_balanced_in_parts_of_a_sequence() -> None:
    def own(self: ContextGroup, x: torch.Tensor) -> torch.Tensor:
        return x * self.num_ranks

    ContextGroup.sum = own  # type: ignore[method-assign]


TWO = Case({"cp": 2}, {"layers": 2, "dropout": 0.1}, steps=FEW, global_batch=2)
FAULTS: list[tuple[Callable[[], None], Case]] = [
    (documents_are_not_seen, replace(TWO, packed=True)),
    (positions_begin_anew_on_each_rank, TWO),
    (dropped_values_depend_on_the_rank, TWO),
    (the_loss_is_that_of_one_rank, TWO),
    (
        a_query_that_sees_no_key_of_another_rank_is_not_a_number,
        replace(TWO, model={"layers": 2, "window": 2}),
    ),
    (
        experts_are_balanced_in_parts_of_a_sequence,
        replace(TWO, model={"layers": 2, "experts": 4, "expert_hidden": 16, "balance_loss": 0.1}),
    ),
]


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_fault_that_others_met_is_found(fault: Callable[[], None], case: Case) -> None:
    expected = train(replace(case, layout={}))
    assert not differs(train(case), expected), "the layout itself"
    try:
        found = run_ranks(case.world, run_with, fault, case)[0]
    except AssertionError as error:
        assert "nan" in str(error), error
    else:
        assert differs(found, expected)
