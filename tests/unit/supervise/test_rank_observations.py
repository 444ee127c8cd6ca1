"""If these fail, a run of thousands of ranks is judged by other rows than those that its ranks showed."""

from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.hang_detector import Deadlines, RankObservations

PLACEMENT = {3: (0, 1, 2, 3), 1: (4, 5, 6, 7), 2: (8, 9, 10, 11)}

ROWS = st.builds(
    RankStatus,
    rank=st.just(0),
    pid=st.just(9),
    state=st.just("S"),
    phase=st.sampled_from(["", "starting", "step", "saving", "validating"]),
    activity=st.just("reduce"),
    step=st.integers(-1, 3),
    entered=st.integers(0, 3),
    left=st.integers(0, 3),
    idle_seconds=st.sampled_from([0.0, 0.5, 20.0, 3000.0]),
    step_seconds=st.sampled_from([0.0, 0.5, 0.6]),
)


def renumbered(row: RankStatus, rank: int) -> RankStatus:
    return RankStatus(**{**vars(row), "rank": rank})


@given(
    st.lists(st.lists(ROWS, min_size=12, max_size=12), min_size=1, max_size=4), st.sets(st.integers(0, 11))
)
def test_the_few_rows_come_to_what_all_come_to(beats: list[list[RankStatus]], ended: set[int]) -> None:
    sightings, by_few, by_all = RankObservations(), Deadlines(1.0, 60.0), Deadlines(1.0, 60.0)
    for rows in beats:
        for node, ranks in PLACEMENT.items():
            sightings.observe(node, [renumbered(rows[rank], rank) for rank in ranks])
        few, every = sightings.few(PLACEMENT, ended), sightings.all(PLACEMENT, ended)
        assert [one.rank for one in every] == [rank for rank in range(12) if rank not in ended]
        if not every:
            assert not few
            continue
        by_few.observe(few)
        by_all.observe(every)
        assert min(one.idle_seconds for one in few) == min(one.idle_seconds for one in every)
        phase = Deadlines.phase_of(every)
        assert Deadlines.phase_of(few) == phase and by_few.limit(phase) == by_all.limit(phase)


def test_no_decision_before_each_node_has_reported_all_its_live_ranks() -> None:
    rank_seen = RankStatus(0, 9, "S", "step", "reduce", 3, 2, 1, 0.5, 0.5)
    sightings = RankObservations()
    for node, ranks in PLACEMENT.items():
        assert sightings.few(PLACEMENT, ()) == []
        sightings.observe(node, [renumbered(rank_seen, rank) for rank in ranks])
    assert len(sightings.all(PLACEMENT, ())) == 12 and sightings.few(PLACEMENT, ())
    sightings.observe(1, [renumbered(rank_seen, rank) for rank in (4, 5, 6)])
    assert sightings.few(PLACEMENT, ()) == [] == sightings.all(PLACEMENT, ())
    sightings.changed(1)  # rank 7 has ended, so it is not reported
    assert len(sightings.all(PLACEMENT, (7,))) == 11 and sightings.few(PLACEMENT, (7,))
    sightings.drop(3)
    assert sightings.few(PLACEMENT, (7,)) == []
