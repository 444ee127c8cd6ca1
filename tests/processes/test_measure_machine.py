"""What breaks for the user: no plan for the machine at hand, or one from a file that cannot be read again."""

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from myriad.cli.measured_cluster import cluster_path, measure_to_file
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.rehearsal.shared_core_simulator import predict_iteration
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster
from myriad.train.calibration import compute_timings, measure_machine, transfer_timings


def be_hasty_rank(*arguments: Any) -> None:
    """In a process of its own, where nothing else is replaced: the smaller half of all, three times."""
    compute_timings._ENOUGH_SECONDS = 0.0
    compute_timings._PACE_SECONDS, compute_timings._PACE_SHORT_SECONDS = 0.1, 0.004
    compute_timings._STRIDES, compute_timings._STRIDE_SECONDS = 1, 0.0
    compute_timings._PACE_BLOCK, compute_timings._STACK = (64, 64, 1), 2
    compute_timings._ROWS, compute_timings._SWEEP_ELEMENTS = (64, 256), 2**21
    for name, kept in (("_MATRICES", 4), ("_LAYERS", 5), ("_HEADS", 2)):
        setattr(compute_timings, name, getattr(compute_timings, name)[:kept])
    measure_machine._TURN_ROUNDS, measure_machine._TURN_SECONDS = 1, 0.0
    measure_machine._SHAPES = ((64, 64, 1),)
    transfer_timings._ROUNDS, transfer_timings._CALLS, transfer_timings._REPEATS = 3, 1, 3
    transfer_timings._ELEMENTS = transfer_timings._ELEMENTS[:5]
    transfer_timings._SHAPES = transfer_timings._SHAPES[:2]
    transfer_timings._BESIDE_ROUNDS, transfer_timings._COMPUTES = 1, 5
    measure_machine._be_rank(*arguments)


def test_this_machine_is_measured_kept_and_planned_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure_machine, "_be_rank", be_hasty_rank)
    cluster = load_cluster(cluster_path("this-machine"))
    core, link = cluster.accelerator, cluster.links.node
    for core_in in (core, core.of(4)):
        for name in ("stream_bytes_per_second", "flash_ratio", "flash_backward"):
            assert getattr(core_in, name) > 0, name
    assert min(core.peak_flops_per_second, core.float32_flops_per_second, core.memory_bytes_per_second) > 0
    assert min(link.bytes_per_second, link.latency_seconds) > 0 and link.busy_ratio >= 0
    text = (tmp_path / "myriad" / "this-machine.toml").read_text()
    assert text.startswith("# Measured on 20")
    assert load_cluster(cluster_path("this-machine")) == cluster, "found, not measured again"
    model = ModelConfig(layers=2, hidden=64, heads=4, sequence=64, vocabulary=512)
    work = Workload(model, Layout(dp=2, tp=2), 8, value_bytes=4)
    assert predict_iteration(Costs(work, cluster)).seconds > 0


def wait_with_companions(pipe) -> None:
    with measure_machine._companions((64, 64, 1), 2) as companions:
        pipe.send(companions)
        time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they end when they are awake")
def test_processes_that_wait_for_their_turn_end_with_the_one_they_wait_for():
    """A measurement that is killed would leave stopped processes behind for ever."""
    here, there = multiprocessing.Pipe()
    waiting = multiprocessing.get_context("fork").Process(target=wait_with_companions, args=(there,))
    waiting.start()
    companions = here.recv()
    assert all(is_stopped(one) for one in companions)
    waiting.kill()
    waiting.join()
    deadline = time.monotonic() + 10
    while any(map(is_stopped, companions)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_stopped, companions))


def is_stopped(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with pytest.raises(BadInputError, match=r"\.toml"):
        measure_to_file(tmp_path)
