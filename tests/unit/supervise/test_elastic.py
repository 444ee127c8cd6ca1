"""If these fail, a run whose node is lost waits for ever, shrinks for a node that was only restarted, stays
small when it is back, or ends its ranks for what does not pay."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout, equal_shares
from myriad.job import load_job
from myriad.supervise.messages import Beat, NodeJoined, NodeLeft, StopAsked
from myriad.supervise.observations import Digest, RankExited, RankStatus
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.elastic import ElasticLayouts
from myriad.supervise.policy.node_selection import place_nodes
from myriad.supervise.policy.policy_actions import (
    EndRun,
    PolicyAction,
    ReportFault,
    RestartAtStep,
    StartAttempt,
)
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.supervise.policy.step_work import StepWork
from myriad.wire.message_codec import plain, read

FEWER = ElasticLayouts(
    dp=3, num_micro_batches=8, replica_ranks=1, node_ranks=1, allowed=(1, 2), wait_seconds=30.0, steps=10**6
)
WORK = StepWork(
    dp=3, pp=1, ranks_per_node=1, node_order=(), shares=(3, 3, 2), most_share=8, steps=10**6, on_slow="move"
)
TWO = AttemptLayout(dp=2, shares=(4, 4))
ONE = AttemptLayout(dp=1, shares=(8,))


class World:
    """Nodes with their ranks, a beat a second, under a clock of the test's own."""

    def __init__(self, fewer: ElasticLayouts = FEWER, **plan: object) -> None:
        self.now, self.step, self.factor = 0.0, 0, dict[int, float]()
        whole = fewer.dp * fewer.replica_ranks
        known = RunPlan(whole, whole // fewer.node_ranks, first_epoch=1, dp=fewer.dp, fewer=fewer)
        self.plan = replace(known, **plan)
        self.decider, self.actions = Decider(self.plan, 0.0), list[PolicyAction]()
        self.nodes = set(range(self.plan.nodes))
        for node in self.nodes:
            self.join(node)

    @property
    def state(self) -> RunState:
        return self.decider.state

    def join(self, node: int, layout: AttemptLayout = AS_THE_JOB, epoch: int = 0, *running: int) -> None:
        self.nodes.add(node)
        joined = NodeJoined(node, epoch, "here", 7, 2, 10**9, running, (), False, layout=layout)
        self._did(self.decider.handle(joined, self.now))

    def lose(self, *nodes: int) -> None:
        """The connections are gone, and nothing more is heard; what others then do takes a second."""
        for node in nodes:
            self.nodes.discard(node)
            self._did(self.decider.handle(NodeLeft(node), self.now))
        self.pass_time(4)
        self.exit_all("killed", -9)

    def pass_time(self, seconds: float, *, obey: bool = True) -> list[PolicyAction]:
        """Ranks that are asked to end after a step do."""
        done, end = len(self.actions), self.now + seconds
        while self.now < end:
            self.now, self.step = self.now + 1.0, self.step + 2
            for node in sorted(self.nodes):
                ranks = self.state.placement.get(node, ()) if self.state.phase == "running" else ()
                living = (rank for rank in ranks if rank not in self.state.exits)
                rows = tuple(self.row(node, rank) for rank in living)
                self._did(self.decider.handle(Beat(node, self.state.epoch, 7, rows), self.now))
            self._did(self.decider.due(self.now))
            if obey and self.state.turning and self.state.phase == "running":
                self.exit_all("turned", 75)
        return self.actions[done:]

    def row(self, node: int, rank: int) -> RankStatus:
        shares = self.state.layout.shares or (3, 3, 2)
        busy = 0.02 * shares[rank % len(shares)] * self.factor.get(node, 1.0)
        return RankStatus(rank, 9, "S", "step", "forward", self.step, 1, 1, 0.0, 0.5, busy)

    def exit(self, node: int, cause: str, code: int, error: str = "") -> None:
        for rank in self.state.placement[node]:
            ended = RankExited(node, self.state.epoch, rank, code, cause, self.step, error, "a.log")  # type: ignore[arg-type]
            self._did(self.decider.handle(ended, self.now))

    def exit_all(self, cause: str, code: int) -> None:
        epoch = self.state.epoch
        for node in [node for node in self.state.placement if node in self.nodes]:
            if self.state.epoch == epoch:
                self.exit(node, cause, code)

    def new_driver(self, *, knows: bool = True) -> None:
        state = read(RunState, plain(self.state)) if knows else None
        self.decider = Decider(self.plan, self.now, state)

    def _did(self, actions: Sequence[PolicyAction]) -> None:
        self.actions += actions

    @property
    def started(self) -> StartAttempt:
        (*_, last) = [one for one in self.actions if isinstance(one, StartAttempt)]
        return last


def kinds(actions: Sequence[PolicyAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


@pytest.fixture
def smaller() -> World:
    """Node 1 is lost and has not come back."""
    world = World()
    world.pass_time(10)
    world.lose(1)
    world.pass_time(31)
    assert world.state.layout == TWO
    return world


def test_a_lost_node_is_waited_for_before_the_others_continue() -> None:
    world = World()
    world.pass_time(10)
    world.lose(1)
    assert world.pass_time(28) == []
    (again,) = world.pass_time(3)
    assert isinstance(again, StartAttempt) and again.layout == TWO and again.placement == {0: (0,), 2: (1,)}
    assert again.rule == "a lost node did not come back: fewer replicas"
    assert again.evidence == {"replicas": [3, 2], "nodes": [0, 2]}


def test_a_node_that_was_only_restarted_costs_one_start() -> None:
    world = World()
    world.pass_time(10)
    world.lose(1)
    world.pass_time(10)
    world.join(1)
    assert world.started.layout == AS_THE_JOB and world.started.placement == {0: (0,), 1: (1,), 2: (2,)}
    assert world.pass_time(600) == []


def test_a_spare_comes_before_fewer_replicas() -> None:
    world = World()
    world.join(3)
    world.pass_time(10)
    world.lose(1)
    assert world.started.layout == AS_THE_JOB and world.started.placement == {0: (0,), 3: (1,), 2: (2,)}


def test_without_the_key_nodes_are_waited_for() -> None:
    world = World()
    world.plan = replace(world.plan, fewer=None)
    world.new_driver()
    for node in range(3):
        world.join(node, AS_THE_JOB, 1, node)
    world.lose(1)
    assert kinds(world.pass_time(301)) == ["EndRun"] and "only [0, 2] came" in world.state.reason


def test_a_run_does_not_begin_with_fewer() -> None:
    decider = Decider(RunPlan(3, 3, first_epoch=1, dp=3, fewer=FEWER), 0.0)
    assert decider.handle(NodeJoined(0, 0, "here", 7, 2, 1, (), (), False), 0.0) == []
    assert decider.handle(NodeJoined(1, 0, "here", 7, 2, 1, (), (), False), 0.0) == [] == decider.due(100.0)


def test_when_the_node_is_back_ranks_end_a_step_and_all_take_their_old_places(smaller: World) -> None:
    smaller.pass_time(60)
    smaller.join(1)
    turn, again = smaller.pass_time(8)
    assert isinstance(turn, RestartAtStep) and turn.layout == AS_THE_JOB
    assert turn.evidence == {"replicas": [2, 3]}
    assert isinstance(again, StartAttempt) and again.placement == {0: (0,), 1: (1,), 2: (2,)}
    assert again.layout == AS_THE_JOB and again.rule == "nodes are there for more replicas"
    assert smaller.state.incident is None


def test_any_node_will_do(smaller: World) -> None:
    smaller.join(7)
    smaller.pass_time(8)
    assert smaller.started.placement == {0: (0,), 2: (1,), 7: (2,)}


def test_a_node_that_comes_and_goes_ends_no_rank(smaller: World) -> None:
    for _ in range(5):
        smaller.join(1)
        assert smaller.pass_time(2) == []
        smaller.decider.handle(NodeLeft(1), smaller.now)
        smaller.nodes.discard(1)
        assert kinds(smaller.pass_time(6)) == ["Evict"]


def test_a_run_does_not_grow_again_and_again(smaller: World) -> None:
    smaller.join(1)
    smaller.pass_time(8)
    assert smaller.state.layout == AS_THE_JOB
    smaller.lose(1)
    smaller.pass_time(31)
    smaller.join(1)
    assert smaller.pass_time(200) == [] and smaller.state.layout == TWO
    assert kinds(smaller.pass_time(70)) == ["RestartAtStep", "StartAttempt"]


def test_no_rank_restarts_for_the_last_steps() -> None:
    world = World(replace(FEWER, steps=100))
    world.pass_time(10)
    world.lose(1)
    world.pass_time(31)
    world.join(1)
    assert world.pass_time(12) == []


def test_a_fault_in_a_smaller_attempt_is_no_reason_to_wait(smaller: World) -> None:
    smaller.pass_time(10)
    smaller.exit(2, "killed", -9)
    smaller.exit_all("killed", -9)
    assert smaller.started.epoch == 3 and smaller.started.layout == TWO
    smaller.pass_time(10)
    smaller.join(1)
    smaller.exit(2, "killed", -9)
    smaller.exit_all("killed", -9)
    assert smaller.started.epoch == 4 and smaller.started.layout == AS_THE_JOB, "what is there is used"


def test_a_second_node_is_lost_and_then_the_last(smaller: World) -> None:
    smaller.pass_time(10)
    smaller.lose(2)
    assert smaller.pass_time(28) == []
    smaller.pass_time(3)
    assert smaller.started.layout == ONE and smaller.started.placement == {0: (0,)}
    smaller.pass_time(10)
    smaller.lose(0)
    smaller.pass_time(100)
    smaller.join(2)
    assert smaller.started.layout == ONE and smaller.started.placement == {2: (0,)}
    smaller.pass_time(10)
    smaller.join(0)
    smaller.pass_time(8)
    assert smaller.started.layout == TWO and smaller.started.placement == {0: (0,), 2: (1,)}


def test_when_no_node_is_left_the_run_ends_with_the_reason(smaller: World) -> None:
    smaller.lose(0, 2)
    assert isinstance(smaller.pass_time(301)[-1], EndRun)
    assert smaller.state.outcome == "failed" and "only [] came" in smaller.state.reason


def test_a_smaller_attempt_that_is_done_is_done(smaller: World) -> None:
    smaller.exit_all("done", 0)
    assert smaller.state.outcome == "finished"


def test_a_person_stops_it(smaller: World) -> None:
    smaller.decider.handle(StopAsked(0), smaller.now)
    smaller.join(1)
    assert smaller.pass_time(20) == []
    smaller.exit_all("interrupted", 0)
    assert smaller.state.outcome == "interrupted"


def test_a_person_stops_it_while_a_node_is_waited_for() -> None:
    world = World()
    world.pass_time(10)
    world.lose(1)
    (end,) = world.decider.handle(StopAsked(0), world.now)
    assert isinstance(end, EndRun) and end.outcome == "interrupted"


def test_the_next_driver_continues_with_what_the_last_had(smaller: World) -> None:
    smaller.new_driver()
    for rank, node in enumerate((0, 2)):
        smaller.join(node, TWO, 2, rank)
    assert smaller.pass_time(60) == []
    smaller.join(1)
    assert kinds(smaller.pass_time(8)) == ["RestartAtStep", "StartAttempt"]


def test_a_driver_that_is_lost_while_ranks_turn_knows_it(smaller: World) -> None:
    smaller.join(1)
    smaller.pass_time(6, obey=False)
    assert smaller.state.turning and smaller.state.layout == TWO
    smaller.new_driver()
    smaller.join(0, TWO, 2, 0)
    smaller.join(2, TWO, 2, 1)
    smaller.join(1)
    smaller.exit_all("turned", 75)
    assert smaller.started.layout == AS_THE_JOB and smaller.started.epoch == 3


def test_a_driver_that_is_lost_while_a_node_is_waited_for_waits_again() -> None:
    world = World()
    world.pass_time(10)
    world.lose(1)
    world.new_driver()
    world.join(0)
    world.join(2)
    assert world.pass_time(29) == []
    assert kinds(world.pass_time(2)) == ["StartAttempt"] and world.state.layout == TWO


def test_a_smaller_attempt_that_is_not_in_the_journal_is_known_from_its_nodes() -> None:
    world = World()
    world.pass_time(5)
    world.new_driver()
    world.join(0, TWO, 2, 0)
    world.join(2, TWO, 2, 1)
    assert (world.state.epoch, world.state.layout, world.state.placement) == (2, TWO, {0: (0,), 2: (1,)})
    world.nodes.discard(1)
    assert world.pass_time(60) == [], "nobody is missed"
    world.exit_all("done", 0)
    assert world.state.outcome == "finished"


def test_a_node_that_is_lost_while_ranks_turn_for_it_is_not_needed(smaller: World) -> None:
    smaller.join(1)
    smaller.pass_time(6, obey=False)
    smaller.nodes.discard(1)
    smaller.decider.handle(NodeLeft(1), smaller.now)
    smaller.exit_all("turned", 75)
    assert smaller.started.epoch == 3 and smaller.started.layout == TWO


@pytest.mark.parametrize("cause", ["device memory", "host memory"])
def test_what_does_not_fit_in_memory_is_not_tried_again(smaller: World, cause: str) -> None:
    smaller.exit(0, cause, 1, "no memory")
    smaller.exit_all("killed", -9)
    assert smaller.pass_time(100) == [], "not with one either"
    smaller.join(1)
    assert smaller.started.layout == AS_THE_JOB
    smaller.pass_time(10)
    smaller.lose(1)
    assert smaller.pass_time(100) == []


def test_the_smaller_attempts_replicas_are_compared(smaller: World) -> None:
    smaller.plan = replace(smaller.plan, replicas=((0, 1, 2),))
    smaller.new_driver()
    for rank, node in enumerate((0, 2)):
        smaller.join(node, TWO, 2, rank)
    actions: list[PolicyAction] = []
    for rank, node in enumerate((0, 2)):
        row = replace(smaller.row(node, rank), digests=(Digest(10, rank),))
        actions += smaller.decider.handle(Beat(node, 2, 7, (row,)), smaller.now)
    assert kinds(actions) == ["ReportFault", "StopRanks"]
    assert isinstance(actions[0], ReportFault) and actions[0].evidence["suspects"] == (0, 1)


def test_work_moves_among_the_replicas_that_there_are() -> None:
    world = World(work=WORK)
    world.pass_time(10)
    world.lose(1)
    world.pass_time(31)
    world.factor = {2: 1.7}
    step_restarts = [one for one in world.pass_time(60) if isinstance(one, RestartAtStep)]
    assert [one.layout for one in step_restarts] == [AttemptLayout(dp=2, shares=(5, 3))]
    assert world.started.layout == step_restarts[0].layout and world.started.epoch == 3
    world.join(1)
    world.pass_time(8)
    assert world.started.layout == AS_THE_JOB


WIDE = ElasticLayouts(
    dp=3, num_micro_batches=6, replica_ranks=4, node_ranks=2, allowed=(1, 2), wait_seconds=30.0, steps=10**6
)


def test_replicas_of_several_nodes_are_made_of_those_that_are_left() -> None:
    """Nodes 0 and 1 have replica 0: first and second half of the pipeline."""
    world = World(WIDE)
    world.pass_time(10)
    world.lose(0, 3)
    world.pass_time(31)
    assert world.started.layout == AttemptLayout(dp=2, shares=(3, 3))
    assert list(world.started.placement) == [2, 1, 4, 5], "each still has its half"
    world.join(0)
    assert world.pass_time(60) == [], "five nodes hold no more than four do"
    world.join(3)
    world.pass_time(8)
    assert list(world.started.placement) == [0, 1, 2, 3, 4, 5]


def test_what_is_left_over_of_a_replica_is_a_spare() -> None:
    world = World(WIDE)
    world.pass_time(10)
    world.lose(3)
    world.pass_time(31)
    assert list(world.started.placement) == [0, 1, 2, 5] and 4 in world.decider.nodes
    world.pass_time(10)
    world.lose(2)
    assert list(world.started.placement) == [0, 1, 4, 5], "at once"


def test_who_has_the_state_stays_though_others_are_back() -> None:
    """Node 3 came as a spare; 1 and 2 come back empty."""
    world = World()
    world.join(3)
    world.pass_time(10)
    world.lose(1, 2)
    world.pass_time(31)
    assert list(world.started.placement) == [0, 3]
    world.join(1)
    world.join(2)
    world.pass_time(8)
    assert set(world.started.placement) == {0, 3, 1}


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_places(per_replica: int, dp: int, data: st.DataObject) -> None:
    full = list(range(per_replica * dp))
    anybody = st.lists(st.integers(0, len(full) + 3), unique=True, min_size=per_replica)
    lost_some = data.draw(anybody)
    sizes = st.integers(1, min(dp, len(lost_some) // per_replica))
    before, _ = place_nodes(full, full, lost_some, per_replica * data.draw(sizes), per_replica)
    there = data.draw(anybody)
    needed = per_replica * data.draw(st.integers(1, min(dp, len(there) // per_replica)))
    kept, others = place_nodes(full, before, there, needed, per_replica)
    assert len(kept) == needed and sorted([*kept, *others]) == sorted(there)
    if needed == len(before):
        assert all(kept[place] == node for place, node in enumerate(before) if node in there)
    if needed > len(before):
        assert set(before) & set(there) <= set(kept), "who has the state comes first"
    if set(full) <= set(there) and needed == len(full) and set(before) <= set(full) and before != full:
        assert kept == full or needed == len(before), "all go back to their old places"


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ([], (1, 2)),
        (["layout.zero=3"], (1, 2)),
        (["layout.pp=2", "resilience.nodes=2", "layout.dp=2"], (1,)),
        (["layout.dp=4", "resilience.nodes=2"], (2,)),
        (["layout.schedule=gpipe"], None),
        (["layout.dp=2", "resilience.nodes=2", "comm.sync_every=2"], None),
        (["resilience.nodes=1"], None),
        (["layout.dp=1", "layout.tp=2", "resilience.nodes=2"], None),
        (["resilience.on_lost=wait"], None),
        (["resilience.engine=slurm"], None),
    ],
)
def test_what_a_job_allows(keys: list[str], allowed: tuple[int, ...] | None) -> None:
    base = ["train.global_batch=12", "layout.dp=3", "resilience.nodes=3", "train.steps=50"]
    found = ElasticLayouts.of(load_job("tiny", [*base, *keys]))
    assert (None if found is None else found.allowed) == allowed


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 20), st.data())
def test_each_sequence_of_the_batch_belongs_to_a_rank(
    dp: int, micro: int, more: int, data: st.DataObject
) -> None:
    total = dp + more
    layout = f"layout.shares={list(equal_shares(total, dp))}"
    keys = [f"layout.dp={dp}", f"layout.micro_batch={micro}", f"train.global_batch={total * micro}", layout]
    job = load_job("tiny", [*keys, f"resilience.nodes={dp}"])
    fewer = ElasticLayouts.of(job)
    assert fewer is not None and fewer.allowed == tuple(range(1, dp))
    nodes = data.draw(st.integers(1, dp))
    found = fewer.largest(nodes)
    assert found is not None
    attempt = job.in_attempt(found)
    assert attempt.layout.dp == nodes and sum(attempt.shares) * micro == job.train.global_batch
    assert max(attempt.shares) - min(attempt.shares) <= 1
