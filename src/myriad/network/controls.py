"""Congestion controls: published numbers that the fluid and the packet level share.

A control says how a sender changes its rate, or its window, on what it hears about the network:

    Dcqcn    marks: the receiver tells the sender that switches marked packets (a CNP), and it cuts its rate
    Swift    delay: round-trip time against a target; the sender changes its window
    Hpcc     telemetry: each switch writes its queue and what it sent into the packet; the window follows
    Hybrid   marks say when to cut, delay says how much

Invariant: an object is numbers only, and both levels of the model take the same object, so that they cannot
drift apart in their parameters. Rates are bytes per second: Mbit/s of the sources divided by 8.

Sources, named at each number:
[D]  Zhu et al., Congestion Control for Large-Scale RDMA Deployments, SIGCOMM 2015
[DS] their simulator, github.com/bobzhuyb/ns3-rdma, windows/ns-3-dev/mix/config.txt
[N]  NVIDIA, DCQCN CC Parameters (DOCA SDK), the column of defaults, and `mlxconfig query` of a ConnectX
[B]  Barre: Empowering Simplified and Versatile Programmable Congestion Control, USENIX ATC 2025, table 2
[H]  Li et al., HPCC: High Precision Congestion Control, SIGCOMM 2019
[HS] their simulator, github.com/alibaba-edu/High-Precision-Congestion-Control, simulation/run.py
[S]  Kumar et al., Swift: Delay is Simple and Effective, SIGCOMM 2020: the formulas; its numbers are not given
[SS] github.com/Broadcom/csg-htsim, sim/swift.cpp, constructor of SwiftSrc: the numbers, called guesses there
[M]  Jiang et al., MegaScale, NSDI 2024, section 3.6: "combines the principles of Swift and DCQCN"; no formula
"""

from dataclasses import dataclass, replace
from typing import Self

from myriad.errors import BadInputError
from myriad.network.switch_settings import PACKET_BYTES, SwitchSettings

__all__ = [
    "CONTROLS",
    "PACKET_BYTES",
    "Control",
    "Dcqcn",
    "Hpcc",
    "Hybrid",
    "Swift",
    "SwitchSettings",
    "control",
]

_MBIT = 1e6 / 8
_MICRO = 1e-6


