"""If these fail, a slow rank goes unnoticed for days, an innocent is blamed, or ordinary noise is taken for a
slow node."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.step_work import StepWork
from myriad.supervise.policy.straggler_detector import StragglerDetector, StragglerFinding

WORK = StepWork(
    dp=4, pp=2, ranks_per_node=2, node_order=(), shares=(4,) * 4, most_share=8, steps=10**6, on_slow="move"
)
"""Eight ranks: replica 0 is ranks 0 (stage 0) and 1 (stage 1), on node 0; and so on."""
NODES = {node: (2 * node, 2 * node + 1) for node in range(4)}
STAGE_SECONDS = (0.010, 0.017)
Factor = Callable[[int, int], float]


class WatchedRun:
    """An attempt's beats: one a second."""

    def __init__(
        self, work: StepWork = WORK, nodes: dict[int, Sequence[int]] = NODES, step_seconds: float = 0.5
    ):
        self.work, self.step_seconds = work, step_seconds
        self.world = sum(map(len, nodes.values()))
        self.stragglers = StragglerDetector(work, nodes, work.shares)
        self.now = 0.0

    def watch(self, seconds: float, factor: Factor = lambda rank, step: 1.0) -> StragglerFinding | None:
        """``factor(rank, step)``: of its compute. Gives the first finding."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            step = int(self.now / self.step_seconds)
            rows = [self.row(rank, step, factor(rank, step)) for rank in range(self.world)]
            if self.stragglers.observe(rows, self.now) and (found := self.stragglers.found()):
                return found
        return None

    def row(self, rank: int, step: int, factor: float) -> RankStatus:
        replica, stage = self.work.place(rank, self.world)
        busy = STAGE_SECONDS[stage] * self.work.shares[replica] * factor if step else 0.0
        return RankStatus(rank, 9, "S", "step", "forward", step, 1, 1, 0.0, self.step_seconds, busy)


def slow(ranks: Sequence[int], times: float, since: int = 0, until: int = 10**9) -> Factor:
    return lambda rank, step: times if rank in ranks and since <= step < until else 1.0


@pytest.mark.parametrize("step_seconds", [0.05, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("times", [1.31, 1.5, 4.0])
def test_a_slow_rank_is_named_within_ten_steps_or_a_minute(step_seconds: float, times: float) -> None:
    watched = WatchedRun(step_seconds=step_seconds)
    assert watched.watch(200) is None
    began = watched.now
    found = watched.watch(300, slow([4], times, since=int(began / step_seconds)))
    assert found is not None and (found.culprit, found.ranks, found.node) == ("rank", (4,), 2)
    assert found.ratio == pytest.approx(times, rel=0.01)
    assert watched.now - began <= max(60.0, 11 * step_seconds)


def test_steps_of_half_a_minute_need_no_ten_of_them() -> None:
    watched = WatchedRun(step_seconds=30.0)
    watched.watch(900)
    began = watched.now
    assert watched.watch(900, slow([4], 1.5, since=int(began / 30) + 1)) is not None
    assert watched.now - began <= 10 * 30


def test_a_slow_node_is_named_as_a_whole() -> None:
    found = WatchedRun().watch(60, slow([2, 3], 1.6))
    assert found is not None and (found.culprit, found.ranks, found.node) == ("node", (2, 3), 1)


def test_a_node_that_holds_half_of_a_stage_is_found_by_the_other_half() -> None:
    """Two replicas of one stage, four ranks to a matrix: those of the same node are as slow as each other."""
    work = replace(WORK, dp=2, pp=1, ranks_per_node=4, shares=(4, 4))
    nodes = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    found = WatchedRun(work, nodes).watch(60, slow([4, 5, 6, 7], 1.4))
    assert found is not None and (found.culprit, found.node) == ("node", 1)


def test_a_stage_with_more_work_is_no_straggler() -> None:
    """Stage 1 has the head, and takes 1.7 times as long from the beginning."""
    assert WatchedRun().watch(600) is None


def test_a_stage_that_becomes_slow_is_the_works_fault() -> None:
    watched = WatchedRun()
    watched.watch(60)
    found = watched.watch(60, slow([1, 3, 5, 7], 1.5))
    assert found is not None and (found.culprit, found.ranks, found.node) == ("stage", (1, 3, 5, 7), -1)


def test_a_stage_on_a_node_of_its_own_is_compared_with_itself() -> None:
    """One replica of two stages: tensor-parallel ranks of a stage are on one node, and slow together."""
    work = replace(WORK, dp=1, pp=2, ranks_per_node=2, shares=(4,))
    nodes = {0: (0, 1), 1: (2, 3)}
    watched = WatchedRun(work, nodes)
    assert watched.watch(60) is None
    found = watched.watch(60, slow([2, 3], 1.5))
    assert found is not None and (found.culprit, found.ranks, found.alone) == ("node", (2, 3), True)
    all_longer = WatchedRun(work, nodes)
    all_longer.watch(60)
    found = all_longer.watch(60, slow([0, 1, 2, 3], 1.5))
    assert found is not None and found.culprit == "stage", "all have more to do"


def test_a_replica_with_more_micro_batches_is_not_slow_for_that() -> None:
    assert WatchedRun(replace(WORK, shares=(6, 2, 4, 4))).watch(600) is None


def test_a_step_that_is_slow_because_of_its_data_names_no_straggler() -> None:
    watched = WatchedRun(step_seconds=1.0)
    assert watched.watch(600, lambda rank, step: 9.0 if rank == step % 8 and step % 7 == 0 else 1.0) is None


def test_pauses_of_one_rank_are_not_slowness() -> None:
    """Collections, other programs: a quarter of one rank's steps takes ten times as long."""
    watched = WatchedRun(step_seconds=1.0)
    assert watched.watch(600, lambda rank, step: 10.0 if rank == 3 and step % 4 == 0 else 1.0) is None


