"""Sends decisions as commands to the connected agents, and as lines to the launcher.

Two drivers may send the same command: each is for one attempt, and an agent that has carried it out ignores
the second. A node without a connection gets no command; it reports its state when it connects.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.messages import Agreed, Dump, End, ExamineNode, KeepCounters, Leave, Order, Start, Turn
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.policy_actions import (
    DumpStacks,
    EndRun,
    Evict,
    Examine,
    Notice,
    PolicyAction,
    ReportFault,
    ReportSlow,
    RestartAtStep,
    StartAttempt,
    StopRanks,
)
from myriad.supervise.policy.run_state import RunPlan

__all__ = ["CommandSender", "SendToLauncher", "send_to_launcher"]

_MOST_PEERS = 3
"""Most other nodes that also store their link counters around a fault."""

SendToLauncher = Callable[[dict[str, Any]], None]


def send_to_launcher(message: dict[str, Any]) -> None:
    """Write a message as a line of JSON to standard output."""
    line = (json.dumps(message) + "\n").encode()
    os.set_blocking(1, bool(message))  # a heartbeat must not block when the launcher is stopped
    with suppress(BlockingIOError):
        os.write(1, line)


class CommandSender:
    """Sends the commands of one driver."""

    def __init__(
        self,
        plan: RunPlan,
        decider: Decider,
        links: Mapping[int, AuthenticatedLink],
        to_launcher: SendToLauncher,
    ) -> None:
        """``links``: connections to the nodes."""
        self._plan, self._decider, self._links = plan, decider, links
        self._send_to_launcher = to_launcher
        self._sent_agreed: tuple[Agreed, tuple[int, ...]] | None = None

    def carry_out(self, action: PolicyAction) -> None:
        """Send the commands that carry out a decision."""
        self._keep_counters(action)
        if isinstance(action, StartAttempt):
            self._start(action)
        elif isinstance(action, DumpStacks):
            self._dump(action)
        elif isinstance(action, StopRanks):
            self.send_all(End(action.epoch))
        elif isinstance(action, RestartAtStep):
            self.send_all(Turn(action.epoch))
        elif isinstance(action, Examine):
            if action.node in self._links:
                self._links[action.node].send(ExamineNode(action.how))
        elif isinstance(action, Evict):
            if (link := self._links.get(action.node)) is not None:
                link.abort()
            self._send_to_launcher({"replace": action.node})
        elif isinstance(action, EndRun):
            self._send_to_launcher({"end": action.outcome, "reason": action.reason, "rule": action.rule})
            self.send_all(Leave())

    def send_agreed(self) -> None:
        """Send nodes the newest step on which all replicas agree, if it or the set of nodes has changed."""
        state = self._decider.state
        agreed = Agreed(state.epoch, state.agreed_step), tuple(self._links)
        if state.agreed_step >= 0 and agreed != self._sent_agreed:
            self._sent_agreed = agreed
            self.send_all(agreed[0])

    def send_all(self, order: Order) -> None:
        """Send a command to every connected node."""
        for link in self._links.values():
            link.send(order)

    def _start(self, action: StartAttempt) -> None:
        nodes = self._decider.nodes
        first = nodes[next(iter(action.placement))]
        for node, ranks in action.placement.items():
            order = Start(
                action.epoch,
                self._plan.world_of(action.layout),
                ranks,
                first.host,
                first.port,
                action.newest_step,
                action.skipped_steps,
                action.layout,
            )
            if node in self._links:
                self._links[node].send(order)

    def _keep_counters(self, action: PolicyAction) -> None:
        """Have the affected node and a few peers store their counters: those of all 1,536 nodes would add
        nothing."""
        placement = self._decider.state.placement
        if isinstance(action, DumpStacks):
            meant = [node for node, ranks in placement.items() if set(ranks) & set(action.ranks)]
            why = "hang"
        elif isinstance(action, ReportFault):
            meant, why = [action.node], f"{action.cause} fault"
        elif isinstance(action, ReportSlow):
            meant, why = [action.node], "slow rank"
        elif isinstance(action, Notice) and action.what in ("traffic", "link") and action.level != "info":
            meant, why = [action.node], f"{action.what} alarm"
        else:
            return
        peers = [node for node in placement if node not in meant][:_MOST_PEERS]
        for node in [*meant[:_MOST_PEERS], *peers]:
            if node in self._links:
                self._links[node].send(KeepCounters(why))

    def _dump(self, action: DumpStacks) -> None:
        """Send each node its own ranks: all 12,288 may be meant."""
        meant = set(action.ranks)
        for node, ranks in self._decider.state.placement.items():
            own = tuple(rank for rank in ranks if rank in meant)
            if own and node in self._links:
                self._links[node].send(Dump(action.epoch, own))
