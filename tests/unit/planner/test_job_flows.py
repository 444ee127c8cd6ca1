"""If these fail, the network model gets other traffic than the job's: ranks send what they never send, to
ranks that never get it."""

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MODEL, cluster_of

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import make_levels
from myriad.comm.layout import Layout
from myriad.network.rank_transfers import RankMapping, inter_node_flows, merge_transfers
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.collective_patterns import group_transfers, level_pattern, ring_pattern
from myriad.planner.fabric.job_flows import TransferPhase, rank_grid, transfer_phases
from myriad.planner.simulation.simulator import iteration_program
from myriad.planner.workload import Workload
from myriad.program.actions import Kind
from myriad.program.config import OverlapConfig

LAYOUTS = (
    Layout(dp=2, tp=4, pp=2, zero=2, virtual_stages=2),
    Layout(dp=4, tp=2, pp=2, zero=1),
    Layout(dp=16, zero=0),
    Layout(dp=8, tp=2, zero=3),
    Layout(dp=1, tp=8, pp=2),
    Layout(dp=2, tp=2, pp=4, zero=2, schedule="zero-bubble"),
    Layout(dp=2, tp=2, pp=4, zero=2, virtual_stages=2, schedule="zero-bubble-v"),
)
BATCH = 64


@lru_cache(maxsize=64)
def _phases(number: int, overlapped: bool, recompute: str = "none") -> tuple[Costs, list[TransferPhase]]:
    layout = LAYOUTS[number].model_copy(update={"recompute": recompute})
    overlap = OverlapConfig(pipeline=overlapped, data=overlapped, optimizer=overlapped, tensor=overlapped)
    costs = Costs(Workload(MODEL, layout, BATCH, overlap=overlap), cluster_of(nodes=4))
    return costs, transfer_phases(costs)


def _bytes(phases: list[TransferPhase], *kinds: str) -> float:
    return sum(phase.num_bytes for phase in phases if phase.kind in kinds)


cases = given(st.integers(0, len(LAYOUTS) - 1), st.booleans(), st.sampled_from(["none", "full"]))


@cases
@settings(max_examples=20, deadline=None)
def test_each_axis_carries_the_bytes_of_its_closed_form(
    number: int, overlapped: bool, recompute: str
) -> None:
    costs, phases = _phases(number, overlapped, recompute)
    workload, layout = costs.workload, costs.workload.layout
    whole = float(
        MODEL.sequence * MODEL.hidden * workload.value_bytes * BATCH
    )  # of all micro-batches and replicas
    crossings = 0 if layout.pp == 1 else layout.num_stages - 1
    if layout.schedule_name == "zero-bubble-v":
        crossings -= 1  # the last rank turns round by itself
    for kind in ("activation", "gradient"):
        assert _bytes(phases, kind) == pytest.approx(crossings * whole)
    parameters = sum(stage.parameters for stage in costs.stages) * layout.tp
    gradients = parameters * workload.profile.gradient_bytes * (layout.dp - 1)
    assert _bytes(phases, "reduce") == pytest.approx(gradients * (1 if layout.zero else 2))
    gathers = (
        1 if layout.zero and layout.dp > 1 else 0
    )  # also where the next one's travel behind the optimizer
    assert _bytes(phases, "gather") == pytest.approx(gathers * parameters * 2 * (layout.dp - 1))
    # a block has two gathers and two scatters each way, and gathers both inputs again for weights
    again = 4 if recompute == "full" else 0
    crossed = MODEL.layers * (4 + 6 + again) + (2 + (recompute == "full")) + 2
    assert _bytes(phases, "tensor-forward", "tensor-backward") == pytest.approx(
        crossed * whole * (layout.tp - 1)
    )


@cases
@settings(max_examples=20, deadline=None)
def test_what_is_sent_has_a_receiver_along_its_axis(number: int, overlapped: bool, recompute: str) -> None:
    costs, phases = _phases(number, overlapped, recompute)
    grid, axes = rank_grid(costs), {"dp": 0, "pp": 1, "tp": 2}
    place = {int(rank): where for where, rank in np.ndenumerate(grid)}
    for phase in phases:
        sent: Counter[int] = Counter()
        for source, target, size in zip(
            phase.exchange.source.tolist(),
            phase.exchange.target.tolist(),
            phase.exchange.num_bytes,
            strict=True,
        ):
            differ = [axis for axis in range(3) if place[source][axis] != place[target][axis]]
            assert differ == [axes[phase.axis]]
            sent[source] += size
            sent[target] -= size
        if phase.axis != "pp":  # as much comes as goes
            assert max(map(abs, sent.values())) <= 1e-6 * phase.num_bytes


@cases
@settings(max_examples=20, deadline=None)
def test_messages_begin_when_they_are_made(number: int, overlapped: bool, recompute: str) -> None:
    """Those of a stage leave one after the other, none before the forward that makes it has begun."""
    costs, phases = _phases(number, overlapped, recompute)
    forwards = {p.stage: p.start_seconds for p in phases if p.kind == "tensor-forward"}
    for phase in phases:
        if phase.kind == "activation":
            assert len(phase.start_seconds) == costs.workload.num_micro_batches
            assert list(phase.start_seconds) == sorted(phase.start_seconds)
            for sent, begun in zip(phase.start_seconds, forwards.get(phase.stage, ()), strict=False):
                assert sent > begun


