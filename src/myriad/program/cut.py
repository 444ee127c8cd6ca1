"""Cut each stage of a lowered program into chunks, so that data-parallel communication can overlap with
compute.

    one stage    GATHER s0       F s0 m0                  B s0 m0                          REDUCE s0
    two chunks   GATHER s0 s1    F s0 m0   F s1 m0        B s1 m0   REDUCE s1   B s0 m0    REDUCE s0

Each chunk is a stage of the new program. The chunks of a stage are consecutive on the same rank, and nothing
is sent between them. Their parameters are gathered, and their gradients reduced, one by one (MegaScale, arXiv
2402.15627, section 3.2, has one chunk per virtual stage; here the number is free).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from myriad.program.actions import (
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    Action,
    Kind,
    Payload,
    PipelineTransfer,
    Program,
)

__all__ = ["cut_stages"]


def cut_stages(program: Program, num_chunks: int) -> Program:
    """Replace stage s by stages ``s x num_chunks`` to ``(s + 1) x num_chunks - 1`` of the same rank."""
    if num_chunks == 1:
        return program
    ranks = (tuple(_cut_rank(program, actions, num_chunks)) for actions in program.ranks)
    owners = (rank for rank in program.stage_rank for _ in range(num_chunks))
    return replace(program, stage_rank=tuple(owners), ranks=tuple(ranks))


def _cut_rank(program: Program, actions: Sequence[Action], num_chunks: int) -> Iterator[Action]:
    reduced = _reduced(actions)
    ends = {0: 0, program.num_stages - 1: num_chunks - 1} if program.syncs_tied else {}
    for index, action in enumerate(actions):
        chunks = range(action.stage * num_chunks, (action.stage + 1) * num_chunks)
        tied = chunks[ends[action.stage]] if action.stage in ends else None
        if action.kind in COMPUTE:
            for chunk in chunks if action.kind is Kind.FORWARD else reversed(chunks):
                yield Action(action.kind, chunk, action.micro_batch)
                if index in reduced and chunk != tied:
                    yield Action(Kind.REDUCE, chunk)
        elif action.kind is Kind.REDUCE:
            if tied is not None and index in reduced.values():
                yield Action(Kind.REDUCE, tied)
        elif action.kind is Kind.SYNC_TIED:
            assert tied is not None
            yield Action(Kind.SYNC_TIED, tied)
        elif action.stage >= 0:
            yield from (Action(action.kind, chunk, action.micro_batch) for chunk in chunks)
        else:
            yield Action(action.kind, transfers=tuple(_cut_transfer(t, num_chunks) for t in action.transfers))


def _reduced(actions: Sequence[Action]) -> dict[int, int]:
    """Map each compute action whose gradients are reduced before its stage's next backward to the index of
    that REDUCE."""
    latest: dict[int, int] = {}
    found = {}
    for index, action in enumerate(actions):
        if action.kind in MAKES_WEIGHT_GRADIENT:
            latest[action.stage] = index
        elif action.kind is Kind.REDUCE:
            found[latest[action.stage]] = index
    return found


def _cut_transfer(transfer: PipelineTransfer, num_chunks: int) -> PipelineTransfer:
    """Renumber a transfer: an activation is sent by a stage's last chunk, a gradient by its first."""
    offset = num_chunks - 1 if transfer.payload is Payload.ACTIVATION else 0
    stage = transfer.stage * num_chunks + offset
    return PipelineTransfer(transfer.payload, stage, transfer.micro_batch, transfer.peer, transfer.sends)
