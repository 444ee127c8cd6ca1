"""Name, firmware, speed and statistics of a network interface's driver, by ethtool's ioctl.

The numbers of the commands and the structures are those of linux/ethtool.h and linux/sockios.h.
"""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = [
    "MOST_STATISTICS",
    "DriverInfo",
    "driver_info",
    "link_bytes_per_second",
    "pause_columns",
    "statistic_names",
]

SIOCETHTOOL = 0x8946
GSTATS = 0x1D
_GDRVINFO, _GSTRINGS, _SET_STATS = 0x3, 0x1B, 1
_NAME_BYTES = 32
MOST_STATISTICS = 8192
"""Most counters of a driver's own. The kernel writes as many as there are now, whatever was asked for."""
_DRVINFO = struct.Struct("=I32s32s32s32s32s12x5I")
_SETTINGS, _GSET, _UNKNOWN_SPEED = struct.Struct("=I8xH14xH14x"), 0x1, 0xFFFF
"""struct ethtool_cmd: the command, and the low and the high half of the speed in Mbit/s."""


@dataclass(frozen=True)
class DriverInfo:
    """The driver of one interface; fields that it leaves out are empty."""

    driver: str
    version: str
    firmware: str
    bus: str


def driver_info(name: str) -> DriverInfo | None:
    """Return the driver of an interface; ``None``: there is no such interface, or it reports no driver."""
    found = _ask(name, _DRVINFO.pack(_GDRVINFO, *[b""] * 5, *[0] * 5))
    if found is None:
        return None
    texts = [text.split(b"\0")[0].decode(errors="replace") for text in _DRVINFO.unpack(found)[1:5]]
    return DriverInfo(*(("" if text == "N/A" else text) for text in texts))


def statistic_names(name: str) -> list[str]:
    """Return the names of the driver's own counters, in the order of their values; empty: it has none."""
    found = _ask(name, _DRVINFO.pack(_GDRVINFO, *[b""] * 5, *[0] * 5))
    count = 0 if found is None else _DRVINFO.unpack(found)[7]
    if not 0 < count <= MOST_STATISTICS:
        return []
    head = struct.pack("=III", _GSTRINGS, _SET_STATS, count)
    texts = _ask(name, head + bytes(count * _NAME_BYTES))
    if texts is None or struct.unpack_from("=I", texts, 8)[0] > count:
        return []
    body = texts[12:]
    rows = (body[at : at + _NAME_BYTES] for at in range(0, len(body), _NAME_BYTES))
    return [row.split(b"\0")[0].decode(errors="replace") for row in rows]


def link_bytes_per_second(name: str) -> float:
    """Return the link speed that the driver reports, in bytes per second one way; 0 if it reports none."""
    found = _ask(name, _SETTINGS.pack(_GSET, 0, 0))
    if found is None:
        return 0.0
    _, low, high = _SETTINGS.unpack(found)
    return 0.0 if low == _UNKNOWN_SPEED else (high << 16 | low) * 1e6 / 8


def pause_columns(names: Sequence[str]) -> list[int]:
    """Return the places of a driver's counters of pauses by the other end: microseconds where they are
    counted (mlx5: rx_prioN_pause_duration, rx_global_pause_duration), else frames (rx_prioN_pause,
    rx_pause_ctrl_phy, rx_pause, rx_flow_control_xon/xoff, ...)."""
    lower = [name.strip().lower() for name in names]
    received = [(at, name) for at, name in enumerate(lower) if name.startswith(("rx", "port.rx", "mac_rx"))]
    lasts = [at for at, name in received if "pause_duration" in name]
    if lasts:
        return lasts
    per_priority = [at for at, name in received if "prio" in name and name.endswith(("pause", "pfc_frames"))]
    plain = ("rx_pause", "rx_pause_frames", "rx_pause_ctrl_phy", "rx_pfc_frames", "port.rx_pause")
    totals = [at for at, name in received if name in plain or "flow_control_xo" in name]
    return per_priority or totals


def _ask(name: str, command: bytes) -> bytes | None:
    buffer = ctypes.create_string_buffer(command, len(command))
    request = struct.pack("=16sQ16x", name.encode()[:15], ctypes.addressof(buffer))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked.fileno(), SIOCETHTOOL, request)
        return buffer.raw
    return None
