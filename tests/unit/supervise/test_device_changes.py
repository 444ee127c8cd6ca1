"""If these fail, a device that breaks is not reported, or one that broke last week is reported today."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from myriad.dashboard.node_measurements import GpuSampleReader, gpu_sentence
from myriad.dashboard.prometheus import RunMetrics
from myriad.doctor.devices import (
    DEVICES,
    DeviceState,
    KernelLog,
    SmiProvider,
    parse_states,
    parse_xids,
)
from myriad.run import Run
from myriad.supervise.agent import device_monitor
from myriad.supervise.agent.device_monitor import DeviceMonitor
from myriad.supervise.agent.device_process import DeviceChange, DeviceChanges


def two(**second: object) -> list[DeviceState]:
    return [DeviceState(index=0, bus="18"), DeviceState(index=1, bus="3b", **second)]


def news_after(*later: list[DeviceState], first: list[DeviceState] | None = None) -> list[DeviceChange]:
    news = DeviceChanges()
    news.observe(two() if first is None else first)
    return [one for states in later for one in news.observe(states)]


def test_what_was_there_before_is_no_news() -> None:
    old = two(uncorrected_errors=3, xids=(79, 31))
    assert news_after(old, old, first=old) == []


@pytest.mark.parametrize(
    ("change", "blame", "words"),
    [
        ({"xids": (94,)}, "hardware", "Xid 94: uncorrectable memory error, contained to one program"),
        ({"xids": (31,)}, "user", "Xid 31: memory page fault"),
        ({"xids": (7777,)}, "unknown", "Xid 7777: look it up"),
        ({"uncorrected_errors": 2}, "hardware", "2 uncorrectable memory errors"),
        ({"remap_failed": True}, "hardware", "a memory row could not be replaced"),
        ({"lost": True}, "hardware", "it no longer answers"),
    ],
)
def test_a_new_device_fault_is_reported_once(change: dict[str, object], blame: str, words: str) -> None:
    (one,) = news_after(two(**change), two(**change))
    assert (one.device, one.blame) == (1, blame) and one.words.startswith(words)


def test_the_same_number_again_is_news_again() -> None:
    assert len(news_after(two(xids=(94,)), two(xids=(94, 94)))) == 2


def test_a_device_that_is_in_no_list_any_more_is_lost() -> None:
    (one,) = news_after(two()[:1], two()[:1])
    assert (one.device, one.lost) == (1, True)


def test_a_lost_device_is_known_by_its_place_and_the_silence_of_the_others_is_no_loss() -> None:
    """nvidia-smi may then report nothing else."""
    rows = "0, H200, 00000000:18:00.0, 0\n1, H200, 00000000:3B:00.0, 0\n"
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system\n"
    found = news_after(parse_states(lost, "", ""), first=parse_states(rows, "", ""))
    assert [(one.device, one.lost) for one in found] == [(1, True)]


def test_a_driver_that_reports_no_device_has_lost_none() -> None:
    found = news_after([], [], [], [], [])
    assert [(one.device, one.blame) for one in found] == [(-1, "unknown")]


def test_a_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    program, log = tmp_path / "smi", tmp_path / "kmsg"
    program.write_text('#!/bin/sh\ncase "$1" in *index*) echo "0, H200, 00000000:3B:00.0, 0";; esac\n')
    program.chmod(0o755)
    log.write_text("NVRM: Xid (PCI:0000:3b:00): 31, pid=7\n")
    provider, news = SmiProvider(str(program), log), DeviceChanges()
    assert news.observe(provider.states()) == []
    with log.open("a") as file:
        file.write("usb 1-1: new device\nNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    (one,) = news.observe(provider.states())
    assert one.words == "Xid 79: the device has fallen off the bus"
    assert news.observe(provider.states()) == []


def watched(watch: DeviceMonitor, until: int) -> None:
    async def run() -> None:
        task = asyncio.create_task(watch.watch())
        while len(watch.found) < until:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_node_agent_is_notified_of_the_device_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process beside it, as with a real driver; devices as ranks see them."""
    states = [{"index": 0}, {"index": 1}, {"index": 2, "lost": True}]
    (tmp_path / "node-4.json").write_text(json.dumps(states))
    monkeypatch.setenv(DEVICES, str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    watch = DeviceMonitor(4)
    watch.begin(3, (6, 7))
    watched(watch, 1)
    (found,) = watch.found
    assert (found.device, found.rank, found.epoch, found.lost) == (2, 7, 3, True)
    watch.begin(4, (6, 7))
    assert watch.found == (found,), "it is still lost"


def test_a_device_driver_that_hangs_delays_no_rank_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "devices")  # whoever opens it waits for ever
    monkeypatch.setenv(DEVICES, str(tmp_path / "devices"))
    monkeypatch.setattr(device_monitor, "_AGAIN_SECONDS", 0.05)
    watch = DeviceMonitor(0, silent_seconds=0.2)
    watched(watch, 1)
    (found,) = watch.found
    assert (found.device, found.blame) == (-1, "unknown") and "has not answered for 0.2 s" in found.words


