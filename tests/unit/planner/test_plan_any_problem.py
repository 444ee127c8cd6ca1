"""Whatever is asked of the planner: a plan that trains, or one line that says what would have one."""

import math
import os
import re
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.forecasts.planned_job import job_of, problem_of
from myriad.job import Job, dump_toml, load_job, load_job_to_plan
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.search.layout_problem import LayoutProblem
from myriad.planner.search.layout_search import search_layouts
from myriad.planner.search.layout_space import layout_grids
from myriad.planner.search.planning import find_plans
from myriad.planner.simulation.steady_state import num_simulated_forwards
from myriad.program.build import build_program
from myriad.program.checker import check
from myriad.recipes.cluster import load_cluster

ANY = settings(
    derandomize=True,
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
BAD = st.sampled_from(
    [
        "0",
        "-1",
        "nan",
        "-nan",
        "inf",
        "1e400",
        "1e308",
        "9" * 400,
        "true",
        "''",
        "x",
        "[]",
        "{}",
        "[1, nan]",
        "1.5",
    ]
)
KEYS = st.sampled_from(
    [
        "nodes",
        "accelerators_per_node",
        "nics_per_node",
        "nodes_per_switch",
        "shared_cores",
        "core_speeds",
        "dollars_per_hour",
        "accelerator.memory_bytes",
        "accelerator.peak_flops_per_second",
        "accelerator.launch_seconds",
        "accelerator.num_units",
        "accelerator.tile",
        "accelerator.flash_half_length",
        "links.node.bytes_per_second",
        "links.network.latency_seconds",
        "links.network.bytes_per_second",
        "links.network",
        "links.ib",
        "slow_nodes.ratio",
        "unequal",
        "fabric.ports_per_switch",
        "nothing",
    ]
)
NUMBERS = st.sampled_from(
    [
        "accelerator.peak_flops_per_second",
        "accelerator.memory_bytes_per_second",
        "accelerator.launch_seconds",
        "accelerator.saturation",
        "accelerator.flash_half_length",
        "links.node.bytes_per_second",
        "links.node.latency_seconds",
        "links.network.bytes_per_second",
        "links.network.latency_seconds",
        "links.network.skew_seconds",
        "dollars_per_hour",
        "storage_bytes_per_second",
    ]
)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Job, Cluster]:
    """A small model and batch on a few odd nodes."""
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    changes = [
        f"model.layers={draw(st.integers(1, 6))}",
        f"model.heads={heads}",
        f"model.hidden={heads * 16}",
        f"train.global_batch={draw(st.integers(1, 24))}",
    ]
    given = {"tp": [1, 2, 3], "pp": [1, 2, 5], "dp": [1, 3], "zero": [0, 2, 3], "micro_batch": [1, 3]}
    for key in draw(st.lists(st.sampled_from(sorted(given)), max_size=2, unique=True)):
        changes.append(f"layout.{key}={draw(st.sampled_from(given[key]))}")
    nodes = [f"nodes={draw(st.integers(1, 5))}", f"accelerators_per_node={draw(st.integers(1, 6))}"]
    memory = draw(st.sampled_from(["80 GiB", "80 GiB", "900 MiB"]))
    cluster = load_cluster("megascale-256xa100", [*nodes, f"accelerator.memory_bytes={memory}"])
    return load_job_to_plan("tiny", changes), cluster


@pytest.mark.slow
@ANY
@given(questions())
def test_a_question_has_a_plan_that_is_legal_or_an_answer_that_helps(
    tmp_path: Path, question: tuple[Job, Cluster]
) -> None:
    job, cluster = question
    try:
        problem = problem_of(job, cluster)
    except BadInputError as error:
        assert error.key.startswith("layout.") and error.allowed
        return
    try:
        best = find_plans(problem, count=20).plans[0]
    except BadInputError as error:
        for other in suggested(problem, error.allowed):
            assert find_plans(other, count=20).plans
        return
    path = tmp_path / "plan.toml"
    path.write_text(dump_toml(job_of(job, best.candidate)))
    planned = load_job(str(path))
    assert planned.layout.world == cluster.world
    for key in job.layout.model_fields_set:
        assert getattr(planned.layout, key) == getattr(job.layout, key)
    if planned.layout.world <= 8:
        tied, count = planned.model.tied, planned.num_micro_batches
        check(build_program(planned.layout, planned.overlap, count, tied=tied, training=True))


def suggested(problem: LayoutProblem, words: str) -> list[LayoutProblem]:
    """The questions that an error proposes."""
    found = []
    for batch in numbers(words, r"global batch of (\d+)(?: or (\d+))?"):
        found.append(replace(problem, global_batch=batch))
    for size in numbers(words, r"on (\d+)(?: or (\d+))? accelerators"):
        found.append(problem.with_cluster(of_size(problem.cluster, size)))
    for size in numbers(words, r"with (\d+)() of them"):
        found.append(problem.with_cluster(of_size(problem.cluster, size)))
    return found


