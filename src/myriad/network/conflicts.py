"""Flows that hash to the same uplink of one switch, exactly: balls thrown into bins.

n flows, each as q queue pairs, over m uplinks that carry s flows each: n q balls in m bins of s q places. The
fullest bin decides: its flows have min(1, s q / load) of their rate, and a flow is done when its last queue
pair is.

    P(no bin above k) = n! [x^n] (1 + x + x^2/2! + ... + x^k/k!)^m / m^n

Put as Poisson variables that are known to add up to n, so that no number gets large; the power by Fourier
transform. The hash is taken as even: what `routing` makes of real port numbers agrees.

    hash       as above; alike: as above, and on a fabric all switches hash as one
    adaptive   a switch that gives each ball to the emptiest bin: none holds more than the mean, rounded up
    spray      packet by packet: all uplinks together are one
"""

from dataclasses import dataclass
from math import ceil, lgamma, log
from typing import Literal

import numpy as np

from myriad.errors import BadInputError
from myriad.network.fabric import Numbers

__all__ = ["MOST_BALLS", "Conflicts", "Rule", "conflicts", "fullest"]

Rule = Literal["hash", "alike", "adaptive", "spray"]

MOST_BALLS = 2**16
"""Flows x queue pairs: above that an answer would take minutes."""
_NEVER = 1e-12


@dataclass(frozen=True)
class Conflicts:
    """Of flows that leave one switch at the same time."""

    slowest_ratio: float
    """Of its rate, what the slowest flow is expected to have."""
    mean_ratio: float
    """The same of any flow."""
    conflict_probability: float
    """That some uplink has more to carry than it can."""
    flow_probability: float
    """That a given flow, or one of its queue pairs, shares such an uplink."""


def conflicts(
    num_flows: int, num_uplinks: int, *, split: float = 1.0, queue_pairs: int = 1, rule: Rule = "hash"
) -> Conflicts:
    """``split``: flows that an uplink carries at their full rate. Raises `BadInputError`."""
    for key, value in (("flows", num_flows), ("uplinks", num_uplinks), ("queue_pairs", queue_pairs)):
        if value < 1:
            raise BadInputError(key, value, "at least 1")
    balls = num_flows * queue_pairs
    if balls > MOST_BALLS:
        raise BadInputError("flows x queue_pairs", balls, f"at most {MOST_BALLS}")
    places = split * queue_pairs
    if rule == "spray":
        return _certain(split * num_uplinks / num_flows)
    if rule == "adaptive":
        return _certain(places / ceil(balls / num_uplinks))
    chance = fullest(balls, num_uplinks)
    share = np.minimum(1.0, places / np.maximum(1, np.arange(len(chance))))
    own = _own_bin(balls, num_uplinks)
    tight = share < 1
    ratio = np.minimum(1.0, places / np.arange(1, len(own) + 1))
    worst = _worst_of(own, queue_pairs)
    return Conflicts(
        slowest_ratio=float(chance @ share),
        mean_ratio=float(worst @ ratio),
        conflict_probability=float(chance[tight].sum()),
        flow_probability=float(worst[ratio < 1].sum()),
    )


def _certain(ratio: float) -> Conflicts:
    full = min(1.0, ratio)
    over = float(full < 1)
    return Conflicts(full, full, over, over)


def fullest(num_balls: int, num_bins: int) -> Numbers:
    """``[k]``: the probability that the fullest bin holds k."""
    at_most = [0.0]
    while len(at_most) <= num_balls and (at_most[-1] < 0.5 or at_most[-1] - at_most[-2] > _NEVER):
        at_most.append(_none_above(len(at_most), num_balls, num_bins))
    return np.diff(np.array(at_most) / at_most[-1], prepend=0.0).clip(0.0)


def _none_above(k: int, num_balls: int, num_bins: int) -> float:
    if k * num_bins < num_balls:
        return 0.0
    if k >= num_balls:
        return 1.0
    mean = num_balls / num_bins
    count = np.arange(k + 1)
    held = np.exp(count * log(mean) - mean - np.array([lgamma(one + 1) for one in count]))
    most = min(k * num_bins, 8 * num_balls + 64)  # sums above that are too rare to matter where they fold to
    size = 2 ** ceil(np.log2(most + 1))
    total = np.fft.irfft(np.fft.rfft(held, size) ** num_bins, size)[num_balls]
    exactly = np.exp(num_balls * log(num_balls) - num_balls - lgamma(num_balls + 1))
    return float(min(1.0, total / exactly))


def _own_bin(num_balls: int, num_bins: int) -> Numbers:
    """``[k - 1]``: the probability that a given ball lies in a bin of k: the others are binomial."""
    others, chance = num_balls - 1, 1 / num_bins
    if num_bins == 1:
        return np.eye(num_balls)[-1]
    count = np.arange(min(num_balls, ceil(others * chance) * 4 + 64))
    ways = lgamma(others + 1) - np.array([lgamma(k + 1) + lgamma(others - k + 1) for k in count])
    return np.exp(ways + count * log(chance) + (others - count) * log(1 - chance))


def _worst_of(own: Numbers, queue_pairs: int) -> Numbers:
    """The fullest of the bins of a flow's queue pairs, as if independent: 3 % off a mean at most."""
    return np.diff(np.cumsum(own).clip(0.0, 1.0) ** queue_pairs, prepend=0.0)
