"""Train any `Definition` in any layout from your own script, without a run folder or a corpus.

A script that is started directly is one rank. Under torchrun, Slurm or any launcher that sets RANK and
WORLD_SIZE, it is one of many.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch

from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout, check_layout, lacks_for_graphs, lacks_for_offload
from myriad.errors import BadInputError
from myriad.kernels.agreement import proved
from myriad.kernels.choice import check_kernels
from myriad.kernels.config import Kernels
from myriad.kernels.documents import Documents
from myriad.model.boundary import Boundary
from myriad.model.definition import Definition
from myriad.model.layers import Block
from myriad.optim.config import LossScaleConfig, OptimizerConfig, Precision, check_loss_scale, float8_scaling
from myriad.optim.loss_scale import LossScaler
from myriad.optim.precision import resolve_float8, resolve_precision
from myriad.optim.schedule import learning_rate
from myriad.parallel.batch import Batch
from myriad.parallel.cuda_graphs import CudaGraphs
from myriad.parallel.engine import Engine
from myriad.parallel.optimizer_step import StepResult
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import posts_early
from myriad.system.spin_control import control_spinning
from myriad.telemetry.spans import Recorder
from myriad.train.data_loader import to_device
from myriad.train.device_setup import agree_on_kernels, pick_device, prepare_cuda, read_rank_environment
from myriad.train.engine_setup import stage_layers

__all__ = ["fit"]

_OVERLAP, _COMM, _LOSS_SCALE = OverlapConfig(), CommConfig(), LossScaleConfig()


def fit(
    definition: Definition,
    batch: Callable[[int, range], Batch],
    layout: Layout,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    global_batch: int,
    seed: int = 1,
    precision: Precision = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    overlap: OverlapConfig = _OVERLAP,
    comm: CommConfig = _COMM,
    kernels: Kernels = "auto",
    cuda_graphs: bool = False,
    loss_scale: LossScaleConfig = _LOSS_SCALE,
) -> Iterator[tuple[int, StepResult]]:
    """Train, and yield (steps done, result) after each step; only rank 0 yields.

    ``batch(step, rows)`` makes those rows of the global batch of one step. It must return the same rows on
    every rank. The layers' loss is a sum over the elements of its targets. With ``cuda_graphs``, a GPU
    captures compute actions, like `train.cuda_graphs`; ``loss_scale`` applies to float16. Raises
    `BadInputError` when the sizes do not fit.
    """
    check_layout(layout)
    lacks = lacks_for_graphs(layout, overlap)
    if cuda_graphs and lacks:
        raise BadInputError("cuda_graphs", True, f"needs {lacks}")
    if lacks := lacks_for_offload(layout, overlap, optimizer.name):
        raise BadInputError("layout.offload_optimizer", True, f"needs {lacks}")
    _check_blocks(definition, layout)
    shares = layout.shares_of(global_batch, key="global_batch")
    place = read_rank_environment(layout.world, comm)
    prepare_cuda(layout, overlap)
    on = pick_device(device, 0, place)
    early = overlap.updates_early
    if early and precision == "float16":
        raise BadInputError("precision", precision, "needs optimizer_in_backward = false")
    check_loss_scale(loss_scale)
    dtype = resolve_precision(precision, on, skips_steps=not early)
    check_kernels(kernels, on.type, str(dtype).removeprefix("torch."), {})
    kernels, doubt = proved(kernels, on, dtype, float8=float8_scaling(precision) is not None)
    groups = open_world(layout, on, comm=comm)
    if on.type == "cuda":
        kernels, _ = agree_on_kernels(kernels, doubt, groups, on)
    spin_control = control_spinning(torch.get_num_threads()) if on.type == "cpu" else None
    try:
        load = partial(_load, batch, dtype, on)
        replica = groups.grid.index("dp")
        first = sum(shares[:replica]) * layout.micro_batch
        rows = range(first, first + shares[replica] * layout.micro_batch)
        sample = load(0, range(layout.micro_batch))
        num_targets = sample.targets[0].numel() * global_batch
        engine = Engine(
            definition,
            groups,
            stage_layers(definition, layout, groups, sample, dtype),
            sample,
            shares[replica],
            optimizer,
            seed=seed,
            dtype=dtype,
            device=on,
            recorder=Recorder(),
            overlap=overlap,
            comm=comm,
            kernels=kernels,
            float8=resolve_float8(precision, kernels),
            loss_scaler=LossScaler(loss_scale, num_targets) if dtype == torch.float16 else None,
            keeps_addresses=cuda_graphs and on.type == "cuda",
        )
        if on.type == "cuda" and posts_early(layout, overlap):
            engine.warm_up()
        if cuda_graphs and on.type == "cuda":
            engine.capture(CudaGraphs(on, layout.tp), partial(load, 0, rows), num_targets)
        for step in range(steps):
            rate = learning_rate(optimizer, step, steps)
            result = engine.train_step(partial(load, step, rows), rate, num_targets)
            if place.rank == 0:
                yield step + 1, result
        engine.close()
    finally:
        close_world()
        if spin_control is not None:
            spin_control.close()


def _check_blocks(definition: Definition, layout: Layout) -> None:
    """Refuse what a model without Myriad's own blocks cannot do: only these know which of their tensors are
    cheap to recompute, and how positions of different ranks attend to each other."""
    if layout.recompute != "selective" and layout.cp == 1:
        return
    with torch.device("meta"):
        layers = [definition.build(index, Boundary()) for index in range(len(definition.names))]
    if any(isinstance(layer, Block) for layer in layers):
        return
    if layout.cp > 1:
        raise BadInputError("layout.cp", layout.cp, "1: more is for models with Myriad's own blocks")
    allowed = "none or full: selective is for models with Myriad's own blocks"
    raise BadInputError("layout.recompute", layout.recompute, allowed)


def _load(
    batch: Callable[[int, range], Batch], dtype: torch.dtype, device: torch.device, step: int, rows: range
) -> Batch:
    """Make a batch on the device. Floating-point inputs are converted to the model's type; indices stay as
    they are."""
    made = batch(step, rows)
    inputs = to_device(made.inputs, device, dtype if made.inputs.is_floating_point() else None)
    documents = made.documents
    if documents is not None:
        documents = Documents(to_device(documents.positions, device), documents.lengths, documents.sharing)
    return Batch(inputs, to_device(made.targets, device), to_device(made.samples, device), documents)
