"""Layouts that a framework can run, so that a plan for it has no others.

A key names one part of the layout. Its default allows whatever Myriad's own layouts have. Values and their
sources are in the framework's file, in the section ``[limits]``.
"""

from collections.abc import Sequence
from typing import Literal

from myriad.comm.layout import ScheduleName
from myriad.config import Config

__all__ = ["LayoutLimits"]


class LayoutLimits(Config):
    """What the layouts of a framework's plans are limited to."""

    tensor: Literal["any", "kv-heads", "none"] = "any"
    """Into how many parts matrices can be divided. kv-heads: at most as many as heads of keys and values.
    none: they are whole (``layout.tp`` is 1)."""
    context: Literal["any", "either", "rings", "none"] = "any"
    """How ranks can share a sequence. either: all by rings, or all by heads (``layout.ulysses`` is 1 or
    ``layout.cp``). rings: only by rings. none: they cannot."""
    stages: Literal["any", "one", "filled"] = "any"
    """Stages of a pipeline rank. one: one. filled: one or two; or as many as there are if every stage has
    equal numbers of blocks, rounded up, until none is left."""
    schedules: tuple[ScheduleName, ...] | None = None
    """Pipeline schedules, besides the habitual one; off: gpipe, 1f1b and interleaved."""
    rounds: Literal["any", "equal"] = "any"
    """Rounds of an interleaved schedule, which begin with at least as many micro-batches as there are
    pipeline ranks. equal: all have the same number of micro-batches."""
    shard_groups: bool = True
    """Whether state can be sharded over a part of the replicas (``layout.shard_group``)."""
    experts: Literal["any", "whole", "divided", "alone"] = "any"
    """How ranks can share experts. whole: where they share experts, the width of each is whole; elsewhere all
    tensor-parallel ranks share it. divided: all tensor-parallel ranks share the width of each. alone: ranks
    share none (``layout.ep`` is 1)."""
    recompute: tuple[Literal["none", "selective", "full"], ...] | None = None
    """Kinds of recomputation; off: all."""

    def allows_tensor(self, tp: int, kv_heads: int) -> bool:
        """Return whether matrices can be divided into ``tp`` parts."""
        return tp == 1 or self.tensor == "any" or (self.tensor == "kv-heads" and tp <= kv_heads)

    def allows_rows(self, cp: int, ulysses: int) -> bool:
        """Return whether ``cp`` ranks can share a sequence in rows of ``ulysses``."""
        kinds = {"any": True, "either": ulysses in (1, cp), "rings": ulysses == 1, "none": cp == 1}
        return kinds[self.context]

    def allows_stages(self, blocks: int, pp: int, virtual_stages: int) -> bool:
        """Return whether a pipeline rank can have so many stages. One pipeline rank has no pipeline."""
        if pp == 1 or self.stages == "any" or virtual_stages == 1:
            return True
        if self.stages == "one":
            return False
        stages = pp * virtual_stages
        return virtual_stages == 2 or -(-blocks // -(-blocks // stages)) == stages

    def allows_experts(self, tp: int, ep: int, etp: int) -> bool:
        """Return whether ``ep`` ranks can share experts, and ``etp`` tensor-parallel ranks the width of
        each."""
        if self.experts == "alone":
            return ep == 1 and etp == tp
        if self.experts == "divided":
            return etp == tp
        return self.experts == "any" or etp == (1 if ep > 1 else tp)

    def round_sizes(self, sizes: Sequence[int], sequences: int, pp: int) -> tuple[int, ...]:
        """Return the micro-batch sizes that an interleaved schedule of ``pp`` ranks can have.
        ``sequences``: of a replica in an iteration."""
        if self.rounds == "any" or pp == 1:
            return tuple(sizes)
        counts = {size: sequences // size for size in sizes}
        return tuple(size for size, count in counts.items() if count % max(1, count // pp) == 0)
