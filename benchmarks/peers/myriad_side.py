"""Myriad as a contender: the engine as a run has it, on the same model and batches as the peers."""

import os
from functools import partial
from typing import Any

import torch

from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout, check_layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.program.config import OverlapConfig
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder
from peers.work import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Work

__all__ = ["Myriad", "alone", "model_of"]


def model_of(work: Work) -> ModelConfig:
    """The model that `plain_gpt` writes out."""
    return ModelConfig(
        layers=work.layers,
        hidden=work.hidden,
        heads=work.heads,
        vocabulary=work.vocabulary,
        sequence=work.sequence,
        position="learned",
        norm="layer",
        tied=False,
    )


class Myriad:
    """One rank of a layout."""

    def __init__(self, work: Work, *, layout: dict[str, Any], overlap: dict[str, Any] | None = None) -> None:
        chosen = Layout(**layout)
        if chosen.num_stages > 1:
            bounds = ",".join(str(layers.start) for layers in work.cut(chosen.num_stages)[1:])
            chosen = Layout(**layout, partition=f"manual:{bounds}")
        check_layout(chosen)
        self.world, self.work = chosen.world, work
        device = torch.device("cpu")
        self.groups = open_world(chosen, device)
        definition = GPT(model_of(work), seed=1)
        tokens = torch.zeros(chosen.micro_batch, work.sequence, dtype=torch.int64)
        self.engine = Engine(
            definition,
            self.groups,
            partition_layers(chosen.partition, chosen.num_stages, definition.kinds),
            Batch(tokens, tokens, tokens[:, 0]),
            work.global_batch // (chosen.dp * chosen.micro_batch),
            OptimizerConfig(
                decay="constant",
                weight_decay=WEIGHT_DECAY,
                beta1=BETAS[0],
                beta2=BETAS[1],
                clip_norm=CLIP_NORM,
            ),
            seed=1,
            dtype=torch.float32,
            device=device,
            recorder=Recorder(),
            overlap=OverlapConfig(**(overlap or {})),
            comm=CommConfig(),
        )

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """With the update: Myriad's runtime does both in one program."""
        load = partial(self._rows, tokens, targets)
        return self.engine.train_step(load, LEARNING_RATE, self.work.tokens).loss / self.world

    def _rows(self, tokens: torch.Tensor, targets: torch.Tensor) -> Batch:
        grid = self.groups.grid
        inputs, targets = (x.chunk(grid.layout.dp)[grid.index("dp")] for x in (tokens, targets))
        return Batch(inputs, targets, torch.arange(len(inputs)))

    def update(self) -> None:
        """Done."""

    def close(self) -> None:
        self.engine.close()
        close_world()


def alone(work: Work, *, micro_batch: int) -> Myriad:
    """A world of its own on every rank, for what compute takes without anybody to talk to."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Myriad(work, layout={"micro_batch": micro_batch})
