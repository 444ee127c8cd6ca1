"""What each rank reads of a Hugging Face folder with ``train.init_from``, and how much memory that takes.

    python benchmarks/checkpoint/initial_slices.py              about two minutes, 5 GiB of memory

A Llama with random weights in bfloat16 is written to a folder. Real ranks (gloo) build their shards in each
layout, and fill them one rank after another, each time with the files out of the page cache. Where the ranks
read whole tensors, they do what Myriad did before: one tensor at a time, of which a rank keeps its part.
transformers reads the folder in a process of its own; the memory of its shards is that of the whole model.

    values      bytes of the values that were asked for, as a share of the folder's
    disk        bytes that the kernel read from the disk for it (read_bytes in /proc/self/io), with readahead
    memory      growth of the process (VmHWM) while it reads, over the memory of its shards
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights, write_folder
from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.workload import Workload
from myriad.telemetry.spans import Recorder

MODEL = ModelConfig(
    layers=16, hidden=1024, heads=16, kv_heads=8, ffn_hidden=2816, vocabulary=32000, sequence=64,
    activation="swiglu", tied=False,
)  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 8},
    {"tp": 2, "pp": 4},
    {"dp": 8, "zero": 3},
)


class RandomWeights:
    """Weights that are drawn when they are read."""

    where, run, model = "memory", None, MODEL

    def __init__(self) -> None:
        self.shapes = {mapping.name: mapping.shape for mapping in tensor_mappings(MODEL)}

    def read(self, name: str) -> torch.Tensor:
        return torch.randn(self.shapes[name]) * 0.02

    def read_parts(self, name: str, boxes: Any) -> Any:
        whole = self.read(name)
        return (whole[box] for box in boxes)


@dataclass(frozen=True)
class Reading:
    """What one process did."""

    values: int
    disk: int
    memory: int
    seconds: float


def drop_cache(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(folder: Path, read: Callable[[], int]) -> Reading:
    """Measure a call that reads the folder, and returns the bytes of the values that it asked for."""
    drop_cache(folder)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # no freed memory hides what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    memory, disk, start = _status("VmRSS"), _disk_bytes(), time.perf_counter()
    values = read()
    seconds = time.perf_counter() - start
    return Reading(values, _disk_bytes() - disk, _status("VmHWM") - memory, seconds)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def by_parts(folder: Path, shards: list[TensorShard]) -> int:
    """Fill shards as `myriad.train.checkpoint_tools.initial_weights` does."""
    weights = HuggingFaceWeights(folder, compare_tied=False)
    for shard in shards:
        boxes = [_box(shard)]
        for values in weights.read_parts(shard.name.removeprefix("model."), boxes):
            shard.values.copy_(values)
    return weights.bytes_read


def by_whole_tensors(folder: Path, shards: list[TensorShard]) -> int:
    """Fill shards from whole tensors, one at a time."""
    mappings, found = {mapping.name: mapping for mapping in tensor_mappings(MODEL)}, 0
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)

    def theirs(name: str) -> torch.Tensor:
        nonlocal found
        with safe_open(places[name], "pt") as file:
            values: torch.Tensor = file.get_tensor(name)
        found += values.nbytes
        return values

    for name in dict.fromkeys(shard.name for shard in shards):
        whole = mappings[name.removeprefix("model.")].read(theirs)
        for shard in shards:
            if shard.name == name:
                shard.values.copy_(whole[_box(shard)])
    return found


def _box(shard: TensorShard) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(shard.offsets, shard.values.shape, strict=True)
    )


def _rank(rank: int, port: int, keys: dict[str, Any], folder: Path) -> list[Reading]:
    layout = Layout(**keys)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.world), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    groups = open_world(layout, torch.device("cpu"))
    tokens = torch.zeros(1, MODEL.sequence, dtype=torch.int64)
    engine = Engine(
        GPT(MODEL, seed=1), groups, stage_layers(Workload(MODEL, layout, layout.dp)),
        Batch(tokens, tokens, tokens[:, 0].contiguous()), 1, OptimizerConfig(clip_norm=None), seed=1,
        dtype=torch.float32, device=torch.device("cpu"), recorder=Recorder(),
    )  # fmt: skip
    shards = [shard for shard in engine.all_shards() if shard.name.startswith("model.")]
    for shard in shards:
        shard.values.zero_()  # its pages are there before it is filled
    found = []
    for read in (by_whole_tensors, by_parts):
        for turn in range(layout.world):
            if layout.world > 1:
                torch.distributed.barrier()
            if turn == rank:
                found.append(measured(folder, lambda read=read: read(folder, shards)))  # type: ignore[misc]
    engine.close()
    close_world()
    return found


def ranks(keys: dict[str, Any], folder: Path) -> list[list[Reading]]:
    """Return for each rank what it read: whole tensors, and its parts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = Layout(**keys).world
    with multiprocessing.get_context("fork").Pool(world) as pool:
        return pool.starmap(_rank, [(rank, port, keys, folder) for rank in range(world)], chunksize=1)


def _transformers(folder: Path) -> Reading:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import transformers

    transformers.LlamaForCausalLM  # noqa: B018 (imported when it is first named)
    kept: list[Any] = []

    def read() -> int:
        kept.append(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
        for parameter in kept[0].parameters():
            parameter.detach().sum()  # where it maps the file, the values come with their first use
        return sum(parameter.nbytes for parameter in kept[0].parameters())

    found = measured(folder, read)
    model = sum(parameter.nbytes for parameter in kept[0].parameters())
    return Reading(found.values, found.disk, found.memory - model, found.seconds)


def row(what: str, readings: list[Reading], size: int) -> str:
    """A line of the table, with the largest number of all ranks."""
    values = max(one.values for one in readings)
    cells = [what, f"{values / 2**20:,.0f} ({values / size:.1%})"]
    cells += [f"{max(getattr(one, key) for one in readings) / 2**20:,.0f}" for key in ("disk", "memory")]
    cells += [f"{max(one.seconds for one in readings):.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Write the model, read it in each layout, and print a row for each way of reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the model is written (default: a new one)")
    given = parser.parse_args().folder
    with tempfile.TemporaryDirectory(dir=given) as made:
        folder = Path(made) / "llama"
        write_folder(RandomWeights(), MODEL, folder, None, "bfloat16", shard_bytes=200 * 10**6)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{MODEL.num_parameters() / 1e6:.0f} million parameters, {size / 2**20:,.0f} MiB\n")
        print("| rank of | values MiB (share) | disk MiB | memory MiB | seconds |\n" + "|---" * 5 + "|")
        for keys in LAYOUTS:
            name = " ".join(f"{key}={value}" for key, value in keys.items()) or "one rank"
            found = ranks(keys, folder)
            for index, way in enumerate(("whole tensors", "its parts")):
                print(row(f"{name}, {way}", [one[index] for one in found], size), flush=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(row("transformers, from_pretrained", pool.starmap(_transformers, [(folder,)]), size))


if __name__ == "__main__":
    main()
