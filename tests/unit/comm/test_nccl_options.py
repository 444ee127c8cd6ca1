"""If these break: messages between GPUs wait behind matrix products that were started later, or
comm.max_ctas does not reach a communicator. NCCL is not in a CPU's build: a stand-in has its options."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from myriad.comm.config import CommConfig
from myriad.comm.groups import nccl_options, open_world
from myriad.comm.layout import Layout


@dataclass
class Options:
    """`ProcessGroupNCCL.Options`, with NCCL's mark for what is not set."""

    is_high_priority_stream: bool = False
    config: Any = field(default_factory=lambda: SimpleNamespace(max_ctas=-(2**31)))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


@pytest.mark.usefixtures("nccl")
def test_a_communicator_has_high_priority_and_as_many_blocks_as_allowed() -> None:
    assert nccl_options("nccl", None) == Options(is_high_priority_stream=True)
    found = nccl_options("nccl", 16)
    assert found is not None and found.config.max_ctas == 16 and found.is_high_priority_stream
    assert nccl_options("nccl", None) is not nccl_options("nccl", None), "a group writes its own name into it"


def test_gloo_has_no_such_options() -> None:
    assert nccl_options("gloo", 16) is None


@pytest.mark.usefixtures("nccl")
def test_the_world_its_parts_and_groups_made_later_are_all_made_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = {}
    layout, device = Layout(dp=2, tp=2), torch.device("cuda", 0)
    world: Any = type("World", (), {"bound_device_id": device})()
    store = SimpleNamespace(timeout=None)

    def init(backend: str, *, pg_options: Any, **others: Any) -> None:
        made["world"] = pg_options
        dist.group.WORLD = world
        c10d._world.pg_map[world] = ("nccl", store)

    def split(*, pg_options: Any, group_desc: str, **others: Any) -> Any:
        made[group_desc] = pg_options
        return dist.ProcessGroup(0, 1)

    def helper(*others: Any, backend_options: Any, group_desc: str, **more: Any) -> tuple[Any, None]:
        made[group_desc] = backend_options
        raise InterruptedError

    monkeypatch.setattr("myriad.comm.groups.open_store", lambda *others: store)
    monkeypatch.setattr("myriad.comm.groups.open_collectives", lambda *others: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "get_backend", lambda *others: "nccl")
    monkeypatch.setattr(dist, "split_group", split)
    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    try:
        groups = open_world(layout, device, comm=CommConfig(max_ctas=8))
        with pytest.raises(InterruptedError):
            groups.of((0, 1), "activation")
    finally:
        c10d._world.pg_map.pop(world, None)
        dist.group.WORLD = None
    assert set(made) == {"world", "dp_cp", "tp", "activation"}
    assert all(one.is_high_priority_stream and one.config.max_ctas == 8 for one in made.values())
