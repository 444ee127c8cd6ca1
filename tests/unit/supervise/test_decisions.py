"""If these fail, a healthy run is restarted, a sick one is not, or an innocent is blamed. Everything is under
a clock of the test's own: hours pass in milliseconds."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.errors import BAD_DATA, NEXT_ATTEMPT_SKIPS
from myriad.supervise.messages import Beat, NodeJoined, NodeLeft, StopAsked
from myriad.supervise.observations import CommStatus, RankExited, RankStatus
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.policy_actions import (
    DumpStacks,
    EndRun,
    Evict,
    PolicyAction,
    ReportFault,
    StartAttempt,
    StopRanks,
)
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.supervise.policy.step_work import StepWork
from myriad.wire.message_codec import plain, read

WORLD = 4


class World:
    """A run's nodes and ranks, as the driver hears of them."""

    def __init__(self, nodes: int = 1, spares: int = 0, **plan: Any) -> None:
        self.now = 0.0
        self.plan = RunPlan(WORLD, nodes, first_epoch=5, **plan)
        self.decider = Decider(self.plan, self.now)
        self.actions: list[PolicyAction] = []
        for node in range(nodes + spares):
            self.join(node)

    def handle(self, observation: object) -> list[PolicyAction]:
        return self._did(self.decider.handle(observation, self.now))

    def wait(
        self, seconds: float, seen: Callable[[int, float], Iterable[RankStatus]] | None = None
    ) -> list[PolicyAction]:
        """Time passes; ``seen(node, waited)``: what the node's beats tell meanwhile, each second. The time is
        looked at as the driver does: less often while all is calm."""
        began, done = self.now, len(self.actions)
        look_at = self.now
        while self.now < began + seconds:
            self.now += 0.25
            if seen is not None and self.now % 1 == 0:
                for node in list(self.decider.nodes):
                    ranks = tuple(seen(node, self.now - began))
                    self.handle(Beat(node, self.epoch, 7, ranks))
            if self.now >= look_at:
                self._did(self.decider.due(self.now))
                look_at = self.now + (1.0 if self.decider.is_calm(self.now) else 0.25)
        return self.actions[done:]

    def _did(self, actions: list[PolicyAction]) -> list[PolicyAction]:
        self.actions += actions
        return actions

    @property
    def epoch(self) -> int:
        return self.decider.state.epoch

    def join(self, node: int, running: Iterable[int] = (), epoch: int = 0) -> list[PolicyAction]:
        return self.handle(NodeJoined(node, epoch, "here", 7, 2, 10**9, tuple(running), (), False))

    def exit(
        self, rank: int, code: int = -9, cause: str = "killed", step: int = 3, error: str = ""
    ) -> list[PolicyAction]:
        node = next(n for n, ranks in self.decider.state.placement.items() if rank in ranks)
        return self.handle(RankExited(node, self.epoch, rank, code, cause, step, error, "a.log"))

    def all_exit(self, **how: object) -> list[PolicyAction]:
        """Those that have not."""
        done = len(self.actions)
        for rank in set(range(WORLD)) - set(self.decider.state.exits):
            self.exit(rank, **how)
        return self.actions[done:]

    def ranks(self, node: int, **fields: object) -> list[RankStatus]:
        return [seen(rank, **fields) for rank in self.decider.state.placement.get(node, ())]


def seen(rank: int, **fields: object) -> RankStatus:
    usual = {
        "pid": 9,
        "state": "S",
        "phase": "step",
        "activity": "reduce",
        "step": 3,
        "entered": 7,
        "left": 6,
    }
    return RankStatus(rank=rank, **{**usual, "idle_seconds": 0.1, "step_seconds": 0.5, **fields})


