"""The report of a pairwise test, typed, and in words.

The fault of a node or path that the rounds have named follows from one closer examination:

    lost packets without a full queue                              lossy
    each direction alone at full speed, both together not          half-duplex
    one direction alone slow, the other not                        slow one way
    any other rate above zero                                      slow
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.doctor.diagnosis import BAD_RATIO, SLOW_RATIO
from myriad.doctor.pair_tests.pair_rounds import PairTestOutcome
from myriad.doctor.probes.collective_patterns import Kind, PatternRates, diagnose_patterns
from myriad.units import format_bytes

__all__ = [
    "Findings",
    "GroupResult",
    "NamedSuspect",
    "PairRates",
    "classify_fault",
    "evaluate_groups",
    "read_findings",
]

_MAX_REPORTED = 64
"""The most entries of each kind, since the size of a message is bounded."""
_MOST_GROUPS, _MOST_WORDS = 32, 500
_LOSSY_RATIO = 0.004
_LEAST_OVER_GLOO = 1 / 3

How = Literal["", "silent", "lossy", "half-duplex", "slow out", "slow in", "slow"]
_CHECKS: Mapping[How, str] = {
    "lossy": "check cable, transceiver and switch port for damaged packets",
    "half-duplex": "set both ends to full duplex (ethtool, and the switch port)",
    "slow out": "check what it sends through: its NIC, its pause frames, the switch port's receiver",
    "slow in": "check what it receives through: the switch port's sender, its NIC and PCIe width",
}


@dataclass(frozen=True)
class PairRates:
    """Rates of one closer examination in bytes per second; 0: nothing arrived, or no node could test."""

    out: float = 0.0
    """Rate from the named node, or from the first node of the path, alone."""
    back: float = 0.0
    """Rate to the named node, or to the first of the path, alone."""
    both: float = 0.0
    """Rate of the slower direction when both send."""
    lost_ratio: float = 0.0


def classify_fault(rates: PairRates, expected: float) -> How:
    """Return the fault; empty if both directions are normal. ``expected``: bytes per second of a good pair,
    in each direction at the same time."""
    if rates.lost_ratio >= _LOSSY_RATIO:
        return "lossy"
    if not (rates.out or rates.back or rates.both):
        return "silent"
    least = SLOW_RATIO * expected
    slow_out, slow_back = rates.out < least, rates.back < least
    if not (slow_out or slow_back):
        return "half-duplex" if rates.both < least else ""
    if slow_out != slow_back:
        return "slow out" if slow_out else "slow in"
    return "slow"


class GroupResult(Config):
    """Result of a group of nodes in one collective round."""

    kind: Literal["one switch", "across switches"]
    rail: str = ""
    backend: Literal["nccl", "gloo"]
    nodes: tuple[str, ...] = Field(max_length=_MAX_REPORTED)
    all_reduce: float = 0.0
    all_to_all: float = 0.0
    """Bus bandwidth of a rank, in bytes per second."""
    trouble: Kind | Literal["failed"] = ""
    suspects: tuple[str, ...] = ()
    """The node, or the two ends of the path, that the pairs point to."""
    words: str = Field("", max_length=_MOST_WORDS)

    @property
    def title(self) -> str:
        """Name of the round."""
        rail = f", rail {self.rail}" if self.rail else ""
        few = ", ".join(self.nodes[:4]) + (", ..." if len(self.nodes) > 4 else "")
        return f"{self.kind} ({few}{rail}, {self.backend})"


def evaluate_groups(
    kind: str, rail: str, backend: str, groups: Sequence[Sequence[str]], rates: Sequence[PatternRates | str]
) -> list[GroupResult]:
    """Judge all groups of a round: each against the best of the others, and its two patterns against each
    other. A text instead of rates is the reason why there are none."""
    found = []
    known = [one for one in rates if isinstance(one, PatternRates)]
    for names, one in zip(groups, rates, strict=True):
        common = {"kind": kind, "rail": rail, "backend": backend, "nodes": tuple(names[:_MAX_REPORTED])}
        if isinstance(one, str):
            found.append(GroupResult(**common, trouble="failed", words=one[:_MOST_WORDS]))
            continue
        others = [other for other in known if other is not one]
        expected = None
        if others:
            expected = PatternRates(
                max(other.all_reduce for other in others), max(other.all_to_all for other in others)
            )
        least = _LEAST_OVER_GLOO if backend == "gloo" else BAD_RATIO
        verdict = diagnose_patterns(one, names, expected, least)
        found.append(
            GroupResult(
                **common,
                all_reduce=one.all_reduce,
                all_to_all=one.all_to_all,
                trouble=verdict.kind,
                suspects=tuple(names[rank] for rank in verdict.ranks),
                words=verdict.words[:_MOST_WORDS],
            )
        )
    return found


class NamedSuspect(Config):
    """A `Suspect` with names of nodes instead of indices."""

    kind: Literal["node", "link", "pair", "all"]
    nodes: tuple[str, ...] = Field(max_length=_MAX_REPORTED)
    bytes_per_second: float
    tests: int
    how: How = ""
    """Fault that a closer examination found."""
    out_per_second: float = 0.0
    back_per_second: float = 0.0
    """Rate of each direction alone, in bytes per second."""
    lost_ratio: float = 0.0

    def _seen(self, expected: float) -> str:
        """Describe the measured rates."""
        rate = f"{format_bytes(self.bytes_per_second)}/s, where {format_bytes(expected)}/s is expected"
        alone = f"{format_bytes(self.out_per_second)}/s out and {format_bytes(self.back_per_second)}/s in"
        if self.bytes_per_second <= 0:
            return "nothing arrived whole"
        if self.how == "lossy":
            return f"lossy: {self.lost_ratio:.1%} of packets are lost where no queue is full; {rate}"
        if self.how == "half-duplex":
            return f"half-duplex: {alone} alone, and {rate} both ways at once"
        if self.how in ("slow out", "slow in"):
            way = "sends" if self.how == "slow out" else "receives"
            return f"{way} slowly: {alone} alone, where {format_bytes(expected)}/s is expected"
        return f"slow: {rate}" if self.how == "slow" else rate

    def words(self, expected: float) -> str:
        """Describe the finding and what to do."""
        rate, check = self._seen(expected), _CHECKS.get(self.how, "check its NIC, cable and switch port")
        if self.kind == "node":
            text = f"node {self.nodes[0]} is bad with each of {self.tests} others: {rate}"
            return f"{text}; take it out, {check}"
        if self.kind == "link":
            text = f"the way between {' and '.join(self.nodes)} is bad, both are well with others: {rate}"
            return f"{text}; check the switches between them"
        if self.kind == "pair":
            text = f"between {' and '.join(self.nodes)}: {rate}"
            return f"{text}; with a third node it would show which of them it is"
        return f"all pairs are bad: {rate}; check the switch, or the baseline"


class Findings(Config):
    """The result of a pairwise test, the same on every node."""

    culprits: tuple[NamedSuspect, ...] = ()
    expected: float = 0.0
    """Bytes per second of a good pair, in each direction at the same time."""
    rounds: int = 0
    tests: int = 0
    complaints: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    """Names of failed checks by node."""
    missing: tuple[str, ...] = ()
    """Nodes that did not connect."""
    groups: tuple[GroupResult, ...] = Field((), max_length=_MOST_GROUPS)
    """Collective rounds, groups in trouble first."""
    skipped: tuple[str, ...] = ()
    """Tests that did not run, and why."""

    @property
    def healthy(self) -> bool:
        """Whether all nodes and the network between them are healthy."""
        troubled = any(group.trouble for group in self.groups)
        return not (self.culprits or self.complaints or self.missing or troubled)

    def is_suspect(self, node: str) -> bool:
        """Whether the node should not train; of an undecided pair neither should."""
        named = any(one.kind in ("node", "pair") and node in one.nodes for one in self.culprits)
        return named or any(group.suspects == (node,) for group in self.groups)

    @property
    def words(self) -> list[str]:
        """One line for each fault."""
        lines = [one.words(self.expected) for one in self.culprits]
        lines += [
            f"node {node} has failed checks: {', '.join(names)}" for node, names in self.complaints.items()
        ]
        lines += [f"node {node} did not connect" for node in self.missing]
        return lines + [
            f"{'collectives' if one.trouble in ('failed', 'both', 'wrong') else one.trouble} in {one.title}: "
            f"{'failed: ' if one.trouble == 'failed' else ''}{one.words}"
            for one in self.groups
            if one.trouble
        ]

    @classmethod
    def of(
        cls,
        outcome: PairTestOutcome,
        names: Sequence[str],
        complaints: Mapping[str, Sequence[str]],
        missing: Sequence[str],
        pair_rates: Mapping[tuple[int, ...], PairRates],
        groups: Sequence[GroupResult],
        skipped: Sequence[str],
    ) -> "Findings":
        """Return the findings with names of nodes, bounded to the size of a message."""
        culprits = []
        for culprit in outcome.culprits[:_MAX_REPORTED]:
            rates = pair_rates.get(culprit.nodes, PairRates())
            how = classify_fault(rates, outcome.expected) if culprit.nodes in pair_rates else ""
            culprits.append(
                NamedSuspect(
                    kind=culprit.kind,
                    nodes=tuple(names[node] for node in culprit.nodes[:_MAX_REPORTED]),
                    bytes_per_second=rates.both or culprit.bytes_per_second,
                    tests=culprit.tests,
                    how=how,
                    out_per_second=rates.out,
                    back_per_second=rates.back,
                    lost_ratio=rates.lost_ratio,
                )
            )
        worst = sorted(groups, key=lambda group: not group.trouble)
        return cls(
            culprits=tuple(culprits),
            groups=tuple(worst[:_MOST_GROUPS]),
            skipped=tuple(text[:_MOST_WORDS] for text in skipped[:_MAX_REPORTED]),
            expected=outcome.expected,
            rounds=outcome.rounds,
            tests=outcome.tests,
            complaints={node: tuple(complaints[node]) for node in list(complaints)[:_MAX_REPORTED]},
            missing=tuple(missing[:_MAX_REPORTED]),
        )


def read_findings(value: object) -> Findings:
    """Parse findings from a message. Raises `OSError` if they are invalid."""
    try:
        return Findings.model_validate(value)
    except ValidationError:
        raise OSError("the first node sent invalid findings") from None
