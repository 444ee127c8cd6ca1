"""Sends that are complete when a later message from the same peer has arrived.

No action waits for a posted send: the wait would delay what comes after it, although only the memory of the
tensor is at stake. The programs of all ranks are known, so a message that a rank receives anyway can prove
that a send has completed. It does if the peer waits for the send's tensor before it posts the message:

    rank 1   ... B s1 m0  SEND g1.0  ........  F s1 m3  B s1 m1  SEND g1.1  WAIT a0.4  F s1 m4
    rank 0   ...................  WAIT g1.0  B s0 m0  F s0 m4  SEND a0.4

Here the activation a0.4 proves that rank 0 has the gradient g1.0, and in the same way a gradient proves the
activations before it. Rank 1 then drops the tensor, and its wait for the send returns at once. With NCCL,
where waits order streams, the peer's message starts on its device after the transfer that it waited for.

A message proves everything that its peer had waited for when it posted the message, so each send is listed at
the first receive that proves it. Three kinds of sends have no such receive, and complete at the end of the
iteration: a rank's last ones, GPipe's gradients (all backwards follow all forwards, so that a rank receives
nothing from the stage before), and a validation's activations.

The runtime drops tensors by these lists, and the planner counts them (`myriad.planner.memory.rank_memory`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from myriad.program.actions import SEMANTICS, Action, Payload, PipelineTransfer, Program

__all__ = ["Message", "ProvedSends", "message_of", "proved_sends"]

Message = tuple[Payload, int, int]
"""A tensor between stages: its payload, the stage that computed it, and its micro-batch."""

ProvedSends = Mapping[Message, Sequence[Message]]
"""The messages of one rank that another one proves to be at their peer, by the latter, which it receives."""


def message_of(transfer: PipelineTransfer) -> Message:
    """Return the tensor that a transfer sends or receives."""
    return transfer.payload, transfer.stage, transfer.micro_batch


def proved_sends(program: Program, rank: int) -> ProvedSends:
    """Return for each message that a pipeline rank receives which of its sends have completed when it has
    waited for that message, and not earlier. Messages that prove nothing new are left out. The run time is
    linear in the number of actions of the rank and its peers."""
    own = [action for action in program.ranks[rank] if action.transfers]
    peers = {transfer.peer for action in own for transfer in action.transfers}
    held = {peer: list(_held_before_messages(program.ranks[peer], rank)) for peer in peers}
    turns = {message: turn for every in held.values() for turn, (message, _) in enumerate(every)}
    known = dict.fromkeys(peers, 0)
    """For each peer, the number of its messages whose proofs are listed."""
    proved = {}
    for transfer in _received(own):
        message, peer = message_of(transfer), transfer.peer
        first, known[peer] = known[peer], max(known[peer], turns[message] + 1)
        if found := tuple(chain.from_iterable(sends for _, sends in held[peer][first : known[peer]])):
            proved[message] = found
    return proved


def _received(actions: Iterable[Action]) -> Iterable[PipelineTransfer]:
    """Yield the transfers that a rank receives, in the order in which it waits for them."""
    for action in actions:
        if SEMANTICS[action.kind].waits:
            yield from (transfer for transfer in action.transfers if not transfer.sends)


def _held_before_messages(actions: Iterable[Action], to: int) -> Iterable[tuple[Message, list[Message]]]:
    """Yield each message that a rank posts to rank ``to``, in order, with the messages from ``to`` that it
    has waited for since the one before. An exchange posts before it waits."""
    arrived: list[Message] = []
    for action in actions:
        if not action.transfers:
            continue
        does, own = SEMANTICS[action.kind], [one for one in action.transfers if one.peer == to]
        for transfer in own if does.posts else ():
            if transfer.sends:
                yield message_of(transfer), arrived
                arrived = []
        if does.waits:
            arrived += [message_of(one) for one in own if not one.sends]
