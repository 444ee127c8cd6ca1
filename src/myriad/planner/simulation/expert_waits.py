"""Replicas that share experts in a simulated iteration: in each block they wait for the slowest of them.

Where ``layout.ep`` reaches over several replicas, tokens travel between them in each block with experts. So a
forward or backward has three parts: its layers before the first such block, the blocks up to the last one,
in which all replicas go as fast as the slowest, and its layers after that.

    replica 0   |lead|..|== blocks ======|tail|      waits at its first exchange
    replica 1   |==lead=|== blocks ======|=tail=|    slower

    end of the blocks = latest end of a lead + longest compute in the blocks + exposed exchanges

A slow rank computes more slowly; its exchanges take as long as without that. A congested link slows the
tokens that cross it, and a link that is down stops the blocks of all replicas that share experts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from myriad.comm.layout import Layout
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_layers import expert_blocks
from myriad.planner.simulation.spans_in_layers import exposed_in_layers
from myriad.program.actions import Action, Kind
from myriad.program.in_flight import FORWARDS
from myriad.program.partition import cut_ranges

if TYPE_CHECKING:
    from myriad.planner.simulation.simulated_events import NetworkEvents

__all__ = ["ExpertMeeting", "ExpertWaits", "ExpertWindow", "replicas_that_share"]


def replicas_that_share(layout: Layout) -> int:
    """Return the number of neighbouring replicas whose ranks share experts; 1: each has all of them."""
    return max(1, layout.ep * layout.expert_tp // (layout.cp * layout.tp))


@dataclass(frozen=True)
class ExpertWindow:
    """The part of a compute action in which ranks that share experts exchange tokens."""

    lead_ratio: float
    """Share of the action's compute before the first block with experts."""
    tail_ratio: float
    """Share after the last one."""
    exposed_seconds: float
    """Exposed seconds of the exchanges."""

    @property
    def blocks_ratio(self) -> float:
        """Share of the compute between the first and the last block with experts."""
        return 1 - self.lead_ratio - self.tail_ratio


@dataclass
class ExpertMeeting:
    """One compute action of the replicas that share experts."""

    arrived: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Second at which each lane begins, and its seconds of compute."""
    blocks_end: float | None = None
    """Second at which the blocks with experts end on all lanes; ``None``: some have yet to begin."""


class ExpertWaits:
    """The waiting of lanes (pipeline ranks of replicas) that share experts."""

    def __init__(self, costs: Costs, lanes: Sequence[tuple[int, int]]) -> None:
        """Prepare the waiting. ``lanes``: replica and pipeline rank of each; replica -1 stands for replicas
        that wait for none but their equals."""
        self.costs, self.lanes = costs, tuple(lanes)
        self.layers = cut_ranges(costs.layers_of_stage, costs.num_chunks)
        sharers = replicas_that_share(costs.workload.layout)
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for lane, (replica, rank) in enumerate(lanes):
            groups[replica // sharers, rank].append(lane)
        self.peers = [tuple(groups[replica // sharers, rank]) for replica, rank in lanes]
        """Lanes that share experts with each lane, itself included."""
        self._windows: dict[tuple[Kind, int], ExpertWindow | None] = {}
        self._slower: dict[float, Costs] = {}
        self._meetings: dict[tuple[Kind, int, int, int], ExpertMeeting] = {}

    def begin(self) -> None:
        """Forget the actions of the previous iteration."""
        self._meetings.clear()

    def window(self, action: Action) -> ExpertWindow | None:
        """Return the part of a compute action in which tokens travel; ``None``: there is none."""
        key = action.kind, action.stage
        if key not in self._windows:
            self._windows[key] = self._window(action)
        return self._windows[key]

    def _window(self, action: Action) -> ExpertWindow | None:
        model, layers = self.costs.workload.model, list(self.layers[action.stage])
        with_experts = [place for place, layer in enumerate(layers) if expert_blocks(model, layer)]
        if not with_experts or action.kind is Kind.BACKWARD_WEIGHT:
            return None
        times = [self.costs.layer_times(layer).forward for layer in layers]
        each = [float(one.total - one.experts) for one in times]
        first, last = with_experts[0], with_experts[-1]
        lead, tail = (sum(part) / sum(each) for part in (each[:first], each[last + 1 :]))
        if action.kind not in FORWARDS:
            lead, tail = tail, lead
        stage, recompute = self.costs.stages[action.stage], self.costs.workload.recompute
        exposed = exposed_in_layers(stage, action, recompute)["experts"]
        return ExpertWindow(lead, tail, exposed * self.costs.cluster.expected_slowdown)

    def meeting(self, lane: int, action: Action) -> ExpertMeeting:
        """Return the meeting of a lane and its peers in a compute action."""
        key = action.kind, action.stage, action.micro_batch, self.peers[lane][0]
        return self._meetings.setdefault(key, ExpertMeeting())

    def blocks_end(self, lane: int, action: Action, network: "NetworkEvents | None") -> float:
        """Return the second at which the blocks with experts end on a lane and its peers, which have all
        begun the action."""
        arrived = self.meeting(lane, action).arrived.values()
        window = self.window(action)
        assert window is not None, "lanes meet only where tokens travel"
        begin = max(now + window.lead_ratio * computing for now, computing in arrived)
        longest = max(computing for _, computing in arrived)
        end = begin + window.blocks_ratio * longest + window.exposed_seconds
        if network is None:
            return end
        lanes = [self.lanes[peer] for peer in self.peers[lane]]
        end += self._congested_seconds(action, network.rate_ratio(lanes))
        return end + network.held_seconds(begin, end, lanes)

    def _congested_seconds(self, action: Action, rate_ratio: float) -> float:
        """Return the exposed seconds that the exchanges of an action take longer at a lower rate."""
        if rate_ratio == 1:
            return 0.0
        if rate_ratio not in self._slower:
            self._slower[rate_ratio] = self.costs.with_slower_exchanges(1 / rate_ratio)
        slower = self._slower[rate_ratio].stages[action.stage].seconds_of(action.kind)
        return slower - self.costs.stages[action.stage].seconds_of(action.kind)
