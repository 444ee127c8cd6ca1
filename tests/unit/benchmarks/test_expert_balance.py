"""A benchmark whose settings are not what their names say compares something else."""

from expert_balance import SETTINGS, Result, Setting, line, overrides
from myriad.job import load_job


def test_each_setting_is_a_job_and_has_a_name_of_its_own() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    for setting in SETTINGS:
        texts = [f"{key}={value}" for key, value in overrides(setting, 40_000).items()]
        model = load_job("embedded-gpt", texts).model
        assert (model.expert_capacity, model.balance_scope) == (setting.capacity, setting.scope)
        assert bool(model.lossy) == ("capacity" in setting.name)


def test_a_line_compares_with_the_dropless_training() -> None:
    first = Result(Setting(), (3.0, 2.0, 1.5, 1.0), 0.0, 1.5, [])
    bounded = Result(Setting(1.25), (3.0, 2.0, 1.5, 1.25), 0.125, 1.25, [])
    cells = "3.0000 | 2.0000 | 1.5000 | 1.2500 | +0.2500 | 12.5% | 1.25"
    assert line(bounded, first) == f"| capacity 1.25, loss of the sequence | {cells} |"
