"""If these fail, a scenario that cannot be caused starts a run, or the same seed breaks it elsewhere."""

from pathlib import Path

import pytest

from myriad.errors import BadInputError
from myriad.faults.fault_kinds import KINDS
from myriad.faults.scenario import Fault, FaultScenario, Soak, load_scenario, planned_faults
from myriad.recipes import recipe_names

TWO = 'overrides = ["layout.dp=2"]\n'


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("name", recipe_names("faults"))
def test_every_built_in_scenario_can_be_caused_and_has_a_description(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.about
    assert planned_faults(scenario, scenario.resolved_job())


def test_every_kind_has_a_ready_scenario_for_whatever_it_is_done_to() -> None:
    ready = {
        (fault.kind, fault.where) for name in recipe_names("faults") for fault in load_scenario(name).faults
    }
    assert ready == {(name, where) for name, kind in KINDS.items() for where in kind.aims}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[faults]]\nkind = "melt"\n', 'faults.0.kind = "melt"'),
        ('[[faults]]\nkind = "kill"\nrank = 2\n', "faults.0.rank = 2: the job has 2 ranks, 0 to 1"),
        ('[[faults]]\nkind = "kill"\nwhere = "moon"\n', 'faults.0.where = "moon"'),
        ('[[faults]]\nkind = "hang"\nwhere = "driver"\n', 'faults.0.where = "driver": hang is done to rank'),
        ('[[faults]]\nkind = "kill"\nwhere = "driver"\nrank = 0\n', "faults.0.rank = 0: only with"),
        ('[[faults]]\nkind = "kill"\nnode = 0\n', "faults.0.node = 0: only with"),
        ('[[faults]]\nkind = "kill"\nwhere = "node"\nnode = 1\n', "faults.0.node = 1: the job has 1 node"),
        ('[[faults]]\nkind = "kill"\nstep = 21\n', "faults.0.step = 21: at most train.steps = 20"),
        ('[[faults]]\nkind = "kill"\nstep = 2\nseconds = 1\n', "faults.0.seconds = 1.0: a step or seconds"),
        ('[[faults]]\nkind = "kill"\nduring = "lunch"\n', 'faults.0.during = "lunch": one of starting'),
        ('[[faults]]\nkind = "hang"\nseconds = 1\n', "faults.0.seconds = 1.0: hang comes at a step"),
        (
            '[[faults]]\nkind = "hang"\nduring = "saving"\n',
            'faults.0.during = "saving": with hang one of load',
        ),
        ('[[faults]]\nkind = "damage"\nwhere = "checkpoint"\n', 'faults.0.where = "checkpoint": needs'),
        ('[[faults]]\nkind = "kill"\nstepp = 2\n', "faults.0.stepp = 2: unknown key; one of kind"),
        (
            "[soak]\nminutes = 1\nfaults_per_minute = 1\nkinds = ['hang']\n",
            'soak.kinds = "hang": one of kill',
        ),
        (
            '[[faults]]\nkind = "link-down"\nwhere = "node"\n',
            'faults.0.kind = "link-down": needs hosts = true',
        ),
        (
            'hosts = true\n[[faults]]\nkind = "link-down"\nwhere = "node"\n',
            'faults.0.kind = "link-down": needs resilience.spares > 0',
        ),
        (
            "[soak]\nminutes = 1\nfaults_per_minute = 1\nkinds = ['device-lost']\n",
            'soak.kinds = "device-lost"',
        ),
        ('[[faults]]\nkind = "kill"\nwhere = "redis"\n', 'faults.0.where = "redis": needs redis = true'),
        ('[[faults]]\nkind = "stop"\nwhere = "watch"\n', 'faults.0.where = "watch": needs watch = true'),
        ('standby = true\n[[faults]]\nkind = "kill"\n', "standby = true: needs redis = true"),
        (
            "[soak]\nminutes = 1\nfaults_per_minute = 1\nkinds = ['segv']\nwhere = ['driver']\n",
            'soak.kinds = "segv": one of kill, stop, freeze, slow-process',
        ),
        ("", "faults = []: at least one"),
        ("faultz = 1\n", "faultz = 1: unknown key; one of about"),
    ],
)
def test_what_cannot_be_caused_is_refused_in_one_line(written, text: str, told: str) -> None:
    with pytest.raises(BadInputError) as refused:
        load_scenario(written(TWO + text))
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_a_wrong_name_is_reported_with_the_right_ones() -> None:
    with pytest.raises(BadInputError, match="did you mean kill-rank"):
        load_scenario("kill-ranks")


def test_what_is_left_open_is_drawn_by_the_seed() -> None:
    def plan(seed: int) -> list[Fault]:
        soak = Soak(minutes=2, faults_per_minute=10)
        scenario = FaultScenario(
            overrides=("layout.dp=2",), seed=seed, faults=(Fault(kind="kill"),), soak=soak
        )
        return planned_faults(scenario, scenario.resolved_job())

    first, *soaked = plan(1)
    assert first.rank in (0, 1) and first.step is not None and 5 <= first.step <= 10
    assert plan(1) == [first, *soaked] != plan(2)
    seconds = [fault.seconds for fault in soaked]
    assert seconds == sorted(seconds) and seconds[-1] < 120 and 5 < len(seconds) < 40


def test_a_soak_hits_each_process_that_it_names_with_what_can_be_done_to_it() -> None:
    where = ("rank", "driver", "executor", "loader")
    soak = Soak(minutes=20, faults_per_minute=10, kinds=("kill", "segv", "slow-process"), where=where)
    scenario = FaultScenario(overrides=("layout.dp=2", "resilience.nodes=2"), soak=soak)
    drawn = planned_faults(scenario, scenario.resolved_job())
    assert {fault.where for fault in drawn} == set(where)
    assert {fault.where for fault in drawn if fault.kind == "segv"} == {"rank"}
    assert {fault.node for fault in drawn if fault.where == "executor"} == {0, 1}
    assert all((fault.rank is not None) == (fault.where == "rank") for fault in drawn)


def test_a_bit_flip_that_could_not_be_detected_is_refused(tmp_path: Path) -> None:
    flip = '\n[[faults]]\nkind = "flip"\nrank = 0\n'
    two = '"layout.dp=2", '
    for keys in (f'{two} "layout.zero=1"', '"layout.tp=2"', f'{two} "resilience.verify_every=0"'):
        (tmp_path / "it.toml").write_text(f'job = "tiny"\noverrides = [{keys}]\n{flip}')
        with pytest.raises(BadInputError, match=r"faults\.0\.kind = \"flip\": needs layout\.zero = 0"):
            load_scenario(str(tmp_path / "it.toml"))
