"""If these fail, a link that slows a run down is found after hours, the wrong one is named, or people are
called for a validation, a checkpoint or a long forward pass. Time is the test's own."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decisions import World, seen

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.supervise.agent.link_monitor import sum_up
from myriad.supervise.messages import Beat
from myriad.supervise.observations import LinkTraffic, RankStatus
from myriad.supervise.policy.policy_actions import Notice, PolicyAction
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.supervise.policy.traffic_alarms import TrafficAlarms
from myriad.telemetry.links.link_ring import LINK_COLUMNS, Rows

MB = 10**6
WELL = LinkTraffic(
    "eth1", 2, 0.5, 8 * MB, 8 * MB, 100 * MB, 100 * MB, 9, 0.2, MB, MB, 90 * MB, 90 * MB, 0.0, 0, 0
)
"""8 MB in a step of half a second, at 100 MB/s."""


class Wires(World):
    """Four nodes with a rank and a link each, which send what the program has in a step."""

    def __init__(self, sent: float = 8 * MB, spares: int = 0, seconds: int = 12) -> None:
        super().__init__(nodes=4, spares=spares, traffic=((sent, sent),) * 4)
        self.traffic = dict.fromkeys(range(4), WELL)
        self.ranks_as: dict[int, dict[str, object]] = {}
        self.go_on(seconds)

    def go_on(self, seconds: int) -> list[Notice]:
        done = len(self.actions)
        for _ in range(seconds):
            self.now += 1.0
            for node, traffic in self.traffic.items():
                ranks: tuple[RankStatus, ...] = (seen(node, **self.ranks_as.get(node, {})),)
                self.handle(Beat(node, self.epoch, 7, ranks, traffic=(traffic,)))
            for node in set(self.decider.nodes) - set(self.traffic):
                self.handle(Beat(node, 0, 7, ()))
            self._did(self.decider.due(self.now))
        return [one for one in self.actions[done:] if isinstance(one, Notice)]

    def carry(self, node: int, **fields: float) -> None:
        self.traffic[node] = replace(WELL, **fields)

    def stand_still(self, *nodes: int, carried: int = 2 * MB) -> None:
        """Report nodes that stay in one step for ever longer."""
        for node in nodes:
            fields = {"steps": 0, "now_sent_bytes": carried, "now_received_bytes": carried}
            self.carry(node, **fields, now_seconds=30.0, still_seconds=29.0)


def told(notices: list[Notice]) -> list[tuple[str, object, int]]:
    return [(one.level, one.evidence["kind"], one.node) for one in notices]


def test_a_link_that_sends_at_a_tenth_is_named_at_the_next_beat_and_again_when_it_is_well() -> None:
    world = Wires()
    assert world.actions[1:] == []
    world.carry(2, sent_rate=10 * MB, step_seconds=1.1)
    (notice,) = world.go_on(1)
    assert told([notice]) == [("warning", "slow", 2)] and notice.what == "traffic"
    assert notice.problem.startswith("link eth1 of node 2 sends at 9.5 MiB/s, before at 95.4 MiB/s")
    assert notice.evidence["bytes_of_a_step"] == 8 * MB and world.go_on(20) == []
    world.carry(2)
    assert told(world.go_on(5)) == [("info", "slow", 2)]


def test_whoever_receives_from_a_slow_link_is_not_named() -> None:
    """Between two nodes both ends see it: the one that sends is meant."""
    world = Wires()
    world.carry(0, received_rate=10 * MB)
    world.go_on(1)
    world.carry(2, sent_rate=11 * MB)
    assert told(world.go_on(6)) == [("warning", "slow", 2)]


def test_whoever_sends_slowly_is_named_though_the_other_end_fell_a_little_further() -> None:
    """On a busy machine rates are uneven: those of the sender stay just above the limit of an alarm."""
    world = Wires()
    for node in range(4):
        world.carry(node, sent_rate=55 * MB, received_rate=55 * MB)
    world.carry(0, sent_rate=55 * MB, received_rate=30 * MB)
    world.carry(2, sent_rate=36 * MB, received_rate=55 * MB)
    assert told(world.go_on(6)) == [("warning", "slow", 2)]


def test_links_whose_own_rate_is_not_known_from_before_accuse_no_other() -> None:
    """The counters of node 2 begin when its link is slow already: what it sends then looks usual."""
    world = Wires(seconds=0)
    for node in (2, 3):
        world.carry(node, steps=0)
    world.go_on(8)
    for node in range(4):
        world.carry(node, received_rate=20 * MB, sent_rate=MB * (90 if node < 2 else 20))
    assert world.go_on(20) == []


def test_a_link_that_receives_slowly_from_all_is_named_at_the_second_look() -> None:
    world = Wires()
    world.carry(3, received_rate=12 * MB)
    assert world.go_on(1) == [] and told(world.go_on(1)) == [("warning", "slow", 3)]


def test_links_that_all_fall_alike_are_no_alarm_and_one_that_falls_further_is() -> None:
    """A step is slow for all where one is: the link that fell furthest below its own rate is meant."""
    world = Wires()
    for node in range(4):
        world.carry(node, sent_rate=30 * MB, received_rate=30 * MB)
    assert world.go_on(10) == []
    world = Wires()
    for node, rate in enumerate((40, 38, 9, 42)):
        world.carry(node, sent_rate=rate * MB)
    assert told(world.go_on(3)) == [("warning", "slow", 2)]


def test_what_the_step_does_not_wait_for_is_no_alarm() -> None:
    """At a third of its rate the link is still busy for a tenth of the step."""
    world = Wires()
    for node in range(4):
        world.carry(node, step_seconds=2.5)
    world.go_on(40)
    world.carry(1, step_seconds=2.5, sent_rate=33 * MB)
    assert world.go_on(10) == []


@pytest.mark.parametrize("phase", ["validating", "saving", "starting", "loading", "tracing", "ending"])
def test_silence_outside_of_steps_is_no_alarm(phase: str) -> None:
    world = Wires()
    world.stand_still(*range(4))
    world.ranks_as[1] = {"phase": phase}
    assert world.go_on(30) == []


def test_a_link_that_has_carried_what_the_program_sends_may_be_silent() -> None:
    """Computing for half a minute; checkpoints' copies went over it before, beside what the program sends."""
    world = Wires()
    for node in range(4):
        world.carry(node, sent_bytes=12 * MB, received_bytes=12 * MB)
    world.go_on(40)
    world.stand_still(*range(4), carried=8 * MB)
    assert world.go_on(30) == []
    world.stand_still(*range(4), carried=6 * MB)
    assert told(world.go_on(3)) == [("warning", "stopped", -1)], "alike on all: none is named"


