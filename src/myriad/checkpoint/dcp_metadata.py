"""The file ``.metadata`` of torch.distributed.checkpoint: where every piece is. Nothing in it changes from
save to save, so it is made once.

Apart from `dcp`, because importing torch.distributed.checkpoint takes about a second (it imports sympy): only
what writes checkpoints needs it.
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

from myriad.checkpoint.piece import Piece, files_of_rank, place_in_file

__all__ = ["METADATA", "make_metadata"]

METADATA = ".metadata"


def make_metadata(pieces_of_rank: Sequence[Sequence[Piece]]) -> bytes:
    """The content of ``.metadata`` for files of all ranks' pieces."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    files = (files_of_rank(rank, own) for rank, own in enumerate(pieces_of_rank))
    for file, pieces in chain.from_iterable(files):
        for piece, start in place_in_file(pieces):
            if piece.tensor not in tensors:
                properties = TensorProperties(dtype=getattr(torch, piece.dtype))
                tensors[piece.tensor] = TensorStorageMetadata(properties, torch.Size(piece.full_shape), [])
            kept = tensors[piece.tensor]
            assert isinstance(kept, TensorStorageMetadata)
            index = MetadataIndex(piece.tensor, torch.Size(piece.offsets), len(kept.chunks))
            kept.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)))
            where[index] = _StorageInfo(file, start, piece.file_bytes)
    return pickle.dumps(Metadata(tensors, storage_data=where))
