"""Memory of activations: what a layer keeps between its forward and its backward, measured on real ranks
against the formula of `myriad.model.activations`, for each `layout.recompute`.

    python benchmarks/activations.py

Counted are the storages that autograd saves in one layer's forward, each once, its input included, without
the parameters and the batch. Sequences are long enough for the library's attention in float32 too, as on a
GPU.
"""

import multiprocessing
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.kernels.attention_blocks import BLOCK, runs_in_blocks
from myriad.model.activations import (
    LayerKind,
    Recompute,
    kept_bytes_per_micro_batch,
    kept_bytes_per_token,
)
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT
from myriad.model.interleave import run_layers
from myriad.parallel.recompute import run_in_segments
from myriad.parallel.tensor import GroupBoundary
from myriad.telemetry.spans import Recorder

BATCH = 2
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
MODEL = ModelConfig(layers=2, hidden=256, heads=4, sequence=1024, vocabulary=1024)
ACTIVATIONS = ("gelu", "swiglu", "relu2")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Saved:
    """The storages that autograd saved."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        self.storages[storage._cdata] = storage
        return x

    def num_bytes(self, without: Sequence[torch.Tensor]) -> int:
        skipped = {x.untyped_storage()._cdata for x in without}
        return sum(storage.nbytes() for key, storage in self.storages.items() if key not in skipped)


def make_layer(model: ModelConfig, index: int, boundary: Boundary, dtype: torch.dtype) -> nn.Module:
    """One layer of the GPT with some values."""
    layer = GPT(model, seed=1).build(index, boundary).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer


def measure(
    model: ModelConfig, index: int, boundary: Boundary, dtype: torch.dtype, recompute: Recompute
) -> int:
    """Bytes that layer ``index`` keeps of one micro-batch on this rank."""
    boundary.remakes = recompute == "selective"
    layer = make_layer(model, index, boundary, dtype)
    tokens = torch.zeros(BATCH, model.sequence, dtype=torch.int64)
    stream = torch.randn(BATCH, model.sequence // boundary.size, model.hidden).to(dtype)
    x = stream.requires_grad_() if index else tokens
    context, saved = Context(targets=tokens, samples=tokens[:, 0].contiguous()), Saved()
    with saved_tensors_hooks(saved.add, lambda kept: kept):
        if recompute == "full":
            segments, y = run_in_segments([layer], x, context, keep_last=False)
            for segment in segments:
                saved.add(segment.entered)
        else:
            y = run_layers([layer], x, context)
    del y
    return saved.num_bytes([*layer.parameters(), tokens])


def formula(model: ModelConfig, index: int, tp: int, dtype: torch.dtype, recompute: Recompute) -> float:
    """What `measure` must find."""
    kind: LayerKind = "embedding" if index == 0 else "head" if index > model.layers else "block"
    fused = torch.empty(1, model.sequence, 1, dtype=dtype)
    in_blocks = kind == "block" and runs_in_blocks(fused, model.layer_window(index - 1))
    keys: dict[str, Any] = {"tp": tp, "bytes_per_value": dtype.itemsize, "recompute": recompute}
    keys["softmax_block"] = BLOCK if in_blocks else None
    per_token = kept_bytes_per_token(model, kind, index - 1, **keys)
    return BATCH * model.sequence * per_token + kept_bytes_per_micro_batch(model, kind, index - 1, **keys)


def cases() -> list[tuple[str, ModelConfig, int]]:
    """Name, model and layer of each line of the table."""
    found = []
    for block in ("serial", "parallel"):
        for activation in ACTIVATIONS:
            model = MODEL.model_copy(update={"block": block, "activation": activation})
            found.append((f"{block}, {activation}", model, 1))
    short = MODEL.model_copy(update={"sequence": 256})
    return [*found, ("serial, gelu, short", short, 1), ("embedding", MODEL, 0), ("head", MODEL, 3)]


def measure_rank(tp: int) -> list[int]:
    """One rank's side: every case, type and mode, in this order."""
    groups = open_world(Layout(tp=tp), torch.device("cpu"))
    boundary = GroupBoundary(groups.along("tp"), groups.grid.index("tp"), tp, Recorder())
    found = [
        measure(model, index, boundary, dtype, mode)
        for _, model, index in cases()
        for dtype in DTYPES
        for mode in MODES
    ]
    close_world()
    return found


def _rank(rank: int, world: int, port: int) -> list[int]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    return measure_rank(world)


def measure_ranks(tp: int) -> list[int]:
    """Rank 0's, on forked processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with multiprocessing.get_context("fork").Pool(tp) as pool:
        return pool.starmap(_rank, [(rank, tp, port) for rank in range(tp)], chunksize=1)[0]


def main() -> None:
    """Prints the table."""
    print(f"H = {MODEL.hidden}, S = {MODEL.sequence} (short: 256), {BATCH} sequences in a micro-batch.")
    print("Bytes for each token on one rank; and whether all are the formula's.\n")
    print("| layer | tp | type | none | selective | full | selective / none | formula |\n" + "|---" * 8 + "|")
    for tp in (1, 2):
        found = iter(measure_ranks(tp))
        for name, model, index in cases():
            for dtype in DTYPES:
                sizes = [next(found) for _ in MODES]
                expected = [formula(model, index, tp, dtype, mode) for mode in MODES]
                tokens = BATCH * model.sequence
                cells = [name, str(tp), str(dtype).removeprefix("torch.")]
                cells += [f"{size / tokens:,.1f}" for size in sizes]
                cells += [
                    f"{sizes[1] / sizes[0]:.2f}" if sizes[0] else "",
                    "yes" if sizes == expected else "NO",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
