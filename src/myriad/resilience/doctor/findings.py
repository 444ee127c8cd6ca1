"""What a pairwise test reports to its nodes, typed, and in words.

What is wrong with a node or a path that the rounds have named follows from one closer look:

    lost packets, though no queue is full                    lossy
    each way alone as fast as it should be, both not         half-duplex
    one way alone slow, the other not                        slow one way
    anything else that arrives                               slow
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.resilience.doctor.item import BAD_RATIO, SLOW_RATIO
from myriad.resilience.doctor.patterns import Kind, PatternRates, tell_apart
from myriad.resilience.doctor.rounds import Outcome
from myriad.units import format_bytes

__all__ = ["Accused", "Findings", "GroupSeen", "Look", "judge_groups", "read_findings", "what_is_wrong"]

_MOST_TOLD = 64
"""Of each kind: a message has a bound."""
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
class Look:
    """One closer look, in bytes per second; 0: nothing arrived, or no node could look."""

    out: float = 0.0
    """From the named node, or the first of the path, alone."""
    back: float = 0.0
    """Rate to the named node, or to the first of the path, alone."""
    both: float = 0.0
    """The slower way when both send."""
    lost_ratio: float = 0.0


def what_is_wrong(look: Look, expected: float) -> How:
    """Say what is wrong; empty where both ways are well. ``expected``: bytes per second of a good pair, each
    way at once."""
    if look.lost_ratio >= _LOSSY_RATIO:
        return "lossy"
    if not (look.out or look.back or look.both):
        return "silent"
    least = SLOW_RATIO * expected
    slow_out, slow_back = look.out < least, look.back < least
    if not (slow_out or slow_back):
        return "half-duplex" if look.both < least else ""
    if slow_out != slow_back:
        return "slow out" if slow_out else "slow in"
    return "slow"


class GroupSeen(Config):
    """What a group of nodes reached in one collective round."""

    kind: Literal["one switch", "across switches"]
    rail: str = ""
    backend: Literal["nccl", "gloo"]
    nodes: tuple[str, ...] = Field(max_length=_MOST_TOLD)
    all_reduce: float = 0.0
    all_to_all: float = 0.0
    """Bus bandwidth, bytes per second of a rank."""
    trouble: Kind | Literal["failed"] = ""
    suspects: tuple[str, ...] = ()
    """The node, or the two ends of the path, that the pairs show."""
    words: str = Field("", max_length=_MOST_WORDS)

    @property
    def title(self) -> str:
        """Name of the round."""
        rail = f", rail {self.rail}" if self.rail else ""
        few = ", ".join(self.nodes[:4]) + (", ..." if len(self.nodes) > 4 else "")
        return f"{self.kind} ({few}{rail}, {self.backend})"


def judge_groups(
    kind: str, rail: str, backend: str, groups: Sequence[Sequence[str]], rates: Sequence[PatternRates | str]
) -> list[GroupSeen]:
    """Judge all groups of one round: each against the best of the others, and its patterns against each
    other. A text instead of rates says why there are none."""
    found = []
    known = [one for one in rates if isinstance(one, PatternRates)]
    for names, one in zip(groups, rates, strict=True):
        common = {"kind": kind, "rail": rail, "backend": backend, "nodes": tuple(names[:_MOST_TOLD])}
        if isinstance(one, str):
            found.append(GroupSeen(**common, trouble="failed", words=one[:_MOST_WORDS]))
            continue
        others = [other for other in known if other is not one]
        expected = None
        if others:
            expected = PatternRates(
                max(other.all_reduce for other in others), max(other.all_to_all for other in others)
            )
        least = _LEAST_OVER_GLOO if backend == "gloo" else BAD_RATIO
        verdict = tell_apart(one, names, expected, least)
        found.append(
            GroupSeen(
                **common,
                all_reduce=one.all_reduce,
                all_to_all=one.all_to_all,
                trouble=verdict.kind,
                suspects=tuple(names[rank] for rank in verdict.ranks),
                words=verdict.words[:_MOST_WORDS],
            )
        )
    return found


class Accused(Config):
    """A `myriad.resilience.doctor.rounds.Culprit` by name."""

    kind: Literal["node", "link", "pair", "all"]
    nodes: tuple[str, ...] = Field(max_length=_MOST_TOLD)
    bytes_per_second: float
    tests: int
    how: How = ""
    """What a closer look has found."""
    out_per_second: float = 0.0
    back_per_second: float = 0.0
    """Each way alone, bytes per second."""
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
    """The same on every node of the test."""

    culprits: tuple[Accused, ...] = ()
    expected: float = 0.0
    """Bytes per second of a good pair, each way at once."""
    rounds: int = 0
    tests: int = 0
    complaints: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    """Node to the names of its own checks that failed."""
    missing: tuple[str, ...] = ()
    """Nodes that did not come."""
    groups: tuple[GroupSeen, ...] = Field((), max_length=_MOST_GROUPS)
    """Collective rounds, groups in trouble first."""
    skipped: tuple[str, ...] = ()
    """What was not tested, and why."""

    @property
    def healthy(self) -> bool:
        """Of all nodes and what is between them."""
        troubled = any(group.trouble for group in self.groups)
        return not (self.culprits or self.complaints or self.missing or troubled)

    def accuses(self, node: str) -> bool:
        """Whether the node should not train; of an undecided pair neither should."""
        named = any(one.kind in ("node", "pair") and node in one.nodes for one in self.culprits)
        return named or any(group.suspects == (node,) for group in self.groups)

    @property
    def words(self) -> list[str]:
        """A line for each thing that is wrong."""
        lines = [one.words(self.expected) for one in self.culprits]
        lines += [
            f"node {node} has failed checks: {', '.join(names)}" for node, names in self.complaints.items()
        ]
        lines += [f"node {node} did not come" for node in self.missing]
        return lines + [
            f"{'collectives' if one.trouble in ('failed', 'both', 'wrong') else one.trouble} in {one.title}: "
            f"{'failed: ' if one.trouble == 'failed' else ''}{one.words}"
            for one in self.groups
            if one.trouble
        ]

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        names: Sequence[str],
        complaints: Mapping[str, Sequence[str]],
        missing: Sequence[str],
        looks: Mapping[tuple[int, ...], Look],
        groups: Sequence[GroupSeen],
        skipped: Sequence[str],
    ) -> "Findings":
        """With names for numbers, and no longer than a message may be."""
        culprits = []
        for culprit in outcome.culprits[:_MOST_TOLD]:
            look = looks.get(culprit.nodes, Look())
            how = what_is_wrong(look, outcome.expected) if culprit.nodes in looks else ""
            culprits.append(
                Accused(
                    kind=culprit.kind,
                    nodes=tuple(names[node] for node in culprit.nodes[:_MOST_TOLD]),
                    bytes_per_second=look.both or culprit.bytes_per_second,
                    tests=culprit.tests,
                    how=how,
                    out_per_second=look.out,
                    back_per_second=look.back,
                    lost_ratio=look.lost_ratio,
                )
            )
        worst = sorted(groups, key=lambda group: not group.trouble)
        return cls(
            culprits=tuple(culprits),
            groups=tuple(worst[:_MOST_GROUPS]),
            skipped=tuple(text[:_MOST_WORDS] for text in skipped[:_MOST_TOLD]),
            expected=outcome.expected,
            rounds=outcome.rounds,
            tests=outcome.tests,
            complaints={node: tuple(complaints[node]) for node in list(complaints)[:_MOST_TOLD]},
            missing=tuple(missing[:_MOST_TOLD]),
        )


def read_findings(value: object) -> Findings:
    """From a message. Raises `OSError` for what is none."""
    try:
        return Findings.model_validate(value)
    except ValidationError:
        raise OSError("the first node told something that cannot be understood") from None
