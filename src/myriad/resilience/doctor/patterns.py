"""Trouble of all-reduce, of all-to-all, or of what both use: what the rates of the two patterns say. Pure.

    all-reduce    each rank sends to its neighbours in a ring or tree, and adds    n links, reduction kernels
    all-to-all    each rank sends to every other at the same time                  n (n - 1) paths, no sums

Both are given as bus bandwidth (bytes per second that each rank has to send, nccl-tests' PERFORMANCE.md),
which is the rate of a link for both where nothing is wrong. One is slow when it is below half of the other
and of the best pair, or below 80 % of what other groups or the baseline reach; all-to-all also below 80 %
of all-reduce where a pair reaches less than half of it.

    all-reduce   all-to-all   so it is
    slow         well         the reduction: its kernels, protocol (LL, LL128, Simple) or algorithm (tree,
                              ring, in-network); every link has carried the all-to-all
    well         slow         a path that is not between neighbours, seen in the pairs; or a link that many
                              flows share (uplink, PCIe switch, hashing), where each pair alone is well
    slow         slow         a link or node, seen in the pairs
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from myriad.resilience.doctor.item import BAD_RATIO, SLOW_RATIO
from myriad.units import format_bytes

__all__ = ["Kind", "PatternRates", "PatternVerdict", "rates_of", "tell_apart"]

Kind = Literal["", "all-reduce", "all-to-all", "both", "wrong"]
"""Which pattern is in trouble; empty: none; wrong: sums or pieces differ from what they must be."""
_NEXT_FOR_ALL_REDUCE = "run again with NCCL_ALGO=Ring and NCCL_PROTO=Simple, and without in-network reduction"
_NEXT_FOR_SHARED = "check uplinks, hashing (ECMP) and PCIe switches for flows that share a link"


@dataclass(frozen=True)
class PatternRates:
    """What one group of ranks has measured; rates in bytes per second, 0: nothing was measured."""

    all_reduce: float
    all_to_all: float
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """From one rank to another, in steps in which each rank sends to one only."""
    wrong: tuple[str, ...] = ()
    """Patterns whose result was not what it must be."""


@dataclass(frozen=True)
class PatternVerdict:
    """Which pattern is in trouble, and where."""

    kind: Kind
    words: str
    ranks: tuple[int, ...] = ()
    """The rank, or the two ends of the path, that the pairs show; empty: they show none."""


def rates_of(answers: Mapping[int, Mapping[str, Any]]) -> PatternRates:
    """Lay the answers of all ranks (`collective.measure_patterns`) together; a rate is that of the slowest
    rank. Raises `KeyError`, `TypeError` or `ValueError` for answers that are none."""
    pairs = {
        (int(source), rank): float(rate)
        for rank, answer in answers.items()
        for source, rate in answer.get("pairs", {}).items()
    }
    wrong = sorted({str(name) for answer in answers.values() for name in answer.get("wrong", ())})
    slowest = [min(float(answer[key]) for answer in answers.values()) for key in ("all_reduce", "all_to_all")]
    return PatternRates(slowest[0], slowest[1], pairs, tuple(wrong))


def tell_apart(
    rates: PatternRates,
    names: Sequence[str],
    expected: PatternRates | None = None,
    least_ratio: float = BAD_RATIO,
) -> PatternVerdict:
    """Say which pattern of a group is in trouble and why. ``expected``: what other groups or the baseline
    reach; without it the patterns are compared with each other and with the best pair, of which one may reach
    ``least_ratio`` (less over gloo, where processors set the rate)."""
    if rates.wrong:
        which = " and ".join(rates.wrong)
        return PatternVerdict("wrong", f"{which} gave wrong values: a node computes or transfers wrong bits")
    reduce_slow, exchange_slow = _is_slow(rates, expected, least_ratio)
    ranks, where = _worst(rates.pairs, names)
    if where and rates.all_to_all < SLOW_RATIO * rates.all_reduce:
        exchange_slow |= min(rates.pairs.values()) < BAD_RATIO * rates.all_reduce
    rates_text = f"all-reduce {_rate(rates.all_reduce)}, all-to-all {_rate(rates.all_to_all)} a rank"
    if not (reduce_slow or exchange_slow):
        return PatternVerdict("", rates_text)
    if reduce_slow and not exchange_slow:
        why = "all links carried the all-to-all, so the reduction is slow (kernel, protocol or algorithm)"
        return PatternVerdict("all-reduce", f"{rates_text}; {why}: {_NEXT_FOR_ALL_REDUCE}")
    if exchange_slow and not reduce_slow:
        return PatternVerdict("all-to-all", f"{rates_text}; {where or _shared(rates)}", ranks)
    return PatternVerdict("both", f"{rates_text}; {where or 'no pair stands out: check the switch'}", ranks)


def _is_slow(rates: PatternRates, expected: PatternRates | None, least_ratio: float) -> tuple[bool, bool]:
    """Return whether all-reduce is slow, and whether all-to-all is."""
    best_pair = max(rates.pairs.values(), default=0.0)
    found = []
    for own, other, known in (
        (rates.all_reduce, rates.all_to_all, expected.all_reduce if expected else 0.0),
        (rates.all_to_all, rates.all_reduce, expected.all_to_all if expected else 0.0),
    ):
        alone = least_ratio * (known or max(other, best_pair))
        found.append(own < max(SLOW_RATIO * known, alone))
    return found[0], found[1]


def _worst(pairs: Mapping[tuple[int, int], float], names: Sequence[str]) -> tuple[tuple[int, ...], str]:
    """The rank all of whose pairs are slow, or else the slowest path; nothing where no pair is slow."""
    if not pairs:
        return (), ""
    good = statistics.quantiles(pairs.values(), n=4)[2] if len(pairs) > 2 else max(pairs.values())
    slow = {pair: rate for pair, rate in pairs.items() if rate < SLOW_RATIO * good}
    ranks = sorted({rank for pair in pairs for rank in pair})
    of_rank = {rank: [pair for pair in pairs if rank in pair] for rank in ranks}
    bad = [rank for rank in ranks if all(pair in slow for pair in of_rank[rank])]
    if len(ranks) > 2 and len(bad) == 1:
        rate = statistics.median(pairs[pair] for pair in of_rank[bad[0]])
        return (bad[0],), f"{names[bad[0]]} is slow with each other one: {_rate(rate)} of {_rate(good)}"
    usual = statistics.median(pairs.values())
    paths = {pair: rate for pair, rate in pairs.items() if rate < BAD_RATIO * usual}
    if paths and len(paths) < BAD_RATIO * len(pairs):
        worst = min(paths, key=lambda pair: paths[pair])
        first, second = sorted(worst)
        reached = f"{_rate(paths[worst])} of {_rate(usual)}"
        path = f"the path between {names[first]} and {names[second]} is slow: {reached}"
        return (first, second), path
    return (), ""


def _shared(rates: PatternRates) -> str:
    alone = max(rates.pairs.values(), default=0.0)
    pairs = f"each pair alone reaches {_rate(min(rates.pairs.values()))} or more, so " if alone else ""
    return f"{pairs}flows that run at the same time slow each other down: {_NEXT_FOR_SHARED}"


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"
