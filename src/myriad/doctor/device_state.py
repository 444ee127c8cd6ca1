"""The state of one accelerator as its driver reports it: errors, temperature, clocks, links."""

from pydantic import Field

from myriad.config import Config

__all__ = ["THROTTLE_REASONS", "DeviceState", "DeviceVitals", "bus_place", "throttle_names"]

THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of NVML's ``nvmlClocksEventReasons`` (nvml.h), which nvidia-smi prints as one hexadecimal number."""


class DeviceVitals(Config):
    """Measurements of a device; ``None``: its driver does not report the value."""

    temperature_celsius: float | None = None
    """Temperature of the processor."""
    slowdown_celsius: float | None = None
    """Temperature at which the hardware lowers the clocks."""
    memory_celsius: float | None = None
    """Temperature of the memory."""
    power_watts: float | None = None
    """Power that the device draws now."""
    power_limit_watts: float | None = None
    """Power that the driver allows."""
    sm_clock_mhz: float | None = None
    """Clock of the processors now."""
    max_sm_clock_mhz: float | None = None
    """Highest clock of this type of device."""
    throttle: tuple[str, ...] = ()
    """Why the clock is not higher, of `THROTTLE_REASONS`."""
    pcie_generation: int | None = None
    """Generation of the PCIe link now; lower while the device is idle."""
    max_pcie_generation: int | None = None
    """Highest generation that device and host can have."""
    pcie_width: int | None = None
    """Lanes of the PCIe link now."""
    max_pcie_width: int | None = None
    """Most lanes that device and host can have."""
    corrected_errors: int | None = None
    """Memory errors that were corrected, since the driver was loaded."""
    retired: int | None = None
    """Memory pages retired, or rows remapped, in the life of the device."""
    retirement_pending: bool = False
    """Whether a page or row will be replaced at the next reset of the device."""
    utilization_ratio: float | None = None
    """Share of the last moment in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    """Memory in use, in bytes."""
    memory_bytes: int | None = None
    """Memory of the device."""

    @property
    def is_busy(self) -> bool:
        """Whether the device computes; idle devices lower their clocks and links."""
        return (self.utilization_ratio or 0.0) >= 0.5 and "idle" not in self.throttle


class DeviceState(Config):
    """One device as its driver reports it now."""

    index: int = Field(ge=0)
    """Index of the device on its node."""
    name: str = "unknown"
    """Product name of the device."""
    bus: str = ""
    """PCI address, which identifies a device that no longer answers."""
    lost: bool = False
    """Whether the device has stopped answering."""
    uncorrected_errors: int = Field(0, ge=0)
    """Uncorrectable memory errors since the driver was loaded."""
    remap_failed: bool = False
    """A memory row could not be replaced."""
    xids: tuple[int, ...] = ()
    """Xids since the node started, in order."""
    vitals: DeviceVitals | None = None
    """Measurements of the device. Default: the driver was not queried."""


def throttle_names(bits: int) -> tuple[str, ...]:
    """Return the names of the reasons in a bit mask."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def bus_place(text: str) -> str:
    """Return the normalized PCI address: ``00000000:3B:00.0`` and ``0000:3b:00`` are the same."""
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}".lower()
