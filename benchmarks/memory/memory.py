"""Memory of a rank for ZeRO 0 to 3, measured on real ranks against the formula of `myriad.parallel.chunk`.

    python benchmarks/memory/memory.py [DP ...]        default 4 8

Counted is what a rank keeps of its chunks: the bytes of the storages of values, master values, gradient sums,
reduced gradients and optimizer state, looked at after every action of an iteration. Not counted: activations,
and while a chunk is reduced or gathered the transport's own buffers.

Legend: N data-parallel ranks, P padded parameters of this rank, b bytes of the computing type.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from myriad.comm.grid import RankGrid
from myriad.comm.groups import Groups, close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.chunk import Chunk
from myriad.parallel.engine import Engine
from myriad.program.config import OverlapConfig
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder

MODEL = ModelConfig(layers=8, hidden=96, heads=4, sequence=16, vocabulary=1024, tied=False)
MICRO_BATCHES = 2
VIRTUAL_STAGES = 4
NO_OVERLAP = OverlapConfig(data=False, optimizer=False)
"""What travels while something else is computed is held meanwhile: the formula is without."""
SETTINGS = ((0, "last"), (1, "last"), (2, "last"), (2, "each"), (3, "last"), (3, "each"))
"""(ZeRO stage, when gradients are reduced)."""


@dataclass(frozen=True)
class Bytes:
    """What one rank keeps, by what it is for."""

    values: int
    master: int
    """0 where the values are the master values."""
    sums: int
    gradients: int
    """0 where they are a part of the sums."""
    optimizer: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Memory:
    """At three moments."""

    built: Bytes
    peak: Bytes
    """Where the total was highest."""
    stepped: Bytes


@dataclass(frozen=True)
class Sizes:
    """Padded elements of this rank's chunks."""

    stages: tuple[int, ...]
    """Chunks of single stages."""
    tied: int
    """The chunk that first and last stage share."""


def storage_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of the storages behind the tensors, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def memory_of(engine: Engine) -> Bytes:
    """What this rank holds now."""

    def beside(chunk: Chunk, name: str, other: str) -> int:
        both = storage_bytes(getattr(chunk, other), getattr(chunk, name))
        return both - storage_bytes(getattr(chunk, other))

    chunks, state = engine.model.chunks, engine.optimizer.state()
    return Bytes(
        values=storage_bytes(*(chunk.values for chunk in chunks)),
        master=sum(beside(chunk, "master", "values") for chunk in chunks),
        sums=storage_bytes(*(chunk.grad_buffer for chunk in chunks)),
        gradients=sum(beside(chunk, "gradients", "grad_buffer") for chunk in chunks),
        optimizer=storage_bytes(*(tensor for tensors in state.values() for tensor in tensors)),
    )


class Watcher(Recorder):
    """Looks at the memory after every action, and keeps the moment of the highest total."""

    engine: Engine | None = None
    peak: Bytes | None = None

    @contextmanager
    def span(
        self, name: str, stage: int = -1, micro_batch: int = -1, chunk: int = -1, **more: Any
    ) -> Iterator[None]:
        yield
        if self.engine is not None:
            now = memory_of(self.engine)
            self.peak = now if self.peak is None or now.total > self.peak.total else self.peak


def measure(
    layouts: Sequence[Layout], dtype: torch.dtype, model: ModelConfig = MODEL
) -> list[tuple[Memory, Sizes]]:
    """One rank's side: for each layout (of one world) builds, trains a step, and says what it held."""
    world = open_world(layouts[0], torch.device("cpu"))
    found = [_measure(Groups(RankGrid(layout, world.grid.rank)), dtype, model) for layout in layouts]
    close_world()
    return found


def _measure(groups: Groups, dtype: torch.dtype, model: ModelConfig) -> tuple[Memory, Sizes]:
    layout, watcher = groups.grid.layout, Watcher()
    definition = GPT(model, seed=1)
    stages = partition_layers("uniform", layout.num_stages, definition.kinds)
    tokens = torch.zeros(layout.micro_batch * MICRO_BATCHES, model.sequence, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens[:, 0])
    sample = Batch(*(x[: layout.micro_batch] for x in (tokens, tokens, tokens[:, 0])))
    engine = Engine(
        definition, groups, stages, sample, MICRO_BATCHES, OptimizerConfig(),
        seed=1, dtype=dtype, device=torch.device("cpu"), recorder=watcher,
        overlap=NO_OVERLAP,
    )  # fmt: skip
    built, watcher.engine = memory_of(engine), engine
    engine.train_step(lambda: batch, 1e-3, tokens.numel() * layout.dp)
    assert watcher.peak is not None
    chunks, tied = engine.model.chunks, engine.model.tied
    sizes = Sizes(tuple(chunk.size for chunk in chunks if chunk is not tied), tied.size if tied else 0)
    return Memory(built, watcher.peak, memory_of(engine)), sizes


