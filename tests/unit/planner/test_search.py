"""If these fail, `myriad plan` proposes a layout that is not the best, not legal, or does not fit."""

import itertools
import random
import re
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from planned import MODEL, candidates, problem_of

from myriad.comm.layout import Layout, check_layout
from myriad.errors import BadInputError
from myriad.job import load_job, load_job_to_plan
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.search.layout_problem import LayoutCandidate, Sharding
from myriad.planner.search.layout_search import MIN_FIT_PROBABILITY, score_layout, search_layouts
from myriad.planner.search.layout_space import layout_grids, tensor_degrees
from myriad.planner.search.planning import cluster_sizes, describe_layout, find_plans
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import simulate
from myriad.program.config import OverlapConfig
from myriad.program.schedules import SCHEDULES
from myriad.recipes.cluster import load_cluster

SLOW = settings(derandomize=True, max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def _counted_by_hand(world: int, batch: int) -> int:
    """Every combination of every key, refused or not by the runtime's own rules."""
    count = 0
    for tp, pp, name in itertools.product((1, 2, 4, 8, 16), range(1, world + 1), SCHEDULES):
        if world % (tp * pp) or pp > MODEL.layers + 2:
            continue
        dp = world // (tp * pp)
        for v, size in itertools.product(range(1, 17), range(1, batch + 1)):
            if batch % (dp * size) or pp * v > MODEL.layers + 2:
                continue
            if (name, v) == ("interleaved", 1):
                continue  # the same program as 1f1b
            if pp == 1 and (name, v) != ("1f1b", 1) and not (v > 1 and name in ("interleaved", "gpipe")):
                continue  # no other rank to wait for
            inside = 4 // (tp * pp)
            groups = (None, inside) if 1 < inside < dp and dp % inside == 0 else (None,)
            for zero, reduce, group in itertools.product(range(4), ("last", "each"), groups):
                layout = Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    virtual_stages=v,
                    micro_batch=size,
                    schedule=name,
                    zero=zero,
                    reduce=reduce,
                    shard_group=group,
                )
                if dp == 1 and (zero, reduce) != (0, "last"):
                    continue
                if pp == 1 and v > 1 and zero < 3:
                    continue  # the same as with one stage
                try:
                    check_layout(layout)
                except BadInputError:
                    continue
                data = 1 if dp == 1 else 3 if zero else 2
                count += 3 * data * (2 if tp > 1 else 1) * (2 if pp > 1 else 1)
    return count


@pytest.mark.parametrize(("nodes", "batch"), [(1, 4), (2, 6), (3, 12)])
def test_every_legal_layout_is_in_the_space(nodes: int, batch: int) -> None:
    problem = problem_of(nodes=nodes, batch=batch)
    assert search_layouts(problem).num_layouts == _counted_by_hand(4 * nodes, batch)


@given(candidates())
@SLOW
def test_the_closed_form_is_near_the_simulator(candidate: LayoutCandidate) -> None:
    """All overlaps on, nothing computed again, nothing gathered or reduced for every micro-batch: within 20
    %. Else within 50 %: there it only has to put a layout far from the best."""
    overlap, layout = candidate.overlap, candidate.layout
    simulated = simulate(Costs(candidate.workload(problem_of()), problem_of().cluster), spans=False).seconds
    plain = layout.zero < 3 and layout.reduce == "last" and layout.schedule_name != "zero-bubble-v"
    tight = plain and overlap.pipeline and overlap.data and layout.recompute == "none"
    assert candidate.seconds == pytest.approx(simulated, rel=0.2 if tight else 0.5)


@pytest.mark.slow
def test_the_closed_form_is_mostly_much_nearer() -> None:
    """Of layouts with all overlaps: half within 3 %, nine of ten within 15 %."""
    problem, errors = problem_of(), []
    chosen = random.Random(1)
    for grid in layout_grids(problem):
        for _ in range(3):
            free = [chosen.randrange(count) for count in grid.axes[:4]]
            layout, overlap = grid.at((*free, 0, 0, 0))
            candidate = score_layout(problem, LayoutCandidate(layout, overlap, 0.0, 0.0, 0.0))
            seconds = simulate(Costs(candidate.workload(problem), problem.cluster), spans=False).seconds
            errors.append(abs(candidate.seconds / seconds - 1))
    assert np.quantile(errors, 0.5) < 0.03
    assert np.quantile(errors, 0.9) < 0.15


