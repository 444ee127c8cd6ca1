"""Two hosts of two ranks on a slow link: each gradient should cross it once, not once for each rank."""

import torch

from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.program.config import OverlapConfig

CPU = torch.device("cpu")


def sum_gradients() -> tuple[str, bool]:
    groups = open_world(Layout(dp=4), CPU)
    scheduler = CommScheduler(groups, "dp", OverlapConfig(), CommConfig(), CPU)
    sums = torch.ones(2**14)
    scheduler.bucket_collective(len(sums), sums.dtype).all_reduce(sums, 0).wait()
    scheduler.close()
    close_world()
    return scheduler.hierarchy, bool((sums == 4).all())


def test_a_slow_link_between_hosts_is_found_by_measuring(hosts):
    assert hosts(2, rate="50mbit").run_ranks(sum_gradients, ranks_per_host=2) == [("node", True)] * 4
