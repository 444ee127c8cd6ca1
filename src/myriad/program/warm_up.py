"""The action list that a rank runs once before its first step on a GPU, to load its kernels.

CUDA loads a kernel at its first launch; Triton and cuBLAS choose or build theirs. All of them may then wait
until the device has finished all its work, including a receive whose sender waits for this rank
(`myriad.program.device_check`). So each stage computes one micro-batch alone, with zeros in place of other
stages' outputs, and its results are dropped:

    two stages, ZeRO 1    LOAD  GATHER s0 s3  F s0 F s3  B s3 REDUCE s3 B s0 REDUCE s0  CLIP UPDATE s0 s3

The list waits for no other pipeline rank; data- and tensor-parallel peers run the same list.
"""

from collections.abc import Iterator

from myriad.program.actions import Action, Kind, Program

__all__ = ["warm_up_actions"]


def warm_up_actions(program: Program, rank: int) -> tuple[Action, ...]:
    """Return the actions of a lowered program's stages on one rank, for micro-batch 0 and without transfers.
    Forwards are in ascending order of stages, so that a stage comes after the one that feeds it on the same
    rank."""
    assert program.lowering is not None
    actions = _forwards(program, rank)
    if program.lowering.training:
        return (*actions, *_backwards(program, rank))
    return tuple(actions)


def _stages(program: Program, rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]


def _forwards(program: Program, rank: int) -> Iterator[Action]:
    lowering = program.lowering
    assert lowering is not None
    yield Action(Kind.LOAD)
    for stage in _stages(program, rank):
        if lowering.zero >= 1:
            yield Action(Kind.GATHER, stage)
        yield Action(Kind.FORWARD, stage, 0)
        if lowering.zero == 3:
            yield Action(Kind.RELEASE, stage)


def _backwards(program: Program, rank: int) -> Iterator[Action]:
    lowering = program.lowering
    assert lowering is not None
    splits = any(action.kind is Kind.BACKWARD_INPUT for action in program.ranks[rank])
    kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if splits else (Kind.BACKWARD,)
    for stage in reversed(_stages(program, rank)):
        if lowering.zero == 3:
            yield Action(Kind.GATHER, stage)
        yield from (Action(kind, stage, 0) for kind in kinds)
        if lowering.zero == 3:
            yield Action(Kind.RELEASE, stage)
        yield Action(Kind.REDUCE, stage)
        if lowering.across:
            yield Action(Kind.REDUCE_ACROSS, stage)
    yield Action(Kind.CLIP)
    yield from (Action(Kind.UPDATE, stage) for stage in _stages(program, rank))
