"""If these fail, a slow rank or link of a mixture of experts costs a predicted step what it does not cost."""

from typing import Any

import pytest

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.iteration_summary import summarize_iteration
from myriad.planner.simulation.simulated_events import NetworkEvents, read_timers
from myriad.planner.simulation.simulator import Prediction, predicted_spans, simulate
from myriad.planner.simulation.spans_in_layers import exposed_in_layers
from myriad.planner.workload import Workload
from myriad.program.actions import COMPUTE, Kind
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(
    layers=6, hidden=1024, heads=8, sequence=1024, vocabulary=8192, activation="swiglu", experts=16,
    experts_per_token=2, expert_hidden=1024, dense_layers=1,
)  # fmt: skip
CLUSTER = load_cluster("eos-3072xh100", ["nodes=2", "slow_nodes.ratio=0"])


ONE_CHUNK = OverlapConfig(chunks=1, data=False, optimizer=False)


def _costs(overlap: OverlapConfig | None = None, **keys: Any) -> Costs:
    return Costs(Workload(MODEL, Layout(**keys), 64, overlap=overlap or OverlapConfig()), CLUSTER)


def _seconds(prediction: Prediction, replica: int, kind: Kind) -> list[float]:
    """Seconds of the actions of a kind on a replica, waiting included."""
    spans = (span for span in prediction.spans if span.replica == replica and span.action.kind is kind)
    return [span.duration for span in spans]


