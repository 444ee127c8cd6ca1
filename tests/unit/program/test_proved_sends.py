"""If these fail, a rank frees a tensor that its peer has not received yet, or waits for the peer where it
should not, or holds the sent tensors of every micro-batch of an iteration."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from program_shapes import KINDS_OF_SCHEDULES, lowered, paired

from myriad.program.actions import SEMANTICS, Action, Kind, Payload, PipelineTransfer, Program
from myriad.program.config import OverlapConfig
from myriad.program.lower import lower
from myriad.program.passes import apply_passes
from myriad.program.proved_sends import Message, message_of, proved_sends
from myriad.program.schedules import schedule

Clock = list[int]
"""For each rank, how many of its actions have ended, as far as one rank knows from messages."""


@dataclass
class Run:
    """Executes a program where a message takes no time, with the vector clock of every wait (Mattern, 1989):
    what has happened before it in any interleaving of the ranks."""

    program: Program
    sent: dict[Message, Clock] = field(default_factory=dict)
    """Clock at which each message was posted."""
    ended: dict[Message, tuple[int, int]] = field(default_factory=dict)
    """Rank and number of the action that waited for each message."""
    waited: dict[Message, Clock] = field(default_factory=dict)
    """Clock when that wait had ended."""

    def __post_init__(self) -> None:
        count = self.program.num_ranks
        self.clocks = [[0] * count for _ in range(count)]
        left = [deque(actions) for actions in self.program.ranks]
        while any(left):
            before = sum(map(len, left))
            for rank, actions in enumerate(left):
                while actions and self._runs(rank, actions[0]):
                    actions.popleft()
            assert sum(map(len, left)) < before, "deadlock"

    def _runs(self, rank: int, action: Action) -> bool:
        does, clock = SEMANTICS[action.kind], self.clocks[rank]
        for one in action.transfers if does.posts else ():
            if one.sends:
                self.sent.setdefault(message_of(one), list(clock))
        received = [message_of(one) for one in action.transfers if not one.sends and does.waits]
        if any(message not in self.sent for message in received):
            return False
        for message in received:
            clock[:] = map(max, clock, self.sent[message])
        clock[rank] += 1
        for message in received:
            self.waited[message], self.ended[message] = list(clock), (rank, clock[rank])
        return True


def posted_sends(program: Program, rank: int) -> list[Message]:
    """Return what a rank sends without waiting."""
    actions = (action for action in program.ranks[rank] if action.kind is Kind.SEND)
    return [message_of(one) for action in actions for one in action.transfers]


@given(lowered() | paired())
@settings(max_examples=250, deadline=None)
def test_a_send_ends_only_after_its_peer_has_waited_for_it_in_any_interleaving(program: Program) -> None:
    run = Run(program)
    for rank in range(program.num_ranks):
        own: set[Message] = set(posted_sends(program, rank))
        seen: list[Message] = []
        for message, sends in proved_sends(program, rank).items():
            for send in sends:
                peer, number = run.ended[send]
                assert run.waited[message][peer] >= number
                assert run.sent[send][rank] < run.waited[message][rank]
            seen += sends
        assert len(seen) == len(set(seen))
        if any(action.kind is Kind.SEND for action in program.ranks[rank]):
            assert own >= set(seen)


@given(lowered() | paired())
@settings(max_examples=250, deadline=None)
def test_every_gradient_ends_the_send_of_its_activation(program: Program) -> None:
    """Captured stages write their next output over it after the backward that the gradient starts."""
    for rank, actions in enumerate(program.ranks):
        proved, ended = proved_sends(program, rank), set()
        for action in actions:
            for one in action.transfers if SEMANTICS[action.kind].waits else ():
                if not one.sends:
                    ended |= set(proved.get(message_of(one), ()))
                    answered = (Payload.ACTIVATION, one.stage - 1, one.micro_batch)
                    assert one.payload is Payload.ACTIVATION or answered in ended


def most_sends(program: Program, rank: int, payload: Payload) -> int:
    """Return the largest number of messages of a payload that a rank holds because they may be in flight."""
    proved, now, most = proved_sends(program, rank), set(), 0
    for action in program.ranks[rank]:
        for one in action.transfers:
            if action.kind is Kind.SEND and one.payload is payload:
                now.add(message_of(one))
            if action.kind is Kind.WAIT:
                now -= set(proved.get(message_of(one), ()))
        most = max(most, len(now))
    return most


@pytest.mark.parametrize("receive_ahead", [1, 2, 4])
@pytest.mark.parametrize(("name", "virtual_stages"), [*KINDS_OF_SCHEDULES, ("eager-1f1b", 1)])
def test_sent_tensors_do_not_add_up_over_an_iteration(
    name: str, virtual_stages: int, receive_ahead: int
) -> None:
    """But with GPipe, where gradients flow only when all activations have."""

    def held(num_micro_batches: int) -> list[list[int]]:
        computes = schedule(name, 4, virtual_stages, num_micro_batches)
        program = lower(computes, zero=0, reduce="last", tied=False, training=True)
        program = apply_passes(program, OverlapConfig(receive_ahead=receive_ahead), 1)
        return [[most_sends(program, rank, payload) for payload in Payload] for rank in range(4)]

    if name == "gpipe":
        assert held(16) == [[16, 0], [16, 16], [16, 16], [0, 16]]
    else:
        assert held(24) == held(48)
        assert max(map(max, held(48))) < 3 * 4


def transfer(payload: Payload, stage: int, micro_batch: int, peer: int, *, sends: bool) -> PipelineTransfer:
    return PipelineTransfer(payload, stage, micro_batch, peer, sends)


def test_a_message_that_an_exchange_posts_proves_nothing_that_the_same_exchange_waits_for() -> None:
    activation, gradient = (Payload.ACTIVATION, 0, 0), (Payload.GRADIENT, 1, 0)
    first = (
        Action(Kind.SEND, transfers=(transfer(*activation, 1, sends=True),)),
        Action(Kind.RECEIVE, transfers=(transfer(*gradient, 1, sends=False),)),
        Action(Kind.WAIT, transfers=(transfer(*gradient, 1, sends=False),)),
    )
    both = (transfer(*activation, 0, sends=False), transfer(*gradient, 0, sends=True))
    apart = tuple(Action(Kind.EXCHANGE, transfers=(one,)) for one in both)
    together = (Action(Kind.EXCHANGE, transfers=both),)
    assert proved_sends(Program("1f1b", 1, (0, 1), (first, together)), 0) == {}
    assert proved_sends(Program("1f1b", 1, (0, 1), (first, apart)), 0) == {gradient: (activation,)}