def test_traffic_that_stops_with_bytes_missing_is_an_alarm_and_the_link_that_lacks_most_is_named() -> None:
    world = Wires()
    world.stand_still(0, 1, 3)
    world.stand_still(2, carried=100)
    (notice,) = world.go_on(1)
    assert told([notice]) == [("warning", "stopped", 2)] and "has carried 0% of its bytes" in notice.problem
    assert world.go_on(10) == []
    for node in range(4):
        world.carry(node)
    assert told(world.go_on(4)) == [("info", "stopped", 2)]


@pytest.mark.parametrize("fields", [{"entered": 7, "left": 7}, {"state": "T"}])
def test_links_that_wait_for_a_rank_that_computes_or_was_stopped_are_no_alarm(
    fields: dict[str, object],
) -> None:
    world = Wires()
    world.stand_still(*range(4))
    world.ranks_as[3] = fields
    assert [one for one in world.go_on(1) if one.what == "traffic"] == []


def test_segments_sent_again_and_pauses_are_compared_with_peers_and_with_before() -> None:
    world = Wires()
    world.carry(1, sent_again=400)
    assert told(world.go_on(2)) == [("warning", "sent again", 1)]
    world.carry(1)
    assert told(world.go_on(3)) == [("info", "sent again", 1)]
    for node in range(4):
        world.carry(node, paused=90_000)
    assert world.go_on(20) == [], "of the whole fabric"
    world = Wires()
    world.carry(2, paused=300_000)
    assert told(world.go_on(2)) == [("warning", "paused", 2)]


def test_a_rate_that_falls_and_recovers_again_and_again_swings() -> None:
    world, found = Wires(), list[Notice]()
    for _ in range(4):
        world.carry(0, sent_rate=40 * MB)
        found += world.go_on(1)
        world.carry(0)
        found += world.go_on(4)
    assert told(found)[0] == ("warning", "swings", 0)


def test_a_link_that_stays_bad_for_half_a_minute_makes_its_node_give_way() -> None:
    world = Wires(spares=1)
    world.carry(2, sent_rate=10 * MB, step_seconds=1.1)
    world.go_on(20)
    assert not [one for one in world.actions if type(one).__name__ == "RestartAtStep"]
    world.go_on(20)
    (turned,) = [one for one in world.actions if type(one).__name__ == "RestartAtStep"]
    assert turned.node == 2


def test_a_new_attempt_begins_without_alarms_and_has_rates_of_its_own() -> None:
    """Ranks were restarted elsewhere: what was before says nothing, nor does the first second of steps."""
    world = Wires()
    world.carry(2, sent_rate=10 * MB)
    world.go_on(2)
    world.exit(1)
    world.all_exit()
    done = len(world.actions)
    for node in range(4):
        world.carry(node, sent_rate=20 * MB if node else 4 * MB, sent_again=3000)
    assert world.epoch > 5 and world.go_on(20) == [] and len(world.actions) == done


