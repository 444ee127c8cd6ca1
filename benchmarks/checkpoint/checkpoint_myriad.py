"""Myriad in `checkpoint.py`: the session that a trainer has, with a snapshot server that stores beside
training."""

from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_state import Place, State, balanced
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.session import CheckpointSession, SessionSettings
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.model.tensor_shard import TensorShard

__all__ = ["Myriad"]

_CONFIG = CheckpointConfig(keep=1, memory_every=0, timeout_seconds=600)


class Myriad:
    """One rank's saves."""

    def __init__(self, place: Place) -> None:
        self._place, self._session, self._step = place, None, 0
        self._loading: CheckpointSession | None = None

    def _open(self) -> CheckpointSession:
        place, memory = self._place, Path(self._place.memory)
        folder = CheckpointFolder(place.root)
        log = memory / f"keeper-{place.rank}.log"
        settings = SessionSettings(_CONFIG, memory, folder, memory / "events.jsonl", log, job="")
        grid = RankGrid(Layout(dp=place.world), place.rank)
        group = dist.new_group(backend="gloo") if dist.is_initialized() and place.world > 1 else None
        session = CheckpointSession(settings, grid, place.rank, group, torch.device("cpu"))
        session.acquire(0)
        return session

    def setup(self, state: State) -> None:
        self._session = self._open()
        self._session.begin(self._rectangles(state, owned_only=True))

    def _rectangles(self, state: State, *, owned_only: bool) -> list[TensorShard]:
        """Those that this rank keeps: of replicas a share, of shards all."""
        owner = balanced({name: tensor.shape for name, tensor in state.tensors.items()}, state.world)
        return [
            TensorShard(name, state.full_shape(name), state.offsets(name), tensor)
            for name, tensor in state.tensors.items()
            if not owned_only or state.sharing == "sharded" or owner[name] == state.rank
        ]

    def save(self, step: int) -> None:
        assert self._session is not None
        self._step = step
        self._session.take(step, {"step": step}, SnapshotPurpose(durable=True))

    def before_update(self) -> None:
        assert self._session is not None
        self._session.settle()

    def is_durable(self) -> bool:
        return self._session is None or self._session.outcome(self._step) is not None

    def wait_durable(self) -> float:
        assert self._session is not None
        problem = self._session.finish(self._step)
        if problem is not None:
            raise OSError(problem)
        outcome = self._session.outcome(self._step)
        assert outcome is not None
        return outcome.at

    def load(self, state: State, step: int) -> None:
        self._loading = self._loading or self._open()
        found = self._loading.resume(self._rectangles(state, owned_only=False))
        assert found is not None and found.step == step and not found.problems

    def load_from_memory(self, state: State) -> None:
        """What the last snapshot of a rank that is gone holds."""
        found = self._open().resume(self._rectangles(state, owned_only=False))
        assert found is not None and found.source == "memory"

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
