"""If these break: replicas with unequal shares wait for each other for ever, or what is predicted of them is
not theirs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.rehearsal.shared_core_simulator import predict_iteration
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import Workload
from myriad.program.actions import COMPUTE, Kind
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(layers=8, hidden=1024, heads=8, sequence=512, vocabulary=8192)
SCHEDULES = [("gpipe", 2), ("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 3), ("zero-bubble", 1)]
SCHEDULES += [("eager-zero-bubble", 1), ("zero-bubble-v", 2), ("dualpipe-v", 2)]


def costs_of(shares: tuple[int, ...], *changes: str, **keys: object) -> Costs:
    overlap = OverlapConfig(**{name: keys.pop(name) for name in ("data", "pipeline") if name in keys})
    layout = Layout(dp=len(shares), shares=shares, **keys)
    return Costs(
        Workload(MODEL, layout, sum(shares), overlap), load_cluster("megascale-256xa100", list(changes))
    )


@st.composite
def unequal(draw: st.DrawFn) -> Costs:
    name, virtual = draw(st.sampled_from(SCHEDULES))
    zero = draw(st.integers(0, 3))
    return costs_of(
        tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))),
        *draw(st.sampled_from([(), ("shared_cores=2",)])),
        pp=draw(st.integers(1, 3)),
        virtual_stages=virtual,
        schedule=name,
        zero=zero,
        reduce=draw(st.sampled_from(["last", "each"])) if zero >= 2 else "last",
        data=draw(st.booleans()),
        pipeline=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(unequal())
def test_replicas_with_any_shares_come_to_their_end_together(costs: Costs) -> None:
    """With transfers that wait for both sides and sums that wait for all replicas."""
    found = predict_iteration(costs) if costs.cluster.shared_cores else simulate(costs, every_replica=True)
    shares, stages = (
        costs.workload.micro_batches_per_replica,
        costs.workload.layout.num_stages * costs.num_chunks,
    )
    for replica, share in enumerate(shares):
        done = {
            (span.action.kind, span.action.stage, span.action.micro_batch)
            for span in found.spans
            if span.replica == replica and span.action.kind in COMPUTE
        }
        num_split = sum(kind is Kind.BACKWARD_INPUT for kind, *_ in done)
        assert len(done) == share * stages * 2 + num_split


def test_one_of_each_share_stands_for_all() -> None:
    costs = costs_of((5, 3, 5, 3, 3), pp=2)
    few, every = simulate(costs), simulate(costs, every_replica=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert {span.replica for span in few.spans} == {0, 1}
    assert SimulationCache().seconds(costs) == pytest.approx(few.seconds, rel=1e-9)


def test_equal_shares_are_the_usual_ones() -> None:
    given_ = costs_of((4, 4), pp=2, zero=2)
    layout = given_.workload.layout.model_copy(update={"shares": None})
    usual = Costs(Workload(MODEL, layout, 8), given_.cluster)
    assert simulate(given_).seconds == simulate(usual).seconds


def test_less_work_for_a_slow_replica_shortens_the_iteration() -> None:
    slower = {(1, 0): 1.5, (1, 1): 1.5}
    equal, moved = (
        simulate(costs_of(shares, pp=2), slower=slower).seconds for shares in ((25, 25), (30, 20))
    )
    assert moved < equal * 0.85
