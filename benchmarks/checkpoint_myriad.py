"""Myriad in `checkpoint.py`: a copy in memory that outlives the rank's process, written by a thread.

The copy is made beside the next step's computing, and training waits for it before it changes the state.
"""

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_state import Place, State, balanced
from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.store import load, save
from myriad.model.rectangle import Rectangle

__all__ = ["Myriad"]


class Myriad:
    """One rank's saves."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._state: State | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._copied, self._thread = threading.Event(), threading.Thread()
        self._error: BaseException | None = None
        self._durable_at = 0.0

    def _folder(self) -> CheckpointFolder:
        if "://" in self._place.root:
            raise NotImplementedError("Myriad writes to folders")
        return CheckpointFolder(Path(self._place.root))

    def setup(self, state: State) -> None:
        self._folder()
        self._state, self._copies = state, self._memory(state)
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def _memory(self, state: State) -> dict[str, torch.Tensor]:
        path, start = str(Path(self._place.memory) / f"rank-{self._place.rank}"), 0
        flat = torch.from_file(path, shared=True, size=state.num_bytes // 4)
        views = {}
        for name, tensor in state.tensors.items():
            views[name] = flat[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
        return views

    def save(self, step: int) -> None:
        self._copied.clear()
        self._error = None
        self._thread = threading.Thread(target=self._write, args=(step,))
        self._thread.start()

    def _write(self, step: int) -> None:
        try:
            assert self._state is not None
            for name, tensor in self._state.tensors.items():
                self._copies[name].copy_(tensor)
            self._copied.set()
            save(
                self._folder(), step, self._rectangles(self._state, self._copies), {"step": step}, self._group
            )
            self._durable_at = time.monotonic()
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()

    def _rectangles(self, state: State, tensors: dict[str, torch.Tensor]) -> list[Rectangle]:
        """Those that this rank writes: of replicas a share, of shards all."""
        owner = balanced({name: tensor.shape for name, tensor in tensors.items()}, state.world)
        return [
            Rectangle(name, state.full_shape(name), state.offsets(name), tensor)
            for name, tensor in tensors.items()
            if state.sharing == "sharded" or owner[name] == state.rank
        ]

    def before_update(self) -> None:
        if self._thread.is_alive():
            self._copied.wait()

    def is_durable(self) -> bool:
        return not self._thread.is_alive()

    def wait_durable(self) -> float:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._durable_at

    def load(self, state: State, step: int) -> None:
        rectangles = [
            Rectangle(name, state.full_shape(name), state.offsets(name), tensor)
            for name, tensor in state.tensors.items()
        ]
        load(self._folder().of_step(step), rectangles)

    def load_from_memory(self, state: State) -> None:
        """What the last copy of a rank that is gone holds."""
        for name, copy in self._memory(state).items():
            state.tensors[name].copy_(copy)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
