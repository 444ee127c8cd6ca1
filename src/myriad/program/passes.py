"""Passes: a program in, a better program out, the same mathematics. The checker proves every result.

    coupled     B s1 m0 ............ EXCHANGE(send g1.0, receive a0.3) F s1 m3
    decoupled   RECEIVE(a0.3) B s1 m0 SEND(g1.0) ... WAIT(a0.3) F s1 m3

`decouple` is MegaScale's first pipeline overlap (arXiv 2402.15627, section 3.2): a rank that has computed
sends and goes on; a receive is posted one compute before the one that needs it, so that the payload travels
behind that compute.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from myriad.program.actions import COMPUTE, Action, Kind, Payload, Program, Transfer
from myriad.program.timeline import needed_transfer

__all__ = ["PASSES", "Pass", "apply_passes", "decouple"]

Pass = Callable[[Program], Program]
"""Rewrites a lowered program; keeps the order of transfers in every channel."""


def decouple(program: Program) -> Program:
    """EXCHANGE becomes SEND where it was, RECEIVE one compute before the use, WAIT just before the use."""
    return replace(program, ranks=tuple(_decoupled(program, rank) for rank in range(program.num_ranks)))


def apply_passes(program: Program, names: Iterable[str]) -> Program:
    """Passes by name, in the given order."""
    for name in names:
        program = PASSES[name](program)
    return program


PASSES: dict[str, Pass] = {"decouple": decouple}
"""Every pass by its name, in the order in which they are meant to be applied."""


def _decoupled(program: Program, rank: int) -> tuple[Action, ...]:
    """Works on gaps: what stands before a compute, with that compute at its end."""
    gaps = _split(program.ranks[rank])
    uses = _uses(program, gaps)
    received = [t for gap in gaps for a in gap if a.kind is Kind.EXCHANGE for t in a.transfers if not t.sends]
    posts: list[list[Transfer]] = [[] for _ in gaps]
    waits: list[list[Transfer]] = [[] for _ in gaps]
    earliest = dict.fromkeys((t.peer for t in received), len(gaps))
    for transfer in reversed(received):
        use = uses[transfer.payload, transfer.stage, transfer.micro_batch]
        earliest[transfer.peer] = min(earliest[transfer.peer], max(0, use - 1))
        posts[earliest[transfer.peer]].insert(0, transfer)
        waits[use].append(transfer)
    rewritten = (_rewritten(*parts) for parts in zip(gaps, posts, waits, strict=True))
    return tuple(action for part in rewritten for action in part)


def _split(actions: Sequence[Action]) -> list[list[Action]]:
    gaps: list[list[Action]] = [[]]
    for action in actions:
        gaps[-1].append(action)
        if action.kind in COMPUTE:
            gaps.append([])
    return gaps


def _uses(program: Program, gaps: list[list[Action]]) -> dict[tuple[Payload, int, int], int]:
    """The gap of the compute that uses each payload."""
    uses = {}
    for index, gap in enumerate(gaps[:-1]):
        if needed := needed_transfer(program, gap[-1]):
            uses[needed[0], needed[1], gap[-1].micro_batch] = index
    return uses


def _rewritten(gap: list[Action], posts: list[Transfer], waits: list[Transfer]) -> Iterator[Action]:
    """Receives before sends: some transports lose half their bandwidth otherwise."""
    yield from (a for a in gap if a.kind is Kind.LOAD)
    yield from (Action(Kind.RECEIVE, transfers=(t,)) for t in posts)
    sent = (t for a in gap if a.kind is Kind.EXCHANGE for t in a.transfers if t.sends)
    yield from (Action(Kind.SEND, transfers=(t,)) for t in sent)
    moved = COMPUTE | {Kind.LOAD, Kind.EXCHANGE}
    yield from (a for a in gap if a.kind not in moved)
    yield from (Action(Kind.WAIT, transfers=(t,)) for t in waits)
    yield from (a for a in gap if a.kind in COMPUTE)