def kinds(actions: list[PolicyAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_an_attempt_begins_when_all_nodes_are_there() -> None:
    world = World(nodes=2)
    (started,) = world.actions
    assert isinstance(started, StartAttempt) and (started.epoch, started.again) == (5, False)
    assert started.placement == {0: (0, 1), 1: (2, 3)}


def test_a_killed_rank_is_named_as_the_cause_and_all_restart_when_the_last_is_gone() -> None:
    world = World()
    blame, stop = world.exit(2)
    assert isinstance(blame, ReportFault) and (blame.rank, blame.cause, blame.step) == (2, "killed", 3)
    assert isinstance(stop, StopRanks) and stop.epoch == 5
    (again,) = world.all_exit()
    assert isinstance(again, StartAttempt) and (again.epoch, again.again) == (6, True)


def test_reports_about_an_earlier_attempt_change_nothing() -> None:
    world = World()
    world.exit(2)
    world.all_exit()
    assert world.handle(RankExited(0, 5, 0, -9, "killed", 3, "", "a.log")) == []
    world.handle(Beat(0, 5, 7, tuple(seen(rank, state="T") for rank in range(4))))
    assert world.wait(3, lambda node, _: ()) == []


def test_a_rank_that_only_lost_its_peer_is_no_suspect_if_the_peers_death_is_reported_soon() -> None:
    world = World()
    assert world.exit(0, 1, "peer", error="connection closed") == []
    world.now += 1.0
    blame, _ = world.exit(3)
    assert isinstance(blame, ReportFault) and blame.rank == 3


def test_ranks_that_only_lost_each_other_restart() -> None:
    world = World()
    world.exit(0, 1, "peer", error="timed out")
    assert kinds(world.wait(3)) == ["ReportFault", "StopRanks"]
    assert kinds(world.all_exit()) == ["StartAttempt"]


def test_the_same_error_of_the_program_twice_at_a_step_ends_the_run_with_its_traceback() -> None:
    world = World()
    how = {"code": 1, "cause": "user", "error": "Traceback ...\nValueError: moon", "step": 8}
    world.exit(1, **how)
    assert kinds(world.all_exit()) == ["StartAttempt"]
    world.exit(3, **how)
    (end,) = world.all_exit()
    assert isinstance(end, EndRun) and end.outcome == "failed"
    assert "rank 3 ended with exit code 1" in end.reason and "ValueError: moon" in end.reason


def test_an_error_of_the_program_at_a_later_step_is_another_one() -> None:
    world = World()
    for step in (8, 9, 10, 11):
        world.exit(1, 1, "user", step, "Traceback ...\nValueError: moon")
        assert kinds(world.all_exit()) == ["StartAttempt"]


def test_bad_input_is_not_tried_twice() -> None:
    world = World()
    world.exit(1, 2, "input", -1, "layout.tp = 3: must divide")
    (end,) = world.all_exit()
    assert isinstance(end, EndRun) and end.reason.startswith("rank 1: layout.tp = 3")


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_fault_without_progress_ends_the_run_after_its_restarts(restarts: int) -> None:
    world = World(restarts=restarts)
    for _ in range(restarts):
        world.exit(2)
        assert kinds(world.all_exit()) == ["StartAttempt"]
    world.exit(2)
    assert kinds(world.all_exit()) == ["EndRun"]


def test_the_same_fault_for_ever_is_borne_as_long_as_there_is_progress() -> None:
    world = World()
    for step in range(50):
        world.exit(2, step=step)
        assert kinds(world.all_exit(step=step)) == ["StartAttempt"]


def test_all_ranks_done_is_a_finished_run_and_after_ctrl_c_an_interrupted_one() -> None:
    world = World()
    (end,) = world.all_exit(code=0, cause="done")
    assert isinstance(end, EndRun) and end.outcome == "finished"
    world = World()
    world.handle(StopAsked(0))
    (end,) = world.all_exit(code=0, cause="done")
    assert isinstance(end, EndRun) and end.outcome == "interrupted"


def test_ctrl_c_during_a_recovery_begins_no_attempt() -> None:
    world = World()
    world.exit(2)
    world.handle(StopAsked(0))
    (end,) = world.all_exit()
    assert isinstance(end, EndRun) and end.outcome == "interrupted"


def test_a_rank_that_ctrl_c_ends_while_it_starts_takes_the_others_with_it() -> None:
    """They would wait for it for as long as a save may take."""
    world = World()
    world.handle(StopAsked(0))
    assert kinds(world.exit(1, -2, "interrupted")) == ["StopRanks"]
    actions = [action for rank in (0, 2, 3) for action in world.exit(rank, -9, "killed")]
    assert kinds(actions) == ["EndRun"] and actions[0].outcome == "interrupted"


def test_a_save_that_fails_after_ctrl_c_is_reported() -> None:
    world = World()
    world.handle(StopAsked(0))
    world.exit(0, 1, "user", error="the last checkpoint is in memory only")
    (end,) = world.all_exit()
    assert isinstance(end, EndRun) and end.outcome == "failed" and "in memory only" in end.reason


# Silence


def test_a_stopped_rank_is_found_within_three_seconds() -> None:
    world = World()
    world.wait(5, lambda node, _: world.ranks(node))
    stopped_at = world.now

    def stops(node: int, _: float) -> list[RankStatus]:
        return [*world.ranks(node)[:3], seen(3, state="T", idle_seconds=1.0)]

    blame, stop = world.wait(3, stops)
    assert isinstance(blame, ReportFault) and (blame.rank, blame.cause) == (3, "stopped")
    assert isinstance(stop, StopRanks) and world.now - stopped_at <= 3


def test_only_while_ranks_train_undisturbed_time_may_be_looked_at_seldom() -> None:
    world = World(nodes=2)
    assert not world.decider.is_calm(world.now), "nobody has told that ranks train"
    world.wait(5, lambda node, _: world.ranks(node))
    assert world.decider.is_calm(world.now)
    for told in ({"state": "T"}, {"idle_seconds": 5.0}):
        world.wait(1, lambda node, _, told=told: world.ranks(node, **told))
        assert not world.decider.is_calm(world.now)
        world.wait(1, lambda node, _: world.ranks(node))
        assert world.decider.is_calm(world.now)
    assert not world.decider.is_calm(world.now + 2.5), "nodes are silent"
    world.exit(0, cause="peer")
    assert not world.decider.is_calm(world.now), "somebody's death is about to be told"


def test_a_rank_that_is_stopped_for_a_look_only_is_left_alone() -> None:
    world = World()
    assert world.wait(20, lambda node, t: world.ranks(node, state="T" if t % 4 == 0 else "S")) == []


def test_a_hang_is_found_and_the_rank_that_did_not_enter_is_named() -> None:
    world = World()
    world.wait(30, lambda node, _: world.ranks(node))

    def hangs(node: int, t: float) -> list[RankStatus]:
        found = world.ranks(node, idle_seconds=t)
        found[1] = seen(1, idle_seconds=t, activity="backward", entered=6, left=6)
        return found

    dump, blame, stop = world.wait(18, hangs)
    assert isinstance(dump, DumpStacks) and dump.ranks == (1,)
    assert (
        isinstance(blame, ReportFault)
        and (blame.rank, blame.cause) == (1, "hang")
        and "backward" in blame.problem
    )
    assert isinstance(stop, StopRanks)
    assert 13 <= dump.evidence["idle_seconds"] <= 15


@pytest.mark.parametrize("in_order", [True, False])
def test_a_hang_is_analysed_by_groups_of_the_layout_and_evicts_no_node_for_the_program(
    in_order: bool,
) -> None:
    """Two stages of two tensor-parallel ranks, a spare at hand. Where rank 0 waits for rank 1's tensor
    collective and rank 1 for rank 0 elsewhere, no node is at fault."""
    work = StepWork(1, 2, 2, (), (4,), 4, 100, "report")
    world = World(nodes=2, spares=1, work=work)
    world.wait(30, lambda node, _: world.ranks(node))
    counters = {0: (1, 0, 9), 1: (1 if in_order else 2, 0, 8), 2: (2, 0, 3), 3: (2, 0, 3)}
    waits = {0: 4, 1: 4 if in_order else 1, 2: 1, 3: 1}

    def hangs(node: int, t: float) -> list[RankStatus]:
        def comm(rank: int) -> CommStatus:
            return CommStatus((*counters[rank], *[0] * 9), waits[rank], on_device=True)

        return [replace(one, comm=comm(one.rank)) for one in world.ranks(node, idle_seconds=t)]

    _, blame, _ = world.wait(18, hangs)
    assert isinstance(blame, ReportFault) and blame.cause == "hang"
    assert (blame.rank, blame.node) == ((1, 0) if in_order else (0, -1))
    assert ("different orders" in blame.problem) is not in_order
    after = kinds(world.all_exit())
    assert after == (["Evict", "StartAttempt"] if in_order else ["StartAttempt"])


def test_one_rank_that_continues_is_no_hang() -> None:
    world = World()
    world.wait(30, lambda node, _: world.ranks(node))
    assert world.wait(200, lambda node, t: [*world.ranks(node, idle_seconds=t)[:3], seen(3)]) == []


@pytest.mark.parametrize("step_seconds", [1.0, 10.0, 600.0])
def test_hours_of_slow_steps_evaluations_and_saves_raise_no_alarm(step_seconds: float) -> None:
    """Steps that vary threefold; compilation of nine minutes, evaluations of eight, saves of five."""
    world = World()

    def phase(name: str, seconds: float, **fields: object) -> None:
        world.wait(seconds, lambda node, t: world.ranks(node, phase=name, idle_seconds=t, **fields))

    phase("starting", 1100, step_seconds=0.0)
    phase("loading", 900, step_seconds=0.0)
    phase("step", 540, step_seconds=0.0)
    for step in range(4, 20):
        length = step_seconds * (3 if step % 4 == 0 else 1)
        phase("step", length, step_seconds=length, step=step)
        if step % 5 == 0:
            phase("validating", 480, step_seconds=step_seconds, step=step)
            phase("saving", 300, step_seconds=step_seconds, step=step)
    assert kinds(world.actions) == ["StartAttempt"]


@pytest.mark.parametrize(("patience", "limit"), [(0.2, 2.7), (1.0, 13.5), (4.0, 54.0)])
def test_patience_scales_the_deadline(patience: float, limit: float) -> None:
    world = World(patience=patience)
    world.wait(10, lambda node, _: world.ranks(node))
    dump, *_ = world.wait(limit + 3, lambda node, t: world.ranks(node, idle_seconds=t))
    assert isinstance(dump, DumpStacks) and limit <= dump.evidence["idle_seconds"] <= limit + 1.5


# Nodes


def test_a_silent_node_is_evicted_and_a_spare_takes_its_ranks() -> None:
    world = World(nodes=2, spares=1)
    world.wait(10, lambda node, _: world.ranks(node))
    world.handle(NodeLeft(1))
    actions = world.wait(4, lambda node, _: world.ranks(node))
    assert kinds(actions) == ["Evict", "ReportFault", "StopRanks"] and actions[0].node == 1
    world.exit(0)
    (again,) = world.exit(1)
    assert isinstance(again, StartAttempt) and again.placement == {0: (0, 1), 2: (2, 3)}


def test_a_spare_takes_the_place_of_the_first_node_and_no_other_rank_moves() -> None:
    """Those of node 1 find their snapshots where they are."""
    world = World(nodes=2, spares=1)
    world.handle(NodeLeft(0))
    world.wait(4, lambda node, _: world.ranks(node))
    world.exit(2)
    (again,) = world.exit(3)
    assert isinstance(again, StartAttempt) and again.placement == {2: (0, 1), 1: (2, 3)}
    assert list(again.placement) == [2, 1], "they meet on the node of rank 0"


def test_a_spare_that_is_there_first_waits_for_those_that_were_meant_to_begin() -> None:
    world = World.__new__(World)
    plan = RunPlan(4, 2, 1, late_seconds=3.0)
    world.now, world.actions, world.decider = 0.0, [], Decider(plan, 0.0)
    world.join(0)
    assert world.join(2) == [] and world.wait(2) == []
    (started,) = world.join(1)
    assert isinstance(started, StartAttempt) and started.placement == {0: (0, 1), 1: (2, 3)}


def test_a_node_that_was_meant_to_begin_and_does_not_come_delays_no_rank() -> None:
    world = World.__new__(World)
    plan = RunPlan(4, 2, 1, late_seconds=3.0)
    world.now, world.actions, world.decider = 0.0, [], Decider(plan, 0.0)
    world.join(0)
    world.join(2)
    (started,) = world.wait(3)
    assert isinstance(started, StartAttempt) and started.placement == {0: (0, 1), 2: (2, 3)}


def test_peers_of_a_lost_node_are_no_suspects_for_missing_it() -> None:
    """Their connections to its ranks end seconds before it is given up."""
    world = World(nodes=2, spares=1)
    world.wait(5, lambda node, _: world.ranks(node))
    world.handle(NodeLeft(0))
    world.exit(2, 1, "peer")
    blame = next(one for one in world.wait(4, lambda n, _: world.ranks(n)) if isinstance(one, ReportFault))
    assert (blame.cause, blame.node) == ("node", 0)


def test_without_a_spare_the_run_waits_for_the_node() -> None:
    world = World(nodes=2)
    world.handle(NodeLeft(1))
    world.wait(4, lambda node, _: world.ranks(node))
    world.exit(0)
    assert world.exit(1) == []
    (again,) = world.join(1)
    assert isinstance(again, StartAttempt) and again.placement == {0: (0, 1), 1: (2, 3)}


def test_a_node_whose_device_fails_gives_way_to_a_spare() -> None:
    world = World(nodes=2, spares=1)
    world.exit(2, 1, "device")
    evict, again = world.all_exit()
    assert isinstance(evict, Evict) and evict.node == 1
    assert isinstance(again, StartAttempt) and again.placement == {0: (0, 1), 2: (2, 3)}


def test_a_killed_rank_is_tried_again_where_it_was_and_then_on_a_spare() -> None:
    world = World(nodes=2, spares=1)
    world.exit(2)
    assert kinds(world.all_exit()) == ["StartAttempt"]
    world.exit(2)
    assert kinds(world.all_exit()) == ["Evict", "StartAttempt"]
    assert world.decider.state.placement == {0: (0, 1), 2: (2, 3)}


@pytest.mark.parametrize("cause", ["user", "device memory", "disk"])
def test_no_node_is_evicted_for_an_error_of_the_program(cause: str) -> None:
    world = World(nodes=2, spares=1)
    world.exit(2, 1, cause, error="ValueError: moon")
    assert kinds(world.all_exit()) == ["StartAttempt"]


def test_without_a_spare_no_node_is_evicted() -> None:
    world = World(nodes=2)
    world.exit(2, 1, "device")
    assert kinds(world.all_exit()) == ["StartAttempt"]


def test_nodes_that_never_come_end_the_run() -> None:
    world = World.__new__(World)
    world.now, world.actions, world.decider = 0.0, [], Decider(RunPlan(4, 2, 1), 0.0)
    world.join(0)
    (end,) = [action for action in world.wait(310, lambda node, _: ()) if isinstance(action, EndRun)]
    assert end.outcome == "failed" and "only [0] came" in end.reason


def test_a_node_agent_that_comes_back_empty_has_lost_its_ranks() -> None:
    world = World()
    world.handle(NodeLeft(0))
    actions = world.join(0)
    assert kinds(actions) == ["ReportFault", "StopRanks", "StartAttempt"] and actions[0].cause == "node"


def test_a_node_agent_that_comes_back_with_its_ranks_continues() -> None:
    world = World()
    world.handle(NodeLeft(0))
    world.now += 1
    assert world.join(0, running=range(4), epoch=5) == []
    assert world.wait(5, lambda node, _: world.ranks(node)) == []


def test_ranks_that_will_not_die_are_killed_again() -> None:
    world = World()
    world.exit(0)
    assert kinds(world.wait(4, lambda node, _: ())) == ["StopRanks"]


def test_ranks_that_a_node_does_not_have_cannot_end_on_it() -> None:
    world = World(nodes=2)
    for node, rank in ((0, 2), (1, 1), (0, WORLD), (0, -1), (7, 0)):
        assert world.handle(RankExited(node, 5, rank, 0, "done", 3, "", "a.log")) == []
    assert world.decider.state.exits == {}


def test_a_driver_that_was_held_up_takes_no_node_for_silent() -> None:
    """Their reports meanwhile are still in its sockets."""
    world = World(nodes=2)
    world.wait(5, lambda node, _: world.ranks(node))
    world.now += 30
    assert world.decider.due(world.now) == []
    assert world.wait(10, lambda node, _: world.ranks(node)) == []
    assert "Evict" in kinds(world.wait(5))


# Drivers


def test_a_new_driver_continues_where_the_last_one_was_at_any_instant() -> None:
    """Whatever has been decided is written; the ranks live on meanwhile."""
    world = World()
    for exits, running in (((), range(4)), ((2,), (0, 1, 3))):
        for rank in exits:
            world.exit(rank)
        state = read(RunState, plain(world.decider.state))
        assert state == world.decider.state
        world.decider = Decider(world.plan, world.now, state)
        assert world.join(0, running=running, epoch=5) == []
    assert kinds(world.all_exit()) == ["StartAttempt"] and world.epoch == 6


def test_a_new_driver_that_finds_all_ranks_done_ends_the_run() -> None:
    world = World()
    world.decider = Decider(world.plan, 0.0, world.decider.state)
    exits = tuple(RankExited(0, 5, rank, 0, "done", 9, "", "a.log") for rank in range(4))
    (end,) = world.handle(NodeJoined(0, 5, "here", 7, 2, 10**9, (), exits, False))
    assert isinstance(end, EndRun) and end.outcome == "finished"


def test_an_attempt_that_was_decided_and_never_begun_is_followed_by_another() -> None:
    world = World()
    world.decider = Decider(world.plan, 0.0, world.decider.state)
    assert kinds(world.join(0)) == ["ReportFault", "StopRanks", "StartAttempt"] and world.epoch == 6


def rejoin(
    world: World, node: int, epoch: int, running: Iterable[int] = (), **codes: int
) -> list[PolicyAction]:
    """As an executor comes to another driver; ``codes``: r2=-9."""
    exits = tuple(
        RankExited(node, epoch, int(name[1:]), code, "killed" if code else "done", 3, "", "a.log")
        for name, code in codes.items()
    )
    return world.handle(NodeJoined(node, epoch, "here", 7, 2, 10**9, tuple(running), exits, False))


def with_new_driver(world: World, state: RunState) -> World:
    world.actions, world.decider = [], Decider(world.plan, world.now, state)
    return world


def test_a_node_that_was_lost_with_its_driver_is_named_and_not_who_missed_it() -> None:
    world = World(nodes=2, spares=1)
    with_new_driver(world, read(RunState, plain(world.decider.state)))
    world.join(2)
    missed = tuple(RankExited(1, 5, rank, 1, "peer", 3, "a peer is gone", "a.log") for rank in (2, 3))
    assert world.handle(NodeJoined(1, 5, "here", 7, 2, 10**9, (), missed, False)) == []
    evict, blame, stop, again = world.wait(11, lambda node, _: world.ranks(node))
    assert isinstance(evict, Evict) and isinstance(blame, ReportFault) and isinstance(stop, StopRanks)
    assert (evict.node, blame.cause, blame.node) == (0, "node", 0)
    assert isinstance(again, StartAttempt) and again.placement == {2: (0, 1), 1: (2, 3)}


def forgotten() -> World:
    """Attempt 6, on nodes 2 and 1, is not in the journal; a new driver has read of attempt 5 on 0 and 1."""
    world = World(nodes=2)
    return with_new_driver(world, read(RunState, plain(world.decider.state)))


def test_an_attempt_that_is_not_in_the_journal_continues_under_a_new_driver() -> None:
    world = forgotten()
    assert rejoin(world, 1, 6, running=(2, 3)) == [] and rejoin(world, 2, 6, running=(0, 1)) == []
    assert world.epoch == 6 and list(world.decider.state.placement.items()) == [(2, (0, 1)), (1, (2, 3))]
    assert world.wait(30, lambda node, _: world.ranks(node)) == []
    assert kinds(world.exit(3)) == ["ReportFault", "StopRanks"]
    assert kinds(world.all_exit()) == ["StartAttempt"] and world.epoch == 7


def test_an_attempt_that_is_not_in_the_journal_and_has_ended_is_followed_by_another() -> None:
    world = forgotten()
    rejoin(world, 1, 6, r2=-9, r3=-9)
    assert kinds(world.actions) == ["ReportFault", "StopRanks"]
    assert kinds(rejoin(world, 2, 6, r0=-9, r1=-9)) == ["StartAttempt"] and world.epoch == 7


def test_an_attempt_that_is_not_in_the_journal_and_is_done_ends_the_run() -> None:
    world = forgotten()
    rejoin(world, 1, 6, r2=0, r3=0)
    (end,) = rejoin(world, 2, 6, r0=0, r1=0)
    assert isinstance(end, EndRun) and end.outcome == "finished"


def test_ranks_that_no_node_reports_are_lost_and_all_restart() -> None:
    world = forgotten()
    rejoin(world, 1, 6, running=(2, 3))
    world.join(0)
    assert world.wait(9, lambda node, _: world.ranks(node)) == []
    blame, stop = world.wait(3, lambda node, _: world.ranks(node))
    assert isinstance(blame, ReportFault) and blame.problem == "a node with ranks 0 and 1 was lost"
    assert stop.epoch == 6
    assert kinds(world.all_exit()) == ["StartAttempt"] and world.epoch == 7
    assert world.decider.state.placement == {0: (0, 1), 1: (2, 3)}, "no rank of the other moves"


def test_a_node_that_is_lost_together_with_the_driver_is_missed_by_the_next() -> None:
    world = World(nodes=2)
    with_new_driver(world, world.decider.state)
    world.join(0, running=(0, 1), epoch=5)
    assert world.wait(9, lambda node, _: world.ranks(node)) == []
    evict, blame, _ = world.wait(3, lambda node, _: world.ranks(node))
    assert isinstance(evict, Evict) and evict.node == blame.node == 1
    for rank in (0, 1):
        world.exit(rank)
    assert kinds(world.join(1)) == ["StartAttempt"] and world.epoch == 6


# Anything


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    what = st.sampled_from(["exit", "beat", "join", "left", "stop", "wait"])
    return draw(st.lists(st.tuples(what, st.integers(0, 3), st.integers(0, 9)), max_size=60))


@given(happenings())
def test_whatever_happens_there_is_one_attempt_at_a_time_and_one_end(
    what: list[tuple[str, int, int]],
) -> None:
    world = World(nodes=2, spares=1)
    for name, a, b in what:
        if name == "exit":
            cause, code = (("done", 0), ("killed", -9), ("user", 1), ("peer", 1))[b % 4]
            world.handle(RankExited(a // 2, world.epoch - (b == 9), a, code, cause, b, "x", "a.log"))
        elif name == "beat":
            ranks = world.ranks(a, step=b, idle_seconds=5.0 * b, state="T" if b == 7 else "S")
            world.handle(Beat(a, world.epoch, 7, tuple(ranks)))
        elif name == "join":
            world.join(a)
        elif name == "left":
            world.handle(NodeLeft(a))
        elif name == "stop" and b == 0:
            world.handle(StopAsked(a))
        else:
            world.wait(b)
    epochs = [action.epoch for action in world.actions if isinstance(action, StartAttempt)]
    assert epochs == list(range(5, 5 + len(epochs)))
    for started in (action for action in world.actions if isinstance(action, StartAttempt)):
        assert sorted(rank for ranks in started.placement.values() for rank in ranks) == list(range(WORLD))
    ends = [action for action in world.actions if isinstance(action, EndRun)]
    assert len(ends) <= 1 and (not ends or world.actions[-1] is ends[0])
    assert read(RunState, plain(world.decider.state)) == world.decider.state


@pytest.mark.parametrize("skips", [False, True])
def test_damaged_data_stops_the_run_unless_the_next_attempt_skips_it(skips: bool) -> None:
    world = World()
    end = NEXT_ATTEMPT_SKIPS if skips else "restore the file"
    for number in range(3):  # one block after the other, each found by the attempt that skips those before
        error = f"data loader: {BAD_DATA}corpus/train-00000.bin, byte {number}; {end}"
        if world.epoch == 5 + number:
            world.exit(0, 1, "data", error=error)
            world.all_exit(code=1, cause="peer", error="a peer is gone")
    ended = [action for action in world.actions if isinstance(action, EndRun)]
    assert bool(ended) != skips and not any(isinstance(action, Evict) for action in world.actions)
    assert sum(isinstance(action, StartAttempt) for action in world.actions) == (4 if skips else 1)
