"""Congestion controls and switch settings: the published numbers that the fluid and the packet level share.

A control says how a sender changes its rate or its window after a signal from the network:

    Dcqcn    marks: the receiver sends a congestion notification (CNP) for marked packets; the sender cuts
             its rate
    Swift    delay: round-trip time against a target; the sender changes its window
    Hpcc     telemetry: each switch writes its queue and the bytes it sent into the packet; the window follows
    Hybrid   marks say when to cut, delay says how much

`SwitchSettings` says when switches mark packets (ECN), when a port pauses its sender (PFC), and how large
buffers are.

Invariant: these classes hold numbers only, and both levels of the model read the same object, so that their
parameters cannot drift apart. Rates are bytes per second: Mbit/s of the sources divided by 8.

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
    """Rate-based control: marks cut the rate, a timer and a byte counter raise it ([D] section 3)."""

    gain: float
    """g: weight of the newest observation in alpha, the estimate of congestion."""
    alpha_timer_seconds: float
    """Alpha decays by (1 - gain) after each such time without a CNP."""
    cnp_interval_seconds: float
    """A receiver sends at most one CNP per flow in this time."""
    cut_interval_seconds: float
    """A sender cuts a flow at most once in this time."""
    largest_cut_ratio: float
    """A cut removes alpha / 2 of the rate, and at most this ratio."""
    increase_timer_seconds: float
    """T: the rate increases after each such time since the last cut."""
    increase_bytes: float
    """B: the rate also increases after each such number of bytes since the last cut."""
    fast_recovery_steps: int
    """F: the first F increases of either kind halve the way to the target; later ones raise the target."""
    additive_bytes_per_second: float
    """R_AI: an increase adds this to the target when one counter is past F."""
    hyper_bytes_per_second: float
    """R_HAI: the same when both counters are past F (with ``timer_only``: when the timer is past F + 1)."""
    min_bytes_per_second: float
    """Lowest rate of a flow, in bytes per second."""
    clamp_target: bool
    """Whether each cut sets the target to the rate before the cut; else only the first cut after an increase
    does."""
    timer_only: bool
    """Whether only the timer increases the rate, as in [HS]."""

    @classmethod
    def paper(cls) -> Self:
        """The numbers published in 2015, for 40 Gbit/s."""
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
        """The defaults of a ConnectX."""
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
        """Small, frequent cuts and fast increases: [B] table 2 for 400 Gbit/s, the middle of each range."""
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
        """ConnectX as in HPCC's simulator: increases proportional to the port's rate, by the timer alone."""
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
    """Target time for each switch on the path."""
    scaling_range_seconds: float
    """The most that the target grows as the window shrinks."""
    scaling_min_packets: float
    scaling_max_packets: float
    additive_packets: float
    beta: float
    largest_cut_ratio: float
    min_packets: float
    """Smallest window. Below 1, the sender sends one packet each (round-trip time / window)."""
    max_packets: float
    """Largest congestion window, in packets."""

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
        """A window of at least one packet: [S] compares its pacing with this."""
        return replace(cls.published(), min_packets=1.0)


@dataclass(frozen=True)
class Hpcc:
    """A window from what switches write into packets ([H] algorithm 1).

    U_j = queue_j / (rate_j x base round trip) + sent_j / rate_j, the largest of all links j, averaged over a
    round trip; U >= target or max_stage increases since the last such: window = reference / (U / target) +
    additive; else window = reference + additive. The reference is renewed once per round trip.
    """

    target_utilization_ratio: float
    """eta of the paper."""
    max_stage: int
    additive_bytes: float
    """W_AI of the paper."""
    min_bytes_per_second: float
    """Lowest rate; the smallest window is what this rate sends in a round trip."""

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
    """Target over the round-trip time of an empty network. Switches mark from the queue length that reaches
    it."""
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
        """Swift's numbers where they have the same meaning; the others are our choice."""
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
    """Return the parameter set of that name. Raises `BadInputError`."""
    if name not in CONTROLS:
        raise BadInputError("control", name, "one of " + ", ".join(CONTROLS))
    return CONTROLS[name]


PACKET_BYTES = 4096
"""Payload of a full packet: the largest MTU of RoCE."""
_RATE_25G = 25e9 / 8


@dataclass(frozen=True)
class SwitchSettings:
    """Settings of all ports of a switch."""

    ecn_min_bytes: float
    """Kmin: packets that leave a shorter queue are not marked."""
    ecn_max_bytes: float
    """Kmax: packets that leave a longer queue are all marked; between Kmin and Kmax the probability rises
    from 0 to ``ecn_max_ratio``."""
    ecn_max_ratio: float
    """Pmax: the highest mark probability below Kmax."""
    pfc_xoff_bytes: float
    """A port with more ingress bytes in the switch's buffer pauses its sender; infinite: no PFC."""
    pfc_xon_bytes: float
    """Below this, the port lets its sender resume."""
    pfc_headroom_bytes: float
    """Buffer for each port for packets that arrive after the pause was sent."""
    buffer_bytes: float
    """Buffer of the whole switch."""

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
        """The numbers of [D] for 40 Gbit/s: section 4 for PFC (12 MB, 32 ports), table 14 for marks."""
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
        """Return the same settings with every packet marked above ``num_bytes`` of queue (as DCTCP does)."""
        return replace(self, ecn_min_bytes=num_bytes, ecn_max_bytes=num_bytes, ecn_max_ratio=1.0)
