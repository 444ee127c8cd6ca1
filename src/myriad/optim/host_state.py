"""Optimizer state that is in host memory except while its regions are updated.

    start_fetch    allocate the state of some regions on the device, and copy it there
    await_fetch    the update may use it
    start_offload  copy the updated state back
    await_offload  free it on the device

The tensors on the device keep their identity; only their memory comes and goes. Checkpoints read and write
the host's tensors.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch

from myriad.kernels.host_copies import HostCopier, PendingCopy, host_buffer

__all__ = ["HostState"]


class HostState:
    """The state of regions of a rank, some of it in host memory."""

    def __init__(
        self, state: Mapping[str, Sequence[torch.Tensor]], on_host: Collection[int], device: torch.device
    ) -> None:
        """Move state to the host. ``state``: a name to one tensor per region; each tensor is alone in its
        storage. ``on_host``: the regions whose state moves."""
        self._copier = HostCopier(device)
        self._pending: dict[int, PendingCopy] = {}
        self.tensors: dict[str, list[torch.Tensor]] = {name: [] for name in state}
        """The tensors where they rest, by name and region."""
        self._storages: list[list[torch.UntypedStorage]] = []
        self._sizes: list[list[int]] = []
        self._buffers: list[torch.Tensor] = []
        for index, parts in enumerate(zip(*state.values(), strict=True)):
            self._add(dict(zip(state, parts, strict=True)), moves=index in on_host)

    def _add(self, parts: Mapping[str, torch.Tensor], *, moves: bool) -> None:
        """Move one region's state, whose tensors share a buffer, or leave it where it is."""
        if not moves:
            for name, part in parts.items():
                self.tensors[name].append(part)
            self._storages.append([])
            self._sizes.append([])
            self._buffers.append(torch.empty(0))
            return
        sizes = [part.numel() * part.element_size() for part in parts.values()]
        buffer = host_buffer(sum(sizes), self._copier.device)
        storages = [part.untyped_storage() for part in parts.values()]
        self._copier.start_out(storages, buffer).wait()
        for (name, part), start, size in zip(
            parts.items(), accumulate(sizes, initial=0), sizes, strict=False
        ):
            self.tensors[name].append(buffer[start : start + size].view(part.dtype).view(part.shape))
        for storage in storages:
            storage.resize_(0)
        self._storages.append(storages)
        self._sizes.append(sizes)
        self._buffers.append(buffer)

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in host memory."""
        return sum(map(sum, self._sizes))

    def start_fetch(self, indices: Sequence[int]) -> None:
        """Allocate the state of these regions on the device, and start to copy it there."""
        for index in indices:
            for storage, size in zip(self._storages[index], self._sizes[index], strict=True):
                storage.resize_(size)
            self._pending[index] = self._copier.start_in(self._storages[index], self._buffers[index])

    def await_fetch(self, indices: Sequence[int]) -> None:
        """Wait for the copies of `start_fetch`."""
        for index in indices:
            self._pending.pop(index).wait()

    def start_offload(self, indices: Sequence[int]) -> None:
        """Start to copy the state of these regions back."""
        for index in indices:
            self._pending[index] = self._copier.start_out(self._storages[index], self._buffers[index])

    def await_offload(self, indices: Sequence[int]) -> None:
        """Wait for the copies of `start_offload`, and free the memory on the device."""
        for index in indices:
            self._pending.pop(index).wait()
            for storage in self._storages[index]:
                storage.resize_(0)
