"""If this fails, some order of faults, delays and lost messages makes a run wait for ever, start its ranks
twice, or finish before it is done.

A simulated cluster obeys the real recovery policy: nodes whose messages are late, cables that are cut,
executors that die or are stopped, ranks that die, hang, are stopped or only lose a peer, a person who stops
the run, and drivers that are held up, or die at any instant, also between the journal and the act, or with a
decision that the journal has missed. The clock is the test's own. No healthy node may be evicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from myriad.supervise.messages import Beat, NodeJoined, NodeLeft, StopAsked
from myriad.supervise.observations import RankExited, RankStatus
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.policy_actions import (
    EndRun,
    Evict,
    PolicyAction,
    RestartAtStep,
    StartAttempt,
    StopRanks,
)
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.wire.message_codec import plain, read

WORLD, NODES, SPARES, RESTARTS = 4, 2, 1, 3
TICK_SECONDS, RECONNECT_SECONDS, REPLACE_SECONDS, PEER_SECONDS = 0.25, 0.25, 2.0, 0.5
CUT_OFF_SECONDS = 3.5
"""After which a node without a driver's machine ends its ranks by itself."""
SETTLE_SECONDS = 3600.0
"""In which a run that meets no more faults must be at work again, or have ended with a reason."""

STOPPED_SECONDS = 6.0
"""In which a rank that is stopped must be found, while everything else is well."""

WHILE = st.sampled_from([0.0, 0.25, 1.0, 4.0, 12.0])
RANK, NODE = st.integers(0, WORLD - 1), st.integers(0, NODES)


@dataclass
class Rank:
    step: int = -1
    since: float = 0.0
    """When it made progress last."""
    hangs: bool = False
    stopped: bool = False
    unfound: float = 0.0
    """Seconds for which it has been stopped and could have been found."""
    dies_at: float | None = None
    """It has lost a peer."""


@dataclass
class Node:
    """An executor with its ranks, and the messages on their way from and to it."""

    number: int
    by: int
    lag: float = 0.0
    cut_at: float | None = None
    connects_at: float = 0.0
    connected: bool = False
    linked: bool = False
    """The driver has heard that it is connected; what is sent to it before is lost."""
    epoch: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    exits: dict[int, RankExited] = field(default_factory=dict)
    sent: list[tuple[float, Any]] = field(default_factory=list)
    orders: list[tuple[float, Any]] = field(default_factory=list)
    waiting: tuple[int, tuple[int, ...]] | None = None
    stop_asked: bool = False
    silent_until: float = 0.0
    """It is stopped: its connection stays open, and it neither reports nor executes commands."""
    troubled: bool = False
    """Something was wrong with it."""