LAYOUTS = [
    {"dp": 16, "ep": 4},
    {"dp": 8, "ep": 4, "pp": 2},
    {"dp": 4, "tp": 2, "pp": 2, "ep": 8, "etp": 1},
    {"dp": 4, "cp": 2, "pp": 2, "ep": 4},
    {"dp": 4, "tp": 2, "pp": 2, "ep": 2, "etp": 1},
    {"dp": 8, "ep": 4, "pp": 2, "virtual_stages": 2, "schedule": "dualpipe-v"},
]


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_replicas_that_are_alike_wait_for_none(keys: dict[str, Any]) -> None:
    costs = _costs(**keys)
    plain, every = simulate(costs), simulate(costs, every_replica=True)
    assert every.seconds == pytest.approx(plain.seconds, rel=1e-9)
    assert not any(span.waited > 1e-9 for span in every.spans if span.action.kind in COMPUTE)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_a_slow_rank_costs_as_much_where_all_replicas_are_simulated(keys: dict[str, Any]) -> None:
    costs, slower = _costs(**keys), {(1, 0): 1.7}
    few, every = simulate(costs, slower=slower), simulate(costs, slower=slower, every_replica=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert len(few.spans) < len(every.spans) or costs.workload.layout.dp == 4


def test_all_that_share_experts_with_a_slow_rank_go_at_its_rate_in_every_block() -> None:
    """Compared with a walk over the blocks, after each of which all four replicas wait for the last."""
    costs = _costs(ONE_CHUNK, dp=16, ep=4)
    found = simulate(costs, slower={(1, 0): 2.0})
    (stage,) = costs.stages
    exchanged = float(stage.times.forward.experts) / 5  # a block of six has no experts
    each = [float(costs.layer_times(layer).forward.total) for layer in range(MODEL.layers + 2)]
    clocks, factors = [0.0] * 4, (1.0, 2.0, 1.0, 1.0)
    for layer, seconds in enumerate(each):
        travels = exchanged if 2 <= layer <= MODEL.layers else 0.0
        clocks = [now + (seconds - travels) * slow for now, slow in zip(clocks, factors, strict=True)]
        if travels:
            clocks = [max(clocks) + travels] * 4
    for replica, seconds in enumerate(clocks):
        # later forwards begin when the slow rank ends the one before, and so does the first of the next step
        assert _seconds(found, replica, Kind.FORWARD)[0] == pytest.approx(seconds, rel=1e-6)
    assert _seconds(found, -1, Kind.FORWARD)[0] == pytest.approx(stage.forward, rel=1e-6)
    assert min(clocks) > 1.5 * stage.forward


def test_what_is_waited_for_is_exposed_communication_of_experts() -> None:
    costs = _costs(dp=8, ep=4, pp=2)
    found = simulate(costs, slower={(0, 1): 1.5})
    ranks = summarize_iteration(costs, found, [None] * 2, [1.0] * 2).ranks  # type: ignore[list-item]
    seconds = {(one.replica, one.rank): one.exposed_seconds["experts"] for one in ranks}
    assert seconds[1, 1] > 1.2 * seconds[0, 1] == pytest.approx(1.2 * seconds[-1, 1], rel=1e-6)
    spans = predicted_spans(found, costs)[3]  # replica 1, pipeline rank 1
    waits = sum(span.duration_seconds for span in spans if span.name == "expert_comm")
    assert waits == pytest.approx(seconds[1, 1], rel=0.01)


def test_the_weight_half_of_an_embedding_has_no_span_inside() -> None:
    """Its chunk computes nothing there."""
    layout = Layout(dp=8, ep=4, pp=2, virtual_stages=2, schedule="dualpipe-v")
    deeper = MODEL.model_copy(update={"layers": 14})
    costs = Costs(Workload(deeper, layout, 64, overlap=OverlapConfig()), CLUSTER)
    assert costs.num_chunks > 1
    spans = predicted_spans(simulate(costs), costs)[0]
    names = [span.name for span in spans if span.stage == 0]
    assert names.count("backward_weight") > 0
    exchanged = sum(span.duration_seconds for span in spans if span.name == "expert_comm")
    assert 0 < exchanged < sum(span.duration_seconds for span in spans if span.name in COMPUTE)


def test_jitter_costs_more_where_ranks_share_experts() -> None:
    alone, shared = _costs(dp=16), _costs(dp=16, ep=16)
    lost = [simulate(one, jitter=0.1, seed=3).seconds / simulate(one).seconds for one in (alone, shared)]
    assert lost[1] > lost[0] > 1


def _events(costs: Costs, **given: list[str]) -> NetworkEvents:
    return NetworkEvents(costs.workload.layout, CLUSTER, timers=read_timers("20x7"), **given)


def test_congestion_slows_the_tokens_that_cross_it() -> None:
    costs = _costs(ONE_CHUNK, dp=16, ep=16)
    slow = costs.with_slower_exchanges(2.0)
    found = simulate(costs, network=_events(costs, congested=["node=1:0.5"]))
    for replica in range(16):
        assert _seconds(found, replica, Kind.FORWARD) == pytest.approx([slow.stages[0].forward] * 4)
    inside = _costs(ONE_CHUNK, dp=16, ep=8)  # each node shares experts by itself
    same = simulate(inside, network=_events(inside, congested=["node=1:0.5"]))
    assert _seconds(same, 9, Kind.FORWARD) == pytest.approx([inside.stages[0].forward] * 4)


def test_a_link_that_is_down_stops_all_that_share_experts() -> None:
    costs = _costs(dp=16, ep=16)
    events = _events(costs, flaps=["node=1:2s@0.001s"])
    found = simulate(costs, network=events)
    plain = simulate(costs).seconds
    assert found.seconds == pytest.approx(plain + events.wait_seconds(2.0), rel=0.1)
    assert max(_seconds(found, 0, Kind.FORWARD)) > 1.0


def test_a_slow_rank_does_not_lengthen_the_exchanges() -> None:
    costs = _costs(ONE_CHUNK, dp=4, ep=4)
    (stage,) = costs.stages
    found = simulate(costs, slower={(replica, 0): 3.0 for replica in range(4)})
    action = next(span.action for span in found.spans if span.action.kind is Kind.FORWARD)
    exposed = exposed_in_layers(stage, action, "none")["experts"]
    expected = 3 * (stage.forward - exposed) + exposed
    assert _seconds(found, 2, Kind.FORWARD)[0] == pytest.approx(expected)
