"""If these fail, experts compute another function of a token than their definition, or the router has another
loss than the documented one."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from myriad.kernels.activation import ACTIVATIONS
from myriad.kernels.expert_sums import gate_gradients
from myriad.model.activation_memory import LayerKind
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.expert_capacity import first_tokens
from myriad.model.expert_dispatch import Places
from myriad.model.experts import Experts, Router
from myriad.model.gpt import GPT, build_full
from myriad.model.matrix_shapes import hidden_matrices
from myriad.model.mlp import MLP, ExpertMLPs, GatedMLP
from myriad.planner.cost.stage_layers import layer_parameters, routed_elements
from myriad.planner.memory.layer_memory import layer_elements

SHAPES: list[dict[str, Any]] = [
    {"experts": 4},
    {
        "experts": 6,
        "experts_per_token": 3,
        "router_scores": "sigmoid",
        "router_scale": 2.5,
        "shared_experts": 2,
    },
    {"experts": 4, "shared_experts": 2, "shared_expert_gate": True},
    {"experts": 3, "experts_per_token": 1, "router_normalized": False, "activation": "swiglu"},
    {"experts": 5, "experts_per_token": 5, "balance_loss": 0.0},
    {"experts": 8, "experts_per_token": 3, "router_scores": "sigmoid", "balance_bias_rate": 0.1},
    {"experts": 8, "router_groups": 4, "router_group_limit": 2, "router_normalized": False},
    {"experts": 4, "balance_scope": "batch"},
    {"experts": 4, "balance_scope": "batch", "router_scores": "sigmoid"},
    {"experts": 4, "bias": True, "router_logit_bias": True, "activation": "clamped_swiglu"},
    {"experts": 4, "bias": True, "shared_experts": 2, "shared_expert_gate": True, "activation": "swiglu"},
    {"experts": 4, "router_logit_bias": True, "balance_bias_rate": 0.1, "router_scores": "sigmoid"},
    {
        "experts": 9,
        "router_groups": 3,
        "router_group_limit": 1,
        "router_group_score": "two_largest",
        "balance_bias_rate": 0.1,
    },
]
FACTOR = 0.3


def config_of(keys: dict[str, Any]) -> ModelConfig:
    base: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "expert_hidden": 8, "vocabulary": 64}
    return ModelConfig(**(base | {"balance_loss": 0.2, "router_z_loss": 0.1} | keys))


def new_experts(config: ModelConfig) -> Experts:
    torch.manual_seed(0)
    experts = Experts(config, Boundary())
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def by_definition(
    config: ModelConfig, experts: Experts, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum for each token of its experts, every expert computing every token, and the two losses."""
    k, count = config.experts_per_token, config.experts or 0
    logits = F.linear(x, experts.router.weight, experts.router.logit_bias)
    scores = logits.softmax(-1) if config.router_scores == "softmax" else logits.sigmoid()
    largest = scores >= scores.topk(k, -1).values[..., -1:]
    preferred = scores if experts.router.bias is None else scores + experts.router.bias
    groups = preferred.unflatten(-1, (config.router_groups, -1)).sort(-1, descending=True).values
    best = groups[..., 0] if config.router_group_score == "largest" else groups[..., :2].sum(-1)
    inside = best >= best.topk(config.router_group_limit, -1).values[..., -1:]
    preferred = torch.where(inside.repeat_interleave(groups.shape[-1], -1), preferred, -1e9)
    chosen = preferred >= preferred.topk(k, -1).values[..., -1:]
    gates = torch.where(chosen, scores, 0.0)
    if config.router_normalized:
        gates = gates / gates.sum(-1, keepdim=True)
    inner = [ACTIVATIONS[config.activation](expert.up(x)) for expert in experts.experts.values()]
    results = [expert.down(one) for one, expert in zip(inner, experts.experts.values(), strict=True)]
    each = torch.stack(results, -1)
    y = (each * gates[..., None, :]).sum(-1) * config.router_scale
    shares = scores / scores.sum(-1, keepdim=True)
    load = largest.float().mean(1) * count / k
    load = load if experts.router.batch_loads is None else experts.router.batch_loads.detach()
    balance = (load * shares.mean(1)).sum() * x.shape[1]
    z_loss = logits.exp().sum(-1).log().square().sum()
    if experts.shared is not None:
        gate = experts.shared.gate(x).sigmoid() if isinstance(experts.shared, GatedMLP) else 1.0
        y = y + gate * MLP.forward(experts.shared, x)
    return y, config.balance_loss * balance + config.router_z_loss * z_loss


