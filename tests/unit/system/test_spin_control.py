"""OpenMP threads sleep at barriers while something else needs the cores, and spin when nothing does."""

import os
import subprocess
import sys

import pytest

from myriad.system.spin_control import SpinControl, control_spinning

_COMPUTE = """
import os, sys, torch
torch.set_num_threads(2)
torch.rand(512, 512) @ torch.rand(512, 512)
from myriad.system.spin_control import control_spinning
import myriad.system.spin_control
myriad.system.spin_control._POLL_SECONDS = 60.0  # this test decides
def threads():
    return len(os.listdir("/proc/self/task"))
def settles(count):
    import time
    for _ in range(200):
        if threads() == count:
            return True
        time.sleep(0.02)
before, watch = threads(), control_spinning(2)
assert watch is not None
watch.decide(0.01)
assert not watch.sleeps
watch.decide(0.5)  # beside a busy loop
assert watch.sleeps and settles(before + 1 + len(os.sched_getaffinity(0)))  # the watch, and a team of cores
mean = (torch.rand(512, 512) @ torch.rand(512, 512)).mean().item()
for _ in range(5):
    watch.decide(0.0)
assert not watch.sleeps and settles(before + 1), threads()  # libgomp has ended the idle team
watch.close()
print("spins again" if 100 < mean < 150 else mean)
"""


def test_an_idle_team_holds_back_spinning_and_goes_when_cores_are_free() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two OpenMP threads need two cores")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, "-c", _COMPUTE], env=environment, capture_output=True, text=True)
    assert done.stdout == "spins again\n", done.stderr


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_users_own_setting_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert control_spinning(2) is None


def test_one_thread_meets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert control_spinning(1) is None


def test_a_short_wait_for_a_core_changes_nothing() -> None:
    watch = SpinControl.__new__(SpinControl)
    watch._holding, watch._free_checks = None, 0
    for ratio in (0.04, 0.15, 0.19):
        watch.decide(ratio)
    assert not watch.sleeps
