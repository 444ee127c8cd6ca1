"""Link flaps: when queue pairs resend and give up, and what links that go down cost a job in a month.

    flap  ──► all queue pairs resume      ──► every rank has waited so long
          ├─► a queue pair fails          ──► error, restart
          └─► the driver stops the ranks  ──► restart: it was notified that the link of a node is down

    link     up ──down────────────────────────────────up──────
    plain    send ───T───► resend ──T───► resend ──T───► resend: delivered after up to T of extra wait
    adaptive send ─►─►──►────►────────►────────────────►       first intervals of ms, doubled up to T

    T = 4.096 us x 2^timeout      nominal; a NIC's own lies between T and 4 T (InfiniBand specification,
                                  volume 1, section 9.7.6.1.3)
    retries                       resends without an answer; the next timeout fails the queue pair, and with
                                  it the job (NCCL: error 12). So a link may be down for T x retries, NCCL's
                                  "total time before error": 0.47, 7.5 and 30 s for timeouts of 14, 18 and 20
                                  with 7 retries

Adaptive retransmission (NVIDIA, "Adaptive Retransmission: Parameters Control"): intervals start small and
double, up to T; without an answer in T x retries the queue pair fails. The default profile is not published:
`first_seconds` stands for it.

The ratio of a NIC's timers to nominal (``longer``) is known only within bounds. Each queue pair draws its
ratio uniformly from these bounds and keeps it for all of its timers. So probabilities have closed forms: a
queue pair survives a link that is down for d if ``longer x last resend >= d``, and its first delivered
resend is the first k with ``longer x resend_k >= d``. Packets are assumed to be in flight when the link goes
down: a queue pair that sends later waits less.

Down times are given by their quantiles: sums over them are expectations, without random draws.

Arrays: D down times, K resends, T times.
"""

from dataclasses import dataclass
from math import exp, inf
from statistics import NormalDist

import numpy as np

from myriad.errors import BadInputError
from myriad.network.fabric import Numbers

__all__ = [
    "MAX_RETRIES",
    "MAX_TIMEOUT",
    "DownTimes",
    "FlapCost",
    "FlapScenario",
    "Timers",
    "best_timers",
    "flap_cost",
    "lost_probability",
    "mean_wait_seconds",
]

_TICK_SECONDS = 4.096e-6
MAX_TIMEOUT, MAX_RETRIES = 31, 7
"""Five and three bits of a queue pair (InfiniBand specification, volume 1, sections 12.7.34 and 12.7.38)."""
ADAPTIVE_FIRST_SECONDS = _TICK_SECONDS * 2**11
"""8.4 ms: a user saw a ConnectX resend about every 10 ms, whatever its timeout (NVIDIA/nccl, issue 1555)."""
_LEAST_SPREAD = 1e-9


@dataclass(frozen=True)
class Timers:
    """Retransmission timers of a queue pair."""

    timeout: int
    """Value of NCCL_IB_TIMEOUT: a timeout is 4.096 us x 2^value."""
    retries: int = MAX_RETRIES
    """Value of NCCL_IB_RETRY_CNT: number of retries before the connection fails."""
    adaptive: bool = False
    first_seconds: float = ADAPTIVE_FIRST_SECONDS
    """Nominal first interval of adaptive retransmission."""
    longer: tuple[float, float] = (1.0, 4.0)
    """Bounds of a NIC's timers relative to nominal."""

    @property
    def interval_seconds(self) -> float:
        """Nominal seconds until the first retransmission: 4.096 us x 2^timeout."""
        return _TICK_SECONDS * float(2**self.timeout)

    @property
    def patience_seconds(self) -> float:
        """The time that a link may be down at least: T x retries, as in NCCL's documentation."""
        return self.interval_seconds * self.retries

    @property
    def gives_up_seconds(self) -> tuple[float, float]:
        """Bounds of the time after which a queue pair with a dead peer fails."""
        nominal = self.interval_seconds * (self.retries if self.adaptive else self.retries + 1)
        return nominal * self.longer[0], nominal * self.longer[1]

    @property
    def resends(self) -> Numbers:
        """(K) Nominal seconds of each resend after the lost send."""
        if not self.adaptive:
            return self.interval_seconds * np.arange(1, self.retries + 1, dtype=np.float64)
        found, interval, now = [], min(self.first_seconds, self.interval_seconds), 0.0
        while now + interval <= self.patience_seconds * (1 + 1e-12):
            now += interval
            found.append(now)
            interval = min(2 * interval, self.interval_seconds)
        return np.array(found)


