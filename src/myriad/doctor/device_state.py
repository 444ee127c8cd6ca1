"""The state of one accelerator as its driver reports it (errors, temperature, clocks, links), and its
provider NVML.

NVML is NVIDIA's management library, used where its Python package (nvidia-ml-py) is installed. Each value
is queried separately: a value that a device does not support is unknown, and the others are still there.
The functions are those of NVML's reference (docs.nvidia.com/deploy/nvml-api). Unlike nvidia-smi, a query
starts no process.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from pydantic import Field

from myriad.config import Config

__all__ = [
    "THROTTLE_REASONS",
    "DeviceState",
    "DeviceVitals",
    "NvmlProvider",
    "bus_place",
    "load_nvml",
    "throttle_names",
]

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


_LOST = 15
"""NVML's return code NVML_ERROR_GPU_IS_LOST."""
_GPU_SENSOR, _SLOWDOWN, _SM_CLOCK = 0, 1, 1
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_RETIREMENT_CAUSES = (0, 1)
_MEMORY_TEMPERATURE = 82
"""NVML's number of the field NVML_FI_DEV_MEMORY_TEMP."""
_MOST_DEVICES = 1024
_Ask = Callable[..., Any]


def load_nvml() -> ModuleType | None:
    """Return the package ``pynvml``; ``None`` if it is not installed or finds no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return None
    return pynvml


class NvmlProvider:
    """Queries NVML for every device of the node."""

    def __init__(self, nvml: Any, xids: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        """``nvml`` is the initialized package; ``xids`` returns the Xids of each PCI address until now."""
        self._nvml, self._xids = nvml, xids
        self._places: dict[int, str] = {}

    def states(self) -> Sequence[DeviceState]:
        """Return all devices. Raises ``OSError`` if NVML does not answer."""
        try:
            count = min(self._nvml.nvmlDeviceGetCount(), _MOST_DEVICES)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from None
        xids = self._xids()
        return [self._state(index, xids) for index in range(count)]

    def _state(self, index: int, xids: Mapping[str, Sequence[int]]) -> DeviceState:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            place = bus_place(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
            self._places[index] = place
            vitals = self._vitals(handle)
            remapped = self._ask("nvmlDeviceGetRemappedRows", handle)
            name = _text(self._ask("nvmlDeviceGetName", handle) or "unknown")
            uncorrected = self._ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE) or 0
        except nvml.NVMLError as error:
            place = self._places.get(index, "")
            lost = getattr(error, "value", None) == _LOST
            return DeviceState(index=index, bus=place, lost=lost, xids=tuple(xids.get(place, ())))
        return DeviceState(
            index=index,
            name=name,
            bus=place,
            uncorrected_errors=uncorrected,
            remap_failed=bool(remapped and remapped[3]),
            xids=tuple(xids.get(place, ())),
            vitals=vitals,
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the result of an NVML function; ``None`` if the device or this NVML does not support it.
        Raises ``NVMLError`` for a lost device."""
        function: _Ask | None = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == _LOST:
                raise
            return None

    def _vitals(self, handle: Any) -> DeviceVitals:
        ask = self._ask
        power, limit = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        use, memory = ask("nvmlDeviceGetUtilizationRates", handle), ask("nvmlDeviceGetMemoryInfo", handle)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # its name before driver 535
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        retired, pending = self._retired(handle)
        return DeviceVitals(
            temperature_celsius=ask("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
            slowdown_celsius=ask("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN),
            memory_celsius=self._memory_celsius(handle),
            power_watts=None if power is None else power / 1e3,
            power_limit_watts=None if limit is None else limit / 1e3,
            sm_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
            throttle=throttle_names(reasons or 0),
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            max_pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            max_pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            corrected_errors=ask("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _VOLATILE),
            retired=retired,
            retirement_pending=pending,
            utilization_ratio=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_bytes=None if memory is None else memory.total,
        )

    def _retired(self, handle: Any) -> tuple[int | None, bool]:
        """Return the number of remapped rows (since Ampere) or retired pages (before), and whether more are
        pending."""
        if (rows := self._ask("nvmlDeviceGetRemappedRows", handle)) is not None:
            return rows[0] + rows[1], bool(rows[2])
        pages = [self._ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in _RETIREMENT_CAUSES]
        pending = bool(self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle))
        return (None if None in pages else sum(map(len, pages))), pending

    def _memory_celsius(self, handle: Any) -> float | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_MEMORY_TEMPERATURE])
        if not values or values[0].nvmlReturn != 0:
            return None
        found = int(values[0].value.uiVal)
        return found if found > 0 else None


def _text(value: bytes | str) -> str:
    """Return text: NVML's strings are bytes in some versions of the package."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
