"""A user's bug that reads as a device fault evicts good nodes one after the other; a device fault that reads
as a bug keeps a broken one."""

import json

import pytest

from myriad.doctor.devices import (
    XIDS,
    DeviceState,
    FileProvider,
    SmiProvider,
    check_devices,
    diagnose_device,
    parse_states,
)

ROWS = """\
0, NVIDIA H200, 00000000:18:00.0, 0
1, NVIDIA H200, 00000000:3B:00.0, 2
2, NVIDIA GeForce RTX 4090, 00000000:5E:00.0, [N/A]
"""


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_what_a_program_does_to_itself_is_the_users(number):
    fault = diagnose_device(DeviceState(index=0, xids=(number,)))
    assert fault.blame == "user" and f"Xid {number}" in fault.words
    assert judge_problem(DeviceState(index=0, xids=(number,))) == ""


def judge_problem(state: DeviceState) -> str:
    class One:
        def states(self):
            return [state]

    (reading,) = check_devices(One())
    return reading.problem


@pytest.mark.parametrize("number", [48, 63, 64, 74, 79, 92, 94, 95, 119])
def test_what_the_device_does_is_hardware_also_beside_a_users_fault(number):
    assert diagnose_device(DeviceState(index=0, xids=(13, number))).blame == "hardware"
    assert judge_problem(DeviceState(index=0, xids=(number,))) != ""


def test_an_unknown_xid_names_no_cause():
    assert 7777 not in XIDS
    assert diagnose_device(DeviceState(index=0, xids=(7777,))).blame == "unknown"
    assert judge_problem(DeviceState(index=0, xids=(7777,))) == ""


def test_lost_devices_failed_rows_and_memory_errors_are_hardware():
    for state in ({"lost": True}, {"remap_failed": True}, {"uncorrected_errors": 1}):
        assert diagnose_device(DeviceState(index=0, **state)).blame == "hardware"
    assert diagnose_device(DeviceState(index=0)) is None


def test_what_nvidia_smi_and_the_kernel_print_is_read():
    log = "6,1,2,-;NVRM: Xid (PCI:0000:18:00): 31, pid=7, name=python\n"
    log += "4,2,3,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=7\n"
    remapped = "00000000:18:00.0, 0\n00000000:3B:00.0, 1\n"
    states = parse_states(ROWS, remapped, log)
    assert [state.xids for state in states] == [(31,), (48,), ()]
    assert [state.uncorrected_errors for state in states] == [0, 2, 0]
    assert [state.remap_failed for state in states] == [False, True, False]
    assert states[0].name == "NVIDIA H200"


def test_a_device_that_is_lost_is_one_though_no_row_has_it():
    text = (
        ROWS + "Unable to determine the device handle for GPU0000:86:00.0: GPU is lost.  Reboot the system\n"
    )
    log = "NVRM: Xid (PCI:0000:86:00): 79, GPU has fallen off the bus.\n"
    lost = [state for state in parse_states(text, "", log) if state.lost]
    assert [(state.index, state.xids) for state in lost] == [(3, (79,))]


@pytest.mark.parametrize("text", ["", "\x00\xff", "a,b,c,d\n" * 3, "No devices were found\n"])
def test_texts_without_devices_are_no_devices(text):
    assert parse_states(text, text, text) == []


def test_nvidia_smi_is_asked_for_both(tmp_path):
    program, log = tmp_path / "nvidia-smi", tmp_path / "log"
    rows = "case $1 in --query-gpu=index,*) echo '0, NVIDIA H200, 00000000:18:00.0, 0';;"
    remapped = "--query-remapped-rows=*) echo '00000000:18:00.0, 1';; esac"
    program.write_text(f"#!/bin/sh\n{rows}\n{remapped}\n")
    program.chmod(0o755)
    log.write_text("NVRM: Xid (PCI:0000:18:00): 94, pid=7\n")
    (state,) = SmiProvider(str(program), log).states()
    assert state == DeviceState(index=0, name="NVIDIA H200", bus="0000:18:00", remap_failed=True, xids=(94,))


def test_a_provider_that_cannot_be_asked_is_reported(tmp_path):
    (reading,) = check_devices(SmiProvider(str(tmp_path / "no-such-program"), tmp_path / "log"))
    assert "cannot be asked" in reading.problem
    assert check_devices(None)[0].skipped


def test_faults_are_injected_by_a_file(tmp_path):
    path = tmp_path / "devices.json"
    provider = FileProvider(path)
    path.write_text(json.dumps([{"index": 0}, {"index": 1}]))
    assert not any(reading.problem for reading in check_devices(provider))
    path.write_text(json.dumps([{"index": 0}, {"index": 1, "xids": [79]}]))
    assert ["fallen off the bus" in reading.problem for reading in check_devices(provider)] == [False, True]
    path.write_text('[{"index": -1}]')
    assert "no list of device states" in check_devices(provider)[0].problem
