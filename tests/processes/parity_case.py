"""Trains a tiny GPT on fixed tokens in some layout and gives losses and final whole parameters.

Adam divides by the root of the second moment, so with an epsilon of 1e-8 an element whose gradient is nothing
but rounding noise moves by the whole learning rate, in a direction that no two layouts share (measured: one
small matrix differs by 1.7e-5 then, all parameters together by 5e-7; by 5e-7 and 3e-8 with the 1e-6 used
here).
"""

import itertools
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.kernels.document_shares import DocumentSharing
from myriad.kernels.documents import Documents
from myriad.kernels.float8 import Float8
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import LossScaleConfig, OptimizerConfig
from myriad.optim.loss_scale import LossScaler
from myriad.optim.schedule import learning_rate
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.parallel.routing_tape import RoutingFolders
from myriad.program.config import OverlapConfig
from myriad.program.partition import partition_layers
from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.spans import Recorder

OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 5, "epsilon": 1e-6}
TINY = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 90, "vocabulary_multiple": 16}

PADDING = 2
"""Positions of padding at the end of each row of packed documents."""


@dataclass(frozen=True)
class Case:
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    global_batch: int = 8
    dtype: torch.dtype = torch.float32
    overlap: dict[str, Any] = field(default_factory=dict)
    comm: dict[str, Any] = field(default_factory=dict)
    keeps_addresses: bool = False
    """As captured stages need it."""
    float8: bool = False
    nudge: float = 0.0
    """Relative change of every initial value, up or down: how much rounding alone changes a result."""
    packed: bool = False
    """Each row holds documents of several lengths and padding."""
    loss_scale: dict[str, Any] | None = None
    """Scale the loss, in any precision; float16 always does."""

    @property
    def world(self) -> int:
        return Layout(**self.layout).world


