"""When a queue pair sends again what a link lost while it was down, and when it gives up.

    link     up ──down────────────────────────────────up──────
    plain    send ───T───► again ───T───► again ───T───► again: heard; all have waited for T - rest more
    adaptive send ─►─►──►────►────────►────────────────►       first intervals of ms, doubled up to T

    T = 4.096 us x 2^timeout      nominal; a NIC's own lies between T and 4 T (InfiniBand specification,
                                  volume 1, section 9.7.6.1.3)
    retries                       resends without an answer; the next timeout fails the queue pair, and with
                                  it the job (NCCL: error 12). So a link may be down for T x retries, NCCL's
                                  "total time before error": 0.47, 7.5 and 30 s for timeouts of 14, 18 and 20
                                  with 7 retries

Adaptive retransmission (NVIDIA, "Adaptive Retransmission: Parameters Control"): intervals begin small and are
doubled, never above T; without an answer in T x retries it fails. Its default profile is not published:
`first_seconds` stands for that.

How much longer than nominal a NIC's timers are (``longer``) is only known within limits: each queue pair's is
drawn evenly from between them and holds for all of its timers. So probabilities have closed forms: a queue
pair survives a link that is down for d if ``longer x last resend >= d``, and is heard at the first resend k
with ``longer x resend_k >= d``. Packets are taken to be under way when the link goes down: a queue pair that
begins to send later waits less.

Arrays: D down times, K resends, T times.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from myriad.network.fabric import Numbers

__all__ = [
    "ADAPTIVE_FIRST_SECONDS",
    "MOST_RETRIES",
    "MOST_TIMEOUT",
    "Timers",
    "heard_probability",
    "lost_probability",
    "mean_wait_seconds",
]

_TICK_SECONDS = 4.096e-6
MOST_TIMEOUT, MOST_RETRIES = 31, 7
"""Five and three bits of a queue pair (InfiniBand specification, volume 1, sections 12.7.34 and 12.7.38)."""
ADAPTIVE_FIRST_SECONDS = _TICK_SECONDS * 2**11
"""8.4 ms: a user saw a ConnectX resend about every 10 ms, whatever its timeout (NVIDIA/nccl, issue 1555)."""
_LEAST_SPREAD = 1e-9


@dataclass(frozen=True)
class Timers:
    """Of a queue pair."""

    timeout: int
    """NCCL_IB_TIMEOUT."""
    retries: int = MOST_RETRIES
    """NCCL_IB_RETRY_CNT."""
    adaptive: bool = False
    first_seconds: float = ADAPTIVE_FIRST_SECONDS
    """First interval of adaptive retransmission, nominal."""
    longer: tuple[float, float] = (1.0, 4.0)
    """A NIC's timers over nominal, at least and at most."""

    @property
    def interval_seconds(self) -> float:
        """T, nominal."""
        return _TICK_SECONDS * float(2**self.timeout)

    @property
    def patience_seconds(self) -> float:
        """For how long a link may be down at least: T x retries, as NCCL's documentation has it."""
        return self.interval_seconds * self.retries

    @property
    def gives_up_seconds(self) -> tuple[float, float]:
        """After which a queue pair whose peer is gone fails, at least and at most."""
        nominal = self.interval_seconds * (self.retries if self.adaptive else self.retries + 1)
        return nominal * self.longer[0], nominal * self.longer[1]

    @property
    def resends(self) -> Numbers:
        """(K) Nominal seconds after the send that was lost."""
        if not self.adaptive:
            return self.interval_seconds * np.arange(1, self.retries + 1, dtype=np.float64)
        found, interval, now = [], min(self.first_seconds, self.interval_seconds), 0.0
        while now + interval <= self.patience_seconds * (1 + 1e-12):
            now += interval
            found.append(now)
            interval = min(2 * interval, self.interval_seconds)
        return np.array(found)


def lost_probability(timers: Timers, down: Numbers, num_queue_pairs: int = 1) -> Numbers:
    """(D) That at least one of the queue pairs through a link fails when it is down for so long."""
    survives = _share_between(timers, _over(down, timers.resends[-1:])[:, 0], inf)
    result: Numbers = 1 - survives**num_queue_pairs
    return result


def heard_probability(timers: Timers, down: Numbers, seconds: Numbers, num_queue_pairs: int = 1) -> Numbers:
    """(D T) That all of them are heard again within so many seconds after the link went down."""
    resends = timers.resends
    first = _over(down, resends)  # (D K): the least `longer` at which resend k comes late enough
    before = np.concatenate([np.full((len(down), 1), inf), first[:, :-1]], axis=1)
    latest = np.minimum(before[:, None, :], seconds[:, :, None] / resends)
    heard = _share_between(timers, first[:, None, :], latest).sum(axis=2)
    result: Numbers = np.minimum(heard, 1.0) ** num_queue_pairs
    return result


def mean_wait_seconds(timers: Timers, down: Numbers, num_queue_pairs: int = 1, points: int = 128) -> Numbers:
    """(D) From the link going down until the last of the queue pairs is heard again, on average over those
    times in which all are; 0 where they never are. Whoever waits for one of them waits so long."""
    latest = _latest_heard(timers, down)
    share = (np.arange(points) + 0.5) / points
    seconds = down[:, None] + (latest - down).clip(0.0)[:, None] * share
    heard = heard_probability(timers, down, seconds, num_queue_pairs)
    survives = 1 - lost_probability(timers, down, num_queue_pairs)
    beyond = (survives[:, None] - heard).clip(0.0).mean(axis=1) * (latest - down).clip(0.0)
    result: Numbers = np.divide(
        survives * down + beyond, survives, out=np.zeros(len(down)), where=survives > 1e-12
    )
    return result


def _latest_heard(timers: Timers, down: Numbers) -> Numbers:
    """(D) Nobody is heard first after that: intervals are at most so wide, and at most doubled."""
    most, resends = timers.longer[1], timers.resends
    widest = float(np.diff(resends, prepend=0.0).max())
    bounds = (down + most * widest, 2 * down + most * resends[0])
    result: Numbers = np.minimum(np.minimum(*bounds), most * resends[-1])
    return result


def _over(down: Numbers, resends: Numbers) -> Numbers:
    """(D K)"""
    result: Numbers = down[:, None] / resends
    return result


def _share_between(timers: Timers, low: Numbers, high: Numbers | float) -> Numbers:
    """Of all NICs, those whose timers are between so much longer than nominal."""
    least, most = timers.longer
    spread = max(most - least, _LEAST_SPREAD)
    result: Numbers = ((np.minimum(high, least + spread) - np.maximum(low, least)) / spread).clip(0.0, 1.0)
    return result
