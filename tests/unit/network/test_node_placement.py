"""If these fail, jobs are spread over more switches than they must be, or schedulers get switches
that are not there."""

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.network.config import FabricShape
from myriad.network.fabric import Fabric, Flows
from myriad.network.fabric_builder import build
from myriad.network.node_placement import (
    TopologyDomains,
    host_file,
    host_list,
    node_labels,
    pack_jobs,
    shared_ratio,
    slurm_blocks,
    slurm_tree,
    tier_bytes,
)
from myriad.network.rank_transfers import RankMapping, RankTransfers, inter_node_flows
from myriad.network.routing import Routes, ecmp


def _fabric(**keys: object) -> Fabric:
    shape = FabricShape.model_validate(keys)
    return build(shape, name="test", num_nodes=8, ports_per_node=2, nic_bytes_per_second=25e9)


PODS = {"kind": "clos3", "nodes_per_switch": 2, "nodes_per_pod": 4}
FABRICS = [
    _fabric(nodes_per_switch=2),
    _fabric(kind="rail", nodes_per_switch=4),
    _fabric(**PODS),
    _fabric(**PODS, rails=True),
    _fabric(),
]
SETS = [
    [0, 0, 1, 1, 2, 2, 3, 3],
    [0] * 4 + [1] * 4,
    [0, 0, 1, 1, 2, 2, 3, 3],
    [0, 0, 1, 1, 2, 2, 3, 3],
    [0] * 8,
]
NUM_PODS = [1, 1, 2, 2, 1]


