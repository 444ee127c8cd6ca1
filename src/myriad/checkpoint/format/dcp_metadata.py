"""The ``.metadata`` file of torch.distributed.checkpoint: the location of every shard.

Its content is the same for every save, so it is made once. This module is separate from `dcp` because the
import of torch.distributed.checkpoint takes about a second (it imports sympy), and only writers need it.
"""

import pickle
from collections.abc import Sequence
from itertools import chain

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from myriad.checkpoint.format.stored_shard import StoredShard, files_of_rank, offsets_in_file

__all__ = ["METADATA", "make_metadata"]

METADATA = ".metadata"


def make_metadata(shards_of_rank: Sequence[Sequence[StoredShard]]) -> bytes:
    """Return the content of ``.metadata`` for the files of all ranks' shards."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    files = (files_of_rank(rank, own) for rank, own in enumerate(shards_of_rank))
    for file, stored_shards in chain.from_iterable(files):
        for shard, start in offsets_in_file(stored_shards):
            if shard.tensor not in tensors:
                properties = TensorProperties(dtype=getattr(torch, shard.dtype))
                tensors[shard.tensor] = TensorStorageMetadata(properties, torch.Size(shard.full_shape), [])
            kept = tensors[shard.tensor]
            assert isinstance(kept, TensorStorageMetadata)
            index = MetadataIndex(shard.tensor, torch.Size(shard.offsets), len(kept.chunks))
            kept.chunks.append(ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.shape)))
            where[index] = _StorageInfo(file, start, shard.file_bytes)
    return pickle.dumps(Metadata(tensors, storage_data=where))
