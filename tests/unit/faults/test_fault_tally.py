"""If these fail, the one line that says how much is handled without a person says more than is true."""

from typing import Any

import pytest

from myriad.errors import BadInputError
from myriad.faults.fault_grades import Evidence, Grade, Report, failed_report, grade_run
from myriad.faults.fault_tally import incidents_of, tally
from myriad.faults.scenario import INCIDENTS, Fault, load_scenario, planned_faults, random_scenarios


def grade(**fields: Any) -> Grade:
    return Grade(fault="kill rank 0 at step 20", aim_seconds=0.25, **({"culprit_right": True} | fields))


def report(*grades: Grade, **fields: Any) -> Report:
    usual = {"outcome": "finished", "equal": True, "evicted_healthy": 0, "false_alarms": 0, "missed": []}
    return Report(scenario="it", grades=list(grades), **{**usual, **fields})


def test_of_a_run_that_failed_only_the_last_incident_was_not_handled() -> None:
    never = grade(caused=False, culprit_right=None)
    failed = report(grade(), grade(), grade(), never, outcome="it broke", equal=None, ended_right=False)
    assert [one.handled for one in incidents_of(failed)] == [True, True, False]


def test_of_a_run_whose_end_is_wrong_nothing_was_handled() -> None:
    assert tally([report(grade(), grade(), equal=False)]).handled_ratio == 0.0


def test_faults_close_to_each_other_are_one_incident() -> None:
    found = tally([report(grade(), grade(), grade(belongs=True), grade())])
    assert (found.singles, found.doubles, found.doubles_handled) == (2, 1, 1)


def test_who_was_to_be_named_and_was_not_counts_as_wrong() -> None:
    grades = (grade(names=True), grade(names=True, culprit_right=None), grade(culprit_right=None))
    found = tally([report(*grades)])
    assert (found.named, found.named_right) == (2, 1) and not found.met


def test_what_could_not_be_tried_was_not_handled() -> None:
    found = tally([failed_report("it", "no such thing"), report(grade())])
    assert (found.incidents, found.singles_handled) == (2, 1)


@pytest.mark.parametrize(
    ("singles", "handled", "evicted", "met"),
    [(100, 99, 0, True), (100, 98, 0, False), (100, 100, 1, False)],
)
def test_the_aims_of_many_faults(singles: int, handled: int, evicted: int, met: bool) -> None:
    good = report(*(grade(names=True) for _ in range(handled)), evicted_healthy=evicted)
    bad = [report(grade(names=True), outcome="it broke", ended_right=False)] * (singles - handled)
    assert tally([good, *bad]).met is met


def test_faults_at_random_are_the_same_for_a_seed_and_fit_into_their_runs() -> None:
    drawn = list(random_scenarios(INCIDENTS + 3, 5, 7))
    assert drawn == list(random_scenarios(INCIDENTS + 3, 5, 7))
    assert drawn != list(random_scenarios(INCIDENTS + 3, 5, 8))
    assert [len(scenario.faults) for _, scenario in drawn] == [INCIDENTS, 3, 10]
    jobs = [scenario.resolved_job() for _, scenario in drawn]
    assert jobs[0] == jobs[1] == jobs[2], "they share one undisturbed run"
    for _, scenario in drawn:
        last = max(fault.step or 0 for fault in planned_faults(scenario, jobs[0]))
        assert last < jobs[0].train.steps


def test_a_pair_is_graded_as_one_incident() -> None:
    first = Fault(kind="kill", where="rank", rank=1, step=20)
    second = Fault(kind="kill", where="rank", rank=0, after_seconds=0.5)
    caused = [{"number": 0, "time": 100.0, "step": 20}, {"number": 1, "time": 100.5, "step": 20}]
    told = {"event": "fault", "cause": "killed", "rank": 1, "problem": "rank 1", "time": 100.02}
    events = [
        told,
        {"event": "restart", "time": 100.1},
        {**told, "rank": 0, "problem": "rank 0", "time": 100.52},
        {"event": "restart", "time": 100.6},
        {"event": "start", "time": 101.2},
        {"event": "resume", "time": 101.2, "step": 19},
    ]
    evidence = Evidence(
        caused=caused, events=events, metrics=[{"step_seconds": 0.05}], outcome="finished", equal=True
    )
    (incident,) = incidents_of(grade_run("it", [first, second], evidence))
    assert incident.handled and incident.is_double
    assert all(one.names and one.culprit_right for one in incident.grades)


@pytest.mark.parametrize(
    ("faults", "key"),
    [
        ('[[faults]]\nkind = "kill"\nrank = 0\nafter_seconds = 1\n', "faults.0.after_seconds"),
        (
            '[[faults]]\nkind = "hang"\nrank = 0\nstep = 5\n[[faults]]\nkind = "kill"\nafter_seconds = 1\n',
            "faults.1.after_seconds",
        ),
        (
            '[[faults]]\nkind = "kill"\nstep = 5\n[[faults]]\nkind = "kill"\nstep = 9\nafter_seconds = 1\n',
            "faults.1.after_seconds",
        ),
    ],
)
def test_a_fault_after_another_that_cannot_be_is_refused(tmp_path: Any, faults: str, key: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f'job = "tiny"\noverrides = ["layout.dp=2"]\n{faults}')
    with pytest.raises(BadInputError) as refused:
        load_scenario(str(path))
    assert refused.value.key == key
