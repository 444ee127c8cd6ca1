"""If these fail, a plan with captured stages (`train.cuda_graphs`) does not fit where it was said to fit."""

from dataclasses import replace
from typing import Any

import pytest

from myriad.comm.layout import Layout
from myriad.forecasts.planned_job import job_of, problem_of
from myriad.job import load_job, work_of
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.search.layout_problem import LayoutCandidate
from myriad.planner.workload import Workload
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig
from myriad.program.in_flight import InFlight
from myriad.recipes.cluster import load_cluster


def work(layout: dict[str, Any], *, captures: bool) -> Workload:
    job = load_job("gpt-13b", ["train.global_batch=32", "overlap.data=false"])
    found = replace(work_of(job, 2), layout=Layout(micro_batch=1, **layout))
    return replace(found, profile=replace(found.profile, cuda_graphs=captures))


def total(layout: dict[str, Any], *, captures: bool) -> list[float]:
    return [float(memory.total) for memory in memory_of_ranks(work(layout, captures=captures))]


@pytest.mark.parametrize(
    ("schedule", "slots"),
    [
        ("1f1b", [4, 3, 2, 1]),
        ("gpipe", [8, 8, 8, 8]),
    ],
)
def test_a_stage_has_a_slot_for_each_micro_batch_in_flight(schedule: str, slots: list[int]) -> None:
    layout = Layout(pp=4, schedule=schedule)  # type: ignore[arg-type]
    program = build_program(layout, OverlapConfig(), 8, tied=False, training=True)
    found = [InFlight.of(actions) for actions in program.ranks]
    assert [one.slots[stage] for stage, one in enumerate(found)] == slots
    assert [one.in_turn for one in found] == [count == 1 for count in slots]


def test_captures_in_turn_reserve_what_one_micro_batch_needs_and_what_validation_needs() -> None:
    (one,), (captured,) = total({}, captures=False), total({}, captures=True)
    assert one < captured < 1.1 * one


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe"])
def test_captured_pipelines_need_more_on_each_rank_and_most_where_most_is_in_flight(schedule: str) -> None:
    layout = {"pp": 4, "dp": 2, "schedule": schedule}
    plain, captured = total(layout, captures=False), total(layout, captures=True)
    more = [after - before for before, after in zip(plain, captured, strict=True)]
    assert all(extra > 0 for extra in more)
    if schedule != "gpipe":
        assert more[0] > more[-2]


@pytest.mark.parametrize(
    ("tp", "tensor", "captures"), [(1, "slices", True), (2, "slices", False), (2, "turns", True)]
)
def test_a_planned_layout_has_graphs_in_its_prediction_if_the_job_that_is_written_has_them(
    tp: int, tensor: Any, captures: bool
) -> None:
    """Else a plan leaves out memory that the run needs, or promises launches that it does not save."""
    keys = ["train.cuda_graphs=true", f"overlap.tensor={tensor}", "layout.tp=1"]
    job = load_job("gpt-13b", ["train.global_batch=32", *keys])
    problem = problem_of(job, load_cluster("one-node-8xh100"))
    candidate = LayoutCandidate(Layout(tp=tp, dp=8 // tp, micro_batch=1), job.overlap, 0.0, 0.0, 0.0)
    assert candidate.workload(problem).profile.cuda_graphs == captures
    assert job_of(job, candidate).train.cuda_graphs == captures
