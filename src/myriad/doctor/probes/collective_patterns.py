"""Diagnose a slow collective: which of all-reduce and all-to-all is slow, and so what causes it. Pure.

    all-reduce    each rank sends to its neighbours in a ring or tree, and adds    n links, reduction kernels
    all-to-all    each rank sends to every other at the same time                  n (n - 1) paths, no sums

Both are given as bus bandwidth (bytes per second that each rank has to send, nccl-tests' PERFORMANCE.md),
which is the rate of a link for both if nothing is wrong. A pattern is slow below half of the other and of the
best pair, or below 80 % of what other groups or the baseline reach; all-to-all also below 80 % of all-reduce
if a pair reaches less than half of it.

    all-reduce   all-to-all   cause
    slow         normal       the reduction: its kernels, protocol (LL, LL128, Simple) or algorithm (tree,
                              ring, in-network); every link has carried the all-to-all
    normal       slow         a path that is not between neighbours, seen in the pairs; or a link that many
                              flows share (uplink, PCIe switch, hashing), where each pair alone is normal
    slow         slow         a link or node, seen in the pairs
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from myriad.doctor.diagnosis import BAD_RATIO, SLOW_RATIO
from myriad.units import format_bytes

__all__ = ["Kind", "PatternRates", "PatternVerdict", "combine_rates", "diagnose_patterns"]

Kind = Literal["", "all-reduce", "all-to-all", "both", "wrong"]
"""The slow pattern; empty: none; wrong: sums or pieces have wrong values."""
_NEXT_FOR_ALL_REDUCE = "run again with NCCL_ALGO=Ring and NCCL_PROTO=Simple, and without in-network reduction"
_NEXT_FOR_SHARED = "check uplinks, hashing (ECMP) and PCIe switches for flows that share a link"


@dataclass(frozen=True)
class PatternRates:
    """Rates of one group of ranks in bytes per second; 0: not measured."""

    all_reduce: float
    all_to_all: float
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Rate from one rank to another, in steps in which each rank sends to one only."""
    wrong: tuple[str, ...] = ()
    """Patterns with wrong results."""


@dataclass(frozen=True)
class PatternVerdict:
    """The slow pattern and its location."""

    kind: Kind
    words: str
    ranks: tuple[int, ...] = ()
    """The rank, or the two ends of the path, that the pairs point to; empty if they point to none."""


def combine_rates(answers: Mapping[int, Mapping[str, Any]]) -> PatternRates:
    """Combine the answers of all ranks (`measure_patterns`); a rate is that of the slowest rank. Raises
    `KeyError`, `TypeError` or `ValueError` for invalid answers."""
    pairs = {
        (int(source), rank): float(rate)
        for rank, answer in answers.items()
        for source, rate in answer.get("pairs", {}).items()
    }
    wrong = sorted({str(name) for answer in answers.values() for name in answer.get("wrong", ())})
    slowest = [min(float(answer[key]) for answer in answers.values()) for key in ("all_reduce", "all_to_all")]
    return PatternRates(slowest[0], slowest[1], pairs, tuple(wrong))


def diagnose_patterns(
    rates: PatternRates,
    names: Sequence[str],
    expected: PatternRates | None = None,
    least_ratio: float = BAD_RATIO,
) -> PatternVerdict:
    """Return which pattern of a group is slow and why. ``expected``: rates of other groups or the baseline.
    Without it, the patterns are compared with each other and with the best pair, of which a pattern must
    reach ``least_ratio`` (less over gloo, where processors limit the rate)."""
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
    """Return the rank whose pairs are all slow, or else the slowest path; nothing if no pair is slow."""
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
