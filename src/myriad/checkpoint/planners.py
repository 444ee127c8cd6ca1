"""Rectangles of live memory to torch.distributed.checkpoint's plans and back.

Every rank writes the rectangles that it owns; together they tile each tensor, so the folder is an ordinary
DCP checkpoint of whole tensors, which torch alone opens and any layout can read: a load asks for the
rectangles that *its* layout needs, and DCP finds the overlaps.
"""

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["PROGRESS", "RectangleLoadPlanner", "RectangleSavePlanner", "check_same_model"]

PROGRESS = "progress"
"""Name under which everything that is not a tensor is kept."""


def _chunk(rectangle: Rectangle) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(rectangle.offsets), rectangle.values.shape)


def check_same_model(metadata: Metadata, rectangles: Sequence[Rectangle]) -> None:
    """Refuses, before anything is read, a checkpoint in which a tensor is missing or has another shape."""
    for part in rectangles:
        kept = metadata.state_dict_metadata.get(part.name)
        there = tuple(kept.size) if isinstance(kept, TensorStorageMetadata) else "nothing"
        if there != part.full_shape:
            raise RunFailedError(
                f"checkpoint of another model: {part.name} is {part.full_shape} here, {there} there"
            )


class RectangleSavePlanner(SavePlanner):
    """Writes rectangles, and from the coordinator the run's progress."""

    def __init__(self, rectangles: Sequence[Rectangle], progress: dict[str, Any]) -> None:
        self._rectangles = {(part.name, torch.Size(part.offsets)): part.values for part in rectangles}
        self._items = [self._item(part) for part in rectangles]
        self._progress = progress
        self._writes_progress = False

    @staticmethod
    def _item(rectangle: Rectangle) -> WriteItem:
        properties = TensorProperties(dtype=rectangle.values.dtype)
        data = TensorWriteData(_chunk(rectangle), properties, torch.Size(rectangle.full_shape))
        return WriteItem(
            MetadataIndex(rectangle.name, rectangle.offsets), WriteItemType.SHARD, tensor_data=data
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._writes_progress = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = list(self._items)
        if self._writes_progress:
            items.append(
                WriteItem(MetadataIndex(PROGRESS), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0))
            )
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._progress, stream)
            return stream
        assert write_item.index.offset is not None
        return self._rectangles[write_item.index.fqn, write_item.index.offset]


class RectangleLoadPlanner(LoadPlanner):
    """Fills rectangles; afterwards `progress` holds what the run had written there."""

    def __init__(self, rectangles: Sequence[Rectangle]) -> None:
        self._parts = {(part.name, torch.Size(part.offsets)): part for part in rectangles}
        self.progress: dict[str, Any] = {}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        stored = self._metadata.state_dict_metadata
        progress = MetadataIndex(PROGRESS)
        nowhere = torch.Size((0,))
        items = [ReadItem(LoadItemType.BYTE_IO, progress, nowhere, progress, nowhere, nowhere)]
        for part in self._parts.values():
            kept = stored[part.name]
            assert isinstance(kept, TensorStorageMetadata), "see check_same_model"
            items += create_read_items_for_chunk_list(part.name, kept, [_chunk(part)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.progress = torch.load(value, weights_only=True)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise NotImplementedError("progress is read by load_bytes")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.offset is not None
        values = self._parts[read_item.dest_index.fqn, read_item.dest_index.offset].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The rectangle is live memory: nothing to copy back."""
