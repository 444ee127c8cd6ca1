"""What is set on switches: when packets are marked (ECN), when a port pauses its sender (PFC), buffers.

Invariant and sources as in `myriad.network.controls`; its letters in brackets stand beside each number.
[D] is the paper on DCQCN, [HS] the simulator of HPCC.
"""

from dataclasses import dataclass, replace
from typing import Self

__all__ = ["PACKET_BYTES", "SwitchSettings"]

PACKET_BYTES = 4096
"""Payload of a full packet: the largest MTU of RoCE."""
_MICRO = 1e-6
_RATE_25G = 25e9 / 8


@dataclass(frozen=True)
class SwitchSettings:
    """What is set on all ports of a switch."""

    ecn_min_bytes: float
    """Kmin: packets that find less in the queue of their port are not marked."""
    ecn_max_bytes: float
    """Kmax: those that find more are all marked; between, probability rises from 0 to ``ecn_max_ratio``."""
    ecn_max_ratio: float
    """Pmax."""
    pfc_xoff_bytes: float
    """A port that holds so much of what came in by it pauses its sender; infinite: no PFC."""
    pfc_xon_bytes: float
    """And lets it go on below this."""
    pfc_headroom_bytes: float
    """Room per port for what arrives after the pause was sent."""
    buffer_bytes: float
    """Of the whole switch."""

    @classmethod
    def simulator(
        cls, port_bytes_per_second: float, num_ports: int = 32, latency_seconds: float = 1e-6
    ) -> Self:
        """As HPCC's simulator sets it, in proportion to the port; the rule for pausing made static.

        There a port pauses at 1/8 of the free buffer. With all n ports of a switch there at once that is
        buffer / (8 + n): the value here, which is the lowest that the rule reaches.
        """
        scale = port_bytes_per_second / _RATE_25G
        headroom = (
            3 * port_bytes_per_second * latency_seconds + 2 * PACKET_BYTES
        )  # [HS] third.cc: rate*delay*3
        buffer = 8 * 2**20 * scale  # [HS] bfsz = 16 * bw / 50 MiB
        xoff = max(0.0, buffer - num_ports * headroom) / (8 + num_ports)  # [HS] third.cc: shift 3 is 1/8
        return cls(
            ecn_min_bytes=100e3 * scale,  # [HS] kmin_map 100 * bw / 25 kB
            ecn_max_bytes=400e3 * scale,  # [HS] kmax_map 400 * bw / 25 kB
            ecn_max_ratio=0.2,  # [HS] pmax_map
            pfc_xoff_bytes=xoff,
            pfc_xon_bytes=max(0.0, xoff - 2 * PACKET_BYTES),  # [D] section 4: two MTU below
            pfc_headroom_bytes=headroom,
            buffer_bytes=buffer,
        )

    @classmethod
    def paper(cls) -> Self:
        """As in [D], for 40 Gbit/s: section 4 for PFC (12 MB, 32 ports), table 14 for marks."""
        return cls(
            ecn_min_bytes=5e3,  # [D] table 14
            ecn_max_bytes=200e3,  # [D] table 14
            ecn_max_ratio=0.01,  # [D] table 14
            pfc_xoff_bytes=24.47e3,  # [D] section 4, static bound
            pfc_xon_bytes=24.47e3 - 2 * 1500,  # [D] section 4: two MTU below
            pfc_headroom_bytes=22.4e3,  # [D] section 4
            buffer_bytes=12e6,  # [D] section 4, Trident II
        )

    def step_at(self, num_bytes: float) -> Self:
        """The same, with every packet marked that finds more than ``num_bytes`` (as DCTCP does)."""
        return replace(self, ecn_min_bytes=num_bytes, ecn_max_bytes=num_bytes, ecn_max_ratio=1.0)
