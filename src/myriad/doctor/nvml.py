"""Devices by NVML, NVIDIA's management library, where its Python package (nvidia-ml-py) is installed.

Each value is queried separately: a value that a device does not support is unknown, and the others are still
there. The functions are those of NVML's reference (docs.nvidia.com/deploy/nvml-api). Unlike nvidia-smi, a
query starts no process.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from myriad.doctor.device_state import DeviceState, DeviceVitals, bus_place, throttle_names

__all__ = ["NvmlProvider", "load_nvml"]

_LOST = 15
"""NVML's return code NVML_ERROR_GPU_IS_LOST."""
_GPU_SENSOR, _SLOWDOWN, _SM_CLOCK = 0, 1, 1
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_RETIREMENT_CAUSES = (0, 1)
_MEMORY_TEMPERATURE = 82
"""NVML's number of the field NVML_FI_DEV_MEMORY_TEMP."""
_MOST_DEVICES = 1024
Ask = Callable[..., Any]


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
        function: Ask | None = getattr(self._nvml, name, None)
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
