"""Memory of activations: what a layer keeps between its forward and its backward, measured on real ranks
against the formula of `myriad.model.activation_memory`, for each `layout.recompute`.

    python benchmarks/memory/activations.py

Counted are the storages that autograd saves in one layer's forward, each once, its input included, without
the parameters and the batch. Sequences are long enough for the library's attention in float32 too, as on a
GPU. Then the processor time of a block's forward and backward: what tensor-parallel ranks wait is not in it.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.kernels.attention_blocks import BLOCK, runs_in_blocks
from myriad.model.activation_memory import (
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
from myriad.parallel.recompute import Segment, differentiate, run_in_segments
from myriad.parallel.tensor_parallel import GroupBoundary
from myriad.planner.workload import rank_model
from myriad.telemetry.spans import Recorder

BATCH, REPEATS = 2, 10
NUM_TIMED = 3
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
    case, saved = _Case(model, index, boundary, dtype, recompute), Saved()
    with saved_tensors_hooks(saved.add, lambda kept: kept):
        segments, _ = case.forward()
    if recompute == "full":
        saved.add(segments[0].entered)
    return saved.num_bytes([*case.layer.parameters(), case.tokens])


def seconds(model: ModelConfig, index: int, boundary: Boundary, dtype: torch.dtype) -> list[float]:
    """Return processor seconds of a forward and a backward of one layer in each mode: the least of several in
    turns."""
    found: list[list[float]] = []
    for _ in range(REPEATS):
        round_of_modes = []
        for mode in MODES:
            case = _Case(model, index, boundary, dtype, mode)
            begun = time.thread_time()
            segments, y = case.forward()
            differentiate(segments, torch.ones_like(y), case.context)
            round_of_modes.append(time.thread_time() - begun)
        found.append(round_of_modes)
    return [min(of_mode) for of_mode in zip(*found, strict=True)]


class _Case:
    """One layer and one micro-batch."""

    def __init__(
        self, model: ModelConfig, index: int, boundary: Boundary, dtype: torch.dtype, recompute: Recompute
    ) -> None:
        boundary.remakes = recompute == "selective"
        self.layer, self.recompute = make_layer(model, index, boundary, dtype), recompute
        whole = torch.zeros(BATCH, model.sequence, dtype=torch.int64)
        share = None if boundary.context is None else boundary.context.share(model.sequence)
        self.tokens = whole if share is None else share.take(whole)
        stream = torch.randn(BATCH, self.tokens.shape[1] // boundary.size, model.hidden).to(dtype)
        self.x = stream.requires_grad_() if index else self.tokens
        samples = self.tokens[:, 0].contiguous()
        self.context = Context(targets=self.tokens, samples=samples, share=share, sequence_targets=whole)

    def forward(self) -> tuple[list[Segment], torch.Tensor]:
        """As the runtime does it: what is kept, and the output."""
        if self.recompute == "full":
            return run_in_segments([self.layer], self.x, self.context, keep_last=False)
        y = run_layers([self.layer], self.x, self.context)
        return [Segment([self.layer], self.x, y)], y


def formula(
    model: ModelConfig,
    index: int,
    tp: int,
    dtype: torch.dtype,
    recompute: Recompute,
    ep: int = 1,
    etp: int | None = None,
    expert_load: float = 1.0,
    context: tuple[int, int] = (1, 1),
) -> float:
    """What `measure` must find."""
    model = rank_model(model, context[0] * context[1])
    kind: LayerKind = "embedding" if index == 0 else "head" if index > model.layers else "block"
    fused = torch.empty(1, model.sequence, 1, dtype=dtype)
    in_blocks = kind != "embedding" and runs_in_blocks(
        fused, model.layer_window(index - 1), capped=model.has_capped_scores
    )
    in_blocks = in_blocks and context == (1, 1)
    keys: dict[str, Any] = {"tp": tp, "bytes_per_value": dtype.itemsize, "recompute": recompute}
    keys |= {"softmax_block": BLOCK if in_blocks else None, "context": context}
    of_experts: dict[str, Any] = {"ep": ep, "etp": etp, "expert_load": expert_load}
    per_token = kept_bytes_per_token(model, kind, index - 1, **keys, **of_experts)
    held = BATCH * model.sequence * per_token
    return round(held + kept_bytes_per_micro_batch(model, kind, index - 1, **keys))


def cases() -> list[tuple[str, ModelConfig, int]]:
    """Name, model and layer of each line of the table."""
    found = []
    for block in ("serial", "parallel"):
        for activation in ACTIVATIONS:
            model = MODEL.model_copy(update={"block": block, "activation": activation})
            found.append((f"{block}, {activation}", model, 1))
    short = MODEL.model_copy(update={"sequence": 256})
    return [*found, ("serial, gelu, short", short, 1), ("embedding", MODEL, 0), ("head", MODEL, 3)]


def measure_rank(tp: int) -> tuple[list[int], list[list[float]]]:
    """One rank's side: bytes of every case, type and mode, in this order; seconds of the first cases."""
    groups = open_world(Layout(tp=tp), torch.device("cpu"))
    boundary = GroupBoundary(groups.along("tp"), groups.grid.index("tp"), tp, Recorder())
    sizes = [
        measure(model, index, boundary, dtype, mode)
        for _, model, index in cases()
        for dtype in DTYPES
        for mode in MODES
    ]
    times = [seconds(model, index, boundary, torch.float32) for _, model, index in cases()[:NUM_TIMED]]
    close_world()
    return sizes, times


def _rank(rank: int, world: int, port: int) -> tuple[list[int], list[list[float]]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    return measure_rank(world)


def measure_ranks(tp: int) -> tuple[list[int], list[list[float]]]:
    """Rank 0's, on forked processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with multiprocessing.get_context("fork").Pool(tp) as pool:
        return pool.starmap(_rank, [(rank, tp, port) for rank in range(tp)], chunksize=1)[0]


def print_sizes(tp: int, sizes: Sequence[int]) -> None:
    """A line for each case and type."""
    found = iter(sizes)
    for name, model, index in cases():
        for dtype in DTYPES:
            kept = [next(found) for _ in MODES]
            agrees = kept == [formula(model, index, tp, dtype, mode) for mode in MODES]
            cells = [name, str(tp), str(dtype).removeprefix("torch.")]
            cells += [f"{size / (BATCH * model.sequence):,.0f}" for size in kept]
            cells += [f"{kept[1] / kept[0]:.2f}" if kept[0] else "", "yes" if agrees else "NO"]
            print("| " + " | ".join(cells) + " |")


def print_times(tp: int, times: Sequence[Sequence[float]]) -> None:
    """A line for each block."""
    for (name, _, _), (none, selective, full) in zip(cases(), times, strict=False):
        cells = [name, str(tp), f"{1e3 * none:.1f}", f"{selective / none:.2f}", f"{full / none:.2f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Prints both tables."""
    print(f"H = {MODEL.hidden}, S = {MODEL.sequence} (short: 256), {BATCH} sequences in a micro-batch.")
    print("Bytes for each token on one rank; and whether all are the formula's.\n")
    print("| layer | tp | type | none | selective | full | selective / none | formula |\n" + "|---" * 8 + "|")
    found = {tp: measure_ranks(tp) for tp in (1, 2)}
    for tp, (sizes, _) in found.items():
        print_sizes(tp, sizes)
    print("\nProcessor time of a block's forward and backward in float32, and as multiples of it.\n")
    print("| layer | tp | none, ms | selective / none | full / none |\n" + "|---" * 5 + "|")
    for tp, (_, times) in found.items():
        print_times(tp, times)


if __name__ == "__main__":
    main()