@given(st.integers(0, len(LAYOUTS) - 1), st.permutations(range(4)))
@settings(max_examples=20, deadline=None)
def test_other_nodes_change_nothing_inside_them(number: int, order: list[int]) -> None:
    phases = _phases(number, True)[1]
    every = merge_transfers([phase.exchange for phase in phases])
    plain, moved = (RankMapping(np.array(nodes), 4, 4) for nodes in (range(4), order))
    before, after = inter_node_flows(every, plain)[0], inter_node_flows(every, moved)[0]
    assert before.num_bytes.sum() == after.num_bytes.sum()
    for leaving in ("source", "target"):
        ports = [
            np.bincount(getattr(flows, leaving), weights=flows.num_bytes, minlength=16).reshape(4, 4)
            for flows in (before, after)
        ]
        assert ports[1][order] == pytest.approx(ports[0])


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_levels_are_those_of_the_runtime(radices: list[int]) -> None:
    size = int(np.prod(radices))
    expected: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        for level in make_levels(rank, radices):
            for place in level.others:
                expected[rank, level.members[place]] += len(level.slices[level.own])
    pattern = level_pattern(radices, direct=True)
    found: Counter[tuple[int, int]] = Counter()
    for source, target, share in zip(pattern.source, pattern.target, pattern.share, strict=True):
        found[int(source), int(target)] += round(share * size)
    assert found == expected


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_a_ring_leaves_each_node_once_by_each_of_its_ports(per_node: int) -> None:
    """NCCL's rings: each of a node's ranks sends its share of what goes to the next node."""
    nodes = np.arange(8) // per_node
    exchange = group_transfers(ring_pattern(nodes), np.arange(8)[None], 1.0)
    flows, _ = inter_node_flows(exchange, RankMapping(np.arange(8 // per_node), per_node, per_node))
    assert len(flows) == 8
    assert flows.num_bytes == pytest.approx(np.full(8, 7 / 8 / per_node))
    assert sorted(flows.source) == sorted(flows.target) == list(range(8))
    assert (flows.source % per_node == flows.target % per_node).all()  # never to another rail


def test_stages_that_are_gathered_again_are_counted_again() -> None:
    """ZeRO 3 with several stages a rank: as often as the program says, also where some of an iteration's
    parameters travel behind the optimizer of the one before."""
    layout, kinds = Layout(dp=2, tp=2, pp=2, zero=3, virtual_stages=2), (Kind.GATHER, Kind.START_GATHER)
    for optimizer in (False, True):
        overlap = OverlapConfig(optimizer=optimizer)
        costs = Costs(Workload(MODEL, layout, 16, overlap=overlap), cluster_of(nodes=2))
        found = {p.stage: len(p.start_seconds) for p in transfer_phases(costs) if p.kind == "gather"}
        if not optimizer:
            program = iteration_program(costs, costs.workload.num_micro_batches)
            expected = Counter(action.stage for _, action in program if action.kind in kinds)
        assert found == expected and min(expected.values()) > 1


def test_replicas_with_other_shares_send_other_numbers_of_messages() -> None:
    layout = Layout(dp=2, pp=2, tp=2, zero=2, shares=(6, 2))
    costs = Costs(Workload(MODEL, layout, 8), cluster_of(nodes=2))
    counts = {
        int(phase.exchange.source[0]) // 4: len(phase.start_seconds)
        for phase in transfer_phases(costs)
        if phase.kind == "activation"
    }
    assert counts == {0: 6, 1: 2}


def test_gradients_that_two_stages_share_are_sent_both_ways() -> None:
    workload = Workload(MODEL.model_copy(update={"tied": True}), Layout(dp=2, pp=4, tp=2, zero=2), 16)
    costs = Costs(workload, cluster_of(nodes=4))
    (tied,) = (phase for phase in transfer_phases(costs) if phase.kind == "tied")
    rows = workload.model.padded_vocabulary() * workload.model.hidden / 2
    assert tied.exchange.num_bytes == pytest.approx(np.full(8, rows * workload.profile.gradient_bytes))
    assert dict(zip(tied.exchange.source.tolist(), tied.exchange.target.tolist(), strict=True)) == {
        0: 6, 1: 7, 6: 0, 7: 1, 8: 14, 9: 15, 14: 8, 15: 9,
    }  # fmt: skip


def test_level_by_level_less_leaves_a_node() -> None:
    layout = Layout(dp=16, zero=2)
    works = [
        Workload(MODEL, layout, 32, comm=CommConfig(hierarchy=hierarchy, node_size=4))
        for hierarchy in ("flat", "node")
    ]
    moved = []
    for workload in works:
        every = merge_transfers(
            [p.exchange for p in transfer_phases(Costs(workload, cluster_of(nodes=4))) if p.kind == "reduce"]
        )
        moved.append(inter_node_flows(every, RankMapping(np.arange(4), 4, 4))[0].num_bytes.sum())
    assert moved[1] == pytest.approx(moved[0] * (3 / 16) / (15 / 16 / 4))
