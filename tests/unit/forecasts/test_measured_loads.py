"""If these fail, a plan counts other loads of experts than those that a run measured."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myriad.errors import BadInputError
from myriad.forecasts.iteration_forecast import IterationRequest
from myriad.forecasts.measured_loads import MeasuredLoads
from myriad.forecasts.plan_answer import plan_and_explain
from myriad.forecasts.plan_request import PlanProblem, PlanRequest
from myriad.job import Job, load_job
from myriad.planner.search.layout_space import layout_grids
from myriad.recipes.cluster import load_cluster

MODEL = ["model.experts=4", "model.experts_per_token=1", "model.router_normalized=false"]


def _job(*keys: str) -> Job:
    return load_job("tiny-moe", [*MODEL, "layout.dp=4", "layout.ep=4", *keys])


def _run(folder: Path, *loads: Any) -> str:
    folder.mkdir()
    (folder / "job.toml").write_text("")
    lines = [{"step": step, "time": 1e9, "loss": 1.0, "expert_loads": one} for step, one in enumerate(loads)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


LOADS = (
    {"block 0": [2.0, 0.4, 0.8, 0.8], "block 1": [1.0, 1.0, 1.0, 1.0]},
    None,  # a step between two of telemetry.expert_loads_every
    {"block 0": [0.0, 0.0, 4.0, 0.0], "block 1": [1.6, 0.8, 0.6, 1.0]},
)


def test_the_load_of_a_layout_is_that_of_its_busiest_rank(tmp_path: Path) -> None:
    loads = MeasuredLoads.read(_run(tmp_path / "run", *LOADS), _job())
    assert loads.of_steps(1).tolist() == [1.0, 1.0]
    assert loads.of_steps(2) == pytest.approx([(1.2 + 1.0) / 2, (2.0 + 1.2) / 2])
    assert loads.of_steps(4) == pytest.approx([(2.0 + 1.0) / 2, (4.0 + 1.6) / 2])
    assert loads.by_ranks == pytest.approx({1: 1.0, 2: 1.35, 4: 2.15})
    assert loads.high(4) == pytest.approx(1.5 + 0.95 * 1.3)
    assert loads.of_layout(_job().layout).expert_load == pytest.approx(2.15)
    assert "1.35 times the mean tokens, 95% of 2 steps at most 1.58" in loads.note(2, 1.0, 1.0)
    capped = MeasuredLoads.read(str(tmp_path / "run"), _job("model.expert_capacity=1.25"))
    assert capped.mean(4) <= 1.25 + 1e-9


@pytest.mark.parametrize(
    "loads",
    [
        (),
        (None,),
        ({"block 0": [1.0, 1.0]},),
        ({"block 0": []},),
        ({"block 0": [1.0, 1.0, None, 1.0]},),
        ({"block 0": [1.0, -1.0, 2.0, 2.0]},),
        ({"block 0": [1.0] * 4}, {"block 1": [1.0] * 4}),
        ({"block 0": "many"},),
        ("none",),
    ],
    ids=str,
)
def test_other_files_are_refused_in_a_line(tmp_path: Path, loads: tuple[Any, ...]) -> None:
    with pytest.raises(BadInputError, match="--expert-load-from") as found:
        MeasuredLoads.read(_run(tmp_path / "run", *loads), _job())
    assert "\n" not in str(found.value)


def test_what_cannot_have_loads_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", *LOADS)
    for job, overrides in ((load_job("tiny"), []), (_job(), ["layout.expert_load=1.2"])):
        with pytest.raises(BadInputError, match="--expert-load-from"):
            MeasuredLoads.read(run, job, overrides)
    with pytest.raises(BadInputError, match=r"layout\.ep above 1"):
        MeasuredLoads.read(run, _job()).of_job(_job("layout.ep=1"))
    with pytest.raises(BadInputError, match="run folder"):
        MeasuredLoads.read(str(tmp_path / "none"), _job())


def test_each_layout_of_a_plan_counts_the_load_of_its_own_ranks(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", *LOADS)
    keys = [*MODEL, "layout.tp=1", "layout.pp=1"]
    request = PlanRequest.read("tiny-moe", keys, "one-node-8xh100", None, None, None, expert_load_from=run)
    question = PlanProblem.of(request, request.cluster)
    problem = question.layouts_on(question.cluster)
    found = {grid.ep: grid.at((0,) * 7)[0].expert_load for grid in layout_grids(problem)}
    assert found == pytest.approx({1: 1.0, 2: 1.35, 4: 2.15})
    only = PlanRequest.read(
        "tiny-moe", [*keys, "layout.ep=4"], "one-node-8xh100", None, None, None, expert_load_from=run
    )
    plan = plan_and_explain(
        PlanProblem.of(only, only.cluster), "time", top=1, on_switches=False, progress=lambda *_: None
    )
    assert plan.best.candidate.layout.expert_load == pytest.approx(2.15)
    assert plan.at_high_load is not None and plan.at_high_load.seconds > plan.best.seconds
    assert plan.as_json()["expert_load"]["mean"] == pytest.approx(2.15)
    assert plan.load_note is not None and "of 4 ranks" in plan.load_note


def test_a_simulated_iteration_counts_the_mean_and_shows_the_high_load(tmp_path: Path) -> None:
    loads = MeasuredLoads.read(_run(tmp_path / "run", *LOADS), _job())
    cluster = load_cluster("one-node-8xh100")
    request = IterationRequest(loads.of_job(_job()), cluster)
    given = IterationRequest(_job("layout.expert_load=2.15"), cluster).forecast()
    found, high = request.forecast(), request.with_expert_load(loads.high(4)).forecast()
    assert found.summary.seconds == pytest.approx(given.summary.seconds)
    assert high.summary.seconds > found.summary.seconds
    assert np.isclose(high.job.layout.expert_load, loads.high(4))
