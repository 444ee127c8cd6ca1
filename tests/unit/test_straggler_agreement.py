"""If these fail, the driver moves work away from a rank that the dashboard calls healthy, or the dashboard
names a rank about which the driver reports nothing, on the same times and with the same threshold."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from myriad.comm.layout import Layout
from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.insight.straggler_report import Straggler, page_threshold, stragglers
from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.step_work import StepWork
from myriad.supervise.policy.straggler_detector import StragglerDetector, StragglerFinding, driver_threshold

Times = npt.NDArray[np.float64]
"""Seconds in which a rank computed, ``[step, rank]``."""
STEPS, SLOW_SINCE = 26, 15


def driver_finding(
    times: Times, layout: Layout, node_size: int, shares: tuple[int, ...]
) -> StragglerFinding | None:
    work = StepWork(
        dp=layout.dp,
        pp=layout.pp,
        ranks_per_node=node_size,
        node_order=(),
        shares=shares,
        most_share=8,
        steps=10**6,
        on_slow="report",
    )
    nodes = {
        node: range(node * node_size, (node + 1) * node_size) for node in range(layout.world // node_size)
    }
    detector = StragglerDetector(work, nodes, shares)
    for step, row in enumerate(times.tolist(), 1):
        seen = [
            RankStatus(rank, 9, "S", "step", "forward", step, 1, 1, 0.0, 0.1, busy)
            for rank, busy in enumerate(row)
        ]
        detector.observe(seen, float(step))
    return detector.found()


def page_findings(
    times: Times, layout: Layout, node_size: int, shares: tuple[int, ...], *, own: bool = False
) -> list[Straggler]:
    """``own``: by the page's own threshold, not the driver's."""
    cells = times[:, :, None]
    ends = np.cumsum(np.full((STEPS, layout.world), 100_000_000), axis=0)
    table = PhaseTable(
        np.arange(1, STEPS + 1), ("forward",), ("compute",), cells, cells, cells > 0, ends - 100_000_000, ends
    )
    ranks = Ranks(layout, node_size)
    work = np.array(shares, float)[ranks.replica]
    threshold = page_threshold(table) if own else driver_threshold()
    return stragglers(table, ranks, work, threshold=threshold)


def measured(
    layout: Layout,
    shares: tuple[int, ...],
    factor: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]],
    seed: int,
) -> Times:
    """Times with 3 % of noise; the ranks of ``factor`` take 1.5 times as long from a step on."""
    draw = np.random.default_rng(seed)
    ranks = Ranks(layout, layout.world)
    usual = (0.010 + 0.004 * ranks.pipeline) * np.array(shares)[ranks.replica]
    times = usual * draw.normal(1.0, 0.03, (STEPS, layout.world))
    times[SLOW_SINCE - 1 :, factor(np.arange(layout.world))] *= 1.5
    return times


CASES = {
    "healthy": (Layout(dp=4, pp=2), 2, (4, 4, 4, 4), lambda rank: rank < 0, None, ()),
    "a rank": (Layout(dp=4, pp=2), 2, (4, 4, 4, 4), lambda rank: rank == 5, "rank", (5,)),
    "a rank of a replica with more work": (
        Layout(dp=2, pp=2),
        2,
        (6, 2),
        lambda rank: rank == 0,
        "rank",
        (0,),
    ),
    "a rank of a large stage": (Layout(dp=40), 8, (2,) * 40, lambda rank: rank == 17, "rank", (17,)),
    "a node": (Layout(dp=4, pp=2), 2, (4, 4, 4, 4), lambda rank: rank // 2 == 1, "node", (2, 3)),
    "a node without peers": (Layout(pp=2, tp=2), 2, (4,), lambda rank: rank >= 2, "node", (2, 3)),
    "a rank without peers": (Layout(pp=3), 3, (4,), lambda rank: rank == 1, "rank", (1,)),
    "a stage": (Layout(dp=4, pp=2), 2, (4, 4, 4, 4), lambda rank: rank % 2 == 1, "stage", (1, 3, 5, 7)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_the_driver_and_the_page_name_the_same_ranks(case: str, seed: int) -> None:
    layout, node_size, shares, factor, kind, ranks = CASES[case]
    times = measured(layout, shares, factor, seed)
    by_driver = driver_finding(times, layout, node_size, shares)
    by_page = page_findings(times, layout, node_size, shares)
    assert [(one.culprit, one.ranks) for one in by_page] == ([(kind, ranks)] if kind else [])
    assert (None if by_driver is None else (by_driver.culprit, by_driver.ranks)) == (
        (kind, ranks) if kind else None
    )


@pytest.mark.parametrize("seed", range(20))
def test_they_agree_near_the_threshold(seed: int) -> None:
    """Every rank is slower by a factor of its own, many of them close to 1.3."""
    layout, shares = Layout(dp=6, pp=2), (4,) * 6
    draw = np.random.default_rng(seed)
    times = 0.04 * draw.normal(1.0, 0.02, (STEPS, layout.world))
    times *= np.where(draw.random(layout.world) < 0.3, draw.uniform(1.25, 1.35, layout.world), 1.0)
    by_driver = driver_finding(times, layout, 2, shares)
    by_page = {(one.culprit, one.ranks) for one in page_findings(times, layout, 2, shares)}
    if by_driver is None:
        assert not by_page
    else:
        assert (by_driver.culprit, by_driver.ranks) in by_page


def test_what_the_driver_names_the_page_names_by_its_own_threshold_too() -> None:
    layout, shares = Layout(dp=4, pp=2), (4,) * 4
    times = measured(layout, shares, lambda rank: rank == 5, 0)
    assert [one.ranks for one in page_findings(times, layout, 2, shares, own=True)] == [(5,)]


def test_a_whole_stage_and_a_rank_without_peers_are_described() -> None:
    layout, node_size, shares, factor, *_ = CASES["a stage"]
    (stage,) = page_findings(measured(layout, shares, factor, 0), layout, node_size, shares)
    assert stage.sentence.startswith("the whole stage 1 (ranks 1, 3, 5 and 7) runs forward 4"), stage.sentence
    assert stage.sentence.endswith("% slower than before since step 15"), stage.sentence
    layout, node_size, shares, factor, *_ = CASES["a rank without peers"]
    (alone,) = page_findings(measured(layout, shares, factor, 0), layout, node_size, shares)
    assert alone.sentence.startswith("rank 1 on node 0 runs forward "), alone.sentence
    assert alone.sentence.endswith("% slower than before, unlike other stages, since step 15"), alone.sentence
