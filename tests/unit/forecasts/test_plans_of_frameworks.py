"""If these fail, a search for another framework ends with a plan that the framework cannot run."""

import random
from typing import Any, get_args

import pytest

from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_script import launch_text
from myriad.forecasts.plan_request import PlanProblem, PlanRequest
from myriad.job import Job
from myriad.planner import LayoutProblem
from myriad.planner.frameworks import Launcher
from myriad.planner.layout_limits import LayoutLimits
from myriad.planner.search.layout_space import layout_grids
from myriad.recipes import recipe_names
from myriad.recipes.framework import load_framework

CLUSTER = "eos-3072xh100"
STARTED = (
    "megatron-core",
    "megatron-fsdp",
    "megatron-bridge",
    "torchtitan",
    "nanotron",
    "deepspeed",
    "maxtext",
)
DENSE = ("model.layers=31", "train.global_batch=192")
LONG = ("model.sequence=65536", "train.global_batch=32")


def question(framework: str, model: str, *keys: str) -> PlanProblem:
    return PlanProblem.of(PlanRequest.read(model, keys, CLUSTER, "64", None, None, framework), CLUSTER)


def some_layouts(problem: LayoutProblem, count: int) -> list[Any]:
    """Return layouts of a search, each kind of grid once at least."""
    draw = random.Random(0)
    found = []
    for grid in layout_grids(problem):
        found += [grid.at(tuple(draw.randrange(axis) for axis in grid.axes)) for _ in range(2)]
    return draw.sample(found, min(count, len(found)))


def job_with(job: Job, layout: Any, overlap: Any) -> Job:
    return job.model_copy(update={"layout": layout, "overlap": overlap})


@pytest.mark.parametrize("framework", STARTED)
@pytest.mark.parametrize(
    ("model", "keys"), [("llama3-8b", DENSE), ("llama3-8b", LONG), ("qwen3-30b-a3b", ())]
)
def test_every_layout_of_a_search_becomes_a_script(framework: str, model: str, keys: tuple[str, ...]) -> None:
    asked = question(framework, model, *keys)
    assert asked.framework is not None
    if asked.framework.launcher == "nanotron" and asked.job.model.experts is not None:
        pytest.skip("refused before the search")
    problem = asked.layouts_on(asked.cluster)
    layouts = some_layouts(problem, 150)
    assert layouts or (framework == "deepspeed" and keys == LONG)  # 64 replicas, and 32 sequences
    for layout, overlap in layouts:
        launch_text(job_with(asked.job, layout, overlap), asked.framework, asked.cluster, "# A plan\n")


@pytest.mark.parametrize(
    ("framework", "key", "says"),
    [
        ("deepspeed", "layout.tp=2", "layout.tp = 2"),
        ("deepspeed", "layout.pp=2", "layout.pp = 2"),
        ("nanotron", "layout.cp=2", "layout.cp = 2"),
        ("nanotron", "layout.shard_group=8", "layout.shard_group = 8"),
        ("maxtext", "layout.recompute=selective", "one of none, full"),
    ],
)
def test_keys_of_the_job_that_a_framework_does_not_have_are_refused_before_the_search(
    framework: str, key: str, says: str
) -> None:
    asked = question(framework, "llama3-8b", key)
    with pytest.raises(BadInputError, match=says):
        asked.layouts_on(asked.cluster)


def test_every_framework_that_is_started_is_tried() -> None:
    started = {load_framework(name).launcher for name in recipe_names("frameworks")} - {None}
    assert {load_framework(name).launcher for name in STARTED} == started == set(get_args(Launcher))


def test_what_limits_allow() -> None:
    filled = LayoutLimits(stages="filled")
    assert [v for v in range(1, 9) if filled.allows_stages(32, 4, v)] == [1, 2, 4, 8]
    assert filled.allows_stages(31, 4, 2)
    assert [v for v in (1, 2) if LayoutLimits(stages="one").allows_stages(32, 4, v)] == [1]
    equal = LayoutLimits(rounds="equal")
    assert equal.round_sizes((1, 2, 4), 36, 8) == (1, 2, 4)  # 36, 18 and 9 micro-batches
    assert equal.round_sizes((1, 2), 36, 4) == (1,)  # 36 in nine rounds, but not 18 in four
    assert [u for u in (1, 2, 4) if LayoutLimits(context="either").allows_rows(4, u)] == [1, 4]
    assert [tp for tp in (1, 4, 8) if LayoutLimits(tensor="kv-heads").allows_tensor(tp, 4)] == [1, 4]
    whole = LayoutLimits(experts="whole")
    assert (
        whole.allows_experts(4, 8, 1) and not whole.allows_experts(4, 8, 4) and whole.allows_experts(4, 1, 4)
    )
