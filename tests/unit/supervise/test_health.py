"""If these fail, a cable that was out for a second restarts a run, one that stays out stops it for minutes,
or a good node is given up for what a program did. Everything is under a clock of the test's own."""

import pytest
from test_decisions import World, kinds, seen

from myriad.supervise.messages import Beat
from myriad.supervise.observations import DeviceTrouble, LinkStatus
from myriad.supervise.policy.health import ClockCheck
from myriad.supervise.policy.policy_actions import (
    Evict,
    Notice,
    PolicyAction,
    ReportFault,
    RestartAtStep,
    StartAttempt,
)


class Links(World):
    """Nodes with a link ``eth1`` each, and devices; ranks finish a step each second."""

    def __init__(self, nodes: int = 2, spares: int = 1, **plan: float) -> None:
        self.links: dict[int, LinkStatus] = {}
        self.devices: dict[int, tuple[DeviceTrouble, ...]] = {}
        super().__init__(nodes=nodes, spares=spares, **plan)
        self.tell(1.0)

    def beat(self, node: int) -> list[PolicyAction]:
        link = self.links.setdefault(node, LinkStatus("eth1", True, 1, 0))
        ranks = tuple(seen(rank, step=int(self.now)) for rank in self.decider.state.placement.get(node, ()))
        return self.handle(Beat(node, self.epoch, 7, ranks, (link,), self.devices.get(node, ()), self.now))

    def tell(self, seconds: float) -> list[PolicyAction]:
        began, done = self.now, len(self.actions)
        while self.now < began + seconds:
            self.now += 0.5
            for node in list(self.decider.nodes):
                self.beat(node)
            self._did(self.decider.due(self.now))
        return self.actions[done:]

    def set(self, node: int, up: bool) -> None:
        was = self.links[node]
        self.links[node] = LinkStatus("eth1", up, was.downs + (was.up and not up), 0)

    def flap(self, node: int, seconds: float = 1.0, after: float = 10.0) -> list[PolicyAction]:
        self.set(node, False)
        found = self.tell(seconds)
        self.set(node, True)
        return found + self.tell(after)

    def turn(self) -> list[PolicyAction]:
        """All end as they were asked to."""
        return self.all_exit(code=75, cause="turned", step=int(self.now))

    def trouble(self, node: int, rank: int, blame: str = "hardware", **how: bool) -> list[PolicyAction]:
        told = DeviceTrouble(rank % 2, rank, self.epoch, blame, "Xid 0: something", **how)
        self.devices[node] = (*self.devices.get(node, ()), told)
        return self.tell(0.5)


def problems(actions: list[PolicyAction]) -> list[str]:
    return [action.problem for action in actions if isinstance(action, Notice)]


def test_a_link_that_was_down_for_two_seconds_is_reported_and_nothing_else() -> None:
    world = Links()
    assert problems(world.flap(0, 2.0)) == [
        "link eth1 of node 0 is down",
        "link eth1 of node 0 is up again after 2.0 s",
    ]
    assert kinds(world.actions[1:]) == ["Notice", "Notice"]


def test_a_link_that_stays_down_is_the_nodes_fault_and_the_spare_takes_its_place() -> None:
    world = Links()
    world.set(1, False)
    first, *_ = world.tell(0.5)
    assert isinstance(first, Notice)
    blame, _ = world.tell(4.0)
    assert isinstance(blame, ReportFault) and (blame.cause, blame.node, blame.rank) == ("link", 1, -1)
    assert "eth1" in blame.problem and blame.evidence["idle_seconds"] >= 3.0
    evicted, started = world.all_exit()
    assert isinstance(evicted, Evict) and (evicted.node, evicted.evidence["cause"]) == (1, "link")
    assert isinstance(started, StartAttempt) and set(started.placement) == {0, 2}


def test_without_a_spare_the_run_waits_until_the_link_is_up_again() -> None:
    world = Links(spares=0)
    world.set(1, False)
    world.tell(5.0)
    assert kinds(world.all_exit()) == []
    assert kinds(world.tell(60.0)) == []
    world.set(1, True)
    notice, started = world.tell(1.0)
    assert isinstance(notice, Notice) and isinstance(started, StartAttempt)


def test_when_it_never_comes_up_the_run_ends_with_that_reason() -> None:
    world = Links(spares=0)
    world.set(1, False)
    world.tell(5.0)
    world.all_exit()
    (end,) = world.tell(310.0)
    assert end.reason == "2 nodes are needed, and only [0] came; link eth1 is down"


def test_a_third_flap_in_five_minutes_has_the_node_give_way_after_a_step() -> None:
    world = Links()
    assert set(kinds(world.flap(0) + world.flap(0))) == {"Notice"}
    (turn,) = [action for action in world.flap(0) if not isinstance(action, Notice)]
    assert isinstance(turn, RestartAtStep) and turn.node == 0
    evicted, started = world.turn()
    assert isinstance(evicted, Evict)
    assert evicted.rule == "a link of the node keeps going down, and a spare is there"
    assert isinstance(started, StartAttempt) and set(started.placement) == {2, 1}


def test_three_flaps_in_an_hour_are_reported_and_nothing_else() -> None:
    world = Links()
    for _ in range(3):
        world.flap(0, after=310.0)
    assert set(kinds(world.actions[1:])) == {"Notice"}


def test_without_a_spare_a_flapping_node_continues_and_gives_way_when_one_comes() -> None:
    world = Links(spares=0)
    for _ in range(4):
        assert set(kinds(world.flap(0))) == {"Notice"}
    world.join(2)
    assert kinds(world.tell(2.0)) == ["RestartAtStep"]