@pytest.mark.slow
@given(candidates())
@SLOW
def test_a_short_simulation_predicts_many_micro_batches(candidate: LayoutCandidate) -> None:
    problem = problem_of()
    costs = Costs(candidate.workload(problem), problem.cluster)
    assume(costs.workload.num_micro_batches > 4)
    whole = simulate(costs, spans=False).seconds
    assert SimulationCache().seconds(costs) == pytest.approx(whole, rel=0.03)


def test_state_is_sharded_inside_nodes_where_the_network_is_slow_and_memory_allows() -> None:
    problem = problem_of("links.network=1GB/s", "accelerator.memory_bytes=8GB", batch=1024)
    given_ = {"pp": 1, "tp": 1, "micro_batch": 1, "virtual_stages": 8, "schedule": "interleaved"}
    problem = replace(problem, fixed=given_, shards=(Sharding(3, "last"),))
    grouped, plain = (
        search_layouts(replace(problem, searches_groups=groups), count=1).best[0] for groups in (True, False)
    )
    assert (grouped.layout.shard_group, plain.layout.shard_group) == (4, None)
    assert grouped.seconds < 0.5 * plain.seconds
    costs = Costs(grouped.workload(problem), problem.cluster)
    assert SimulationCache().seconds(costs) == pytest.approx(grouped.seconds, rel=0.1)


def test_what_is_proposed_fits_and_is_sorted() -> None:
    found = search_layouts(problem_of("accelerator.memory_bytes=2 GiB"))
    assert 0 < found.num_fitting < found.num_layouts
    assert all(candidate.fit_probability >= MIN_FIT_PROBABILITY for candidate in found.best)
    seconds = [candidate.seconds for candidate in found.best]
    assert seconds == sorted(seconds, key=lambda one: round(one, 3 - int(np.floor(np.log10(seconds[0])))))


def test_the_front_falls_in_time_as_memory_grows() -> None:
    front = search_layouts(problem_of()).front
    assert len(front) > 2
    for lean, quick in itertools.pairwise(front):
        assert lean.memory_bytes < quick.memory_bytes and lean.seconds > quick.seconds


@pytest.mark.parametrize("link", ["links.node", "links.network"])
def test_faster_links_never_make_the_best_slower(link: str) -> None:
    problems = [problem_of(f"{link}={rate}GB/s", nodes=2) for rate in (2, 16, 128)]
    seconds = [search_layouts(problem).best[0].seconds for problem in problems]
    assert seconds == sorted(seconds, reverse=True)


def test_more_memory_is_never_worse() -> None:
    sizes = [search_layouts(problem_of(f"accelerator.memory_bytes={size} GiB")) for size in (1, 1.5, 2, 80)]
    best = [found.best[0].seconds for found in sizes if found.best]
    assert len(best) > 2 and best == pytest.approx(sorted(best, reverse=True), rel=1e-3)
    assert [found.num_fitting for found in sizes] == sorted(found.num_fitting for found in sizes)


def test_the_objective_memory_chooses_the_smallest_layout() -> None:
    lean = search_layouts(problem_of(), objective="memory").best[0]
    assert lean.memory_bytes == pytest.approx(search_layouts(problem_of()).front[0].memory_bytes)


@pytest.mark.parametrize(
    ("job", "cluster", "changes"),
    [
        ("tiny", "laptop", ["train.cuda_graphs=true"]),  # which not every layout lets
        ("gpt-13b", "vegiant-32xa100-800g", []),
    ],
)
def test_every_proposed_plan_passes_the_jobs_own_check(job: str, cluster: str, changes: list[str]) -> None:
    from myriad.forecasts.planned_job import job_of, problem_of

    loaded = load_job_to_plan(job, changes)
    problem = problem_of(loaded, load_cluster(cluster))
    for candidate in search_layouts(problem).best:
        planned = job_of(loaded, candidate)
        assert planned.layout.world == problem.cluster.world
        assert planned.num_micro_batches >= 1


