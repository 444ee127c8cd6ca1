"""A parallel layout: how many ranks share which dimension of the work. No torch here.

The rank grid is one array with axes ``dp pp cp tp ep``, the last one varying fastest: neighbours in rank
number are tensor-parallel peers (they talk most and should share a node), then pipeline neighbours, then
data-parallel replicas.
"""

from typing import Literal

from pydantic import Field

from myriad.config import Config
from myriad.errors import BadInputError
from myriad.program.schedules import check_virtual_stages

__all__ = ["AXES", "MOST_RANKS", "Layout", "check_layout", "lacks_for_graphs"]

ScheduleName = Literal[
    "gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "eager-zero-bubble"
]

AXES = ("dp", "pp", "cp", "tp", "ep")
"""Axes of the rank grid, slowest first."""

MOST_RANKS = 2**20
"""The largest world: rank tables and searches hold an entry for each rank."""


class Layout(Config):
    """How one iteration is spread over ranks."""

    dp: int = Field(1, ge=1, le=MOST_RANKS)
    """Data-parallel replicas."""
    tp: int = Field(1, ge=1, le=MOST_RANKS)
    """Ranks that share each matrix (tensor and sequence parallelism)."""
    pp: int = Field(1, ge=1, le=MOST_RANKS)
    """Pipeline ranks."""
    cp: int = Field(1, ge=1, le=MOST_RANKS)
    """Context-parallel ranks; only 1 for now."""
    ep: int = Field(1, ge=1, le=MOST_RANKS)
    """Expert-parallel ranks; only 1 for now."""
    virtual_stages: int = Field(1, ge=1, le=2**14)
    """Model pieces per pipeline rank."""
    zero: int = Field(0, ge=0, le=3)
    """What data-parallel ranks shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    reduce: Literal["last", "each"] = "last"
    """When gradients are reduced: after a chunk's last backward, or after each (least memory; needs zero = 2
    or 3)."""
    micro_batch: int = Field(1, ge=1, le=2**24)
    """Sequences in one micro-batch."""
    shares: tuple[int, ...] | None = None
    """Micro-batches of each data-parallel replica in one iteration, [5, 3]: fewer for slower ones. The result
    is the same; off: as many for each."""
    schedule: ScheduleName | None = None
    """Pipeline schedule; off: interleaved when virtual_stages > 1, else 1f1b. On slow links the eager ones
    hide transfers that others wait for, and hold more activations."""
    partition: str = "uniform"
    """Layers to stages: uniform, parameters, profile, type:REGEX (spread matching layers evenly),
    manual:B1,B2,..."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: none nothing, selective the outputs of
    norms and of the MLP's activation function, full all of a layer but its input. The result is the same to
    the bit."""
    recompute_ratio: float = Field(1.0, gt=0, le=1)
    """Share of a stage's layers, the first ones, that recompute = full is for; the others keep everything."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp * self.ep

    @property
    def num_stages(self) -> int:
        """Model pieces over the whole pipeline."""
        return self.pp * self.virtual_stages

    @property
    def schedule_name(self) -> str:
        """The schedule, with the default filled in."""
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    def shares_of(self, global_batch: int, key: str = "train.global_batch") -> tuple[int, ...]:
        """Micro-batches of each replica. Raises `BadInputError`, of ``key``, where the batch cannot be
        divided so."""
        if self.shares is not None:
            if sum(self.shares) * self.micro_batch != global_batch:
                wanted = f"{key} / layout.micro_batch = {global_batch} / {self.micro_batch}"
                raise BadInputError("layout.shares", list(self.shares), f"must add up to {wanted}")
            return self.shares
        unit = self.dp * self.micro_batch
        if global_batch % unit:
            below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
            near = f"{below} or {above}" if below else f"{above}"
            allowed = f"must be a multiple of layout.dp x layout.micro_batch = {unit}, such as {near}"
            raise BadInputError(key, global_batch, allowed)
        return (global_batch // unit,) * self.dp


def check_layout(layout: Layout) -> None:
    """Every rule that spans a layout's own fields. Raises `BadInputError`."""
    if layout.cp > 1:
        raise BadInputError("layout.cp", layout.cp, "only 1: context parallelism is not built yet")
    if layout.ep > 1:
        raise BadInputError("layout.ep", layout.ep, "only 1: expert parallelism is not built yet")
    if layout.world > MOST_RANKS:
        key = "layout.dp x layout.tp x layout.pp"
        raise BadInputError(key, layout.world, f"at most {MOST_RANKS:,} ranks: tables hold an entry for each")
    check_virtual_stages(layout.schedule_name, layout.virtual_stages)
    shares = layout.shares
    if shares is not None and (len(shares) != layout.dp or min(shares) < 1):
        allowed = f"{layout.dp} numbers of at least 1, one for each replica (layout.dp), or off"
        raise BadInputError("layout.shares", list(shares), allowed)
    if layout.reduce == "each" and layout.zero < 2:
        allowed = "needs layout.zero = 2 or 3, where a reduced gradient is kept apart from the sum; or last"
        raise BadInputError("layout.reduce", layout.reduce, allowed)


def lacks_for_graphs(layout: Layout) -> str:
    """What keeps a layout's computes from being captured as CUDA graphs (`myriad.parallel.captured`), as what
    they need; nothing where they can be."""
    alone = layout.dp == layout.world and layout.virtual_stages == 1
    needs = (
        (alone, "tp, pp, cp, ep and virtual_stages of 1: micro-batches are computed one after the other"),
        (layout.schedule in (None, "1f1b"), "layout.schedule = 1f1b, or off"),
        (layout.zero < 2, "layout.zero = 0 or 1: parameters and gradient sums stay where they are"),
        (layout.recompute != "full", "layout.recompute = none or selective"),
    )
    return next((need for there, need in needs if not there), "")
