"""If these fail, work is not moved from a slow node, is moved where that costs more than it gains, or to and
fro; or a run that was only told of is restarted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.attempt_layout import AttemptLayout
from myriad.job import load_job
from myriad.supervise.messages import Beat, NodeJoined, StopAsked
from myriad.supervise.observations import RankExited, RankStatus
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.policy_actions import (
    Evict,
    PolicyAction,
    ReportSlow,
    RestartAtStep,
    StartAttempt,
    StopRanks,
)
from myriad.supervise.policy.rebalance import best_shares, step_seconds
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.supervise.policy.step_work import StepWork
from myriad.wire.message_codec import plain, read

WORK = StepWork(
    dp=4, pp=1, ranks_per_node=1, node_order=(), shares=(8,) * 4, most_share=16, steps=10**6, on_slow="move"
)
SECONDS = 0.02
Factor = Callable[[int], float]


def equally_fast(node: int) -> float:
    return 1.0


class World:
    """Four nodes of a rank each, and spares; a beat a second, under a clock of the test's own."""

    def __init__(self, spares: int = 0, **work: object) -> None:
        self.now, self.step = 0.0, 0
        self.work = replace(WORK, **work)
        self.plan = RunPlan(4, 4, first_epoch=1, work=self.work)
        self.decider = Decider(self.plan, self.now)
        self.actions: list[PolicyAction] = []
        for node in range(4 + spares):
            self.join(node)

    @property
    def state(self) -> RunState:
        return self.decider.state

    def join(
        self,
        node: int,
        running: Sequence[int] = (),
        epoch: int = 0,
        layout: AttemptLayout = AttemptLayout(),
    ) -> None:
        joined = NodeJoined(node, epoch, "here", 7, 2, 10**9, tuple(running), (), False, layout=layout)
        self._did(self.decider.handle(joined, self.now))

    def train(self, seconds: float, factor: Factor = equally_fast) -> list[PolicyAction]:
        """``factor(node)``: of its compute. Ranks end when they are asked to."""
        done, end = len(self.actions), self.now + seconds
        while self.now < end:
            self.now, self.step = self.now + 1.0, self.step + 2
            for node in list(self.decider.nodes):
                ranks = self.state.placement.get(node, ())
                rows = tuple(self.row(rank, factor(node)) for rank in ranks)
                self._did(self.decider.handle(Beat(node, self.state.epoch, 7, rows), self.now))
            for action in self._did(self.decider.due(self.now)):
                if isinstance(action, RestartAtStep):
                    self.exit_all("turned", 75)
        return self.actions[done:]

    def exit_all(self, cause: str, code: int) -> None:
        for node, ranks in list(self.state.placement.items()):
            for rank in ranks:
                ended = RankExited(node, self.state.epoch, rank, code, cause, self.step, "", "a.log")
                self._did(self.decider.handle(ended, self.now))

    def row(self, rank: int, factor: float) -> RankStatus:
        shares = self.state.layout.shares or self.work.shares
        busy = SECONDS * shares[self.work.place(rank, 4)[0]] * factor
        return RankStatus(rank, 9, "S", "step", "forward", self.step, 1, 1, 0.0, 0.5, busy)

    def _did(self, actions: list[PolicyAction]) -> list[PolicyAction]:
        self.actions += actions
        return actions