def test_what_is_proposed_fits_by_its_own_program() -> None:
    problem = problem_of("accelerator.memory_bytes=2 GiB")
    for plan in find_plans(problem).plans[:6]:
        workload = plan.candidate.workload(problem)
        fullest = max(float(memory.total) for memory in memory_of_ranks(workload))
        assert plan.candidate.memory_bytes == pytest.approx(fullest)
        assert fullest < 2 * 2**30


def test_what_fits_nowhere_is_refused_with_what_is_missing() -> None:
    with pytest.raises(BadInputError, match=r"nothing fits: of .* layouts the leanest \(dp .*too much"):
        find_plans(problem_of("accelerator.memory_bytes=0.2 GiB"))


def test_a_layout_whose_state_alone_is_too_large_is_refused_without_its_program() -> None:
    class NoPrograms(SimulationCache):
        def program(self, costs: Costs, num_micro_batches: int) -> NoReturn:
            raise AssertionError("a program is built")

    problem = replace(
        problem_of("accelerator.memory_bytes=0.05 GiB"), offloads=((0.0, False), (1.0, False), (1.0, True))
    )
    with pytest.raises(BadInputError, match="nothing fits"):
        find_plans(problem, simulations=NoPrograms())


def test_what_fits_only_with_state_in_host_memory_is_proposed() -> None:
    wide = replace(problem_of(nodes=1, batch=4), model=MODEL.model_copy(update={"hidden": 4096}))
    least = search_layouts(wide, count=1, objective="memory").best[0].memory_bytes
    chip = wide.cluster.accelerator.model_copy(update={"memory_bytes": int(0.9 * least)})
    small = wide.with_cluster(wide.cluster.model_copy(update={"accelerator": chip}))
    assert not search_layouts(small, count=1).best
    (plan,) = find_plans(replace(small, offloads=((0.0, False), (0.0, True)))).plans
    assert plan.candidate.layout.offload_optimizer and plan.candidate.memory_bytes < 0.9 * least


def test_a_number_of_accelerators_without_a_layout_is_refused() -> None:
    odd = load_cluster("megascale-256xa100", ["nodes=1", "accelerators_per_node=17"])
    with pytest.raises(BadInputError, match="17 accelerators have no layout: tp must be one of 1, 2, 4"):
        find_plans(problem_of(batch=1).with_cluster(odd))


def test_sizes_of_a_curve_are_whole_nodes_with_both_ends() -> None:
    assert cluster_sizes(256, 1000, 8, [768, 777]) == [256, 384, 512, 768, 1000]
    assert cluster_sizes(1, 16, 4) == [1, 2, 3, 4, 8, 12, 16]


def test_a_plot_counts_what_its_grid_holds() -> None:
    for grid in layout_grids(problem_of(nodes=1, batch=4)):
        index = tuple(count - 1 for count in grid.axes)
        layout, overlap = grid.at(index)
        assert layout.world == 4 and isinstance(overlap, OverlapConfig)