@dataclass(frozen=True)
class Dcqcn:
    """A rate, cut when marks come back, raised by a timer and a byte counter ([D] section 3)."""

    gain: float
    """g: weight of the newest observation in alpha, the estimate of congestion."""
    alpha_timer_seconds: float
    """Alpha decays by (1 - gain) after each such time without a CNP."""
    cnp_interval_seconds: float
    """A receiver sends at most one CNP per flow in this time."""
    cut_interval_seconds: float
    """A sender cuts a flow at most once in this time."""
    largest_cut_ratio: float
    """A cut takes alpha / 2 of the rate, and at most this."""
    increase_timer_seconds: float
    """T: an increase each such time since the last cut."""
    increase_bytes: float
    """B: and an increase each so many bytes sent since the last cut."""
    fast_recovery_steps: int
    """F: the first F increases of either kind halve the way to the target; later ones raise the target."""
    additive_bytes_per_second: float
    """R_AI: what one increase adds to the target when one counter is past F."""
    hyper_bytes_per_second: float
    """R_HAI: the same when both counters are past F (where ``timer_only``: when the timer is past F + 1)."""
    min_bytes_per_second: float
    """Least rate."""
    clamp_target: bool
    """Whether each cut sets the target to the rate before it; else only the first after an increase does."""
    timer_only: bool
    """Whether increases come by the timer alone, as in [HS]."""

    @classmethod
    def paper(cls) -> Self:
        """As published in 2015, for 40 Gbit/s."""
        return cls(
            gain=1 / 256,  # [D] table 14
            alpha_timer_seconds=55 * _MICRO,  # [D] table 14
            cnp_interval_seconds=50 * _MICRO,  # [D] section 3
            cut_interval_seconds=0,  # [D] section 3: each CNP cuts
            largest_cut_ratio=0.5,  # [D] equation 1: alpha / 2, alpha at most 1
            increase_timer_seconds=55 * _MICRO,  # [D] table 14
            increase_bytes=10e6,  # [D] table 14
            fast_recovery_steps=5,  # [D] section 3
            additive_bytes_per_second=40 * _MBIT,  # [DS] RATE_AI
            hyper_bytes_per_second=200 * _MBIT,  # [DS] RATE_HAI
            min_bytes_per_second=100 * _MBIT,  # [HS] MIN_RATE of mix/config.txt
            clamp_target=True,  # [D] equation 1
            timer_only=False,
        )

    @classmethod
    def connectx(cls) -> Self:
        """What a ConnectX does when nobody sets anything."""
        return cls(
            gain=1 - 1019 / 1024,  # [N] DCE_TCP_G 1019 of 1024
            alpha_timer_seconds=1 * _MICRO,  # [N] DCE_TCP_RTT
            cnp_interval_seconds=4 * _MICRO,  # [N] MIN_TIME_BETWEEN_CNPS
            cut_interval_seconds=4 * _MICRO,  # [N] RATE_REDUCE_MONITOR_PERIOD
            largest_cut_ratio=0.5,  # [N] RPG_MIN_DEC_FAC 50: a cut leaves at least 50 %
            increase_timer_seconds=300 * _MICRO,  # [N] RPG_TIME_RESET
            increase_bytes=32767 * 64,  # [N] RPG_BYTE_RESET, in units of 64 bytes
            fast_recovery_steps=1,  # [N] RPG_THRESHOLD
            additive_bytes_per_second=5 * _MBIT,  # [N] RPG_AI_RATE
            hyper_bytes_per_second=50 * _MBIT,  # [N] RPG_HAI_RATE
            min_bytes_per_second=1 * _MBIT,  # [N] RPG_MIN_RATE
            clamp_target=False,  # [N] CLAMP_TGT_RATE
            timer_only=False,
        )

    @classmethod
    def tuned(cls) -> Self:
        """Small cuts, often, and quick increases: [B] table 2 for 400 Gbit/s, the middle of each range."""
        return replace(
            cls.connectx(),
            cnp_interval_seconds=2 * _MICRO,  # [B] 0 to 2
            cut_interval_seconds=2 * _MICRO,  # [B] 1 to 4
            largest_cut_ratio=0.1,  # [B] rpg_min_dec_fac 80 to 98
            increase_timer_seconds=50 * _MICRO,  # [B] 20 to 100
            additive_bytes_per_second=20 * _MBIT,  # [B] 8 to 20
        )

    @classmethod
    def simulator(cls, port_bytes_per_second: float) -> Self:
        """ConnectX as HPCC's simulator has it: increases in proportion to the port, by the timer alone."""
        scale = port_bytes_per_second / (25000 * _MBIT)
        return replace(
            cls.connectx(),
            gain=1 / 256,  # [HS] g
            additive_bytes_per_second=5 * _MBIT * scale,  # [HS] ai = 5 * bw / 25
            hyper_bytes_per_second=50 * _MBIT * scale,  # [HS] hai = 50 * bw / 25
            min_bytes_per_second=1000 * _MBIT,  # [HS] MIN_RATE
            timer_only=True,
        )


@dataclass(frozen=True)
class Swift:
    """A window against a target of the round-trip time ([S]).

    delay < target: window += additive_packets per round trip; else, once per round trip,
    window *= max(1 - beta (delay - target) / delay, 1 - largest_cut_ratio)

    target = base + hops x hop + clip(a / sqrt(window) - a / sqrt(scaling_max), 0, range) with
    a = range / (1 / sqrt(scaling_min) - 1 / sqrt(scaling_max)): small windows, many flows, a longer queue.
    """

    base_target_seconds: float
    hop_target_seconds: float
    """Per switch on the way."""
    scaling_range_seconds: float
    """Most that the target grows as the window shrinks."""
    scaling_min_packets: float
    scaling_max_packets: float
    additive_packets: float
    beta: float
    largest_cut_ratio: float
    min_packets: float
    """Least window. Below 1, one packet is sent each (round-trip time / window)."""
    max_packets: float
    """Largest window."""

    @classmethod
    def published(cls) -> Self:
        """The paper's formulas with htsim's numbers."""
        return cls(
            base_target_seconds=20 * _MICRO,  # [SS] _base_delay
            hop_target_seconds=20 * _MICRO / 6.55,  # [SS] _h
            scaling_range_seconds=100 * _MICRO,  # [SS] _fs_range = 5 * _base_delay
            scaling_min_packets=0.1,  # [SS] _fs_min_cwnd
            scaling_max_packets=100,  # [SS] _fs_max_cwnd
            additive_packets=1.0,  # [SS] _ai
            beta=0.8,  # [SS] _beta
            largest_cut_ratio=0.5,  # [SS] _max_mdf
            min_packets=0.001,  # [S]: far below one, with pacing
            max_packets=1000,  # [SS] _max_cwnd
        )

    @classmethod
    def whole_packets(cls) -> Self:
        """A window that cannot go below one packet: what [S] compares its pacing with."""
        return replace(cls.published(), min_packets=1.0)


