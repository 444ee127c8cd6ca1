"""A state that is a pure function of the step, so that any wrong byte of a loaded one is seen.

Every rank holds all of it and keeps its share: rows, uneven slices of flat memory, a view that is not
contiguous, a number without dimensions. Saved by any number of ranks it can be loaded by any other.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.dcp_metadata import make_metadata
from myriad.checkpoint.format.trainer_state import progress_shard, random_shard
from myriad.checkpoint.session import CheckpointSession, SessionSettings
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.model.tensor_shard import TensorShard

__all__ = ["CPU", "State", "open_session", "warm_up"]

CPU = torch.device("cpu")
_SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.w": ((64, 96), torch.float32),
    "model.turned": ((48, 40), torch.float32),
    "model.half": ((50, 32), torch.bfloat16),
    "model.scale": ((), torch.float32),
    "optimizer.m": ((20011,), torch.float32),
    "optimizer.v": ((3, 1001), torch.float64),
}


def _values(step: int, which: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.int64) * 2654435761 + step * 40503 + which * 7919
    return (numbers % 65521).to(dtype).view(tuple(shape))


class State:
    """As it is after some step; ``scale``: of the largest tensor."""

    def __init__(self, scale: int = 1) -> None:
        self._shapes = dict(_SHAPES) | {"optimizer.m": ((20011 * scale,), torch.float32)}
        self.full = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self._shapes.items()}
        self.full["model.turned"] = torch.empty(40, 48).t()  # not contiguous

    def become(self, step: int) -> None:
        """The state after ``step`` steps, in place."""
        for which, values in enumerate(self.full.values()):
            values.copy_(_values(step, which, values.shape, values.dtype))

    def forget(self) -> None:
        """What a process has before it loads."""
        for values in self.full.values():
            values.fill_(-1)

    def wrong(self, step: int) -> list[str]:
        """Tensors that are not exactly as they are after ``step`` steps."""
        expected = {
            name: _values(step, which, x.shape, x.dtype) for which, (name, x) in enumerate(self.full.items())
        }
        return [name for name, values in self.full.items() if not torch.equal(values, expected[name])]

    def all_shards(self) -> list[TensorShard]:
        """All of it."""
        return [TensorShard(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in self.full.items()]

    def shards(self, rank: int, world: int) -> list[TensorShard]:
        """The share that one rank keeps."""
        found = []
        for name, values in self.full.items():
            if not values.dim():
                if rank == 0:
                    found.append(TensorShard(name, (), (), values))
                continue
            low, high = (values.shape[0] * at // world for at in (rank, rank + 1))
            offsets = (low, *[0] * (values.dim() - 1))
            found.append(TensorShard(name, tuple(values.shape), offsets, values[low:high]))
        return found


def open_session(
    run: Path,
    config: CheckpointConfig,
    rank: int = 0,
    world: int = 1,
    local_rank: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
) -> CheckpointSession:
    """One rank's checkpoints, as the trainer opens them."""
    settings = SessionSettings(
        config,
        run=run,
        folder=CheckpointFolder(run / "checkpoints"),
        events=run / "events.jsonl",
        log=run / f"keeper-{rank}.log",
        job="# state of the step\n",
    )
    return CheckpointSession(settings, RankGrid(Layout(dp=world), rank), local_rank, group, CPU)


def warm_up(scale: int = 1) -> None:
    """Create once what each forked rank would create again."""
    torch.set_num_threads(1)
    state = State(scale)
    for world in (1, 2):
        others = [progress_shard({}), random_shard(0, CPU)]
        make_metadata([make_stored_shards([*state.shards(rank, world), *others]) for rank in range(world)])
