"""Copies of device memory to host memory and back, which free the device's memory in between.

    out = copier.start_out(storages, buffer)    device -> host, on a stream of its own
    out.wait()                                  the current stream waits; then the storages can be freed
    copier.start_in(storages, buffer).wait()    the way back, on another stream: the two directions overlap

Memory is freed and allocated by resizing storages, so every view of a storage stays a view of it: tensors
that autograd saved, and the optimizer's moments. On a GPU the buffers are pinned, and no call waits for the
device. On a CPU the same calls copy to a second buffer at once.

`SavedStorages` finds what autograd saves in a forward and nothing else holds: parameters, batches and
constants are left alone, and memory that is saved twice is copied once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["HostCopier", "PendingCopy", "SavedStorages", "host_buffer", "keeps_storage"]

_collecting: "list[SavedStorages]" = []
"""The collector of the forward in progress, if there is one."""


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeros in host memory that a device can copy to and from asynchronously, as bytes."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@dataclass(frozen=True)
class PendingCopy:
    """A copy in flight; on a CPU one that is done."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Let the current stream wait for the copy. The host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class HostCopier:
    """Copies between one device and its host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._in = torch.cuda.Stream(device) if on_gpu else None

    def start_out(self, storages: Sequence[torch.UntypedStorage], buffer: torch.Tensor) -> PendingCopy:
        """Copy the storages into the buffer, one after the other."""
        return self._start(self._out, list(_pairs(storages, buffer)))

    def start_in(self, storages: Sequence[torch.UntypedStorage], buffer: torch.Tensor) -> PendingCopy:
        """Copy the buffer back into the storages, which have their old sizes."""
        return self._start(self._in, [(host, device) for device, host in _pairs(storages, buffer)])

    def _start(
        self, stream: torch.cuda.Stream | None, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> PendingCopy:
        """Copy each source to its target, after all work of the current stream."""
        if stream is None:
            for source, target in pairs:
                target.copy_(source)
            return PendingCopy(None)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return PendingCopy(event)


def _pairs(
    storages: Sequence[torch.UntypedStorage], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each storage and its part of the buffer, as bytes."""
    ends = accumulate((one.nbytes() for one in storages), initial=0)
    for storage, (start, stop) in zip(storages, pairwise(ends), strict=True):
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        yield whole.set_(storage, 0, (stop - start,), (1,)), buffer[start:stop]


class SavedStorages:
    """The storages that autograd saves while the collector is entered (`collecting`)."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Storages, with the number of tensors that keep them for the backward."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect what the forwards inside of the context save."""
        _collecting.append(self)
        try:
            with saved_tensors_hooks(self._save, _saved):
                yield
        finally:
            _collecting.pop()

    def _save(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, nn.Parameter):
            return x
        x = x.detach()  # an output that its own operator saves would otherwise keep itself alive
        self.add(x)
        return x

    def add(self, x: torch.Tensor, num_holders: int = 1) -> None:
        """Record that this many tensors keep the storage of ``x`` until the backward."""
        storage = x.untyped_storage()
        _, holders = self._found.get(storage._cdata, (storage, 0))
        self._found[storage._cdata] = storage, holders + num_holders

    def take(self) -> list[torch.UntypedStorage]:
        """Return the storages that only the backward uses, and forget all. Call it when the forward's own
        tensors are gone."""
        found, self._found = self._found, {}
        return [storage for storage, holders in found.values() if _is_private(storage, holders)]


def _saved(x: torch.Tensor) -> torch.Tensor:
    return x


def _is_private(storage: torch.UntypedStorage, holders: int) -> bool:
    """Return whether no more than this many tensors, and one Python object, refer to a storage of some size
    that can be freed."""
    references: int = torch._C._storage_Use_Count(storage._cdata)
    return references <= holders + 1 and storage.nbytes() > 0 and storage.resizable()


def keeps_storage(x: torch.Tensor) -> None:
    """Announce a tensor that an operator keeps for its backward without autograd's knowledge."""
    for collector in _collecting[-1:]:
        collector.add(x)