@dataclass(frozen=True)
class Hpcc:
    """A window from what switches write into packets ([H] algorithm 1).

    U_j = queue_j / (rate_j x base round trip) + sent_j / rate_j, the largest of all links j, averaged over a
    round trip; U >= target or max_stage increases since the last such: window = reference / (U / target) +
    additive; else window = reference + additive. The reference is renewed once per round trip.
    """

    target_utilization_ratio: float
    """eta."""
    max_stage: int
    additive_bytes: float
    """W_AI."""
    min_bytes_per_second: float
    """Least rate; so much a round trip is the least window."""

    @classmethod
    def published(cls) -> Self:
        """The paper's law with its simulator's numbers."""
        return cls(
            target_utilization_ratio=0.95,  # [HS] utgt
            max_stage=0,  # [HS] mi; its authors call the paper's 5 a typo
            additive_bytes=80,  # [HS] ai = 10 * bw / 25 Mbit/s: at 200 Gbit/s in a round trip of 8 us
            min_bytes_per_second=1000 * _MBIT,  # [HS] MIN_RATE
        )


@dataclass(frozen=True)
class Hybrid:
    """When to cut comes from marks, how much from delay. **Our own design**: [M] names the two parents only.

    an acknowledgement with a mark, once per round trip: window *= max(target / delay, 1 - largest_cut_ratio),
    which is what empties the queue down to the target if all do the same; with delay below the target: held
    without a mark: window += additive_packets per round trip; after recovery_steps round trips without a mark
    also half the way back to the window before the last cut (DCQCN's fast recovery, on the clock of Swift)

    target = base round trip x base_target_ratio + flow scaling as in Swift.
    """

    base_target_ratio: float
    """Of the round-trip time of an empty network. Switches mark from the queue on that makes it so long."""
    scaling_range_seconds: float
    scaling_min_packets: float
    scaling_max_packets: float
    additive_packets: float
    largest_cut_ratio: float
    recovery_steps: int
    min_packets: float
    max_packets: float

    @classmethod
    def ours(cls) -> Self:
        """Swift's numbers where they have the same meaning; the rest is our choice."""
        swift = Swift.published()
        return cls(
            base_target_ratio=2.0,  # our choice: as much in queues as on the path
            scaling_range_seconds=swift.scaling_range_seconds,
            scaling_min_packets=swift.scaling_min_packets,
            scaling_max_packets=swift.scaling_max_packets,
            additive_packets=2.0,  # our choice: marks cut at once, so it may ask for more than Swift
            largest_cut_ratio=swift.largest_cut_ratio,
            recovery_steps=2,  # our choice
            min_packets=swift.min_packets,
            max_packets=swift.max_packets,
        )


Control = Dcqcn | Swift | Hpcc | Hybrid
CONTROLS: dict[str, Control] = {
    "dcqcn-paper": Dcqcn.paper(),
    "dcqcn": Dcqcn.connectx(),
    "dcqcn-tuned": Dcqcn.tuned(),
    "dcqcn-simulator": Dcqcn.simulator(25e9),
    "swift": Swift.published(),
    "swift-whole-packets": Swift.whole_packets(),
    "hpcc": Hpcc.published(),
    "hybrid": Hybrid.ours(),
}


def control(name: str) -> Control:
    """The parameter set of that name. Raises `BadInputError`."""
    if name not in CONTROLS:
        raise BadInputError("control", name, "one of " + ", ".join(CONTROLS))
    return CONTROLS[name]