def test_a_spare_that_flaps_itself_is_none_for_others() -> None:
    world = Links()
    for _ in range(3):
        world.flap(2)
    for _ in range(3):
        world.flap(0)
    assert set(kinds(world.actions[1:])) == {"Notice"}


def test_the_only_link_of_a_node_is_reported_when_it_is_up_again() -> None:
    """No report was possible meanwhile, but the kernel has counted."""
    world = Links()
    was = world.links[1]
    world.links[1] = LinkStatus("eth1", True, was.downs + 1, 0)
    assert problems(world.tell(0.5)) == ["link eth1 of node 1 was down 1 time, and is up again"]


def test_a_count_of_yesterday_is_no_flap_of_today() -> None:
    world = Links()
    world.links[0] = LinkStatus("eth1", True, 40, 0)
    world.join(0, running=(0, 1), epoch=world.epoch)
    world = Links(spares=1)
    world.links[3] = LinkStatus("eth1", True, 40, 0)
    world.join(3)
    assert kinds(world.tell(5.0)) == []


def test_a_link_that_flaps_without_end_does_not_fill_the_journal() -> None:
    world = Links(spares=0)
    for _ in range(100):
        world.flap(0, 0.5, 0.5)
    assert len(problems(world.actions)) < 20


def test_damaged_packets_are_reported_once_a_minute() -> None:
    world = Links()
    for minute in range(3):
        world.links[0] = LinkStatus("eth1", True, 1, 1000 * minute)
        world.tell(61.0)
    assert problems(world.actions) == ["link eth1 of node 0 had 1000 damaged packets"] * 2


def test_a_broken_device_ends_the_attempt_names_its_rank_and_the_spare_takes_its_place() -> None:
    world = Links()
    blame, _ = world.trouble(1, 3)
    assert isinstance(blame, ReportFault) and (blame.cause, blame.node, blame.rank) == ("device", 1, 3)
    evicted, started = world.all_exit()
    assert isinstance(evicted, Evict) and (evicted.node, evicted.evidence["cause"]) == (1, "device")
    assert isinstance(started, StartAttempt) and set(started.placement) == {0, 2}


def test_a_device_that_can_wait_costs_no_step() -> None:
    world = Links()
    assert kinds(world.trouble(0, 0, can_wait=True) + world.tell(2.0)) == ["Notice", "RestartAtStep"]
    evicted, _ = world.turn()
    assert isinstance(evicted, Evict) and evicted.rule == "a device of the node fails, and a spare is there"


def test_a_lost_device_is_of_no_use_to_later_attempts() -> None:
    world = Links(spares=0)
    world.trouble(0, 1, lost=True)
    assert kinds(world.all_exit()) == [] and kinds(world.tell(5.0)) == []
    (started,) = world.join(2)
    assert isinstance(started, StartAttempt) and set(started.placement) == {2, 1}


def test_what_a_program_did_to_its_device_evicts_no_node() -> None:
    world = Links()
    (notice,) = world.trouble(0, 1, "user")
    assert isinstance(notice, Notice) and "the program's doing" in notice.problem
    blame, _ = world.exit(
        1, 1, "device", step=4, error="RuntimeError: CUDA error: unspecified launch failure"
    )
    assert isinstance(blame, ReportFault) and blame.cause == "user"
    assert kinds(world.all_exit()) == ["StartAttempt"]


@pytest.mark.parametrize("blame", ["user", "unknown"])
def test_a_message_without_a_device_fault_is_reported_once(blame: str) -> None:
    world = Links()
    assert kinds(world.trouble(0, 1, blame)) == ["Notice"]
    assert kinds(world.tell(30.0)) == []


def test_a_device_fault_reported_after_its_rank_has_ended_still_counts_for_the_node() -> None:
    """The driver of the devices is asked every few seconds; the rank's end is reported at once."""
    world = Links()
    world.exit(1, -6, "crash")
    world.all_exit()
    told = DeviceTrouble(1, 1, world.epoch - 1, "hardware", "Xid 94: memory")
    world.devices[0] = (told,)
    assert kinds(world.tell(2.0)) == ["Notice", "RestartAtStep"]


def test_a_clock_that_is_wrong_is_reported_once_and_a_slow_network_is_no_wrong_clock() -> None:
    clocks = ClockCheck()
    late = [clocks.observe(0, 100.0 + beat, 100.0 + beat + (3.0 if beat % 3 else 0.1)) for beat in range(60)]
    assert late == [None] * 60
    told = [clocks.observe(1, 105.0 + beat, 100.0 + beat + 0.1) for beat in range(60)]
    (notice,) = [one for one in told if one is not None]
    assert notice.problem == "the clock of node 1 is 4.9 s ahead of the driver's"
    behind = [clocks.observe(2, 98.0 + beat, 100.0 + beat) for beat in range(60)]
    assert [one.problem for one in behind if one] == ["the clock of node 2 is 2.0 s behind the driver's"]


def test_a_rank_that_computes_wrong_bits_gives_way_to_a_spare_after_its_step() -> None:
    world = Links()
    words = "rank 1: the check of product in a gap gave wrong values"
    told = DeviceTrouble(-1, 1, world.epoch, "hardware", words, can_wait=True)
    node = next(node for node, ranks in world.decider.state.placement.items() if 1 in ranks)
    world.devices[node] = (told,)
    actions = world.tell(3.0)
    assert any(words in problem for problem in problems(actions))
    assert [action.node for action in actions if isinstance(action, RestartAtStep)] == [node]