@pytest.mark.parametrize("keys", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_definition(keys: dict[str, Any]) -> None:
    config = config_of(keys)
    experts = new_experts(config)
    x, weights = torch.randn(3, 7, 16, requires_grad=True), torch.randn(3, 7, 16)
    y = experts(x, experts.router(x, FACTOR))
    (y * weights).sum().backward()
    kept = ("router.bias", "router.batch_loads")  # from step to step
    learned = [one for name, one in experts.named_parameters() if name not in kept]
    found = [x.grad, *(parameter.grad for parameter in learned)]
    x.grad = None
    experts.zero_grad(set_to_none=True)
    expected, loss = by_definition(config, experts, x)
    ((expected * weights).sum() + FACTOR * loss).backward()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for own, reference in zip(found, [x.grad, *(one.grad for one in learned)], strict=True):
        assert reference is not None
        own = torch.zeros_like(reference) if own is None else own  # an expert without tokens
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gates_and_gradients_travel_with_their_token_to_the_bit(dtype: torch.dtype) -> None:
    """Both hops lead to this rank, so nothing is added in another order."""
    config = config_of({"experts": 6, "experts_per_token": 3, "shared_experts": 1})
    experts = new_experts(config).to(dtype)
    x, weights = torch.randn(3, 7, 16, dtype=dtype), torch.randn(3, 7, 16, dtype=dtype)
    found: list[list[torch.Tensor | None]] = []
    for hops in ((), ((0, 1), (0, 1))):
        experts.boundary.expert_hops = hops
        own = x.clone().requires_grad_()
        experts.zero_grad(set_to_none=True)
        y = experts(own, experts.router(own, FACTOR))
        (y * weights).sum().backward()
        found.append([y, own.grad, *(one.grad for one in experts.parameters())])
    assert all(one is not None and torch.equal(one, other) for one, other in zip(*found, strict=True))


@given(most=st.integers(1, 4), data=st.data())
def test_each_present_pair_has_a_place_with_its_destination(most: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(-1, 4), min_size=most, max_size=most)
    chosen = data.draw(st.lists(row, max_size=9))
    places = Places.of_some(torch.tensor(chosen, dtype=torch.int64).view(-1, most), 5)
    expected = [
        (end, token) for end in range(5) for token, ends in enumerate(chosen) for e in ends if e == end
    ]
    assert places.tokens.tolist() == [token for _, token in expected]
    assert places.counts.tolist() == [sum(end == one for one, _ in expected) for end in range(5)]
    rows = torch.tensor([[1.0 + end, token] for end, token in expected]).view(-1, 2)
    sums = places.sum_by_token(rows, len(chosen)).view(-1, 2).tolist()
    assert sums == [
        [sum(1.0 + end for end in ends if end >= 0), token * sum(end >= 0 for end in ends)]
        for token, ends in enumerate(chosen)
    ]
    gates, grad = torch.rand(len(chosen), most), torch.ones(len(chosen), 2)
    grad_rows, found = gate_gradients(grad, rows, places.tokens, places.pairs, gates)
    of_rows = [gates.flatten()[pair].item() for pair in places.pairs]
    assert grad_rows.tolist() == [[gate, gate] for gate in of_rows]
    assert found.tolist() == [
        [1.0 + end + token if end >= 0 else 0.0 for end in ends] for token, ends in enumerate(chosen)
    ]


@given(room=st.integers(1, 6), data=st.data())
def test_an_expert_keeps_the_first_tokens_of_a_sequence_that_chose_it(room: int, data: st.DataObject) -> None:
    choice = st.permutations(range(5)).map(lambda order: order[:2])
    rows = data.draw(st.lists(st.lists(choice, min_size=6, max_size=6), min_size=1, max_size=3))
    kept = first_tokens(torch.tensor(rows), 5, room).tolist()
    for sequence, found in zip(rows, kept, strict=True):
        taken = dict.fromkeys(range(5), 0)
        for wanted, own in zip(sequence, found, strict=True):
            for expert in wanted:
                taken[expert] += 1
            assert own == [expert if taken[expert] <= room else -1 for expert in wanted]


def test_a_dropped_token_gets_nothing_from_its_expert_in_training_alone() -> None:
    """Expert 0 has room for 2 of 4 tokens: what it computes of the others counts in evaluation only."""
    keys = {"experts": 2, "experts_per_token": 1, "router_normalized": False, "balance_loss": 0.0}
    config = config_of(keys | {"expert_capacity": 1.0, "router_z_loss": 0.0})
    experts = new_experts(config)
    torch.nn.init.constant_(experts.router.weight[0], 1.0)
    torch.nn.init.constant_(experts.router.weight[1], -1.0)
    x = torch.rand(1, 4, 16, requires_grad=True)  # every product with expert 0 is the larger one
    whole = experts.eval()(x, experts.router(x, FACTOR))
    assert whole.abs().amin() > 0
    found = experts.train()(x, experts.router(x, FACTOR))
    torch.testing.assert_close(found[:, :2], whole[:, :2])
    assert not found[:, 2:].any()
    found.sum().backward()
    assert x.grad is not None and x.grad[:, :2].any() and not x.grad[:, 2:].any()


@pytest.mark.parametrize(("factor", "room"), [(1.0, 4), (1.1, 5), (1.25, 5), (0.1, 1), (8.0, 12)])
def test_room_is_a_share_of_the_sequence_rounded_up(factor: float, room: int) -> None:
    config = ModelConfig(experts=6, experts_per_token=2, sequence=12, expert_capacity=factor)
    assert config.expert_room(12) == room and config.largest_expert_load == room / 4


def test_neither_evaluation_nor_recomputation_without_a_graph_adds_the_losses() -> None:
    experts = new_experts(config_of({"experts": 4}))
    x = torch.randn(2, 5, 16, requires_grad=True)
    experts.eval()
    experts.router(x, FACTOR).sum().backward()
    evaluated, x.grad = x.grad, None
    F.linear(x, experts.router.weight).sum().backward()
    assert evaluated is not None and x.grad is not None
    torch.testing.assert_close(evaluated, x.grad)


def test_tokens_are_counted_once_whether_the_experts_are_recomputed_or_not() -> None:
    """Else the balance would weight the micro-batches whose layers are recomputed twice."""
    experts, x = new_experts(config_of({"experts": 4})), torch.randn(2, 5, 16)
    experts.loads, experts.entropy = torch.zeros(4, dtype=torch.int64), torch.zeros((), dtype=torch.float64)
    with torch.no_grad():  # as a forward that keeps only its input
        experts(x, experts.router(x, FACTOR))
    assert not experts.loads.any() and not experts.entropy
    experts(x, experts.router(x, FACTOR))
    assert int(experts.loads.sum()) == 2 * 5 * 2
    once = float(experts.entropy)
    shares = F.linear(x, experts.router.weight.detach()).softmax(-1)
    assert once == pytest.approx(2 * float(-(shares * shares.log()).sum()), rel=1e-5), (
        "for each of two experts"
    )
    experts.eval()
    experts(x, experts.router(x, FACTOR))
    assert int(experts.loads.sum()) == 2 * 5 * 2 and float(experts.entropy) == once, "evaluation counts none"


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_entropy_is_that_of_equal_scores_at_most_and_zero_where_one_expert_has_all(kind: str) -> None:
    router = Router(config_of({"experts": 4, "router_scores": kind}), Boundary())
    one = torch.tensor([200.0, -200.0, -200.0, -200.0])
    found = router.entropies(torch.stack((torch.zeros(4), one)))
    torch.testing.assert_close(found, torch.tensor([math.log(4), 0.0]), atol=1e-6, rtol=1e-6)


def test_the_balance_loss_is_least_where_all_experts_have_equal_scores_and_tokens() -> None:
    router = Router(config_of({"experts": 4, "experts_per_token": 1, "router_z_loss": 0.0}), Boundary())
    turns = 1e-4 * F.one_hot(torch.arange(8) % 4, 4).float()[None]
    assert float(router.loss(turns)) == pytest.approx(0.2 * 8, rel=1e-3), "the weight, for each token"
    one = 10.0 * F.one_hot(torch.zeros(8, dtype=torch.int64), 4).float()[None]
    assert float(router.loss(one)) == pytest.approx(0.2 * 8 * 4, rel=1e-2), (
        "all tokens at one of four experts"
    )


def test_a_sequence_has_the_same_loss_beside_any_other() -> None:
    """Else another micro-batch, and so another layout, would train another model."""
    router = Router(config_of({"experts": 4}), Boundary())
    logits = torch.randn(3, 9, 4)
    torch.testing.assert_close(router.loss(logits), sum(router.loss(one[None]) for one in logits))


def test_an_expert_without_tokens_costs_nothing_and_gets_no_gradient() -> None:
    config = config_of({"experts": 4, "experts_per_token": 1, "router_normalized": False})
    experts = new_experts(config)
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[2] = 1.0
    x = torch.rand(2, 5, 16)
    experts(x, experts.router(x, FACTOR)).sum().backward()
    used = [all(one.grad is not None for one in expert.parameters()) for expert in experts.experts.values()]
    assert used == [False, False, True, False]


@pytest.mark.parametrize("keys", SHAPES, ids=str)
def test_parameters_and_flops_are_counted(keys: dict[str, Any]) -> None:
    config = config_of(keys | {"vocabulary_multiple": 1})
    layers = build_full(config, 0)
    parameters = {id(one): one for one in layers.parameters()}.values()
    assert sum(one.numel() for one in parameters) == config.num_parameters()
    each = config.hidden * config.expert_width * (config.up_matrices + 1)
    unused = (config.experts or 0) - config.experts_per_token
    dense = ModelConfig(**(config.model_dump() | {"experts": None, "ffn_hidden": config.active_width}))
    rows = (config.experts or 0) + config.shared_expert_gate
    routers = 6.0 * config.layers * config.hidden * rows
    assert config.flops_per_token() == dense.flops_per_token() + routers
    router = rows * config.hidden + (config.experts or 0) * (
        config.has_router_bias + config.has_batch_loads + config.router_logit_bias
    )
    if config.bias:  # each expert has its last bias, and the shared ones; the dense MLP one in all
        each += config.expert_width * config.up_matrices
        router += ((config.experts or 0) - 1 + (config.shared_experts > 0)) * config.hidden
    assert config.num_parameters() == dense.num_parameters() + config.layers * (unused * each + router)


def test_blocks_without_experts_are_counted_each_as_what_it_is() -> None:
    """Else a plan gives a stage another memory or time than its blocks have."""
    keys = {"layers": 6, "experts": 4, "shared_experts": 1, "prediction_layers": 2, "vocabulary_multiple": 1}
    config = config_of(keys | {"dense_layers": 2, "expert_every": 2, "ffn_hidden": 24})
    layers = build_full(config, 0)
    assert [config.has_experts(layer) for layer in range(8)] == [layer in (3, 5, 7) for layer in range(8)]
    kinds = {True: config_of(keys), False: config_of(keys | {"experts": None, "ffn_hidden": 24})}
    sizes, flops = layer_parameters(config), config.layer_flops_per_token()
    for index in range(1, 7):
        alike = kinds[config.has_experts(index - 1)]
        held = sum(one.numel() for one in layers[index].parameters())
        assert held == sizes[index] == layer_elements(config, "block", 1.0, index - 1)
        assert flops[index] == alike.layer_flops_per_token()[index]
    parameters = {id(one): one for one in layers.parameters()}.values()
    assert sum(one.numel() for one in parameters) == config.num_parameters()
    dense_head, sparse_head = (kinds[kind].layer_flops_per_token()[-1] for kind in (False, True))
    assert flops[-1] == (dense_head + sparse_head) / 2, "one prediction layer of each kind"


def test_the_bias_of_an_expert_is_added_by_one_of_the_ranks_that_share_it() -> None:
    """Else a sum over two ranks has it twice."""
    config, x = config_of({"experts": 4, "bias": True}), torch.randn(5, 16)
    boundaries = [Boundary(), Boundary()]
    for rank, boundary in enumerate(boundaries):
        boundary.rank, boundary.size = rank, 2
    first, other = (ExpertMLPs(config, boundary, range(4)) for boundary in boundaries)
    for experts in (first, other):
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
    biases = [
        [one for name, one in experts.named_parameters() if "down.bias" in name] for experts in (first, other)
    ]
    for own, same in zip(*biases, strict=True):
        same.data.copy_(own)
    counts = torch.tensor([2, 0, 1, 2])
    found, saved = (
        first(x, counts) + other(x, counts),
        torch.stack([one.detach().clone() for one in biases[0]]),
    )
    for one in (*biases[0], *biases[1]):
        one.data.zero_()
    without = first(x, counts) + other(x, counts)
    torch.testing.assert_close(found - without, saved.repeat_interleave(counts, 0))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_planner_counts_the_parameters_that_a_rank_holds(tp: int) -> None:
    """An expert's last bias is whole on each of the ranks that share it."""
    keys = {"bias": True, "router_logit_bias": True, "attention_bias": "all", "tied": False}
    config = config_of(keys | {"experts": 4, "dense_layers": 1, "ffn_hidden": 24, "prediction_layers": 1})
    boundary = Boundary()
    boundary.size = tp
    for index in (1, 2, 3):
        layer = GPT(config, 0).build(index, boundary)
        held = {name: one.numel() for name, one in layer.named_parameters()}
        kind: LayerKind = "head" if index == 3 else "block"
        assert sum(held.values()) == layer_elements(config, kind, tp, index - 1)
        routed = {name: size for name, size in held.items() if ".experts." in name}
        assert sum(routed.values()) == routed_elements(config, index, tp)
        matrices = sum(size for name, size in routed.items() if name.endswith("weight"))
        assert matrices == sum(one.local for one in hidden_matrices(config, index, tp) if one.of_expert)


def test_muon_orthogonalizes_experts_and_not_the_router() -> None:
    definition = GPT(config_of({"experts": 4, "shared_experts": 1}), 0)
    assert definition.is_hidden("blocks.0.mlp.experts.3.up.weight")
    assert definition.is_hidden("blocks.0.mlp.shared.down.weight")
    assert not definition.is_hidden("blocks.0.mlp.router.weight")