class Cluster(RuleBasedStateMachine):
    """What the driver's machine, its nodes and a person do, in any order."""

    @initialize(spares=st.integers(0, SPARES), patience=st.sampled_from([1.0, 3.0]))
    def begin(self, spares: int, patience: float) -> None:
        self.now, self.look_at, self.born = 0.0, 0.0, 0
        self.plan = RunPlan(
            WORLD, NODES, first_epoch=1, restarts=RESTARTS, gather_seconds=1e6, patience=patience
        )
        self.decider = Decider(self.plan, self.now)
        self.journal: Any = None
        self.dies: str | None = None
        self.started: list[StartAttempt] = []
        self.held_until = 0.0
        """The driver is stopped."""
        self.faults, self.hung, self.stop_asked = 0, False, False
        self.troubled: set[int] = set()
        """Numbers of nodes with which something was wrong, and which were replaced."""
        """Of ranks and executors, that were their own."""
        self.end: EndRun | None = None
        self.failed_over = False
        """A driver has lost what it had decided."""
        self.nodes: dict[int, Node] = {}
        for number in range(NODES + spares):
            self.replace(number, after=0.0)
        self.advance(4.0)

    # The driver

    def handle(self, observation: Any) -> None:
        self.act(self.decider.handle(observation, self.now))

    def act(self, actions: list[PolicyAction]) -> None:
        """Journal, then act; the driver may die before either, and the next one reads the journal."""
        if not actions or self.end is not None:
            return
        dies, self.dies = self.dies, None
        self.faults += dies == "dies before it acts"
        if dies != "acts before the journal":
            self.journal = plain(self.decider.state)
        if dies != "dies before it acts":
            for action in actions:
                self.do(action)
        if dies is not None:
            self.next_driver()

    def do(self, action: PolicyAction) -> None:
        if isinstance(action, StartAttempt):
            self.check_start(action)
            for number, ranks in action.placement.items():
                self.send(number, ("start", action.epoch, ranks))
        elif isinstance(action, StopRanks):
            assert self.faults or self.hung or self.stop_asked, f"nothing was wrong with them: {action}"
            for number in self.nodes:
                self.send(number, ("end", action.epoch, ()))
        elif isinstance(action, RestartAtStep):
            for number in self.nodes:
                self.send(number, ("turn", action.epoch, ()))
        elif isinstance(action, Evict):
            was_cause = "cause" in action.evidence and action.node in self.troubled  # its machine, that is
            assert self.nodes[action.node].troubled or was_cause, f"nothing was wrong with it: {action}"
            assert self.hung or self.faults > 1 or "cause" not in action.evidence, f"too early: {action}"
            assert len(self.decider.nodes) >= NODES or "cause" not in action.evidence, f"no spare: {action}"
            self.replace(action.node, REPLACE_SECONDS)
        elif isinstance(action, EndRun):
            self.end = action
            self.check_end(action)

    def check_start(self, action: StartAttempt) -> None:
        assert all(action.epoch >= before.epoch for before in self.started), "attempts only grow"
        assert sorted(rank for ranks in action.placement.values() for rank in ranks) == list(range(WORLD))
        for number in action.placement:
            node = self.nodes[number]
            is_late = node.lag or self.now < node.silent_until
            assert self.failed_over or is_late or not node.ranks or node.epoch == action.epoch, (
                f"still at work: {node}"
            )
        self.started.append(action)

    def check_end(self, action: EndRun) -> None:
        if action.outcome == "finished":
            newest = max(node.epoch for node in self.nodes.values())
            done = {rank for node in self.nodes.values() for rank in node.exits if node.epoch == newest}
            codes = {
                exit.code
                for node in self.nodes.values()
                if node.epoch == newest
                for exit in node.exits.values()
            }
            assert done == set(range(WORLD)) and codes == {0}, "it is not done"
        elif action.outcome == "failed":
            given_up = len(self.started) > RESTARTS
            assert given_up or self.decider.state.stop_asked, f"given up too soon: {action.reason}"

    def next_driver(self) -> None:
        self.failed_over = True
        self.held_until = 0.0
        self.faults += any(node.orders for node in self.nodes.values())  # they are lost
        for node in self.nodes.values():
            node.troubled = True
            self.disconnect(node, self.now + RECONNECT_SECONDS + node.lag)
        state = None if self.journal is None else read(RunState, self.journal)
        self.decider = Decider(self.plan, self.now, state)
        if state is not None and state.outcome is not None:  # decided, and perhaps not carried out
            self.do(EndRun(rule="it was over", outcome=state.outcome, reason=state.reason))

    # Nodes

    def replace(self, number: int, after: float) -> None:
        """Another executor with this number comes; the one before it, and its ranks, are ended."""
        self.born += 1
        if number in self.nodes and self.nodes[number].troubled:
            self.troubled.add(number)
        known = self.stop_asked if self.born > NODES + SPARES else False
        self.nodes[number] = Node(number, self.born, connects_at=self.now + after, stop_asked=known)

    def send(self, number: int, order: tuple[str, int, tuple[int, ...]]) -> None:
        node = self.nodes.get(number)
        if node is not None and node.linked:
            node.orders.append((self.now + node.lag, order))

    def leave(self, number: int) -> None:
        """Its connection is lost; a driver that is paused receives it when it continues."""
        if self.now >= self.held_until:
            self.handle(NodeLeft(number))
        else:
            self.nodes[number].sent.insert(0, (self.now, NodeLeft(number)))

    def disconnect(self, node: Node, until: float) -> None:
        node.connected, node.linked, node.connects_at = False, False, until
        node.sent, node.orders = [], []

    def connect(self, node: Node) -> None:
        node.connected = True
        exits = tuple(node.exits.values())
        running = tuple(sorted(node.ranks))
        joined = NodeJoined(
            node.number, node.epoch, "here", 7, 2, 10**9, running, exits, node.stop_asked, f"it:{node.by}"
        )
        node.sent.append((self.now + node.lag, joined))

    def tell(self, node: Node, observation: Any) -> None:
        if node.connected:
            node.sent.append((self.now + node.lag, observation))

    def exit(self, node: Node, rank: int, code: int, cause: Any) -> None:
        gone = node.ranks.pop(rank)
        ended = RankExited(node.number, node.epoch, rank, code, cause, gone.step, "gone", "a.log")
        node.exits[rank] = ended
        self.tell(node, ended)
        for other in self.nodes.values():
            if code != 0 and other.epoch == node.epoch:
                for one in other.ranks.values():
                    one.dies_at = one.dies_at or self.now + PEER_SECONDS
        if not node.ranks and node.waiting is not None:
            self.start_ranks(node, *node.waiting)

    def start_ranks(self, node: Node, epoch: int, ranks: Iterable[int]) -> None:
        node.waiting, node.epoch, node.exits = None, epoch, {}
        node.ranks = {rank: Rank(since=self.now) for rank in ranks}

    def obey(self, node: Node, order: str, epoch: int, ranks: tuple[int, ...]) -> None:
        if order == "start" and epoch > node.epoch:
            if node.ranks:
                node.waiting = epoch, ranks
                self.kill_all(node)
            else:
                self.start_ranks(node, epoch, ranks)
        elif order == "end" and epoch == node.epoch:
            self.kill_all(node)
        elif order == "turn" and epoch == node.epoch:
            for rank in list(node.ranks):
                self.exit(node, rank, 0, "turned")

    def trouble(self, node: Node) -> None:
        """Something is wrong with it: it may be evicted."""
        node.troubled, self.faults = True, self.faults + 1

    def kill_all(self, node: Node) -> None:
        for rank in list(node.ranks):
            self.exit(node, rank, -9, "killed")

    # Time

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and self.end is None:
            self.now += TICK_SECONDS
            if self.now == self.held_until:  # it looks at the time before it hears what has waited for it
                self.act(self.decider.due(self.now))
            for number in sorted(self.nodes):
                self.live(self.nodes[number])
            self.check_stopped()
            if self.now >= self.look_at and self.now >= self.held_until:
                self.act(self.decider.due(self.now))
                self.look_at = self.now + (1.0 if self.decider.is_calm(self.now) else TICK_SECONDS)

    def check_stopped(self) -> None:
        """A rank that is stopped is found soon where nothing else is wrong."""
        state, nodes = self.decider.state, self.nodes.values()
        well = all(node.connected and not node.lag and self.now >= node.silent_until for node in nodes)
        well &= state.phase == "running" and state.incident is None and self.now >= self.held_until
        for node in nodes:
            for rank in node.ranks.values():
                counts = well and rank.stopped and node.epoch == state.epoch
                rank.unfound = rank.unfound + TICK_SECONDS if counts else 0.0
                assert rank.unfound <= STOPPED_SECONDS * self.plan.patience, "a stopped rank is not found"

    def live(self, node: Node) -> None:
        if self.now < node.silent_until:
            return self.train(node)
        if node.cut_at is not None:
            if node.ranks and self.now - node.cut_at > CUT_OFF_SECONDS * self.plan.patience:
                self.kill_all(node)
        elif not node.connected and self.now >= node.connects_at:
            self.connect(node)
        self.train(node)
        if node.connected and self.now % 1.0 == 0.0:
            self.tell(
                node, Beat(node.number, node.epoch, 7, tuple(map(self.seen, node.ranks, node.ranks.values())))
            )
        self.deliver(node)

    def deliver(self, node: Node) -> None:
        while node.orders and node.orders[0][0] <= self.now:
            self.obey(node, *node.orders.pop(0)[1])
        if self.now < self.held_until:
            return
        while node.sent and node.sent[0][0] <= self.now and self.nodes[node.number] is node:
            told = node.sent.pop(0)[1]
            node.linked |= isinstance(told, NodeJoined)
            self.handle(told)

    def train(self, node: Node) -> None:
        """A step a second, where all ranks of the attempt are at work."""
        for number, rank in list(node.ranks.items()):
            if rank.dies_at is not None and self.now >= rank.dies_at and not rank.hangs:
                self.exit(node, number, 1, "peer")
        peers = [
            rank
            for other in self.nodes.values()
            if other.epoch == node.epoch
            for rank in other.ranks.values()
        ]
        if len(peers) == WORLD and not any(rank.hangs for rank in peers) and self.now % 1.0 == 0.0:
            for rank in node.ranks.values():
                rank.step, rank.since = rank.step + 1, self.now

    def seen(self, number: int, rank: Rank) -> RankStatus:
        phase = "step" if rank.step >= 0 else "loading"
        entered, left = (3, 3) if rank.hangs else (4, 3)
        idle = self.now - rank.since
        step_seconds = 1.0 if rank.step > 0 else 0.0
        letter = "T" if rank.stopped else "S"
        return RankStatus(number, 9, letter, phase, "reduce", rank.step, entered, left, idle, step_seconds)

    # What can happen, after a while

    def node_of(self, rank: int) -> Node | None:
        return next((node for node in self.nodes.values() if rank in node.ranks), None)

    @rule(seconds=WHILE)
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

    @rule(after=WHILE, number=RANK, how=st.sampled_from([(-9, "killed"), (1, "peer"), (-11, "crash")]))
    def a_rank_ends(self, after: float, number: int, how: tuple[int, str]) -> None:
        self.advance(after)
        if self.end is None and (node := self.node_of(number)) is not None:
            self.trouble(node)
            self.exit(node, number, *how)

    @rule(after=WHILE, number=RANK)
    def a_rank_hangs(self, after: float, number: int) -> None:
        self.advance(after)
        node = self.node_of(number)
        if node is not None and node.ranks[number].step > 0:
            node.ranks[number].hangs = node.troubled = self.hung = True

    @rule(after=WHILE, number=RANK)
    def a_rank_is_stopped(self, after: float, number: int) -> None:
        self.advance(after)
        if (node := self.node_of(number)) is not None:
            rank = node.ranks[number]
            rank.stopped = rank.hangs = node.troubled = self.hung = True

    @rule(after=WHILE, number=NODE, seconds=st.sampled_from([1.0, 2.0, 5.0, 30.0, 1e9]))
    def an_executor_is_stopped(self, after: float, number: int, seconds: float) -> None:
        self.advance(after)
        if self.end is None and number in self.nodes:
            node = self.nodes[number]
            if seconds > 1.0 or self.now - node.silent_until < 2.0:
                self.trouble(node)
            node.silent_until = self.now + seconds

    @rule(after=WHILE, seconds=st.sampled_from([2.0, 5.0, 30.0]))
    def the_driver_is_held_up(self, after: float, seconds: float) -> None:
        self.advance(after)
        self.held_until = self.now + seconds

    @rule(after=WHILE, number=NODE, lag=st.sampled_from([0.0, 0.5, 2.0]))
    def messages_are_late(self, after: float, number: int, lag: float) -> None:
        self.advance(after)
        if number in self.nodes:
            self.nodes[number].lag = lag
            if lag:
                self.trouble(self.nodes[number])

    @rule(after=WHILE, number=NODE)
    def a_connection_breaks(self, after: float, number: int) -> None:
        self.advance(after)
        if self.end is None and number in self.nodes and self.nodes[number].connected:
            self.disconnect(self.nodes[number], self.now + RECONNECT_SECONDS)
            self.leave(number)

    @rule(after=WHILE, number=NODE)
    def a_cable_is_cut_or_repaired(self, after: float, number: int) -> None:
        self.advance(after)
        node = self.nodes.get(number)
        if node is None or self.end is not None:
            return
        if node.cut_at is not None:
            node.cut_at, node.connects_at = None, self.now
        else:
            node.cut_at = self.now
            self.trouble(node)
            if node.connected:
                self.disconnect(node, self.now)
                self.leave(number)

    @rule(after=WHILE, number=NODE, with_driver=st.booleans())
    def an_executor_dies(self, after: float, number: int, with_driver: bool) -> None:
        self.advance(after)
        if self.end is None and number in self.nodes:
            was = self.nodes[number].connected
            state = self.decider.state
            needed = with_driver and state.phase == "running" and number in state.placement
            self.replace(number, 1e9 if needed else 60.0 if with_driver else REPLACE_SECONDS)
            self.trouble(self.nodes[number])
            if with_driver:
                self.next_driver()
            elif was:
                self.leave(number)

    @rule(
        after=WHILE,
        how=st.sampled_from(["at once", "dies before it acts", "acts before the journal", "acts, then dies"]),
    )
    def a_driver_dies(self, after: float, how: str) -> None:
        self.advance(after)
        if self.end is None and how == "at once":
            self.next_driver()
        else:
            self.dies = how

    @rule(after=WHILE, sure=st.integers(0, 6))
    def a_person_stops_it(self, after: float, sure: int) -> None:
        self.advance(after)
        if sure == 6 and self.end is None:
            self.stop_asked = True
            for node in self.nodes.values():
                node.stop_asked = True
            self.handle(StopAsked(-1))

    @invariant()
    def the_journal_can_be_read(self) -> None:
        if hasattr(self, "decider"):
            assert read(RunState, plain(self.decider.state)) == self.decider.state

    def teardown(self) -> None:
        """No more faults: the run is at work soon, and then ends well."""
        if not hasattr(self, "decider"):
            return
        self.dies, self.held_until = None, min(self.held_until, self.now + TICK_SECONDS)
        for node in self.nodes.values():
            node.lag = 0.0
        self.advance(5.0)  # what is on its way arrives
        limit = self.now + SETTLE_SECONDS * self.plan.patience
        while self.end is None and not self.is_at_work():
            assert self.now < limit, f"waits for ever: {self.decider.state}"
            self.heal()
            self.advance(1.0)
        if self.end is None:
            self.finish()

    def heal(self) -> None:
        """Nodes that the driver cannot know to be needed; it must replace the others itself."""
        state = self.decider.state
        for number, node in self.nodes.items():
            needed = state.phase in ("running", "ending") and number in state.placement
            if not needed and number not in self.decider._membership:
                node.cut_at, node.silent_until = None, 0.0
                node.connects_at = min(node.connects_at, self.now)

    def is_at_work(self) -> bool:
        state, at_work = self.decider.state, set()
        for node in self.nodes.values():
            is_well = node.connected and node.cut_at is None and self.now >= node.silent_until
            if node.epoch == state.epoch and is_well:
                at_work |= {
                    number for number, rank in node.ranks.items() if not rank.hangs and rank.dies_at is None
                }
        return state.phase == "running" and not state.turning and at_work == set(range(WORLD))

    def finish(self) -> None:
        for node in self.nodes.values():
            of_this_attempt = not node.ranks or node.epoch == self.decider.state.epoch
            assert of_this_attempt or not node.connected, f"left behind: {node}"
            node.cut_at, node.silent_until = None, 0.0
            for number in list(node.ranks):
                self.exit(node, number, 0, "interrupted" if self.stop_asked else "done")
        self.advance(30.0)
        assert self.end is not None, f"all ranks are done, and it does not end: {self.decider.state}"
        assert self.end.outcome == ("interrupted" if self.stop_asked else "finished"), self.end


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
