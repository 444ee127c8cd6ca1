"""What a packet-level simulation can be given beside the fabric, its flows and the control."""

from dataclasses import dataclass
from typing import Literal

from myriad.errors import BadInputError
from myriad.network.fabric import Numbers
from myriad.network.switch_settings import PACKET_BYTES

__all__ = ["Faults", "Series", "Transport", "outage_of_cable"]


@dataclass(frozen=True)
class Transport:
    """How flows are cut into packets, and what happens to those that are lost."""

    recovery: Literal["go-back-n", "selective-repeat"] = "go-back-n"
    payload_bytes: int = PACKET_BYTES
    header_bytes: int = 82
    """RoCEv2 on the wire: preamble 8, Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4, FCS 4, gap 12."""
    timeout_seconds: float = 4.096e-6 * 2**14
    """Without any progress, until all in flight is sent again: InfiniBand's timeout exponent 14."""
    backoff: float = 1.0
    """What each timeout in a row multiplies the next by: 1 as InfiniBand has it."""
    retries: int = 7
    """Timeouts in a row that a flow bears: InfiniBand's largest retry count."""
    most_packets: int = 16384
    """Most that a flow has in flight, whatever its control says."""

    def check(self) -> "Transport":
        """Raises `BadInputError`."""
        if self.payload_bytes < 64:
            raise BadInputError("transport.payload_bytes", self.payload_bytes, "at least 64")
        if not self.timeout_seconds > 0:
            raise BadInputError("transport.timeout_seconds", self.timeout_seconds, "above 0")
        if self.backoff < 1:
            raise BadInputError("transport.backoff", self.backoff, "at least 1")
        if self.most_packets < 1:
            raise BadInputError("transport.most_packets", self.most_packets, "at least 1")
        return self


@dataclass(frozen=True)
class Faults:
    """What goes wrong on wires."""

    loss_ratio: float | Numbers = 0.0
    """Of data packets: of all links, or (L)."""
    outages: tuple[tuple[int, float, float], ...] = ()
    """(link, from seconds, until seconds): what is being sent meanwhile is lost; see `outage_of_cable`."""


def outage_of_cable(cable: int, start: float, end: float) -> tuple[tuple[int, float, float], ...]:
    """Both directions of a cable down."""
    return (2 * cable, start, end), (2 * cable + 1, start, end)


@dataclass(frozen=True)
class Series:
    """Samples at equal times, so many that they fit: the period doubles, and every other one goes, where
    not."""

    period_seconds: float
    links: tuple[int, ...] = ()
    flows: tuple[int, ...] = ()
    most_samples: int = 4096
