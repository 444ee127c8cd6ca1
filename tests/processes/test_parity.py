"""Any layout gives one process's losses and parameters: the definition of correct.

Each layout trains on real ranks and is compared with one process on the same tokens, in float32: losses and
every whole parameter (relative L2 norm) within 1e-5. An error shows in the first gradient norm, the second
loss or the parameters after the second update, so most layouts train 2 steps, and most models have 2 layers
where the layout has no more than two stages; a few train 20 steps, in which rounding could add up.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from parity_case import Case, run_case
from ranks import reuse_ranks, run_ranks

from myriad.parallel import expert_exchange
from myriad.program import passes

TOLERANCE = 1e-5
FEW = 2

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
    "qwen": {
        "activation": "swiglu",
        "kv_heads": 2,
        "qk_norm": "head",
        "qk_norm_kind": "layer",
        "attention_bias": "qkv",
        "rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_sequence": 8},
    },
    "gemma": {
        "activation": "geglu_tanh",
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": "head",
        "window": 6,
        "window_pattern": (True, False),
        "window_rotary_base": 100.0,
        "rotary_scaling": {"kind": "linear", "factor": 8.0},
        "embedding_scale": 5.0,
        "attention_scale": 0.4,
        "attention_softcap": 2.0,
        "logit_softcap": 4.0,
        "z_loss": 0.01,
    },
    "few-kv-heads": {
        "kv_heads": 2,
        "qk_norm": "all",
        "attention_bias": "qkv",
        "attention_sinks": True,
        "activation": "swiglu",
        "vocabulary": 89,
        "vocabulary_multiple": 1,
    },
    "one-kv-head": {"kv_heads": 1, "qk_norm": "head", "bias": True, "tied": False},
    "olmo": {
        "norm_placement": "after",
        "qk_norm": "all",
        "kv_heads": 2,
        "activation": "swiglu",
        "prediction_layers": 1,
    },
    "predictions": {"prediction_layers": 2, "prediction_weight": 0.5, "tied": False, "dropout": 0.1},
    "normed predictions": {"prediction_layers": 2, "prediction_input": "normed", "activation": "swiglu"},
    "neox": {
        "block": "parallel",
        "parallel_norms": 2,
        "norm": "layer",
        "bias": True,
        "attention_bias": "all",
        "rotary_fraction": 0.5,
        "tied": False,
        "prediction_layers": 1,
    },
    "latent": {
        "activation": "swiglu",
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_sequence": 8, "mscale_all_dim": 0.7},
    },
    "latent-plain-queries": {
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 2,
        "v_head_dim": 7,
        "dropout": 0.1,
        "norm_placement": "both",
        "tied": False,
    },
    "granite-sinks": {
        "activation": "swiglu",
        "attention_sinks": True,
        "attention_bias": "all",
        "rotary_pattern": (True, False),
        "residual_scale": 0.3,
        "logit_scale": 0.25,
        "mup_base_width": 8,
        "norm_bias": True,
        "norm": "layer",
        "qk_norm": "heads",
        "qk_norm_kind": "layer",
    },
    "experts": {
        "activation": "swiglu",
        "experts": 4,
        "dense_layers": 1,
        "expert_hidden": 24,
        "balance_loss": 0.1,
        "router_z_loss": 0.01,
    },
    "latent-experts": {
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "experts": 6,
        "expert_every": 2,
        "experts_per_token": 3,
        "shared_experts": 2,
        "shared_expert_gate": True,
        "expert_hidden": 16,
        "router_scores": "sigmoid",
        "router_scale": 2.5,
        "balance_bias_rate": 0.01,
        "router_groups": 3,
        "router_group_limit": 2,
        "router_group_score": "two_largest",
        "expert_capacity": 1.0,
        "dropout": 0.1,
    },
    "gpt-oss": {
        "activation": "clamped_swiglu",
        "kv_heads": 2,
        "bias": True,
        "attention_bias": "all",
        "attention_sinks": True,
        "window": 6,
        "window_pattern": (True, False),
        "rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_sequence": 8, "truncate": False},
        "experts": 4,
        "expert_hidden": 24,
        "router_logit_bias": True,
        "balance_scope": "batch",
        "balance_loss": 0.1,
        "shared_experts": 1,
        "tied": False,
    },
}


Trained = tuple[list[tuple[float, float]], dict[str, np.ndarray]]
_FIRST: dict[str, Trained] = {}


def train(case: Case, run: Callable[..., Any] = run_case) -> Trained:
    start = reuse_ranks if run is run_case else run_ranks  # others may patch modules
    ranks = start(case.world, run, case)
    for losses, _ in ranks[1:]:
        assert losses == ranks[0][0], "ranks of one run disagree on the loss"
    return ranks[0]


def first(case: Case) -> Trained:
    """What the first of the tests that train it has found."""
    if (key := repr(case)) not in _FIRST:
        _FIRST[key] = train(case)
    return _FIRST[key]


@functools.cache
def one_process(
    model: str, optimizer: str, global_batch: int = 8, steps: int = 20, layers: int | None = None
) -> Trained:
    return train(Case({}, keys_of(model, layers), {"name": optimizer}, steps, global_batch))


def assert_equal(case: Case, expected: Trained, run: Callable[..., Any] = run_case) -> None:
    losses, parameters = first(case) if run is run_case else train(case, run)
    for step, ((loss, norm), (reference, reference_norm)) in enumerate(zip(losses, expected[0], strict=True)):
        assert loss == pytest.approx(reference, rel=TOLERANCE), f"loss of step {step}"
        assert norm == pytest.approx(reference_norm, rel=1e-3), f"gradient norm of step {step}"
    assert losses[0][1] == pytest.approx(expected[0][0][1], rel=1e-6), "gradient norm before any update"
    assert parameters.keys() == expected[1].keys()
    for name, reference in expected[1].items():
        if name.startswith("model."):
            difference = np.linalg.norm(parameters[name] - reference)
            assert difference <= TOLERANCE * np.linalg.norm(reference), name


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("serial", "adamw", {"micro_batch": 4}),
    ("serial", "adamw", {"virtual_stages": 3, "zero": 3}),
    ("serial", "adamw", {"dp": 2, "zero": 1, "micro_batch": 2}),
    ("serial", "adamw", {"dp": 2, "zero": 2, "reduce": "each"}),
    ("serial", "lamb", {"dp": 2, "zero": 3}),
    ("serial", "adamw", {"tp": 2, "micro_batch": 4}),
    ("serial", "adamw", {"pp": 3, "schedule": "eager-1f1b"}),
    ("serial", "adamw", {"pp": 3, "schedule": "eager-zero-bubble"}),
    ("serial", "adamw", {"pp": 3, "virtual_stages": 2, "schedule": "zero-bubble-v"}),
    ("serial", "adamw", {"pp": 2, "dp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v", "zero": 2}),
    ("serial", "adamw", {"pp": 3, "dp": 2, "virtual_stages": 2, "schedule": "dualpipe-v", "zero": 3}),
    ("serial", "adamw", {"pp": 2, "dp": 2, "schedule": "zero-bubble", "zero": 2, "reduce": "each"}),
    ("serial", "adamw", {"pp": 2, "virtual_stages": 3, "schedule": "gpipe"}),
    ("serial", "adamw", {"dp": 4, "zero": 3, "shard_group": 2, "virtual_stages": 2}),
    ("serial", "muon", {"dp": 4, "zero": 1, "shard_group": 2}),
    ("serial", "adamw", {"dp": 4, "zero": 2, "shard_group": 2, "reduce": "each", "shares": (3, 2, 2, 1)}),
    ("few-kv-heads", "lamb", {"dp": 4, "tp": 2, "zero": 2, "shard_group": 2}),
    ("serial", "adamw", {"pp": 3, "virtual_stages": 2}),
    ("serial", "adamw", {"pp": 4, "partition": "parameters"}),
    ("serial", "adamw", {"dp": 2, "pp": 2, "zero": 3, "virtual_stages": 2}),
    ("parallel-window", "adamw", {"tp": 2, "micro_batch": 4}),
    ("gpt2", "adamw", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zero-bubble"}),
    ("gpt2", "adamw", {"tp": 2, "pp": 2, "virtual_stages": 2, "micro_batch": 2, "zero": 2, "reduce": "each"}),
    ("qwen", "adamw", {"tp": 2, "pp": 2, "schedule": "zero-bubble", "micro_batch": 2}),
    ("gemma", "adamw", {"tp": 2, "dp": 2, "zero": 2, "micro_batch": 2}),
    ("gemma", "adamw", {"pp": 2, "virtual_stages": 2, "micro_batch": 2, "recompute": "selective"}),
    ("olmo", "adamw", {"tp": 2, "pp": 2, "micro_batch": 2, "recompute": "selective"}),
    ("few-kv-heads", "lamb", {"tp": 4, "zero": 1, "micro_batch": 4}),
    ("one-kv-head", "adamw", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2}),
    ("neox", "adamw", {"pp": 2, "tp": 2, "schedule": "zero-bubble", "micro_batch": 2}),
    ("latent", "adamw", {"tp": 2, "pp": 2, "schedule": "zero-bubble", "micro_batch": 2}),
    ("latent", "lamb", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2, "recompute": "selective"}),
    ("latent-plain-queries", "adamw", {"tp": 4, "micro_batch": 4, "recompute": "selective"}),
    ("predictions", "adamw", {"dp": 2, "pp": 2, "zero": 3, "virtual_stages": 2}),
    ("normed predictions", "adamw", {"tp": 2, "pp": 2, "micro_batch": 2, "recompute": "selective"}),
    ("granite-sinks", "adamw", {"tp": 2, "pp": 2, "micro_batch": 2}),
    ("experts", "lamb", {"pp": 2, "dp": 2, "zero": 2, "ep": 2, "schedule": "zero-bubble", "reduce": "each"}),
    ("experts", "muon", {"dp": 8, "zero": 2, "ep": 2, "shard_group": 4}),
    ("experts", "muon", {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "micro_batch": 2, "recompute": "selective"}),
    ("latent-experts", "lamb", {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "zero": 3, "micro_batch": 2}),
    (
        "latent-experts",
        "adamw",
        {"pp": 2, "dp": 2, "ep": 2, "virtual_stages": 2, "recompute": "full", "micro_batch": 2},
    ),
    ("gpt-oss", "adamw", {"tp": 2, "dp": 2, "zero": 3, "ep": 2, "micro_batch": 2, "recompute": "selective"}),
    ("gpt-oss", "lamb", {"tp": 4, "dp": 2, "zero": 2, "ep": 4, "etp": 2, "micro_batch": 2}),
    (
        "gpt-oss",
        "muon",
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zero-bubble", "expert_dispatch": "rank", "micro_batch": 2},
    ),
    ("serial", "muon", {"dp": 3, "zero": 0, "shares": (4, 3, 1)}),
    ("serial", "muon", {"dp": 2, "pp": 2, "zero": 2, "virtual_stages": 2}),
    ("few-kv-heads", "muon", {"tp": 4, "micro_batch": 4}),
    ("olmo", "muon", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2}),
]


def layers_of(model: str, layout: dict[str, Any]) -> int | None:
    """Two layers, in one stage or in two; ``None``: those of the model, for more stages. The plain
    model and the one that names its own number keep theirs also in two, so that a stage has several."""
    more_stages = "virtual_stages" in layout or layout.get("pp", 1) > 2
    return None if more_stages or ("pp" in layout and model in ("serial", "gpt2")) else 2


def keys_of(model: str, layers: int | None) -> dict[str, Any]:
    """The keys of a model with this number of layers; ``None``: with its own."""
    return MODELS[model] | ({} if layers is None else {"layers": layers})


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(value) or "nothing"
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("model", "optimizer", "layout"), LAYOUTS, ids=name_of)
def test_layout_gives_the_loss_and_parameters_of_one_process(
    model: str, optimizer: str, layout: dict[str, Any]
) -> None:
    layers = layers_of(model, layout)
    case = Case(layout=layout, model=keys_of(model, layers), optimizer={"name": optimizer}, steps=FEW)
    assert_equal(case, one_process(model, optimizer, steps=FEW, layers=layers))


DISPATCH: list[tuple[str, str, dict[str, Any]]] = [
    (
        "latent-experts",
        "adamw",
        {"tp": 2, "dp": 2, "ep": 2, "expert_dispatch": "rank", "recompute": "selective", "micro_batch": 2},
    ),
    ("experts", "adamw", {"dp": 4, "zero": 3, "ep": 4, "expert_dispatch": "node", "recompute": "full"}),
    ("experts", "lamb", {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "expert_dispatch": "node", "micro_batch": 2}),
]


@pytest.mark.parametrize(("model", "optimizer", "layout"), DISPATCH, ids=name_of)
def test_a_token_may_travel_once_for_several_experts(
    model: str, optimizer: str, layout: dict[str, Any]
) -> None:
    """Nodes of two ranks: with "node", a token goes to one rank of a node, and from there to the other."""
    overlap = {"tensor_chunks": 2}
    case = Case(
        layout,
        MODELS[model] | {"layers": 2},
        {"name": optimizer},
        FEW,
        overlap=overlap,
        comm={"node_size": 2},
    )
    assert_equal(case, one_process(model, optimizer, steps=FEW, layers=2))


IN_PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    ("experts", "adamw", {"dp": 2, "ep": 2, "expert_dispatch": "rank"}),
    (
        "latent-experts",
        "lamb",
        {
            "pp": 2,
            "dp": 2,
            "ep": 2,
            "virtual_stages": 2,
            "zero": 2,
            "reduce": "each",
            "recompute": "selective",
        },
    ),
    ("gpt-oss", "adamw", {"tp": 4, "ep": 2, "etp": 2, "zero": 1}),
    (
        "experts",
        "adamw",
        {"pp": 2, "dp": 2, "ep": 2, "virtual_stages": 2, "schedule": "dualpipe-v", "zero": 3},
    ),
]


@pytest.mark.parametrize(("model", "optimizer", "layout"), IN_PAIRS, ids=name_of)
def test_a_forward_may_run_inside_the_backward_of_another_micro_batch(
    model: str, optimizer: str, layout: dict[str, Any]
) -> None:
    layers = layers_of(model, layout)
    case = Case(layout, keys_of(model, layers), {"name": optimizer}, FEW, overlap={"pairs": True})
    assert_equal(case, one_process(model, optimizer, steps=FEW, layers=layers))


def exchanges_of_rank(case: Case) -> list[str]:
    """The passes that sent rows to experts or back, in order."""
    start, order = expert_exchange._RowsState._start, []

    def recorded(self: Any, x: torch.Tensor, *, forward: bool) -> Any:
        order.append("forward" if forward else "backward")
        return start(self, x, forward=forward)

    expert_exchange._RowsState._start = recorded  # type: ignore[method-assign]
    try:
        run_case(case)
    finally:
        expert_exchange._RowsState._start = start  # type: ignore[method-assign]
    return order


def test_in_a_pair_each_exchange_of_the_backward_is_followed_by_one_of_the_forward() -> None:
    """Otherwise nothing travels behind another micro-batch; and on all ranks, which otherwise hang."""
    model = keys_of("experts", 2) | {"dense_layers": 0}
    case = Case({"dp": 2, "ep": 2}, model, {"name": "adamw"}, 1, overlap={"pairs": True})
    first_rank, second_rank = reuse_ranks(2, exchanges_of_rank, case)
    each = len(first_rank) // (2 * 4)  # of one of four micro-batches, in one direction
    alone, together = ["forward"] * each, ["backward", "forward"] * each
    assert first_rank == second_rank == [*alone, *together * 3, *["backward"] * each]


PAIRS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "pairs.json").read_text())
"""Jobs of many features at once, chosen by ``benchmarks/parity/pairs.py --sample``; it trains all of them."""


@pytest.mark.parametrize("job", PAIRS, ids=lambda job: name_of(job["layout"]))
def test_many_features_at_once_give_the_loss_and_parameters_of_one_process(job: dict[str, Any]) -> None:
    case = Case(**job, steps=FEW)
    alone = Case(model=case.model, optimizer=case.optimizer, steps=FEW, packed=case.packed)
    assert_equal(case, train(alone))


LONG: list[tuple[str, str, dict[str, Any]]] = [
    ("serial", "adamw", {"dp": 2, "zero": 2, "reduce": "each"}),
    ("serial", "lamb", {"tp": 2, "micro_batch": 4}),
    ("serial", "muon", {"dp": 2, "zero": 1, "micro_batch": 4}),
]


@pytest.mark.parametrize(("model", "optimizer", "layout"), LONG, ids=name_of)
def test_rounding_does_not_add_up_over_more_steps(model: str, optimizer: str, layout: dict[str, Any]) -> None:
    case = Case(layout=layout, model=keys_of(model, 2), optimizer={"name": optimizer})
    assert_equal(case, one_process(model, optimizer, layers=2))


DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2}],
    "predictions": [
        {"tp": 4, "micro_batch": 4},
        {"pp": 2, "dp": 2, "zero": 2, "micro_batch": 2, "recompute": "full"},
    ],
    "parallel-window": [{"tp": 2, "pp": 2, "micro_batch": 2, "schedule": "zero-bubble"}],
    "few-kv-heads": [{"tp": 4, "micro_batch": 4}],
}


@pytest.mark.parametrize("model", DOCUMENTS)
def test_packed_documents_give_the_loss_and_parameters_of_one_process(model: str) -> None:
    overlap = {"tensor_message": 1, "tensor_chunks": 2}
    steps = FEW + 1  # biases of two small updates are so small that rounding shows
    alone = Case({}, keys_of(model, 2), {"name": "adamw"}, steps, overlap=overlap, packed=True)
    expected = train(alone)
    for layout in DOCUMENTS[model]:
        assert_equal(replace(alone, layout=layout), expected)


V = "zero-bubble-v"
SHARES: list[tuple[str, str, dict[str, Any]]] = [
    ("serial", "adamw", {"dp": 2, "shares": (5, 3), "zero": 1}),
    ("serial", "adamw", {"dp": 3, "shares": (4, 3, 1), "zero": 0}),
    ("serial", "lamb", {"dp": 2, "shares": (1, 3), "zero": 3, "micro_batch": 2}),
    ("serial", "adamw", {"dp": 2, "shares": (2, 6), "zero": 2, "reduce": "each"}),
    ("gpt2", "adamw", {"dp": 2, "pp": 2, "shares": (7, 1), "zero": 2, "schedule": "zero-bubble"}),
    ("serial", "adamw", {"dp": 2, "pp": 2, "shares": (3, 5), "zero": 3, "virtual_stages": 2}),
    ("serial", "adamw", {"dp": 2, "pp": 2, "shares": (3, 5), "virtual_stages": 2, "schedule": V}),
    ("parallel-window", "adamw", {"dp": 2, "tp": 2, "shares": (1, 3), "zero": 3, "micro_batch": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "optimizer", "layout"), SHARES, ids=name_of)
def test_unequal_shares_give_the_loss_and_parameters_of_one_process(
    model: str, optimizer: str, layout: dict[str, Any]
) -> None:
    layers = layers_of(model, layout)
    case = Case(layout=layout, model=keys_of(model, layers), optimizer={"name": optimizer}, steps=FEW)
    assert_equal(case, one_process(model, optimizer, steps=FEW, layers=layers))


@pytest.mark.parametrize("layout", [SHARES[2][2], SHARES[5][2]], ids=name_of)
def test_unequal_shares_without_any_overlap(layout: dict[str, Any]) -> None:
    case = Case(layout, {}, {"name": "adamw"}, FEW, overlap=dict.fromkeys(SWITCHES, False))
    assert_equal(case, one_process("serial", "adamw", steps=FEW))


def test_muon_without_any_overlap() -> None:
    """A step then gathers, orthogonalizes and updates stage by stage."""
    layout = {"dp": 2, "tp": 2, "zero": 1, "micro_batch": 2}
    case = Case(layout, keys_of("latent", 2), {"name": "muon"}, FEW, overlap=dict.fromkeys(SWITCHES, False))
    assert_equal(case, one_process("latent", "muon", steps=FEW, layers=2))


def run_many_ahead(case: Case) -> Any:
    """One rank's side, as if more ranks shared the matrices."""
    with mock.patch.object(passes, "_FEW_SHARERS", 1):
        return run_case(case)


