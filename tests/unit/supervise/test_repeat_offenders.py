"""If these fail, a machine that breaks run after run is given to the next, or a good one to none."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from test_decisions import World
from test_driver import Executor, driving
from typer.testing import CliRunner

from myriad.cli.main import build_app
from myriad.supervise.driver.admission import append_offence, clear, offenders_path, read_offenders
from myriad.supervise.messages import EvictionAsked, NodeJoined, NodeRefused, NodeWanted
from myriad.supervise.policy.policy_actions import Evict
from myriad.supervise.policy.repeat_offenders import QUARANTINE_SECONDS, OffenceRecord, RepeatOffenders
from myriad.system.machine import MACHINE, machine_name

DAY = 86_400.0
NOW = 100 * DAY


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def of(*days_and_kinds: tuple[float, str]) -> RepeatOffenders:
    lemons = RepeatOffenders()
    for day, kind in days_and_kinds:
        lemons.add(OffenceRecord(day * DAY, "rack1", kind, "a reason", "run", 3))
    return lemons


@pytest.mark.parametrize(
    ("accused", "is_out"),
    [
        ([(99, "hang")], False),
        ([(98, "hang"), (99, "slow")], False),
        ([(80, "hang"), (98, "slow"), (99, "person")], True),
        ([(60, "hang"), (98, "hang"), (99, "hang")], False),
        ([(99, "hardware")], True),
        ([(99, "corruption")], True),
        ([(92, "hardware")], False),
        ([(80, "hang"), (81, "hang"), (82, "hang")], False),
    ],
)
def test_three_in_four_weeks_or_one_that_is_sure_and_for_a_week(accused: list, is_out: bool) -> None:
    found = of(*accused).quarantine("rack1", NOW)
    assert (found is not None) == is_out
    if found is not None:
        assert found.until == 99 * DAY + QUARANTINE_SECONDS and "a reason" in found.reason
    assert of(*accused).quarantine("rack2", NOW) is None


def test_the_doctor_frees_of_all_but_what_a_person_said_and_a_person_of_all() -> None:
    for kind in ("hang", "hang", "person", "hardware"):
        append_offence(OffenceRecord(NOW, "rack1", kind, "", "run", 3))
    clear("rack1", "doctor")
    assert [one.kind for one in read_offenders().accused["rack1"]] == ["person"]
    clear("rack1", "ann@desk")
    assert read_offenders().accused == {}


def test_invalid_lines_of_the_record_name_no_machine() -> None:
    good = {"time": NOW, "machine": "a", "kind": "hang", "reason": "", "run": "", "node": 1}
    bad = [good | {"time": "x"}, good | {"kind": "ugly"}, good | {"machine": 7}, {}, {"cleared_by": "ann"}]
    assert (
        list(RepeatOffenders([*bad, good]).accused) == ["a"]
        and len(RepeatOffenders([*bad, good]).accused["a"]) == 1
    )


def joined(node: int, machine: str, by: str) -> NodeJoined:
    return NodeJoined(node, 0, "here", 7, 2, 10**9, (), (), False, by, machine)


def test_an_evicted_machine_is_remembered_and_left_out_of_the_run() -> None:
    world = World(nodes=2, spares=-2)
    for node in range(3):
        world.handle(joined(node, f"rack{node}", f"rack{node}:{node}"))
    world.handle(EvictionAsked(1, "ann@desk", "", False))
    (evicted, _) = world.all_exit(code=3, cause="turned")
    assert isinstance(evicted, Evict) and (evicted.machine, evicted.accused) == ("rack1", "person")
    assert "asked for by a person" in world.decider.why_left_out(joined(1, "rack1", "rack1:99"))
    assert world.decider.why_left_out(joined(5, "rack5", "rack5:1")) == ""


def test_a_machine_with_several_nodes_is_not_recorded_for_one_of_them() -> None:
    """It is unknown whether the machine is at fault; only that node agent is excluded."""
    for machine in ("", "rack0"):
        world = World(nodes=2, spares=-2)
        for node in range(3):
            world.handle(joined(node, machine, f"rack0:{node}"))
        world.handle(EvictionAsked(1, "ann@desk", "", False))
        (evicted, _) = world.all_exit(code=3, cause="turned")
        assert isinstance(evicted, Evict) and evicted.machine == ""
        assert world.decider.why_left_out(joined(1, machine, "rack0:1"))
        assert world.decider.why_left_out(joined(1, machine, "rack0:9")) == ""


def test_a_node_that_was_only_lost_may_come_back() -> None:
    world = World(nodes=1, spares=-1)
    world.handle(joined(0, "rack0", "rack0:1"))
    world.wait(5)
    assert any(isinstance(action, Evict) for action in world.actions)
    assert world.decider.state.left_out == {}


def test_a_machine_in_quarantine_is_refused_by_the_driver_and_reported_once(tmp_path: Path) -> None:
    for _ in range(3):
        append_offence(OffenceRecord(time.time(), "rack1", "hang", "no rank goes on", "earlier", 3))

    async def drive() -> None:
        async with driving(tmp_path / "run", nodes=1) as (run, address):
            for message in (NodeWanted("rack1", "rack1", -1), joined(1, "rack1", "rack1:5")):
                executor = await Executor(run, 1).connect(address)
                executor.link.send(message)
                why = (await executor.link.receive((NodeRefused,))).why
                assert "quarantine" in why and "3 times" in why and "--pardon rack1" in why
                executor.link.close()
            while not run.read_events():
                await asyncio.sleep(0.01)
            (event,) = run.read_events()
            assert (event["event"], event["machine"]) == ("refusal", "rack1")

    (tmp_path / "run").mkdir()
    asyncio.run(drive())


def test_the_command_lists_and_pardons(monkeypatch: pytest.MonkeyPatch) -> None:
    append_offence(OffenceRecord(time.time(), "rack1/ab12", "hardware", "wrong sums", "earlier", 3))
    app, call = build_app(), CliRunner().invoke
    listed = json.loads(call(app, ["evict", "--list", "--json"]).stdout)
    assert [one["machine"] for one in listed["machines"]] == ["rack1/ab12"]
    assert listed["machines"][0]["quarantine_until"] > time.time() and "wrong sums" in listed["message"]
    assert "must be a machine with records" in str(call(app, ["evict", "--pardon", "rack7"]).exception)
    assert call(app, ["evict", "--pardon", "rack1"]).stdout == "rack1/ab12: pardoned\n"
    assert read_offenders().accused == {}
    for wrong in (
        ["evict"],
        ["evict", "run"],
        ["evict", "run", "1", "--list"],
        ["evict", "--list", "--pardon", "a"],
    ):
        assert call(app, wrong).exit_code != 0


def test_the_doctor_frees_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from myriad.cli.doctor_command import _free

    assert _free() == "" and not offenders_path().exists()
    append_offence(OffenceRecord(time.time(), machine_name(), "hardware", "wrong sums", "earlier", 3))
    assert _free() == machine_name() and _free() == ""


def test_a_launcher_can_declare_that_its_nodes_are_no_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef\n")
    assert machine_name(tmp_path).endswith("/01234567")
    monkeypatch.setenv(MACHINE, "")
    assert machine_name(tmp_path) == ""
