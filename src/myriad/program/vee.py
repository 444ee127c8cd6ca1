"""The ZB-V schedule (zero-bubble in a V): each rank has one stage on the way down and one on the way up. The
last rank continues with a micro-batch at once, and the first rank computes its loss.

    stage   0 1 2 3 | 4 5 6 7         rank 0 holds stages 0 and 7, rank 3 holds 3 and 4
    rank    0 1 2 3 | 3 2 1 0

The orders are those of a list scheduler in which a forward and either half of a backward take one time unit.
In each unit every rank runs the first action of this list that it can:

    1. an input half on the way down     it completes a micro-batch's backward
    2. a forward on the way up
    3. a forward on the way down         if its activations, and those of its stage on the way up, will fit
    4. an input half on the way up
    5. a weight half                     no other action waits for it

A stage's activations are held from its forward to its weight half: at most 2 p on a rank, as on the first
rank of 1F1B. With up to six ranks each rank idles p - 1 units, half of zero-bubble's idle time.

Source: the V, its memory and its bubble: Qi et al., arXiv 2405.15362 (ZB-V).
"""

from functools import lru_cache

from myriad.program.actions import Action, Kind

__all__ = ["vee", "vee_stage_rank"]

_Orders = tuple[tuple[Action, ...], ...]


def vee_stage_rank(num_ranks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage."""
    down = tuple(range(num_ranks))
    return down + down[::-1]


@lru_cache(maxsize=4)
def vee(num_ranks: int, num_micro_batches: int) -> _Orders:
    """Return every rank's compute actions of one iteration."""
    clock = _Clock(num_ranks, num_micro_batches)
    while clock.tick():
        pass
    return tuple(tuple(actions) for actions in clock.actions)


class _Clock:
    """The scheduler's state: the number of actions of each kind that each stage has done."""

    def __init__(self, num_ranks: int, num_micro_batches: int) -> None:
        self.num_ranks, self.num_micro_batches = num_ranks, num_micro_batches
        stages = 2 * num_ranks
        self.done = {kind: [0] * stages for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
        self.forwards, self.inputs, self.weights = self.done.values()
        self.actions: list[list[Action]] = [[] for _ in range(num_ranks)]

    def tick(self) -> bool:
        """Schedule one time unit on all ranks. Return False if no action was left."""
        picked = [(rank, self._pick(rank)) for rank in range(self.num_ranks)]
        for rank, choice in picked:
            if choice is not None:
                kind, stage = choice
                self.actions[rank].append(Action(kind, stage, self.done[kind][stage]))
                self.done[kind][stage] += 1
        return any(choice is not None for _, choice in picked)

    def _pick(self, rank: int) -> tuple[Kind, int] | None:
        down, up = rank, 2 * self.num_ranks - 1 - rank
        if self._has_gradient(down):
            return Kind.BACKWARD_INPUT, down
        if self._has_input(up):
            return Kind.FORWARD, up
        if self._has_input(down) and self._fits(down, up):
            return Kind.FORWARD, down
        if self._has_gradient(up):
            return Kind.BACKWARD_INPUT, up
        waiting = [stage for stage in (up, down) if self.weights[stage] < self.inputs[stage]]
        if waiting:
            return Kind.BACKWARD_WEIGHT, min(waiting, key=lambda stage: self.weights[stage])
        return None

    def _has_input(self, stage: int) -> bool:
        came = self.num_micro_batches if stage == 0 else self.forwards[stage - 1]
        return self.forwards[stage] < came

    def _has_gradient(self, stage: int) -> bool:
        is_last = stage == 2 * self.num_ranks - 1
        came = self.forwards[stage] if is_last else min(self.forwards[stage], self.inputs[stage + 1])
        return self.inputs[stage] < came

    def _fits(self, down: int, up: int) -> bool:
        """Return whether one more micro-batch fits in memory. Both of the rank's stages hold it, and one
        weight half will be done before it returns."""
        to_be_held = 2 * (self.forwards[down] + 1) - self.weights[down] - self.weights[up]
        return to_be_held <= 2 * self.num_ranks + 1