def kinds(actions: Sequence[PolicyAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def node_1_is_slow(node: int) -> float:
    return 1.6 if node == 1 else 1.0


@pytest.mark.slow
def test_work_moves_from_a_slow_node_and_back_when_it_is_fast_again() -> None:
    world = World()
    world.train(100)
    diagnosis, turn, again = world.train(60, node_1_is_slow)
    assert isinstance(diagnosis, ReportSlow) and (diagnosis.culprit, diagnosis.node) == ("rank", 1)
    assert isinstance(turn, RestartAtStep) and turn.layout == AttemptLayout(shares=(9, 5, 9, 9))
    assert isinstance(again, StartAttempt) and again.layout == turn.layout and again.epoch == 2
    assert list(again.placement) == [0, 1, 2, 3], "nobody is evicted"
    assert world.train(900, node_1_is_slow) == [], "it is slow as before, and that is known"
    turn, again = world.train(60)
    assert (
        isinstance(turn, RestartAtStep)
        and turn.layout == AttemptLayout(shares=(8, 8, 8, 8))
        and "fast" in turn.rule
    )
    assert isinstance(again, StartAttempt) and again.layout.shares == (8, 8, 8, 8)
    assert world.train(900) == []


def test_it_does_not_move_to_and_fro() -> None:
    """A node that is slow for a minute and fast for the next moves work every five minutes at most."""
    world = World()
    for _ in range(15):
        world.train(60, node_1_is_slow)
        world.train(60)
    assert 1 < kinds(world.actions).count("RestartAtStep") <= 1800 / 300 + 1


def test_with_report_stragglers_are_only_reported() -> None:
    world = World(on_slow="report")
    world.train(100)
    assert kinds(world.train(900, node_1_is_slow)) == ["ReportSlow"]


def test_a_rank_that_is_slow_now_and_then_is_reported_ever_more_rarely() -> None:
    world = World(on_slow="report")
    world.train(100)
    reported = []
    for _ in range(60):  # two hours of a busy machine
        world.train(60)
        reported += [world.now for _ in kinds(world.train(60, node_1_is_slow))]
    assert len(reported) == 4, "at once, then after 10, 20 and 40 minutes"
    pauses = [later - one for one, later in pairwise(reported)]
    assert all(later > 1.5 * one for one, later in pairwise(pauses))


def test_a_spare_takes_the_place_of_a_slow_node() -> None:
    world = World(spares=1, on_slow="swap")
    world.train(100)
    actions = world.train(60, node_1_is_slow)
    assert kinds(actions) == ["ReportSlow", "RestartAtStep", "Evict", "StartAttempt"]
    evict, again = actions[2:]
    assert isinstance(evict, Evict) and evict.node == 1
    assert (
        isinstance(again, StartAttempt) and set(again.placement) == {0, 2, 3, 4} and again.layout.shares == ()
    )
    assert world.train(600, node_1_is_slow) == []


def test_without_a_spare_work_moves_instead() -> None:
    world = World(on_slow="swap")
    world.train(100)
    assert kinds(world.train(60, node_1_is_slow)) == ["ReportSlow", "RestartAtStep", "StartAttempt"]


def test_other_nodes_begin_with_equal_shares() -> None:
    world = World(spares=1)
    world.train(100)
    world.train(60, node_1_is_slow)
    assert world.state.layout.shares != ()
    world.decider.handle(RankExited(1, world.state.epoch, 1, 1, "device", 5, "", "a.log"), world.now)
    world.exit_all("killed", -9)
    assert 1 not in world.state.placement and world.state.layout.shares == ()


@pytest.mark.parametrize(
    ("work", "why"),
    [
        ({"dp": 1, "pp": 4, "shares": (8,)}, "one replica has nobody to give work to"),
        ({"shares": (1, 1, 1, 1), "most_share": 2}, "there is nothing to divide"),
        ({"most_share": 8}, "no replica has the memory for more"),
        ({"steps": 250}, "the run is nearly over"),
    ],
)
def test_nothing_moves_where_that_does_not_pay(work: dict[str, object], why: str) -> None:
    world = World(**work)
    world.train(100)
    assert set(kinds(world.train(20, node_1_is_slow))) <= {"ReportSlow"}, why


def test_ranks_that_do_not_end_by_themselves_are_killed_and_no_node_is_named() -> None:
    world = World()
    world.train(100)
    world.exit_all = lambda cause, code: None  # type: ignore[method-assign]
    actions = world.train(44, node_1_is_slow)
    assert kinds(actions)[:3] == ["ReportSlow", "RestartAtStep", "StopRanks"] and isinstance(
        actions[2], StopRanks
    )
    World.exit_all(world, "killed", -9)
    again = world.actions[-1]
    assert isinstance(again, StartAttempt) and again.layout.shares != ()


def test_a_run_that_is_done_meanwhile_is_done() -> None:
    world = World()
    world.train(100)
    world.exit_all = lambda cause, code: None  # type: ignore[method-assign]
    world.train(15, node_1_is_slow)
    assert world.state.turning
    World.exit_all(world, "done", 0)
    assert world.state.outcome == "finished"


def test_a_stop_that_is_asked_for_meanwhile_stops() -> None:
    world = World()
    world.train(100)
    world.exit_all = lambda cause, code: None  # type: ignore[method-assign]
    world.train(15, node_1_is_slow)
    world.decider.handle(StopAsked(0), world.now)
    World.exit_all(world, "turned", 75)
    assert world.state.outcome == "interrupted"


def test_a_fault_meanwhile_is_a_fault() -> None:
    world = World()
    world.train(100)
    world.exit_all = lambda cause, code: None  # type: ignore[method-assign]
    world.train(15, node_1_is_slow)
    killed = RankExited(2, world.state.epoch, 2, -9, "killed", 5, "", "a.log")
    assert kinds(world.decider.handle(killed, world.now)) == ["ReportFault", "StopRanks"]
    World.exit_all(world, "turned", 75)
    assert isinstance(world.actions[-1], StartAttempt) and not world.state.turning


def test_a_new_driver_knows_the_shares() -> None:
    world = World()
    world.train(100)
    world.train(60, node_1_is_slow)
    shares, state = world.state.layout.shares, read(RunState, plain(world.state))
    assert state == world.state
    world.decider = Decider(world.plan, world.now, state)
    for node in range(4):
        world.join(node, running=[node], epoch=state.epoch)
    assert set(kinds(world.train(250, node_1_is_slow))) <= {"ReportSlow"}
    assert world.state.layout.shares == shares


def test_no_rank_is_compared_in_an_attempt_whose_shares_are_not_in_the_journal() -> None:
    world, other = World(), AttemptLayout(shares=(9, 5, 9, 9))
    world.train(20)
    world.decider = Decider(world.plan, world.now, read(RunState, plain(world.state)))
    for node in range(4):
        world.join(node, running=[node], epoch=2, layout=other)
    assert world.state.epoch == 2 and world.state.layout == other, "as the nodes tell"
    assert world.train(600, node_1_is_slow) == []


paces = st.lists(st.floats(0.5, 4.0), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(paces, st.integers(0, 8), st.integers(1, 4), st.data())
def test_no_shares_are_better(paces: list[float], more: int, depth: int, data: st.DataObject) -> None:
    total = len(paces) + more
    most = data.draw(st.integers(-(-total // len(paces)), total))
    found = best_shares(paces, total, most, depth)
    allowed = (each for each in product(range(1, most + 1), repeat=len(paces)) if sum(each) == total)
    assert sum(found) == total and all(1 <= share <= most for share in found)
    least = min(step_seconds(paces, each, depth) for each in allowed)
    assert step_seconds(paces, found, depth) == pytest.approx(least)


def test_what_a_job_allows() -> None:
    keys = ["layout.dp=2", "train.global_batch=16"]
    assert StepWork.of(load_job("tiny", keys)).most_share == 16
    gpipe = load_job("tiny", [*keys, "layout.schedule=gpipe"])
    assert StepWork.of(gpipe).most_share == 8, "memory grows with every micro-batch"
    assert StepWork.of(load_job("tiny", [*keys, "resilience.on_slow=report"])).on_slow == "report"
    shared = StepWork.of(load_job("tiny-moe", ["layout.dp=4", "layout.ep=2", "train.global_batch=16"]))
    assert shared.most_share == 4, "replicas that share experts exchange tokens in each micro-batch"
    assert shared.in_attempt(AttemptLayout(dp=2)).most_share == 8
