"""If these fail, a machine comes back from repair with another GPU unnoticed, or `top --nodes` shows what
stood there last week."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from myriad.cli.top.top_command import register
from myriad.dashboard.node_table import node_rows, read_facts
from myriad.job import load_job
from myriad.launchers.supervised_run import expected_traffic
from myriad.supervise.agent.node_facts import node_facts
from myriad.supervise.driver.node_inventory import NodeInventory, read_nodes
from myriad.supervise.observations import GpuFacts, NicFacts, NodeFacts
from myriad.supervise.policy.policy_actions import Notice

GPUS = tuple(GpuFacts("NVIDIA H100 80GB HBM3", f"16523{k}", f"0000:{k:02x}:00.0") for k in range(2))
FACTS = NodeFacts(
    node=3,
    host="gpu-17",
    address="10.0.0.17",
    pod="job-7-x2vkq",
    cpu="Xeon 8480 x 112",
    memory_bytes=2**41,
    gpus=GPUS,
    nics=(NicFacts("mlx5_0", "a088:c203:0045:1c2e", "MT4129", "28.39.1002", 5e10),),
    versions={"kernel": "5.15.0", "nvidia": "550.54.15"},
)


def test_hardware_that_changes_behind_a_host_is_reported_with_what_was_and_what_is(tmp_path: Path) -> None:
    """Also by the next driver, from the file."""
    book = NodeInventory(tmp_path)
    assert book.record(FACTS) is None
    book.write(FACTS)
    changed = replace(
        FACTS,
        gpus=(GPUS[0], replace(GPUS[1], serial="99999")),
        nics=(replace(FACTS.nics[0], firmware="28.40.1000"),),
        versions={"kernel": "5.15.0", "nvidia": "560.1"},
    )
    for known in (book, NodeInventory(tmp_path)):
        notice = known.record(changed)
        assert notice is not None and (notice.what, notice.node, notice.level) == ("hardware", 3, "warning")
        assert (
            "GPU 0000:01:00.0: NVIDIA H100 80GB HBM3 165231 -> NVIDIA H100 80GB HBM3 99999" in notice.problem
        )
        assert "firmware of NIC mlx5_0: 28.39.1002 -> 28.40.1000" in notice.problem
        assert "version of nvidia: 550.54.15 -> 560.1" in notice.problem
    assert book.record(changed) is None
    assert book.record(replace(changed, address="10.0.0.18", pod="job-7-abcde")) is None, "reached elsewhere"
    lost = book.record(replace(changed, gpus=GPUS[:1]))
    assert lost is not None and "165231" not in lost.problem and "99999 -> none" in lost.problem
    other = book.record(replace(FACTS, host="gpu-18", gpus=()))
    assert other is not None and other.level == "info" and other.problem.endswith("gpu-17 -> gpu-18")
    (tmp_path / "node-3.json").write_text("{" * 9999)
    assert NodeInventory(tmp_path).record(FACTS) is None, "a damaged file is as none"


def test_what_comes_and_goes_in_a_machine_is_no_change_of_hardware(tmp_path: Path) -> None:
    """Containers' bridges, another queue of IPoIB after a boot, and NVML that did not answer once."""
    ib = ":".join(
        ["80", "00", "02", "08", "fe", "80", *["00"] * 6, "a0", "88", "c2", "03", "00", "45", "1c", "2e"]
    )
    nics = (
        *FACTS.nics,
        NicFacts("eth0", "b8:ce:f6:12:34:56", "mlx5_core", "1", 1e9),
        NicFacts("ib0", ib, "", "", 0),
    )
    facts = replace(FACTS, nics=(*nics, NicFacts("docker0", "02:42:ac:11:00:02", "bridge", "", 0)))
    book = NodeInventory(tmp_path)
    assert book.record(facts) is None
    virtual = (NicFacts("br-1a2b", "8e:11:22:33:44:55", "bridge", "", 0), NicFacts("tun0", "", "tun", "", 0))
    after_boot = (*nics[:-1], replace(nics[-1], address=ib.replace("80:00:02:08", "80:00:02:09")))
    without_nvml = tuple(replace(one, serial=f"GPU-{one.serial}") for one in GPUS)
    assert book.record(replace(facts, nics=(*after_boot, *virtual))) is None
    assert book.record(replace(facts, gpus=without_nvml)) is None and book.record(facts) is None
    lost = book.record(replace(facts, nics=facts.nics[:1], gpus=GPUS[:1]))
    assert lost is not None and "NIC eth0: b8:ce:f6:12:34:56 -> none" in lost.problem
    assert "NVIDIA H100 80GB HBM3 165231 -> none" in lost.problem