def test_without_devices_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    monkeypatch.setattr(device_monitor, "provider_of", lambda node: None)
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    watch = DeviceMonitor(0)
    asyncio.run(watch.watch())
    assert watch.found == ()


def test_a_hot_device_is_an_event_with_its_rank_and_what_it_measures_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vitals = {"temperature_celsius": 88, "throttle": ["hardware thermal slowdown"], "sm_clock_mhz": 1200}
    vitals |= {"max_sm_clock_mhz": 1980, "utilization_ratio": 1.0, "pcie_width": 8, "max_pcie_width": 16}
    path = tmp_path / "devices.json"
    path.write_text(json.dumps([{"index": 0}, {"index": 1, "name": "H100", "bus": "3b", "vitals": vitals}]))
    monkeypatch.setenv(DEVICES, str(path))
    monkeypatch.setattr(device_monitor, "POLL_SECONDS", 0.02)
    run = Run(tmp_path / "run")
    run.path.mkdir()
    watch = DeviceMonitor(5, run=run)
    watch.begin(1, (10, 11))

    async def until_told() -> None:
        task = asyncio.create_task(watch.watch())
        while len(run.read_events()) < 2:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_told(), 60))
    told = {event["kind"]: event for event in run.read_events() if not event["over"]}
    hot = told["thermal slowdown"]
    assert (hot["event"], hot["what"], hot["node"], hot["rank"], hot["over"]) == (
        "health",
        "gpu",
        5,
        11,
        False,
    )
    assert hot["problem"].startswith("device 1 of node 5 (rank 11): hardware thermal slowdown: 88 C")
    assert "PCIe x8 instead of x16" in told["PCIe width"]["problem"]
    look = GpuSampleReader(run.counters_path).newest()[5]
    assert (look.count, look.hottest_celsius, look.narrow_links) == (1, 88, 1)
    assert gpu_sentence({5: look}).startswith("1 x H100, hottest 88 C (node 5), lowest clock 61% (node 5)")
    assert (
        b'myriad_node_gpu_throttled{node="5",reason="hardware thermal slowdown"} 1.0'
        in RunMetrics(run).text()
    )


def test_a_program_that_faults_without_end_fills_no_memory_and_hides_no_other_device(tmp_path: Path) -> None:
    """Thousands of Xids a minute, each of which would be searched again at each look."""
    log = tmp_path / "kmsg"
    line = "NVRM: Xid (PCI:0000:{}:00): {}, pid=1\n"
    log.write_text(line.format("3b", 13) * 5000 + line.format("18", 79))
    kernel = KernelLog(log)
    found = parse_xids(kernel.read())
    assert found["0000:18:00"] == [79] and 900 < len(found["0000:3b:00"]) <= 1000


def test_the_alarm_of_a_hot_device_ends_with_the_process_that_watched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process would not know of it: the alarm would last until the end of the run."""
    vitals = {"temperature_celsius": 88, "throttle": ["hardware thermal slowdown"]}
    path = tmp_path / "devices.json"
    path.write_text(json.dumps([{"index": 0, "vitals": vitals}]))
    monkeypatch.setenv(DEVICES, str(path))
    monkeypatch.setattr(device_monitor, "POLL_SECONDS", 0.02)
    run = Run(tmp_path / "run")
    run.path.mkdir()
    watch = DeviceMonitor(5, run=run)

    async def end_the_process_once_it_has_warned() -> None:
        task = asyncio.create_task(watch.watch())
        while not run.read_events():
            await asyncio.sleep(0.02)
        watch._asked[0].kill()
        while len(run.read_events()) < 2:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(asyncio.wait_for(end_the_process_once_it_has_warned(), 60))
    begun, ended = run.read_events()
    assert (begun["over"], ended["over"]) == (False, True) and begun["kind"] == ended["kind"]
    assert {begun["device"], ended["device"]} == {"0"}
