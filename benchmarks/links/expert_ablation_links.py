"""MegaScale-MoE's ablation on shaped links: rows of `ablation.py --experts`.

    python benchmarks/links/ablation.py --experts [--rate 200mbit] [--repeats 3] [--quick]

Two hosts of two ranks each (`hosts.py`), two ranks on a core. All rows train the same mixture of experts on
the same tokens in float32; two replicas of tp = 2, whose ranks are neighbours on a host:

    experts cut by tp          ep 2: a rank has half of the width of half of the experts (etp = tp)
    + whole experts            ep 4: each rank has a quarter of the experts, and sends its part of the tokens
    + once to each node        layout.expert_dispatch = node
    + turns                    two parts of a micro-batch take turns
    or pairs instead           tokens travel behind another micro-batch

Of each row: the step, the same step without its exchanges of rows (`compute`; results are wrong, shapes
right), and the exchanges alone in their order, two in flight (`messages`). Hidden is the share of the
messages' time that does not lengthen the step: 1 - (step - compute) / messages. Waiting hides itself in part,
because another rank of the core computes meanwhile. A figure is the quickest of all repeats.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from expert_steps import Exchanged, exchange_alone, random_batch, recording, slowest_seconds, stays
from hosts import Hosts
from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.experts import Experts
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

__all__ = ["EXPERT_ROWS", "ExpertRow", "MoeWork", "expert_table", "measure_experts"]

CPU = torch.device("cpu")
RANKS_PER_HOST = 2


@dataclass(frozen=True)
class ExpertRow:
    """What one line of the table is."""

    name: str
    layout: Mapping[str, object]
    overlap: Mapping[str, object]


_CUT = {"dp": 2, "tp": 2, "ep": 2}
_WHOLE = {"dp": 2, "tp": 2, "ep": 4, "etp": 1}
_NODE = {**_WHOLE, "expert_dispatch": "node"}
_TURNS = {"tensor": "turns", "tensor_chunks": 2, "tensor_message": 1}
EXPERT_ROWS = (
    ExpertRow("experts cut by tp", _CUT, {"tensor": None}),
    ExpertRow("+ whole experts", _WHOLE, {"tensor": None}),
    ExpertRow("+ once to each node", _NODE, {"tensor": None}),
    ExpertRow("+ turns", _NODE, _TURNS),
    ExpertRow("or pairs instead", _NODE, {"tensor": None, "pairs": True}),
)


@dataclass(frozen=True)
class MoeWork:
    """What every row trains."""

    sequences: int = 2
    """Sequences of a micro-batch."""
    micro_batches: int = 4
    hidden: int = 256
    layers: int = 4
    length: int = 256

    @property
    def model(self) -> ModelConfig:
        """The model: four of sixteen experts for each token."""
        return ModelConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=4,
            sequence=self.length,
            vocabulary=1024,
            experts=16,
            experts_per_token=4,
            expert_hidden=self.hidden,
        )

    def batch(self, replica: int, micro_batches: int) -> Batch:
        """Return so many micro-batches of a replica."""
        return random_batch(self.sequences * micro_batches, self.length, 1024, replica)

    @property
    def targets(self) -> int:
        """Targets of a step of both replicas."""
        return 2 * self.micro_batches * self.sequences * self.length


@contextmanager
def _without_exchanges(engine: Engine) -> Iterator[None]:
    """Leave out the rows that would travel."""
    layers = [layer for stage in engine.model.stages.values() for layer in stage.layers.values()]
    boundaries = {
        id(one.boundary): one.boundary
        for layer in layers
        for one in layer.modules()
        if isinstance(one, Experts)
    }
    for boundary in boundaries.values():
        boundary.start_exchange = stays  # type: ignore[method-assign]
    try:
        yield
    finally:
        for boundary in boundaries.values():
            del boundary.start_exchange  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of one visit to a row."""

    step: float
    compute: float
    messages: float
    loss: float
    """Loss of the first step."""


def visit_row(row: ExpertRow, work: MoeWork, steps: int) -> RowSeconds:
    """Measure one row on one rank."""
    layout = Layout.model_validate({**row.layout, "micro_batch": work.sequences, "zero": 0})
    groups = open_world(layout, CPU)
    batch = work.batch(groups.grid.index("dp"), work.micro_batches)
    engine = Engine(
        GPT(work.model, 1),
        groups,
        [range(work.layers + 2)],
        work.batch(0, 1),
        work.micro_batches,
        OptimizerConfig(learning_rate=1e-3),
        seed=1,
        dtype=torch.float32,
        device=CPU,
        recorder=Recorder(),
        overlap=OverlapConfig.model_validate(dict(row.overlap)),
        comm=CommConfig(node_size=RANKS_PER_HOST),
    )
    exchanges = list[Exchanged]()
    step = partial(engine.train_step, lambda: batch, 1e-3, work.targets)
    with recording(exchanges):
        loss = step().loss
    steps_taken, alone, computed = list[float](), list[float](), list[float]()
    for _ in range(steps):
        steps_taken.append(slowest_seconds(step))
        alone.append(slowest_seconds(lambda: exchange_alone(exchanges)))
        with _without_exchanges(engine):
            computed.append(slowest_seconds(step))
    dist.barrier()
    engine.close()
    close_world()
    return RowSeconds(min(steps_taken), min(computed), min(alone), loss)


def measure_experts(rate: str, work: MoeWork, repeats: int, steps: int) -> list[list[RowSeconds]]:
    """Visit all rows in turn, as often as ``repeats``; return the visits of each row."""
    found: list[list[RowSeconds]] = [[] for _ in EXPERT_ROWS]
    with Hosts(2, rate) as hosts:
        for _ in range(repeats):
            for visits, row in zip(found, EXPERT_ROWS, strict=True):
                world = {"world": 2 * RANKS_PER_HOST, "ranks_per_host": RANKS_PER_HOST}
                ranks = hosts.run_ranks(visit_row, row, work, steps, timeout_seconds=600, **world)
                visits.append(ranks[0])
    return found


def expert_table(rate: str, work: MoeWork, found: Sequence[Sequence[RowSeconds]]) -> str:
    """Return milliseconds of each row, the quickest of all visits, and the hidden share."""
    model = work.model
    experts = f"{model.experts_per_token} of {model.experts} experts"
    lines = [
        f"{work.micro_batches} micro-batches of {work.sequences} x {work.length} tokens a replica, "
        f"{model.layers} layers of {model.hidden}, {experts}, {rate}\n",
        "| row | step, ms | x | compute, ms | messages, ms | hidden |",
        "|---" * 6 + "|",
    ]
    first = min(one.step for one in found[0])
    for row, visits in zip(EXPERT_ROWS, found, strict=True):
        step, compute, messages = (
            min(getattr(one, name) for one in visits) for name in ("step", "compute", "messages")
        )
        times = [f"{1e3 * seconds:.0f}" for seconds in (step, compute, messages)]
        cells = [row.name, times[0], f"{first / step:.2f}", *times[1:]]
        lines.append("| " + " | ".join([*cells, f"{1 - (step - compute) / messages:.0%}"]) + " |")
    losses = [one.loss for visits in found for one in visits]
    lines.append(f"\nlosses of the first step differ by at most {max(losses) - min(losses):.0e}")
    return "\n".join(lines)
