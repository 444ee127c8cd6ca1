"""If this fails, a plan's order of nodes is a line in a file: ranks stand where the launcher put them, and
what talks most goes over the slow links."""

import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_corpora import make_corpus

from myriad.cli.main import main
from myriad.comm.groups import Group
from myriad.job import load_job
from myriad.run import Run
from myriad.train.trainer import Trainer

CLUSTER = """
name = "four-hosts"
nodes = 4
accelerators_per_node = 1
unequal = [{nodes = [0, 2], bytes_per_second = 6.25e6}]
[accelerator]
name = "CPU core"
peak_flops_per_second = 1e11
memory_bytes = "1 GiB"
memory_bytes_per_second = 1e10
[links.node]
bytes_per_second = 1e9
latency_seconds = 1e-5
[links.network]
bytes_per_second = 125e6
latency_seconds = 1e-4
"""


def seconds_of_a_message(world: Group | None, here: int, source: int) -> float:
    """From a rank to the next, in the megabyte; on others 0."""
    data, took = torch.zeros(2**18), 0.0
    for size in (1, 2**18):  # the first one opens the connection
        dist.barrier(world)
        start = time.monotonic()
        if here == source:
            dist.send(data[:size], source + 1)
        if here == source + 1:
            dist.recv(data[:size], source)
            took = time.monotonic() - start
    return took


def train_and_measure(path: Path) -> tuple[int, str, float]:
    """The rank in the grid, the host, and what a message from the rank before takes."""
    trainer = Trainer(Run(path))
    trainer.train()
    world, here = trainer.groups.world, trainer.groups.grid.rank
    took = sum(seconds_of_a_message(world, here, source) for source in range(3))
    trainer.close()
    return here, socket.gethostname(), took


def test_ranks_stand_where_the_plan_puts_them_and_its_slow_links_are_the_slow_ones(
    hosts, tmp_path: Path
) -> None:
    """Four stages on four hosts; 0 and 2 have slow links, so the plan puts 1 and 3 side by side: two slow
    hops, where the launcher's order has three."""
    made = hosts(4, rate="1gbit")
    made.set_rate("50mbit", [0, 2])
    cluster, plan = tmp_path / "hosts.toml", tmp_path / "plan.toml"
    cluster.write_text(CLUSTER)
    one_pipeline = ["--model.heads", "1", "--train.global_batch", "1", "--model.layers", "2"]
    short = ["--train.steps", "2", "--optimizer.warmup_steps", "1"]
    corpus = ["--data.corpus", str(make_corpus(tmp_path, count=50))]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny", "--cluster", str(cluster), "--out", str(plan), *one_pipeline, *short, *corpus])
    assert not ended.value.code
    job = load_job(str(plan))
    order = job.comm.node_order
    assert job.layout.pp == 4 and order is not None
    run = Run(tmp_path / "run")
    run.create_or_resume(job)
    found = sorted(made.run_ranks(train_and_measure, run.path))
    assert [host for _, host, _ in found] == [f"host{node}" for node in order]
    assert run.job().comm.node_order == order and len(run.read_metrics()) == 2
    slow = [bool({order[rank - 1], order[rank]} & {0, 2}) for rank in range(1, 4)]
    took = [seconds for _, _, seconds in found[1:]]
    assert slow.count(True) == 2
    assert max(took[hop] for hop in range(3) if not slow[hop]) < min(
        took[hop] for hop in range(3) if slow[hop]
    )
