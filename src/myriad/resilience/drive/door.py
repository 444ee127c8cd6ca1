"""Answers to who knocks at a driver: a machine that would be a node, a person, a node that is left out.

Nothing is decided here: the rules are the decider's, what earlier runs tell is the gate's, who has which
number the members'. A new driver gives numbers and answers to people once it has heard of its nodes.
"""

import asyncio
import time
from collections.abc import Collection

from myriad.resilience.decide.decisions import Decider
from myriad.resilience.decide.evictions import what_follows
from myriad.resilience.decide.state import Plan
from myriad.resilience.drive.gate import Gate
from myriad.resilience.drive.members import HEAR_SECONDS, Members
from myriad.resilience.drive.traces import Traces
from myriad.resilience.facts import (
    EvictionAnswer,
    EvictionAsked,
    How,
    NodeJoined,
    NodeNumber,
    NodeRefused,
    NodeTaken,
    NodeWanted,
)
from myriad.resilience.traces import TraceAnswer, TraceAsked

__all__ = ["Door"]

_Asked = NodeWanted | EvictionAsked | TraceAsked


class Door:
    """Of one driver."""

    def __init__(
        self,
        plan: Plan,
        decider: Decider,
        gate: Gate,
        members: Members,
        traces: Traces,
        there: Collection[int],
    ) -> None:
        """``there``: nodes with a connection, as it changes."""
        self._plan, self._decider, self._gate = plan, decider, gate
        self._members, self._traces, self._there = members, traces, there
        self._began = time.monotonic()

    async def why_not(self, joined: NodeJoined) -> NodeRefused | NodeTaken | None:
        """``None``: the node that comes may be one. One that is at work is no matter of earlier runs any
        more. Who is left out of this one is examined, as it has nothing else to do."""
        if why := self._decider.why_left_out(joined):
            others = [one.machine for one in self._decider.nodes.values()]
            how: How = "short" if joined.machine in others else "full"
            return NodeRefused(why, None if self._plan.doctor == "off" else how)
        if why := "" if joined.epoch else await self._gate.why_not(joined.machine, joined.node):
            return NodeRefused(why)
        other = self._members.other_than(joined, time.monotonic())
        return None if other is None else NodeTaken(other)

    async def answer(self, asked: _Asked) -> NodeNumber | NodeRefused | EvictionAnswer | TraceAnswer:
        """To a machine that would be a node, or a person."""
        if not isinstance(asked, NodeWanted) or asked.node < 0:
            await asyncio.sleep(max(0.0, self._began + HEAR_SECONDS - time.monotonic()))
        if isinstance(asked, TraceAsked):
            return await self._traces.ask(asked, self._decider.state)
        if isinstance(asked, EvictionAsked):
            return self._answer_person(asked)
        left_out = self._decider.state.left_out.get(asked.machine, "") if asked.machine else ""
        if why := left_out or await self._gate.why_not(asked.machine, asked.node):
            return NodeRefused(why)
        taken, now = {*self._there, *self._decider.state.placement}, time.monotonic()
        return NodeNumber(asked.node if asked.node >= 0 else self._members.number_for(asked.host, taken, now))

    def _answer_person(self, asked: EvictionAsked) -> EvictionAnswer:
        decider = self._decider
        if refused := decider.why_not_evict(asked):
            return EvictionAnswer(refused, "")
        return EvictionAnswer(
            "", what_follows(asked, decider.state, decider.nodes, decider.usable, decider.needed)
        )
