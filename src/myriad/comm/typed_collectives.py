"""Exchange small values of a known type between ranks, as JSON that is checked against the type.

torch's object collectives (`all_gather_object` and its kin) unpickle what a peer sends, and a pickle runs
code of the sender's choice. Here a message can only become values of the type that the receiver names, or an
error.

    value of each rank ── JSON ──► all-gather of lengths ──► all-gather of bytes, padded to the longest
                                                                      │
    values by rank ◄── checked against the type ◄─────────────────────┘
"""

from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from myriad.comm.collectives import start_all_gather
from myriad.errors import RunFailedError

__all__ = ["broadcast_value", "gather_values"]

_MAX_BYTES = 2**31
"""Largest message of a rank. The shards of a rank that stores a thousand tensors take about 300 KiB."""
_JSON = ConfigDict(ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64")

T = TypeVar("T")


def gather_values(value: T, kind: Any, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of the group, by rank; every rank calls it.

    ``kind`` is the type of ``value``: JSON values, tuples, bytes, dataclasses and named tuples of such, and
    unions of them. ``group`` is ``None`` if this rank is alone; its value is then returned as it is. Raises
    `RunFailedError` if another rank's message has no value of that type.
    """
    if group is None:
        return [value]
    size, device = dist.get_world_size(group), _device_of(group)
    own = _encode(value, kind, device)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    start_all_gather(lengths, torch.tensor([own.numel()], device=device), group).wait()
    counts = _checked(lengths)
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    received = torch.empty(size * max(counts), dtype=torch.uint8, device=device)
    start_all_gather(received, padded, group).wait()
    rows = zip(received.cpu().view(size, -1), counts, strict=True)
    return [_decode(row[:count], kind, rank) for rank, (row, count) in enumerate(rows)]


def broadcast_value(value: T, kind: Any, group: dist.ProcessGroup | None) -> T:
    """Return the value of the group's first rank; every rank calls it, and what the others pass is ignored.

    ``kind`` and ``group`` are those of `gather_values`. Raises `RunFailedError` if the message has no value
    of that type.
    """
    if group is None:
        return value
    is_source, device = dist.get_rank(group) == 0, _device_of(group)
    data = _encode(value, kind, device) if is_source else None
    length = torch.tensor([0 if data is None else data.numel()], device=device)
    dist.broadcast(length, group=group, group_src=0)
    (count,) = _checked(length)
    if data is None:
        data = torch.empty(count, dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=0)
    return value if is_source else _decode(data.cpu(), kind, 0)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(tuple[kind], config=_JSON)  # in a tuple, as a dataclass alone would take no settings


def _encode(value: Any, kind: Any, device: torch.device) -> torch.Tensor:
    data = bytearray(_adapter(kind).dump_json((value,)))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _decode(data: torch.Tensor, kind: Any, rank: int) -> Any:
    try:
        (value,) = _adapter(kind).validate_json(data.numpy().tobytes())
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise RunFailedError(f"rank {rank} sent no {getattr(kind, '__name__', kind)}: {problem}") from None
    return value


def _checked(lengths: torch.Tensor) -> list[int]:
    counts = [int(count) for count in lengths.tolist()]
    for rank, count in enumerate(counts):
        if not 0 < count <= _MAX_BYTES:
            raise RunFailedError(f"rank {rank} announces a message of {count} bytes")
    return counts


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors the group's backend takes."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
