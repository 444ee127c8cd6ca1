"""If these fail, a run that was repaired badly is graded as good, or the other way round."""

from typing import Any

import pytest

from myriad.faults.fault_grades import OVERDUE, Evidence, Report, grade_end, grade_run
from myriad.faults.scenario import Fault

KILL = Fault(kind="kill", where="rank", rank=1, step=20)


def caused(number: int = 0, at: float = 100.0, step: int = 20) -> dict[str, Any]:
    return {"number": number, "time": at, "step": step}


def told(cause: str = "killed", rank: int = 1, at: float = 100.02) -> dict[str, Any]:
    return {"event": "fault", "time": at, "cause": cause, "rank": rank, "step": 20, "problem": f"rank {rank}"}


def again(at: float = 100.6, step: int = 19) -> list[dict[str, Any]]:
    started = {"event": "start", "time": at}
    return [{"event": "restart", "time": at - 0.5}, started, {"event": "resume", "time": at, "step": step}]


def graded(*faults: Fault, lines: list[dict[str, Any]], events: list[dict[str, Any]], **other: Any) -> Report:
    evidence = {"outcome": "finished", "equal": True, "metrics": [{"step_seconds": 0.05}]} | other
    return grade_run("it", faults, Evidence(caused=lines, events=events, **evidence))


def test_a_fault_that_is_found_named_and_repaired_meets_its_aims() -> None:
    report = graded(KILL, lines=[caused()], events=[told(), *again()])
    (grade,) = report.grades
    assert report.met
    assert grade.detected_seconds == pytest.approx(0.02)
    assert grade.trains_seconds == pytest.approx(0.58)
    assert (grade.culprit_right, grade.steps_lost) == (True, 0)


@pytest.mark.parametrize(
    ("events", "missed"),
    [
        ([], "not detected"),
        ([told(at=100.5), *again(101.0)], "detected after 0.50 s"),
        ([told(rank=0), *again()], "wrong culprit"),
        ([told(cause="hang"), *again()], "wrong culprit"),
        ([told()], "did not train again"),
        ([told(), *again(at=102.0)], "trained again after 1.98 s"),
        ([told(), *again(step=16)], "3 steps lost"),
    ],
)
def test_an_aim_that_is_missed_is_reported(events: list[dict[str, Any]], missed: str) -> None:
    report = graded(KILL, lines=[caused()], events=events)
    assert not report.met
    assert report.grades[0].missed[0].startswith(missed)


def test_a_fault_whose_time_never_came_is_no_success() -> None:
    assert graded(KILL, lines=[], events=[]).grades[0].missed == ["its time never came: the run was over"]


@pytest.mark.parametrize(
    ("extra", "other", "missed"),
    [
        ([], {"equal": False}, "weights differ"),
        ([], {"outcome": "it broke", "equal": None}, "the run was to finish: it broke"),
        ([{"event": "eviction", "time": 101.0, "node": 0}], {}, "1 healthy nodes evicted"),
        ([told(at=110.0), *again(111.0)], {}, "1 faults reported that were not caused"),
    ],
)
def test_the_run_as_a_whole_is_graded(
    extra: list[dict[str, Any]], other: dict[str, Any], missed: str
) -> None:
    report = graded(KILL, lines=[caused()], events=[told(), *again(), *extra], **other)
    assert missed in report.missed[0]


def test_two_faults_at_once_are_one_incident_and_a_third_later_is_its_own() -> None:
    other = Fault(kind="kill", where="rank", rank=0, step=20)
    later = Fault(kind="stop", where="rank", rank=0, step=30)
    lines = [caused(0), caused(1, 100.001), caused(2, 110.0, 30)]
    events = [told(), *again(), told("stopped", 0, 111.7), *again(112.3, 29)]
    report = graded(KILL, other, later, lines=lines, events=events)
    assert report.met
    assert [grade.report for grade in report.grades] == ["rank 1", "rank 1", "rank 0"]


def test_a_fault_during_the_recovery_of_another_is_reported_by_itself() -> None:
    other = Fault(kind="kill", where="rank", rank=0, step=20, during="loading")
    events = [told(), again()[0], told(rank=0, at=100.42), *again(101.0)]
    report = graded(KILL, other, lines=[caused(0), caused(1, 100.4)], events=events)
    assert [grade.report for grade in report.grades] == ["rank 1", "rank 0"]
    assert all(grade.culprit_right for grade in report.grades)


def test_a_program_that_is_wrong_is_to_stop_the_run_and_counts_each_time() -> None:
    fault = Fault(kind="exception", where="rank", rank=1, step=20)
    lines = [caused(), caused(at=101.0)]
    events = [told("user"), *again(), told("user", at=101.02)]
    stopped = {"outcome": "rank 1 ended with exit code 1", "equal": None}
    assert graded(fault, lines=lines, events=events, **stopped).met
    assert not graded(fault, lines=lines, events=events).met, "it went on as if nothing was wrong"