def lost_probability(timers: Timers, down: Numbers, num_queue_pairs: int = 1) -> Numbers:
    """Return (D) the probability that at least one of the queue pairs through a link fails."""
    survives = _share_between(timers, _ratio_to_resends(down, timers.resends[-1:])[:, 0], inf)
    result: Numbers = 1 - survives**num_queue_pairs
    return result


def delivered_probability(
    timers: Timers, down: Numbers, seconds: Numbers, num_queue_pairs: int = 1
) -> Numbers:
    """Return (D T) the probability that all of the queue pairs resume within each time after the link went
    down."""
    resends = timers.resends
    first = _ratio_to_resends(down, resends)  # (D K): least `longer` for which resend k succeeds
    before = np.concatenate([np.full((len(down), 1), inf), first[:, :-1]], axis=1)
    latest = np.minimum(before[:, None, :], seconds[:, :, None] / resends)
    heard = _share_between(timers, first[:, None, :], latest).sum(axis=2)
    result: Numbers = np.minimum(heard, 1.0) ** num_queue_pairs
    return result


def mean_wait_seconds(timers: Timers, down: Numbers, num_queue_pairs: int = 1, points: int = 128) -> Numbers:
    """Return (D) the mean time from the link going down until the last queue pair resumes, over the cases in
    which all resume; 0 if they never do. A rank that waits for one of them waits as long."""
    latest = _latest_delivery(timers, down)
    share = (np.arange(points) + 0.5) / points
    seconds = down[:, None] + (latest - down).clip(0.0)[:, None] * share
    heard = delivered_probability(timers, down, seconds, num_queue_pairs)
    survives = 1 - lost_probability(timers, down, num_queue_pairs)
    beyond = (survives[:, None] - heard).clip(0.0).mean(axis=1) * (latest - down).clip(0.0)
    result: Numbers = np.divide(
        survives * down + beyond, survives, out=np.zeros(len(down)), where=survives > 1e-12
    )
    return result


def _latest_delivery(timers: Timers, down: Numbers) -> Numbers:
    """Return (D) a bound on the time of the first delivered resend: intervals have a widest, and at most
    double."""
    most, resends = timers.longer[1], timers.resends
    widest = float(np.diff(resends, prepend=0.0).max())
    bounds = (down + most * widest, 2 * down + most * resends[0])
    result: Numbers = np.minimum(np.minimum(*bounds), most * resends[-1])
    return result


def _ratio_to_resends(down: Numbers, resends: Numbers) -> Numbers:
    result: Numbers = down[:, None] / resends
    return result


def _share_between(timers: Timers, low: Numbers, high: Numbers | float) -> Numbers:
    """Return the share of NICs whose timer ratio is between the two values."""
    least, most = timers.longer
    spread = max(most - least, _LEAST_SPREAD)
    result: Numbers = ((np.minimum(high, least + spread) - np.maximum(low, least)) / spread).clip(0.0, 1.0)
    return result


_QUANTILES = 500
_LEAST_DOWN, _MOST_DOWN = 1e-3, 30 * 86400.0
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 14, 24
"""67 ms, NCCL's first default, and 69 s. Shorter timeouts fire for packets that are only late: pauses and
queues of a large fabric take milliseconds."""
_AS_GOOD = 1.01
_HALVINGS = 30


@dataclass(frozen=True)
class DownTimes:
    """Equally likely down times of links."""

    name: str
    seconds: Numbers
    """(D) In ascending order."""

    @classmethod
    def parse(cls, text: str) -> "DownTimes":
        """Parse ``lognormal:MEDIAN:SIGMA``, or seconds such as ``0.5,2,8``. Raises `BadInputError`."""
        try:
            return cls._lognormal(text) if text.startswith("lognormal") else cls._listed(text)
        except ValueError:
            allowed = "lognormal:MEDIAN:SIGMA, or seconds such as 2 or 0.5,2,8; a millisecond to a month"
            raise BadInputError("--down", text, allowed) from None

    @classmethod
    def _lognormal(cls, text: str) -> "DownTimes":
        _, median, sigma = text.split(":")
        if not (_LEAST_DOWN <= float(median) <= _MOST_DOWN and 0 < float(sigma) < 10):
            raise ValueError
        normal = NormalDist()
        places = [normal.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)]
        seconds = [float(median) * exp(float(sigma) * place) for place in places]
        return cls(f"lognormal, median {float(median):g} s, sigma {float(sigma):g}", np.array(seconds))

    @classmethod
    def _listed(cls, text: str) -> "DownTimes":
        seconds = sorted(float(one) for one in text.split(","))
        if not all(_LEAST_DOWN <= one <= _MOST_DOWN for one in seconds):
            raise ValueError
        return cls(", ".join(f"{one:g}" for one in seconds) + " s", np.array(seconds))


