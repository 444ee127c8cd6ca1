"""The peers of `checkpoint.py`: torch's distributed checkpoints (DCP), each in the best setting found.

- Files are fsynced (``sync_files``). Objects of S3 are durable when they are there, and DCP would sync all of
  this machine's disks instead. Plans are cached between saves.
- A rank writes two files at a time, or four objects, which was faster than one and no slower than more. What
  that risks: when only a helper thread fails, DCP 2.13 calls the checkpoint complete without its file.
- Copies for the background are kept between saves: by `DefaultStager`, in shared memory where another process
  writes. (The writer's own ``cache_staged_state_dict`` pins memory, which needs CUDA.)
- "copied in the background": the copy itself runs beside training as well, and training waits for it only
  before it changes the state. DCP's documentation says that needs CUDA; without ``use_non_blocking_copy`` it
  does not.
- A thread that writes has a process group of its own: its messages must not mix with training's.
"""

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpoint_myriad import Myriad
from checkpoint_state import Contender, Place, State

__all__ = ["CONTENDERS", "OURS"]

OURS = "Myriad"


def _tree(state: State) -> dict[str, torch.Tensor]:
    """The state as DCP sees it; DCP saves each plain tensor once, from one of the ranks that hold it."""
    if state.sharing == "replicated":
        return dict(state.tensors)
    mesh = init_device_mesh("cpu", (state.world,))
    return {
        name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for name, tensor in state.tensors.items()
    }


def _writer(place: Place, step: int) -> FileSystemWriter:
    remote = "://" in place.root
    make: Callable[..., FileSystemWriter] = FsspecWriter if remote else FileSystemWriter
    return make(place.of_step(step), sync_files=not remote, thread_count=4 if remote else 2)


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True)


class DCP:
    """``save``: training waits for all of it."""

    def __init__(self, place: Place) -> None:
        warnings.filterwarnings("ignore", module="torch.distributed")
        self._place = place
        self._tree: dict[str, torch.Tensor] = {}
        self._durable_at = 0.0

    def setup(self, state: State) -> None:
        self._tree = _tree(state)

    def save(self, step: int) -> None:
        writer = _writer(self._place, step)
        state_dict_saver.save(self._tree, storage_writer=writer, planner=_planner())
        self._durable_at = time.monotonic()

    def before_update(self) -> None:
        """Nothing is under way."""

    def is_durable(self) -> bool:
        return True

    def wait_durable(self) -> float:
        return self._durable_at

    def load(self, state: State, step: int) -> None:
        path = self._place.of_step(step)
        reader = FsspecReader(path) if "://" in path else FileSystemReader(path)
        state_dict_loader.load(_tree(state), storage_reader=reader)

    def close(self) -> None:
        """Nothing is held."""


class AsyncDCP(DCP):
    """``async_save`` in a thread or a process."""

    def __init__(self, place: Place, *, process: bool, background: bool) -> None:
        super().__init__(place)
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=background,
                use_non_blocking_copy=False,
            )
        )
        self._group: dist.ProcessGroup | None = None
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def setup(self, state: State) -> None:
        super().setup(state)
        self._group = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        answer = state_dict_saver.async_save(
            self._tree,
            storage_writer=_writer(self._place, step),
            planner=_planner(),
            process_group=self._group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._written = answer
        self._written.add_done_callback(self._stamp)

    def _stamp(self, written: Future[Any]) -> None:
        self._durable_at = time.monotonic()

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def is_durable(self) -> bool:
        return self._written is not None and self._written.done()

    def wait_durable(self) -> float:
        assert self._written is not None, "wait_durable without save"
        self._written.result()
        return self._durable_at

    def close(self) -> None:
        self._stager.close()


CONTENDERS: dict[str, Callable[[Place], Contender]] = {
    OURS: Myriad,
    "DCP save": DCP,
    "DCP async, thread": partial(AsyncDCP, process=False, background=False),
    "DCP async, thread, copied in the background": partial(AsyncDCP, process=False, background=True),
    "DCP async, process": partial(AsyncDCP, process=True, background=False),
    "DCP async, process, copied in the background": partial(AsyncDCP, process=True, background=True),
}
