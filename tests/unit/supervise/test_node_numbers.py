"""Which machine is which node: two that are one would take turns for ever, and a machine that comes back with
another number would not find its snapshots."""

from myriad.supervise.driver.admission import NodeNumbers
from myriad.supervise.messages import NodeJoined


def joined(node: int, by: str) -> NodeJoined:
    return NodeJoined(node, 0, "10.0.0.1", 7, 2, 1, (), (), False, by)


def test_those_who_ask_get_the_next_free_number_and_keep_it_when_they_come_back() -> None:
    members = NodeNumbers()
    assert members.number_for("a", {0}, 0.0) == 1
    assert members.number_for("b", {0}, 0.0) == 2
    members.joined(joined(1, "a:10"), 1.0)
    members.joined(joined(2, "b:10"), 1.0)
    members.left(1)
    assert members.number_for("c", {0, 2}, 100.0) == 3
    assert members.number_for("a", {0, 2}, 100.0) == 1


def test_two_of_one_machine_are_two_nodes() -> None:
    members = NodeNumbers()
    assert members.number_for("a", (), 0.0) == 0
    assert members.number_for("a", (), 0.1) == 1, "the first is on its way"
    members.joined(joined(0, "a:10"), 1.0)
    members.joined(joined(1, "a:11"), 1.0)
    assert members.number_for("a", (), 200.0) == 2


def test_two_agents_never_get_the_same_node_number() -> None:
    members = NodeNumbers()
    members.joined(joined(0, "a:10"), 0.0)
    members.record_beat(0, 10.0)
    assert members.other_than(joined(0, "b:3"), 11.0) == "a:10"
    assert members.other_than(joined(0, "a:10"), 11.0) is None, "its own connection was cut"
    assert members.other_than(joined(1, "b:3"), 11.0) is None
    assert members.other_than(joined(0, "b:3"), 13.0) is None, "the machine was started anew"
    members.left(0)
    assert members.other_than(joined(0, "b:3"), 10.1) is None
