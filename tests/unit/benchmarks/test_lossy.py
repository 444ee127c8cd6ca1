"""A benchmark whose settings are not what their names say compares something else."""

from lossy import SETTINGS, Result, Setting, line, overrides
from myriad.job import load_job


def test_each_setting_is_a_job_and_has_a_name_of_its_own():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    for setting in SETTINGS:
        texts = [f"{key}={value}" for key, value in overrides(setting, 40_000).items()]
        comm = load_job("embedded-gpt", texts).comm
        assert bool(comm.lossy) == (not setting.name.startswith("exact"))
        assert comm.compress_gradients == (None if setting.gradients == "off" else setting.gradients)


def test_a_line_compares_with_the_exact_training():
    exact = Result(Setting(), 4, (3.0, 2.0, 1.5, 1.0), 8 * 2**20, [])
    lossy = Result(Setting("int8"), 4, (3.0, 2.0, 1.5, 1.25), 2 * 2**20, [])
    assert line(lossy, exact) == (
        "| gradients int8 | 3.0000 | 2.0000 | 1.5000 | 1.2500 | +0.2500 | 0.500 | 4.00 |"
    )
