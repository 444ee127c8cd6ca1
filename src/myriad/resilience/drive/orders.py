"""What decisions become on the wire: orders to the executors that are there, lines to the engine.

A decision may be carried out twice, by two drivers: each order is for one epoch, and an executor that has
obeyed it does nothing the second time. Who is not there hears nothing; it tells what it has when it comes.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from myriad.resilience.decide.actions import (
    Action,
    Blame,
    DumpStacks,
    EndRun,
    Evict,
    Examine,
    Notice,
    StartAttempt,
    StopRanks,
    TellSlow,
    TurnRanks,
)
from myriad.resilience.decide.decisions import Decider
from myriad.resilience.decide.state import Plan
from myriad.resilience.facts import Agreed, Dump, End, ExamineNode, KeepCounters, Leave, Order, Start, Turn
from myriad.resilience.wire import Link

__all__ = ["Orders", "TellEngine", "tell_engine"]

_MOST_PEERS = 3
"""Nodes besides the one meant that store their link counters around a fault."""

TellEngine = Callable[[dict[str, Any]], None]


def tell_engine(message: dict[str, Any]) -> None:
    """A line of JSON on this process's output."""
    line = (json.dumps(message) + "\n").encode()
    os.set_blocking(1, bool(message))  # an engine that is stopped for a night does not read that all is well
    with suppress(BlockingIOError):
        os.write(1, line)


class Orders:
    """Of one driver."""

    def __init__(self, plan: Plan, decider: Decider, links: Mapping[int, Link], tell: TellEngine) -> None:
        """``links``: of the nodes that are there."""
        self._plan, self._decider, self._links, self._tell_engine = plan, decider, links, tell
        self._told_agreed: tuple[Agreed, tuple[int, ...]] | None = None

    def carry_out(self, action: Action) -> None:
        """Of what was decided, all that others are to do."""
        self._keep_counters(action)
        if isinstance(action, StartAttempt):
            self._start(action)
        elif isinstance(action, DumpStacks):
            self._dump(action)
        elif isinstance(action, StopRanks):
            self.send_all(End(action.epoch))
        elif isinstance(action, TurnRanks):
            self.send_all(Turn(action.epoch))
        elif isinstance(action, Examine):
            if action.node in self._links:
                self._links[action.node].send(ExamineNode(action.how))
        elif isinstance(action, Evict):
            if (link := self._links.get(action.node)) is not None:
                link.abort()
            self._tell_engine({"replace": action.node})
        elif isinstance(action, EndRun):
            self._tell_engine({"end": action.outcome, "reason": action.reason, "rule": action.rule})
            self.send_all(Leave())

    def tell_agreed(self) -> None:
        """Which steps can be gone back to, to nodes that do not know it."""
        state = self._decider.state
        told = Agreed(state.epoch, state.agreed_step), tuple(self._links)
        if state.agreed_step >= 0 and told != self._told_agreed:
            self._told_agreed = told
            self.send_all(told[0])

    def send_all(self, order: Order) -> None:
        """To every node that is there."""
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

    def _keep_counters(self, action: Action) -> None:
        """The node that is meant and a few peers: the counters of all 1,536 would say the same again."""
        placement = self._decider.state.placement
        if isinstance(action, DumpStacks):
            meant = [node for node, ranks in placement.items() if set(ranks) & set(action.ranks)]
            why = "hang"
        elif isinstance(action, Blame):
            meant, why = [action.node], f"{action.cause} fault"
        elif isinstance(action, TellSlow):
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
        """To each its own: all 12,288 ranks may be meant."""
        meant = set(action.ranks)
        for node, ranks in self._decider.state.placement.items():
            own = tuple(rank for rank in ranks if rank in meant)
            if own and node in self._links:
                self._links[node].send(Dump(action.epoch, own))
