"""State of a run beside the model: training progress, and torch's random generators.

Each is a tensor of bytes that is stored, sent and hashed like any other tensor. Progress is 4 KiB of JSON of
rank 0. Every rank stores the state of its random generators. Myriad's own random draws depend only on seed
and sample and have no state, but a user's model may use torch's generators. They are restored if the same
rank of an equally large world resumes. Otherwise each rank keeps its current generators."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from myriad.checkpoint.format.stored_shard import PROGRESS
from myriad.model.tensor_shard import TensorShard

__all__ = [
    "decode_progress",
    "load_random",
    "progress_shard",
    "random_shard",
    "write_progress",
    "write_random",
]

_BYTES = 4096


def progress_shard(progress: Mapping[str, Any] | None = None) -> TensorShard:
    """Return a tensor with the given progress, or an empty one to load into."""
    values = torch.full((_BYTES,), ord(" "), dtype=torch.uint8)
    if progress is not None:
        write_progress(values, progress)
    return TensorShard(PROGRESS, (_BYTES,), (0,), values)


def write_progress(values: torch.Tensor, progress: Mapping[str, Any]) -> None:
    """Write progress into ``values``, shape ``[4096]``."""
    text = json.dumps(progress).encode()
    assert len(text) <= _BYTES, "a few numbers"
    values.numpy().data[:] = text.ljust(_BYTES)


def decode_progress(values: torch.Tensor) -> dict[str, Any]:
    """Return the progress that `write_progress` wrote."""
    progress: dict[str, Any] = json.loads(values.numpy().tobytes())
    return progress


def random_shard(rank: int, device: torch.device) -> TensorShard:
    """Return an empty tensor for the generator states of one rank: the host's, then the device's."""
    size = _states(device).numel()
    return TensorShard(f"random.{rank}", (size,), (0,), torch.zeros(size, dtype=torch.uint8))


def _states(device: torch.device) -> torch.Tensor:
    host = torch.random.get_rng_state()
    return torch.cat([host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else host


def write_random(shard: TensorShard, device: torch.device) -> None:
    """Write the current generator states into ``shard``."""
    shard.values.copy_(_states(device))


def load_random(shard: TensorShard, was_loaded: bool, device: torch.device) -> None:
    """Set the generators to the states in ``shard``, if they were loaded."""
    if not was_loaded:
        return
    host_bytes = torch.random.get_rng_state().numel()
    torch.random.set_rng_state(shard.values[:host_bytes].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(shard.values[host_bytes:].clone(), device)
