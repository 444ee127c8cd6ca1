"""Write, read and compare checkpoints without a snapshot server: for tools, and for ranks that wait.

    save, load, load_model    one checkpoint, of any layout
    compare_checkpoints       which tensors of two checkpoints differ, and by how much
    Weights                   model weights of any format, under Myriad's names, read one tensor at a time

A training run uses `myriad.checkpoint.session` instead; the files are the same.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from myriad import __version__
from myriad.checkpoint.checkpoint_world import CheckpointWorld
from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest, StoredFile
from myriad.checkpoint.format.dcp_archive import dtype_name, make_stored_shards
from myriad.checkpoint.format.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.format.stored_shard import PROGRESS, StoredShard, files_of_rank
from myriad.checkpoint.format.trainer_state import progress_shard
from myriad.checkpoint.load.collective_load import LoadCandidate, load_candidate
from myriad.checkpoint.load.read_plan import shards_in_manifest
from myriad.checkpoint.storage.checkpoint_folder import (
    Checkpoint,
    CheckpointFolder,
    open_checkpoint,
)
from myriad.checkpoint.storage.verified_files import put_and_check, write_and_check
from myriad.errors import RunFailedError
from myriad.model.config import ModelConfig
from myriad.model.tensor_shard import TensorShard

__all__ = [
    "AVERAGE_PREFIX",
    "MODEL_PREFIX",
    "CheckpointWeights",
    "Shapes",
    "Weights",
    "compare_checkpoints",
    "constant_manifest",
    "load",
    "load_model",
    "save",
    "write_rank",
]

MODEL_PREFIX = "model."
"""Prefix of the names of the parameters."""
AVERAGE_PREFIX = "optimizer.ema."
"""Prefix of the names of the parameters' moving average (`myriad.optim.weight_average`)."""

T = TypeVar("T")


