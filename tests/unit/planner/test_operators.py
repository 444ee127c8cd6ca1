"""If these fail, a prediction breaks what any machine obeys: its peak, its bandwidth, more work takes
longer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.planner.cluster_config import Accelerator, Cluster
from myriad.planner.cost.collective_costs import (
    all_gather_seconds,
    all_reduce_seconds,
    group_along,
    message_seconds,
)
from myriad.planner.cost.operator_costs import flash_seconds, matmul_seconds, peak_flops, stream_seconds
from myriad.recipes.cluster import load_cluster

GPUS = load_cluster("megascale-12288xa100")
ACCELERATORS = [GPUS.accelerator, load_cluster("eos-3072xh100").accelerator]

sizes = st.integers(16, 40_000)
accelerators = st.sampled_from(ACCELERATORS)
value_bytes = st.sampled_from([2, 4])


@given(accelerators, sizes, sizes, sizes, value_bytes)
def test_no_product_beats_the_peak_or_the_memory(
    gpu: Accelerator, m: int, n: int, k: int, value: int
) -> None:
    seconds = matmul_seconds(gpu, m, n, k, value_bytes=value)
    assert seconds > 2 * m * n * k / peak_flops(gpu, value)
    assert seconds > value * (m * k + k * n + m * n) / gpu.memory_bytes_per_second


@given(accelerators, sizes, sizes, sizes, st.integers(2, 8))
def test_so_many_times_the_product_takes_longer(gpu: Accelerator, m: int, n: int, k: int, times: int) -> None:
    one = matmul_seconds(gpu, m, n, k, value_bytes=2)
    for larger in ((times * m, n, k), (m, times * n, k), (m, n, times * k)):
        assert matmul_seconds(gpu, *larger, value_bytes=2) >= one


@given(accelerators, st.lists(sizes, min_size=1, max_size=5), sizes, sizes)
def test_an_array_of_products_is_each_of_them(gpu: Accelerator, rows: list[int], n: int, k: int) -> None:
    together = matmul_seconds(gpu, np.array(rows, dtype=float), n, k, value_bytes=2)
    assert together == pytest.approx([matmul_seconds(gpu, m, n, k, value_bytes=2) for m in rows])


@pytest.mark.parametrize(("gpu", "measured"), list(zip(ACCELERATORS, (268e12, 792e12), strict=True)))
def test_a_large_product_alone_reaches_what_others_measured(gpu: Accelerator, measured: float) -> None:
    alone = gpu.model_copy(update={"sustained_ratio": 1.0})
    seconds = matmul_seconds(alone, 8192, 8192, 8192, value_bytes=2)
    assert 2 * 8192**3 / seconds == pytest.approx(measured, rel=0.03)


@given(st.integers(512, 32_768), st.integers(512, 32_768))
def test_long_sequences_use_a_flash_kernel_better(one: int, other: int) -> None:
    rates = [1e12 / flash_seconds(ACCELERATORS[0], 1e12, sequence, 128, 2) for sequence in (one, other)]
    assert (rates[0] <= rates[1]) == (one <= other)


def test_streams_take_their_bytes_and_their_launches() -> None:
    gpu = ACCELERATORS[0]
    assert stream_seconds(gpu, 0.0, 3) == pytest.approx(3 * gpu.launch_seconds)
    assert stream_seconds(gpu, 1e9, 0) == pytest.approx(
        1e9 / (gpu.memory_bytes_per_second * gpu.memory_ratio)
    )


group_sizes = st.sampled_from([1, 2, 4, 8, 16, 64, 192, 1024])
strides = st.sampled_from([1, 2, 8, 64])


@given(group_sizes, strides, st.floats(1, 1e10), st.floats(1.1, 10))
def test_collectives_of_more_bytes_take_longer(size: int, stride: int, count: float, more: float) -> None:
    group = group_along(GPUS, float(size), float(stride))
    for seconds in (all_gather_seconds, all_reduce_seconds):
        less, larger = float(seconds(group, count)), float(seconds(group, count * more))
        assert (less == larger == 0) if size == 1 else less < larger


@given(group_sizes.filter(lambda size: size > 1), strides, st.floats(1e3, 1e10), st.floats(1.1, 8))
def test_quicker_links_never_take_longer(size: int, stride: int, count: float, factor: float) -> None:
    links = GPUS.links
    assert links.network is not None
    quick = {
        "node": links.node.model_copy(update={"bytes_per_second": links.node.bytes_per_second * factor}),
        "network": links.network.model_copy(
            update={"bytes_per_second": links.network.bytes_per_second * factor}
        ),
    }
    quicker: Cluster = GPUS.model_copy(update={"links": links.model_copy(update=quick)})
    groups = [group_along(cluster, float(size), float(stride)) for cluster in (GPUS, quicker)]
    for seconds in (all_gather_seconds, all_reduce_seconds, message_seconds):
        assert float(seconds(groups[1], count)) < float(seconds(groups[0], count))


@pytest.mark.parametrize(("ranks", "published"), [(2, 5.44e-3), (4, 7.26e-3), (8, 8.19e-3)])
def test_an_all_reduce_in_a_node_takes_what_was_measured(ranks: int, published: float) -> None:
    """1 GiB, `tables/vtrain_nccl_allreduce_a100_nvlink_*gpu.csv`."""
    seconds = float(all_reduce_seconds(group_along(GPUS, float(ranks), 1.0), 2.0**30))
    assert seconds == pytest.approx(published, rel=0.05)


def test_a_group_inside_a_node_does_not_use_the_network() -> None:
    assert GPUS.links.network is not None
    within, across = group_along(GPUS, 8.0, 1.0), group_along(GPUS, 8.0, 8.0)
    assert float(within.bytes_per_second) > 4 * float(across.bytes_per_second)
    several = group_along(GPUS, 16.0, 1.0)  # 8 in each node: eight ports for one ring
    assert float(several.bytes_per_second) > 4 * float(across.bytes_per_second)
