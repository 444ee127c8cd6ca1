"""What a pairwise test tells its nodes, typed, and in words."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.resilience.doctor.rounds import Outcome
from myriad.units import format_bytes

__all__ = ["Accused", "Findings", "read_findings"]

_MOST_TOLD = 64
"""Of each kind: a message has a bound."""


class Accused(Config):
    """A `myriad.resilience.doctor.rounds.Culprit` by name."""

    kind: Literal["node", "link", "pair", "all"]
    nodes: tuple[str, ...] = Field(max_length=_MOST_TOLD)
    bytes_per_second: float
    tests: int

    def words(self, expected: float) -> str:
        """What it is and what to do."""
        rate = f"{format_bytes(self.bytes_per_second)}/s, where {format_bytes(expected)}/s is expected"
        if self.bytes_per_second <= 0:
            rate = "nothing arrived whole"
        if self.kind == "node":
            told = f"node {self.nodes[0]} is bad with each of {self.tests} others: {rate}"
            return f"{told}; take it out, check its NIC, cable and switch port"
        if self.kind == "link":
            told = f"the way between {' and '.join(self.nodes)} is bad, both are well with others: {rate}"
            return f"{told}; check the switches between them"
        if self.kind == "pair":
            told = f"between {' and '.join(self.nodes)}: {rate}"
            return f"{told}; with a third node it would show which of them it is"
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

    @property
    def healthy(self) -> bool:
        """Of all nodes and what is between them."""
        return not (self.culprits or self.complaints or self.missing)

    def accuses(self, node: str) -> bool:
        """Whether the node should not train; of an undecided pair neither should."""
        return any(one.kind in ("node", "pair") and node in one.nodes for one in self.culprits)

    @property
    def words(self) -> list[str]:
        """A line for each thing that is wrong."""
        lines = [one.words(self.expected) for one in self.culprits]
        lines += [
            f"node {node} has failed checks: {', '.join(names)}" for node, names in self.complaints.items()
        ]
        return lines + [f"node {node} did not come" for node in self.missing]

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        names: Sequence[str],
        complaints: Mapping[str, Sequence[str]],
        missing: Sequence[str],
    ) -> "Findings":
        """With names for numbers, and no longer than a message may be."""
        culprits = tuple(
            Accused(
                kind=culprit.kind,
                nodes=tuple(names[node] for node in culprit.nodes[:_MOST_TOLD]),
                bytes_per_second=culprit.bytes_per_second,
                tests=culprit.tests,
            )
            for culprit in outcome.culprits[:_MOST_TOLD]
        )
        return cls(
            culprits=culprits,
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