def constant_manifest(
    shards_of_rank: Sequence[Sequence[StoredShard]], layout: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of the manifest that is equal for all checkpoints of an attempt."""
    tensors = {
        shard.tensor: {"shape": list(shard.full_shape), "dtype": shard.dtype}
        for stored_shards in shards_of_rank
        for shard in stored_shards
    }
    versions = {"myriad": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"layout": dict(layout), "versions": versions, "tensors": tensors}


def save(
    folder: CheckpointFolder,
    step: int,
    shards: Sequence[TensorShard],
    progress: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    layout: Mapping[str, Any] | None = None,
    read: Callable[[TensorShard], torch.Tensor] = lambda shard: shard.values,
) -> Path:
    """Write a checkpoint, and return its folder once it is committed. Collective.

    ``group``: host process group of all ranks; default: the world, or this process alone. ``read``: values of
    a shard, by default those in live memory; called when they are written, one shard at a time, so that the
    shards may be on the meta device. Raises `RunFailedError` on every rank if the checkpoint cannot be
    written."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = CheckpointWorld(rank, group=group or (dist.group.WORLD if dist.is_initialized() else None))
    own = [*shards, progress_shard(progress)] if rank == 0 else list(shards)
    stored_shards = make_stored_shards(own)
    checkpoint = folder.at_step(step)
    world.barrier()  # a rank may still be reading the checkpoint that this one replaces
    _together(world, step, lambda: rank == 0 and bool(folder.begin(step)), bool | None)
    files = dict[str, StoredFile] | None
    records = _together(world, step, lambda: write_rank(checkpoint, rank, own, stored_shards, read), files)
    shards_of_rank = world.gather(stored_shards, list[StoredShard])
    commit = partial(_commit, checkpoint, step, records, shards_of_rank, progress, layout or {})
    _together(world, step, commit if rank == 0 else lambda: None, None)
    return folder.of_step(step)


def _together(world: CheckpointWorld, step: int, do: Callable[[], T], kind: Any) -> list[T]:
    """Return the results of all ranks, or raise the first error on all ranks. ``kind`` is
    the type of the results, or ``None``."""
    result: T | None = None
    problem: str | None = None
    try:
        result = do()
    except Exception as error:
        problem = f"step-{step} cannot be written: {error or type(error).__name__} (rank {world.rank})"
    found = world.gather((result, problem), tuple[kind, str | None])
    if problems := [problem for _, problem in found if problem]:
        raise RunFailedError(problems[0])
    return [cast(T, given) for given, _ in found]


def write_rank(
    checkpoint: Checkpoint,
    rank: int,
    shards: Sequence[TensorShard],
    stored_shards: Sequence[StoredShard],
    read: Callable[[TensorShard], torch.Tensor] = lambda shard: shard.values,
) -> dict[str, StoredFile]:
    """Write the files of one rank, and read each back. ``read``: as for `save`. Raises ``OSError``."""
    parts = {id(shard): part for part, shard in zip(shards, stored_shards, strict=True)}
    records = {}

    def data(shard: StoredShard) -> memoryview:
        return _bytes_of(read(parts[id(shard)]))

    for name, own in files_of_rank(rank, stored_shards):
        records[name] = write_and_check(checkpoint.storage, checkpoint.at(name), own, data)
    return records


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in C order."""
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def _commit(
    checkpoint: Checkpoint,
    step: int,
    records: Sequence[dict[str, StoredFile]],
    shards_of_rank: Sequence[Sequence[StoredShard]],
    progress: Mapping[str, Any],
    layout: Mapping[str, Any],
) -> None:
    files = {name: record for own in records for name, record in own.items()}
    metadata = make_metadata(shards_of_rank)
    files[METADATA] = put_and_check(checkpoint.storage, checkpoint.at(METADATA), metadata)
    constant = constant_manifest(shards_of_rank, layout)
    data = progress.get("data", {})
    checkpoint.commit(CheckpointManifest(step, 0, 0.0, dict(progress), data=data, files=files, **constant))


def _manifest_of(checkpoint: Checkpoint) -> CheckpointManifest:
    try:
        return checkpoint.manifest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailedError(f"{checkpoint.where}: no readable manifest ({error})") from None


def load(where: Path | str, shards: Sequence[TensorShard]) -> dict[str, Any]:
    """Load a checkpoint of any layout into the tensor shards, each rank by itself. Return the saved progress.

    Raises `RunFailedError` for a checkpoint of another model, or if a needed byte differs from what was
    written."""
    checkpoint = open_checkpoint(where)
    manifest = _manifest_of(checkpoint)
    candidate = LoadCandidate(manifest.step, shards_in_manifest(manifest), checkpoint)
    result = load_candidate(candidate, shards, CheckpointWorld())
    if not result.good:
        raise RunFailedError(f"{checkpoint.where} cannot be read: {'; '.join(result.problems)}")
    return dict(manifest.progress)


def load_model(where: Path | str, prefix: str = MODEL_PREFIX) -> dict[str, torch.Tensor]:
    """Return every full tensor whose name starts with ``prefix``, keyed by the rest of the name."""
    tensors = _manifest_of(open_checkpoint(where)).tensors
    full = {
        name: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for name, tensor in tensors.items()
        if name.startswith(prefix) and (prefix or not _is_not_state(name))
    }
    load(where, [TensorShard(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in full.items()])
    return {name.removeprefix(prefix): tensor for name, tensor in full.items()}


def _is_not_state(name: str) -> bool:
    return name == PROGRESS or name.startswith("random.")


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor between two checkpoints."""

    name: str
    what: str | None
    """Why the tensors cannot be compared: one is missing, or shapes or dtypes differ. ``None``: compared."""
    largest: float = 0.0
    """Largest absolute difference of an element."""
    relative: float = 0.0
    """``largest``, divided by the largest magnitude in the first checkpoint."""


def compare_checkpoints(first: Path | str, second: Path | str) -> Iterator[Difference]:
    """Yield every tensor that is not bitwise equal, in order of name."""
    a, b = load_model(first, ""), load_model(second, "")
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield Difference(name, f"only in the {'first' if name in a else 'second'}")
        elif a[name].shape != b[name].shape:
            yield Difference(name, f"{list(a[name].shape)} and {list(b[name].shape)}")
        elif a[name].dtype != b[name].dtype:
            yield Difference(name, f"{dtype_name(a[name].dtype)} and {dtype_name(b[name].dtype)}")
        elif not _same_bits(a[name], b[name]):
            yield _difference(name, a[name].double(), b[name].double())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal, including NaNs."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    largest = float((a - b).abs().max())
    return Difference(name, None, largest, largest / max(float(a.abs().max()), 1e-300))


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of full tensors, by name."""


class Weights(Protocol):
    """Interface of model weights on disk."""

    where: str
    """Path or URL of the weights."""
    run: Path | None
    """Folder of the run that the weights belong to, if any."""
    model: ModelConfig | None
    """Configuration of the model; ``None``: unknown."""
    shapes: Shapes
    """Shape of every tensor, read from headers alone."""

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor, in its stored precision."""
        ...

    def read_parts(self, name: str, boxes: Sequence[tuple[slice, ...]]) -> Iterator[torch.Tensor]:
        """Yield parts of one tensor, in its stored precision, reading as little else as the format allows.
        A part has a first element and an end in each dimension."""
        ...


class CheckpointWeights:
    """The model weights in one Myriad checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        run: Path | None,
        model: ModelConfig | None,
        prefix: str = MODEL_PREFIX,
    ) -> None:
        """Read names and shapes, but no values. ``prefix``: prefix of the names of the stored tensors."""
        self.where, self.run, self.model, self._prefix = checkpoint.where, run, model, prefix
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in checkpoint.manifest().tensors.items()
            if name.startswith(prefix)
        }
        self._stored: Shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
        self.shapes: Shapes = {name: _real_rows(name, shape, model) for name, shape in self._stored.items()}
        self._dtypes = {name: tensor["dtype"] for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor."""
        stored = load_model(self.where, self._prefix + name)[""]
        return stored[: self.shapes[name][0]] if self.shapes[name] != self._stored[name] else stored

    def read_parts(self, name: str, boxes: Sequence[tuple[slice, ...]]) -> Iterator[torch.Tensor]:
        """Yield parts of one tensor; stored shards that have no element of them are not read."""
        dtype = getattr(torch, self._dtypes[name])
        parts = [torch.empty([one.stop - one.start for one in box], dtype=dtype) for box in boxes]
        offsets = [tuple(one.start for one in box) for box in boxes]
        load(
            self.where,
            [
                TensorShard(self._prefix + name, self._stored[name], start, part)
                for start, part in zip(offsets, parts, strict=True)
            ],
        )
        yield from parts


def _real_rows(name: str, shape: tuple[int, ...], model: ModelConfig | None) -> tuple[int, ...]:
    """Return the shape of a tensor without the padding that earlier versions stored after the vocabulary."""
    is_table = name in ("embedding.tokens.weight", "head.output.weight")
    if model is None or not is_table or shape[0] != model.padded_vocabulary():
        return shape
    return (model.vocabulary, *shape[1:])
