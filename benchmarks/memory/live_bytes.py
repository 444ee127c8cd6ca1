"""Bytes of the tensors that a rank has, and the most it had: torch has no such counter for a CPU.

    with LiveBytes() as live:
        engine = Engine(...)
        engine.train_step(...)
        live.start_peak()
        engine.train_step(...)
    live.peak

After every operator of this thread, forward or backward, the storages that operators made and that are still
there are added up, each once, at the size that it has then (chunks resize theirs). What a kernel allocates
and frees inside of itself is not seen; neither is what the allocator keeps.
"""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self.at_peak: dict[str, int] = {}
        """Bytes at the highest moment, by the operator that made them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x) and not x.is_meta:
                storage = x.untyped_storage()
                if storage._cdata not in self._made or self._made[storage._cdata][0].expired():
                    self._made[storage._cdata] = StorageWeakRef(storage), f"{func} {tuple(x.shape)} {x.dtype}"
        self._look()
        return result

    def start_peak(self) -> None:
        """The highest moment from here on."""
        self.peak = 0

    def _look(self) -> None:
        sizes: dict[int, int] = {}
        for key, (reference, _) in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._made[key]
            else:
                sizes[key] = storage.nbytes()
        total = sum(sizes.values())
        if total > self.peak:
            self.peak = total
            self.at_peak = {}
            for key, size in sizes.items():
                name = self._made[key][1]
                self.at_peak[name] = self.at_peak.get(name, 0) + size