def formula(layout: Layout, dtype: torch.dtype, sizes: Sizes) -> Memory:
    """What a rank of a pipeline of one must hold, with two micro-batches or more."""
    zero, b = layout.zero, dtype.itemsize
    whole = sum(sizes.stages) + sizes.tied
    part = whole // layout.dp if zero else whole
    first_and_last = {sizes.stages[0], sizes.stages[-1]}
    largest_stage = max(*(size + sizes.tied for size in first_and_last), *sizes.stages)
    live = whole if layout.reduce == "last" else max(sizes.stages) + sizes.tied

    def at(values: int, sums: int) -> Bytes:
        return Bytes(
            values=b * values,
            master=0 if b == 4 and zero < 3 else 4 * part,
            sums=4 * sums,
            gradients=4 * part if zero >= 2 else 0,
            optimizer=8 * part,
        )

    rest = at(values=0 if zero == 3 else whole, sums=0 if zero >= 2 else whole)
    peak = at(values=largest_stage if zero == 3 else whole, sums=live if zero >= 2 else whole)
    return Memory(built=rest, peak=peak, stepped=rest)


def _rank(rank: int, port: int, layouts: Sequence[Layout], dtype: torch.dtype) -> list[tuple[Memory, Sizes]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layouts[0].world), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    return measure(layouts, dtype)


def measure_ranks(layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[tuple[Memory, Sizes]]]:
    """For each layout every rank's memory, on forked processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = layouts[0].world
    with multiprocessing.get_context("fork").Pool(world) as pool:
        ranks = pool.starmap(_rank, [(rank, port, layouts, dtype) for rank in range(world)], chunksize=1)
    return [list(of_layout) for of_layout in zip(*ranks, strict=True)]


def row(layout: Layout, dtype: torch.dtype, ranks: Sequence[tuple[Memory, Sizes]]) -> str:
    """A line of the table: rank 0's memory; the others hold alike."""
    measured, sizes = ranks[0]
    agrees = all(found == formula(layout, dtype, sizes) for found, _ in ranks)
    parameters, peak = sum(sizes.stages) + sizes.tied, measured.peak
    kept = (peak.values, peak.master, peak.sums, peak.gradients, peak.optimizer, peak.total)
    cells = [str(layout.zero), layout.reduce]
    cells += [f"{size / 2**10:,.0f}" for size in (*kept, measured.built.total, measured.stepped.total)]
    cells += [f"{now.total / parameters:.2f}" for now in (peak, measured.stepped)]
    return "| " + " | ".join([*cells, "yes" if agrees else "NO"]) + " |"


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each number of ranks and type."""
    print(f"GPT with {MODEL.num_parameters():,} parameters, {VIRTUAL_STAGES} chunks on each rank, AdamW,")
    print(
        f"{MICRO_BATCHES} micro-batches. KiB of one rank at the highest moment of a step (by purpose), before"
    )
    print(
        "and after it; the same in bytes for each parameter; and whether all is, to the byte, the formula's."
    )
    for dp in [int(argument) for argument in arguments] or [4, 8]:
        layouts = [
            Layout(dp=dp, zero=zero, reduce=reduce, virtual_stages=VIRTUAL_STAGES)
            for zero, reduce in SETTINGS
        ]
        for dtype in (torch.float32, torch.bfloat16):
            print(f"\n### dp = {dp}, {str(dtype).removeprefix('torch.')}\n")
            names = "ZeRO, reduce, values, master, sums, gradients, optimizer, peak, built, after step, "
            names += "peak B/parameter, after step B/parameter, formula"
            print("| " + names.replace(", ", " | ") + " |\n" + "|---" * 13 + "|")
            for layout, ranks in zip(layouts, measure_ranks(layouts, dtype), strict=True):
                print(row(layout, dtype, ranks), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
