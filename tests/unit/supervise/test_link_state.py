"""If these fail, a link that is down is not seen, or an unused one gets a node evicted."""

import asyncio
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from myriad.supervise.agent.node_facts import LinkStateReader, chosen_interfaces, rdma_ports
from myriad.supervise.observations import LinkStatus
from myriad.telemetry.links.netlink import Kernel, LinkCounters, parse_link

UP, LOWER_UP = 1, 1 << 16


def message(flags: int, downs: int = 3, errors: tuple[int, int] = (4, 5), kind: int = 16) -> bytes:
    """As the kernel would write it."""

    def attribute(number: int, data: bytes) -> bytes:
        return struct.pack("=HH", 4 + len(data), number) + data.ljust(-(-len(data) // 4) * 4, b"\0")

    statistics = struct.pack("=24Q", 1, 2, 3, 4, *errors, 6, 7, *range(100, 116))
    body = struct.pack("=BxHiII", 0, 1, 4, flags, 0)
    body += attribute(3, b"eth0\0") + attribute(23, statistics) + attribute(48, struct.pack("=I", downs))
    return struct.pack("=LHHLL", 16 + len(body), kind, 0, 0, 0) + body


@pytest.mark.parametrize(("flags", "up"), [(UP | LOWER_UP, True), (UP, False), (0, False)])
def test_what_the_kernel_answers_is_read(flags: int, up: bool) -> None:
    """Without a carrier: the cable is out. Without either: it was taken down."""
    assert parse_link(message(flags)) == LinkCounters("eth0", up, 3, 4, 1, 2, 9, 13, 0, 3)


def test_an_error_and_anything_cut_short_are_no_links() -> None:
    whole = message(UP)
    assert parse_link(message(UP, kind=2)) is None and parse_link(b"") is None
    for size in range(16, len(whole)):
        parse_link(whole[:size])


def test_the_kernel_answers_within_an_event_loop() -> None:
    """Node agents ask in one."""

    async def ask() -> list[str]:
        kernel = Kernel()
        try:
            return [link.name for link in kernel.ask(["no such link", "lo"])]
        finally:
            kernel.close()

    assert asyncio.run(ask()) == ["lo"]


@pytest.mark.parametrize(
    ("gloo", "nccl", "found"),
    [
        ("", "", set()),
        ("eth1", "", {"eth1"}),
        ("eth1,ib0", "", {"eth1", "ib0"}),
        ("", "eth", {"eth0", "eth1"}),
        ("", "=eth0", {"eth0"}),
        ("", "^docker", set()),
        ("", "ib,eth1", {"ib0", "eth1"}),
    ],
)
def test_interfaces_that_the_environment_selects_for_ranks_are_watched(
    gloo: str, nccl: str, found: set[str]
) -> None:
    told = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    assert chosen_interfaces(told, ["lo", "eth0", "eth1", "ib0", "docker0"]) == found


def make_port(sys: Path, device: str, state: str, downed: int) -> None:
    folder = sys / "class/infiniband" / device / "ports/1"
    (folder / "counters").mkdir(parents=True)
    (folder / "state").write_text(state)
    for name, value in {"link_downed": downed, "symbol_error": 2, "port_rcv_errors": 1}.items():
        (folder / "counters" / name).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({}, ["mlx5_0:1", "mlx5_10:1"]),
        ({"NCCL_IB_HCA": "mlx5_0"}, ["mlx5_0:1"]),
        ({"NCCL_IB_HCA": "=mlx5_1"}, []),
        ({"NCCL_IB_HCA": "mlx5_1"}, ["mlx5_10:1"]),
        ({"NCCL_IB_HCA": "^mlx5_0:1"}, ["mlx5_10:1"]),
        ({"NCCL_IB_DISABLE": "1"}, []),
    ],
)
def test_ports_of_rdma_are_those_that_nccl_uses(
    tmp_path: Path, chosen: dict[str, str], names: list[str]
) -> None:
    make_port(tmp_path, "mlx5_0", "4: ACTIVE\n", 1)
    make_port(tmp_path, "mlx5_10", "1: DOWN\n", 0)
    found = rdma_ports(chosen, tmp_path)
    assert [port.name for port in found] == names
    assert {LinkStatus("mlx5_0:1", True, 1, 3)} >= set(found[:1]) - {LinkStatus("mlx5_10:1", False, 0, 3)}


def test_a_port_that_no_cable_was_ever_in_is_no_loss(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", "4: ACTIVE\n", 0)
    make_port(tmp_path, "mlx5_1", "1: DOWN\n", 0)
    watch = LinkStateReader(lambda: "lo", rdma=True, sys=tmp_path)
    assert [(link.name, link.up) for link in watch.poll()] == [("mlx5_0:1", True)]
    (tmp_path / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert [(link.name, link.up) for link in watch.poll()] == [("mlx5_0:1", False)]


def test_only_a_node_agent_that_asks_imports_pyroute2() -> None:
    """It takes 0.15 s and 23 MB: too much for the command line and for each rank."""
    program = "import sys, myriad.cli.main, myriad.train.worker, myriad.supervise.agent.node_agent"
    program += "; sys.exit('pyroute2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
