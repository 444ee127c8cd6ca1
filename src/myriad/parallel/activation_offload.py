"""The copies of activations in a rank's program: what each of the four actions does.

    FORWARD         collects the storages that its backward needs (`myriad.kernels.host_copies`)
    START_OFFLOAD   copies those that nothing else uses to a host buffer
    AWAIT_OFFLOAD   frees them on the device
    START_FETCH     allocates them again and copies them back
    AWAIT_FETCH     returns the buffer

The output of a forward stays, because the next stage reads it; it belongs to that stage's activations.
Buffers are kept for the next micro-batch of the same stage, whose activations are as large.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from myriad.kernels.host_copies import HostCopier, PendingCopy, SavedStorages, host_buffer
from myriad.program.actions import Kind

__all__ = ["ActivationOffload"]

_Key = tuple[int, int]
"""Key of the activations that a stage keeps of a micro-batch: both numbers."""


@dataclass
class _Offloaded:
    """Activations of one micro-batch of a stage."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    buffer: torch.Tensor
    pending: PendingCopy


class ActivationOffload:
    """Runs the copies of one rank's activations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copier: HostCopier | None = None
        self._saved: dict[_Key, SavedStorages] = {}
        self._offloaded: dict[_Key, _Offloaded] = {}
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.host_bytes = 0
        """Bytes of all host buffers."""
        self._do: Mapping[Kind, Callable[[_Key], None]] = {
            Kind.START_OFFLOAD: self._start_offload,
            Kind.AWAIT_OFFLOAD: self._await_offload,
            Kind.START_FETCH: self._start_fetch,
            Kind.AWAIT_FETCH: self._await_fetch,
        }

    def collecting(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Return a context for a forward whose activations will be copied."""
        self._saved[stage, micro_batch] = saved = SavedStorages()
        return saved.collecting()

    def share(self, stage: int, micro_batch: int, entering: torch.Tensor) -> None:
        """Record that the stage before keeps the input of a forward too, as its output."""
        self._saved[stage, micro_batch].add(entering)

    def run(self, kind: Kind, stage: int, micro_batch: int) -> None:
        """Run one of the actions."""
        self._do[kind]((stage, micro_batch))

    def restart(self) -> None:
        """Forget the activations of an iteration that was interrupted."""
        self._saved.clear()
        self._offloaded.clear()

    def _start_offload(self, key: _Key) -> None:
        if self._copier is None:
            self._copier = HostCopier(self._device)
        storages = self._saved.pop(key).take()
        sizes = [storage.nbytes() for storage in storages]
        buffer = self._buffer(key[0], sum(sizes))
        pending = self._copier.start_out(storages, buffer)
        self._offloaded[key] = _Offloaded(storages, sizes, buffer, pending)

    def _await_offload(self, key: _Key) -> None:
        one = self._offloaded[key]
        one.pending.wait()
        for storage in one.storages:
            storage.resize_(0)

    def _start_fetch(self, key: _Key) -> None:
        one = self._offloaded[key]
        for storage, size in zip(one.storages, one.sizes, strict=True):
            storage.resize_(size)
        assert self._copier is not None
        one.pending = self._copier.start_in(one.storages, one.buffer)

    def _await_fetch(self, key: _Key) -> None:
        one = self._offloaded.pop(key)
        one.pending.wait()
        self._free[key[0]].append(one.buffer)

    def _buffer(self, stage: int, num_bytes: int) -> torch.Tensor:
        """Return a host buffer for activations of a stage."""
        buffer = self._free[stage].pop() if self._free[stage] else None
        if buffer is not None and buffer.numel() >= num_bytes:
            return buffer
        self.host_bytes += num_bytes - (0 if buffer is None else buffer.numel())
        return host_buffer(num_bytes, self._device)
