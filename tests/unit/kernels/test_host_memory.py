"""What breaks for the user: a third of each iteration on a CPU, spent on clearing pages just freed."""

import subprocess
import sys

import pytest

from myriad.kernels.host_memory import keep_freed_memory

_FAULTS = """
import resource, torch
from myriad.kernels.host_memory import keep_freed_memory
assert keep_freed_memory()
def churn():
    for _ in range(20):
        torch.empty(2**24).fill_(1.0)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults():
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_memory_that_was_freed_is_used_again_without_faults():
    assert page_faults() < 100


def test_a_c_library_without_the_call_is_left_alone(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert keep_freed_memory.__wrapped__() is False