def numbers(words: str, pattern: str) -> list[int]:
    match = re.search(pattern, words)
    return [] if match is None else [int(number) for number in match.groups() if number]


def of_size(cluster: Cluster, size: int) -> Cluster:
    each = min(size, cluster.accelerators_per_node)
    assert size % each == 0, "whole nodes, or a part of one"
    return cluster.model_copy(update={"nodes": size // each, "accelerators_per_node": each})


@settings(ANY, max_examples=100)
@given(KEYS, BAD)
def test_a_bad_value_of_a_cluster_is_refused_or_planned_with(key: str, value: str) -> None:
    try:
        cluster = load_cluster("h200-512xh200", ["nodes=2", f"{key}={value}"])
    except BadInputError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    assert 1 <= cluster.world <= 2**20


@pytest.mark.parametrize(
    "text",
    [
        "nodes = ",
        "nodes = 2\nnodes = 3",
        "\x00",
        "[links",
        "x = 'é",
        f"x = {'[' * 3000}{']' * 3000}",
        f"nodes = {'9' * 5000}",
    ],
    ids=["cut off", "twice", "zero byte", "open section", "open text", "deep", "long number"],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(BadInputError, match="--cluster"):
        load_cluster(str(path))


@pytest.mark.parametrize("name", ["folder", "pipe", "loop", "nowhere"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(BadInputError, match="--cluster"):
        load_cluster(str(tmp_path / f"{name}.toml"))


def test_a_file_may_have_a_byte_order_mark_and_rates_with_units(tmp_path: Path) -> None:
    plain = (resources.files("myriad") / "recipes/clusters/h200-512xh200.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + plain.replace("450e9", '"450 GB/s"').encode())
    assert load_cluster(str(path)) == load_cluster("h200-512xh200")
    path.write_text(plain.replace("= 50e9 # per", '= "400 Gbit/s" # per'))
    assert load_cluster(str(path)) == load_cluster("h200-512xh200")
    path.write_text(plain.replace("450e9", '"450 parsecs"'))
    with pytest.raises(BadInputError, match="is not a rate"):
        load_cluster(str(path))


@settings(ANY, max_examples=12)
@given(st.dictionaries(NUMBERS, st.sampled_from([1.0, 1e-6, 7.3, 1e3, 1e9, 1e12, 1e18]), max_size=4))
def test_any_valid_cluster_gives_finite_plans(changes: dict[str, float]) -> None:
    """Warnings of numpy are errors here, so that no figure comes from an overflow."""
    few = ["nodes=2", "accelerators_per_node=2", *(f"{key}={value!r}" for key, value in changes.items())]
    try:
        problem = problem_of(load_job_to_plan("tiny", ["layout.tp=1"]), load_cluster("h200-512xh200", few))
        plans = find_plans(problem, count=3).plans
    except BadInputError as error:
        assert "\n" not in str(error) and "inf" not in error.allowed and "nan" not in error.allowed
        return
    for plan in plans:
        assert 0 < plan.seconds < math.inf and 0 <= plan.mfu <= 1
        assert 0 < plan.candidate.memory_bytes < math.inf


@pytest.mark.parametrize("job", ["tiny"])
def test_ten_thousand_layers_are_searched_in_seconds(job: str) -> None:
    """What is simulated afterwards is bounded by the number of forwards in its programs."""
    problem = problem_of(load_job_to_plan(job, ["model.layers=10000"]), of_64())
    began = time.process_time()
    found = search_layouts(problem)
    assert time.process_time() - began < 30
    forwards = 0
    for candidate in found.best:
        costs = Costs(candidate.workload(problem), problem.cluster)
        forwards += num_simulated_forwards(
            candidate.layout, costs.num_chunks, costs.workload.num_micro_batches
        )
    assert found.best and forwards <= 1_000_000


def test_stages_that_are_searched_are_all_for_ordinary_models_and_few_for_deep_ones() -> None:
    stages = {}
    for layers in (126, 10000):
        problem = problem_of(load_job_to_plan("tiny", [f"model.layers={layers}"]), of_64())
        grid = next(grid for grid in layout_grids(problem) if grid.pp == 4)
        stages[layers] = {v for _, v in grid.schedules}
    assert stages[126] == set(range(1, 33))
    assert set(range(1, 129)) <= stages[10000] and len(stages[10000]) < 160
    assert 2500 in stages[10000] and 1250 in stages[10000]


def of_64() -> Cluster:
    return load_cluster("h200-512xh200", ["nodes=8"])