def test_gpus_nics_and_drivers_are_read_from_the_kernel(tmp_path: Path) -> None:
    """The files have the form that NVIDIA's driver and mlx5 write."""
    files = {
        "proc/driver/nvidia/gpus/0000:0B:00.0/information": "Model: \t\t NVIDIA A100-SXM4-40GB\n"
        "IRQ:   \t\t 241\n"
        "GPU UUID: \t GPU-b1a9ef0c-8f2b-7b4d-2f0a-6f2a8f1d8c11\nVideo BIOS: \t 92.00.45.00.03\n",
        "sys/class/infiniband/mlx5_2/fw_ver": "20.31.1014\n",
        "sys/class/infiniband/mlx5_2/hca_type": "MT4123\n",
        "sys/class/infiniband/mlx5_2/node_guid": "0c42:a103:0011:2233\n",
        "sys/class/infiniband/mlx5_2/ports/1/rate": "200 Gb/sec (4X HDR)\n",
        "sys/module/nvidia/version": "470.57.02\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = node_facts(1, "10.0.0.1", root=tmp_path, environment={"POD_NAME": "trainer-1"})
    assert found.pod == "trainer-1" and found.versions["nvidia"] == "470.57.02" and found.memory_bytes > 0
    (gpu,) = found.gpus
    assert (gpu.model, gpu.bus) == ("NVIDIA A100-SXM4-40GB", "0000:0b:00.0") and gpu.serial.startswith(
        "GPU-b1a9"
    )
    assert found.nics[-1] == NicFacts("mlx5_2", "0c42:a103:0011:2233", "MT4123", "20.31.1014", 25e9)


def test_top_shows_nodes_also_where_files_are_damaged(tmp_path: Path) -> None:
    import typer

    folder = tmp_path / "run" / "nodes"
    (tmp_path / "run" / "job.toml").parent.mkdir()
    (tmp_path / "run" / "job.toml").write_text("")
    NodeInventory(folder).write(FACTS)
    (folder / "node-4.json").write_text('{"gpus": [3], "nics": {}, "host": 7}')
    (folder / "node-5.json").write_text("[" * 10**5)
    os.symlink("/etc/passwd", folder / "node-6.json")
    counters = tmp_path / "run" / "counters"
    counters.mkdir()
    fields = {"links": ["received_bytes", "sent_bytes"], "tcp": ["retransmitted_segments"], "rdma": []}
    lines = [{"fields": fields, "speed_bytes_per_second": {}}]
    lines += [
        {
            "time": time.time() - 3 + k,
            "links": {"eth0": [10**6 * k, 0], "lo": [7 * k, 7]},
            "tcp": [5 * k],
            "rdma": {},
        }
        for k in range(3)
    ]
    (counters / "node-3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {
        "time": 1.0,
        "event": "health",
        "what": "traffic",
        "level": "warning",
        "node": 3,
        "problem": "slow",
    }
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(event) + "\n")
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    done = CliRunner().invoke(app, ["top", str(tmp_path / "run"), "--nodes", "--json"])
    first, second = json.loads(done.stdout)["nodes"]
    assert (first["node"], first["host"], first["gpus"]) == (3, "gpu-17", "2 x NVIDIA H100 80GB HBM3")
    assert first["received_bytes_per_second"] == pytest.approx(10**6, rel=0.01)
    assert first["sent_again_per_second"] == pytest.approx(5, rel=0.01)
    assert "slow" in first["health"] and second["host"] == "" and second["gpu_serials"] == []
    shown = CliRunner().invoke(app, ["top", str(tmp_path / "run"), "--nodes", "--once"]).stdout
    assert "gpu-17" in shown and "28.39.1002" in shown
    assert node_rows(read_facts(tmp_path), {}, {}, 0.0) == []


@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [
        (["layout.dp=2", "layout.zero=1"], 2, True),
        (["layout.dp=1"], 1, False),
        (["layout.pp=2", "layout.dp=1"], 2, True),
        (["layout.cp=2", "layout.dp=1"], 2, True),
    ],
)
def test_expected_traffic_of_a_node_follows_from_the_program(
    layout: list[str], nodes: int, expected: bool
) -> None:
    """Among two replicas: each node receives what the other sends; a pipeline sends activations one way."""
    job = load_job("tiny", [*layout, f"resilience.nodes={nodes}"])
    found = expected_traffic(job, nodes)
    assert bool(found) is expected
    if found:
        (sent, received), (other_sent, other_received) = found
        assert sent == other_received > 0 and received == other_sent > 0
        model = job.model
        values = 4 * model.sequence * model.hidden * job.train.global_batch
        if "layout.pp=2" in layout:
            assert sent >= values and received >= values, "activations forth, gradients back"
        if "layout.cp=2" in layout:
            keys = model.layers * 2 * values / 2
            assert sent >= 2 * keys, "keys and values of each block, forward and backward"


def test_nodes_that_report_at_once_hold_up_no_decision_and_are_written_once(tmp_path: Path) -> None:
    """1,536 nodes report within a second of a start, and again to each new driver."""
    goes_on, written = threading.Event(), list[int]()

    class SlowDisk(NodeInventory):
        def write(self, facts: NodeFacts) -> None:
            goes_on.wait(60)
            written.append(facts.node)
            super().write(facts)

    book = SlowDisk(tmp_path)
    for node in range(1200):
        book.enter(replace(FACTS, node=node))
    assert book.take() == [], "the caller was not held up"
    goes_on.set()
    wait_until(lambda: len(written) == 1200 and book.wait_written())
    assert len(read_nodes(tmp_path)) == 1200
    again = SlowDisk(tmp_path)
    for node in range(1200):
        again.enter(
            replace(FACTS, node=node, versions={"kernel": "6.1"}) if node == 7 else replace(FACTS, node=node)
        )
    notices: list[Notice] = []
    wait_until(lambda: again.wait_written() and bool(notices.extend(again.take()) or notices))
    assert [one.node for one in notices] == [7] and written[1200:] == [7]


def test_facts_that_a_full_disk_refused_are_written_when_the_node_reports_again(tmp_path: Path) -> None:
    book = NodeInventory(tmp_path / "nodes")
    (tmp_path / "nodes").write_text("no folder")
    book.enter(FACTS)
    wait_until(book.wait_written)
    (tmp_path / "nodes").unlink()
    book.enter(FACTS)
    wait_until(book.wait_written)
    assert read_nodes(tmp_path / "nodes") == {3: FACTS} and book.take() == []


def wait_until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)