def test_a_hang_is_found_when_its_culprit_is_named_with_the_stacks() -> None:
    fault = Fault(kind="hang", where="rank", rank=1, step=20)
    events = [{"event": "diagnosis", "time": 114.5}, told("hang", at=115.6), *again(116.2)]
    report = graded(fault, lines=[caused()], events=events)
    assert report.met and report.grades[0].detected_seconds == pytest.approx(14.5)
    slow = graded(fault, lines=[caused()], events=events, metrics=[{"step_seconds": 4.0}])
    assert slow.grades[0].aim_seconds == 20.0


@pytest.mark.parametrize(
    ("ranks", "at", "missed"),
    [
        ([1], 108.0, []),
        ([0], 108.0, ["wrong culprit: somebody is slow"]),
        ([0, 1], 108.0, ["wrong culprit: somebody is slow"]),
        ([1], 170.0, ["detected after 70.00 s, not 60.00 s"]),
        (None, 0.0, ["not detected"]),
    ],
)
def test_a_slow_rank_is_to_be_named_alone(ranks: list[int] | None, at: float, missed: list[str]) -> None:
    """What is done then is no fault, and no false alarm."""
    fault = Fault(kind="slow", where="rank", rank=1, step=20)
    told = {
        "event": "diagnosis",
        "time": at,
        "culprit": "rank",
        "ranks": ranks,
        "problem": "somebody is slow",
    }
    events = [] if ranks is None else [told, *again(at + 1.0)]
    report = graded(fault, lines=[caused()], events=events)
    assert report.grades[0].missed == missed and report.false_alarms == 0


def test_a_process_that_is_replaced_without_a_word_to_the_driver() -> None:
    fault = Fault(kind="kill", where="driver", step=20)
    report = graded(fault, lines=[caused(), {"number": 0, "successor": 100.2}], events=[])
    assert report.met and report.grades[0].detected_seconds == pytest.approx(0.2)
    assert not graded(fault, lines=[caused()], events=[]).met


def test_a_save_that_failed_and_a_damaged_piece_are_reported_by_storage() -> None:
    full = Fault(kind="disk-full", where="storage", step=20)
    failed = {"event": "fault", "time": 100.4, "step": 20, "problem": "checkpoint not stored: no space"}
    assert graded(full, lines=[caused()], events=[failed]).met
    damage = Fault(kind="damage", where="checkpoint", step=20)
    found = failed | {"set_aside": ["step-20.damaged"]}
    events = [told(rank=0), *again(), found | {"time": 100.6}]
    assert graded(damage, lines=[caused()], events=events).met
    assert not graded(damage, lines=[caused()], events=events[:-1]).met, "nobody saw the damage"


@pytest.mark.parametrize(("step", "met"), [(24, True), (25, False)])
def test_wrong_numbers_are_to_be_found_when_replicas_are_compared_next(step: int, met: bool) -> None:
    flip = Fault(kind="flip", where="rank", rank=1, step=20)
    events = [{**told("corruption", at=101.0), "step": step}, *again(101.6, step=18)]
    report = graded(flip, lines=[caused()], events=events, verify_every=5)
    assert report.met == met
    assert met or report.grades[0].missed == ["found after 6 steps, not 5"]


def test_the_verdict_on_a_nan_is_not_taken_for_the_suspects_of_a_hang() -> None:
    nan, hang = Fault(kind="nan-once", rank=1, step=20), Fault(kind="hang", rank=1, step=30)
    verdict = {"event": "diagnosis", "time": 101.0, "verdict": "transient"}
    events = [told("nan"), *again(), verdict, told("hang", at=215.0), *again(215.6, step=29)]
    report = graded(nan, hang, lines=[caused(), caused(1, 200.5, 30)], events=events)
    assert report.met and report.grades[1].detected_seconds == pytest.approx(14.5)


def test_of_two_replicas_that_differ_it_is_right_to_suspect_both() -> None:
    flip = Fault(kind="flip", where="rank", rank=1, step=20)
    both = {key: value for key, value in told("corruption", at=101.0).items() if key != "rank"}
    events = [{**both, "evidence": {"suspects": [0, 1]}}, *again(101.6, step=18)]
    assert graded(flip, lines=[caused()], events=events, verify_every=5).met
    events[0]["evidence"] = {"suspects": [2, 3]}
    assert not graded(flip, lines=[caused()], events=events, verify_every=5).met


FLAP = Fault(kind="link-flap", where="node", node=1, step=20)
DOWN = Fault(kind="link-down", where="node", node=1, step=20)
CUT_OFF = Fault(kind="partition", where="node", node=1, step=20)


def heard(at: float = 100.3, node: int = 1, what: str = "link") -> dict[str, Any]:
    return {"event": "health", "time": at, "what": what, "node": node, "problem": f"{what} of node {node}"}


