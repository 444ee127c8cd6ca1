"""Values between ranks. If these fail, a rank runs what a peer sends it, or understands another value than
was sent."""

import contextlib
import math
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from myriad.checkpoint.format.checkpoint_manifest import StoredChunk, StoredFile
from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.load.collective_load import BadPart
from myriad.checkpoint.load.read_plan import FileLocation, LoadPart, MemoryLocation
from myriad.comm import typed_collectives
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.comm.typed_collectives import broadcast_value, gather_values
from myriad.errors import RunFailedError

LAYOUT, CPU = Layout(dp=3), torch.device("cpu")
SHARD = StoredShard("model.0", (4, 2), "float32", (0, 0), (4, 1), 16, 64, bytes(range(256)), b"\xff")
PART = LoadPart(
    "x",
    (2,),
    "float32",
    (0,),
    (2,),
    8,
    "ab",
    (MemoryLocation(1, 2, 3, True, 4), FileLocation("0.distcp", 512)),
)
CHUNK = StoredChunk("x", (0,), (2,), 0, 4, 8, 2, "ab", "cd")
VALUES: list[tuple[Any, Any]] = [
    (None, None),
    ("", str),
    (("host:7", 3), tuple[str, int]),
    ([0.1, -0.0, 5e-324, math.inf, -math.inf], list[float]),
    ([SHARD, SHARD], list[StoredShard]),
    ([PART], list[LoadPart]),
    (
        [
            BadPart(7, FileLocation("a", 1), "torn", True),
            BadPart(8, MemoryLocation(0, 1, 2, False, 3), "", False),
        ],
        list[BadPart],
    ),
    ({"0.distcp": StoredFile(9, (CHUNK,)), "job.toml": StoredFile(2, (), "ef")}, dict[str, StoredFile]),
    ({"where": {"layout": [1, 2]}, "hierarchy": "off"}, Any),
]


def exchange() -> bool:
    """Each rank holds every value at another place of the list, and all receive each as it was sent."""
    open_world(LAYOUT, CPU)
    rank, group, size = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    for value, kind in VALUES:
        assert gather_values(value, kind, group) == [value] * size, kind
        assert broadcast_value(value if rank == 0 else None, kind | None if kind else None, group) == value
    assert gather_values("x" * rank, str, group) == ["", "x", "xx"]
    assert math.isnan(gather_values(math.nan, float, group)[1 - min(rank, 1)])
    close_world()
    return True


def test_every_rank_receives_the_values_that_were_sent() -> None:
    assert run_ranks(3, exchange) == [True] * 3


class Writes:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


MESSAGES = [b"", b"[7]", b"[", b'["a", "b"]', b'["\xff"]', b"[" * 100_000]


def attack(path: Path) -> list[str]:
    """Rank 1 sends bytes of its own; what the other makes of each."""
    open_world(Layout(dp=2), CPU)
    messages, errors = [pickle.dumps(Writes(path)), *MESSAGES], []
    for data in messages:
        if dist.get_rank() == 1:
            message = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[: len(data)]
            typed_collectives._encode = lambda *_, message=message: message
            typed_collectives._decode = lambda *_: ""
        with contextlib.suppress(RunFailedError):
            errors.append(f"received {gather_values('fine', str, dist.group.WORLD)}")
            continue
        errors.append("refused")
    close_world()
    return errors


def test_what_is_no_value_of_the_type_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    found, _ = run_ranks(2, attack, tmp_path / "taken")
    assert found == ["refused"] * (1 + len(MESSAGES))
    assert not (tmp_path / "taken").exists()