class _Nudged(GPT):
    """A model whose initial values are changed by a tiny part, with a sign of each element's own."""

    def __init__(self, config: ModelConfig, seed: int, nudge: float) -> None:
        super().__init__(config, seed)
        self._nudge = nudge

    def initial(self, index: int, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        return {
            name: values * (1 + self._nudge * self._signs(f"{self.names[index]}.{name}", values))
            for name, values in super().initial(index, names).items()
        }

    def _signs(self, name: str, values: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(self.tied.get(name, name).encode()))
        return torch.randint(2, values.shape, generator=generator) * 2.0 - 1


def make_engine(
    case: Case,
    recorder: Recorder | None = None,
    *,
    float8: Float8 | None = None,
    keeps_float8: bool = True,
    telemetry: TelemetryConfig = TelemetryConfig(),
    routing: RoutingFolders = RoutingFolders(),
) -> Engine:
    layout = Layout(**case.layout)
    config = ModelConfig(**(TINY | case.model))
    groups = open_world(layout, torch.device("cpu"), comm=CommConfig(**case.comm))
    definition = _Nudged(config, 3, case.nudge) if case.nudge else GPT(config, seed=3)
    tokens = torch.zeros(layout.micro_batch, config.sequence, dtype=torch.int64)
    scaler = None
    if case.loss_scale is not None or case.dtype == torch.float16:
        num_targets = case.global_batch * config.sequence
        scaler = LossScaler(LossScaleConfig(**(case.loss_scale or {})), num_targets)
    costs = [1.0 + (7 * layer) % 5 for layer in range(config.layers + 2)]
    return Engine(
        definition,
        groups,
        partition_layers(layout.partition, layout.num_stages, definition.kinds, costs),
        Batch(tokens, tokens, tokens[:, 0], documents_of(case, 0, layout.micro_batch)),
        layout.shares_of(case.global_batch)[groups.grid.index("dp")],
        OptimizerConfig(**(OPTIMIZER | case.optimizer)),
        seed=3,
        dtype=case.dtype,
        device=torch.device("cpu"),
        recorder=recorder or Recorder(),
        overlap=OverlapConfig(**({"tensor_message": 1} | case.overlap)),
        comm=CommConfig(**case.comm),
        float8=float8 or (Float8("tensor") if case.float8 else None),
        keeps_float8=keeps_float8,
        loss_scaler=scaler,
        keeps_addresses=case.keeps_addresses,
        telemetry=telemetry,
        routing=routing,
    )


def tokens_of_step(case: Case, step: int) -> torch.Tensor:
    config = ModelConfig(**(TINY | case.model))
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (case.global_batch, config.sequence + 1)
    skewed = torch.rand(shape, generator=generator) ** 2
    return (skewed * config.vocabulary).long()


def batch_of_rank(case: Case, engine: Engine, step: int) -> Batch:
    layout, replica = engine.layout, engine.groups.grid.index("dp")
    shares = [share * layout.micro_batch for share in layout.shares_of(case.global_batch)]
    return batch_of_rows(case, sum(shares[:replica]), shares[replica], step)


def batch_of_replica(case: Case, replica: int, num_replicas: int, step: int) -> Batch:
    share = case.global_batch // num_replicas
    return batch_of_rows(case, replica * share, share, step)


def batch_of_rows(case: Case, first: int, share: int, step: int) -> Batch:
    tokens = tokens_of_step(case, step)[first : first + share]
    samples = torch.arange(first, first + share) + step * case.global_batch
    targets = tokens[:, 1:].clone()  # one row alone would be a view of the inputs
    if case.packed:
        targets[:, -PADDING:] = ~targets[:, -PADDING:]
    return Batch(tokens[:, :-1].contiguous(), targets, samples, documents_of(case, first, share))


def documents_of(case: Case, first: int, share: int) -> Documents | None:
    """Row k holds documents of about a third of the window and one of k + 1 tokens, and the padding."""
    if not case.packed:
        return None
    model = TINY | case.model
    sequence = model["sequence"]
    each, rest = (sequence - PADDING) // 3, (sequence - PADDING) % 3
    lengths = [
        [row % (each - 1) + 1, 2 * each - row % (each - 1) - 1, each + rest, PADDING]
        for row in range(first, first + share)
    ]
    positions = [[at for length in row for at in range(length)] for row in lengths]
    sharing = DocumentSharing(model.get("window"), case.layout.get("whole_documents", False))
    return Documents(torch.tensor(positions), lengths, sharing)


def train_steps(case: Case, engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    config = OptimizerConfig(**(OPTIMIZER | case.optimizer))
    found = []
    targets = case.global_batch * ((TINY | case.model)["sequence"] - (PADDING if case.packed else 0))
    for step in range(first, last):
        rate = learning_rate(config, step, case.steps)
        result = engine.train_step(lambda step=step: batch_of_rank(case, engine, step), rate, targets)
        found.append((result.loss, result.grad_norm))
    return found


def run_case(case: Case) -> tuple[list[tuple[float, float]], dict[str, np.ndarray] | None]:
    """One rank's side: losses and gradient norms; on rank 0 the final whole tensors as well: parameters and
    optimizer state."""
    engine = make_engine(case)
    found = train_steps(case, engine, 0, case.steps)
    final = gather_tensors(engine)
    engine.close()
    close_world()
    return found, final


def gather_tensors(engine: Engine) -> dict[str, np.ndarray] | None:
    """Return the whole tensors on rank 0. Collective. Each element comes from the one shard that a checkpoint
    would hold it in."""
    own = [(shard.name, shard.full_shape, shard.offsets, shard.values.numpy()) for shard in engine.shards()]
    all_shards = [own] * engine.layout.world
    if len(all_shards) > 1:
        dist.all_gather_object(all_shards, own)
    if engine.groups.grid.rank > 0:
        return None
    whole: dict[str, np.ndarray] = {}
    given: dict[str, np.ndarray] = {}
    for name, shape, offsets, values in itertools.chain.from_iterable(all_shards):
        if name not in whole:
            whole[name], given[name] = np.empty(shape, values.dtype), np.zeros(shape, np.int8)
        box = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
        whole[name][box] = values
        given[name][box] += 1
    for name, times in given.items():
        assert (times == 1).all(), f"{name}: some elements are in no shard or in several"
    return whole
