"""The list that a rank runs once before its first step on a GPU, so that its kernels are loaded.

CUDA loads a kernel at its first launch, Triton and cuBLAS choose or build theirs, and all of them may wait
there until the device is done with what it was given: also with a receive whose sender waits for this rank
(`myriad.program.device_check`). So each stage computes one micro-batch alone, from zeros in place of what
other stages would send, and what comes of it is given up:

    two stages, ZeRO 1    LOAD  GATHER s0 s3  F s0 F s3  B s3 REDUCE s3 B s0 REDUCE s0  CLIP UPDATE s0 s3

Nothing in it waits for another pipeline rank; data- and tensor-parallel peers run the same list.
"""

from collections.abc import Iterator

from myriad.program.actions import Action, Kind, Program

__all__ = ["warm_up_actions"]


def warm_up_actions(program: Program, rank: int) -> tuple[Action, ...]:
    """Actions of a lowered program's stages on one rank, of micro-batch 0 and without transfers. Stages
    forward in ascending order, so that one that feeds another of the same rank comes before it."""
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
    yield Action(Kind.CLIP)
    yield from (Action(Kind.UPDATE, stage) for stage in _stages(program, rank))
