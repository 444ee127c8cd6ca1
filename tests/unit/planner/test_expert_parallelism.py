"""If these fail, a plan for a mixture of experts does not fit, or is slower than another one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from myriad.comm.config import CommConfig
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.dashboard.insight.predicted_step import predicted_losses
from myriad.errors import BadInputError
from myriad.forecasts.iteration_forecast import costs_of as costs_of_job
from myriad.forecasts.planned_job import problem_of
from myriad.job import load_job, load_job_to_plan
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerName
from myriad.planner.cost.collective_costs import all_to_all_seconds
from myriad.planner.cost.expert_ranks import ExpertGrid
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import matmul_seconds
from myriad.planner.cost.product_costs import expert_products
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.cost.stage_layers import layer_parameters, routed_parameters
from myriad.planner.memory.memory_bound import least_bytes
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.memory.stage_memory import StageMemory
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import layout_memory, score_layout
from myriad.planner.search.layout_space import layout_grids
from myriad.planner.search.plan_explanation import improvements, neighbour_layouts, waterfall
from myriad.planner.search.plan_ranking import simulate_candidates
from myriad.planner.search.planning import describe_layout, find_plans
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import FrameworkProfile, Workload
from myriad.program.config import OverlapConfig
from myriad.program.partition import cut_ranges
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(
    layers=6, hidden=1024, heads=8, sequence=1024, vocabulary=8192, activation="swiglu", experts=16,
    experts_per_token=2, expert_hidden=1024, shared_experts=1, dense_layers=1,
)  # fmt: skip
BATCH = 64
PROBLEM = LayoutProblem(MODEL, BATCH, load_cluster("eos-3072xh100", ["nodes=2"]))


def candidate_of(**keys: Any) -> LayoutCandidate:
    return LayoutCandidate(Layout(**keys), OverlapConfig(), 0.0, 0.0, 0.0)


def costs_of(**keys: Any) -> Costs:
    return Costs(candidate_of(**keys).workload(PROBLEM), PROBLEM.cluster)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "keys",
    [
        {"dp": 8, "ep": 4, "tp": 2},
        {"dp": 4, "ep": 4, "pp": 4},
        {"dp": 4, "tp": 4, "ep": 8, "etp": 1},
        {"pp": 2, "tp": 8, "ep": 4, "etp": 1},
    ],
    ids=str,
)
def test_the_three_memory_models_agree(keys: dict[str, Any], zero: int, optimizer: OptimizerName) -> None:
    candidate = candidate_of(zero=zero, micro_batch=1, **keys)
    problem = replace(PROBLEM, optimizer=optimizer)
    workload = candidate.workload(problem)
    ranks = memory_of_ranks(workload, node_size=8)
    exact = max(float(one.total) for one in ranks)
    assert float(layout_memory(problem, candidate).total) == pytest.approx(exact, rel=0.1)
    peak = max(float(one.total) - float(one.margin) for one in ranks)
    assert 0.3 * peak < least_bytes(workload, on_cpu=False) <= peak


def test_a_rank_has_its_share_of_the_experts_and_of_their_state() -> None:
    def memory(**keys: Any) -> Any:
        (found,) = memory_of_ranks(Workload(MODEL, Layout(dp=8, zero=1, **keys), BATCH))
        return found

    experts = sum(routed_parameters(MODEL))
    assert experts == 5 * 16 * 3 * 1024 * 1024
    whole, shared = memory(), memory(ep=4)
    assert whole.gradients - shared.gradients == 4 * experts * 3 / 4
    # an eighth of the state either way: the fewer experts are shared by fewer replicas
    assert whole.optimizer == pytest.approx(shared.optimizer, rel=1e-6)
    assert whole.weights - shared.weights == pytest.approx(2 * experts * 3 / 4, rel=1e-6)
    alone = memory(ep=8)
    assert alone.optimizer == pytest.approx(whole.optimizer, rel=1e-6)


def test_tokens_travel_over_the_slowest_links_that_they_must_take() -> None:
    cluster = PROBLEM.cluster
    node, network = cluster.link("node"), cluster.link("network")
    size = 2.0**30

    def travel(ranks: float, stride: float) -> float:
        seconds = float(all_to_all_seconds(cluster, ranks, stride, size))
        link = node if ranks * stride <= 8 else network
        return seconds - link.launch_seconds - link.latency_seconds

    assert float(all_to_all_seconds(cluster, 1.0, 1.0, size)) == 0
    inside = node.bytes_per_second * cluster.ratio("node")
    outside = network.bytes_per_second * cluster.ratio("network")
    assert travel(8.0, 1.0) == pytest.approx(size * 7 / 8 / inside)
    assert travel(4.0, 2.0) == pytest.approx(size * 3 / 4 / inside)
    assert travel(16.0, 1.0) == pytest.approx(size * 8 / 16 / outside)
    assert travel(2.0, 8.0) == pytest.approx(size * 1 / 2 / outside)


def test_experts_are_gathered_and_reduced_among_the_ranks_that_hold_them() -> None:
    def stage(**keys: Any) -> StageCosts:
        return costs_of(dp=16, zero=1, micro_batch=1, **keys).stages[-2]

    whole, shared, alone = stage(), stage(ep=4), stage(ep=16)
    held = layer_parameters(MODEL)[MODEL.layers]
    experts = routed_parameters(MODEL)[MODEL.layers]
    assert [one.parameters for one in (whole, shared, alone)] == [
        held, held - experts * 3 / 4, held - experts * 15 / 16,
    ]  # fmt: skip
    assert whole.own_parameters == shared.own_parameters == alone.own_parameters == held / 16
    assert whole.copied_parameters == shared.copied_parameters == alone.copied_parameters == held / 16
    assert whole.reduce > shared.reduce > alone.reduce > 0
    assert whole.update == shared.update


@pytest.mark.parametrize(("ep", "shares"), [(16, True), (4, False)])
def test_ports_that_carry_tokens_and_shards_are_busy_with_both(ep: int, *, shares: bool) -> None:
    """With ZeRO 3, parameters are gathered while tokens travel; between nodes, over the same ports."""
    costs = costs_of(dp=16, ep=ep, zero=3, reduce="each")
    sums = [costs.dp_collectives, costs.expert_collectives]
    for stage, own in zip(costs.stages, cut_ranges(costs.layers_of_stage, costs.num_chunks), strict=True):
        held = zip(sums, costs.held_parameters(own), strict=True)
        alone = sum(costs.gather_and_reduce(one, count)[0] for one, count in held if one and count)
        travel = float(stage.times.forward.experts)
        assert stage.gather - alone == pytest.approx(travel if shares else 0.0, abs=1e-9)
    assert max(float(stage.times.forward.experts) for stage in costs.stages) > 0


def test_an_exchange_hides_behind_what_the_backward_computes_meanwhile() -> None:
    def exposed(model: ModelConfig, **keys: Any) -> tuple[float, float, float]:
        workload = replace(candidate_of(dp=16, micro_batch=1, **keys).workload(PROBLEM), model=model)
        times = Costs(workload, PROBLEM.cluster).stages[-2].times
        parts = times.forward, times.backward_input, times.backward_weight
        forward, inputs, weights = (float(part.experts) for part in parts)
        return forward, inputs, weights

    assert exposed(MODEL) == (0.0, 0.0, 0.0)
    forward, inputs, weights = exposed(MODEL, ep=8)
    assert forward > inputs > 0 and weights == 0
    # without shared experts nothing is computed while results travel
    assert exposed(MODEL.model_copy(update={"shared_experts": 0}), ep=8)[0] > forward
    assert exposed(MODEL, ep=16)[0] > forward


def test_parts_of_a_micro_batch_travel_while_others_compute() -> None:
    def exposed(**overlap: Any) -> float:
        workload = candidate_of(dp=16, micro_batch=2, ep=16).workload(PROBLEM)
        wide = MODEL.model_copy(update={"hidden": 4096, "expert_hidden": 4096})
        workload = replace(workload, model=wide, overlap=OverlapConfig(**overlap))
        return float(Costs(workload, PROBLEM.cluster).stages[-2].times.forward.experts)

    off = exposed(tensor=False)
    assert 0 < exposed(tensor_message=2**40) == off  # too small for parts
    assert exposed(tensor_message=1) < off


@pytest.mark.parametrize(
    "keys", [{"dp": 16, "ep": 16}, {"dp": 8, "pp": 2, "ep": 8, "schedule": "eager-1f1b"}], ids=str
)
def test_tokens_travel_behind_another_micro_batch_in_pairs(keys: dict[str, Any]) -> None:
    few = MODEL.model_copy(update={"vocabulary": 512})  # or the first logits would be the peak of both
    problem = replace(PROBLEM, model=few, searches_pairs=True)
    alone = candidate_of(micro_batch=1, zero=1, **keys)
    paired = alone.in_pairs(problem)
    assert paired is not None and paired.in_pairs(problem) is None
    seconds = {}
    for name, candidate in (("alone", alone), ("pairs", paired)):
        costs = Costs(candidate.workload(problem), problem.cluster)
        seconds[name] = SimulationCache().without_snapshots(costs)
        assert simulate(costs, spans=False).seconds == seconds[name], "both simulators"
    assert seconds["pairs"] < seconds["alone"]
    parts = waterfall(problem, paired, SimulationCache())
    assert sum(parts.values()) == pytest.approx(seconds["pairs"], rel=1e-3)
    one, other = (
        max(float(rank.activations) for rank in memory_of_ranks(each.workload(problem), node_size=8))
        for each in (alone, paired)
    )
    assert one < other or (one == other and alone.layout.pp > 1), "eager schedules hold as many forwards"


def test_pairs_are_tried_on_the_fastest_layouts_and_are_neighbours() -> None:
    slow = load_cluster("eos-3072xh100", ["nodes=2", "links.network.bytes_per_second=5e9"])
    fixed = {"ep": 16, "tp": 1, "pp": 1, "micro_batch": 1}
    problem = replace(PROBLEM, cluster=slow, fixed=fixed, searches_pairs=True)
    best = find_plans(problem, count=10).plans[0]
    assert best.candidate.overlap.pairs and "in pairs" in describe_layout(best.candidate)
    assert "overlap.pairs off" in dict(neighbour_layouts(problem, best.candidate))
    without = find_plans(replace(problem, searches_pairs=False), count=10).plans[0]
    assert not without.candidate.overlap.pairs and best.seconds < without.seconds
    near = dict(neighbour_layouts(problem, without.candidate))
    assert near["overlap.pairs on"].overlap.pairs
    again = without.candidate.layout.model_copy(update={"recompute": "full"})
    assert replace(without.candidate, layout=again).in_pairs(problem) is None


def test_a_v_is_tried_in_pairs_as_dualpipe() -> None:
    problem = replace(PROBLEM, searches_pairs=True)
    layout = Layout(dp=8, pp=2, ep=8, virtual_stages=2, schedule="zero-bubble-v")
    candidate = LayoutCandidate(layout, OverlapConfig(), 0.0, 0.0, 1.0).in_pairs(problem)
    assert candidate is not None
    assert candidate.layout.schedule == "dualpipe-v" and candidate.overlap.pairs


def test_the_search_divides_experts_among_replicas() -> None:
    grids = list(layout_grids(PROBLEM))
    assert {grid.ep for grid in grids if (grid.tp, grid.pp) == (1, 1)} == {1, 2, 4, 8, 16}
    cut, whole = (
        {grid.ep for grid in grids if (grid.tp, grid.pp, grid.etp) == (2, 2, etp)} for etp in (None, 1)
    )
    assert (cut, whole) == ({1, 2, 4}, {1, 2, 4, 8})
    assert not any(grid.etp for grid in grids if grid.tp == 1)
    given = layout_grids(replace(PROBLEM, fixed={"tp": 8}))
    assert [{grid.expert_tp for grid in of if grid.tp == 8} for of in (grids, given)] == [
        {1, 8},
        {1, 2, 4, 8},
    ]
    assert all(shard.shard_group is None for grid in grids if grid.experts.folds for shard in grid.shards)
    alone = layout_grids(replace(PROBLEM, comm=CommConfig(sync_every=2)))
    kinds = {(grid.tp, grid.ep, grid.etp) for grid in alone if grid.experts.folds}
    assert kinds == {(tp, tp, 1) for tp in (2, 4, 8)}, "each replica has its own experts"
    fixed = list(layout_grids(replace(PROBLEM, fixed={"ep": 8})))
    assert fixed and {grid.ep for grid in fixed} == {8}
    given = list(layout_grids(replace(PROBLEM, fixed={"etp": 1, "tp": 4})))
    assert given and all(grid.etp == 1 for grid in given)
    given = list(layout_grids(replace(PROBLEM, fixed={"etp": 4})))
    assert {(grid.tp, grid.etp) for grid in given} == {(4, None), (8, 4)}
    dense = replace(PROBLEM, model=MODEL.model_copy(update={"experts": None, "dense_layers": 0}))
    assert {(grid.ep, grid.etp) for grid in layout_grids(dense)} == {(1, None)}


def test_the_closed_form_is_near_the_simulator_with_experts_on_other_ranks() -> None:
    rng = np.random.default_rng(3)
    grouped = replace(PROBLEM, fixed={"shard_group": 4}, searches_groups=True)
    grids = [
        [grid for grid in layout_grids(problem) if grid.experts.folds and grid.shards]
        for problem in (PROBLEM, replace(PROBLEM, fixed={"tp": 8}), grouped)
    ]
    grids[1] = [grid for grid in grids[1] if 1 < grid.expert_tp < 8]
    assert grids[1] and all(grid.shards[-1].shard_group == 4 for grid in grids[2])
    errors = []
    for turn in range(100):
        own = grids[max(0, turn % 5 - 2)]
        grid = own[rng.integers(len(own))]
        layout, overlap = grid.at(tuple(int(rng.integers(count)) for count in grid.axes))
        candidate = score_layout(grid.problem, LayoutCandidate(layout, overlap, 0.0, 0.0, 0.0))
        (plan,) = simulate_candidates(grid.problem, [candidate])
        errors.append(abs(candidate.seconds / plan.seconds - 1))
    assert np.median(errors) < 0.02 and max(errors) < 0.5


def test_a_plan_is_explained_with_its_experts() -> None:
    candidate = candidate_of(dp=8, ep=4, tp=2, micro_batch=1, zero=1)
    assert describe_layout(candidate).startswith("dp 8 ep 4 tp 2 pp 1")
    parts = waterfall(PROBLEM, candidate, SimulationCache())
    assert parts["expert parallelism"] > 0
    (plan,) = simulate_candidates(PROBLEM, [candidate])
    assert sum(parts.values()) == pytest.approx(plan.seconds, rel=1e-3)
    near = {what: other.layout for what, other in neighbour_layouts(PROBLEM, candidate)}
    assert {layout.ep for what, layout in near.items() if what.startswith("ep ")} == {2, 8}
    assert all(layout.dp % layout.ep == 0 for layout in near.values())


def test_exposed_exchanges_are_a_kind_of_their_own() -> None:
    job = load_job("tiny-moe", ["layout.dp=4", "layout.ep=4"])
    costs = costs_of_job(job, load_cluster("one-node-8xh100"))
    exposed = costs.workload.num_micro_batches * sum(float(one.parts.experts) for one in costs.stages)
    found = predicted_losses(costs)
    assert exposed > 0 and found.seconds["experts"] == pytest.approx(exposed, rel=0.01)
    assert sum(found.seconds.values()) + found.ideal_seconds == pytest.approx(found.step_seconds)


def test_a_given_number_of_ranks_is_planned() -> None:
    cluster = load_cluster("eos-3072xh100", ["nodes=1"])
    problem = problem_of(load_job_to_plan("tiny-moe", ["layout.ep=4"]), cluster)
    assert problem.fixed["ep"] == 4 and {grid.ep for grid in layout_grids(problem)} == {4}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4, pp=2, tp=2, ep=2),
        Layout(dp=4, pp=2, tp=2, ep=2, etp=1),
        Layout(dp=2, pp=2, tp=4, ep=8, etp=1),
        Layout(dp=4, pp=1, tp=4, ep=8, etp=1),
        Layout(dp=2, pp=4, tp=8, ep=2, etp=1),
        Layout(dp=2, pp=2, tp=8, ep=2, etp=2),
        Layout(dp=4, pp=2, tp=4, ep=4, etp=2, zero=1, shard_group=2),
        Layout(dp=8, pp=1, tp=2, ep=1, etp=1),
        Layout(dp=8, pp=2, tp=2, ep=2, zero=1, shard_group=4),
        Layout(dp=4, pp=2, tp=4, ep=2, etp=1, zero=1, shard_group=2),
    ],
    ids=str,
)
def test_groups_of_experts_are_those_of_the_grid(layout: Layout) -> None:
    """Else tokens are planned to travel over links that they do not take."""
    experts = ExpertGrid.of(layout, layout.tp * layout.pp)
    found = {"ep": experts.sharing, "expert_dp": experts.alike()}
    if layout.zero:
        found["expert_shard"] = experts.alike(layout.num_shard_groups)
    for axis, group in found.items():
        peers = RankGrid(layout, 0).peers(axis)
        assert len(peers) == group.size
        for place in (1, 2, 4, 8, 16, 64):
            inside = sum(rank < place for rank in peers)
            assert group.run.within(place, group.size, group.stride) == inside, (axis, place)
            if group.size > 1:
                beyond = group.run.reaches_beyond(place, group.size, group.stride)
                assert beyond == (inside < group.size), (axis, place)


def test_whole_experts_are_shared_by_the_ranks_of_a_stage() -> None:
    def memory(**keys: Any) -> Any:
        (found,) = memory_of_ranks(Workload(MODEL, Layout(dp=4, tp=4, zero=1, **keys), BATCH))
        return found

    experts = sum(routed_parameters(MODEL))
    cut, whole = memory(ep=4), memory(ep=4, etp=1)
    # whole experts are cut by ep only, and their state over all ranks of the stage that hold the same
    assert whole.gradients - cut.gradients == 4 * experts * (1 / 4 - 1 / 16)
    assert whole.optimizer == pytest.approx(cut.optimizer, rel=1e-6)
    assert memory(ep=16, etp=1).gradients == pytest.approx(cut.gradients, rel=1e-6)
    assert memory(ep=8, etp=2).gradients == pytest.approx(cut.gradients, rel=1e-6)
    assert whole.activations < memory(ep=4, etp=2).activations < cut.activations
    # a rank keeps the copies of its own tokens only
    assert whole.activations < cut.activations


def test_whole_experts_send_each_token_once_and_gather_no_sequence() -> None:
    def of_block(model: ModelConfig = MODEL, **keys: Any) -> tuple[float, float]:
        workload = replace(candidate_of(tp=4, micro_batch=1, **keys).workload(PROBLEM), model=model)
        times = (
            Costs(replace(workload, overlap=OverlapConfig(tensor=False)), PROBLEM.cluster).stages[-2].times
        )
        return float(times.forward.experts), float(times.forward.tensor)

    alone = MODEL.model_copy(update={"hidden": 8192, "shared_experts": 0, "balance_loss": 0.0})
    (cut, gathered), (whole, own) = of_block(alone, dp=4, ep=4), of_block(alone, dp=4, ep=16, etp=1)
    assert 0 < whole < 0.4 * cut
    assert own == pytest.approx(gathered / 2)
    part = of_block(alone, dp=4, ep=8, etp=2)  # two of four ranks gather half of the sequence
    assert whole < part[0] < cut and own < part[1] < gathered
    in_node = of_block(alone, dp=4, ep=4, etp=1)
    assert 0 < in_node[0] < whole, "four tensor-parallel ranks are neighbours"
    # shared experts gather the sequence for themselves, and the losses of the router gather scores
    assert of_block(alone.model_copy(update={"shared_experts": 1}), dp=4, ep=4, etp=1)[1] == gathered
    assert of_block(alone.model_copy(update={"balance_loss": 0.1}), dp=4, ep=4, etp=1)[1] > own
    assert of_block(alone, dp=4, ep=1, etp=1) == (0.0, own)


def test_ranks_with_whole_experts_reduce_them_without_other_replicas() -> None:
    (alone, cut), (experts, whole) = (
        (costs.expert_collectives, costs.stages[-2])
        for costs in (
            costs_of(dp=1, pp=2, tp=8, micro_batch=1),
            costs_of(dp=1, pp=2, tp=8, etp=1, micro_batch=1),
        )
    )
    assert alone is None and cut.reduce == 0
    assert experts is not None and experts.size == 8 and whole.reduce > 0
    assert whole.copied_parameters == pytest.approx(cut.copied_parameters)
    assert simulate(costs_of(dp=1, pp=2, tp=8, etp=1, micro_batch=1)).seconds > 0


def test_an_explained_plan_names_whole_experts() -> None:
    candidate = candidate_of(dp=4, ep=8, tp=4, etp=1, micro_batch=1, zero=1)
    assert describe_layout(candidate).startswith("dp 4 ep 8 etp 1 tp 4 pp 1")
    near = {what: other.layout for what, other in neighbour_layouts(PROBLEM, candidate)}
    (other,) = (layout for what, layout in near.items() if what.startswith("etp"))
    assert other.etp == 2, "eight ranks cannot share experts cut by tp"
    assert {near[what].ep for what in near if what.startswith("ep ")} == {4, 16}
    candidate = replace(candidate, layout=candidate.layout.model_copy(update={"ep": 4}))
    near = {what: other.layout for what, other in neighbour_layouts(PROBLEM, candidate)}
    candidate = replace(candidate, layout=candidate.layout.model_copy(update={"etp": 2}))
    near = {what: other.layout for what, other in neighbour_layouts(PROBLEM, candidate)}
    (other,) = (layout for what, layout in near.items() if what.startswith("etp 4"))
    assert other.etp is None and other.ep == 4
    assert {layout.expert_tp for layout in near.values() if layout.tp == 4} == {1, 2, 4}


def test_a_given_etp_is_planned() -> None:
    cluster = load_cluster("eos-3072xh100", ["nodes=1"])

    def grids(*keys: str) -> set[tuple[int, int, int]]:
        problem = problem_of(load_job_to_plan("tiny-moe", list(keys)), cluster)
        return {(grid.tp, grid.ep, grid.expert_tp) for grid in layout_grids(problem)}

    assert {etp for *_, etp in grids("layout.tp=2", "layout.etp=1")} == {1}
    assert {(tp, etp) for tp, _, etp in grids("layout.etp=2")} == {(2, 2), (4, 2)}
    # eight ranks share experts only if these are whole
    assert grids("layout.tp=2", "layout.dp=4", "layout.ep=8") == {(2, 8, 1)}
    with pytest.raises(BadInputError, match=r"layout\.ep"):
        grids("layout.tp=2", "layout.dp=2", "layout.ep=8")
    with pytest.raises(BadInputError, match=r"layout\.etp = 3: must divide layout\.tp.* 1, 2, 4"):
        grids("layout.etp=3")


def test_ranks_that_gather_arrived_tokens_send_a_part_over_the_network() -> None:
    """As Megatron-Core does: published rows are several times slower if each rank sends all tokens."""
    model = MODEL.model_copy(update={"hidden": 8192, "shared_experts": 0})

    def of_block(profile: FrameworkProfile) -> tuple[float, float, float]:
        workload = candidate_of(tp=4, dp=4, ep=4, micro_batch=1).workload(PROBLEM)
        workload = replace(workload, model=model, profile=profile, overlap=OverlapConfig(tensor=False))
        times = Costs(workload, PROBLEM.cluster).stages[-2].times.forward
        kept = StageMemory(workload, [range(model.layers, model.layers + 1)], on_cpu=False).held(
            0, turns=False
        )
        return float(times.experts), float(times.tensor), kept.kept

    (own, gathered, kept), theirs = (of_block(FrameworkProfile(gathers_arrived=way)) for way in (False, True))
    assert 0.25 * own < theirs[0] < 0.75 * own, "the network has a quarter, the node gathers all"
    assert theirs[1] == pytest.approx(gathered / 2)
    copies = 2.0 * model.sequence * model.experts_per_token * model.hidden
    assert kept - theirs[2] > copies * 3 / 4, "results are kept for a part only"
    alone = candidate_of(tp=4, dp=4, micro_batch=1).workload(PROBLEM)
    theirs_alone = replace(alone, profile=FrameworkProfile(gathers_arrived=True))
    assert Costs(alone, PROBLEM.cluster).stages == Costs(theirs_alone, PROBLEM.cluster).stages


def test_one_kernel_for_all_experts_fills_its_waves() -> None:
    def products(**profile: bool) -> float:
        workload = candidate_of(dp=16, micro_batch=1).workload(PROBLEM)
        workload = replace(workload, profile=FrameworkProfile(**profile))
        return float(Costs(workload, PROBLEM.cluster).stages[-2].times.forward.matmul)

    accelerator = PROBLEM.cluster.accelerator
    one, many = (
        float(matmul_seconds(accelerator, 256.0, 2048.0, 1024.0, value_bytes=2, num_in_kernel=count))
        for count in (1.0, 16.0)
    )
    assert accelerator.launch_seconds * 15 / 16 < one - many < 0.8 * one
    assert products() < products(grouped_experts=False) - 16 * accelerator.launch_seconds


@pytest.mark.parametrize("keys", [{"dp": 16}, {"dp": 4, "tp": 4, "etp": 1}], ids=str)
def test_all_ranks_wait_for_the_busiest_which_needs_most_memory(keys: dict[str, Any]) -> None:
    shared = keys | {"ep": 16, "micro_batch": 4, "zero": 1}

    def of(load: float, **changes: Any) -> tuple[Costs, float, float]:
        candidate = candidate_of(**(shared | changes), expert_load=load)
        workload = replace(candidate.workload(PROBLEM), overlap=OverlapConfig(tensor=False))
        costs = Costs(workload, PROBLEM.cluster)
        exact = max(float(one.total) for one in memory_of_ranks(costs.workload, node_size=8))
        return costs, exact, float(layout_memory(PROBLEM, candidate).total)

    (even, least, estimate), (uneven, most, higher) = of(1.0), of(2.0)
    before, after = (costs.stages[-2].times.forward for costs in (even, uneven))
    products = expert_products(MODEL.of_block(1), even.slice, 4.0 * MODEL.sequence)[0]
    doubled = expert_products(MODEL.of_block(1), uneven.slice, 4.0 * MODEL.sequence)[0]
    assert 1.3 * products < doubled < 2.1 * products
    assert float(after.matmul - before.matmul) == pytest.approx(float(doubled - products))
    assert after.experts > 1.2 * before.experts and after.memory > before.memory
    assert after.tensor == before.tensor and after.attention == before.attention
    assert simulate(uneven).seconds > simulate(even).seconds
    assert most > least and higher - estimate == pytest.approx(most - least, rel=0.25)
    # each rank has all its tokens where none shares experts
    alone = [of(load, ep=1, micro_batch=1) for load in (1.0, 2.0)]
    assert alone[0][1:] == alone[1][1:] and alone[0][0].stages == alone[1][0].stages


def test_no_rank_gets_more_than_all_tokens() -> None:
    assert Layout(dp=4, ep=4, expert_load=9.0).busiest_load == 4.0
    many, all_tokens = (costs_of(dp=4, ep=4, micro_batch=1, pp=4, expert_load=load) for load in (9.0, 4.0))
    assert many.stages == all_tokens.stages


def test_a_given_load_is_planned_and_explained() -> None:
    problem = problem_of(
        load_job_to_plan("tiny-moe", ["layout.expert_load=1.5"]), load_cluster("eos-3072xh100", ["nodes=1"])
    )
    assert {grid.at((0,) * 7)[0].expert_load for grid in layout_grids(problem)} == {1.5}
    given = replace(PROBLEM, fixed={"expert_load": 1.5})
    candidate = score_layout(given, candidate_of(dp=16, ep=16, micro_batch=1, zero=1, expert_load=1.5))
    even = score_layout(PROBLEM, candidate_of(dp=16, ep=16, micro_batch=1, zero=1))
    assert candidate.seconds > even.seconds and candidate.memory_bytes > even.memory_bytes
    (plan,) = simulate_candidates(given, [candidate])
    assert candidate.seconds == pytest.approx(plan.seconds, rel=0.1)
    parts = waterfall(given, candidate, SimulationCache())
    found = {one.what: one.seconds for one in improvements(given, plan, parts, SimulationCache())}
    (balanced,) = simulate_candidates(PROBLEM, [even])
    assert found["equally loaded experts"] == pytest.approx(balanced.seconds)


def test_a_token_that_travels_once_takes_each_link_once() -> None:
    grid = ExpertGrid(dp=8, tp=4, ep=32, etp_groups=4, replica_stride=4)
    ((everyone, rows),) = grid.hops(64, 8, 8)
    assert (everyone.size, rows) == (32, 8.0)
    ((everyone, of_ranks),) = replace(grid, dispatch="rank").hops(64, 8, 8)
    # 64 experts of which 32 ranks hold two each: the chance that a rank holds none of 8
    alone = np.prod([(62 - one) / (64 - one) for one in range(8)])
    assert everyone.size == 32 and of_ranks == pytest.approx(32 * (1 - alone))
    (between, of_nodes), (inside, again) = replace(grid, dispatch="node").hops(64, 8, 8)
    assert (between.size, inside.size, again) == (4, 8, of_ranks) and 3 < of_nodes < 4
    assert between.run.within(8, between.size, between.stride) == 1
    assert inside.run.within(8, inside.size, inside.stride) == 8
    # a node alone, or one rank in each node, leaves one hop
    assert len(replace(grid, ep=8, dispatch="node").hops(64, 8, 8)) == 1
    assert len(replace(grid, etp_groups=1, ep=8, replica_stride=8, dispatch="node").hops(64, 8, 8)) == 1


def test_a_dispatch_by_node_is_quicker_where_links_between_nodes_are_slow() -> None:
    slow = load_cluster("eos-3072xh100", ["nodes=2", "links.network.bytes_per_second=5e9"])
    model = MODEL.model_copy(update={"hidden": 8192, "experts": 64, "experts_per_token": 8})

    def exposed(dispatch: str) -> float:
        workload = candidate_of(dp=16, ep=16, micro_batch=1, expert_dispatch=dispatch).workload(PROBLEM)
        return float(Costs(replace(workload, model=model), slow).stages[-2].times.forward.experts)

    assert exposed("node") < 0.5 * exposed("rank") < 0.5 * exposed("expert")


def test_a_given_dispatch_is_planned_and_others_are_neighbours() -> None:
    given = replace(PROBLEM, fixed={"expert_dispatch": "node"})
    found = {(grid.ep > 1, grid.at((0,) * 7)[0].expert_dispatch) for grid in layout_grids(given)}
    assert found == {(True, "node"), (False, "expert")}
    candidate = candidate_of(dp=16, ep=16, micro_batch=1, zero=1, expert_dispatch="node")
    assert "ep 16 by node" in describe_layout(candidate)
    near = {what: other.layout for what, other in neighbour_layouts(given, candidate)}
    assert near["expert_dispatch rank"].expert_dispatch == "rank" and "expert_dispatch expert" in near
    pairs = candidate_of(dp=16, ep=2, micro_batch=1, zero=1, expert_dispatch="node")
    alone = [other.layout for _, other in neighbour_layouts(given, pairs) if other.layout.ep == 1]
    assert {layout.expert_dispatch for layout in alone} == {"expert"}
    (plan,) = simulate_candidates(given, [score_layout(given, candidate)])
    assert plan.candidate.seconds == pytest.approx(plan.seconds, rel=0.1)
