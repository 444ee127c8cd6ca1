"""The ``.metadata`` file of torch.distributed.checkpoint: the location of every shard.

The file is a pickle of torch's classes. The import of torch.distributed.checkpoint takes half a second (it
imports sympy and DTensor), for which every start of ranks would wait. So the classes below stand in for
torch's: they have the same state, and their names are replaced in the pickle. Protocol 2 makes that safe: it
writes a class as a line of text, ``cMODULE\\nNAME\\n``, without a length.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import torch

from myriad.checkpoint.format.stored_shard import StoredShard, files_of_rank, offsets_in_file

__all__ = ["METADATA", "make_metadata"]

METADATA = ".metadata"


class _MemoryFormat(Enum):
    TORCH_CONTIGUOUS_FORMAT = 0


@dataclass
class _Properties:
    dtype: torch.dtype

    def __getstate__(self) -> tuple[Any, ...]:
        """Return dtype, layout, requires_grad, memory format and pin_memory."""
        return self.dtype, torch.strided, False, _MemoryFormat.TORCH_CONTIGUOUS_FORMAT, False


@dataclass
class _Chunk:
    offsets: torch.Size
    sizes: torch.Size


@dataclass
class _Tensor:
    properties: _Properties
    size: torch.Size
    chunks: list[_Chunk]


@dataclass(frozen=True)
class _Index:
    fqn: str
    index: int
    offset: torch.Size


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclass
class _Metadata:
    state_dict_metadata: dict[str, _Tensor]
    planner_data: None
    storage_data: dict[_Index, _StorageInfo]
    storage_meta: None
    version: None


_TORCH_NAMES: dict[type, tuple[str, str]] = {
    _MemoryFormat: ("metadata", "_MEM_FORMAT_ENCODING"),
    _Properties: ("metadata", "TensorProperties"),
    _Chunk: ("metadata", "ChunkStorageMetadata"),
    _Tensor: ("metadata", "TensorStorageMetadata"),
    _Index: ("metadata", "MetadataIndex"),
    _StorageInfo: ("filesystem", "_StorageInfo"),
    _Metadata: ("metadata", "Metadata"),
}
"""Module in torch.distributed.checkpoint, and name, of the class that each stands for."""


def make_metadata(shards_of_rank: Sequence[Sequence[StoredShard]]) -> bytes:
    """Return the content of ``.metadata`` for the files of all ranks' shards."""
    tensors: dict[str, _Tensor] = {}
    where: dict[_Index, _StorageInfo] = {}
    files = (files_of_rank(rank, own) for rank, own in enumerate(shards_of_rank))
    for file, stored_shards in chain.from_iterable(files):
        for shard, start in offsets_in_file(stored_shards):
            if shard.tensor not in tensors:
                properties = _Properties(getattr(torch, shard.dtype))
                tensors[shard.tensor] = _Tensor(properties, torch.Size(shard.full_shape), [])
            chunks = tensors[shard.tensor].chunks
            index = _Index(shard.tensor, len(chunks), torch.Size(shard.offsets))
            chunks.append(_Chunk(torch.Size(shard.offsets), torch.Size(shard.shape)))
            where[index] = _StorageInfo(file, start, shard.file_bytes)
    return _with_torch_names(pickle.dumps(_Metadata(tensors, None, where, None, None), protocol=2))


def _with_torch_names(content: bytes) -> bytes:
    for own, (module, name) in _TORCH_NAMES.items():
        ours = f"c{own.__module__}\n{own.__name__}\n"
        content = content.replace(ours.encode(), f"ctorch.distributed.checkpoint.{module}\n{name}\n".encode())
    return content