@pytest.mark.parametrize("number", range(len(FABRICS)))
def test_nodes_under_the_same_switches_are_neighbours(number: int) -> None:
    near = TopologyDomains(FABRICS[number])
    assert near.set_of.tolist() == SETS[number]
    assert near.num_pods == NUM_PODS[number]
    assert near.pod_of.tolist() == [node * near.num_pods // 8 for node in range(8)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=100, deadline=None)
def test_jobs_get_nodes_of_their_own_under_few_switches(sizes: list[int], per_set: int) -> None:
    set_of = np.arange(64) // per_set
    pod_of = np.arange(64) // 16
    if sum(sizes) > 64:
        with pytest.raises(BadInputError):
            pack_jobs(sizes, set_of, pod_of)
        return
    found = pack_jobs(sizes, set_of, pod_of)
    assert [len(nodes) for nodes in found] == sizes
    assert len({node for nodes in found for node in nodes}) == sum(sizes)
    largest = max(range(len(sizes)), key=lambda job: sizes[job])
    assert len(set(set_of[found[largest]])) == -(-sizes[largest] // per_set)


def test_a_small_job_goes_where_it_leaves_room_for_large_ones() -> None:
    found = pack_jobs([2, 3, 4], np.arange(9) // 4, np.zeros(9, dtype=np.int64))
    assert found[2] == [0, 1, 2, 3] and found[1] == [4, 5, 6]


def _all_to_all(fabric: Fabric) -> tuple[Flows, np.ndarray]:
    pairs = np.array([pair for pair in product(range(16), repeat=2) if pair[0] // 2 != pair[1] // 2])
    exchange = RankTransfers(pairs[:, 0], pairs[:, 1], np.full(len(pairs), 1e6), np.arange(len(pairs)))
    return inter_node_flows(exchange, RankMapping(np.arange(8), 2, 2))[0], pairs // 2


@pytest.mark.parametrize("number", [0, 2])
def test_bytes_are_counted_by_the_highest_switch(number: int) -> None:
    fabric, near = FABRICS[number], TopologyDomains(FABRICS[number])
    flows, nodes = _all_to_all(fabric)
    found = tier_bytes(fabric, flows, ecmp(Routes(fabric), flows, 0))
    together = near.set_of[nodes[:, 0]] == near.set_of[nodes[:, 1]]
    in_pod = near.pod_of[nodes[:, 0]] == near.pod_of[nodes[:, 1]]
    expected = [0, together.sum(), (in_pod & ~together).sum(), (~in_pod).sum()]
    assert found == pytest.approx(1e6 * np.array(expected))


def test_flows_meet_where_a_link_is_too_narrow_for_them() -> None:
    """Two nodes on each side of one cable: two flows meet on it, one alone does not; a cable that is twice as
    wide has room for both."""
    for width, expected in ((1, 1.0), (2, 0.0)):
        cables = [{"ends": ["0-1", "a"]}, {"ends": ["2-3", "b"]}]
        up = {"ends": ["a", "b"], "bytes_per_second": width * 25e9}
        shape = FabricShape.model_validate({"kind": "graph", "cables": [*cables, up]})
        fabric = build(shape, name="g", num_nodes=4, ports_per_node=1, nic_bytes_per_second=25e9)
        ranks = np.array([0, 1])
        flows, _ = inter_node_flows(
            RankTransfers(ranks, ranks + 2, np.ones(2), ranks), RankMapping(np.arange(4), 1, 1)
        )
        assert shared_ratio(fabric, ecmp(Routes(fabric), flows, 0)) == expected
        alone, _ = inter_node_flows(
            RankTransfers(ranks[:1], ranks[:1] + 2, np.ones(1), ranks[:1]), RankMapping(np.arange(4), 1, 1)
        )
        assert shared_ratio(fabric, ecmp(Routes(fabric), alone, 0)) == 0.0


def _expanded(text: str) -> list[str]:
    """Slurm's hostlist, read."""
    found = []
    for prefix, inside, plain in re.findall(r"([^,\[\]]*)\[([^\]]*)\]|([^,\[\]]+)", text):
        for part in inside.split(",") if inside else []:
            first, _, last = part.partition("-")
            found += [f"{prefix}{number}" for number in range(int(first), int(last or first) + 1)]
        found += [plain] if plain else []
    return found


@given(
    st.lists(st.from_regex(r"[a-z]{1,3}(0|[1-9][0-9]?|00[1-9])?", fullmatch=True), min_size=1, unique=True)
)
@settings(max_examples=200, deadline=None)
def test_names_survive_slurms_hostlist(names: list[str]) -> None:
    assert sorted(_expanded(host_list(names))) == sorted(names)


@pytest.mark.parametrize("number", range(len(FABRICS)))
def test_each_node_hangs_on_one_leaf_of_slurms_tree(number: int) -> None:
    near, names = TopologyDomains(FABRICS[number]), [f"gpu{n}" for n in range(8)]
    above: dict[str, str] = {}
    for line in slurm_tree(near, names).splitlines():
        switch, _, below = line.partition(" ")
        for name in _expanded(below.split("=", 1)[1]):
            assert name not in above
            above[name] = switch.removeprefix("SwitchName=")
    assert [above[name] for name in names] == [f"leaf{one}" for one in SETS[number]]
    assert len(set(above.values()) - set(above)) == 1  # one root
    blocks = slurm_blocks(near, names).splitlines()
    assert blocks[-1] == f"BlockSizes={SETS[number].count(0)}"
    assert [name for line in blocks[:-1] for name in _expanded(line.split("Nodes=")[1])] == names


def test_a_host_file_has_a_line_for_each_rank_in_their_order() -> None:
    text = host_file([2, 0], 6, 3, ["a", "b", "c"])
    assert text.split() == ["c", "c", "c", "a", "a", "a"]


def test_labels_name_the_switches_and_the_position_in_a_job() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    near, names = TopologyDomains(FABRICS[2]), [f"gpu{n}" for n in range(8)]
    found = list(node_labels(near, names, {"my job/1": [5, 4]}))
    for one in found:
        kubernetes_validate.validate(one, "1.31", strict=True)
    labels = [one["metadata"]["labels"] for one in found]  # type: ignore[index]
    assert labels[4] == {
        "network.topology.nvidia.com/leaf": "leaf2",
        "network.topology.nvidia.com/spine": "spine1",
        "network.topology.nvidia.com/core": "core",
        "placement.myriad/job": "my-job-1",
        "placement.myriad/slot": "1",
    }
    assert "placement.myriad/job" not in labels[0]
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", v) for v in labels[4].values())