def test_updates_of_matrices_that_return_three_stages_later_have_the_same_bits() -> None:
    overlap = {"chunks": 6}
    case = Case({"dp": 2, "zero": 1}, {"layers": 6}, {"name": "muon"}, FEW, overlap=overlap)
    (expected, final), *_ = reuse_ranks(2, run_case, case)
    (found, ahead), *_ = reuse_ranks(2, run_many_ahead, case)
    assert found == expected
    for name, values in final.items():
        np.testing.assert_array_equal(ahead[name], values, err_msg=name)


SWITCHES = ("pipeline", "data", "optimizer", "tensor")
DATA_AND_PIPELINE = {"dp": 2, "pp": 2, "zero": 2}
TENSOR_AND_PIPELINE = {"tp": 2, "pp": 2, "micro_batch": 3}
EVERYTHING = {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "virtual_stages": 2, "micro_batch": 2}
# None or two of the first three: each two meet in all four states. (All are on in each case of LAYOUTS.)
COMBINATIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *((DATA_AND_PIPELINE, on) for n in (0, 2) for on in combinations(SWITCHES[:3], n)),
    *((TENSOR_AND_PIPELINE, on) for on in (("tensor",), ("pipeline",))),
    (EVERYTHING, SWITCHES),
]


@pytest.mark.parametrize(("layout", "on"), COMBINATIONS, ids=name_of)
def test_no_switch_changes_what_is_learned(layout: dict[str, Any], on: tuple[str, ...]) -> None:
    """Odd sizes on purpose: chunks, partitions and parts of unequal length, and a credit of one message."""
    keys = {switch: switch in on for switch in SWITCHES}
    overlap = keys | {
        "message_bytes": 1000,
        "max_in_flight_bytes": 1000,
        "chunks": 3,
        "tensor_chunks": 2,
        "receive_ahead": 3,
    }
    batch = {"steps": FEW} | ({"global_batch": 12} if layout.get("micro_batch") == 3 else {})
    case = Case(layout=layout, overlap=overlap, optimizer={"name": "adamw"}, **batch)
    assert_equal(case, one_process("serial", "adamw", **batch))


TWICE = [each for each in LAYOUTS if each[0] == "gpt2" and {"tp", "pp"} <= each[2].keys()]


@pytest.mark.parametrize(("model", "optimizer", "layout"), TWICE, ids=name_of)
def test_same_layout_twice_gives_the_same_bits(model: str, optimizer: str, layout: dict[str, Any]) -> None:
    """The other time is that of the tests above."""
    case = Case(layout=layout, model=MODELS[model], optimizer={"name": optimizer}, steps=FEW)
    (losses, parameters), (again, same) = first(case), train(case)
    assert losses == again
    for name, values in parameters.items():
        np.testing.assert_array_equal(values, same[name], err_msg=name)


def test_clipping_is_of_the_norm_over_all_ranks() -> None:
    tight = {"clip_norm": 0.05, "name": "adamw", "epsilon": 1e-3}
    alone = Case(model={"layers": 2}, optimizer=tight, steps=FEW)
    assert_equal(replace(alone, layout={"tp": 2, "pp": 2, "micro_batch": 2}), train(alone))