def lost(cause: str, at: float) -> dict[str, Any]:
    return {"event": "fault", "time": at, "cause": cause, "node": 1, "problem": "node 1"}


EVICTED = {"event": "eviction", "time": 103.6, "node": 1}


@pytest.mark.parametrize(
    ("events", "missed"),
    [
        ([heard()], []),
        ([], ["not detected"]),
        ([heard(at=103.0)], ["detected after 3.00 s, not 2.00 s"]),
        ([heard(node=0)], ["wrong culprit: link of node 0"]),
        ([heard(), *again()], ["all ranks restarted"]),
    ],
)
def test_a_flap_is_to_be_reported_and_nothing_else(events: list[dict[str, Any]], missed: list[str]) -> None:
    assert graded(FLAP, lines=[caused()], events=events).grades[0].missed == missed


def test_a_node_whose_link_flaps_is_to_give_way_and_all_to_train_again() -> None:
    flapping = Fault(kind="link-flapping", where="node", node=1, step=20)
    events = [heard(), EVICTED, *again(104.6)]
    report = graded(flapping, lines=[caused()], events=events)
    assert report.met and report.grades[0].trains_seconds == pytest.approx(0.5)
    kept = graded(flapping, lines=[caused()], events=[heard()])
    assert kept.grades[0].missed == ["the node did not give way", "did not train again"]


def test_a_link_that_stays_down_is_found_when_it_is_reported_and_its_node_is_to_give_way() -> None:
    events = [heard(), lost("link", 103.3), EVICTED, *again(104.6)]
    report = graded(DOWN, lines=[caused()], events=events)
    assert report.met and report.grades[0].detected_seconds == pytest.approx(0.3)
    kept = graded(DOWN, lines=[caused()], events=[heard(), lost("link", 103.3), *again(104.6)])
    assert kept.grades[0].missed == ["the node did not give way"]


@pytest.mark.parametrize(
    ("fenced", "missed"),
    [
        ([{"number": 0, "fenced": 103.2}], []),
        ([{"number": 0, "fenced": 105.0}], ["its own side ended after 5.00 s, not 3.50 s"]),
        ([], ["its own side ended after inf s, not 3.50 s"]),
    ],
)
def test_a_node_that_is_cut_off_is_to_end_its_ranks_itself(
    fenced: list[dict[str, Any]], missed: list[str]
) -> None:
    events = [lost("node", 103.4), EVICTED, *again(104.6)]
    assert graded(CUT_OFF, lines=[caused(), *fenced], events=events).grades[0].missed == missed


def test_the_node_of_a_broken_device_is_no_healthy_one() -> None:
    broken = Fault(kind="device-lost", where="rank", rank=1, step=20)
    told = {"event": "fault", "time": 104.0, "cause": "device", "rank": 1, "node": 1, "problem": "device"}
    report = graded(broken, lines=[caused()], events=[told, EVICTED | {"time": 104.1}, *again(105.0)])
    assert report.met and report.evicted_healthy == 0


SLOW = Fault(kind="slow-process", where="driver", step=20)


def test_a_process_that_is_slow_is_to_be_left_alone() -> None:
    assert graded(SLOW, lines=[caused()], events=[]).met
    storage = {"event": "fault", "time": 101.0, "problem": "the loader was stopped"}
    for event in (storage, {"event": "restart", "time": 101.0}):
        (grade,) = graded(SLOW, lines=[caused()], events=[event]).grades
        assert grade.missed and grade.missed[0].startswith(event["event"])


def test_away_for_a_while_is_reported_and_a_rank_that_dies_meanwhile_may_restart_all() -> None:
    stop = Fault(kind="stop", where="redis", step=20)
    away = {"event": "health", "time": 102.0, "what": "redis", "problem": "it is away"}
    assert graded(stop, lines=[caused()], events=[away]).met
    assert graded(stop, lines=[caused()], events=[away, *again(103.0)]).grades[0].missed == [
        "all ranks restarted"
    ]
    kill = Fault(kind="kill", where="rank", rank=1, after_seconds=1.0)
    events = [told(at=101.02), *again(101.6), away]
    assert graded(stop, kill, lines=[caused(), caused(1, 101.0)], events=events).met


@pytest.mark.parametrize(
    ("outcome", "equal", "problems", "missed"),
    [
        ("finished", True, [], []),
        ("rank 1 was killed too often", None, [], []),
        ("finished", False, [], ["losses or weights differ from those of the undisturbed run"]),
        (f"{OVERDUE} 300 s", None, [], [f"the run did not end: {OVERDUE} 300 s"]),
        ("finished", True, ["2 processes are left"], ["2 processes are left"]),
    ],
)
def test_of_many_faults_at_once_only_the_end_counts(
    outcome: str, equal: bool | None, problems: list[str], missed: list[str]
) -> None:
    report = graded(KILL, lines=[caused()], events=[], outcome=outcome, equal=equal)
    report = grade_end(report, problems)
    assert report.missed == missed and report.met == (not missed)
