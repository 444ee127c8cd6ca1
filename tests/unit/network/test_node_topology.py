"""If these break: a plan counts on links that a machine does not have, or puts tensor-parallel ranks on the
far side of it."""

import json
from pathlib import Path

import pytest

from myriad import recipes
from myriad.cli.main import main
from myriad.comm.hierarchy import RankPlacement
from myriad.errors import BadInputError
from myriad.network.node_topology import PRESETS, NodeTopology
from myriad.planner.cost.collective_costs import group_along
from myriad.recipes.cluster import load_cluster

GB = 1e9
CUBE = NodeTopology(preset="v100-cube-mesh")


def test_the_cube_mesh_has_six_links_of_each_v100() -> None:
    links = PRESETS["v100-cube-mesh"]["nvlink"]
    assert isinstance(links, tuple)
    assert [sum(n for a, b, n in links if gpu in (a, b)) for gpu in range(8)] == [6] * 8


def test_two_accelerators_get_the_rate_of_the_path_between_them() -> None:
    pairs = {(0, 3): 50 * GB, (0, 1): 25 * GB, (0, 4): 50 * GB, (0, 7): 16 * GB}
    assert {pair: CUBE.pair_bytes_per_second(*pair, 8) for pair in pairs} == pairs
    assert NodeTopology(preset="h100-nvswitch").pair_bytes_per_second(0, 7, 8) == 450 * GB
    assert NodeTopology(preset="rtx4090").pair_bytes_per_second(0, 1, 8) == 16 * GB, "through host memory"


def test_groups_of_local_ranks_are_nvlink_neighbours() -> None:
    order = CUBE.order(8)
    assert {frozenset(order[at : at + 2]) for at in range(0, 8, 2)} == {
        frozenset(pair) for pair in ((0, 3), (1, 2), (4, 7), (5, 6))
    }
    rates = [CUBE.group_bytes_per_second(size, 1, 8) / GB for size in (2, 4, 8)]
    assert rates == [50, 100, 150], "two links; four of each in a square; all six"


def test_groups_that_share_a_way_share_its_rate() -> None:
    here = NodeTopology(preset="rtx4090")
    assert here.group_bytes_per_second(4, 1, 8) == 16 * GB
    assert here.group_bytes_per_second(2, 4, 8) == 40 * GB / 4 / 2, "four pairs between two processors"


def test_a_level_of_reduction_wherever_a_part_is_joined_better() -> None:
    narrow = NodeTopology(
        numa=((0, 1, 2, 3), (4, 5, 6, 7)), pcie_bytes_per_second=32e9, numa_bytes_per_second=10e9
    )
    assert narrow.islands(8) == (4, 2)
    assert NodeTopology(preset="a100-nvswitch").islands(8) == (8,) and CUBE.islands(8) == (8,)
    sites = RankPlacement(8, None, island_size=4)
    assert sites.radices(range(16), "node") == (2, 2, 4) and sites.radices(range(16), "flat") == (16,)
    assert sites.radices((0, 8), "node") == (2, 1), "one rank of each node has no islands"


def test_a_plan_sees_the_links() -> None:
    cluster = load_cluster("one-node-8xv100")
    rates = [float(group_along(cluster, size, 1).bytes_per_second) for size in (2, 4, 8)]
    assert rates[0] < 0.4 * rates[2] and rates[0] < rates[1] < rates[2]
    same = load_cluster("one-node-8xh100")
    without = same.model_copy(update={"inside": None})
    assert group_along(same, 4, 1).bytes_per_second == group_along(without, 4, 1).bytes_per_second


def test_a_plan_names_the_order_of_accelerators_and_their_islands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(recipes.__file__).parent / "clusters" / "one-node-8xrtx4090.toml").read_text()
    inside = "numa = [[0, 2, 4, 6], [1, 3, 5, 7]]\nnuma_bytes_per_second = 8e9\n"
    (tmp_path / "odd.toml").write_text(text.replace('preset = "rtx4090"', inside))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny", "--cluster", str(tmp_path / "odd.toml"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert answer["device_order"] == [0, 2, 4, 6, 1, 3, 5, 7] and answer["island_size"] == 4


@pytest.mark.parametrize(
    "change, problem",
    [
        ("inside.numa=[[0,1],[2,3]]", "inside.numa.*each of the 8 accelerators"),
        ("inside.pcie=[[0,4],[1,5],[2,6],[3,7]]", "inside.pcie.*one processor"),
        ("inside.nvlink=[[0,9,1]]", "inside.nvlink.*accelerators 0 to 7"),
        ("inside.nvlink=[[0,1,1],[1,0,2]]", "inside.nvlink.*each pair at most once"),
        ("inside.switched=true", "inside.switched.*must be false if"),
        ("inside.preset='dgx-9'", "inside.preset"),
        ("inside.nvlinks=3", "unknown key; did you mean inside.nvlink"),
    ],
)
def test_links_that_cannot_be_are_refused_in_one_line(change: str, problem: str) -> None:
    with pytest.raises(BadInputError, match=problem) as refused:
        load_cluster("one-node-8xv100", [change])
    assert "\n" not in str(refused.value)