@dataclass(frozen=True)
class FlapScenario:
    """How often a cluster's links fail, for how long, and what a failure costs the job."""

    down: DownTimes
    num_links: int
    flaps_per_month: float
    """Flaps of one link."""
    dead_per_month: float
    """Permanent failures of one link."""
    num_queue_pairs: int
    """Queue pairs through one link."""
    restart_seconds: float
    """From an error until the job is back at the same step."""
    driver_seconds: float = inf
    """Time after which the driver stops the ranks of a node whose link is down; inf: no driver reacts."""


@dataclass(frozen=True)
class FlapCost:
    """What flaps cost a job with some timers."""

    timers: Timers
    lost: float
    """Probability that a flap ends the job."""
    lost_alone: float
    """The same for a single queue pair, without a driver."""
    wait_seconds: float
    """Mean time that a survived flap delays the job."""
    wait_p95_seconds: float
    """95th percentile of that time."""
    dead_seconds: float
    """Mean time until a permanently failed peer is noticed."""
    aborts_per_month: float
    hours_per_month: float
    """Hours lost to waiting, to restarts and to failed peers."""


def flap_cost(timers: Timers, habits: FlapScenario) -> FlapCost:
    """Return what flaps cost a job."""
    down = habits.down.seconds
    tolerated = down <= habits.driver_seconds
    fails = lost_probability(timers, down, habits.num_queue_pairs)
    lost = np.where(tolerated, fails, 1.0)
    waits = mean_wait_seconds(timers, down, habits.num_queue_pairs)
    survived = float((1 - lost).sum())
    wait = float((waits * (1 - lost)).sum()) / survived if survived > 1e-9 else 0.0
    error = min(sum(timers.gives_up_seconds) / 2, habits.driver_seconds)
    gone = float(lost.mean())
    flaps = habits.flaps_per_month * habits.num_links
    deaths = habits.dead_per_month * habits.num_links
    each = (1 - gone) * wait + gone * (error + habits.restart_seconds)
    return FlapCost(
        timers=timers,
        lost=gone,
        lost_alone=float(lost_probability(timers, down).mean()),
        wait_seconds=wait,
        wait_p95_seconds=_longest_wait(timers, habits, 0.95),
        dead_seconds=error,
        aborts_per_month=flaps * gone,
        hours_per_month=(flaps * each + deaths * (error + habits.restart_seconds)) / 3600,
    )


def _longest_wait(timers: Timers, habits: FlapScenario, share: float) -> float:
    """Return the delay that this share of the survived flaps stays below."""
    down = habits.down.seconds[habits.down.seconds <= habits.driver_seconds]
    survived = float((1 - lost_probability(timers, down, habits.num_queue_pairs)).sum())
    if survived < 1e-9:
        return 0.0
    low, high = 0.0, timers.longer[1] * float(timers.resends[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        at = np.full((len(down), 1), middle)
        heard = float(delivered_probability(timers, down, at, habits.num_queue_pairs).sum())
        low, high = (middle, high) if heard < share * survived else (low, middle)
    return high


def best_timers(like: Timers, habits: FlapScenario) -> FlapCost:
    """Return the timers with the fewest lost hours; of those within 1 % of the minimum the shortest, so that
    a failed peer is noticed soonest. ``like`` gives the abilities of the NIC."""
    tried = [
        flap_cost(Timers(timeout, MAX_RETRIES, like.adaptive, like.first_seconds, like.longer), habits)
        for timeout in range(_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT + 1)
    ]
    least = min(one.hours_per_month for one in tried)
    return next(one for one in tried if one.hours_per_month <= least * _AS_GOOD)
