"""If this fails, some order of faults, lost messages and driver restarts makes the recovery policy start two
attempts at once, end a run that is not finished, or wait for ever. A model of the nodes obeys its orders; the
clock is virtual."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from myriad.resilience.codec import plain, read
from myriad.resilience.decide.actions import Action, EndRun, Evict, StartAttempt, StopRanks
from myriad.resilience.decide.decisions import Decider
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.facts import Beat, NodeJoined, NodeLeft, Observation, RankExited, RankSeen

WORLD, NODES, SPARES, FIRST = 4, 2, 1, 5
ALL = range(NODES + SPARES)
PLAN = Plan(WORLD, NODES, first_epoch=FIRST)
HEAL_SECONDS = 900
"""Of virtual time: more than every deadline of the policy, one after the other."""


class Node:
    """A node agent and its ranks: what it has, and the messages that are under way to the driver."""

    def __init__(self) -> None:
        self.epoch, self.step, self.connected = 0, -1, False
        self.living: set[int] = set()
        self.dying: list[int] = []
        """Killed, and not gone yet."""
        self.exits: dict[int, RankExited] = {}
        self.under_way: deque[Observation] = deque()
        self.orders: deque[StartAttempt | StopRanks] = deque()

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class Policy(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.nodes = 0.0, {number: Node() for number in ALL}
        self.decider = Decider(PLAN, self.now)
        self.journal = plain(self.decider.state)
        self.epochs: list[int] = []
        self.given_up: set[int] = set()
        """Nodes that were evicted since the newest attempt began."""
        self.ended: EndRun | None = None
        self.disturbances = 0
        self.away: int | None = None
        """A node that does not come back at the end: a spare has its place."""

    @initialize(trains=st.booleans(), away=st.none() | st.sampled_from(ALL))
    def begin(self, trains: bool, away: int | None) -> None:
        """Mostly with an attempt under way: else most sequences never have one."""
        self.away = away
        for number in ALL if trains else ():
            self.connect(number)
            self.deliver(number)
        for number in ALL:
            self.obey(number)

    # The driver's side

    def act(self, actions: list[Action]) -> None:
        if actions:
            assert self.ended is None, f"after the end: {actions}"
            self.journal = plain(self.decider.state)
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        if isinstance(action, StartAttempt):
            assert not self.epochs or action.epoch > self.epochs[-1], "attempt ids only grow"
            assert sorted(rank for ranks in action.placement.values() for rank in ranks) == list(range(WORLD))
            for number in action.placement:
                assert not self.nodes[number].living or number in self.given_up, "two attempts on a node"
            self.epochs.append(action.epoch)
            self.given_up = set()
        if isinstance(action, StartAttempt | StopRanks):
            for node in self.nodes.values():
                if node.connected:
                    node.orders.append(action)
        elif isinstance(action, Evict):  # its agent is ended, and another is started
            self.disturbances += 1
            self.given_up.add(action.node)
            self.nodes[action.node].reset()
        elif isinstance(action, EndRun):
            if action.outcome == "finished":
                last = [ended for node in self.nodes.values() for ended in node.exits.values()]
                done = {
                    ended.rank for ended in last if (ended.epoch, ended.cause) == (self.epochs[-1], "done")
                }
                assert done == set(range(WORLD)), "finished, and some rank is not"
            self.ended = action

    def obey(self, number: int) -> None:
        """As a node agent does: an order of another attempt than its own does nothing."""
        node = self.nodes[number]
        while node.orders:
            order = node.orders.popleft()
            if isinstance(order, StopRanks):
                node.dying = sorted(node.living) if order.epoch == node.epoch else node.dying
            elif number in order.placement and order.epoch > node.epoch:
                node.epoch, node.living, node.exits = order.epoch, set(order.placement[number]), {}
                node.dying = []

    def bury(self, number: int) -> None:
        """The next rank that was killed is gone."""
        if self.nodes[number].dying:
            rank = self.nodes[number].dying.pop(0)
            if rank in self.nodes[number].living:
                self.exit(number, rank, -9, "killed")

    def exit(self, number: int, rank: int, code: int, cause: str) -> None:
        node = self.nodes[number]
        node.living.discard(rank)
        ended = RankExited(number, node.epoch, rank, code, cause, node.step, "", "a.log")  # type: ignore[arg-type]
        node.exits[rank] = ended
        if node.connected:
            node.under_way.append(ended)

    def deliver(self, number: int, *, twice: bool = False) -> None:
        node = self.nodes[number]
        if node.under_way:
            observation = node.under_way.popleft()
            for _ in range(1 + twice):
                if self.ended is None:
                    self.act(self.decider.hear(observation, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.decider.due(self.now))

    # What may happen

    @staticmethod
    def cut(node: Node) -> None:
        node.connected = False
        node.under_way.clear()
        node.orders.clear()

    def connect(self, number: int) -> None:
        node = self.nodes[number]
        if node.connected:
            return
        node.connected = True
        living, exits = tuple(sorted(node.living)), tuple(node.exits.values())
        node.under_way.append(
            NodeJoined(number, node.epoch, "here", 7, 2, 10**9, living, exits, False, f"here:{number}")
        )

    @rule(number=st.sampled_from(ALL))
    def joins(self, number: int) -> None:
        self.connect(number)

    @rule(number=st.sampled_from(ALL), seen=st.booleans())
    def loses_its_connection(self, number: int, seen: bool) -> None:
        """With what is under way; the driver may not see it until the node is back or silent."""
        node = self.nodes[number]
        if node.connected:
            self.disturbances += 1
            self.cut(node)
            if seen and self.ended is None:
                self.act(self.decider.hear(NodeLeft(number), self.now))

    @rule(number=st.sampled_from(ALL))
    def dies_and_starts_anew(self, number: int) -> None:
        if self.nodes[number].connected and self.ended is None:
            self.act(self.decider.hear(NodeLeft(number), self.now))
        self.disturbances += 1
        self.nodes[number].reset()

    @rule(rank=st.integers(0, WORLD - 1), cause=st.sampled_from(["killed", "crash", "peer", "host memory"]))
    def a_rank_dies(self, rank: int, cause: str) -> None:
        for number, node in self.nodes.items():
            if rank in node.living:
                self.disturbances += 1
                self.exit(number, rank, -9, cause)

    @rule(number=st.sampled_from(ALL), twice=st.booleans())
    def a_message_arrives(self, number: int, twice: bool) -> None:
        self.deliver(number, twice=twice)

    @rule(number=st.sampled_from(ALL))
    def obeys(self, number: int) -> None:
        self.obey(number)

    @rule(number=st.sampled_from(ALL))
    def a_killed_rank_is_gone(self, number: int) -> None:
        self.bury(number)

    @rule(number=st.sampled_from(ALL), state=st.sampled_from("RRRRT"))
    def beats(self, number: int, state: str) -> None:
        self.beat(number, state)

    def beat(self, number: int, state: str = "R") -> None:
        node = self.nodes[number]
        if node.connected:
            ranks = [
                RankSeen(rank, 9, state, "step", "reduce", node.step, 7, 6, 0.1, 0.5) for rank in node.living
            ]
            node.under_way.append(Beat(number, node.epoch, 7, tuple(ranks)))

    @rule(steps=st.integers(1, 3))
    def all_train(self, steps: int) -> None:
        """Where every rank of an attempt lives."""
        living = [(node.epoch, rank) for node in self.nodes.values() for rank in node.living]
        if len(living) == WORLD and len({epoch for epoch, _ in living}) == 1:
            for node in self.nodes.values():
                node.step += steps

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.0, 4.0, 12.0]), looks=st.integers(1, 3))
    def time_passes(self, seconds: float, looks: int) -> None:
        for _ in range(looks):
            self.pass_time(seconds / looks)

    @precondition(lambda self: self.ended is None)
    @rule()
    def the_driver_is_killed(self) -> None:
        """The next one has the journal, and hears of the nodes as they connect to it."""
        self.disturbances += 1
        state = read(State, self.journal)
        assert plain(state) == self.journal, "replayed as it was written"
        self.decider = Decider(PLAN, self.now, state)
        for node in self.nodes.values():
            self.cut(node)

    # What holds

    @invariant()
    def attempts_are_bounded(self) -> None:
        assert len(self.epochs) <= 2 + self.disturbances

    @invariant()
    def the_journal_holds_the_decided_attempt(self) -> None:
        if self.epochs:
            assert self.journal["epoch"] >= self.epochs[-1]

    def teardown(self) -> None:
        """From here on nothing fails, but one node may be gone: the run ends, as it was given up or is
        finished."""
        if self.away is not None:
            self.nodes[self.away].reset()
        for second in range(HEAL_SECONDS):
            if self.ended is not None:
                break
            self.heal(second)
        assert self.ended is not None, f"waits for ever: {self.decider.state}"
        if self.ended.outcome == "failed":
            assert self.disturbances, self.ended

    def heal(self, second: int) -> None:
        for number, node in self.nodes.items():
            if number == self.away:
                continue
            self.connect(number)
            self.obey(number)
            for _ in range(WORLD):
                self.bury(number)
            self.beat(number)
            while node.under_way and self.ended is None:
                self.deliver(number)
        for _ in range(4):
            if self.ended is None:
                self.pass_time(0.25)
        living = [rank for node in self.nodes.values() for rank in node.living]
        running = self.ended is None and self.decider.state.phase == "running"
        if running and len(living) == WORLD and second % 30 == 29:
            for number, node in self.nodes.items():
                node.step += 1
                for rank in sorted(node.living):
                    self.exit(number, rank, 0, "done")


Policy.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestPolicy = Policy.TestCase
