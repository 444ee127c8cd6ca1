"""A setting without a reason is copied from cluster to cluster until nobody dares to take it out; one that is
missing costs half of the network."""

import re

import pytest

from myriad.errors import BadInputError
from myriad.forecasts.flap_answer import JobTolerance, LinkRates, link_habits
from myriad.network.config import Nics
from myriad.planner.fabric.nccl_tuning import EnvAdvice, tune
from myriad.recipes.cluster import load_cluster

DOCUMENTED = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_MIN_CTAS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
}
"""In NCCL's user guide (env.rst) or, of channels, its source (init.cc), and gloo's of PyTorch."""
NAMES = '["mlx5_0","mlx5_1","mlx5_2","mlx5_3","mlx5_4","mlx5_5","mlx5_6","mlx5_7"]'
ROCE = "megascale-12288xa100"


def lines_of(
    name: str, *changes: str, driver: bool = True, down: str = "lognormal:2:1"
) -> dict[str, EnvAdvice]:
    nodes = ["nodes=192"] if load_cluster(name).nodes > 192 else []  # several switches, and quick
    cluster = load_cluster(name, [*nodes, *changes])
    found = tune(cluster, link_habits(cluster, down, LinkRates(), JobTolerance(driver, 1.0, None)))
    assert len({line.name for line in found}) == len(found)
    return {line.name: line for line in found}


def values_of(name: str, *changes: str, driver: bool = True, down: str = "lognormal:2:1") -> dict[str, str]:
    found = lines_of(name, *changes, driver=driver, down=down)
    return {name: line.value for name, line in found.items() if line.what == "set"}


@pytest.mark.parametrize("name", [ROCE, "eos-3072xh100", "llama3-8192xh100"])
@pytest.mark.parametrize("transport", ["roce", "infiniband", "tcp"])
def test_every_line_has_a_documented_name_and_a_reason_and_a_value_only_where_it_is_set(name, transport):
    found = lines_of(name, f"nics.transport={transport}", "nics.interface=eth0", "nics.gid_index=3")
    assert set(found) <= DOCUMENTED
    for line in found.values():
        assert len(line.reason) > 15
        assert bool(line.value) == (line.what == "set")
        assert re.fullmatch(r"[\w=,.-]*", line.value)


def test_known_settings_of_the_file_are_set_and_unknown_ones_are_reported():
    bare = lines_of(ROCE)
    assert (
        bare["NCCL_IB_HCA"].what == bare["NCCL_IB_TC"].what == bare["GLOO_SOCKET_IFNAME"].what == "not known"
    )
    full = values_of(ROCE, f"nics.names={NAMES}", "nics.interface=bond0", "nics.traffic_class=106")
    assert full["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7"
    assert (full["NCCL_SOCKET_IFNAME"], full["GLOO_SOCKET_IFNAME"]) == ("=bond0", "bond0")
    assert full["NCCL_IB_TC"] == "106"


def test_queue_pairs_follow_from_the_fabric():
    """Where nothing is hashed, or switches choose by packet, more of them cost and give nothing."""
    hashed = values_of(ROCE)
    assert int(hashed["NCCL_IB_QPS_PER_CONNECTION"]) > 1
    assert hashed["NCCL_IB_SPLIT_DATA_ON_QPS"] == "1"
    for name, change in (
        ("megascale-256xa100", "nodes=32"),  # one set of switches
        ("eos-3072xh100", "nodes=192"),  # InfiniBand
        (ROCE, "nics.adaptive_routing=true"),
    ):
        found = lines_of(name, change)
        assert found["NCCL_IB_QPS_PER_CONNECTION"].what == "left alone"
        assert "NCCL_IB_SPLIT_DATA_ON_QPS" not in found
    assert values_of(ROCE, "nics.adaptive_routing=true")["NCCL_IB_ADAPTIVE_ROUTING"] == "1"


def test_nics_cross_where_they_share_a_switch_and_keep_to_their_rail_where_they_do_not():
    assert values_of(ROCE)["NCCL_CROSS_NIC"] == "0"
    assert values_of("llama3-8192xh100")["NCCL_CROSS_NIC"] == "1"
    assert lines_of("vegiant-32xv100-100g", "nics.transport=roce")["NCCL_CROSS_NIC"].what == "left alone"


def test_timeouts_follow_from_flaps_and_are_left_alone_where_nccls_own_is_as_good():
    short = values_of("eos-3072xh100", driver=False, down="0.5")
    long = lines_of("eos-3072xh100", driver=False, down="25")
    assert int(short["NCCL_IB_TIMEOUT"]) < 20
    assert long["NCCL_IB_TIMEOUT"].what == "left alone" or int(long["NCCL_IB_TIMEOUT"].value) >= 20


def test_buffers_grow_only_with_what_is_under_way():
    assert lines_of(ROCE)["NCCL_BUFFSIZE"].what == "left alone"
    far = values_of(ROCE, "links.network.latency_seconds=1e-3")["NCCL_BUFFSIZE"]
    assert int(far) > 2 * 25e9 * 2e-3 * 0.99 and int(far).bit_count() == 1


def test_sockets_are_more_only_on_fast_networks():
    slow = values_of("vegiant-32xv100-100g", "nics.transport=tcp", "links.network=10Gbps")
    assert "NCCL_SOCKET_NTHREADS" not in slow and slow["NCCL_IB_DISABLE"] == "1"
    fast = values_of("vegiant-32xa100-800g", "nics.transport=tcp")
    assert int(fast["NCCL_SOCKET_NTHREADS"]) * int(fast["NCCL_NSOCKS_PERTHREAD"]) <= 64


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("laptop", (), "more than one node"),
        ("vegiant-32xa100-800g", (), "nics.transport"),
        (ROCE, ('nics.names=["mlx5_0"]',), "8 of them"),
        (ROCE, ("nics.transport=ethernet",), "nics.transport"),
        (ROCE, ("nics.traffic_class=300",), "nics.traffic_class"),
    ],
)
def test_what_cannot_be_tuned_is_refused(name, changes, said):
    with pytest.raises(BadInputError, match=said):
        lines_of(name, *changes)


def test_nics_are_of_a_known_transport():
    with pytest.raises(ValueError, match="transport"):
        Nics.model_validate({})