def test_the_first_steps_of_an_attempt_are_not_looked_at() -> None:
    assert WatchedRun(step_seconds=3.0).watch(300, slow([5], 50.0, until=3)) is None
    assert WatchedRun(step_seconds=30.0).watch(600, slow([5], 50.0, until=4)) is None, "three are enough"


def test_ranks_that_do_not_know_how_long_they_compute_are_not_compared() -> None:
    watched = WatchedRun()
    assert not watched.stragglers.observe([watched.row(rank, 0, 1.0) for rank in range(8)], 1.0)


def test_with_an_order_of_nodes_ranks_are_where_the_grid_has_them() -> None:
    """Node 1 comes first: its ranks are replica 0, and have twice as much to do."""
    work = replace(WORK, dp=2, pp=1, node_order=(1, 0), shares=(6, 3))
    nodes = {0: (0, 1), 1: (2, 3)}
    assert [work.place(rank, 4) for rank in range(4)] == [(1, 0), (1, 0), (0, 0), (0, 0)]
    assert WatchedRun(work, nodes).watch(300) is None


@pytest.mark.slow
@settings(max_examples=1, deadline=None, derandomize=True)  # of noise without end some would be an alarm
@given(st.integers(0, 2**32), st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2)]), st.booleans())
@example(33906, (4, 1), False)
@example(1, (1, 2), False)
def test_hours_of_ordinary_noise_raise_no_alarm(seed: int, layout: tuple[int, int], same_node: bool) -> None:
    """Each step of each rank 8 % more or less, one in fifty up to ten times as long; a rank 8 % slower for
    good; an hour."""
    draw = random.Random(seed)
    dp, pp = layout
    work = replace(WORK, dp=dp, pp=pp, shares=(4,) * dp)
    nodes: dict[int, Sequence[int]] = {0: range(dp * pp)} if same_node else {n: (n,) for n in range(dp * pp)}

    def noise(rank: int, step: int) -> float:
        times = max(0.5, draw.gauss(1.0, 0.08)) * (1.08 if rank == 0 else 1.0)
        return times * (draw.uniform(1, 10) if draw.random() < 0.02 else 1.0)

    assert WatchedRun(work, nodes).watch(3600, noise) is None


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 7))
def test_noise_does_not_hide_a_slow_rank_or_blame_another(seed: int, rank: int) -> None:
    draw = random.Random(seed)
    watched = WatchedRun()
    found = watched.watch(120, lambda r, step: draw.gauss(1.0, 0.05) * (1.5 if r == rank else 1.0))
    assert found is not None and found.ranks == (rank,)
