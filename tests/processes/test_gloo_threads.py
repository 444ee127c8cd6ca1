"""What breaks for the user: ranks that share a core spend their slices asking for each other's locks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or not Path("/proc/self/task").is_dir(),
    reason="this system has no threads that interrupt nobody",
)


def test_threads_that_read_sockets_interrupt_no_other_and_all_others_are_as_they_were():
    nice = os.nice(0)
    for rank in run_ranks(2, policies):
        loops = rank.pop("gloo_tcp_loop")
        assert len(loops) == 2, "one of the world, and one of the group that was made later"
        assert all(one == (os.SCHED_BATCH, min(19, nice + 10)) for one in loops)
        others = [one for threads in rank.values() for one in threads]
        assert len(others) > 4
        assert set(others) == {(os.SCHED_OTHER, nice)}


def policies() -> dict[str, list[tuple[int, int]]]:
    """Of this process's threads, by name: policy and niceness."""
    groups = open_world(Layout(dp=2), torch.device("cpu"))
    dist.barrier(groups.world)
    dist.barrier(groups.along("dp", purpose="another"))
    found: dict[str, list[tuple[int, int]]] = {}
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        how = os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)
        found.setdefault((task / "comm").read_text().strip(), []).append(how)
    close_world()
    return found
