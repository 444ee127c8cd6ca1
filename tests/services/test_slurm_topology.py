"""What `myriad network place` writes for Slurm, read by a real Slurm. If these fail, a cluster does not start
and ranks land on other nodes than were planned."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing

from myriad.network.config import FabricShape
from myriad.network.fabric_builder import build
from myriad.network.node_placement import TopologyDomains, host_file, slurm_tree

NODES = 8


@pytest.fixture
def near() -> TopologyDomains:
    """Eight nodes, two under each switch, two switches in each pod."""
    shape = FabricShape(kind="clos3", nodes_per_switch=2, nodes_per_pod=4)
    return TopologyDomains(
        build(shape, name="test", num_nodes=NODES, ports_per_node=1, nic_bytes_per_second=25e9)
    )


@pytest.fixture
def cluster(tmp_path: Path, near: TopologyDomains) -> Iterator[SlurmCluster]:
    if problem := missing():
        pytest.skip(f"no Slurm here: {problem}")
    text = slurm_tree(near, [f"n{number}" for number in range(NODES)])
    made = SlurmCluster(tmp_path / "slurm", NODES, text)
    try:
        yield made.start()
    finally:
        made.stop()


def _ran(cluster: SlurmCluster, *options: str) -> list[str]:
    """The nodes of a job's tasks, by rank."""
    told = "import os; print(os.environ['SLURM_PROCID'], os.environ['SLURMD_NODENAME'])"
    out = cluster.run("srun", *options, sys.executable, "-c", told)
    return [node for _, node in sorted((int(rank), node) for rank, node in re.findall(r"(\d+) (\w+)", out))]


def test_slurm_knows_the_switches_and_puts_jobs_under_few(cluster: SlurmCluster) -> None:
    found = {
        match[1]: (int(match[2]), match[3])
        for match in re.finditer(
            r"SwitchName=(\w+) Level=(\d).*?Nodes=(\S+)", cluster.run("scontrol", "show", "topology")
        )
    }
    assert found["leaf1"] == (0, "n[2-3]")
    assert found["spine1"] == (1, "n[4-7]")
    assert found["core"] == (2, "n[0-7]")
    leaves = [int(node[1:]) // 2 for node in _ran(cluster, "-N", "2", "-x", "n0")]
    assert len(leaves) == 2 and len(set(leaves)) == 1


def test_ranks_start_on_the_nodes_of_the_host_file(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, hosts = [f"n{number}" for number in range(NODES)], tmp_path / "hosts"
    hosts.write_text(host_file([5, 0, 3], 6, 2, names))
    monkeypatch.setenv("SLURM_HOSTFILE", str(hosts))
    assert _ran(cluster, "-n", "6", "--distribution=arbitrary") == ["n5", "n5", "n0", "n0", "n3", "n3"]