@pytest.mark.parametrize(
    ("changes", "nodes", "fixed"),
    [
        (["train.global_batch=400"], 25, {}),
        (["train.global_batch=400", "layout.tp=4"], 25, {"tp": 4}),
        (["train.global_batch=64", "layout.zero=1", "layout.pp=2"], 4, {"zero": 1, "pp": 2}),
        (["layout.recompute=full", "layout.micro_batch=2"], 16, {"recompute": "full", "micro_batch": 2}),
    ],
)
def test_only_a_layout_that_was_given_restricts_a_plan(
    changes: list[str], nodes: int, fixed: dict[str, object]
) -> None:
    """The recipe's own dp is 32: it neither refuses a batch nor narrows the search."""
    from myriad.forecasts.planned_job import problem_of as problem_of_job

    loaded = load_job_to_plan("llama3-70b", changes)
    cluster = load_cluster("h200-512xh200", [f"nodes={nodes}", f"nodes_per_switch={nodes}"])
    found = search_layouts(problem_of_job(loaded, cluster), count=20).best
    assert found
    for candidate in found:
        layout = candidate.layout.model_dump()
        assert {key: layout[key] for key in fixed} == fixed
    assert fixed or len({one.layout.dp for one in found}) > 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["layout.tp=3"], "for this model one of 1, 2, 4, 8"),
        (["layout.dp=3"], "must divide the 32 accelerators"),
        (["layout.dp=2", "layout.tp=2", "layout.pp=2"], "must be the 32 accelerators: plan on --gpus 8"),
        (["layout.pp=83"], "at most 82"),
        (["layout.dp=2", "layout.shares=[3, 1]"], "`myriad simulate` takes it"),
        (["layout.zero=3", "comm.sync_every=2"], "not possible with this layout.reduce"),
        (["resilience.nodes=5"], "must divide the 32 accelerators"),
        (["layout.schedule=1f1b", "layout.virtual_stages=2"], "only 1 with schedule 1f1b"),
    ],
)
def test_a_given_layout_that_cannot_be_is_refused_before_the_search(changes: list[str], words: str) -> None:
    from myriad.forecasts.planned_job import problem_of as problem_of_job

    with pytest.raises(BadInputError, match=re.escape(words)):
        problem_of_job(load_job_to_plan("llama3-70b", changes), load_cluster("h200-512xh200", ["nodes=4"]))


def test_what_is_suggested_where_nothing_divides_has_a_plan() -> None:
    from myriad.forecasts.planned_job import problem_of as problem_of_job

    cluster = load_cluster("h200-512xh200", ["nodes=125", "nodes_per_switch=125"])
    problem = problem_of_job(load_job_to_plan("llama3-70b"), cluster)
    with pytest.raises(BadInputError) as refused:
        find_plans(problem, count=1)
    batches = re.search(r"global batch of (\d+) or (\d+)", refused.value.allowed)
    sizes = re.search(r"on (\d+) or (\d+) accelerators", refused.value.allowed)
    assert batches and sizes
    for batch in map(int, batches.groups()):
        assert search_layouts(replace(problem, global_batch=batch), count=1).best
    for size in map(int, sizes.groups()):
        other = cluster.model_copy(update={"nodes": size // 8})
        assert search_layouts(problem.with_cluster(other), count=1).best


@pytest.mark.slow
def test_memory_of_a_huge_micro_batch_is_huge() -> None:
    sizes = [
        search_layouts(problem_of(batch=2**power), objective="memory").front[-1] for power in (19, 20, 24)
    ]
    assert sizes[0].memory_bytes < sizes[1].memory_bytes < sizes[2].memory_bytes


def test_stages_of_one_pipeline_rank_are_one_layout() -> None:
    for candidate in search_layouts(problem_of(nodes=1, batch=16)).best:
        layout = candidate.layout
        assert layout.pp > 1 or layout.virtual_stages == 1 or layout.zero == 3
        assert "pp 1 x" not in describe_layout(candidate)


def test_a_plan_has_more_ranks_than_key_value_heads() -> None:
    model = ModelConfig(heads=8, kv_heads=2, hidden=64, vocabulary=301, vocabulary_multiple=1)
    assert tensor_degrees(model) == [1, 2, 4, 8]
    assert tensor_degrees(model.model_copy(update={"heads": 24, "kv_heads": 4, "ffn_hidden": 96})) == [
        1, 2, 4, 8,
    ]  # fmt: skip


def test_a_job_in_pairs_can_be_planned_again() -> None:
    """A plan in pairs is a job, and the recipe of MegaScale-MoE is one."""
    job = load_job_to_plan("megascale-moe-352b")
    assert not job.overlap.pairs and job.layout == Layout()
    assert load_job("megascale-moe-352b").overlap.pairs
