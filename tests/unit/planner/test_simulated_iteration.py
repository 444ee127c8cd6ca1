"""If these break: a predicted iteration is not what its replicas, its stragglers and its spans say."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cost.layer_costs import context_block
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.simulation.iteration_summary import EXPOSED_KINDS, summarize_iteration
from myriad.planner.simulation.simulated_events import parse_stragglers
from myriad.planner.simulation.simulator import Prediction, predicted_spans, simulate
from myriad.planner.workload import FrameworkProfile, Recompute, Workload
from myriad.program.actions import Kind
from myriad.recipes.cluster import load_cluster
from myriad.telemetry.span_io.span_files import write_spans

MODEL = ModelConfig(layers=8, hidden=1024, heads=8, sequence=512, vocabulary=8192)


@cache
def costs_of(dp: int, tp: int, pp: int, virtual_stages: int, zero: int, micro_batches: int) -> Costs:
    layout = Layout(dp=dp, tp=tp, pp=pp, virtual_stages=virtual_stages, zero=zero)
    return Costs(Workload(MODEL, layout, dp * micro_batches), load_cluster("megascale-256xa100"))


costs = st.builds(
    costs_of,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([1, 4, 6]),
)
factors = st.floats(1.0, 3.0)


@settings(max_examples=30, deadline=None)
@given(costs)
def test_replicas_that_are_alike_take_as_long_as_one(costs: Costs) -> None:
    one, all_of_them = simulate(costs), simulate(costs, every_replica=True)
    assert all_of_them.seconds == pytest.approx(one.seconds, rel=1e-9)
    assert len(all_of_them.spans) == costs.workload.layout.dp * len(one.spans)


@pytest.mark.parametrize(("cluster", "helps"), [("one-node-8xh100", True), ("laptop", False)])
def test_graphs_save_the_starting_of_operators_on_a_gpu_alone(cluster: str, helps: bool) -> None:
    where = load_cluster(cluster)
    workload = Workload(MODEL, Layout(), 2)
    one, captured = (
        simulate(
            Costs(replace(workload, profile=FrameworkProfile(cuda_graphs=graphs)), where), spans=False
        ).seconds
        for graphs in (False, True)
    )
    chip = where.accelerator
    most = 2 * 50 * (MODEL.layers + 2) * (chip.launch_seconds - chip.captured_launch_seconds)
    assert (0 < one - captured < most) if helps else captured == one


@settings(max_examples=30, deadline=None)
@given(costs, factors, st.data())
def test_a_straggler_slows_by_its_factor_at_most(costs: Costs, factor: float, data: st.DataObject) -> None:
    layout = costs.workload.layout
    lane = (data.draw(st.integers(0, layout.dp - 1)), data.draw(st.integers(0, layout.pp - 1)))
    alone = simulate(costs, spans=False).seconds
    slowed = simulate(costs, slower={lane: factor}, spans=False).seconds
    assert alone * (1 - 1e-6) <= slowed <= alone * factor * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(costs, factors, st.sampled_from([0.0, 0.05]))
def test_a_rank_does_one_thing_at_a_time_until_the_iteration_ends(
    costs: Costs, factor: float, jitter: float
) -> None:
    prediction = simulate(costs, slower={(0, 0): factor}, jitter=jitter)
    ranks = predicted_spans(prediction, costs)
    ends = []
    for everything in ranks.values():
        spans = [span for span in everything if span.name in set(Kind)]
        assert all(a.start_seconds + a.duration_seconds <= b.start_seconds + 1e-9 for a, b in pairwise(spans))
        ends.append(spans[-1].start_seconds + spans[-1].duration_seconds)
    assert max(ends) == pytest.approx(prediction.seconds)


def test_the_same_seed_gives_the_same_spans() -> None:
    costs = costs_of(2, 1, 4, 2, 2, 6)

    def run(seed: int) -> Prediction:
        return simulate(costs, jitter=0.05, seed=seed)

    assert run(1).spans == run(1).spans
    assert run(1).spans != run(2).spans
    assert run(1).seconds > simulate(costs).seconds


def test_an_outlook_adds_up() -> None:
    costs = costs_of(3, 2, 4, 2, 2, 6)
    prediction = simulate(costs, slower={(1, 2): 1.5})
    memory = memory_of_ranks(costs.workload, prediction.program)
    found = summarize_iteration(costs, prediction, memory, [1.0] * 4)
    assert sum(one.num_replicas for one in found.ranks) == 3 * 4
    for one in found.ranks:
        parts = one.computing_seconds + one.optimizer_seconds + sum(one.exposed_seconds.values())
        assert parts == pytest.approx(found.seconds, rel=0.02)
    flops = found.mfu * found.seconds * found.world * found.peak_flops_per_second
    assert flops == pytest.approx(costs.workload.model_flops)
    slow = next(one for one in found.ranks if (one.replica, one.rank) == (1, 2))
    assert slow.computing_seconds == max(one.computing_seconds for one in found.ranks)
    assert set(slow.exposed_seconds) == set(EXPOSED_KINDS)


def test_nodes_are_filled_in_the_order_of_ranks() -> None:
    layout = Layout(dp=2, tp=2, pp=4)
    assert parse_stragglers(["rank=5:1.2x"], layout, 8) == {(0, 2): 1.2}
    assert parse_stragglers(["node=1:2"], layout, 8) == {(1, rank): 2.0 for rank in range(4)}
    assert parse_stragglers(["node=1:2x", "rank=15:3x"], layout, 4) == {(0, 2): 2.0, (0, 3): 2.0, (1, 3): 3.0}
    assert parse_stragglers(["node=1:1.5x"], layout, 12) == {(1, 2): 1.5, (1, 3): 1.5}
    assert parse_stragglers(["node=7:2x"], layout, 8, (7, 0)) == {(0, rank): 2.0 for rank in range(4)}
    with pytest.raises(BadInputError, match="nodes, 0, 7"):
        parse_stragglers(["node=1:2x"], layout, 8, (7, 0))


@pytest.mark.parametrize(
    "given_", ["node=2:1.1x", "rank=16:2", "node=1:0x", "node=1", "gpu=1:2x", "node=-1:2x"]
)
def test_a_straggler_that_cannot_be_is_refused(given_: str) -> None:
    with pytest.raises(BadInputError, match="--straggler"):
        parse_stragglers([given_], Layout(dp=2, tp=2, pp=4), 8)


def test_spans_are_written_as_a_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    costs = costs_of(2, 2, 2, 1, 1, 4)
    ranks = predicted_spans(simulate(costs), costs)
    write_spans(tmp_path / "step-1.parquet", ranks, step=1)
    rows = parquet.read_table(tmp_path / "step-1.parquet").to_pylist()
    assert len(rows) == sum(map(len, ranks.values()))
    assert {row["rank"] for row in rows} == {0, 2}
    assert {row["step"] for row in rows} == {1}
    found = sorted((row["name"], row["start_seconds"]) for row in rows if row["rank"] == 0)
    expected = sorted((span.name, span.start_seconds) for span in ranks[0])
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [at for _, at in found] == pytest.approx([at for _, at in expected], abs=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("window", "steps"), [(None, range(8)), (200, [0, 1, 7])])
def test_the_steps_of_a_ring_are_seen_inside_each_action(
    window: int | None, steps: Sequence[int], recompute: Recompute
) -> None:
    """With a window, only those of neighbours."""
    model = MODEL.model_copy(update={"sequence": 16384, "window": window})
    layout = Layout(cp=8, pp=2, schedule="zero-bubble", recompute=recompute)
    costs = Costs(Workload(model, layout, 4), load_cluster("megascale-256xa100"))
    for spans in predicted_spans(simulate(costs), costs).values():
        actions = [span for span in spans if span.name in ("forward", "backward_input")]
        for action in actions:
            start, end = action.start_seconds, action.start_seconds + action.duration_seconds
            inner = [one for one in spans if start <= one.start_seconds < end and one.name not in set(Kind)]
            ends = [one.start_seconds + one.duration_seconds for one in inner]
            assert all(a <= b.start_seconds + 1e-9 for a, b in zip(ends, inner[1:], strict=False))
            stage = costs.stages[action.stage]
            back = stage.times.backward_input + stage.recompute
            times = (stage.times.forward if action.name == "forward" else back).times(
                costs.cluster.expected_slowdown
            )
            for name, expected in (("context_comm", times.context), ("ring_attention", times.attention)):
                found = [one.duration_seconds for one in inner if one.name == name]
                assert sum(found) == pytest.approx(float(expected))
            assert {one.chunk for one in inner if one.name == "ring_attention"} == set(steps)


def test_a_short_window_sends_less_than_whole_shares() -> None:
    exposed, memory = [], []
    for window in (64, 3000, None):
        model = MODEL.model_copy(update={"sequence": 16384, "window": window})
        costs = Costs(Workload(model, Layout(cp=8), 1), load_cluster("megascale-256xa100"))
        stage = costs.stages[0]
        # the same attention to hide behind
        block = context_block(costs.workload.rank_model, costs.slice, window)
        exposed.append([float(one) for one in block.exposed((stage.forward, stage.backward))])
        memory.append(memory_of_ranks(costs.workload, simulate(costs).program)[0].total)
    short, wide, whole = exposed
    assert all(a < b < c for a, b, c in zip(short, wide, whole, strict=True))
    assert memory[0] == memory[2] < memory[1]  # what a wide window needs is in memory at once