def test_a_fault_states_which_alarm_was_active() -> None:
    world = Wires()
    world.carry(2, sent_rate=10 * MB)
    world.go_on(2)
    actions: list[PolicyAction] = world.exit(1)
    assert str(actions[0].evidence["traffic"]).startswith("link eth1 of node 2 sends")


def test_in_another_layout_the_program_of_the_job_does_not_count() -> None:
    world = Wires(sent=4 * MB)
    world.stand_still(*range(4), carried=5 * MB)
    assert world.go_on(5) == [], "more than the program sends"
    world.decider.state.layout = AttemptLayout(dp=4)
    assert told(world.go_on(2)) == [("warning", "stopped", -1)]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["step", "saving", "validating"]), st.floats(0.75, 1.3)), max_size=20)
)
def test_a_healthy_run_raises_no_alarm(seconds: list[tuple[str, float]]) -> None:
    world = Wires()
    for number, (phase, factor) in enumerate(seconds):
        rate = round(100 * MB * factor)
        world.carry(number % 4, sent_rate=rate, received_rate=rate, step_seconds=0.5 / factor, sent_again=20)
        world.ranks_as[number % 4] = {"phase": phase}
        assert world.go_on(1) == []


def rows(step: list[int], sent: list[int], in_step: list[int] | None = None) -> Rows:
    """One link, a row each 10 ms."""
    values = np.zeros((len(step), 4 + len(LINK_COLUMNS)), np.int64)
    values[:, 0] = 10_000_000 * np.arange(1, len(step) + 1)
    values[:, 1], values[:, 2] = step, [1] * len(step) if in_step is None else in_step
    values[:, 5] = np.cumsum(sent)
    return Rows(("eth0",), values)


def test_a_beat_sums_up_the_steps_that_ended_and_what_is_under_way() -> None:
    """Ten rows a step: 1 MB in each of two of them, then 8 of computing."""
    step = [1] * 5 + [2] * 10 + [3] * 10 + [4] * 10
    sent = [0] * 5 + ([0, MB, MB] + [0] * 7) * 2 + [0, MB] + [0] * 8
    (one,) = sum_up(rows(step, sent), 0)
    assert (one.steps, one.sent_bytes, one.sent_rate) == (2, 2 * MB, 100 * MB), "not the mean, 20 MB/s"
    assert one.step_seconds == pytest.approx(0.1) and (one.now_step, one.now_sent_bytes) == (4, MB)
    assert one.still_seconds == pytest.approx(0.08) and one.now_seconds == pytest.approx(0.09)
    (late,) = sum_up(rows(step, sent), 10_000_000 * 20)
    assert (late.steps, late.sent_bytes) == (1, 2 * MB), "the others were reported before"


def test_what_goes_while_ranks_validate_does_not_count() -> None:
    in_step = [1] * 10 + [0] * 10 + [1] * 10
    (one,) = sum_up(rows([1] * 5 + [2] * 20 + [3] * 5, [MB] * 30, in_step), 0)
    assert one.steps == 1 and one.sent_bytes < 12 * MB
    assert sum_up(rows([-1] * 5, [MB] * 5), 0) == ()


def test_the_alarm_of_a_link_that_only_sends_ends() -> None:
    """Answers come by another interface. An alarm that lasts is a reason to replace the node."""
    world = Wires(seconds=0)
    quiet = {"received_bytes": 1000, "received_rate": 1000, "now_received_bytes": 0, "now_received_rate": 0}
    for node in range(4):
        world.carry(node, **quiet)
    world.go_on(12)
    world.carry(2, sent_rate=10 * MB, step_seconds=1.1, **quiet)
    assert told(world.go_on(3)) == [("warning", "slow", 2)]
    world.carry(2, **quiet)
    assert told(world.go_on(5)) == [("info", "slow", 2)]


def test_judging_the_links_of_many_nodes_costs_in_proportion_to_their_number() -> None:
    """Every second the driver of 1,536 nodes judges all of their links."""

    def num_calls(nodes: int) -> int:
        state = SimpleNamespace(epoch=1, phase="running", layout=AS_THE_JOB)
        state.placement = {node: (node,) for node in range(nodes)}
        plan = SimpleNamespace(traffic=((16.0 * MB, 16.0 * MB),) * nodes, patience=1.0)
        traffic, steps = TrafficAlarms(cast(RunPlan, plan), cast(RunState, state)), 0
        busy = (replace(WELL, sent_again=900), replace(WELL, name="eth2", paused=90_000))

        def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
            nonlocal steps
            steps += 1
            return count

        for second in range(8):
            for node in range(nodes):
                beat = Beat(node, 1, 7, (seen(node),), traffic=busy)
                before = sys.gettrace()
                sys.settrace(count if second == 7 and node == nodes - 1 else before)
                try:
                    assert list(traffic.observe(beat, 1.0 + second)) == []
                finally:
                    sys.settrace(before)
        return steps

    few, many = num_calls(64), num_calls(128)
    assert few > 1000 and many < 2.5 * few
