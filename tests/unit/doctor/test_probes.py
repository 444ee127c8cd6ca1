"""Each probe on a sick node: it must see what is wrong, and it must come back."""

import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from myriad.doctor.hardware import Nic
from myriad.doctor.probes.host_probe import ClockTimes, check_clock, check_disk, check_limits, read_clocks
from myriad.doctor.probes.memory_probe import PATTERNS, fill, wrong_words
from myriad.doctor.probes.network_probe import check_counters, check_link, count_errors
from myriad.doctor.probes.probe_process import run_probe
from myriad.doctor.probes.rank_probe import find_outliers
from myriad.doctor.probes.tcp_flow import exchange, receive, send_for


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_flipped_bit_in_memory_is_found(pattern):
    words = np.empty(1000, np.uint64)
    fill(words, pattern)
    assert wrong_words(words, pattern) == 0
    words[617] ^= np.uint64(1 << 40)
    assert wrong_words(words, pattern) == 1


def test_lines_of_memory_that_answer_for_others_are_found():
    words = np.empty(1000, np.uint64)
    fill(words, None)
    words[512:] = words[:488]
    assert wrong_words(words, None) == 488


def test_a_healthy_folder_is_measured_and_left_as_it_was(tmp_path):
    readings = list(check_disk(tmp_path / "not" / "there" / "yet"))
    assert {reading.name for reading in readings} >= {
        "disk free space",
        "disk write",
        "disk read back",
        "disk sync",
    }
    assert not any(reading.problem for reading in readings) and not list(tmp_path.iterdir())


def nic_of(folder: Path, **files: object) -> Nic:
    for name, value in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return Nic("eth7", "192.0.2.7", "nic eth7 15b3:101e", folder, True)


def test_a_link_that_is_down_is_bad_and_an_unused_one_is_not(tmp_path):
    down = nic_of(tmp_path, operstate="down", carrier=0)
    assert "down" in next(check_link(down)).problem
    unused = Nic("eth8", "", "nic", tmp_path, True)
    assert next(check_link(unused)).skipped


def test_a_link_keeps_its_baseline_when_it_comes_up_slower(tmp_path):
    slow = nic_of(tmp_path, operstate="up", carrier=1, speed=100_000)
    state, speed = check_link(slow)
    assert not state.problem and (speed.value, speed.hardware) == (100_000, "nic eth7 15b3:101e")


def test_errors_count_when_they_grow_or_are_many(tmp_path):
    nic = nic_of(tmp_path, statistics__rx_crc_errors=7, statistics__rx_packets=10**9)
    nic_of(tmp_path, device__infiniband__mlx5_0__ports__1__counters__symbol_error=3)
    assert count_errors(nic) == 10
    assert not check_counters(nic, 10, 10).problem
    assert "3 new errors" in check_counters(nic, 7, 10).problem
    assert "10000000 errors" in check_counters(nic, 1e7, 1e7).problem


@pytest.mark.parametrize(
    ("cgroup", "base", "names"),
    [
        ("0::/a/b\n", "sys/fs/cgroup", ("memory.max", "memory.current")),
        ("4:memory:/a/b\n0::/\n", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_cgroup_that_is_nearly_full_is_reported_also_when_it_is_the_parent(tmp_path, cgroup, base, names):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for folder, values in (("a/b", (2**40, 2**20)), ("a", (2**30, 2**30 - 2**20))):
        (tmp_path / base / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (tmp_path / base / folder / name).write_text(f"{value}\n")
    found = {reading.name: reading for reading in check_limits(tmp_path)}
    assert "the kernel will kill a rank" in found["cgroup memory"].problem
    assert "no shared memory" in found["shared memory"].problem


def test_a_clock_that_is_set_during_the_probe_is_reported_and_its_rate_is_ignored():
    now = read_clocks()
    later = ClockTimes(now.realtime + 63.0, now.monotonic + 3.0, now.raw + 3.0)
    readings = list(check_clock(now, later))
    assert all(reading.advisory for reading in readings)
    assert readings[0].problem and abs(readings[0].value - 60) < 1e-3 and not readings[1].problem


def test_the_core_with_other_bits_is_named_and_without_a_majority_all_are():
    assert find_outliers({"core 0": "a", "core 1": "a", "core 2": "b"}) == ["core 2"]
    assert find_outliers({"core 0": "a", "core 1": "b"}) == ["core 0", "core 1"]
    assert find_outliers({"core 0": "a", "core 1": "a"}) == []


def test_bytes_that_arrive_different_are_counted():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"\0" * 5000)
        there.shutdown(socket.SHUT_WR)
        assert receive(here, 0.2).wrong_bytes == 5000


def test_a_silent_peer_gives_no_rate_and_is_not_waited_for():
    here, there = socket.socketpair()
    with here, there:
        start = time.monotonic()
        assert exchange(here, 0.1).bytes_per_second == 0
        assert time.monotonic() - start < 10
    here, there = socket.socketpair()
    there.close()
    with here:
        send_for(here, 0.1)


def test_a_probe_that_hangs_is_reported_and_leaves_nothing_running(tmp_path):
    (reading,) = run_probe("ranks", tmp_path, seconds=0.05)
    assert "no answer in 0.05 s" in reading.problem
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in shown


def test_a_probe_that_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "nowhere"))
    (reading,) = run_probe("memory", tmp_path)
    assert "died with exit code" in reading.problem
