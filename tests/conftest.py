"""Lets tests of several processes share their harness, and holds for every test what time must not decide,
nor the GPUs of the machine: tests outside of `tests/gpu` are about CPUs, and see none."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

_TESTS = Path(__file__).parent
_SETTINGS = "_hypothesis_internal_use_settings"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VISIBLE_BEFORE = os.environ.get(_VISIBLE)

sys.path.insert(0, str(_TESTS / "processes"))

# Thousands of tests and their modules stay in memory: with Python's thresholds, collections of garbage that
# look at all of them took one fifteenth of the time of the unit tests.
gc.set_threshold(20_000, 50, 100)

# No deadline: how long an example takes depends on what else this machine runs. Each run has the same
# examples, so a change alone decides what fails; `pytest --hypothesis-profile explore` draws others. A
# property has 25, or as many as it says; MYRIAD_EXAMPLES=1000 gives each property a thousand.
settings.register_profile("myriad", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None)
settings.load_profile("myriad")


def pytest_configure(config: pytest.Config) -> None:
    """Before a module of tests asks for a GPU: what a process was once told of GPUs stays."""
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not any(path.is_relative_to(_TESTS / "gpu") or _TESTS.is_relative_to(path) for path in asked):
        os.environ[_VISIBLE] = ""


_LONGEST = (
    "test_slurm", "test_parity", "test_sigterm", "test_slow_rank", "test_nodes", "test_doctor_on_hosts",
    "test_standby", "test_interrupt", "test_s3_checkpoints", "test_captured", "test_hung_storage",
    "test_held_in_memory", "test_checkpoint", "test_launcher_stopped", "test_nodes_on_hosts",
    "test_recompute", "test_watch", "test_trainer", "test_comm_scheduler", "test_resume", "test_nccl_like",
    "test_hugging_face", "test_wrong_numbers", "test_own_model", "test_init_from", "test_fewer_replicas",
    "test_checkpoint_on_hosts", "test_faults_on_hosts", "test_recovery", "test_ray", "test_launch",
    "test_float16", "test_query_limits", "test_float8_kept", "test_in_process", "test_session",
    "test_hosts", "test_contenders", "test_socket_table",
)  # fmt: skip
"""Files whose tests start processes and together take longest: they come first, so that none is last."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first where all tests start processes, and give each property as many examples as
    the environment asks for."""
    if all(item.path.relative_to(_TESTS).parts[0] in ("processes", "hosts", "services") for item in items):
        place = {name: at for at, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if not (asked := os.environ.get("MYRIAD_EXAMPLES")):
        return
    for item in items:
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            own = getattr(test, _SETTINGS, None)
            more = settings(own or settings.default, max_examples=int(asked))
            setattr(getattr(test, "__func__", test), _SETTINGS, more)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """For the processes that the test and its fixtures start."""
    if not item.path.is_relative_to(_TESTS / "gpu"):
        os.environ[_VISIBLE] = ""
    elif _VISIBLE_BEFORE is None:
        os.environ.pop(_VISIBLE, None)
    else:
        os.environ[_VISIBLE] = _VISIBLE_BEFORE
