"""If these fail, a GPU that runs hot, slow or on half of its lanes is not noticed, or a healthy one is.

What nvidia-smi prints and the values of the imitated NVML are those of a real H100 (driver 590.48.01), idle
and under load, as recorded in github.com/utkuozdemir/nvidia_gpu_exporter, internal/captures, file
linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt. The functions and the layout of what they return are those
of the package nvidia-ml-py, 13.580.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from myriad.doctor import devices
from myriad.doctor.device_state import (
    DeviceState,
    DeviceVitals,
    NvmlProvider,
    bus_place,
    load_nvml,
    throttle_names,
)
from myriad.doctor.devices import _VITALS, SmiProvider, find_provider, parse_states
from myriad.supervise.agent.device_process import DeviceWarning, GpuWarnings

NA, DEPRECATED = "[N/A]", "[Requested functionality has been deprecated]"
IDLE = {
    "pci.bus_id": "00000000:00:09.0", "temperature.gpu": "41", "temperature.memory": "48",
    "power.draw": "69.85", "enforced.power.limit": "700.00", "clocks.sm": "345", "clocks.max.sm": "1980",
    "pcie.link.gen.current": "5", "pcie.link.gen.max": "5", "pcie.link.width.current": "16",
    "pcie.link.width.max": "16", "ecc.errors.corrected.volatile.total": "0",
    "retired_pages.single_bit_ecc.count": NA, "retired_pages.double_bit.count": NA,
    "retired_pages.pending": NA, "utilization.gpu": "0", "memory.used": "0", "memory.total": "81559",
    "reasons": "0x0000000000000001",
}  # fmt: skip
LOAD = IDLE | {
    "temperature.gpu": "59", "temperature.memory": "54", "power.draw": "631.95", "clocks.sm": "1980",
    "utilization.gpu": "100", "memory.used": "19818", "reasons": "0x0000000000000000",
}  # fmt: skip
ROW = "0, NVIDIA H100 80GB HBM3, 00000000:00:09.0, 0\n"
REMAPPED = "00000000:00:09.0, 0, 0, No, No\n"


def csv(values: dict[str, str]) -> str:
    return ", ".join(values[name] for name in (*_VITALS, "reasons")) + "\n"


def vitals_of(values: dict[str, str], remapped: str = REMAPPED) -> DeviceVitals:
    (state,) = parse_states(ROW, remapped, "", csv(values))
    assert state.vitals is not None
    return state.vitals


def test_the_output_of_nvidia_smi_for_an_h100_is_parsed() -> None:
    idle, load = vitals_of(IDLE), vitals_of(LOAD)
    assert (idle.temperature_celsius, idle.power_watts, idle.sm_clock_mhz) == (41.0, 69.85, 345.0)
    assert (load.power_limit_watts, load.max_sm_clock_mhz, load.memory_celsius) == (700.0, 1980.0, 54.0)
    assert (load.pcie_generation, load.pcie_width, load.max_pcie_width) == (5, 16, 16)
    assert (idle.throttle, load.throttle) == (("idle",), ())
    assert (idle.is_busy, load.is_busy) == (False, True)
    assert (load.retired, load.retirement_pending, load.memory_used_bytes) == (0, False, 19818 * 2**20)


def test_what_a_device_driver_does_not_report_is_unknown() -> None:
    blank = dict.fromkeys(IDLE, NA) | {"pci.bus_id": IDLE["pci.bus_id"], "power.draw": DEPRECATED}
    vitals = vitals_of(blank, "")
    assert vitals == DeviceVitals() and not vitals.is_busy
    (state,) = parse_states(ROW, REMAPPED, "", 'Field "clocks.sm" is not a valid field to query.\n')
    assert state.vitals is None and state.name == "NVIDIA H100 80GB HBM3"


def test_retired_pages_of_older_devices_and_remapped_rows_of_newer_ones_count() -> None:
    old = LOAD | {"retired_pages.single_bit_ecc.count": "3", "retired_pages.double_bit.count": "1"}
    pages = vitals_of(old | {"retired_pages.pending": "Yes"}, "")
    assert (pages.retired, pages.retirement_pending) == (4, True)
    rows = vitals_of(LOAD, "00000000:00:09.0, 2, 1, Yes, No\n")
    assert (rows.retired, rows.retirement_pending) == (3, True)
    (failed,) = parse_states(ROW, "00000000:00:09.0, 2, 1, No, Yes\n", "")
    assert failed.remap_failed


def test_nvidia_smi_is_asked_with_the_name_that_it_knows(tmp_path: Path) -> None:
    """Drivers since 535 call throttle reasons event reasons."""
    program = tmp_path / "nvidia-smi"
    new, old = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
    program.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\ncase "$1" in\n'
        f"--query-gpu=index,*) printf '{ROW}';;\n"
        f"""*{old}*) echo 'Field "{old}" is not a valid field to query.'; exit 2;;\n"""
        f"*{new}*) printf '{csv(LOAD)}';;\n--query-remapped-rows=*) printf '{REMAPPED}';;\nesac\n"
    )
    program.chmod(0o755)
    provider = SmiProvider(str(program), tmp_path / "log")
    for _ in range(2):
        (state,) = provider.states()
        assert state.vitals is not None and state.vitals.sm_clock_mhz == 1980
    assert (tmp_path / "asked").read_text().count(old) == 1


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """The functions of pynvml that are asked, with values of the recorded H100 under load."""

    NVMLError = NVMLError

    def __init__(self, count: int = 1) -> None:
        self.count, self.lost, self.unsupported = count, set[int](), set[str]()
        self.lost_at = ""
        self.values: dict[str, Any] = {
            "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetRetiredPagesPendingStatus": 0,
            "nvmlDeviceGetRetiredPages": [],
            "nvmlDeviceGetTemperature": 59,
            "nvmlDeviceGetTemperatureThreshold": 89,
            "nvmlDeviceGetPowerUsage": 631950,
            "nvmlDeviceGetEnforcedPowerLimit": 700000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=100, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=81559 * 2**20, free=0, used=19818 * 2**20),
            "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=54))],
        }

    def nvmlInit(self) -> None:
        if "nvmlInit" in self.unsupported:
            raise NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:
        if self.count < 0:
            raise NVMLError(999)
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        if handle in self.lost:
            raise NVMLError(15)
        return SimpleNamespace(busId=f"00000000:{9 + handle:02X}:00.0".encode())

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def ask(handle: int, *arguments: Any) -> Any:
            if handle in self.lost or name == self.lost_at:
                raise NVMLError(15)
            if name in self.unsupported or name not in self.values:
                raise NVMLError(3)
            return self.values[name]

        return ask


def test_nvml_and_nvidia_smi_give_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    (state,) = NvmlProvider(fake, lambda: {"0000:09:00": [31]}).states()
    assert (state.name, state.bus, state.xids) == ("NVIDIA H100 80GB HBM3", "0000:09:00", (31,))
    assert state.vitals == vitals_of(LOAD).model_copy(update={"slowdown_celsius": 89})


def test_nvml_without_some_functions_gives_the_rest() -> None:
    fake = FakeNvml()
    fake.unsupported = {"nvmlDeviceGetRemappedRows", "nvmlDeviceGetCurrentClocksEventReasons"}
    fake.unsupported |= {"nvmlDeviceGetFieldValues", "nvmlDeviceGetTotalEccErrors"}
    fake.values |= {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x44, "nvmlDeviceGetRetiredPages": [1, 2]}
    (state,) = NvmlProvider(fake, dict).states()
    assert state.vitals is not None and state.vitals.retired == 4
    assert state.vitals.throttle == ("software power cap", "hardware thermal slowdown")
    assert (state.vitals.memory_celsius, state.uncorrected_errors) == (None, 0)


def test_a_device_that_falls_off_the_bus_is_lost_with_its_place() -> None:
    fake = FakeNvml(2)
    provider = NvmlProvider(fake, dict)
    provider.states()
    fake.lost = {1}
    healthy, lost = provider.states()
    assert (healthy.lost, lost.lost, lost.bus) == (False, True, "0000:0a:00")
    fake.lost, fake.lost_at = set(), "nvmlDeviceGetName"  # between two of its values
    assert [one.lost for one in provider.states()] == [True, True]
    fake.count = -1
    with pytest.raises(OSError, match="NVML"):
        provider.states()


def test_nvml_is_used_where_it_is_installed_and_nvidia_smi_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, version = FakeNvml(), tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.touch()
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert isinstance(find_provider(tmp_path), NvmlProvider)
    fake.unsupported = {"nvmlInit"}
    assert load_nvml() is None and isinstance(find_provider(tmp_path), SmiProvider)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert isinstance(find_provider(tmp_path), SmiProvider)
    assert find_provider(tmp_path / "elsewhere") is None


def node(**changes: Any) -> list[DeviceState]:
    """Four H100s under load; ``changes``: of the last one."""
    load = vitals_of(LOAD)
    states = [DeviceState(index=at, bus=f"b{at}", name="H100", vitals=load) for at in range(4)]
    return [*states[:3], states[3].model_copy(update={"vitals": load.model_copy(update=changes)})]


def looks(warnings: GpuWarnings, count: int, **changes: Any) -> list[DeviceWarning]:
    return [one for _ in range(count) for one in warnings.observe(node(**changes))]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"throttle": throttle_names(0x40), "temperature_celsius": 88, "sm_clock_mhz": 1755},
            "thermal slowdown",
            "hardware thermal slowdown: 88 C, 1,755 MHz of 1,980",
        ),
        ({"throttle": throttle_names(0x28)}, "thermal slowdown", "software thermal slowdown: 59 C"),
        ({"throttle": throttle_names(0x88)}, "power brake", "the power supply slows it down"),
        ({"throttle": throttle_names(0x08)}, "hardware slowdown", "the hardware slows it down"),
        ({"pcie_width": 8}, "PCIe width", "PCIe x8 instead of x16"),
        ({"pcie_generation": 1}, "PCIe generation", "PCIe generation 1 instead of 5"),
        ({"sm_clock_mhz": 1200}, "slower than its peers", "1,200 MHz, the node's others 1,980 MHz"),
        ({"retirement_pending": True}, "retirement pending", "replaced at the next reset"),
        (
            {"slowdown_celsius": 89, "temperature_celsius": 87},
            "near its slowdown temperature",
            "87 C, slows down at 89 C",
        ),
    ],
)
def test_a_sign_of_trouble_begins_once_and_ends(changes: dict[str, Any], kind: str, words: str) -> None:
    warnings = GpuWarnings()
    assert looks(warnings, 3) == []
    assert looks(warnings, 1, **changes) == []
    (begun,) = looks(warnings, 20, **changes)
    assert (begun.device, begun.kind, begun.over) == (3, kind, False) and words in begun.words
    assert looks(warnings, 5) == [] and looks(warnings, 1, **changes) == [], "it is the same trouble"
    (ended,) = looks(warnings, 6)
    assert (ended.kind, ended.over) == (kind, True)


def test_a_sign_seen_in_one_poll_is_not_reported() -> None:
    warnings = GpuWarnings()
    for _ in range(5):
        assert looks(warnings, 1, throttle=throttle_names(0x40)) == looks(warnings, 1) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"throttle": throttle_names(0x04), "power_watts": 699.8, "sm_clock_mhz": 1755},
        {
            "utilization_ratio": 0.0,
            "throttle": throttle_names(0x01),
            "sm_clock_mhz": 345,
            "pcie_generation": 1,
        },
        {"sm_clock_mhz": None, "utilization_ratio": None, "pcie_width": None, "temperature_celsius": None},
    ],
)
def test_full_power_idleness_and_silence_are_no_trouble(changes: dict[str, Any]) -> None:
    assert looks(GpuWarnings(), 10, **changes) == []


def test_memory_that_wears_out_is_reported_each_time() -> None:
    warnings = GpuWarnings()
    assert looks(warnings, 3, retired=2) == []
    (first,) = looks(warnings, 3, retired=3)
    assert (first.kind, first.over) == ("memory wears out", None) and "3 in all" in first.words
    assert len(looks(warnings, 3, retired=5)) == 1


def test_places_are_the_same_however_they_are_written() -> None:
    assert bus_place("00000000:3B:00.0") == bus_place("0000:3b:00") == "0000:3b:00"
