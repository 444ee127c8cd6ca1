"""Effects of link flaps and congestion on a predicted iteration (``myriad simulate --flap --congested``)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.units import format_number, format_ranges

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.planner import Cluster, IterationSummary
    from myriad.planner.simulation.simulated_events import NetworkEvents

__all__ = ["NetworkEffect", "NetworkEventRequest"]

_DEFAULT_TIMERS = "20x7"
"""NCCL's default timers (docs/userguide, NCCL_IB_TIMEOUT: 20 since 2.23)."""


@dataclass(frozen=True)
class NetworkEventRequest:
    """Network events of the command line: ``--flap``, ``--congested``, ``--timers``."""

    flaps: tuple[str, ...] = ()
    congested: tuple[str, ...] = ()
    timers: str | None = None

    def events(self, job: "Job", cluster: "Cluster", order: Sequence[int] | None) -> "NetworkEvents | None":
        """Return the events as the simulator takes them. ``order``: the job's nodes, slot by slot. Raises
        `BadInputError`."""
        from myriad.planner.simulation.simulated_events import NetworkEvents, read_timers

        if self.timers is not None and not self.flaps:
            raise BadInputError("--timers", self.timers, "needs --flap")
        if not (self.flaps or self.congested):
            return None
        return NetworkEvents(
            job.layout,
            cluster,
            flaps=self.flaps,
            congested=self.congested,
            timers=read_timers(self.timers or _DEFAULT_TIMERS),
            order=order,
        )


@dataclass(frozen=True)
class NetworkEffect:
    """An iteration with network events, compared with one without."""

    events: "NetworkEvents"
    seconds: float
    plain_seconds: float
    """Seconds without the events."""

    def lines(self, found: "IterationSummary") -> Iterator[str]:
        """Return the effect in sentences."""
        more = self.seconds - self.plain_seconds
        longer = f"{more:+.3f} s, {more / self.plain_seconds:+.1%}"
        yield f"without these events {self.plain_seconds:.3f} s: {longer}"
        events, timers = self.events, self.events.timers
        for flap in events.flaps:
            wait = events.wait_seconds(flap.down_seconds)
            yield (
                f"a link of node {flap.node} is down for {format_number(flap.down_seconds)} s: transfers in "
                f"flight resume after {format_number(wait)} s (NCCL_IB_TIMEOUT={timers.timeout})"
            )
        if events.flaps:
            yield f"probability that this ends the job: {events.lost_probability:.1%}"
        for one in events.congested:
            yield f"{_nodes(one.nodes)} {one.ratio:.0%} of the rate to the others"
        longest = max(found.ranks, key=lambda rank: sum(rank.exposed_seconds.values()))
        kind = max(longest.exposed_seconds, key=lambda name: longest.exposed_seconds[name])
        whose = "of the others" if longest.replica < 0 else f"of replica {longest.replica}"
        waits = f"{longest.exposed_seconds[kind]:.3f} s for {_WORDS.get(kind, kind)}"
        yield f"waits longest: pipeline rank {longest.rank} {whose}, {waits}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "plain_iteration_seconds": self.plain_seconds,
            "lost_probability": self.events.lost_probability,
            "flaps": [_flap_as_json(self.events, one.node, one.down_seconds) for one in self.events.flaps],
            "congested": [{"nodes": list(one.nodes), "ratio": one.ratio} for one in self.events.congested],
        }


_WORDS = {
    "pipeline": "other stages",
    "gather": "parameters",
    "reduce": "gradient sums",
    "norm": "the global norm",
    "tied": "tied parameters",
    "tensor": "its tensor-parallel ranks",
}


def _nodes(nodes: Sequence[int]) -> str:
    return f"node {nodes[0]} has" if len(nodes) == 1 else f"nodes {format_ranges(nodes)} have"


def _flap_as_json(events: "NetworkEvents", node: int, down_seconds: float) -> dict[str, float]:
    return {"node": node, "down_seconds": down_seconds, "wait_seconds": events.wait_seconds(down_seconds)}
