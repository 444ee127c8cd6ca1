"""If these fail, ranks and checks take this machine for another one."""

import os
from pathlib import Path

import pytest

from myriad.system.machine import cores_near_device, find_memory_nodes, processor_name


@pytest.fixture
def two_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``/sys`` of two NUMA nodes with a GPU on the second; this process may use cores 0, 1 and 9 to 11."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 9, 10, 11})
    for index, cores in enumerate(("0-3,16-19", "8-10,24", "100-103", "")):
        folder = tmp_path / f"devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for bus, index in (("1a", 1), ("1b", -1), ("1c", 2)):
        folder = tmp_path / f"bus/pci/devices/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{index}\n")
    return tmp_path


def test_memory_nodes_are_those_whose_cores_may_be_used(two_processors: Path) -> None:
    assert [(node.index, node.cpus) for node in find_memory_nodes(two_processors)] == [
        (0, (0, 1)),
        (1, (9, 10)),
    ]
    assert find_memory_nodes(two_processors / "none")[0].cpus == (0, 1, 9, 10, 11)


def test_the_cores_near_a_device_are_those_of_its_memory_node(two_processors: Path) -> None:
    assert cores_near_device("0000:1a:00.0", two_processors) == (9, 10)


@pytest.mark.parametrize("address", ["0000:1b:00.0", "0000:1c:00.0", "0000:ff:00.0"])
def test_a_device_of_no_known_node_or_of_one_whose_cores_are_taken_away_is_near_none(
    address: str, two_processors: Path
) -> None:
    assert cores_near_device(address, two_processors) == ()


def test_the_processor_has_its_makers_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: EPYC 9354 32-Core Processor\n")
    assert processor_name(tmp_path) == "EPYC 9354 32-Core Processor"
    assert processor_name(tmp_path / "none") == os.uname().machine
